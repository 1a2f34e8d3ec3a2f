from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest

import slipstream
from slipstream.reporting import figures as draw
from slipstream.reporting import number, seconds
from tests.conftest import small_config, waves


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
    ],
    ids=["forecast", "estimate", "one step", "quantiles"],
)
def test_the_report_is_one_self_contained_page(tmp_path, sections):
    text, page = page_of(tmp_path, **sections)
    assert all(link.startswith(("#", "data:")) for link in page.links)
    assert len(page.ids) == len(set(page.ids))
    assert set(re.findall(r"url\(#([^)]+)\)", text)) <= set(page.ids)
    assert "script" not in page.tags
    assert page.tags.count("svg") >= 6
    for heading in (
        "Against the baselines",
        "Predicted against true",
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
    assert number(value) == text


def test_durations():
    assert [seconds(s) for s in (1.25, 75, 3 * 3600 + 120)] == ["1.2 s", "1 min 15 s", "3 h 2 min"]


def test_thinning_keeps_the_extremes():
    import numpy as np

    y = np.zeros(100_000)
    y[[70, 99_000]] = 5, -7
    x, thin = draw._thinned(np.arange(100_000), y)
    assert len(thin) <= draw.MOST_POINTS
    assert (thin.max(), thin.min()) == (5, -7)
    assert (np.diff(x) > 0).all()


def test_an_unfinished_run_has_no_report(tmp_path):
    (tmp_path / "config.toml").write_text("")
    with pytest.raises(slipstream.UserError, match="was the run finished"):
        slipstream.report(tmp_path)
