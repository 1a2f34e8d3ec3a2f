"""Plots of a run with several lanes."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from slipstream.reporting.layouts import choose_layout
from slipstream.reporting.plots.style import COLOURS, FAINT, INK, MODEL, MUTED, VALIDATION
from slipstream.reporting.plots.svg import use_log_if_wide

MAX_TICKS = 12


def plot_losses(
    axes: Axes, events: Sequence[dict[str, Any]], lanes: Sequence[dict[str, Any]], label: str
) -> None:
    """Plot every lane's validation loss, and both losses of the lane that is the model."""
    model = [lane for lane in lanes if lane["best"]][-1]
    val_losses: list[float] = []
    by_lane: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for e in events:
        if e["event"] == "epoch" and e["val_loss"] is not None:
            by_lane[e["lane"]].append(e)
    for lane in lanes:
        epochs = by_lane[lane["lane"]]
        x, losses = [e["epoch"] for e in epochs], [e["val_loss"] for e in epochs]
        val_losses += losses
        if lane is not model:
            axes.plot(x, losses, color=FAINT, lw=1, zorder=1)
            continue
        train_losses = [e["train_loss"] for e in epochs]
        axes.plot(x, train_losses, color=MODEL, lw=2, label="training", zorder=3)
        axes.plot(x, losses, color=VALIDATION, lw=2, label="validation", zorder=3)
    if len(lanes) > 1:
        axes.plot([], [], color=FAINT, lw=1, label="validation of the others")
    axes.axvline(model["best_epoch"], color=MUTED, lw=0.8, ls=":")
    use_log_if_wide(axes, val_losses)
    axes.set_xlim(left=0)
    axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    axes.set_xlabel("epoch")
    axes.set_ylabel(label)
    axes.legend(loc="best")


def plot_seeds(axes: Axes, summary: dict[str, Any]) -> None:
    """Plot the test error of every seed, with their mean, the ensemble and the baselines."""
    lanes = [lane for lane in summary["lanes"] if lane["metrics"]]
    headline = choose_layout(summary).headline
    spread = summary["spread"][headline.key]
    low, high = spread["mean"] - spread["sd"], spread["mean"] + spread["sd"]
    axes.axhspan(low, high, color=MODEL, alpha=0.1, lw=0, label="mean ± sd")
    axes.axhline(spread["mean"], color=MODEL, lw=1)
    for place, lane in enumerate(lanes):
        marker, size = ("D", 7) if lane["best"] else ("o", 5)
        label = "the model: best by validation" if lane["best"] else None
        error = headline.read(lane)
        axes.plot(place, error, color=MODEL, ls="", marker=marker, ms=size, label=label)
    if summary["ensemble"]:
        error = headline.read(summary["ensemble"])
        axes.axhline(error, color=COLOURS["ensemble"], lw=1.6, label="ensemble")
    _plot_baselines(axes, summary, high + 4 * (high - low))
    every = -(-len(lanes) // MAX_TICKS)
    axes.set_xticks(range(0, len(lanes), every), [str(lane["seed"]) for lane in lanes[::every]])
    axes.set_xlim(-0.6, len(lanes) - 0.4)
    axes.grid(axis="x", visible=False)
    axes.set_xlabel("seed")
    axes.set_ylabel(f"test {headline.heading}")
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=4)  # clear of the points


def _plot_baselines(axes: Axes, summary: dict[str, Any], most: float) -> None:
    """Plot the baselines that are near enough to share the plot."""
    headline = choose_layout(summary).headline
    for name, baseline in summary["baselines"].items():
        error = headline.read(baseline) if baseline else None
        if error is not None and error < most:
            axes.axhline(error, color=COLOURS[name], lw=1.2, ls="--", label=name)


def plot_folds(axes: Axes, summary: dict[str, Any]) -> None:
    """Plot the test error by fold, with the baselines fitted to the same folds."""
    by_fold, lanes, headline = summary["folds"], summary["lanes"], choose_layout(summary).headline
    places = range(len(by_fold))
    for name in summary["baselines"]:
        if summary["baselines"][name]:
            errors = [headline.read(fold["baselines"][name]) for fold in by_fold]
            axes.plot(places, errors, color=COLOURS[name], lw=1.1, marker=".", label=name)
    if summary["ensemble"]:
        errors = [headline.read(fold["ensemble"]) for fold in by_fold]
        axes.plot(places, errors, color=COLOURS["ensemble"], lw=1.4, marker=".", label="ensemble")
        others = [lane for lane in lanes if lane["metrics"] and not lane["best"]]
        x = [lane["fold"] - 1 for lane in others]
        errors = [headline.read(lane) for lane in others]
        axes.plot(x, errors, color=MODEL, alpha=0.35, ls="", marker="o", ms=4)
    errors = [headline.read(fold) for fold in by_fold]
    axes.plot(places, errors, color=MODEL, lw=2, marker="o", label="model")
    axes.axhline(statistics.fmean(errors), color=MODEL, lw=0.8, ls=":")
    every = -(-len(by_fold) // MAX_TICKS)
    labels = [fold["label"].split(" to ")[0] for fold in by_fold[::every]]
    tick_options: dict[str, Any] = {"rotation": 25, "ha": "right"} if len(labels) > 4 else {}
    axes.set_xticks(range(0, len(by_fold), every), labels, fontsize=8.5, **tick_options)
    axes.set_xlim(-0.4, len(by_fold) - 0.6)
    if headline.key == "mae":  # log-losses may differ little
        axes.set_ylim(bottom=0)
    axes.set_xlabel("test block from")
    axes.set_ylabel(f"test {headline.heading}", color=INK)
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=5)
