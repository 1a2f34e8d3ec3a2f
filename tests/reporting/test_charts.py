from __future__ import annotations

import io
import re
from importlib import resources
from xml.etree import ElementTree

import numpy as np
import pytest

from slipstream.reporting.charts import (
    BLUE,
    GREEN,
    ORANGE,
    PALETTE,
    RED,
    Chart,
    Scale,
    render_bars,
    render_png,
    render_svg,
    shorten,
)


def test_a_line_is_interrupted_where_a_value_is_missing():
    chart = Chart(Scale(0, 3), Scale(0, 1))
    chart.line([0, 1, 2, 3], [0.0, 1.0, float("nan"), 0.5], BLUE)
    assert 'd="M0 1000L333.3 0M1000 500"' in chart.render()


def test_text_is_escaped():
    chart = Chart(Scale(0, 1), Scale(0, 1), '"x"', "</svg>")
    chart.line([0, 1], [0, 1], BLUE, label="<script>")
    chart.note(0.5, 0.5, "a & b")
    page = chart.render()
    assert "<script>" not in page
    assert page.count("</svg>") == 1
    assert "a &amp; b" in page
    assert "&lt;b&gt;" in render_bars([("<b>", 1.0, "1 %")])


def test_long_names_keep_both_ends():
    assert shorten("a" * 18) == "a" * 18
    assert shorten("beginning-of-a-very-long-name") == "beginnin…ong-name"


def make_chart() -> Chart:
    """A chart with every kind of mark: a bar from 0 to 2, a band, lines, dots and notes."""
    chart = Chart(Scale(0, 10), Scale(0, 4), "x <label>", "y & unit", 200, title="<title>")
    chart.boxes((0.0, 5.0), (0.0, 2.0), GREEN)
    chart.area([0, 10], [2.5, 2.5], [3.5, 3.5], ORANGE, opacity=1.0, label="band")
    chart.line([0, 5, 10], [1.0, float("nan"), 1.0], BLUE, dash="4 3", label="line")
    chart.dots([8.0], [1.0], RED, size=12, label="dots")
    chart.dots([9.0], [1.0], RED, size=12, square=True, hollow=True)
    chart.vline(2.0, note="best")
    chart.note(9.5, 2.0, "turned", kind="tag")
    return chart


def test_a_picture_is_well_formed_and_has_every_text():
    text = render_svg([make_chart(), make_chart()], columns=2)
    root = ElementTree.fromstring(text)
    words = {node.text for node in root.iter() if node.tag.endswith("text")}
    assert {"<title>", "x <label>", "y & unit", "band", "line", "dots", "best", "turned"} <= words
    assert not re.search(r"var\(|nan|inf", text)


def test_a_picture_has_the_marks_where_the_scales_put_them():
    """Colours of pixels: the bar fills the lower left quarter, the band lies above."""
    image = pytest.importorskip("PIL.Image")
    pixels = np.asarray(image.open(io.BytesIO(render_png([make_chart()], width=600))))

    def find(colour: str, begin: int = 0) -> tuple[int, int, int, int]:
        wanted = [int(PALETTE[colour][i : i + 2], 16) for i in (1, 3, 5)]
        rows, columns = np.nonzero((pixels[begin:] == wanted).all(axis=-1))
        return rows.min() + begin, rows.max() + begin, columns.min(), columns.max()

    top, bottom, left, right = find(GREEN)
    plot = bottom - 200  # entries of the legend are above it
    assert bottom - top == pytest.approx(100, abs=2)
    band = find(ORANGE, plot)
    assert band[1] - band[0] == pytest.approx(50, abs=2)
    assert top - band[1] == pytest.approx(25, abs=3)
    assert band[3] - band[2] == pytest.approx(2 * (right - left), abs=4)
    dots = find(RED, plot)
    assert dots[2] - left == pytest.approx(0.8 * (band[3] - band[2]), abs=8)


def test_both_renderers_have_the_same_colours():
    style = resources.files("slipstream.reporting").joinpath("templates", "page.css").read_text()
    light = style.partition("@media")[0]
    shown = dict(re.findall(r"(--[a-z]+): (#[0-9a-f]+);", light))
    for name, colour in PALETTE.items():
        short = shown[name.removeprefix("var(").removesuffix(")")]
        full = short if len(short) == 7 else "#" + "".join(2 * digit for digit in short[1:])
        assert full == colour, name
