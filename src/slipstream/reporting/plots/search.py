"""The plots of a search."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.ticker import LogLocator, MaxNLocator

from slipstream.reporting.formatting import format_value, shorten_names
from slipstream.reporting.plots.style import (
    ABOVE,
    FAINT,
    INK,
    MODEL,
    MUTED,
    STYLE,
    VALIDATION,
    annotate,
    draw_grid,
    draw_svg,
    use_log_if_wide,
    use_plain_numbers,
)
from slipstream.reporting.wording import get_chosen

Trial = Mapping[str, Any]
BEST = VALIDATION
STATES = {"finished": MODEL, "pruned": "#9ca3af", "failed": "#dc2626"}
MAX_LABEL, MAX_BARS = 14, 40


@dataclass(frozen=True)
class SettingAxis:
    """The axis of one searched setting."""

    name: str
    label: str
    choices: tuple[Any, ...] | None
    low: float = 0.0
    high: float = 0.0
    log: bool = False

    def get_position(self, value: Any) -> float:
        """Return the value, or the index of a choice."""
        return float(value if self.choices is None else self.choices.index(value))

    def get_height(self, value: Any) -> float:
        """Return the position between 0 (lowest) and 1 (highest)."""
        if self.choices is not None:
            return (self.get_position(value) + 0.5) / len(self.choices)
        low, high, at = self.low, self.high, float(value)
        if self.log:
            low, high, at = math.log(low), math.log(high), math.log(at)
        return (at - low) / (high - low) if high > low else 0.5

    def list_ticks(self) -> list[tuple[float, str]]:
        """List heights and labels of the ticks."""
        if self.choices is not None:
            names = [_shorten_label(format_value(choice)) for choice in self.choices]
            return list(zip(map(self.get_height, self.choices), names, strict=True))
        between = math.sqrt(self.low * self.high) if self.log else (self.low + self.high) / 2
        return [(self.get_height(at), f"{at:.3g}") for at in (self.low, between, self.high)]


def list_axes(space: Mapping[str, Any]) -> list[SettingAxis]:
    axes = []
    for name, label in shorten_names(space).items():
        entry = space[name]
        if isinstance(entry, Mapping):
            ends = float(entry["low"]), float(entry["high"])
            axes.append(SettingAxis(name, label, None, *ends, log=entry["log"]))
        else:
            axes.append(SettingAxis(name, label, tuple(entry)))
    return axes


def _shorten_label(name: str) -> str:
    return name if len(name) <= MAX_LABEL else f"{name[: MAX_LABEL - 1]}…"


def draw_all(
    summary: Mapping[str, Any], trials: Sequence[Trial], *, metric: str, curves: str
) -> dict[str, Any]:
    """Draw every plot, by its name in the template; `curves` labels the x-axis of the curves."""
    axes, best = list_axes(summary["space"]), get_chosen(summary)["trial"]
    finished, rows = select_finished(trials), len(summary["retrained"])
    shape = (12.4, 3.8) if len(axes) > 2 else (6.2, 2.6)
    with mpl.rc_context(STYLE):
        plots = {
            "history": draw_svg(plot_history, 12.4, 3.2, trials, metric),
            "curves": draw_svg(plot_curves, 12.4, 3.6, trials, best, metric, curves),
        }
        if summary["importances"]:
            plots["importances"] = draw_svg(plot_importances, 6.2, 2.9, summary["importances"])
        plots["ends"] = draw_svg(plot_ends, 6.2, 2.9, trials)
        plots["slices"] = draw_grid(plot_slice, [(axis, trials, best) for axis in axes], 2.5)
        if len(finished) > 1:
            plots["parallel"] = draw_svg(plot_parallel, *shape, axes, finished, best, metric)
        if rows:
            height = 0.9 + 0.32 * rows
            plots["retrained"] = draw_svg(plot_retrained, 12.4, height, summary, trials, metric)
    return plots


def select_finished(trials: Sequence[Trial]) -> list[Trial]:
    """Select the trials with a score; the value of a pruned trial is only its last loss."""
    return [one for one in trials if one["state"] == "finished"]


def plot_history(axes: Axes, trials: Sequence[Trial], metric: str) -> None:
    """Plot the score of every trial by its number, and the best score so far."""
    size = 6 if len(trials) <= 60 else 4 if len(trials) <= 250 else 3
    values: list[float] = []
    for state, colour in STATES.items():
        of_state = [trial for trial in trials if trial["state"] == state]
        points = [(t["trial"], t["value"]) for t in of_state if t["value"] is not None]
        values += [value for _, value in points]
        label = f"{state} ({len(of_state)})"
        if points:
            fill = colour if state == "finished" else "none"
            label += ", their last loss" if state == "pruned" else ""
            x, y = zip(*points, strict=True)
            axes.plot(x, y, "o", ms=size, mec=colour, mfc=fill, mew=0.9, label=label)
        elif of_state:
            _mark_below(axes, [t["trial"] for t in of_state], "x", color=colour, label=label)
    finished = select_finished(trials)
    best = np.minimum.accumulate([trial["value"] for trial in finished])
    end = [*(t["trial"] for t in finished), max(t["trial"] for t in trials)]
    axes.step(end, [*best, best[-1]], where="post", color=BEST, lw=1.8, label="best so far")
    axes.margins(y=0.1)
    _label_scores(axes, values, "trial", metric)


def _mark_below(axes: Axes, x: Sequence[float], marker: str, **options: Any) -> None:
    """Mark trials without a score at the bottom of the plot."""
    axes.plot(x, [0.02] * len(x), marker, transform=axes.get_xaxis_transform(), **options)


def _label_scores(axes: Axes, values: Sequence[float], unit: str, metric: str) -> None:
    use_log_if_wide(axes, values)
    axes.xaxis.set_major_locator(MaxNLocator(12, integer=True))
    axes.set(xlabel=unit, ylabel=f"validation {metric}")
    axes.legend(**ABOVE, ncols=4)


def plot_curves(axes: Axes, trials: Sequence[Trial], best: int, metric: str, unit: str) -> None:
    """Plot the validation losses of every trial, the chosen trial bold."""
    lines: dict[str, list[Any]] = {state: [] for state in STATES}
    losses: list[float] = []
    for trial in trials:
        points = [(int(at), loss) for at, loss in trial["losses"].items() if loss is not None]
        curve = np.array(sorted(points), dtype=float).reshape(-1, 2)  # epoch (or fold) and loss
        if not len(curve) or trial["state"] not in lines:
            continue
        losses += list(curve[:, 1])
        if trial["trial"] == best:
            axes.plot(*curve.T, color=BEST, lw=2.4, zorder=4, label=f"chosen, trial {best}")
        else:
            lines[trial["state"]].append(curve)
    faint = STATES | {"finished": "#60a5fa"}
    alpha = min(0.9, max(0.12, 20 / len(trials)))
    for state, curves in lines.items():
        if not curves:
            continue
        axes.add_collection(LineCollection(curves, colors=faint[state], lw=1, alpha=alpha))
        axes.plot([], [], color=faint[state], lw=1, label=state)
        if state != "finished":
            stops = np.array([curve[-1] for curve in curves])
            axes.plot(*stops.T, "o", ms=2.5, color=faint[state], alpha=min(1.0, 2 * alpha))
    axes.autoscale_view()
    _label_scores(axes, losses, unit, metric)


def plot_importances(axes: Axes, importances: Mapping[str, float]) -> None:
    """Plot how much each setting matters, the largest on top."""
    ranked = sorted(importances.items(), key=lambda item: item[1])
    names = shorten_names(importances)
    places = range(len(ranked))
    axes.barh(places, [100 * share for _, share in ranked], color=MODEL, height=0.6)
    for place, (_, share) in zip(places, ranked, strict=True):
        annotate(axes, f"{100 * share:.0f} %", (100 * share, place), xytext=(4, 0))
    axes.set_yticks(places, [_shorten_label(names[name]) for name, _ in ranked])
    axes.set_xlim(0, max(100 * ranked[-1][1] * 1.15, 1.0))
    axes.grid(axis="y", visible=False)
    axes.set(ylim=(-0.6, max(len(ranked), 4) - 0.4), xlabel="share of the effect, %")


def plot_ends(axes: Axes, trials: Sequence[Trial]) -> None:
    """Plot after how many epochs trials ended, by state."""
    states = [state for state in STATES if any(trial["state"] == state for trial in trials)]
    epochs = [
        [math.ceil(trial.get("epochs", 0.0)) for trial in trials if trial["state"] == state]
        for state in states
    ]
    most = max(max(counts) for counts in epochs)
    edges = np.arange(-0.5, most + 1) if most <= MAX_BARS else np.linspace(-0.5, most + 0.5, 31)
    axes.hist(
        epochs,
        bins=edges.tolist(),
        stacked=True,
        rwidth=0.85,
        color=[STATES[state] for state in states],
        label=[f"{state} ({len(counts)})" for state, counts in zip(states, epochs, strict=True)],
    )
    axes.xaxis.set_major_locator(MaxNLocator(10, integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.grid(axis="x", visible=False)
    axes.set(xlabel="epochs", ylabel="trials that ended")
    axes.legend(**ABOVE, ncols=3)


def plot_slice(axes: Axes, axis: SettingAxis, trials: Sequence[Trial], best: int) -> None:
    """Plot the score over one setting; marks at the bottom are trials without a score."""
    finished = select_finished(trials)
    size = 22 if len(finished) <= 60 else 12 if len(finished) <= 250 else 7
    positions = [_spread(axis, trial) for trial in finished]
    values = [trial["value"] for trial in finished]
    order = [trial["trial"] for trial in finished]
    axes.scatter(positions, values, s=size, c=order, cmap="Blues", vmin=-0.5 * max(order), lw=0)
    top = next(i for i, trial in enumerate(finished) if trial["trial"] == best)
    axes.scatter(positions[top], values[top], s=46, color=BEST, marker="D", zorder=4, lw=0)
    for state in ("pruned", "failed"):
        of_state = [trial for trial in trials if trial["state"] == state]
        # a trial of a damaged study may have lost a setting
        marks = [_spread(axis, trial) for trial in of_state if axis.name in trial["params"]]
        _mark_below(axes, marks, "|", ms=6, mew=0.8, color=STATES[state])
    axes.margins(y=0.14)  # clear of the marks
    use_log_if_wide(axes, values)
    axes.set_title(axis.label)
    if axis.choices is not None:
        rotation: dict[str, Any] = {"rotation": 25, "ha": "right"} if len(axis.choices) > 4 else {}
        names = [_shorten_label(format_value(choice)) for choice in axis.choices]
        axes.set_xticks(range(len(names)), names, **rotation)
        axes.set_xlim(-0.6, len(names) - 0.4)
        axes.grid(axis="x", visible=False)
    elif axis.log:
        axes.set_xscale("log")
        use_plain_numbers(axes.xaxis)
        margin = (axis.high / axis.low) ** 0.04 if axis.high > axis.low else 2.0
        axes.set_xlim(axis.low / margin, axis.high * margin)
    else:
        axes.xaxis.set_major_locator(MaxNLocator(4))
        margin = 0.04 * (axis.high - axis.low) or 1.0
        axes.set_xlim(axis.low - margin, axis.high + margin)


def _spread(axis: SettingAxis, trial: Trial) -> float:
    """Return the position of a trial; trials of one choice are spread side by side."""
    position = axis.get_position(trial["params"][axis.name])
    offset = (trial["trial"] * 0.618) % 1 - 0.5
    return position + 0.4 * offset if axis.choices is not None else position


def plot_parallel(
    axes: Axes, settings: Sequence[SettingAxis], finished: Sequence[Trial], best: int, metric: str
) -> None:
    """Plot a line per finished trial through its settings to its score: darker is better."""
    values = np.array([trial["value"] for trial in finished])
    wide = values.min() > 0 and values.max() > 3 * values.min()
    score = SettingAxis("", metric, None, values.min(), values.max(), log=bool(wide))
    ranked = sorted(finished, key=lambda trial: -trial["value"])
    lines, colours = [], mpl.colormaps["Blues"](np.linspace(0.15, 0.95, len(ranked)))
    for trial in ranked:
        offset = 0.3 * ((trial["trial"] * 0.618) % 1 - 0.5)
        heights = [
            axis.get_height(trial["params"][axis.name])
            + (offset / len(axis.choices) if axis.choices else 0.0)
            for axis in settings
        ]
        lines.append(list(enumerate([*heights, score.get_height(trial["value"])])))
        if trial["trial"] == best:
            axes.plot(*zip(*lines[-1], strict=True), color=BEST, lw=2.4, zorder=4)
    alpha = 0.9 if len(lines) <= 60 else 0.55
    axes.add_collection(LineCollection(lines, colors=colours, lw=1.1, alpha=alpha))
    box = {"facecolor": "white", "alpha": 0.75, "lw": 0, "pad": 1}
    place: dict[str, Any] = {"xytext": (5, 0), "fontsize": 8.5, "bbox": box, "zorder": 5}
    for position, axis in enumerate([*settings, score]):
        axes.axvline(position, color=INK, lw=0.9, zorder=2)
        for height, name in axis.list_ticks():
            annotate(axes, name, (position, height), **place)
    names = [*(_shorten_label(axis.label) for axis in settings), metric]
    axes.set_xticks(range(len(names)), names)
    axes.tick_params(axis="x", length=0, labelcolor=INK)
    axes.set(xlim=(-0.1, len(settings) + 0.35), ylim=(-0.05, 1.05), yticks=[])
    axes.grid(False)
    axes.spines[["left", "bottom"]].set_visible(False)


def plot_retrained(
    axes: Axes, summary: Mapping[str, Any], trials: Sequence[Trial], metric: str
) -> None:
    """Plot the loss of every seed, beside the score in the search."""
    scores = {result["trial"]: result["value"] for result in trials}
    rows = summary["retrained"][::-1]
    for row, result in enumerate(rows):
        losses = [loss for loss in result["losses"] if loss is not None]
        colour = BEST if result["chosen"] else FAINT if result["trial"] is None else MODEL
        axes.plot(losses, [row] * len(losses), "o", ms=7, color=colour, alpha=0.8)
        if result["mean"] is not None:
            axes.plot([result["mean"]] * 2, [row - 0.3, row + 0.3], color=INK, lw=1.6)
        if scores.get(result["trial"]) is not None:
            axes.plot(scores[result["trial"]], row, "D", ms=6, mfc="none", mec=MUTED)
    axes.plot([], [], "o", color=MODEL, label="other seeds")
    axes.plot([], [], color=INK, lw=1.6, label="their mean")
    axes.plot([], [], "D", mfc="none", mec=MUTED, label="in the search")
    losses = [loss for result in rows for loss in result["losses"] if loss is not None]
    if losses and min(losses) > 0 and max(losses) > 4 * min(losses):
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        use_plain_numbers(axes.xaxis)
    axes.set_yticks(range(len(rows)), [result["what"] for result in rows])
    axes.grid(axis="y", visible=False)
    axes.set(ylim=(-0.6, len(rows) - 0.4), xlabel=f"validation {metric}")
    axes.legend(**ABOVE, ncols=3)
