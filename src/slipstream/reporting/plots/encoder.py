"""Plots of a pre-trained encoder."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import pyarrow as pa
import pyarrow.parquet
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from slipstream.reporting.plots import training
from slipstream.reporting.plots.style import COLOURS, INK, MODEL, STYLE, draw_svg, shorten

SHADE = "#e5e7eb"
MAX_COLUMNS, MAX_EXAMPLES = 3, 6


def draw_figures(
    folder: Path, summary: dict[str, Any], events: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """Draw every plot of the report, by its name in the template."""
    with mpl.rc_context(STYLE):
        return {
            **training.draw_training(summary, events),
            "examples": _draw_examples(folder / "reconstructions.parquet"),
            "by_distance": draw_svg(_plot_by_distance, 6.2, 3.0, summary),
            "latent": draw_svg(_plot_latent, 6.2, 2.6, summary["latent"]["std"]),
        }


def _draw_examples(path: Path) -> list[str]:
    """Draw masked windows, one plot per column, as many as fit on the page."""
    table = pa.parquet.ParquetFile(path).read()  # read_table would load pandas
    ends = ("_filled", "_masked")
    columns = [n for n in table.column_names if all(n + end in table.column_names for end in ends)]
    columns, number = columns[:MAX_COLUMNS], table.column("window").to_numpy()
    return [
        draw_svg(_plot_window, 6.2, 2.1, table.filter(pa.array(number == window)), name)
        for window in np.unique(number)[: MAX_EXAMPLES // len(columns)]
        for name in columns
    ]


def _plot_window(axes: Axes, table: pa.Table, name: str) -> None:
    row, truth, filled = (table.column(n).to_numpy() for n in ("row", name, f"{name}_filled"))
    masked = np.asarray(table.column(f"{name}_masked").to_pylist())
    for at in row[masked]:
        axes.axvspan(at - 0.5, at + 0.5, color=SHADE, lw=0)
    axes.plot(row, truth, color=INK, lw=1.2, label="true")
    values = np.where(masked, filled, np.nan)
    axes.plot(row, values, color=MODEL, lw=1.2, marker="o", ms=3, label="reconstructed")
    series = table.column("series")[0].as_py()
    error = float(np.abs(filled - truth)[masked].mean())
    axes.set(title=f"{name} · {shorten(series)} · mean error {error:.3g}", xlabel="row")
    axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=2, borderaxespad=0.2)


def _plot_by_distance(axes: Axes, summary: dict[str, Any]) -> None:
    """Plot the error over the distance to the nearest visible row."""
    for name in (*summary["baselines"], "model"):
        by_distance = summary["detail"][name]["by_distance"]
        x, error = zip(*((one["distance"], one["mse"]) for one in by_distance), strict=True)
        width = 2.0 if name == "model" else 1.1
        axes.plot(x, error, color=COLOURS[name], lw=width, marker=".", label=name)
    axes.set(xlabel="rows to the nearest visible row", ylabel="mean squared error (scaled)")
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    axes.legend(loc="best", ncols=2)


def _plot_latent(axes: Axes, deviations: Sequence[float]) -> None:
    ranked = sorted(deviations, reverse=True)
    axes.fill_between(np.arange(len(ranked)), ranked, color=MODEL, alpha=0.25, lw=0, step="mid")
    axes.plot(np.arange(len(ranked)), ranked, color=MODEL, drawstyle="steps-mid")
    axes.set(ylim=(0, None), xlabel="unit, by rank", ylabel="standard deviation")
