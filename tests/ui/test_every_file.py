"""Every screen on every file: real series and odd ones. Nothing is an internal error, and a file
that cannot be used is told with its reason."""

from __future__ import annotations

import re
import shutil
import tomllib
from urllib.parse import quote

import pytest

from tests.app.oddities import ODDITIES, UNUSABLE, write_oddities
from tests.conftest import REAL
from tests.ui.conftest import WAIT_MS, App, fill

sync_api = pytest.importorskip("playwright.sync_api")
expect = sync_api.expect
expect.set_options(timeout=WAIT_MS)
pytestmark = pytest.mark.ui

SHARED = (
    *("ETTh1.csv", "beijing_pm25.csv", "sp500_2000.csv", "lg_hg2_1hz.parquet", "illness.csv"),
    *("m4_hourly_train.csv", "m4_hourly_test.csv", "archive/ArrowHead_TEST.ts"),
    *("archive/ItalyPowerDemand_TRAIN.ts", "archive/JapaneseVowels_TEST.ts"),
)
NAMELESS = "archive/ArrowHead_TRAIN.tsv"
"""A series per row, without names of the columns"""
SETTLED = re.compile(r"^(Ready\.|Not all|\d+ settings? ha)")
FORMS = ("/new", "/search/new", "/pretrain")


@pytest.fixture(scope="module")
def shared_app(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    write_oddities(folder)
    for name in (*SHARED, NAMELESS):
        if (REAL / name).exists():
            (folder / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(REAL / name, folder / name)
    app = App(folder, "--no-warm-worker")
    yield app
    app.end()


@pytest.fixture(scope="module")
def tab(browser, shared_app):
    context = browser.new_context(viewport={"width": 1400, "height": 900})
    context.set_default_timeout(WAIT_MS)
    page = context.new_page()
    page.goto(shared_app.url)
    yield page
    context.close()


@pytest.fixture
def watched(tab):
    """The tab that all tests share; its scripts must not fail, nor the server."""
    errors: list[str] = []

    def note(response):
        if response.status >= 500:
            errors.append(f"{response.status} {response.url}")

    def fail(error):
        errors.append(str(error))

    tab.on("pageerror", fail)
    tab.on("response", note)
    yield tab
    tab.remove_listener("pageerror", fail)
    tab.remove_listener("response", note)
    assert errors == []


def open_screens(page, app, name, told):
    """Open every screen on a file; `told` is what is said where it cannot be read, None where it
    can."""
    link = quote(name)
    page.goto(f"{app.root}/data?file={link}")
    page.wait_for_selector("#problem:visible, #rows tbody tr")
    if told:
        expect(page.locator("#problem")).to_contain_text(told)
    page.goto(f"{app.root}/prepare?file={link}")
    page.wait_for_selector("#problems li, #loading.bad")
    if told:
        expect(page.locator("#problems, #loading").filter(has_text=told)).to_be_visible()
    else:
        expect(page.locator("#ready")).not_to_have_text(re.compile("^(Compares.*)?$"))
    for form in FORMS:
        page.goto(f"{app.root}{form}?data={link}")
        expect(page.locator("#data")).to_have_value(name)
        expect(page.locator("#ready")).to_have_text(SETTLED)
        if told:
            expect(page.locator("#findings")).to_contain_text(told)
            expect(page.locator("#go")).to_be_disabled()
    page.goto(f"{app.root}/what-if?start={quote(f'data:{name}')}")
    page.wait_for_selector("#problem:visible, #what-if")
    if told:
        expect(page.locator("#problem")).to_contain_text(told)


def select(ran, shown):
    """What a run's settings have of those that were shown; it also has all defaults."""
    return {
        key: select(ran[key], value) if isinstance(value, dict) else ran[key]
        for key, value in shown.items()
    }


def is_ready(page, app, name):
    """Open the form of a new run on a file, and return whether it is ready."""
    page.goto(f"{app.root}/new?data={quote(name)}")
    expect(page.locator("#ready")).to_have_text(SETTLED)
    return page.inner_text("#ready").startswith("Ready.")


@pytest.mark.parametrize("name", SHARED)
def test_every_screen_opens_on_a_real_file(watched, shared_app, name):
    if not (shared_app.folder / name).exists():
        pytest.skip(f"{name} is not here; point SLIPSTREAM_DATA to the folder that holds it")
    open_screens(watched, shared_app, name, None)
    assert is_ready(watched, shared_app, name)


def test_rows_without_names_are_refused_with_the_setting_and_proposed_as_series(
    watched, shared_app
):
    if not (REAL / NAMELESS).exists():
        pytest.skip(f"{NAMELESS} is not here")
    link = quote(NAMELESS)
    watched.goto(f"{shared_app.root}/data?file={link}")
    expect(watched.locator("#problem")).to_contain_text("line 1 should name the columns")
    expect(watched.locator("#problem")).to_contain_text('data.layout = "wide"')
    watched.goto(f"{shared_app.root}/new?data={link}")
    expect(watched.locator("#ready")).to_have_text(SETTLED)
    expect(watched.locator("#findings")).to_contain_text("36 rows")


@pytest.mark.parametrize("name", ODDITIES)
def test_every_screen_opens_on_an_odd_file(watched, shared_app, name):
    open_screens(watched, shared_app, name, UNUSABLE.get(name))
    assert is_ready(watched, shared_app, name) == (name not in UNUSABLE)


@pytest.mark.parametrize("name", ["weekdays.csv", "days backwards.csv", "infinite.parquet"])
def test_what_ran_is_what_was_shown(watched, shared_app, name):
    page = watched
    assert is_ready(page, shared_app, name)
    fill(page, {"model.kind": "linear", "train.epochs": "1"})
    expect(page.locator("#toml")).to_contain_text("epochs = 1")
    expect(page.locator("#ready")).to_have_text("Ready.")
    shown = tomllib.loads(page.inner_text("#toml"))
    page.click("#go")
    page.wait_for_url("**/run/**")
    expect(page.locator("#state")).to_have_text("finished")
    run = shared_app.folder / page.url.partition("/run/")[2]
    ran = tomllib.loads((run / "config.toml").read_text(encoding="utf-8"))
    assert select(ran, shown) == shown
