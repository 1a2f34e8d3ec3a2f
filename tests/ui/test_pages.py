"""What the pages do with names, tags, the keyboard and two tabs."""

from __future__ import annotations

import pytest

from tests.app.conftest import write_run

sync_api = pytest.importorskip("playwright.sync_api")
expect = sync_api.expect
pytestmark = pytest.mark.ui
PAGES = ("/", "/data", "/data?file=load.csv", "/new?start=demo")
MARKUP = "<img src=x onerror=document.title='hacked'>"


def test_markup_in_names_tags_and_notes_is_text(page, app, folder):
    run = write_run(folder / "runs", "job-1")
    run.rename(run.with_name(MARKUP))
    page.goto(app.url)
    row = page.locator("#runs tbody tr")
    expect(row).to_contain_text(MARKUP)
    row.locator("text=Tag").click()
    page.fill("#tags", f"good, {MARKUP[:39]}")
    page.fill("#remark", f"{MARKUP}\nsecond line")
    page.click("#save")
    expect(row.locator(".tag")).to_have_count(2)
    page.reload()
    expect(row).to_contain_text("second line")
    row.locator("th a").click()
    expect(page.locator("h1")).to_have_text(MARKUP)
    assert page.title().startswith(MARKUP)
    assert page.locator("main img").count() == 0


def test_runs_are_found_sorted_and_filtered(page, app, folder):
    for number in range(3):
        write_run(folder / "runs", f"job-{number}", test=float(number + 1), finished=number != 1)
    page.goto(app.url)
    rows = page.locator("#runs tbody tr")
    expect(rows).to_have_count(3)
    page.keyboard.press("/")
    page.keyboard.type("job-2")
    expect(rows).to_have_count(1)
    expect(page.locator("#count")).to_have_text("1 of 3 runs")
    page.fill("#search", "")
    page.select_option("#state", "stopped")
    expect(rows).to_have_count(1)
    page.select_option("#state", "")
    page.locator("th[data-sort=test] button").click()
    expect(rows.first).to_contain_text("job-0")
    page.locator("th[data-sort=test] button").click()
    expect(rows.first).to_contain_text("job-2")


def test_two_tabs_show_the_same(page, app, folder):
    write_run(folder / "runs", "job-1", finished=False)
    page.goto(app.url)
    other = page.context.new_page()
    other.goto(f"{app.root}/run/runs/job-1")
    page.goto(f"{app.root}/run/runs/job-1")
    for tab in (page, other):
        expect(tab.locator("#f-epoch")).to_have_text("2 of 2")
        expect(tab.locator("#run")).to_have_attribute("data-lines", "3")


def test_every_control_has_a_label(page, app, folder):
    write_run(folder / "runs", "job-1")
    page.goto(app.url)
    for path in (*PAGES, "/run/runs/job-1", "/result/runs/job-1"):
        page.goto(app.root + path)
        page.wait_for_timeout(300)
        for control in page.locator("input:not([type=hidden]), select, textarea, button").all():
            name = control.evaluate(
                "node => node.getAttribute('aria-label') || node.textContent.trim() ||"
                " [...(node.labels || [])].map(one => one.textContent).join('').trim()"
            )
            assert name, (path, control.evaluate("node => node.outerHTML"))


def test_no_page_is_wider_than_a_phone(page, app, folder):
    write_run(folder / "runs", "job-1")
    page.set_viewport_size({"width": 400, "height": 800})
    page.goto(app.url)
    for path in (*PAGES, "/run/runs/job-1", "/result/runs/job-1"):
        page.goto(app.root + path)
        page.wait_for_timeout(500)
        assert page.evaluate("document.documentElement.scrollWidth") <= 400, path
