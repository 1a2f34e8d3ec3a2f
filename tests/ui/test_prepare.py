"""A file with problems becomes a config by clicks, and the form of a new run."""

from __future__ import annotations

import math

import pytest

sync_api = pytest.importorskip("playwright.sync_api")
expect = sync_api.expect
pytestmark = pytest.mark.ui


def test_a_file_is_prepared_by_clicks_and_continues_in_the_form(page, app, folder):
    rows = [
        f"2024-01-{1 + hour // 24 + (hour > 400):02d} {hour % 24:02d}:00,"
        f"{math.sin(hour / 4):.4f},{math.cos(hour / 9):.4f}"
        for hour in range(600)
    ]
    (folder / "gap.csv").write_text("\n".join(["time,load,wind", *rows]) + "\n")
    page.goto(app.url)
    page.goto(f"{app.root}/prepare?file=gap.csv")
    problem = page.locator("#problems li.gaps")
    expect(problem).to_contain_text("1 gap")
    problem.locator("text=Take rows as they follow").click()
    expect(problem).to_have_count(0)
    page.locator("[aria-label='Role of wind'] label.future").click()
    expect(page.locator("#toml")).to_contain_text('future = ["wind"]')
    page.select_option("#kind", "clip")
    page.click("#add")
    step = page.locator("#steps > li")
    expect(step).to_have_class("wrong")
    step.locator(".chips button", has_text="load").click()
    expect(step.locator("> .problem")).to_contain_text("low and high are both missing")
    step.locator("[data-key=high]").fill("0.5")
    expect(step).not_to_have_class("wrong")
    step.locator("[data-key=high]").fill("0.4")
    expect(page.locator("#toml")).to_contain_text("high = 0.4")
    step.locator("text=Preview").click()
    expect(page.locator("#p-chart:not(.stale) .legend")).to_contain_text("after")
    expect(page.locator("#p-about")).to_contain_text("rows 0 to 599 of gap.csv")
    expect(page.locator("#sets tbody tr").first).to_contain_text("420")
    with page.expect_download() as started:
        page.click("[data-rows='.csv']")
    assert started.value.suggested_filename == "gap-rows.csv"
    lines = started.value.path().read_text().splitlines()
    assert lines[0] == '"series","row","time","wind","load","split"'
    assert len(lines) == 601
    assert lines[-1].endswith('"test"')
    page.click("#continue")
    expect(page.locator("h1")).to_have_text("New run")
    expect(page.locator("#ready")).to_contain_text("Ready")
    expect(page.locator("#toml")).to_contain_text('step = "clip"')
    expect(page.locator("[data-setting='data.gap_tolerance'] input")).to_have_value("inf")
