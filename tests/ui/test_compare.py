"""Runs chosen on Home and compared, in a browser."""

from __future__ import annotations

import pytest

from tests.app.conftest import write_run
from tests.app.screens.test_compare import write_predictions

sync_api = pytest.importorskip("playwright.sync_api")
expect = sync_api.expect
pytestmark = pytest.mark.ui


def test_two_runs_are_compared(page, app, folder):
    for number in (1, 2):
        run = write_run(folder / "runs", f"job-{number}", test=float(number))
        write_predictions(run, float(number))
    page.goto(app.url)
    for number in (1, 2):
        page.get_by_label(f"Choose job-{number}").check()
    expect(page.locator("#chosen-count")).to_have_text("2 runs chosen")
    page.click("#compare")
    expect(page.locator("h1")).to_have_text("2 runs compared")
    expect(page.locator("#curves canvas")).to_be_visible()
    expect(page.locator("#curves .legend")).to_contain_text("job-2")
    expect(page.locator("#drawn")).to_have_text("2,000 rows")
    page.click("[data-x=seconds]")
    page.click("[data-show=errors]")
    expect(page.locator("#predictions .legend")).not_to_contain_text("true value")
    plot = page.locator("#predictions .u-over")
    plot.scroll_into_view_if_needed()
    box = plot.bounding_box()
    page.mouse.move(box["x"] + 100, box["y"] + 50)
    page.mouse.down()
    page.mouse.move(box["x"] + 200, box["y"] + 60, steps=5)
    page.mouse.up()
    expect(page.locator("#whole")).to_be_visible()
    expect(page.locator("#drawn")).not_to_have_text("2,000 rows")
    page.click("#whole")
    expect(page.locator("#drawn")).to_have_text("2,000 rows")


def test_home_is_used_by_keyboard(page, app, folder):
    for number in range(3):
        write_run(folder / "runs", f"job-{number}", test=float(number + 1))
    page.goto(app.url)
    expect(page.locator("#runs tbody tr")).to_have_count(3)
    page.locator("th[data-sort=test] button").focus()
    page.keyboard.press("Enter")
    page.keyboard.press("/")
    page.keyboard.type("job")
    page.keyboard.press("ArrowDown")
    expect(page.locator("#runs tbody tr a").first).to_be_focused()
    page.keyboard.press("x")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowUp")
    page.keyboard.press("x")
    expect(page.locator("#chosen-count")).to_have_text("2 runs chosen")
    expect(page.locator("tr.chosen")).to_have_count(2)
    page.keyboard.press("c")
    expect(page.locator(".compared li")).to_have_count(2)
    expect(page.locator(".compared")).not_to_contain_text("job-2")
    page.go_back()
    page.get_by_label("Choose job-2").check()
    page.click("#remove")
    expect(page.locator("#removal-command")).to_contain_text("slipstream runs remove")
    page.click("#removal-go")
    expect(page.locator("#runs tbody tr")).to_have_count(2)
    assert not (folder / "runs" / "job-2").exists()
