"""Plots of a pre-trained encoder."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
from markupsafe import Markup

from slipstream.events import Event
from slipstream.reporting.charts import FAINT, INK, MODEL, Chart, Scale, cover, get_colour, shorten
from slipstream.reporting.plots import training
from slipstream.runs.summary import RunSummary

MAX_COLUMNS, MAX_EXAMPLES = 3, 6


def draw_figures(folder: Path, summary: RunSummary, events: Sequence[Event]) -> dict[str, Any]:
    """Draw every plot of the report, by its name in the template."""
    return {
        **training.draw_training(summary, events),
        "examples": _draw_examples(folder / "reconstructions.parquet"),
        "by_distance": _draw_by_distance(summary),
        "latent": _draw_latent(summary["latent"]["std"]),
    }


def _draw_examples(path: Path) -> list[tuple[str, Markup]]:
    """Draw masked windows with a title, one plot per column, as many as fit on the page."""
    table = pa.parquet.ParquetFile(path).read()  # read_table would load pandas
    ends = ("_filled", "_masked")
    columns = [n for n in table.column_names if all(n + end in table.column_names for end in ends)]
    columns, number = columns[:MAX_COLUMNS], table.column("window").to_numpy()
    return [
        _draw_window(table.filter(pa.array(number == window)), name)
        for window in np.unique(number)[: MAX_EXAMPLES // len(columns)]
        for name in columns
    ]


def _draw_window(table: pa.Table, name: str) -> tuple[str, Markup]:
    row, truth, filled = (table.column(n).to_numpy() for n in ("row", name, f"{name}_filled"))
    masked = np.asarray(table.column(f"{name}_masked").to_pylist())
    y = cover([*truth, *filled[masked]])
    chart = Chart(Scale(float(row[0]) - 0.5, float(row[-1]) + 0.5), y, "row", name, 150)
    hidden = row[masked]
    chart.boxes((hidden - 0.5, hidden + 0.5), (y.low, y.high), FAINT, opacity=0.35)
    chart.line(row, truth, INK, width=1.3, label="true")
    values = np.where(masked, filled, np.nan)
    chart.line(row, values, MODEL, width=1.4, label="reconstructed")
    chart.dots(row, values, MODEL, size=5)
    error = float(np.abs(filled - truth)[masked].mean())
    series = table.column("series")[0].as_py()
    return f"{name} · {shorten(series)} · mean error {error:.3g}", chart.render()


def _draw_by_distance(summary: RunSummary) -> Markup:
    """Draw the error over the distance to the nearest visible row."""
    curves = {
        name: [
            (point["distance"], point["mse"]) for point in summary["detail"][name]["by_distance"]
        ]
        for name in (*summary["baselines"], "model")
    }
    points = [point for curve in curves.values() for point in curve]
    x = replace(cover([distance for distance, _ in points]), whole=True)
    y = cover([error for _, error in points], zero=True)
    chart = Chart(x, y, "rows to the nearest visible row", "mean squared error (scaled)", 220)
    for name, curve in curves.items():
        distances, errors = zip(*curve, strict=True)
        width = 2.4 if name == "model" else 1.4
        chart.line(distances, errors, get_colour(name), width=width, label=name)
        chart.dots(distances, errors, get_colour(name), size=3 * width)
    return chart.render()


def _draw_latent(deviations: Sequence[float]) -> Markup:
    ranked = sorted(deviations, reverse=True)
    units = np.arange(len(ranked))
    x, y = Scale(-0.5, len(ranked) - 0.5, whole=True), cover(ranked, zero=True)
    chart = Chart(x, y, "unit, by rank", "standard deviation", 200)
    chart.boxes((units - 0.4, units + 0.4), (np.zeros(len(ranked)), ranked), MODEL)
    return chart.render()
