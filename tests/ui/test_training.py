"""From data to a report by clicks; stopped, resumed, killed and watched twice."""

from __future__ import annotations

import re
import signal
import subprocess
import sys

import pytest

from slipstream import runs
from tests.logs import read_lines
from tests.ui.conftest import fill

sync_api = pytest.importorskip("playwright.sync_api")
expect = sync_api.expect
expect.set_options(timeout=180_000)
pytestmark = pytest.mark.ui
LONG = {"train.epochs": "40", "model.hidden": "64", "train.patience": "off", "train.batch": "16"}
"""Settings of a run that takes long enough to be stopped"""
ENDLESS = LONG | {"train.epochs": "5000"}
"""Settings of a run that only ends because it is stopped"""


def choose_data(page, app, **values):
    page.goto(f"{app.root}/new")
    page.select_option("#data", "load.csv")
    expect(page.locator("#findings")).to_contain_text("600 rows, 3 columns")
    named = {name.replace("__", "."): value for name, value in values.items()}
    fill(page, {"data.context": "24", "data.horizon": "2"} | named)
    for name, value in named.items():  # the text follows the form a moment later
        line = re.compile(rf'^{name.partition(".")[2]} = "?{value}"?$', re.MULTILINE)
        expect(page.locator("#toml")).to_have_text(line)
    expect(page.locator("#ready")).to_have_text("Ready.")


def start(page):
    page.click("#go")
    page.wait_for_url("**/run/**")


def wait_for_epoch(page, least):
    page.wait_for_selector("#loss canvas", state="attached")
    expect(page.locator("#f-best")).not_to_have_text("–")
    while float(page.inner_text("#f-epoch").split()[0]) < least:
        page.wait_for_timeout(50)


def test_a_csv_becomes_a_report_by_clicks_only(page, app):
    page.goto(app.url)
    expect(page).to_have_url(f"{app.root}/")
    page.click("text=Choose data")
    page.select_option("#data", "load.csv")
    chips = page.locator("[data-setting='data.targets'] .chips button")
    expect(chips).to_have_count(2)
    if chips.nth(0).get_attribute("aria-pressed") != "true":
        chips.nth(0).click()
    if chips.nth(1).get_attribute("aria-pressed") == "true":
        chips.nth(1).click()
    fill(page, {"train.lr": "-1"})
    expect(page.locator("[data-setting='train.lr'] .problem")).to_have_text(
        'train.lr is -1; it should be greater than 0 or "auto"'
    )
    expect(page.locator("#go")).to_be_disabled()
    fill(page, {"train.lr": "0.01", "train.epochs": "2", "model.kind": "linear"})
    expect(page.locator("#toml")).to_contain_text('targets = ["load"]')
    start(page)
    expect(page.locator("#state")).to_have_text("finished")
    expect(page.locator("#result tr.own")).to_be_visible()
    expect(page.locator("#result")).to_contain_text("ridge")
    with page.context.expect_page() as opened:
        page.click("text=Open the report")
    expect(opened.value.locator("h1")).to_contain_text("load")
    with page.expect_download() as saved:
        page.click("a[href^='/download/metrics.json/']")
    assert saved.value.suggested_filename.endswith("-metrics.json")
    page.goto(app.root)
    expect(page.locator("#runs tbody tr")).to_have_count(1)
    expect(page.locator("#runs tbody")).to_contain_text("finished")


def test_a_run_that_is_stopped_and_resumed_equals_an_unbroken_one(page, app, folder):
    page.goto(app.url)
    choose_data(page, app, **{key.replace(".", "__"): value for key, value in LONG.items()})
    config = page.inner_text("#toml")
    start(page)
    wait_for_epoch(page, 2)
    page.click("#stop")
    expect(page.locator("#state")).to_have_text("stopped")
    page.click("#resume")
    expect(page.locator("#state")).to_have_text("finished")
    expect(page.locator("#events")).to_contain_text("resumed from step")
    (folder / "same.toml").write_text(config)
    out = folder / "unbroken"
    command = [sys.executable, "-m", "slipstream", "train", str(folder / "same.toml")]
    subprocess.run([*command, "--out", str(out), "--quiet"], check=True)
    (other,) = out.glob("*-*Z")
    one, two = (app.read_metrics(run)["metrics"] for run in (app.find_run(), other))
    assert one == two


def test_a_page_shows_the_whole_curve_after_the_server_was_killed(page, app, browser):
    page.goto(app.url)
    choose_data(page, app, **{key.replace(".", "__"): value for key, value in LONG.items()})
    start(page)
    wait_for_epoch(page, 1)
    app.kill(signal.SIGKILL)
    expect(page.locator("#connection")).to_be_visible()
    app.start()
    page.goto(app.url)
    run = app.find_run()
    page.goto(f"{app.root}/run/runs/{run.name}")
    expect(page.locator("#state")).to_have_text("finished")
    expect(page.locator("#f-epoch")).to_have_text("40 of 40")
    lines = len(list(read_lines(runs.Run(run))))
    expect(page.locator("#run")).to_have_attribute("data-lines", str(lines))
    other = browser.new_context(viewport={"width": 400, "height": 800})
    tab = other.new_page()
    tab.goto(app.url)
    tab.goto(f"{app.root}/run/runs/{run.name}")
    expect(tab.locator("#run")).to_have_attribute("data-lines", str(lines))
    other.close()


def test_a_tab_that_lost_its_server_goes_on_where_it_was(page, folder):
    """The same port and token are not given again, so the connection is cut instead."""
    from tests.ui.conftest import App

    app = App(folder)
    try:
        page.goto(app.url)
        choose_data(page, app, **{key.replace(".", "__"): value for key, value in LONG.items()})
        start(page)
        wait_for_epoch(page, 1)
        page.context.set_offline(True)
        page.wait_for_timeout(500)
        page.context.set_offline(False)
        expect(page.locator("#state")).to_have_text("finished")
        lines = len(list(read_lines(runs.Run(app.find_run()))))
        expect(page.locator("#run")).to_have_attribute("data-lines", str(lines))
    finally:
        app.end()


def test_jobs_wait_their_turn_and_can_be_cancelled(page, app):
    page.goto(app.url)
    for _ in range(2):
        choose_data(page, app, **{key.replace(".", "__"): value for key, value in ENDLESS.items()})
        page.click("#go")
        page.wait_for_url(lambda url: "/run/" in url or "/job/" in url)
    expect(page.locator("#progress")).to_contain_text("Waits for its turn")
    page.goto(app.root)
    expect(page.locator(".jobs li")).to_have_count(2)
    page.locator(".jobs li", has_text="waits").locator("text=Cancel").click()
    expect(page.locator(".jobs li")).to_have_count(1)
    page.locator(".jobs li").locator("text=Stop").click()
    expect(page.locator(".jobs li")).to_have_count(0)
    expect(page.locator("#runs tbody")).to_contain_text("stopped")


def test_a_form_that_does_not_fit_its_data_cannot_start(page, app):
    page.goto(app.url)
    choose_data(page, app)
    fill(page, {"data.context": "900"})
    expect(page.locator("#ready")).to_have_text("1 setting has to be corrected.")
    expect(page.locator("main")).to_contain_text("has 600 rows of the 902 needed")
    expect(page.locator("#go")).to_be_disabled()
    fill(page, {"data.context": "16"})
    expect(page.locator("#ready")).to_have_text("Ready.")
    expect(page.locator("#go")).to_be_enabled()


def test_a_run_that_cannot_start_says_why(page, app):
    page.goto(app.url)
    choose_data(page, app, model__hidden="60000", model__layers="900")
    page.click("#go")
    expect(page.locator("#error")).to_contain_text("the network would have")
    page.click("text=Change and start again")
    expect(page.locator("#set-model-hidden")).to_have_value("60000")
    expect(page.locator("#data")).to_have_value("load.csv")


def test_predictions_are_redrawn_while_a_run_trains_whose_time_was_estimated(page, app):
    page.goto(app.url)
    choose_data(page, app, **{key.replace(".", "__"): value for key, value in ENDLESS.items()})
    expect(page.locator("#e-time")).to_contain_text("s – ")
    expect(page.locator("#e-basis")).to_contain_text("steps")
    start(page)
    preview = page.locator("#preview")
    expect(preview).to_be_visible()
    expect(preview.locator("canvas")).to_be_attached()
    first = preview.get_attribute("data-step")
    expect(preview).not_to_have_attribute("data-step", first)
    assert int(preview.get_attribute("data-step")) > int(first)
    page.click("#stop")
    expect(page.locator("#state")).not_to_have_text("running")


def test_a_finished_run_is_trained_longer(page, app):
    page.goto(app.url)
    choose_data(page, app, train__epochs="1", model__kind="linear")
    start(page)
    expect(page.locator("#state")).to_have_text("finished")
    page.click("#longer")
    page.fill("#more-total", "3")
    page.click("#more-go")
    expect(page.locator("#f-epoch")).to_have_text("3 of 3")
    expect(page.locator("#state")).to_have_text("finished")
