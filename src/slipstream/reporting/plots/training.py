"""Plots of training: losses, learning rate, seeds, folds, time by phase and the machine's load."""

import itertools
import statistics
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from slipstream.reporting.formatting import choose_layout
from slipstream.reporting.plots.style import (
    ABOVE,
    COLOURS,
    FAINT,
    INK,
    MODEL,
    MUTED,
    VALIDATION,
    annotate,
    draw_svg,
    to_svg,
    use_log_if_wide,
)

Rows = Sequence[dict[str, Any]]
PHASES = ("#2563eb", "#93c5fd", "#10b981", "#f59e0b", "#a78bfa", "#9ca3af", "#e5e7eb")
MIN_SAMPLES, SHORT_S = 10, 0.5
MAX_TICKS = 12
MACHINE: dict[str, tuple[float, str, str]] = {
    "gpu_utilisation": (1.0, "GPU busy, %", MODEL),
    "power_w": (1.0, "power, W", "#f59e0b"),
    "gpu_memory_bytes": (1e9, "GPU memory, GB", "#a78bfa"),
    "cpu_percent": (100.0, "CPU cores busy", "#10b981"),
    "rss_bytes": (1e9, "memory, GB", "#9ca3af"),
}
"""Unit, title and colour of each plotted sample"""


def draw_training(summary: dict[str, Any], events: Rows) -> dict[str, Any]:
    """Draw the plots that every kind of run has: losses, learning rate, time and machine."""
    label = "loss" if summary.get("classes") else "loss (scaled)"
    if "lanes" in summary:  # each lane has its own learning rate, so that is left out
        losses = draw_svg(_plot_lane_losses, 6.2, 3.3, events, summary["lanes"], label)
        plots = {"losses": losses, "rates": None, "lanes": None}
        if summary["folds"]:
            plots["lanes"] = draw_svg(_plot_folds, 12.4, 3.2, summary)
        elif summary["spread"]:
            plots["lanes"] = draw_svg(_plot_seeds, 12.4, 3.0, summary)
    else:
        losses = draw_svg(_plot_losses, 6.2, 3.3, events, summary["best_epoch"], label)
        plots = {"losses": losses, "rates": draw_svg(_plot_rates, 6.2, 1.5, events)}
    phases = summary["seconds_by_phase"]
    return plots | {
        "time": draw_svg(_plot_time, 6.2, 1.5, phases, summary["seconds"]),
        "machine": _draw_machine([e for e in events if e["event"] == "monitor"]),
    }


def _plot_rows(axes: Axes, rows: Rows, x: str, y: str, **options: Any) -> None:
    axes.plot([row[x] for row in rows], [row[y] for row in rows], **options)


def _plot_losses(axes: Axes, events: Rows, best_epoch: float, label: str) -> None:
    logs = [e for e in events if e["event"] == "log" and e["loss"] is not None]
    epochs = [e for e in events if e["event"] == "epoch" and e["val_loss"] is not None]
    _plot_rows(axes, logs, "epoch", "loss", color="#bfdbfe", lw=1)
    _plot_rows(axes, epochs, "epoch", "train_loss", color=MODEL, label="training")
    _plot_rows(axes, epochs, "epoch", "val_loss", color=VALIDATION, label="validation")
    axes.axvline(best_epoch, color=MUTED, lw=0.8, ls=":")
    place: dict[str, Any] = {"xycoords": ("data", "axes fraction"), "xytext": (3, -9)}
    annotate(axes, "best", (best_epoch, 1), va="baseline", **place)
    use_log_if_wide(axes, [e["loss"] for e in logs] + [e["val_loss"] for e in epochs])
    axes.set(xlim=(0, None), xlabel="epoch", ylabel=label)
    axes.legend(loc="best")


def _plot_rates(axes: Axes, events: Rows) -> None:
    logs = [e for e in events if e["event"] == "log"]
    _plot_rows(axes, logs, "epoch", "lr", color="#a78bfa")
    axes.set(xlim=(0, None), ylim=(0, None), xlabel="epoch", ylabel="learning rate")
    axes.yaxis.set_major_locator(MaxNLocator(3))


def _plot_lane_losses(axes: Axes, events: Rows, lanes: Rows, label: str) -> None:
    """Plot every lane's validation loss, and both losses of the lane that is the model."""
    model = [lane for lane in lanes if lane["best"]][-1]
    val_losses: list[float] = []
    by_lane: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for e in events:
        if e["event"] == "epoch" and e["val_loss"] is not None:
            by_lane[e["lane"]].append(e)
    for lane in lanes:
        epochs = by_lane[lane["lane"]]
        val_losses += [e["val_loss"] for e in epochs]
        if lane is not model:
            _plot_rows(axes, epochs, "epoch", "val_loss", color=FAINT, lw=1, zorder=1)
            continue
        for key, colour, name in (
            ("train_loss", MODEL, "training"),
            ("val_loss", VALIDATION, "validation"),
        ):
            _plot_rows(axes, epochs, "epoch", key, color=colour, lw=2, label=name, zorder=3)
    if len(lanes) > 1:
        axes.plot([], [], color=FAINT, lw=1, label="validation of the others")
    axes.axvline(model["best_epoch"], color=MUTED, lw=0.8, ls=":")
    use_log_if_wide(axes, val_losses)
    axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    axes.set(xlim=(0, None), xlabel="epoch", ylabel=label)
    axes.legend(loc="best")


def _plot_seeds(axes: Axes, summary: dict[str, Any]) -> None:
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
    for name, baseline in summary["baselines"].items():
        error = headline.read(baseline) if baseline else None
        if error is not None and error < high + 4 * (high - low):  # near enough to share the plot
            axes.axhline(error, color=COLOURS[name], lw=1.2, ls="--", label=name)
    every = -(-len(lanes) // MAX_TICKS)
    axes.set_xticks(range(0, len(lanes), every), [str(lane["seed"]) for lane in lanes[::every]])
    axes.grid(axis="x", visible=False)
    axes.set(xlim=(-0.6, len(lanes) - 0.4), xlabel="seed", ylabel=f"test {headline.heading}")
    axes.legend(**ABOVE, ncols=4)


def _plot_folds(axes: Axes, summary: dict[str, Any]) -> None:
    """Plot the test error by fold, with the baselines fitted to the same folds."""
    by_fold, headline = summary["folds"], choose_layout(summary).headline
    places = range(len(by_fold))
    for name in summary["baselines"]:
        if summary["baselines"][name]:
            errors = [headline.read(fold["baselines"][name]) for fold in by_fold]
            axes.plot(places, errors, color=COLOURS[name], lw=1.1, marker=".", label=name)
    if summary["ensemble"]:
        errors = [headline.read(fold["ensemble"]) for fold in by_fold]
        axes.plot(places, errors, color=COLOURS["ensemble"], lw=1.4, marker=".", label="ensemble")
        others = [lane for lane in summary["lanes"] if lane["metrics"] and not lane["best"]]
        x, errors = [lane["fold"] - 1 for lane in others], [headline.read(lane) for lane in others]
        axes.plot(x, errors, color=MODEL, alpha=0.35, ls="", marker="o", ms=4)
    errors = [headline.read(fold) for fold in by_fold]
    axes.plot(places, errors, color=MODEL, lw=2, marker="o", label="model")
    axes.axhline(statistics.fmean(errors), color=MODEL, lw=0.8, ls=":")
    every = -(-len(by_fold) // MAX_TICKS)
    labels = [fold["label"].split(" to ")[0] for fold in by_fold[::every]]
    tick_options: dict[str, Any] = {"rotation": 25, "ha": "right"} if len(labels) > 4 else {}
    axes.set_xticks(range(0, len(by_fold), every), labels, fontsize=8.5, **tick_options)
    if headline.key == "mae":  # log-losses may differ little
        axes.set_ylim(bottom=0)
    axes.set(xlim=(-0.4, len(by_fold) - 0.6), xlabel="test block from")
    axes.set_ylabel(f"test {headline.heading}", color=INK)
    axes.legend(**ABOVE, ncols=5)


def _plot_time(axes: Axes, phases: dict[str, float], total: float) -> None:
    shares = phases | {"other": max(total - sum(phases.values()), 0.0)}
    left = 0.0
    for (name, spent), colour in zip(shares.items(), itertools.cycle(PHASES)):
        axes.barh(0, spent, left=left, color=colour, label=f"{name} {spent:.1f} s", height=0.5)
        left += spent
    axes.set(xlim=(0, max(left, 1e-9)), ylim=(-0.4, 0.4), yticks=[], xlabel="seconds")
    axes.grid(False)
    axes.spines["left"].set_visible(False)
    axes.legend(**ABOVE, ncols=4, handlelength=1, columnspacing=1.2)


def _draw_machine(samples: Sequence[dict[str, Any]]) -> str | None:
    """Draw the load of the GPU, or else of CPU and memory, over time."""
    if samples and samples[-1]["seconds"] < SHORT_S:  # cut short by the end of the run
        samples = samples[:-1]
    if len(samples) < MIN_SAMPLES:
        return None
    names = [name for name in MACHINE if all(name in sample for sample in samples)][:3]
    ends = np.cumsum([sample["seconds"] for sample in samples])
    unit, label = (60.0, "minutes") if ends[-1] > 180 else (1.0, "seconds")
    figure = Figure(figsize=(12.4, 1.9), layout="constrained")
    for place, name in enumerate(names, start=1):
        scale, title, colour = MACHINE[name]
        axes = figure.add_subplot(1, len(names), place)
        axes.plot(ends / unit, [sample[name] / scale for sample in samples], color=colour)
        axes.set(title=title, xlim=(0, None), ylim=(0, None), xlabel=label)
        axes.yaxis.set_major_locator(MaxNLocator(3))
    return to_svg(figure)
