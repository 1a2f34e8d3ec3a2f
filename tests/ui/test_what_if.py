"""What-if in a browser: sliders train, and the history has what was tried."""

from __future__ import annotations

import pytest

sync_api = pytest.importorskip("playwright.sync_api")
expect = sync_api.expect
expect.set_options(timeout=180_000)
pytestmark = pytest.mark.ui


def test_sliders_train_and_the_history_marks_the_best(page, app):
    page.goto(app.url)
    page.goto(f"{app.root}/what-if")
    page.select_option("#base", "data:load.csv")
    with page.expect_response(lambda answer: "/api/what-if/" in answer.url):
        page.click("#go")  # the page is ready when it asks for the history
    width = page.locator('[data-setting="model.hidden"]')
    width.locator("input[type=range]").focus()
    page.keyboard.press("ArrowLeft")
    expect(page.locator("#history tbody tr")).to_have_count(1)
    rate = page.locator('[data-setting="train.lr"]')
    rate.locator("input[type=range]").focus()
    page.keyboard.press("ArrowRight")
    expect(page.locator("#history tbody tr")).to_have_count(2)
    expect(page.locator(".best-mark")).to_have_count(1)
    expect(page.locator("#plots figure")).to_have_count(1)  # one setting was varied between them
    expect(page.locator("#plots .dot.best")).to_have_count(1)
    chosen = rate.locator("input[type=number]").input_value()
    page.locator("#history").get_by_text("try 1").click()
    assert rate.locator("input[type=number]").input_value() != chosen
    page.reload()  # the history is the folder's
    expect(page.locator("#history tbody tr")).to_have_count(2)
    page.click("text=Make it a run")
    expect(page.locator("#set-train-lr")).to_have_value(chosen)
    expect(page.locator("#data")).to_have_value("load.csv")
