"""The pictures of a search."""

from __future__ import annotations

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
from slipstream.reporting.plots.style import FAINT, INK, MODEL, MUTED, STYLE, VALIDATION
from slipstream.reporting.plots.svg import draw_grid, draw_svg, use_log_if_wide
from slipstream.reporting.wording import get_chosen

Trial = Mapping[str, Any]
FINISHED, PRUNED, FAILED = MODEL, "#9ca3af", "#dc2626"
BEST = VALIDATION
STATES = {"finished": FINISHED, "pruned": PRUNED, "failed": FAILED}
MOST_NAME, MOST_BARS = 14, 40


@dataclass(frozen=True)
class Setting:
    """One of the settings that were tried, and where its values lie on an axis."""

    name: str
    label: str
    choices: tuple[Any, ...] | None
    low: float = 0.0
    high: float = 0.0
    log: bool = False

    def place(self, value: Any) -> float:
        """The value; of a choice, its place among them."""
        return float(value if self.choices is None else self.choices.index(value))

    def height(self, value: Any) -> float:
        """From 0 to 1, from the lowest to the highest."""
        if self.choices is not None:
            return (self.place(value) + 0.5) / len(self.choices)
        low, high, at = self.low, self.high, float(value)
        if self.log:
            low, high, at = math.log(low), math.log(high), math.log(at)
        return (at - low) / (high - low) if high > low else 0.5

    def marks(self) -> list[tuple[float, str]]:
        """Heights and names of what an axis shows."""
        if self.choices is not None:
            return [(self.height(one), _cut(format_value(one))) for one in self.choices]
        between = math.sqrt(self.low * self.high) if self.log else (self.low + self.high) / 2
        return [(self.height(at), f"{at:.3g}") for at in (self.low, between, self.high)]


def list_settings(space: Mapping[str, Any]) -> list[Setting]:
    found = []
    for name, label in shorten_names(space).items():
        entry = space[name]
        if isinstance(entry, Mapping):
            ends = float(entry["low"]), float(entry["high"])
            found.append(Setting(name, label, None, *ends, log=entry["log"]))
        else:
            found.append(Setting(name, label, tuple(entry)))
    return found


def _cut(name: str) -> str:
    return name if len(name) <= MOST_NAME else f"{name[: MOST_NAME - 1]}…"


def draw_all(
    summary: Mapping[str, Any], trials: Sequence[Trial], *, metric: str, curves: str
) -> dict[str, Any]:
    """Every picture by the name that its place has on the page; `curves` is their axis' name."""
    settings, best = list_settings(summary["space"]), get_chosen(summary)["trial"]
    done = select_finished(trials)
    rows = len(summary["retrained"])
    shape = (12.4, 3.8) if len(settings) > 2 else (6.2, 2.6)
    with mpl.rc_context(STYLE):
        return {
            "history": draw_svg(history, 12.4, 3.2, trials, metric),
            "curves": draw_svg(learning, 12.4, 3.6, trials, best, metric, curves),
            "importances": draw_svg(importances, 6.2, 2.9, summary["importances"])
            if summary["importances"]
            else None,
            "ends": draw_svg(ends, 6.2, 2.9, trials),
            "slices": draw_grid(slices, [(one, trials, best) for one in settings], 2.5),
            "parallel": draw_svg(parallel, *shape, settings, done, best, metric)
            if len(done) > 1
            else None,
            "retrained": draw_svg(retrained, 12.4, 0.9 + 0.32 * rows, summary, trials, metric)
            if rows
            else None,
        }


def select_finished(trials: Sequence[Trial]) -> list[Trial]:
    """Those with a score; what was pruned has only the loss that it had then."""
    return [one for one in trials if one["state"] == "finished"]


def history(axes: Axes, trials: Sequence[Trial], metric: str) -> None:
    """Every trial's score in the order they were drawn, and the best until then."""
    size = 6 if len(trials) <= 60 else 4 if len(trials) <= 250 else 3
    shown: list[float] = []
    for state, colour in STATES.items():
        of_state = [one for one in trials if one["state"] == state]
        found = [(one["trial"], one["value"]) for one in of_state if one["value"] is not None]
        shown += [value for _, value in found]
        label = f"{state} ({len(of_state)})"
        if found:
            fill = colour if state == "finished" else "none"
            label += ", their last loss" if state == "pruned" else ""
            across, up = zip(*found, strict=True)
            axes.plot(across, up, "o", ms=size, mec=colour, mfc=fill, mew=0.9, label=label)
        elif of_state:
            places = [one["trial"] for one in of_state]
            below = axes.get_xaxis_transform()
            axes.plot(places, [0.02] * len(places), "x", color=colour, transform=below, label=label)
    done = select_finished(trials)
    best = np.minimum.accumulate([one["value"] for one in done])
    numbers = [one["trial"] for one in done]
    end = [*numbers, max(one["trial"] for one in trials)]
    axes.step(end, [*best, best[-1]], where="post", color=BEST, lw=1.8, label="best until then")
    axes.margins(y=0.1)
    use_log_if_wide(axes, shown)
    axes.xaxis.set_major_locator(MaxNLocator(12, integer=True))
    axes.set_xlabel("trial")
    axes.set_ylabel(f"validation {metric}")
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=4)


def learning(axes: Axes, trials: Sequence[Trial], best: int, metric: str, unit: str) -> None:
    """Every trial's validations, faint; the chosen one's bold."""
    lines: dict[str, list[Any]] = {"finished": [], "pruned": [], "failed": []}
    shown: list[float] = []
    for one in trials:
        curve = _curve(one)
        if not len(curve) or one["state"] not in lines:
            continue
        shown += list(curve[:, 1])
        if one["trial"] == best:
            axes.plot(*curve.T, color=BEST, lw=2.4, zorder=4, label=f"the chosen one, trial {best}")
        else:
            lines[one["state"]].append(curve)
    faint = {"finished": "#60a5fa", "pruned": PRUNED, "failed": FAILED}
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
    use_log_if_wide(axes, shown)
    axes.xaxis.set_major_locator(MaxNLocator(12, integer=True))
    axes.set_xlabel(unit)
    axes.set_ylabel(f"validation {metric}")
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=4)


def _curve(trial: Trial) -> Any:
    found = [(int(at), loss) for at, loss in trial["losses"].items() if loss is not None]
    return np.array(sorted(found), dtype=float).reshape(-1, 2)


def importances(axes: Axes, found: Mapping[str, float]) -> None:
    """The settings with the largest effect first."""
    ranked = sorted(found.items(), key=lambda item: item[1])
    names = shorten_names(found)
    places = range(len(ranked))
    axes.barh(places, [100 * share for _, share in ranked], color=MODEL, height=0.6)
    for place, (_, share) in zip(places, ranked, strict=True):
        axes.annotate(
            f"{100 * share:.0f} %",
            (100 * share, place),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            fontsize=9,
            color=MUTED,
        )
    axes.set_yticks(places, [_cut(names[name]) for name, _ in ranked])
    axes.set_xlim(0, max(100 * ranked[-1][1] * 1.15, 1.0))
    axes.set_ylim(-0.6, max(len(ranked), 4) - 0.4)
    axes.grid(axis="y", visible=False)
    axes.set_xlabel("share of the effect, %")


def ends(axes: Axes, trials: Sequence[Trial]) -> None:
    """After how many epochs trials ended, and how."""
    states = [state for state in STATES if any(one["state"] == state for one in trials)]
    epochs = [
        [math.ceil(one.get("epochs", 0.0)) for one in trials if one["state"] == state]
        for state in states
    ]
    most = max(max(each) for each in epochs)
    edges = np.arange(-0.5, most + 1) if most <= MOST_BARS else np.linspace(-0.5, most + 0.5, 31)
    axes.hist(
        epochs,
        bins=edges.tolist(),
        stacked=True,
        rwidth=0.85,
        color=[STATES[state] for state in states],
        label=[f"{state} ({len(each)})" for state, each in zip(states, epochs, strict=True)],
    )
    axes.xaxis.set_major_locator(MaxNLocator(10, integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.grid(axis="x", visible=False)
    axes.set_xlabel("epochs")
    axes.set_ylabel("trials that ended")
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=3)


def slices(axes: Axes, one: Setting, trials: Sequence[Trial], best: int) -> None:
    """Scores over one setting; the marks below are values of trials that have none."""
    done = select_finished(trials)
    size = 22 if len(done) <= 60 else 12 if len(done) <= 250 else 7
    across = [_spread(one, trial) for trial in done]
    values = [trial["value"] for trial in done]
    order = [trial["trial"] for trial in done]
    axes.scatter(across, values, s=size, c=order, cmap="Blues", vmin=-0.5 * max(order), lw=0)
    top = next(i for i, trial in enumerate(done) if trial["trial"] == best)
    axes.scatter(across[top], values[top], s=46, color=BEST, marker="D", zorder=4, lw=0)
    for state in ("pruned", "failed"):
        of_state = [trial for trial in trials if trial["state"] == state]
        # a trial of a damaged study may have lost a setting
        places = [_spread(one, trial) for trial in of_state if one.name in trial["params"]]
        below = axes.get_xaxis_transform()
        axes.plot(
            places, [0.02] * len(places), "|", ms=6, mew=0.8, color=STATES[state], transform=below
        )
    axes.margins(y=0.14)  # clear of the marks
    use_log_if_wide(axes, values)
    axes.set_title(one.label)
    if one.choices is not None:
        turned: dict[str, Any] = {"rotation": 25, "ha": "right"} if len(one.choices) > 4 else {}
        names = [_cut(format_value(choice)) for choice in one.choices]
        axes.set_xticks(range(len(names)), names, **turned)
        axes.set_xlim(-0.6, len(names) - 0.4)
        axes.grid(axis="x", visible=False)
    elif one.log:
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.xaxis.set_minor_formatter("")
        aside = (one.high / one.low) ** 0.04 if one.high > one.low else 2.0
        axes.set_xlim(one.low / aside, one.high * aside)
    else:
        axes.xaxis.set_major_locator(MaxNLocator(4))
        aside = 0.04 * (one.high - one.low) or 1.0
        axes.set_xlim(one.low - aside, one.high + aside)


def _spread(one: Setting, trial: Trial) -> float:
    """Where a trial stands; those of one choice stand beside each other."""
    at = one.place(trial["params"][one.name])
    aside = (trial["trial"] * 0.618) % 1 - 0.5
    return at + 0.4 * aside if one.choices is not None else at


def parallel(
    axes: Axes, settings: Sequence[Setting], done: Sequence[Trial], best: int, metric: str
) -> None:
    """A line per finished trial through its settings to its score: the darker, the better."""
    values = np.array([one["value"] for one in done])
    wide = values.min() > 0 and values.max() > 3 * values.min()
    score = Setting("", metric, None, values.min(), values.max(), log=bool(wide))
    ranked = sorted(done, key=lambda one: -one["value"])
    lines, colours = [], mpl.colormaps["Blues"](np.linspace(0.15, 0.95, len(ranked)))
    for one in ranked:
        aside = 0.3 * ((one["trial"] * 0.618) % 1 - 0.5)
        heights = [
            s.height(one["params"][s.name]) + (aside / len(s.choices) if s.choices else 0.0)
            for s in settings
        ]
        lines.append(list(enumerate([*heights, score.height(one["value"])])))
        if one["trial"] == best:
            axes.plot(*zip(*lines[-1], strict=True), color=BEST, lw=2.4, zorder=4)
    alpha = 0.9 if len(lines) <= 60 else 0.55
    axes.add_collection(LineCollection(lines, colors=colours, lw=1.1, alpha=alpha))
    box = {"facecolor": "white", "alpha": 0.75, "lw": 0, "pad": 1}
    for place, axis in enumerate([*settings, score]):
        axes.axvline(place, color=INK, lw=0.9, zorder=2)
        for height, name in axis.marks():
            axes.annotate(
                name,
                (place, height),
                xytext=(5, 0),
                textcoords="offset points",
                va="center",
                fontsize=8.5,
                color=MUTED,
                bbox=box,
                zorder=5,
            )
    axes.set_xticks(range(len(settings) + 1), [*(_cut(s.label) for s in settings), metric])
    axes.tick_params(axis="x", length=0, labelcolor=INK)
    axes.set_xlim(-0.1, len(settings) + 0.35)
    axes.set_ylim(-0.05, 1.05)
    axes.set_yticks([])
    axes.grid(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_visible(False)


def retrained(axes: Axes, summary: Mapping[str, Any], trials: Sequence[Trial], metric: str) -> None:
    """What every seed gave, beside the score of the search."""
    scores = {one["trial"]: one["value"] for one in trials}
    rows = summary["retrained"][::-1]
    for place, one in enumerate(rows):
        losses = [loss for loss in one["losses"] if loss is not None]
        colour = BEST if one["chosen"] else FAINT if one["trial"] is None else MODEL
        axes.plot(losses, [place] * len(losses), "o", ms=7, color=colour, alpha=0.8)
        if one["mean"] is not None:
            axes.plot([one["mean"]] * 2, [place - 0.3, place + 0.3], color=INK, lw=1.6)
        if scores.get(one["trial"]) is not None:
            axes.plot(scores[one["trial"]], place, "D", ms=6, mfc="none", mec=MUTED)
    axes.plot([], [], "o", color=MODEL, label="other seeds")
    axes.plot([], [], color=INK, lw=1.6, label="their mean")
    axes.plot([], [], "D", mfc="none", mec=MUTED, label="in the search")
    known = [loss for one in rows for loss in one["losses"] if loss is not None]
    if known and min(known) > 0 and max(known) > 4 * min(known):
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.xaxis.set_minor_formatter("")
    axes.set_yticks(range(len(rows)), [one["what"] for one in rows])
    axes.set_ylim(-0.6, len(rows) - 0.4)
    axes.grid(axis="y", visible=False)
    axes.set_xlabel(f"validation {metric}")
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=3)
