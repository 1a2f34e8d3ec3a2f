"""Plots of training: losses, learning rate, time by phase and the machine's load."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from slipstream.reporting.plots import lanes
from slipstream.reporting.plots.style import MODEL, MUTED, VALIDATION
from slipstream.reporting.plots.svg import draw_svg, to_svg, use_log_if_wide

PHASES = ("#2563eb", "#93c5fd", "#10b981", "#f59e0b", "#a78bfa", "#9ca3af", "#e5e7eb")
MIN_SAMPLES, SHORT_S = 10, 0.5
MACHINE: dict[str, tuple[float, str, str]] = {
    "gpu_utilisation": (1.0, "GPU busy, %", MODEL),
    "power_w": (1.0, "power, W", "#f59e0b"),
    "gpu_memory_bytes": (1e9, "GPU memory, GB", "#a78bfa"),
    "cpu_percent": (100.0, "CPU cores busy", "#10b981"),
    "rss_bytes": (1e9, "memory, GB", "#9ca3af"),
}
"""Unit, title and colour of each plotted sample"""


def draw_training(summary: dict[str, Any], events: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Draw the plots that every kind of run has: losses, learning rate, time and machine."""
    return {
        **(_draw_lanes if "lanes" in summary else _draw_single)(summary, events),
        "time": draw_svg(_plot_time, 6.2, 1.5, summary["seconds_by_phase"], summary["seconds"]),
        "machine": _draw_machine([e for e in events if e["event"] == "monitor"]),
    }


def _draw_single(summary: dict[str, Any], events: Sequence[dict[str, Any]]) -> dict[str, Any]:
    losses = draw_svg(_plot_losses, 6.2, 3.3, events, summary["best_epoch"], _label_loss(summary))
    return {"losses": losses, "rates": draw_svg(_plot_rates, 6.2, 1.5, events)}


def _draw_lanes(summary: dict[str, Any], events: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Draw the curves of all lanes; each has its own learning rate, so that is left out."""
    plots = {
        "losses": draw_svg(
            lanes.plot_losses, 6.2, 3.3, events, summary["lanes"], _label_loss(summary)
        ),
        "rates": None,
    }
    if summary["folds"]:
        return plots | {"lanes": draw_svg(lanes.plot_folds, 12.4, 3.2, summary)}
    return plots | {
        "lanes": draw_svg(lanes.plot_seeds, 12.4, 3.0, summary) if summary["spread"] else None
    }


def _label_loss(summary: dict[str, Any]) -> str:
    return "loss" if summary.get("classes") else "loss (scaled)"


def _plot_losses(
    axes: Axes, events: Sequence[dict[str, Any]], best_epoch: float, label: str
) -> None:
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
    losses = [e["loss"] for e in logs] + [e["val_loss"] for e in epochs]
    use_log_if_wide(axes, losses)
    axes.set_xlim(left=0)
    axes.set_xlabel("epoch")
    axes.set_ylabel(label)
    axes.legend(loc="best")


def _plot_rates(axes: Axes, events: Sequence[dict[str, Any]]) -> None:
    logs = [e for e in events if e["event"] == "log"]
    axes.plot([e["epoch"] for e in logs], [e["lr"] for e in logs], color="#a78bfa")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("epoch")
    axes.set_ylabel("learning rate")
    axes.yaxis.set_major_locator(MaxNLocator(3))


def _plot_time(axes: Axes, phases: dict[str, float], total: float) -> None:
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
        axes.set_title(title)
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=0)
        axes.set_xlabel(label)
        axes.yaxis.set_major_locator(MaxNLocator(3))
    return to_svg(figure)
