"""A small search and a pre-training, by clicks, and what comes after them."""

from __future__ import annotations

import json

import pytest

from tests.ui.conftest import fill

sync_api = pytest.importorskip("playwright.sync_api")
expect = sync_api.expect
expect.set_options(timeout=180_000)
pytestmark = pytest.mark.ui


def choose_data(page):
    page.select_option("#data", "load.csv")
    expect(page.locator("#findings")).to_contain_text("600 rows")


def test_the_best_trial_of_a_search_is_sent_to_a_new_run(page, app):
    page.goto(app.url)
    page.click("nav >> text=Search")
    page.click("text=Choose data")
    choose_data(page)
    fill(page, {"data.context": "24", "data.horizon": "2", "model.kind": "linear"})
    fill(page, {"train.epochs": "1", "tune.trials": "3"})
    fill(page, {"tune.retrain": "1", "tune.retrain_seeds": "2"})
    expect(page.locator(".space-row [data-key=setting]")).to_have_count(3)  # the usual space
    row = page.locator(".space-row").first
    row.locator("[data-key=low]").fill("5")
    expect(row.locator(".problem")).to_contain_text("low = 5 is above high")
    expect(page.locator("#go")).to_be_disabled()
    row.locator("[data-key=low]").fill("1e-4")
    page.select_option("#add", "train.optimizer")
    expect(page.locator(".space-row").last.locator("[data-key=choices]")).not_to_have_value("")
    expect(page.locator("#ready")).to_have_text("Ready.")
    expect(page.locator("#toml")).to_contain_text('"train.optimizer" = [')
    page.click("#go")
    page.wait_for_url("**/search/runs/**")
    expect(page.locator("#state")).to_have_text("finished")
    expect(page.locator("#trials tbody tr")).to_have_count(3)
    expect(page.locator("#result")).to_contain_text("Run with the chosen settings")
    expect(page.locator("#importances li")).not_to_have_count(0)
    axis = page.locator("#parallel .axis").last
    axis.focus()
    page.keyboard.press("ArrowDown")  # the better half of the scores
    expect(page.locator("#selected")).to_contain_text("of 3 selected")
    page.keyboard.press("Escape")
    expect(page.locator("#selected")).to_have_text("3")
    page.click("#more")
    page.fill("#more-total", "4")
    page.click("#more-go")
    expect(page.locator("#f-done")).to_have_text("4 of 4")
    expect(page.locator("#state")).to_have_text("finished")
    trials = json.loads((app.find_run() / "trials.json").read_text())
    best = min(trials, key=lambda trial: trial["value"])["params"]
    page.click("#best")
    expect(page.locator("#ready")).to_have_text("Ready.")
    assert float(page.input_value("#set-train-lr")) == best["train.lr"]
    assert page.input_value("#data") == "load.csv"


def test_a_run_is_fine_tuned_from_a_pre_trained_encoder(page, app):
    page.goto(app.url)
    page.click("nav >> text=Pre-train")
    choose_data(page)
    fill(page, {"data.context": "16", "model.kind": "gru", "model.hidden": "8"})
    fill(page, {"model.layers": "1", "train.epochs": "1"})
    expect(page.locator("#ready")).to_have_text("Ready.")
    expect(page.locator("#command")).to_contain_text("slipstream pretrain")
    page.click("#go")
    page.wait_for_url("**/run/**")
    expect(page.locator("#state")).to_have_text("finished")
    page.click("#fine-tune")
    expect(page.locator("#set-train-init_from")).to_have_value(str(app.find_run()))
    expect(page.locator("#set-data-context")).to_have_value("16")
    expect(page.locator("#set-model-hidden")).to_have_value("8")
    chip = page.locator("[data-setting='data.targets'] .chips button", has_text="load")
    if chip.get_attribute("aria-pressed") != "true":  # columns are buttons once the file is read
        chip.click()
    fill(page, {"data.horizon": "1"})
    expect(page.locator("#toml")).to_contain_text("horizon = 1")
    expect(page.locator("#ready")).to_have_text("Ready.")
    expect(page.locator("#toml")).to_contain_text("init_from")
