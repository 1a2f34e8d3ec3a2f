"""Plots of training: where the sets lie, losses, learning rate, seeds, folds, time by phase and the
machine's load."""

from __future__ import annotations

import itertools
import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from markupsafe import Markup, escape

from slipstream.base.text import format_epoch
from slipstream.events import Epoch, Event, Exploit, Log, MachineSample
from slipstream.reporting import wording
from slipstream.reporting.charts import (
    BLUE,
    CYCLE,
    FAINT,
    GREEN,
    GREY,
    MODEL,
    ORANGE,
    PURPLE,
    SKY,
    VALIDATION,
    Chart,
    Scale,
    cover,
    get_colour,
    number_places,
    render_svg,
    shorten,
)
from slipstream.reporting.wording import choose_layout
from slipstream.runs.summary import DataSummary, LaneSummary, RunSummary, Scores

Lanes = Sequence[LaneSummary]
"""The lanes of a summary"""
SETS = {
    "train": (BLUE, "training"),
    "val": (ORANGE, "validation"),
    "test": (GREEN, "test"),
    "unused": (FAINT, "not used"),
}
MIN_WIDTH = 0.002
"""Share of the chart's width that a short stretch has at least, so that it is visible"""
DASHES = ("", "6 3", "2 3")
"""Tell apart more curves than there are colours"""
MAX_LOSSES, MAX_SAMPLES = 1500, 400
"""Logged losses, and other values over time, that are drawn"""
NOTE_HEIGHT = 0.85
RISE = 0.1
"""How much the validation loss must rise after its best epoch to be worth a remark"""
MIN_SAMPLES, SHORT_S = 10, 0.5
MACHINE: dict[str, tuple[float, str, str]] = {
    "gpu_utilisation": (1.0, "GPU busy, %", MODEL),
    "power_w": (1.0, "power, W", ORANGE),
    "gpu_memory_bytes": (1e9, "GPU memory, GB", PURPLE),
    "cpu_percent": (100.0, "CPU cores busy", GREEN),
    "rss_bytes": (1e9, "memory, GB", GREY),
}
"""Unit, title and colour of each plotted sample"""


def draw_training(summary: RunSummary, events: Sequence[Event]) -> dict[str, Any]:
    """Draw the plots that every kind of run has: losses, learning rate, time and machine."""
    if not wording.was_trained(summary):
        return {}
    label = "loss" if summary.get("classes") else "loss (scaled)"
    plots: dict[str, Any] = {"rates": None, "lanes": None}
    if summary.get("lanes"):  # each lane has its own learning rate, so none is drawn
        model = [lane for lane in summary["lanes"] if lane["best"]][-1]
        epochs = group_by_lane(events).get(model["lane"], [])
        plots["losses"] = draw_lane_losses(events, summary["lanes"], label)
        if summary["folds"]:
            plots["lanes"] = _draw_folds(summary)
        elif summary["spread"]:
            plots["lanes"] = _draw_seeds(summary)
    else:
        epochs = group_by_lane(events).get(0, [])
        plots["losses"] = draw_losses(events, summary["best_epoch"], label)
        plots["rates"] = _draw_rates(events)
    return plots | {
        "remark": describe_curves(epochs),
        "time": _draw_time(wording.list_time_parts(summary), wording.get_total_s(summary)),
        "machine": _draw_machine([event for event in events if isinstance(event, MachineSample)]),
    }


def draw_losses(events: Sequence[Event], best_epoch: float, label: str) -> Markup:
    """Draw the training and validation loss of one model."""
    logs = [
        (event.epoch, event.loss)
        for event in events
        if isinstance(event, Log) and event.loss is not None and event.epoch is not None
    ]
    epochs = group_by_lane(events).get(0, [])
    chart = _start_chart(epochs, label, logs)
    if logs:
        x, y = zip(*logs[:: -(-len(logs) // MAX_LOSSES)], strict=True)
        chart.line(x, y, SKY, width=1, label="training, step by step")
    _draw_both(chart, epochs)
    chart.vline(best_epoch, note="best")
    mark_exploit(chart, events)
    return chart.render()


def draw_lane_losses(events: Sequence[Event], lanes: Lanes, label: str) -> Markup:
    """Draw the validation loss of every lane, and both losses of the lane that is the model."""
    model = [lane for lane in lanes if lane["best"]][-1]
    by_lane = group_by_lane(events)
    chart = _start_chart([event for epochs in by_lane.values() for event in epochs], label)
    curves = [by_lane[lane["lane"]] for lane in lanes if lane is not model]
    if curves:
        traces = [([e.epoch for e in curve], [e.val_loss for e in curve]) for curve in curves]
        chart.lines(traces, FAINT, label="validation of the others")
    _draw_both(chart, by_lane[model["lane"]])
    chart.vline(model["best_epoch"], note="best")
    mark_exploit(chart, events, model["lane"])
    return chart.render()


def mark_exploit(chart: Chart, events: Sequence[Event], lane: int = 0) -> None:
    """Mark where the epochs at a low learning rate began, if they did."""
    for event in events:
        if isinstance(event, Exploit) and (event.lane or 0) == lane:
            chart.vline(event.epoch, dash="6 3")
            # below the note on the best epoch, which may be near
            chart.note(event.epoch, chart.y.find_value(NOTE_HEIGHT), "low rate")


def describe_curves(epochs: Sequence[Epoch]) -> str:
    """Say so where training and validation loss part; empty where they do not."""
    if len(epochs) < 2:
        return ""
    best = min(range(len(epochs)), key=lambda number: epochs[number].val_loss)
    then, last = epochs[best], epochs[-1]
    if any(event.train_loss is None or event.train_loss <= 0 for event in (then, last)):
        return ""
    rise = last.val_loss / then.val_loss - 1 if then.val_loss > 0 else 0.0
    fall = 1 - last.train_loss / then.train_loss
    if rise >= RISE and fall > 0:
        return (
            f"The curves part: after epoch {format_epoch(then.epoch)} the training loss fell by "
            f"{100 * fall:.0f} % while the validation loss rose by {100 * rise:.0f} %, so the "
            "model began to memorise the training rows. More data, dropout, weight decay or a "
            "smaller model narrow the gap; the weights are those of the best epoch."
        )
    ratio = then.val_loss / then.train_loss
    if ratio >= 2:
        return (
            f"At the best epoch the validation loss is {ratio:.1f} times the training loss: the "
            "validation rows differ from the training rows, or the model memorises."
        )
    if best == len(epochs) - 1:
        return "The validation loss was lowest in the last epoch: more epochs may lower it further."
    return ""


def _start_chart(
    epochs: Sequence[Epoch], label: str, logs: Sequence[tuple[float, float]] = ()
) -> Chart:
    """Return an empty chart that has room for the losses of the epochs, and for those of `logs`, by
    epoch."""
    losses = [loss for event in epochs for loss in (event.train_loss, event.val_loss)]
    losses = [loss for loss in (*losses, *(loss for _, loss in logs)) if loss is not None]
    last = max((*(event.epoch for event in epochs), *(epoch for epoch, _ in logs)), default=1.0)
    x = Scale(0.0, last or 1.0, whole=True)
    return Chart(x, cover(losses, log=True), "epoch", label, 230)


def _draw_both(chart: Chart, epochs: Sequence[Epoch], *, is_named: bool = True) -> None:
    _draw_curve(chart, epochs, "train_loss", MODEL, label="training" if is_named else "")
    _draw_curve(chart, epochs, "val_loss", VALIDATION, label="validation" if is_named else "")


def _draw_curve(
    chart: Chart, epochs: Sequence[Epoch], field: str, colour: str, *, dash: str = "", label: str
) -> None:
    x, y = [event.epoch for event in epochs], [getattr(event, field) for event in epochs]
    values = [float("nan") if value is None else value for value in y]
    chart.line(x, values, colour, width=2, dash=dash, label=label)
    if len(x) < 25:
        chart.dots(x, values, colour, size=5)


def _draw_rates(events: Sequence[Event]) -> Markup | None:
    logs = [
        (event.epoch, event.lr)
        for event in events
        if isinstance(event, Log) and event.lr is not None and event.epoch is not None
    ]
    if not logs:
        return None
    x, y = zip(*logs[:: -(-len(logs) // MAX_SAMPLES)], strict=True)
    chart = Chart(
        Scale(0.0, max(x) or 1.0, whole=True), cover(y, zero=True), "epoch", "", 90, y_ticks=3
    )
    chart.line(x, y, PURPLE)
    mark_exploit(chart, events)
    return chart.render()


def _draw_seeds(summary: RunSummary) -> Markup:
    """Draw the test error of every seed, with their mean, the ensemble and the baselines."""
    lanes = [lane for lane in summary["lanes"] if lane["metrics"]]
    headline = choose_layout(summary).headline
    spread = (summary["spread"] or {})[headline.key]
    deviation = spread["sd"] or 0.0
    low, high = spread["mean"] - deviation, spread["mean"] + deviation
    levels: dict[str, Scores | None] = {"ensemble": summary["ensemble"], **summary["baselines"]}
    errors = {  # those that are near enough to share the plot
        name: error
        for name, result in levels.items()
        if result
        and (error := headline.read(result)) is not None
        and low - 4 * (high - low) < error < high + 4 * (high - low)
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
    best = [number for number, lane in enumerate(lanes) if lane["best"]]
    remaining = [number for number in range(len(lanes)) if number not in best]
    chart.dots(remaining, [values[number] for number in remaining], MODEL, size=7)
    label = "the model: best by validation"
    chart.dots(best, [values[number] for number in best], MODEL, size=9, square=True, label=label)
    return chart.render()


def _draw_folds(summary: RunSummary) -> Markup:
    """Draw the test error by fold, with the baselines fitted to the same folds."""
    by_fold, headline = summary["folds"] or [], choose_layout(summary).headline

    def read(scores: Scores | None) -> float:
        value = None if scores is None else headline.read(scores)
        return math.nan if value is None else value

    curves = {
        name: [read(fold["baselines"][name]) for fold in by_fold]
        for name, baseline in summary["baselines"].items()
        if baseline
    }
    remaining: Lanes = []
    if summary["ensemble"]:
        curves["ensemble"] = [read(fold["ensemble"]) for fold in by_fold]
        remaining = [lane for lane in summary["lanes"] if lane["metrics"] and not lane["best"]]
    curves["model"] = [read(fold) for fold in by_fold]
    values = [error for errors in curves.values() for error in errors]
    values += [read(lane) for lane in remaining]
    x = number_places([(fold["label"] or "").split(" to ")[0] for fold in by_fold], limit=5)
    y = cover(values, zero=headline.key == "mae")  # log-losses may differ little
    chart = Chart(x, y, "test block from", f"test {headline.heading}")
    chart.dots(
        [(lane["fold"] or 1) - 1 for lane in remaining], [read(lane) for lane in remaining], FAINT
    )
    for name, errors in curves.items():
        width = 2.4 if name == "model" else 1.4
        chart.line(range(len(errors)), errors, get_colour(name), width=width, label=name)
        chart.dots(range(len(errors)), errors, get_colour(name), size=3 * width)
    if math.isfinite(mean := statistics.fmean(curves["model"])):
        chart.hline(mean, MODEL, dash="2 3")
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


def _draw_machine(samples: Sequence[MachineSample]) -> Markup | None:
    """Draw the load of the GPU, or else of CPU and memory, over time."""
    if samples and samples[-1].seconds < SHORT_S:  # cut short by the end of the run
        samples = samples[:-1]
    if len(samples) < MIN_SAMPLES:
        return None
    complete = [
        name for name in MACHINE if all(getattr(sample, name) is not None for sample in samples)
    ]
    ends = np.cumsum([sample.seconds for sample in samples])
    unit, label = (60.0, "minutes") if ends[-1] > 180 else (1.0, "seconds")
    stride = -(-len(samples) // MAX_SAMPLES)
    charts = Markup()
    for name in complete[:3]:
        divisor, title, colour = MACHINE[name]
        values = [getattr(sample, name) / divisor for sample in samples[::stride]]
        x, y = Scale(0.0, float(ends[-1] / unit)), cover(values, zero=True)
        chart = Chart(x, y, label, title, 90, y_ticks=3)
        chart.line(ends[::stride] / unit, values, colour)
        charts += chart.render()
    return Markup('<div class="three">') + charts + Markup("</div>")


def draw_loss_curves(events_by_name: Mapping[str, Iterable[Event]]) -> Markup:
    """Draw the validation loss of several runs over the epochs, from the events of each.

    Of a run with several lanes, the lane with the lowest loss is drawn.
    """
    curves = {name: select_best_lane(list(events)) for name, events in events_by_name.items()}
    chart = _start_chart([epoch for curve in curves.values() for epoch in curve], "validation loss")
    for number, (name, curve) in enumerate(curves.items()):
        colour, dash = CYCLE[number % len(CYCLE)], DASHES[number // len(CYCLE) % len(DASHES)]
        _draw_curve(chart, curve, "val_loss", colour, dash=dash, label=name)
    return chart.render()


def select_best_lane(events: Sequence[Event]) -> list[Epoch]:
    """Return the epochs of the lane with the lowest validation loss."""
    lanes = group_by_lane(events).values()
    return min(lanes, key=lambda epochs: min(event.val_loss for event in epochs), default=[])


def group_by_lane(events: Sequence[Event]) -> dict[int, list[Epoch]]:
    """Return the epochs with a validation loss, by lane."""
    by_lane: dict[int, list[Epoch]] = defaultdict(list)
    for event in events:
        if isinstance(event, Epoch) and event.val_loss is not None:
            by_lane[event.lane or 0].append(event)
    return by_lane


def build_loss_chart(
    models: Iterable[Sequence[Epoch]], label: str = "loss (scaled)"
) -> Chart | None:
    """Return a chart of both losses of one or more models over the epochs, for a picture; None
    where no loss is known."""
    curves = [
        [e for e in epochs if e.train_loss is not None or e.val_loss is not None]
        for epochs in models
    ]
    curves = [epochs for epochs in curves if epochs]
    if not curves:
        return None
    chart = _start_chart([e for epochs in curves for e in epochs], label)
    for number, epochs in enumerate(curves):
        _draw_both(chart, epochs, is_named=number == 0)
    return chart


def draw_history(history: Sequence[Epoch]) -> str:
    """Return an SVG picture of the losses of one or more models, for a notebook; empty with fewer
    than two epochs or without a loss."""
    by_lane: dict[int, list[Epoch]] = defaultdict(list)
    for epoch in history:
        by_lane[epoch.lane or 0].append(epoch)
    chart = build_loss_chart(by_lane.values()) if len(history) > 1 else None
    if chart is None:
        return ""
    known = [epoch.val_loss for epoch in history if epoch.val_loss is not None]
    best = min((loss for loss in known if math.isfinite(loss)), default=None)
    chart.y_label += f", lowest in validation {best:.4g}" if best is not None else ""
    chart.height = 150
    return render_svg([chart], width=480)


def draw_timelines(data: DataSummary) -> Markup | None:
    """Draw one row for each series, or fold, with the sets in their colours."""
    rows = data.get("timelines")
    if not rows:
        return None
    ends = [end for row in rows for _, *pair in row["parts"] for end in pair]
    low, high = float(min(ends)), float(max(ends))
    x = Scale(low, high if high > low else low + 1.0, dates=data["dates"])
    ticks = tuple((float(-n), shorten(row["name"], 22)) for n, row in enumerate(rows))
    y = Scale(0.5 - len(rows), 0.5, ticks=ticks)
    label = "" if data["dates"] else data["time"] or "" if data["range"] else "row"
    chart = Chart(x, y, label, "", 22 * len(rows) + 8, x_ticks=5)
    shortest = MIN_WIDTH * (x.high - x.low)
    for name, (colour, text) in SETS.items():
        parts = [
            (first, max(last, first + shortest), -number)
            for number, row in enumerate(rows)
            for part, first, last in row["parts"]
            if part == name
        ]
        if not parts:
            continue
        begins, stops, places = (list(column) for column in zip(*parts, strict=True))
        heights = [place - 0.32 for place in places], [place + 0.32 for place in places]
        chart.boxes((begins, stops), heights, colour)
        chart.name("full", colour, text)
    return chart.render()
