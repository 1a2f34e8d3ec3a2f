from __future__ import annotations

import json
import re
import shutil
from contextlib import contextmanager
from html.parser import HTMLParser

import pytest

import slipstream
from slipstream import UserError, runs
from slipstream.base.text import format_number
from slipstream.events import Log
from slipstream.reporting.page import read_plot_events
from tests.cli.test_cli import invoke
from tests.conftest import small_config, waves


def plot_data(text):
    """The JSON that the script draws."""
    return re.search(r'<script type="application/json" id="plot-data">(.*)</script>', text)[1]


class Page(HTMLParser):
    """Collects ids, references and outside addresses."""

    def __init__(self):
        super().__init__()
        self.ids, self.links, self.tags = [], [], []

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        for name, value in attributes:
            if name == "id":
                self.ids.append(value)
            if name in ("src", "href", "xlink:href"):
                self.links.append(value)


def page_of(tmp_path, table=None, **sections):
    result = slipstream.train(
        small_config(tmp_path, **sections), waves() if table is None else table
    )
    path = slipstream.report(result.run)
    assert path == result.run / "report.html"
    text = path.read_text(encoding="utf-8")
    page = Page()
    page.feed(text)
    return text, page


@pytest.mark.parametrize(
    "sections",
    [
        {},
        {"data": {"horizon": 0, "targets": ["a"]}},
        {"data": {"horizon": 1, "targets": ["a"]}},
        {"train": {"loss": "quantile"}, "data": {"channels": "independent"}},
        {"train": {"repeats": 2}},
        {"data": {"split": {"walk_forward": 2}}},
    ],
    ids=["forecast", "estimate", "one step", "quantiles", "repeats", "folds"],
)
def test_the_report_is_one_self_contained_page(tmp_path, sections):
    text, page = page_of(tmp_path, **sections)
    assert all(link.startswith(("#", "data:")) for link in page.links)
    assert len(page.ids) == len(set(page.ids))
    assert set(re.findall(r"url\(#([^)]+)\)", text)) <= set(page.ids)
    assert page.tags.count("script") == 3
    assert page.tags.count("svg") + text.count("data-plot=") >= 6
    assert len(text) < 400_000
    for heading in (
        "Comparison with baselines",
        "Predictions and true values",
        "Data",
        "Errors",
        "Training",
        "Plan",
    ):
        assert heading in text
    assert ("By horizon" in text) == (sections.get("data", {}).get("horizon", 4) > 1)


def test_names_from_the_data_cannot_break_the_page(tmp_path):
    table = waves().rename_columns(
        ["time", "<script>alert(1)</script>", 'b & "c" (</script>)', "\0"]
    )
    text, page = page_of(tmp_path, table)
    assert page.tags.count("script") == text.count("</script>") == 3
    assert "b &amp; &#34;c&#34;" in text
    assert "\0" not in text
    assert json.loads(plot_data(text))[1]["unit"] == "</script>"


def test_what_makes_no_error_comes_first(tmp_path):
    table = waves().to_pydict()
    table["a"][290:] = [5.0] * 110  # repeating the last value is right in every test window
    text, _ = page_of(tmp_path, table, data={"targets": ["a"], "split": {"rows": [240, 60, 84]}})
    assert "loses to repeat" in text
    assert "repeat is currently the better choice" in text
    figures = text.split("Comparison with baselines")[1]
    places = [figures.index(f"</span>{name}<small>") for name in ("repeat", "model", "ridge")]
    assert places[0] == min(places)


def test_several_series_are_compared(tmp_path):
    table = waves(300).to_pydict()
    table["id"] = [f"s{i // 100}" for i in range(300)]
    text, _ = page_of(tmp_path, table, data={"id": "id"})
    assert "By series" in text


def test_an_unfinished_run_has_no_report(tmp_path):
    (tmp_path / "config.toml").write_text("")
    with pytest.raises(slipstream.UserError, match="was the run finished"):
        slipstream.report(tmp_path)


@contextmanager
def nothing_can_be_written():
    """As on a read-only disk; root may write to folders that others may not."""
    resource = pytest.importorskip("resource", reason="this system limits no file sizes")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_page_that_cannot_be_written_names_the_way_out(tmp_path):
    run = slipstream.train(small_config(tmp_path, model={"kind": "linear"}), waves(200)).run
    slipstream.report(run)
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    with (
        nothing_can_be_written(),
        pytest.raises(UserError, match=rf"{run}/report\.html: cannot be written .*out=FOLDER"),
    ):
        slipstream.report(run)
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before
    elsewhere = tmp_path / "drawn" / "here"
    assert slipstream.report(run, out=elsewhere) == elsewhere / "report.html"
    assert "</html>" in (elsewhere / "report.html").read_text(encoding="utf-8")
    found = invoke("report", run, "--out", run / "config.toml")
    assert found.exit_code == 2
    assert "config.toml/report.html: cannot be written" in found.stderr


# damaged files


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    config = small_config(tmp_path_factory.mktemp("runs"), engine={"log_every": 4})
    return slipstream.train(config, waves(400)).run


@pytest.fixture
def copy(finished, tmp_path):
    return shutil.copytree(finished, tmp_path / "run")


def change_a_digit(path):
    """Of the last number: a figure that could just as well be true."""
    text = path.read_text()
    place = [found.start() for found in re.finditer(r"[1-8](?=\d*\D)", text)][-1]
    path.write_text(f"{text[:place]}{int(text[place]) + 1}{text[place + 1 :]}")


@pytest.mark.parametrize("name", ["metrics.json", "plan.json", "config.toml"])
def test_a_changed_digit_is_not_drawn(copy, name):
    change_a_digit(copy / name)
    with pytest.raises(UserError, match=rf"{name}: is damaged .* restore it from a copy"):
        slipstream.report(copy)


def test_predictions_with_a_flipped_bit_are_not_drawn(copy):
    path = copy / "predictions.parquet"
    content = bytearray(path.read_bytes())
    content[len(content) // 3] ^= 1
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"predictions.parquet: is damaged"):
        slipstream.report(copy)
    path.unlink()
    with pytest.raises(UserError, match=r"predictions.parquet: is missing"):
        slipstream.report(copy)


@pytest.mark.parametrize("content", ["", "[]", "{", "7", '{"metrics.json": 3}'])
def test_a_damaged_manifest_is_named(copy, content):
    (copy / "manifest.json").write_text(content)
    with pytest.raises(UserError, match=r"manifest.json|metrics.json: is damaged|config.toml"):
        slipstream.report(copy)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("metrics.json", b"{}"),
        ("metrics.json", b"[]"),
        ("metrics.json", b'{"name": 1, "metrics": 3}'),
        ("predictions.parquet", b"PAR1"),
        ("predictions.parquet", b""),
    ],
)
def test_a_damaged_file_of_version_0_1_is_named_too(copy, name, content):
    (copy / "manifest.json").unlink()
    (copy / name).write_bytes(content)
    with pytest.raises(UserError, match=name):
        slipstream.report(copy)


def test_a_run_of_version_0_1_without_the_newer_entries_is_drawn(copy):
    (copy / "manifest.json").unlink()
    summary = runs.read_json(copy / "metrics.json")
    for key in ("data", "finished_at", "command"):
        del summary[key]
    for baseline in summary["baselines"].values():
        if baseline:
            del baseline["per_target"]
    runs.write_json(copy / "metrics.json", summary)
    text = slipstream.report(copy).read_text(encoding="utf-8")
    assert "By target" in text
    assert "ridge: MAE" not in text
    assert "time from" not in text
    assert re.search(r"\d{4}-\d\d-\d\d \d\d:\d\d UTC", text)


def test_the_page_has_the_data_and_the_baselines_of_each_target(copy):
    text = slipstream.report(copy).read_text(encoding="utf-8")
    assert "400 rows in 1 series, time from 0 to 399, usually 1 apart; no gaps in time" in text
    assert "ridge: MAE" in text
    summary = runs.read_json(copy / "metrics.json")
    error = summary["baselines"]["ridge"]["per_target"]["b"]["mae"]
    assert f">{format_number(error)}</td>" in text
    assert "windows, end to end without overlap" in text


def test_the_page_repeats_the_advice_of_the_run(copy):
    (copy / "manifest.json").unlink()
    summary = runs.read_json(copy / "metrics.json")
    lines = ["the validation loss was lowest after 2 of 20 epochs", "a command tries more"]
    runs.write_json(copy / "metrics.json", summary | {"advice": {"lines": lines}})
    text = slipstream.report(copy).read_text(encoding="utf-8")
    assert all(f"<p>{line}</p>" in text for line in lines)


def test_a_report_is_drawn_from_what_is_left_of_the_log(copy):
    log = copy / "events.jsonl"
    whole = log.read_bytes()
    for left in (b"", whole.replace(b'"event"', b'"evemt"'), whole.replace(b'"loss"', b'"lors"')):
        log.write_bytes(left)
        page = slipstream.report(copy).read_text()
        assert ("damaged lines (" in page) == bool(left)


def test_lines_of_version_0_1_with_other_keys_are_left_out(copy):
    """They have no checksum; what curves need must be there."""
    run = runs.open_run(copy)
    lines = ['{"event": "epoch", "at_s": 1.0, "epoch": 1, "val_lozz": 0.5, "train_loss": 0.5}']
    lines.append(
        '{"event": "epoch", "at_s": 1.0, "epoch": "x", "step": 1, "val_loss": 0, '
        '"train_loss": 1, "best": true}'
    )
    lines.append('{"event": "log", "at_s": 1.0, "step": 9, "epoch": 1, "loss": 0.5, "lr": 0.1}')
    run.log.write_text("\n".join(lines) + "\n")
    events, _ = read_plot_events(run)
    assert [type(event) for event in events] == [Log]


def test_a_run_that_goes_on_has_other_sums_in_the_end(copy):
    table = waves(400)
    slipstream.train(data=table, resume=copy, overrides=("train.epochs=3",))
    assert slipstream.report(copy).exists()
