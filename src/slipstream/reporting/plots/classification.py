"""Plots of a classifier."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from markupsafe import Markup, escape

from slipstream.reporting.plots.chart import CYCLE, MODEL, MUTED, SKY, Chart, render_bars, shorten
from slipstream.reporting.plots.scale import Scale, cover

MAX_NAMED, MAX_COUNTED = 10, 12
MAX_BARS, MAX_LINES = 24, 4
SHADES = 8


def draw_classes(summary: dict[str, Any]) -> dict[str, Any]:
    """Draw the plots of a classifier, by their names in the template."""
    detail = summary["detail"]["test"]
    worst = [one for one in detail["worst"] if one["inputs"]]
    return {
        "confusion": _draw_confusion(summary["classes"], detail["confusion"]),
        "reliability": _draw_reliability(detail["reliability"]),
        "worst": [(_describe_window(one), _draw_window(one)) for one in worst],
    }


def _draw_confusion(names: Sequence[str], counts: Sequence[Sequence[int]]) -> Markup:
    """Draw labels down, predictions across; shades are shares of the label's windows."""
    matrix = np.array(counts, dtype=float)
    shares = matrix / np.maximum(matrix.sum(axis=1, keepdims=True), 1)
    if len(names) > MAX_COUNTED:
        return _shade_matrix(names, shares)
    head = "".join(f"<th>{escape(shorten(name))}</th>" for name in names)
    rows = ""
    for name, row, share in zip(names, matrix, shares, strict=True):
        cells = "".join(
            f'<td style="--share:{100 * part:.0f}%">{count:,.0f}<small>{100 * part:.0f} %</small>'
            "</td>"
            for count, part in zip(row, share, strict=True)
        )
        rows += f"<tr><td>{escape(shorten(name))}</td>{cells}</tr>"
    return Markup(
        f'<table class="matrix"><tr><th>label ↓ predicted →</th>{head}</tr>{rows}</table>'
    )


def _shade_matrix(names: Sequence[str], shares: Any) -> Markup:
    """Draw the shares of many classes as shades, the first label on top."""
    every = -(-len(names) // MAX_NAMED)
    ticks = [(float(i), shorten(names[i], 9)) for i in range(0, len(names), every)]
    x = Scale(-0.5, len(names) - 0.5, ticks=tuple(ticks))
    y = Scale(len(names) - 0.5, -0.5, ticks=tuple(ticks))
    chart = Chart(x, y, "predicted", "label; darker is a larger share of the label's windows", 420)
    levels = np.ceil(shares * SHADES).astype(int)
    for level in range(1, SHADES + 1):
        down, across = np.nonzero(levels == level)
        edges = (across - 0.5, across + 0.5), (down + 0.5, down - 0.5)
        chart.boxes(*edges, MODEL, opacity=level / SHADES)
    return chart.render()


def _draw_reliability(bins: Sequence[dict[str, float]]) -> Markup:
    """Draw how often the predicted class was right over its probability."""
    full = [each for each in bins if each["count"]]
    total = sum(each["count"] for each in full)
    width = full[0]["high"] - full[0]["low"]
    low = max(min(each["low"] for each in full) - width, 0.0)
    chart = Chart(
        Scale(low, 1.0), Scale(0.0, 1.0), "probability of the predicted class", "accuracy", 240
    )
    edges = [each["low"] for each in full], [each["high"] for each in full]
    shares = [each["count"] / total for each in full]
    chart.boxes(edges, ([0.0] * len(full), shares), SKY, opacity=0.45)
    chart.name("box", SKY, "share of windows")
    chart.line([low, 1.0], [low, 1.0], MUTED, width=1, dash="5 4", label="perfect calibration")
    points = [each["confidence"] for each in full], [each["accuracy"] for each in full]
    chart.line(*points, MODEL, width=2, label="the model")
    chart.dots(*points, MODEL, size=7)
    return chart.render()


def draw_by_series(per_series: dict[str, dict[str, float]]) -> Markup:
    """Draw the accuracy of the worst series."""
    worst = sorted(per_series, key=lambda name: per_series[name]["accuracy"])[:MAX_BARS]
    shares = [(name, per_series[name]["accuracy"]) for name in worst]
    return render_bars([(name, share, f"{100 * share:.1f} %") for name, share in shares], most=1.0)


def _describe_window(one: dict[str, Any]) -> str:
    return (
        f"{shorten(one['series'], 40)} · {format_time(one)} · label {one['label']} "
        f"({100 * one['p_label']:.1f} %), predicted {one['predicted']}"
    )


def _draw_window(one: dict[str, Any]) -> Markup:
    """Draw the inputs of a misclassified window, each scaled to its own range."""
    inputs = list(one["inputs"].items())[:MAX_LINES]
    rows = max(len(values) for _, values in inputs)
    x = Scale(1.0 - rows, 0.0) if rows > 1 else cover([0.0])
    chart = Chart(x, Scale(-0.05, 1.05, ticks=()), "rows before the window's end", "", 130)
    for (name, values), colour in zip(inputs, CYCLE, strict=False):
        y = np.array(values, dtype=float)
        low, high = float(y.min()), float(y.max())
        scaled = (y - low) / (high - low) if high > low else np.full_like(y, 0.5)
        label = f"{shorten(name)} {low:.3g} to {high:.3g}"
        chart.line(np.arange(len(y)) - len(y) + 1, scaled, colour, width=1.4, label=label)
    return chart.render()


def format_time(one: dict[str, Any]) -> str:
    """Format the time of a window, or its row number."""
    if one["time"] is None:
        return f"row {one['row']:,}"
    if isinstance(one["time"], str):
        day, _, hour = one["time"].partition("T")
        return day if hour == "00:00:00.000000" else f"{day} {hour[:8]}"
    return f"{one['time']:.10g}"
