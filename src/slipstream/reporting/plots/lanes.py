"""The pictures of a run of several models."""

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

MOST_TICKS = 12


def plot_losses(
    axes: Axes, events: Sequence[dict[str, Any]], lanes: Sequence[dict[str, Any]], label: str
) -> None:
    """Every lane's validation, and both losses of the one that is the model."""
    model = [lane for lane in lanes if lane["best"]][-1]
    shown = []
    by_lane: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for e in events:
        if e["event"] == "epoch" and e["val_loss"] is not None:
            by_lane[e["lane"]].append(e)
    for lane in lanes:
        epochs = by_lane[lane["lane"]]
        across, found = [e["epoch"] for e in epochs], [e["val_loss"] for e in epochs]
        shown += found
        if lane is not model:
            axes.plot(across, found, color=FAINT, lw=1, zorder=1)
            continue
        known = [e["train_loss"] for e in epochs]
        axes.plot(across, known, color=MODEL, lw=2, label="training", zorder=3)
        axes.plot(across, found, color=VALIDATION, lw=2, label="validation", zorder=3)
    if len(lanes) > 1:
        axes.plot([], [], color=FAINT, lw=1, label="validation of the others")
    axes.axvline(model["best_epoch"], color=MUTED, lw=0.8, ls=":")
    use_log_if_wide(axes, shown)
    axes.set_xlim(left=0)
    axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    axes.set_xlabel("epoch")
    axes.set_ylabel(label)
    axes.legend(loc="best")


def plot_seeds(axes: Axes, summary: dict[str, Any]) -> None:
    """The test error from every seed, beside their mean, the ensemble and the baselines."""
    lanes = [lane for lane in summary["lanes"] if lane["metrics"]]
    headline = choose_layout(summary).headline
    spread = summary["spread"][headline.key]
    low, high = spread["mean"] - spread["sd"], spread["mean"] + spread["sd"]
    axes.axhspan(low, high, color=MODEL, alpha=0.1, lw=0, label="mean ± sd")
    axes.axhline(spread["mean"], color=MODEL, lw=1)
    for place, lane in enumerate(lanes):
        marker, size = ("D", 7) if lane["best"] else ("o", 5)
        label = "the model: best by validation" if lane["best"] else None
        error = headline.of(lane)
        axes.plot(place, error, color=MODEL, ls="", marker=marker, ms=size, label=label)
    if summary["ensemble"]:
        error = headline.of(summary["ensemble"])
        axes.axhline(error, color=COLOURS["ensemble"], lw=1.6, label="ensemble")
    _levels(axes, summary, high + 4 * (high - low))
    every = -(-len(lanes) // MOST_TICKS)
    axes.set_xticks(range(0, len(lanes), every), [str(lane["seed"]) for lane in lanes[::every]])
    axes.set_xlim(-0.6, len(lanes) - 0.4)
    axes.grid(axis="x", visible=False)
    axes.set_xlabel("seed")
    axes.set_ylabel(f"test {headline.heading}")
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=4)  # clear of the points


def _levels(axes: Axes, summary: dict[str, Any], most: float) -> None:
    """Baselines near enough to share the picture."""
    headline = choose_layout(summary).headline
    for name, found in summary["baselines"].items():
        error = headline.of(found) if found else None
        if error is not None and error < most:
            axes.axhline(error, color=COLOURS[name], lw=1.2, ls="--", label=name)


def plot_folds(axes: Axes, summary: dict[str, Any]) -> None:
    """The test error from fold to fold, in time, beside the baselines fitted to the same folds."""
    found, lanes, headline = summary["folds"], summary["lanes"], choose_layout(summary).headline
    places = range(len(found))
    for name in summary["baselines"]:
        if summary["baselines"][name]:
            errors = [headline.of(fold["baselines"][name]) for fold in found]
            axes.plot(places, errors, color=COLOURS[name], lw=1.1, marker=".", label=name)
    if summary["ensemble"]:
        errors = [headline.of(fold["ensemble"]) for fold in found]
        axes.plot(places, errors, color=COLOURS["ensemble"], lw=1.4, marker=".", label="ensemble")
        others = [lane for lane in lanes if lane["metrics"] and not lane["best"]]
        across = [lane["fold"] - 1 for lane in others]
        errors = [headline.of(lane) for lane in others]
        axes.plot(across, errors, color=MODEL, alpha=0.35, ls="", marker="o", ms=4)
    errors = [headline.of(fold) for fold in found]
    axes.plot(places, errors, color=MODEL, lw=2, marker="o", label="model")
    axes.axhline(statistics.fmean(errors), color=MODEL, lw=0.8, ls=":")
    every = -(-len(found) // MOST_TICKS)
    labels = [fold["label"].split(" to ")[0] for fold in found[::every]]
    turned: dict[str, Any] = {"rotation": 25, "ha": "right"} if len(labels) > 4 else {}
    axes.set_xticks(range(0, len(found), every), labels, fontsize=8.5, **turned)
    axes.set_xlim(-0.4, len(found) - 0.6)
    if headline.key == "mae":  # log-losses differ little where there is little to see
        axes.set_ylim(bottom=0)
    axes.set_xlabel("test block from")
    axes.set_ylabel(f"test {headline.heading}", color=INK)
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=5)
