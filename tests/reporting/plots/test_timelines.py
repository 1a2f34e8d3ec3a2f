from __future__ import annotations

from slipstream.reporting.plots.training import draw_timelines


def test_each_set_that_occurs_is_named():
    rows = [{"name": "a", "parts": [["train", 0, 70], ["test", 80, 99]]}]
    chart = draw_timelines({"timelines": rows, "dates": False, "time": "t", "range": None})
    assert "training" in chart
    assert "validation" not in chart
    assert ">row<" in chart
    assert draw_timelines({}) is None
