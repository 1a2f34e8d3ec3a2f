"""Plots of a classifier."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from slipstream.reporting.plots.style import INK, MODEL, MUTED, label_series, shorten

MAX_NAMED, MAX_COUNTED = 30, 12
MAX_BARS, MAX_LINES = 24, 4
LINES = (MODEL, "#f59e0b", "#10b981", "#a78bfa")


def plot_confusion(axes: Axes, names: Sequence[str], counts: Sequence[Sequence[int]]) -> None:
    """Plot labels down, predictions across; shades are shares of the label's windows."""
    matrix = np.array(counts, dtype=float)
    shares = matrix / np.maximum(matrix.sum(axis=1, keepdims=True), 1)
    axes.imshow(shares, cmap="Blues", vmin=0, vmax=1, aspect="auto")
    every = -(-len(names) // MAX_NAMED)
    ticks, labels = range(0, len(names), every), [shorten(name) for name in names[::every]]
    tick_options: dict[str, Any] = {"rotation": 40, "ha": "right"} if len(labels) > 4 else {}
    axes.set_xticks(ticks, labels, **tick_options)
    axes.set_yticks(ticks, labels)
    axes.set(xlabel="predicted", ylabel="label")
    axes.grid(False)
    if len(names) > MAX_COUNTED:
        return
    for i, j in np.ndindex(*matrix.shape):
        colour = "white" if shares[i, j] > 0.55 else INK
        text = f"{int(matrix[i, j]):,}\n{100 * shares[i, j]:.0f} %"
        axes.text(j, i, text, ha="center", va="center", color=colour, fontsize=9)


def plot_reliability(axes: Axes, bins: Sequence[dict[str, float]], error: float) -> None:
    """Plot how often the predicted class was right over its probability."""
    full = [each for each in bins if each["count"]]
    total = sum(each["count"] for each in full)
    middles = [(each["low"] + each["high"]) / 2 for each in full]
    shares = [each["count"] / total for each in full]
    width = full[0]["high"] - full[0]["low"]
    axes.bar(middles, shares, width=0.94 * width, color="#dbeafe", label="share of windows")
    axes.plot([0, 1], [0, 1], color=MUTED, lw=0.9, ls="--", label="perfect calibration")
    points = zip(*((each["confidence"], each["accuracy"]) for each in full), strict=True)
    axes.plot(*points, color=MODEL, marker="o", ms=5, label="the model")
    axes.set(xlim=(max(min(each["low"] for each in full) - width, 0), 1), ylim=(0, 1))
    axes.set(xlabel="probability of the predicted class", ylabel="accuracy")
    axes.set_title(f"expected calibration error {error:.3f}", fontsize=9.5, color=MUTED)
    axes.legend(loc="upper left")


def plot_by_series(axes: Axes, per_series: dict[str, dict[str, float]]) -> None:
    """Plot the accuracy of the worst series."""
    worst = sorted(per_series, key=lambda name: per_series[name]["accuracy"])[:MAX_BARS]
    accuracies = [per_series[name]["accuracy"] for name in worst]
    axes.bar(range(len(worst)), accuracies, color=MODEL, width=0.7)
    turn = len("".join(map(shorten, worst))) > 60
    label_series(axes, worst, len(per_series), turn=turn)
    axes.set(ylim=(0, 1), ylabel="accuracy")


def plot_window(axes: Axes, one: dict[str, Any]) -> None:
    """Plot the inputs of a misclassified window, each scaled to its own range."""
    inputs = list(one["inputs"].items())[:MAX_LINES]
    for (name, values), colour in zip(inputs, LINES, strict=False):
        y = np.array(values, dtype=float)
        low, high = float(y.min()), float(y.max())
        scaled = (y - low) / (high - low) if high > low else np.full_like(y, 0.5)
        label = f"{shorten(name)}\n{low:.3g} to {high:.3g}"
        axes.plot(np.arange(len(y)) - len(y) + 1, scaled, color=colour, lw=1.1, label=label)
    axes.set_title(
        f"{shorten(one['series'])} · {format_time(one)} · label {one['label']} "
        f"({100 * one['p_label']:.1f} %), predicted {one['predicted']}"
    )
    axes.set(yticks=[], ylim=(-0.05, 1.05), xlabel="rows before the window's end")
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1), fontsize=8)


def format_time(one: dict[str, Any]) -> str:
    """Format the time of a window, or its row number."""
    if one["time"] is None:
        return f"row {one['row']:,}"
    if isinstance(one["time"], str):
        day, _, hour = one["time"].partition("T")
        return day if hour == "00:00:00.000000" else f"{day} {hour[:8]}"
    return f"{one['time']:.10g}"
