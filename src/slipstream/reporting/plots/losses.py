"""Loss curves: of a run, of its lanes, and of several runs side by side."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from markupsafe import Markup

from slipstream.base.text import format_epoch
from slipstream.reporting.plots.chart import CYCLE, FAINT, MODEL, SKY, VALIDATION, Chart
from slipstream.reporting.plots.scale import Scale, cover

Events = Sequence[dict[str, Any]]
DASHES = ("", "6 3", "2 3")
"""Tell apart more curves than there are colours"""
MAX_POINTS = 1500
NOTE_HEIGHT = 0.85
RISE = 0.1
"""How much the validation loss must rise after its best epoch to be worth a remark"""


def draw_loss_curves(events_by_name: Mapping[str, Iterable[dict[str, Any]]]) -> Markup:
    """Draw the validation loss of several runs over the epochs, from the events of each.

    Of a run with several lanes, that with the lowest loss is drawn.
    """
    curves = {name: select_best_lane(list(each)) for name, each in events_by_name.items()}
    chart = _start_chart([epoch for curve in curves.values() for epoch in curve], "validation loss")
    for number, (name, curve) in enumerate(curves.items()):
        colour, dash = CYCLE[number % len(CYCLE)], DASHES[number // len(CYCLE) % len(DASHES)]
        _draw_curve(chart, curve, "val_loss", colour, dash=dash, label=name)
    return chart.render()


def select_best_lane(events: Events) -> Events:
    """Return the epochs of the lane with the lowest validation loss."""
    lanes = group_by_lane(events).values()
    return min(lanes, key=lambda epochs: min(e["val_loss"] for e in epochs), default=[])


def group_by_lane(events: Events) -> dict[int, list[dict[str, Any]]]:
    """Return the epochs with a validation loss, by lane."""
    by_lane: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for e in events:
        if e["event"] == "epoch" and e["val_loss"] is not None:
            by_lane[e.get("lane", 0)].append(e)
    return by_lane


def draw_losses(events: Events, best_epoch: float, label: str) -> Markup:
    """Draw the training and validation loss of one model."""
    logs = [e for e in events if e["event"] == "log" and e["loss"] is not None]
    epochs = group_by_lane(events).get(0, [])
    chart = _start_chart(
        [*epochs, *({"epoch": e["epoch"], "loss": e["loss"]} for e in logs)], label
    )
    if logs:
        some = logs[:: -(-len(logs) // MAX_POINTS)]
        x, y = [e["epoch"] for e in some], [e["loss"] for e in some]
        chart.line(x, y, SKY, width=1, label="training, step by step")
    _draw_both(chart, epochs)
    chart.vline(best_epoch, note="best")
    mark_exploit(chart, events)
    return chart.render()


def draw_lane_losses(events: Events, lanes: Events, label: str) -> Markup:
    """Draw the validation loss of every lane, and both losses of the lane that is the model."""
    model = [lane for lane in lanes if lane["best"]][-1]
    by_lane = group_by_lane(events)
    chart = _start_chart([e for epochs in by_lane.values() for e in epochs], label)
    others = [by_lane[lane["lane"]] for lane in lanes if lane is not model]
    if others:
        points = [([e["epoch"] for e in one], [e["val_loss"] for e in one]) for one in others]
        chart.lines(points, FAINT, label="validation of the others")
    _draw_both(chart, by_lane[model["lane"]])
    chart.vline(model["best_epoch"], note="best")
    mark_exploit(chart, events, model["lane"])
    return chart.render()


def mark_exploit(chart: Chart, events: Events, lane: int = 0) -> None:
    """Mark where the epochs at a low learning rate began, if they did."""
    for e in events:
        if e["event"] == "exploit" and e.get("lane", 0) == lane:
            chart.vline(e["epoch"], dash="6 3")
            # below the note on the best epoch, which may be near
            chart.note(e["epoch"], chart.y.find_value(NOTE_HEIGHT), "low rate")


def describe_curves(epochs: Events) -> str:
    """Say so where training and validation loss part; empty where they do not."""
    if len(epochs) < 2:
        return ""
    best = min(range(len(epochs)), key=lambda at: epochs[at]["val_loss"])
    then, last = epochs[best], epochs[-1]
    if any(e["train_loss"] is None or e["train_loss"] <= 0 for e in (then, last)):
        return ""
    rise = last["val_loss"] / then["val_loss"] - 1 if then["val_loss"] > 0 else 0.0
    fall = 1 - last["train_loss"] / then["train_loss"]
    if rise >= RISE and fall > 0:
        return (
            f"The curves part: after epoch {format_epoch(then['epoch'])} the training loss fell by "
            f"{100 * fall:.0f} % while the validation loss rose by {100 * rise:.0f} %, so the "
            "model began to memorise the training rows. More data, dropout, weight decay or a "
            "smaller model narrow the gap; the weights are those of the best epoch."
        )
    ratio = then["val_loss"] / then["train_loss"]
    if ratio >= 2:
        return (
            f"At the best epoch the validation loss is {ratio:.1f} times the training loss: the "
            "validation rows differ from the training rows, or the model memorises."
        )
    if best == len(epochs) - 1:
        return "The validation loss was lowest in the last epoch: more epochs may lower it further."
    return ""


def _start_chart(epochs: Events, label: str) -> Chart:
    keys = ("train_loss", "val_loss", "loss")
    losses = [e[key] for e in epochs for key in keys if e.get(key) is not None]
    last = max((e["epoch"] for e in epochs), default=1.0)
    x = Scale(0.0, last or 1.0, whole=True)
    return Chart(x, cover(losses, log=True), "epoch", label, 230)


def _draw_both(chart: Chart, epochs: Events) -> None:
    _draw_curve(chart, epochs, "train_loss", MODEL, label="training")
    _draw_curve(chart, epochs, "val_loss", VALIDATION, label="validation")


def _draw_curve(
    chart: Chart, epochs: Events, key: str, colour: str, *, dash: str = "", label: str
) -> None:
    x, y = [e["epoch"] for e in epochs], [e[key] for e in epochs]
    values = [float("nan") if value is None else value for value in y]
    chart.line(x, values, colour, width=2, dash=dash, label=label)
    if len(x) < 25:
        chart.dots(x, values, colour, size=5)
