from __future__ import annotations

import re
from contextlib import contextmanager
from html.parser import HTMLParser

import pytest

import slipstream
from slipstream import UserError
from slipstream.engine.monitor import summarize
from slipstream.reporting import (
    describe_estimate,
    describe_usage,
    format_energy,
    format_number,
    format_seconds,
)
from slipstream.reporting.plots import predictions as draw
from slipstream.reporting.plots import training
from tests.conftest import small_config, waves
from tests.test_cli import invoke


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
    assert "script" not in page.tags
    assert page.tags.count("svg") >= 6
    for heading in (
        "Comparison with baselines",
        "Predictions and true values",
        "Errors",
        "Training",
        "Plan",
    ):
        assert heading in text
    assert ("By horizon" in text) == (sections.get("data", {}).get("horizon", 4) > 1)


def test_names_from_the_data_cannot_break_the_page(tmp_path):
    table = waves().rename_columns(["time", "<script>alert(1)</script>", "b & c", "$x_1$"])
    text, page = page_of(tmp_path, table)
    assert "script" not in page.tags
    assert "b &amp; c" in text


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


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (1234567.0, "1,234,567"),
        (12.3456, "12.35"),
        (0.0123456, "0.01235"),
        (-3.0, "-3.000"),
        (0.0, "0"),
        (None, "–"),
        (float("nan"), "–"),
        (1e-12, "0.00000000"),
    ],
)
def test_numbers_have_four_figures(value, text):
    assert format_number(value) == text


def test_durations():
    assert [format_seconds(s) for s in (1.25, 59.97, 75, 3 * 3600 + 120)] == [
        "1.2 s",
        "1 min 0 s",
        "1 min 15 s",
        "3 h 2 min",
    ]


def test_thinning_keeps_the_extremes():
    import numpy as np

    y = np.zeros(100_000)
    y[[70, 99_000]] = 5, -7
    x, thin = draw._thin(np.arange(100_000), y)
    assert len(thin) <= draw.MAX_POINTS
    assert (thin.max(), thin.min()) == (5, -7)
    assert (np.diff(x) > 0).all()


SAMPLE = {
    "event": "monitor",
    "seconds": 1.0,
    "cpu_percent": 104.0,
    "rss_bytes": 1.24e9,
    "gpu_utilisation": 97,
    "gpu_memory_bytes": 2.1e9,
    "power_w": 332.0,
    "temperature_c": 61,
    "clock_mhz": 1800,
    "energy_j": 332.0,
    "throttled": [],
}


def test_a_run_reports_its_energy_and_utilisation():
    found = summarize([SAMPLE] * 411 + [SAMPLE | {"throttled": ["power cap"]}])
    summary = {"seconds": 412.4, "monitor": found}
    assert format_energy(summary) == "38 Wh"
    assert list(describe_usage(summary)) == [
        "GPU 97 % busy, 332 W, 2.1 GB peak GPU memory, up to 61 °C; "
        "1.0 CPU cores busy, 1.2 GB peak memory"
    ]
    assert format_energy(summary | {"seconds": 30.0}) == "38 Wh since the run began"
    assert (
        format_energy(summary | {"monitor": summarize([SAMPLE | {"energy_j": 9e6}])}) == "2.5 kWh"
    )
    capped = summarize([SAMPLE, SAMPLE, SAMPLE | {"throttled": ["thermal"]}])
    _, throttled = describe_usage({"monitor": capped})
    assert throttled == "the GPU was throttled for 33 % of the time: thermal"
    on_cpu = summarize([{key: SAMPLE[key] for key in list(SAMPLE)[:4]}])
    assert format_energy({"seconds": 9, "monitor": on_cpu}) == ""
    assert list(describe_usage({"monitor": on_cpu})) == ["1.0 CPU cores busy, 1.2 GB peak memory"]
    assert not list(describe_usage({"monitor": None}))
    assert format_energy({"seconds": 9, "monitor": None}) == ""


def test_estimates_are_compared_with_the_actual_time():
    found = {
        "before_s": 41,
        "before_is": "measured",
        "after_ten_steps_s": 39,
        "took_s": 40,
        "planned_steps": 1520,
    }
    summary = {"steps": 1520, "estimate": found}
    assert (
        describe_estimate(summary)
        == "estimated 41.0 s, 39.0 s after ten steps; training took 40.0 s"
    )
    short = found | {"before_is": "guessed", "after_ten_steps_s": None}
    assert describe_estimate({"steps": 9, "estimate": short}) == (
        "estimated 41.0 s (rule of thumb); training took 40.0 s for 9 of 1,520 steps"
    )
    unknown = found | {"before_s": None, "after_ten_steps_s": None}
    assert describe_estimate({"steps": 9, "estimate": unknown}) == ""


def test_the_machine_is_plotted_from_ten_samples_on():
    assert training._draw_machine([]) is None
    assert training._draw_machine([SAMPLE] * 9 + [SAMPLE | {"seconds": 0.1}]) is None
    drawn = training._draw_machine([SAMPLE] * 10)
    assert all(text in drawn for text in ("GPU busy", "power, W", "GPU memory", "seconds"))
    on_cpu = {key: SAMPLE[key] for key in list(SAMPLE)[:4]}
    drawn = training._draw_machine([SAMPLE, *[on_cpu] * 400])
    assert all(text in drawn for text in ("CPU cores busy", "memory, GB", "minutes"))
    assert "power" not in drawn


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
        pytest.raises(UserError, match=rf"{run}/report\.html: cannot be written .*--out FOLDER"),
    ):
        slipstream.report(run)
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before
    elsewhere = tmp_path / "drawn" / "here"
    assert slipstream.report(run, out=elsewhere) == elsewhere / "report.html"
    assert "</html>" in (elsewhere / "report.html").read_text(encoding="utf-8")
    found = invoke("report", run, "--out", run / "config.toml")
    assert found.exit_code == 2
    assert "config.toml/report.html: cannot be written" in found.stderr
