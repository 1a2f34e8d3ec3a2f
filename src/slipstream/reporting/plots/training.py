"""Plots of training: losses, learning rate, seeds, folds, time by phase and the machine's load."""

import itertools
import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np
from markupsafe import Markup, escape

from slipstream.reporting import wording
from slipstream.reporting.plots import losses
from slipstream.reporting.plots.chart import (
    CYCLE,
    FAINT,
    GREEN,
    GREY,
    MODEL,
    ORANGE,
    PURPLE,
    Chart,
    get_colour,
)
from slipstream.reporting.plots.scale import Scale, cover, number_places
from slipstream.reporting.wording import choose_layout

Rows = Sequence[dict[str, Any]]
MIN_SAMPLES, SHORT_S = 10, 0.5
MAX_POINTS = 400
MACHINE: dict[str, tuple[float, str, str]] = {
    "gpu_utilisation": (1.0, "GPU busy, %", MODEL),
    "power_w": (1.0, "power, W", ORANGE),
    "gpu_memory_bytes": (1e9, "GPU memory, GB", PURPLE),
    "cpu_percent": (100.0, "CPU cores busy", GREEN),
    "rss_bytes": (1e9, "memory, GB", GREY),
}
"""Unit, title and colour of each plotted sample"""


def draw_training(summary: dict[str, Any], events: Rows) -> dict[str, Any]:
    """Draw the plots that every kind of run has: losses, learning rate, time and machine."""
    if summary.get("members"):  # of an ensemble: nothing was trained
        return {}
    label = "loss" if summary.get("classes") else "loss (scaled)"
    plots: dict[str, Any] = {"rates": None, "lanes": None}
    if summary.get("lanes"):  # each lane has its own learning rate, so that is left out
        model = [lane for lane in summary["lanes"] if lane["best"]][-1]
        epochs: Rows = losses.group_by_lane(events).get(model["lane"], [])
        plots["losses"] = losses.draw_lane_losses(events, summary["lanes"], label)
        if summary["folds"]:
            plots["lanes"] = _draw_folds(summary)
        elif summary["spread"]:
            plots["lanes"] = _draw_seeds(summary)
    else:
        epochs = losses.group_by_lane(events).get(0, [])
        plots["losses"] = losses.draw_losses(events, summary["best_epoch"], label)
        plots["rates"] = _draw_rates(events)
    return plots | {
        "remark": losses.describe_curves(epochs),
        "time": _draw_time(wording.list_time_parts(summary), wording.get_total_s(summary)),
        "machine": _draw_machine([e for e in events if e["event"] == "monitor"]),
    }


def _draw_rates(events: Rows) -> Markup | None:
    logs = [e for e in events if e["event"] == "log" and e["lr"] is not None]
    if not logs:
        return None
    logs = logs[:: -(-len(logs) // MAX_POINTS)]
    x, y = [e["epoch"] for e in logs], [e["lr"] for e in logs]
    chart = Chart(
        Scale(0.0, max(x) or 1.0, whole=True), cover(y, zero=True), "epoch", "", 90, y_ticks=3
    )
    chart.line(x, y, PURPLE)
    losses.mark_exploit(chart, events)
    return chart.render()


def _draw_seeds(summary: dict[str, Any]) -> Markup:
    """Draw the test error of every seed, with their mean, the ensemble and the baselines."""
    lanes = [lane for lane in summary["lanes"] if lane["metrics"]]
    headline = choose_layout(summary).headline
    spread = summary["spread"][headline.key]
    low, high = spread["mean"] - spread["sd"], spread["mean"] + spread["sd"]
    levels = {"ensemble": summary["ensemble"]} if summary["ensemble"] else {}
    levels |= {name: one for name, one in summary["baselines"].items() if one}
    errors = {name: headline.read(one) for name, one in levels.items()}
    errors = {  # those that are near enough to share the plot
        name: error
        for name, error in errors.items()
        if error is not None and low - 4 * (high - low) < error < high + 4 * (high - low)
    }
    values = [headline.read(lane) for lane in lanes]
    x = number_places([str(lane["seed"]) for lane in lanes])
    y = cover([*values, *errors.values(), low, high], margin=0.08)
    chart = Chart(x, y, "seed", f"test {headline.heading}")
    chart.area([x.low, x.high], [low, low], [high, high], MODEL, opacity=0.15, label="mean ± sd")
    chart.hline(spread["mean"], MODEL)
    for name, error in errors.items():
        dash = "" if name == "ensemble" else "6 4"
        chart.hline(error, get_colour(name), dash=dash, label=name)
    best = [at for at, lane in enumerate(lanes) if lane["best"]]
    others = [at for at in range(len(lanes)) if at not in best]
    chart.dots(others, [values[at] for at in others], MODEL, size=7)
    label = "the model: best by validation"
    chart.dots(best, [values[at] for at in best], MODEL, size=9, square=True, label=label)
    return chart.render()


def _draw_folds(summary: dict[str, Any]) -> Markup:
    """Draw the test error by fold, with the baselines fitted to the same folds."""
    by_fold, headline = summary["folds"], choose_layout(summary).headline
    curves = {
        name: [headline.read(fold["baselines"][name]) for fold in by_fold]
        for name, baseline in summary["baselines"].items()
        if baseline
    }
    others: Rows = []
    if summary["ensemble"]:
        curves["ensemble"] = [headline.read(fold["ensemble"]) for fold in by_fold]
        others = [lane for lane in summary["lanes"] if lane["metrics"] and not lane["best"]]
    curves["model"] = [headline.read(fold) for fold in by_fold]
    values = [error for errors in curves.values() for error in errors]
    values += [headline.read(lane) for lane in others]
    x = number_places([fold["label"].split(" to ")[0] for fold in by_fold], most=5)
    y = cover(values, zero=headline.key == "mae")  # log-losses may differ little
    chart = Chart(x, y, "test block from", f"test {headline.heading}")
    chart.dots(
        [lane["fold"] - 1 for lane in others], [headline.read(lane) for lane in others], FAINT
    )
    for name, errors in curves.items():
        width = 2.4 if name == "model" else 1.4
        chart.line(range(len(errors)), errors, get_colour(name), width=width, label=name)
        chart.dots(range(len(errors)), errors, get_colour(name), size=3 * width)
    chart.hline(statistics.fmean(curves["model"]), MODEL, dash="2 3")
    return chart.render()


def _draw_time(phases: dict[str, float], total: float) -> Markup:
    """Draw the share of each phase as one bar, with the seconds in the legend."""
    shares = phases | {"other": max(total - sum(phases.values()), 0.0)}
    whole = sum(shares.values()) or 1.0
    bar, legend = "", ""
    colours = dict(zip(phases, itertools.cycle(CYCLE)))
    for name, spent in shares.items():
        colour = colours.get(name, FAINT)
        bar += f'<i style="width:{100 * spent / whole:.2f}%;background:{colour}"></i>'
        legend += f'<span><i class="full" style="--colour:{colour}"></i>{escape(name)} '
        legend += f"{spent:.1f} s</span>"
    strip = f'<div class="phases">{bar}</div>'
    return Markup(f'<div class="chart">{strip}<div class="legend">{legend}</div></div>')


def _draw_machine(samples: Sequence[dict[str, Any]]) -> Markup | None:
    """Draw the load of the GPU, or else of CPU and memory, over time."""
    if samples and samples[-1]["seconds"] < SHORT_S:  # cut short by the end of the run
        samples = samples[:-1]
    if len(samples) < MIN_SAMPLES:
        return None
    names = [name for name in MACHINE if all(name in sample for sample in samples)][:3]
    ends = np.cumsum([sample["seconds"] for sample in samples])
    unit, label = (60.0, "minutes") if ends[-1] > 180 else (1.0, "seconds")
    every = -(-len(samples) // MAX_POINTS)
    charts = Markup()
    for name in names:
        divisor, title, colour = MACHINE[name]
        values = [sample[name] / divisor for sample in samples[::every]]
        x, y = Scale(0.0, float(ends[-1] / unit)), cover(values, zero=True)
        chart = Chart(x, y, label, title, 90, y_ticks=3)
        chart.line(ends[::every] / unit, values, colour)
        charts += chart.render()
    return Markup('<div class="three">') + charts + Markup("</div>")
