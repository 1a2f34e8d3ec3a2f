"""The report's pictures, as SVG with real text."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
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
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from slipstream.reporting.layouts import choose_layout
from slipstream.reporting.plots import classification, lanes
from slipstream.reporting.plots.style import COLOURS, INK, MODEL, MUTED, STYLE, VALIDATION
from slipstream.reporting.plots.svg import draw_grid, draw_svg, shorten, to_svg, use_log_if_wide

Array = npt.NDArray[Any]

PHASES = ("#2563eb", "#93c5fd", "#10b981", "#f59e0b", "#a78bfa", "#9ca3af", "#e5e7eb")
MOST_ROWS = 2_000_000
MOST_POINTS = 1500
MOST_TARGETS, MOST_EXAMPLES, MOST_BARS = 8, 6, 24
FEWEST_SAMPLES, SHORT_S = 10, 0.5
MACHINE: dict[str, tuple[float, str, str]] = {
    "gpu_utilisation": (1.0, "GPU busy, %", MODEL),
    "power_w": (1.0, "power, W", "#f59e0b"),
    "gpu_memory_bytes": (1e9, "GPU memory, GB", "#a78bfa"),
    "cpu_percent": (100.0, "CPU cores busy", "#10b981"),
    "rss_bytes": (1e9, "memory, GB", "#9ca3af"),
}
"""What is drawn of the samples: its unit, its name and its colour"""


@dataclass(frozen=True)
class Predictions:
    """The test set's predictions, or an even sample of them where there are very many."""

    table: pa.Table
    sampled: bool

    def __getitem__(self, name: str) -> Array:
        return np.asarray(self.table.column(name).to_numpy())

    @property
    def columns(self) -> list[str]:
        return list(self.table.column_names)

    def bands(self, target: str) -> tuple[str, str] | None:
        """The names of the outermost quantiles' columns, or of the interval's, where there are."""
        names = [
            name
            for name in self.columns
            if re.fullmatch(re.escape(target) + r"_q[\d.]+", name)
            and f"{name}_predicted" not in self.columns  # else it is a target of its own
        ]
        if len(names) > 1:
            return names[0], names[-1]
        low, high = f"{target}_lo95", f"{target}_hi95"
        return (low, high) if low in self.columns else None


def read_predictions(path: Path) -> Predictions:
    with pa.parquet.ParquetFile(path) as file:
        every = -(-file.metadata.num_rows // MOST_ROWS)
        table = file.read_row_groups(list(range(0, file.num_row_groups, every)))
    series = table.column_names.index("series")
    return Predictions(
        table.set_column(series, "series", table.column("series").cast(pa.string())), every > 1
    )


def draw_figures(
    summary: dict[str, Any], events: Sequence[dict[str, Any]], predictions: Predictions
) -> dict[str, Any]:
    """Every picture of the report by the name its place has on the page."""
    detail = summary["detail"]["test"]
    steps, series = len(detail["per_step"]) > 1, len(detail["per_series"]) > 1
    both = steps and series
    told_apart = bool(summary.get("classes"))
    compared = classification.plot_by_series if told_apart else _by_series
    with mpl.rc_context(STYLE):
        return {
            **draw_training(summary, events),
            **(_of_classes(summary) if told_apart else _of_numbers(detail, predictions)),
            "by_step": draw_svg(_by_step, 6.2 if both else 12.4, 3.2, summary) if steps else None,
            "by_series": draw_svg(compared, 6.2 if both else 12.4, 3.2, detail["per_series"])
            if series
            else None,
        }


def draw_training(summary: dict[str, Any], events: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Losses, rates, time and machine: what every kind of run has."""
    return {
        **(_of_lanes if "lanes" in summary else _of_one)(summary, events),
        "time": draw_svg(_time, 6.2, 1.5, summary["seconds_by_phase"], summary["seconds"]),
        "machine": _machine([e for e in events if e["event"] == "monitor"]),
    }


def _of_numbers(detail: dict[str, Any], predictions: Predictions) -> dict[str, Any]:
    targets = list(detail["per_target"])[:MOST_TARGETS]
    return {
        "examples": _examples(predictions, targets),
        "scatter": draw_grid(_scatter, [(predictions, name) for name in targets], 3.0),
        "histogram": draw_grid(_histogram, [(predictions, name) for name in targets], 2.6),
    }


def _of_classes(summary: dict[str, Any]) -> dict[str, Any]:
    detail, names = summary["detail"]["test"], summary["classes"]
    error = summary["metrics"]["test"]["ece"]
    return {
        "confusion": draw_svg(classification.plot_confusion, 6.2, 4.4, names, detail["confusion"]),
        "reliability": draw_svg(
            classification.plot_reliability, 6.2, 4.4, detail["reliability"], error
        ),
        "worst": [
            draw_svg(classification.plot_window, 6.2, 2.4, one)
            for one in detail["worst"]
            if one["inputs"]
        ],
    }


def _of_one(summary: dict[str, Any], events: Sequence[dict[str, Any]]) -> dict[str, Any]:
    losses = draw_svg(_losses, 6.2, 3.3, events, summary["best_epoch"], _loss(summary))
    return {"losses": losses, "rates": draw_svg(_rates, 6.2, 1.5, events)}


def _of_lanes(summary: dict[str, Any], events: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Rates are each lane's own; the curves of all are what there is to see."""
    drawn = {
        "losses": draw_svg(lanes.plot_losses, 6.2, 3.3, events, summary["lanes"], _loss(summary)),
        "rates": None,
    }
    if summary["folds"]:
        return drawn | {"lanes": draw_svg(lanes.plot_folds, 12.4, 3.2, summary)}
    return drawn | {
        "lanes": draw_svg(lanes.plot_seeds, 12.4, 3.0, summary) if summary["spread"] else None
    }


def _loss(summary: dict[str, Any]) -> str:
    return "loss" if summary.get("classes") else "loss (scaled)"


def _losses(axes: Axes, events: Sequence[dict[str, Any]], best_epoch: float, label: str) -> None:
    logs = [e for e in events if e["event"] == "log" and e["loss"] is not None]
    epochs = [e for e in events if e["event"] == "epoch" and e["val_loss"] is not None]
    axes.plot([e["epoch"] for e in logs], [e["loss"] for e in logs], color="#bfdbfe", lw=1)
    axes.plot(
        [e["epoch"] for e in epochs],
        [e["train_loss"] for e in epochs],
        color=MODEL,
        label="training",
    )
    axes.plot(
        [e["epoch"] for e in epochs],
        [e["val_loss"] for e in epochs],
        color=VALIDATION,
        label="validation",
    )
    axes.axvline(best_epoch, color=MUTED, lw=0.8, ls=":")
    axes.annotate(
        "best",
        (best_epoch, 1),
        xycoords=("data", "axes fraction"),
        xytext=(3, -9),
        textcoords="offset points",
        color=MUTED,
        fontsize=9,
    )
    shown = [e["loss"] for e in logs] + [e["val_loss"] for e in epochs]
    use_log_if_wide(axes, shown)
    axes.set_xlim(left=0)
    axes.set_xlabel("epoch")
    axes.set_ylabel(label)
    axes.legend(loc="best")


def _rates(axes: Axes, events: Sequence[dict[str, Any]]) -> None:
    logs = [e for e in events if e["event"] == "log"]
    axes.plot([e["epoch"] for e in logs], [e["lr"] for e in logs], color="#a78bfa")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("epoch")
    axes.set_ylabel("learning rate")
    axes.yaxis.set_major_locator(MaxNLocator(3))


def _time(axes: Axes, phases: dict[str, float], total: float) -> None:
    shares = phases | {"other": max(total - sum(phases.values()), 0.0)}
    left = 0.0
    for (name, spent), colour in zip(shares.items(), itertools.cycle(PHASES)):
        axes.barh(0, spent, left=left, color=colour, label=f"{name} {spent:.1f} s", height=0.5)
        left += spent
    axes.set_xlim(0, max(left, 1e-9))
    axes.set_ylim(-0.4, 0.4)
    axes.set_yticks([])
    axes.grid(False)
    axes.spines["left"].set_visible(False)
    axes.set_xlabel("seconds")
    axes.legend(ncols=4, loc="lower left", bbox_to_anchor=(0, 1), handlelength=1, columnspacing=1.2)


def _machine(samples: Sequence[dict[str, Any]]) -> str | None:
    """Of a GPU, or else of CPU and memory, over the time that was sampled."""
    if samples and samples[-1]["seconds"] < SHORT_S:  # cut off by the run's end
        samples = samples[:-1]
    if len(samples) < FEWEST_SAMPLES:
        return None
    shown = [name for name in MACHINE if all(name in sample for sample in samples)][:3]
    ends = np.cumsum([sample["seconds"] for sample in samples])
    unit, label = (60.0, "minutes") if ends[-1] > 180 else (1.0, "seconds")
    figure = Figure(figsize=(12.4, 1.9), layout="constrained")
    for place, name in enumerate(shown, start=1):
        scale, title, colour = MACHINE[name]
        axes = figure.add_subplot(1, len(shown), place)
        axes.plot(ends / unit, [sample[name] / scale for sample in samples], color=colour)
        axes.set_title(title)
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=0)
        axes.set_xlabel(label)
        axes.yaxis.set_major_locator(MaxNLocator(3))
    return to_svg(figure)


def _by_step(axes: Axes, summary: dict[str, Any]) -> None:
    headline = choose_layout(summary).headline
    mine = [step[headline.key] for step in summary["detail"]["test"]["per_step"]]
    steps = np.arange(1, len(mine) + 1)
    for name, found in summary["baselines"].items():
        if found:
            axes.plot(
                steps, found[f"{headline.key}_by_step"], color=COLOURS[name], label=name, lw=1.1
            )
    axes.plot(steps, mine, color=MODEL, label="model", lw=2)
    axes.set_xlim(1, len(mine))
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    axes.set_xlabel("rows ahead")
    axes.set_ylabel("mean absolute error" if headline.key == "mae" else headline.heading)
    axes.legend(loc="lower right", ncols=2)


def _by_series(axes: Axes, per_series: dict[str, dict[str, float]]) -> None:
    worst = sorted(per_series, key=lambda name: per_series[name]["mae"], reverse=True)
    shown = worst[:MOST_BARS]
    places = np.arange(len(shown))
    axes.bar(
        places, [per_series[n]["rmse"] for n in shown], color="#bfdbfe", width=0.7, label="RMSE"
    )
    axes.bar(places, [per_series[n]["mae"] for n in shown], color=MODEL, width=0.7, label="MAE")
    turned: dict[str, Any] = {"rotation": 40, "ha": "right"} if len(shown) > 8 else {}
    axes.set_xticks(places, [shorten(n) for n in shown], fontsize=8.5, **turned)
    axes.set_xlim(-0.7, max(len(shown), 6) - 0.3)
    axes.grid(axis="x", visible=False)
    axes.set_ylabel("error")
    if len(worst) > len(shown):
        axes.set_title(
            f"the {len(shown)} worst of {len(worst):,} series", fontsize=9.5, color=MUTED
        )
    axes.legend(loc="upper right", ncols=2)


def _scatter(axes: Axes, predictions: Predictions, target: str) -> None:
    truth, predicted = predictions[target], predictions[f"{target}_predicted"]
    low, high = float(min(truth.min(), predicted.min())), float(max(truth.max(), predicted.max()))
    axes.hexbin(truth, predicted, gridsize=38, bins="log", cmap="Blues", mincnt=1, linewidths=0.1)
    axes.plot([low, high], [low, high], color=INK, lw=0.8, ls="--")
    axes.set_title(target)
    axes.set_xlabel("true")
    axes.set_ylabel("predicted")
    axes.xaxis.set_major_locator(MaxNLocator(4))
    axes.yaxis.set_major_locator(MaxNLocator(4))


def _histogram(axes: Axes, predictions: Predictions, target: str) -> None:
    error = predictions[f"{target}_predicted"] - predictions[target]
    reach = float(np.quantile(np.abs(error), 0.995)) or 1.0
    axes.hist(np.clip(error, -reach, reach), bins=41, range=(-reach, reach), color=MODEL)
    axes.axvline(0, color=INK, lw=0.8, ls="--")
    axes.set_title(target)
    axes.set_xlabel("predicted - true")
    axes.set_yticks([])
    axes.grid(False)
    axes.spines["left"].set_visible(False)
    axes.xaxis.set_major_locator(MaxNLocator(4))


def _examples(predictions: Predictions, targets: list[str]) -> list[str]:
    """Predicted against true: whole series when estimating, single forecasts otherwise."""
    if "step" not in predictions.columns:
        names, first = np.unique(predictions["series"], return_index=True)
        shown = names[np.argsort(first)][:MOST_EXAMPLES]
        return [
            draw_svg(_estimated, 6.2, 2.1, predictions, target, name)
            for target in targets
            for name in shown[: max(MOST_EXAMPLES // len(targets), 1)]
        ]
    windows = list(_windows(predictions))
    each = min(max(MOST_EXAMPLES // len(targets), 1), len(windows))
    # spread evenly, each in the middle of its share, so that there is a past to show
    picked = [windows[len(windows) * (2 * i + 1) // (2 * each)] for i in range(each)]
    return [
        draw_svg(_forecast, 6.2, 2.1, predictions, target, rows)
        for target in targets
        for rows in picked
    ]


def _windows(predictions: Predictions) -> Iterator[slice]:
    """The rows of each window, which stand together."""
    firsts = np.flatnonzero(predictions["step"] == 1)
    for begin, end in itertools.pairwise([*firsts, len(predictions.table)]):
        yield slice(int(begin), int(end))


def _estimated(axes: Axes, predictions: Predictions, target: str, series: str) -> None:
    of_series = predictions["series"] == series
    across, label = _across(predictions, of_series)
    truth, predicted = predictions[target][of_series], predictions[f"{target}_predicted"][of_series]
    _band(axes, predictions, target, of_series, across)
    axes.plot(*_thinned(across, truth), color=INK, lw=1.2, label="true")
    axes.plot(*_thinned(across, predicted), color=MODEL, lw=1.0, label="predicted")
    axes.set_title(
        f"{target} · {shorten(series)} · mean error {np.abs(predicted - truth).mean():.3g}"
    )
    axes.set_xlabel(label)
    axes.legend(loc="best", ncols=2)


def _forecast(axes: Axes, predictions: Predictions, target: str, rows: slice) -> None:
    series, first = str(predictions["series"][rows][0]), int(predictions["row"][rows][0])
    length = rows.stop - rows.start
    of_series = predictions["series"] == series
    steps, row = predictions["step"], predictions["row"]
    # what came before, as far as other windows' first rows tell it
    before = of_series & (steps == 1) & (row < first) & (row >= first - length)
    order = np.argsort(row[before])
    past, label = _across(predictions, before)
    across, _ = _across(predictions, rows)
    _band(axes, predictions, target, rows, across)
    axes.plot(past[order], predictions[target][before][order], color="#9ca3af", lw=1.1)
    axes.plot(across, predictions[target][rows], color=INK, lw=1.2, label="true")
    axes.plot(
        across, predictions[f"{target}_predicted"][rows], color=MODEL, lw=1.5, label="predicted"
    )
    axes.set_title(f"{target} · {shorten(series)}")
    axes.set_xlabel(label)
    axes.tick_params(axis="x", labelsize=8.5)
    axes.xaxis.set_major_locator(
        mdates.AutoDateLocator(maxticks=6) if label == "" else MaxNLocator(6)
    )
    if label == "":
        axes.xaxis.set_major_formatter(mdates.ConciseDateFormatter(axes.xaxis.get_major_locator()))
    axes.legend(loc="best", ncols=2)


def _across(predictions: Predictions, rows: Any) -> tuple[Array, str]:
    """Values for the time axis, and its label; dates speak for themselves."""
    if "time" not in predictions.columns:
        return predictions["row"][rows], "row"
    time = predictions["time"][rows]
    return time, "" if np.issubdtype(time.dtype, np.datetime64) else "time"


def _band(axes: Axes, predictions: Predictions, target: str, rows: Any, across: Array) -> None:
    band = predictions.bands(target)
    if band:
        low, high = predictions[band[0]][rows], predictions[band[1]][rows]
        label = "95 % interval" if band[0] == f"{target}_lo95" else "outer quantiles"
        axes.fill_between(across, low, high, color="#bfdbfe", lw=0, label=label)


def _thinned(x: Array, y: Array) -> tuple[Array, Array]:
    """At most MOST_POINTS points, keeping each stretch's lowest and highest."""
    if len(y) <= MOST_POINTS:
        return x, y
    edges = np.linspace(0, len(y), MOST_POINTS // 2 + 1, dtype=int)
    kept = []
    for begin, end in itertools.pairwise(edges):
        low, high = begin + int(np.argmin(y[begin:end])), begin + int(np.argmax(y[begin:end]))
        kept += sorted({low, high})
    return x[kept], y[kept]
