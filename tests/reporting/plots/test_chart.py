from __future__ import annotations

from slipstream.reporting.plots.chart import BLUE, Chart, render_bars, shorten
from slipstream.reporting.plots.scale import Scale


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
