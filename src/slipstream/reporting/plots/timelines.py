"""Where the training, validation and test rows lie in time."""

from __future__ import annotations

from typing import Any

from markupsafe import Markup

from slipstream.reporting.plots.chart import BLUE, FAINT, GREEN, ORANGE, Chart, shorten
from slipstream.reporting.plots.scale import Scale

SETS = {
    "train": (BLUE, "training"),
    "val": (ORANGE, "validation"),
    "test": (GREEN, "test"),
    "unused": (FAINT, "not used"),
}
MIN_WIDTH = 0.002
"""Least share of the chart's width, so that a short stretch is visible"""


def draw_timelines(data: dict[str, Any]) -> Markup | None:
    """Draw one row for each series, or fold, with the sets in their colours."""
    rows = data.get("timelines")
    if not rows:
        return None
    ends = [end for row in rows for _, *pair in row["parts"] for end in pair]
    low, high = float(min(ends)), float(max(ends))
    x = Scale(low, high if high > low else low + 1.0, dates=data["dates"])
    ticks = tuple((float(-at), shorten(row["name"], 22)) for at, row in enumerate(rows))
    y = Scale(0.5 - len(rows), 0.5, ticks=ticks)
    label = "" if data["dates"] else data["time"] if data["range"] else "row"
    chart = Chart(x, y, label, "", 22 * len(rows) + 8, x_ticks=5)
    least = MIN_WIDTH * (x.high - x.low)
    for name, (colour, text) in SETS.items():
        parts = [
            (first, max(last, first + least), -at)
            for at, row in enumerate(rows)
            for which, first, last in row["parts"]
            if which == name
        ]
        if not parts:
            continue
        begins, stops, places = (list(column) for column in zip(*parts, strict=True))
        heights = [place - 0.32 for place in places], [place + 0.32 for place in places]
        chart.boxes((begins, stops), heights, colour)
        chart.name("full", colour, text)
    return chart.render()
