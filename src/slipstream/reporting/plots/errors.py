"""Plots of the errors of predicted numbers: by horizon, by series, and their distribution."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from markupsafe import Markup

from slipstream.base.text import format_number
from slipstream.reporting.plots.chart import INK, MODEL, Chart, get_colour, render_bars
from slipstream.reporting.plots.predictions import Predictions
from slipstream.reporting.plots.scale import Scale, cover
from slipstream.reporting.wording import add_unit, choose_layout

MAX_BARS = 24
CELLS, SHADES, BARS = 40, 5, 41


def draw_by_step(summary: dict[str, Any]) -> Markup:
    """Draw the error over the rows ahead, of the model and the baselines."""
    headline = choose_layout(summary).headline
    curves = {
        name: result[f"{headline.key}_by_step"]
        for name, result in summary["baselines"].items()
        if result and result.get(f"{headline.key}_by_step")
    }
    curves["model"] = [step[headline.key] for step in summary["detail"]["test"]["per_step"]]
    steps = np.arange(1, len(curves["model"]) + 1)
    y = cover([error for curve in curves.values() for error in curve], zero=True)
    label = "mean absolute error" if headline.key == "mae" else headline.heading
    chart = Chart(Scale(1.0, float(steps[-1]), whole=True), y, "rows ahead", label, 220)
    for name, curve in curves.items():
        width = 2.4 if name == "model" else 1.4
        values = [np.nan if error is None else error for error in curve]
        chart.line(steps, values, get_colour(name), width=width, label=name)
    return chart.render()


def draw_by_series(per_series: dict[str, dict[str, float]], unit: str) -> Markup:
    """Draw the mean absolute error of the worst series."""
    worst = sorted(per_series, key=lambda name: -per_series[name]["mae"])[:MAX_BARS]
    return render_bars(
        [
            (name, error, add_unit(format_number(error, figures=3), unit))
            for name in worst
            if (error := per_series[name]["mae"]) is not None
        ]
    )


def draw_distributions(
    predictions: Predictions, targets: Sequence[str]
) -> list[tuple[str, Markup, Markup]]:
    """Draw for each target how its errors are distributed, and predicted over true values."""
    plots = []
    for target in targets:
        truth, predicted = predictions[target], predictions[f"{target}_predicted"]
        known = np.isfinite(predicted - truth)
        truth, predicted = truth[known], predicted[known]
        if not len(truth):
            continue
        plots.append((target, _draw_histogram(predicted - truth), _draw_scatter(truth, predicted)))
    return plots


def _draw_histogram(error: Any) -> Markup:
    """Draw the distribution of the errors; the outermost bars hold all that lie beyond."""
    reach = float(np.quantile(np.abs(error), 0.995)) or 1.0
    edges = np.linspace(-reach, reach, BARS + 1)
    counts = _count(error, edges)
    y = Scale(0.0, 1.05 * counts.max(), ticks=())
    chart = Chart(Scale(-reach, reach), y, "predicted - true", height=180, x_ticks=5)
    chart.boxes((edges[:-1], edges[1:]), (np.zeros(BARS), counts), MODEL, opacity=0.85)
    chart.vline(0.0, INK, dash="4 3")
    return chart.render()


def _draw_scatter(truth: Any, predicted: Any) -> Markup:
    """Draw how many rows lie at each pair of true and predicted value, on a logarithmic scale."""
    scale = cover([truth.min(), truth.max(), predicted.min(), predicted.max()], margin=0.02)
    chart = Chart(scale, scale, "true", "predicted", 180, x_ticks=5)
    edges = np.linspace(scale.low, scale.high, CELLS + 1)
    across, down = (_find_cells(values, scale) for values in (truth, predicted))
    counts = np.bincount(across * CELLS + down, minlength=CELLS * CELLS).reshape(CELLS, CELLS)
    levels = np.ceil(SHADES * np.log1p(counts) / np.log1p(counts.max())).astype(int)
    for level in range(1, SHADES + 1):
        borders = np.diff(np.pad(levels == level, ((0, 0), (1, 1))).astype(int), axis=1)
        (i, begin), (_, end) = np.nonzero(borders == 1), np.nonzero(borders == -1)
        boxes = (edges[i], edges[i + 1]), (edges[begin], edges[end])
        chart.boxes(*boxes, MODEL, opacity=0.1 + 0.9 * level / SHADES)
    chart.line([scale.low, scale.high], [scale.low, scale.high], INK, width=1, dash="4 3")
    return chart.render()


def _find_cells(values: Any, scale: Scale) -> Any:
    share = (values - scale.low) / (scale.high - scale.low)
    return np.clip((share * CELLS).astype(np.int64), 0, CELLS - 1)


def _count(values: Any, edges: Any) -> Any:
    """Count the values between equal edges; those beyond belong to the outermost."""
    share = (values - edges[0]) / (edges[-1] - edges[0])
    places = np.clip((share * (len(edges) - 1)).astype(np.int64), 0, len(edges) - 2)
    return np.bincount(places, minlength=len(edges) - 1)
