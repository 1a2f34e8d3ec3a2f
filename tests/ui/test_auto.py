"""`slipstream auto` by clicks: started from a data file, and its leaderboard."""

from __future__ import annotations

import json

import pytest

sync_api = pytest.importorskip("playwright.sync_api")
expect = sync_api.expect
expect.set_options(timeout=180_000)
pytestmark = pytest.mark.ui


def test_the_best_model_is_found_from_a_data_file(page, app):
    page.goto(app.url)
    page.goto(f"{app.root}/new")
    assert page.locator("#auto-go").is_disabled()
    page.select_option("#data", "load.csv")
    expect(page.locator("#ready")).to_have_text("Ready.")
    chip = page.locator("[data-setting='data.targets'] .chips button", has_text="load")
    if chip.get_attribute("aria-pressed") != "true":
        chip.click()
    expect(page.locator("#ready")).to_have_text("Ready.")
    page.fill("#auto-minutes", "0.01")
    page.click("#auto-go")
    expect(page.locator("body")).to_contain_text("minutes is 0.01; it should be a number from 0.1")
    page.fill("#auto-minutes", "0.3")
    expect(page.locator("#auto-command")).to_contain_text("slipstream auto load.toml --out ")
    expect(page.locator("#auto-command")).to_contain_text(" --minutes 0.3 --prefer best")
    page.check("#auto-refit")
    expect(page.locator("#auto-command")).to_contain_text(" --prefer best --refit")
    page.click("#auto-go")
    page.wait_for_url("**/search/runs/**")
    expect(page.locator("#state")).to_have_text("finished")
    expect(page.locator("#verdict")).to_contain_text("on the test set")
    summary = app.read_metrics(app.find_run())
    rows = page.locator("#leaderboard tbody tr")
    expect(rows).to_have_count(len(summary["leaderboard"]))
    weighted = [row for row in summary["leaderboard"] if row["weight"] > 0]
    expect(page.locator("#leaderboard tr.own")).to_have_count(len(weighted))
    expect(page.locator("#f-done")).not_to_contain_text("of")
    plan = json.loads((app.find_run() / "auto.json").read_text())
    assert (plan["prefer"], plan["refit"]) == ("best", True)
    expect(page.locator("#leaderboard thead")).to_contain_text("C flash")
    if summary["refit"]["state"] == "done":  # else the time was too short
        untested = "untested: trained on all rows"
        expect(page.locator(".findings")).to_contain_text(untested)
        page.click("#open-refit")
        page.wait_for_url("**/result/**")
        expect(page.locator("main")).to_contain_text(untested)
        page.go_back()
    page.click("#open-model")
    page.wait_for_url("**/result/**")
    expect(page.locator("main")).to_contain_text("MAE")
    page.goto(app.root)
    expect(page.locator("#runs")).to_contain_text("auto")
