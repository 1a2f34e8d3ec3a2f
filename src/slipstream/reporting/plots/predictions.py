"""Plots of predictions and errors, and all plots of a run together."""

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet
from matplotlib import dates as mdates
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from slipstream.reporting.formatting import choose_layout
from slipstream.reporting.plots import classification, training
from slipstream.reporting.plots.style import (
    COLOURS,
    INK,
    MODEL,
    STYLE,
    draw_grid,
    draw_svg,
    label_series,
    shorten,
)

Array = npt.NDArray[Any]

MAX_ROWS = 2_000_000
MAX_POINTS = 1500
MAX_TARGETS, MAX_EXAMPLES, MAX_BARS = 8, 6, 24


@dataclass(frozen=True)
class Predictions:
    """The test set's predictions, or an even sample of very many."""

    table: pa.Table
    sampled: bool

    def __getitem__(self, name: str) -> Array:
        return np.asarray(self.table.column(name).to_numpy())

    @property
    def columns(self) -> list[str]:
        return list(self.table.column_names)

    def bands(self, target: str) -> tuple[str, str] | None:
        """Return the columns of the outermost quantiles or of the 95 % interval, if any."""
        pattern = re.compile(re.escape(target) + r"_q[\d.]+")
        names = [name for name in self.columns if pattern.fullmatch(name)]
        # those with a prediction are targets of their own
        names = [name for name in names if f"{name}_predicted" not in self.columns]
        if len(names) > 1:
            return names[0], names[-1]
        low, high = f"{target}_lo95", f"{target}_hi95"
        return (low, high) if low in self.columns else None


def read_predictions(path: Path) -> Predictions:
    with pa.parquet.ParquetFile(path) as file:
        every = -(-file.metadata.num_rows // MAX_ROWS)
        table = file.read_row_groups(list(range(0, file.num_row_groups, every)))
    place, series = table.column_names.index("series"), table.column("series").cast(pa.string())
    return Predictions(table.set_column(place, "series", series), every > 1)


def draw_figures(
    summary: dict[str, Any], events: Sequence[dict[str, Any]], predictions: Predictions
) -> dict[str, Any]:
    """Draw every plot of the report, by its name in the template."""
    detail = summary["detail"]["test"]
    steps, series = len(detail["per_step"]) > 1, len(detail["per_series"]) > 1
    width = 6.2 if steps and series else 12.4
    is_classifier = bool(summary.get("classes"))
    plot_series = classification.plot_by_series if is_classifier else _plot_by_series
    with mpl.rc_context(STYLE):
        plots = training.draw_training(summary, events)
        plots |= _draw_classes(summary) if is_classifier else _draw_errors(detail, predictions)
        if steps:
            plots["by_step"] = draw_svg(_plot_by_step, width, 3.2, summary)
        if series:
            plots["by_series"] = draw_svg(plot_series, width, 3.2, detail["per_series"])
    return plots


def _draw_errors(detail: dict[str, Any], predictions: Predictions) -> dict[str, Any]:
    targets = list(detail["per_target"])[:MAX_TARGETS]
    each: list[tuple[Any, ...]] = [(predictions, name) for name in targets]
    return {
        "examples": _draw_examples(predictions, targets),
        "scatter": draw_grid(_plot_scatter, each, 3.0),
        "histogram": draw_grid(_plot_histogram, each, 2.6),
    }


def _draw_classes(summary: dict[str, Any]) -> dict[str, Any]:
    detail, names = summary["detail"]["test"], summary["classes"]
    bins, error = detail["reliability"], summary["metrics"]["test"]["ece"]
    worst = [one for one in detail["worst"] if one["inputs"]]
    return {
        "confusion": draw_svg(classification.plot_confusion, 6.2, 4.4, names, detail["confusion"]),
        "reliability": draw_svg(classification.plot_reliability, 6.2, 4.4, bins, error),
        "worst": [draw_svg(classification.plot_window, 6.2, 2.4, one) for one in worst],
    }


def _plot_by_step(axes: Axes, summary: dict[str, Any]) -> None:
    headline = choose_layout(summary).headline
    errors = [step[headline.key] for step in summary["detail"]["test"]["per_step"]]
    steps = np.arange(1, len(errors) + 1)
    for name, result in summary["baselines"].items():
        if result:
            by_step = result[f"{headline.key}_by_step"]
            axes.plot(steps, by_step, color=COLOURS[name], label=name, lw=1.1)
    axes.plot(steps, errors, color=MODEL, label="model", lw=2)
    axes.set(xlim=(1, len(errors)), ylim=(0, None), xlabel="rows ahead")
    axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    axes.set_ylabel("mean absolute error" if headline.key == "mae" else headline.heading)
    axes.legend(loc="lower right", ncols=2)


def _plot_by_series(axes: Axes, per_series: dict[str, dict[str, float]]) -> None:
    worst = sorted(per_series, key=lambda name: per_series[name]["mae"], reverse=True)[:MAX_BARS]
    for key, colour in (("rmse", "#bfdbfe"), ("mae", MODEL)):
        errors = [per_series[name][key] for name in worst]
        axes.bar(range(len(worst)), errors, color=colour, width=0.7, label=key.upper())
    label_series(axes, worst, len(per_series), turn=len(worst) > 8)
    axes.set_ylabel("error")
    axes.legend(loc="upper right", ncols=2)


def _plot_scatter(axes: Axes, predictions: Predictions, target: str) -> None:
    truth, predicted = predictions[target], predictions[f"{target}_predicted"]
    low, high = float(min(truth.min(), predicted.min())), float(max(truth.max(), predicted.max()))
    axes.hexbin(truth, predicted, gridsize=38, bins="log", cmap="Blues", mincnt=1, linewidths=0.1)
    axes.plot([low, high], [low, high], color=INK, lw=0.8, ls="--")
    axes.set(title=target, xlabel="true", ylabel="predicted")
    axes.xaxis.set_major_locator(MaxNLocator(4))
    axes.yaxis.set_major_locator(MaxNLocator(4))


def _plot_histogram(axes: Axes, predictions: Predictions, target: str) -> None:
    error = predictions[f"{target}_predicted"] - predictions[target]
    reach = float(np.quantile(np.abs(error), 0.995)) or 1.0
    axes.hist(np.clip(error, -reach, reach), bins=41, range=(-reach, reach), color=MODEL)
    axes.axvline(0, color=INK, lw=0.8, ls="--")
    axes.set(title=target, xlabel="predicted - true", yticks=[])
    axes.grid(False)
    axes.spines["left"].set_visible(False)
    axes.xaxis.set_major_locator(MaxNLocator(4))


def _draw_examples(predictions: Predictions, targets: list[str]) -> list[str]:
    """Draw predicted and true values: whole series when estimating, else single forecasts."""
    if "step" not in predictions.columns:
        names, first = np.unique(predictions["series"], return_index=True)
        examples = names[np.argsort(first)][:MAX_EXAMPLES]
        return [
            draw_svg(_plot_estimate, 6.2, 2.1, predictions, target, name)
            for target in targets
            for name in examples[: max(MAX_EXAMPLES // len(targets), 1)]
        ]
    # the rows of a window are contiguous
    edges = [*np.flatnonzero(predictions["step"] == 1), len(predictions.table)]
    windows = [slice(int(begin), int(end)) for begin, end in itertools.pairwise(edges)]
    each = min(max(MAX_EXAMPLES // len(targets), 1), len(windows))
    # spread evenly, each in the middle of its share, so that a past can be shown
    picked = [windows[len(windows) * (2 * i + 1) // (2 * each)] for i in range(each)]
    return [
        draw_svg(_plot_forecast, 6.2, 2.1, predictions, target, rows)
        for target in targets
        for rows in picked
    ]


def _plot_estimate(axes: Axes, predictions: Predictions, target: str, series: str) -> None:
    of_series = predictions["series"] == series
    x, label = _read_time(predictions, of_series)
    truth, predicted = predictions[target][of_series], predictions[f"{target}_predicted"][of_series]
    _fill_band(axes, predictions, target, of_series, x)
    axes.plot(*_thin(x, truth), color=INK, lw=1.2, label="true")
    axes.plot(*_thin(x, predicted), color=MODEL, lw=1.0, label="predicted")
    error = np.abs(predicted - truth).mean()
    axes.set(title=f"{target} · {shorten(series)} · mean error {error:.3g}", xlabel=label)
    axes.legend(loc="best", ncols=2)


def _plot_forecast(axes: Axes, predictions: Predictions, target: str, rows: slice) -> None:
    series, first = str(predictions["series"][rows][0]), int(predictions["row"][rows][0])
    length, row = rows.stop - rows.start, predictions["row"]
    # the past, as far as the first rows of other windows show it
    before = (predictions["series"] == series) & (predictions["step"] == 1)
    before &= (row < first) & (row >= first - length)
    order = np.argsort(row[before])
    past, label = _read_time(predictions, before)
    x, _ = _read_time(predictions, rows)
    _fill_band(axes, predictions, target, rows, x)
    axes.plot(past[order], predictions[target][before][order], color="#9ca3af", lw=1.1)
    axes.plot(x, predictions[target][rows], color=INK, lw=1.2, label="true")
    axes.plot(x, predictions[f"{target}_predicted"][rows], color=MODEL, lw=1.5, label="predicted")
    axes.set(title=f"{target} · {shorten(series)}", xlabel=label)
    axes.tick_params(axis="x", labelsize=8.5)
    axes.xaxis.set_major_locator(MaxNLocator(6))
    if not label:
        dates = mdates.AutoDateLocator(maxticks=6)
        axes.xaxis.set_major_locator(dates)
        axes.xaxis.set_major_formatter(mdates.ConciseDateFormatter(dates))
    axes.legend(loc="best", ncols=2)


def _read_time(predictions: Predictions, rows: Any) -> tuple[Array, str]:
    """Return values for the time axis and its label; dates need none."""
    if "time" not in predictions.columns:
        return predictions["row"][rows], "row"
    time = predictions["time"][rows]
    return time, "" if np.issubdtype(time.dtype, np.datetime64) else "time"


def _fill_band(axes: Axes, predictions: Predictions, target: str, rows: Any, x: Array) -> None:
    band = predictions.bands(target)
    if band:
        low, high = predictions[band[0]][rows], predictions[band[1]][rows]
        label = "95 % interval" if band[0] == f"{target}_lo95" else "outer quantiles"
        axes.fill_between(x, low, high, color="#bfdbfe", lw=0, label=label)


def _thin(x: Array, y: Array) -> tuple[Array, Array]:
    """Keep at most MAX_POINTS points, the lowest and highest of each interval."""
    if len(y) <= MAX_POINTS:
        return x, y
    edges = np.linspace(0, len(y), MAX_POINTS // 2 + 1, dtype=int)
    retained: list[int] = []
    for begin, end in itertools.pairwise(edges):
        low, high = begin + int(np.argmin(y[begin:end])), begin + int(np.argmax(y[begin:end]))
        retained += sorted({low, high})
    return x[retained], y[retained]
