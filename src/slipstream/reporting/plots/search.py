"""The plots of a search."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
from markupsafe import Markup

from slipstream.base.statistics import HIGHER_IS_BETTER
from slipstream.base.text import format_number
from slipstream.events import Event, TrialEnd
from slipstream.reporting.charts import (
    BLUE,
    GREEN,
    GREY,
    INK,
    MODEL,
    MUTED,
    ORANGE,
    PURPLE,
    RED,
    Chart,
    Scale,
    cover,
    number_places,
    render_bars,
)
from slipstream.reporting.wording import (
    format_value,
    get_chosen,
    get_tested_metric,
    name_candidate,
    name_ranking,
    shorten_names,
)
from slipstream.runs.summary import LeaderboardRow, RunSummary, SearchSummary, read_metric

Trial = Mapping[str, Any]
BEST = ORANGE
STATES = {"finished": BLUE, "pruned": GREY, "failed": RED}
MAX_LABEL, MAX_BARS = 14, 40
FEW = 60
"""Up to so many trials each is drawn large"""
SHADES = 5


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
        low, high, number = self.low, self.high, float(value)
        if self.log:
            low, high, number = math.log(low), math.log(high), math.log(number)
        return (number - low) / (high - low) if high > low else 0.5

    def build_scale(self) -> Scale:
        """Return the scale of a chart over this setting."""
        if self.choices is not None:
            names = [_shorten_label(format_value(choice)) for choice in self.choices]
            return number_places(names, limit=6)
        return cover([self.low, self.high], log=self.log)

    def list_ticks(self) -> list[tuple[float, str]]:
        """List heights and labels of the ticks."""
        if self.choices is not None:
            names = [_shorten_label(format_value(choice)) for choice in self.choices]
            return list(zip(map(self.get_height, self.choices), names, strict=True))
        between = math.sqrt(self.low * self.high) if self.log else (self.low + self.high) / 2
        return [(self.get_height(v), f"{v:.3g}") for v in (self.low, between, self.high)]


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
    summary: SearchSummary, trials: Sequence[Trial], *, metric: str, curves: str
) -> dict[str, Any]:
    """Draw every plot, by its name in the template; `curves` labels the x-axis of the curves."""
    axes, chosen = list_axes(summary["space"]), get_chosen(summary)["trial"]
    best = -1 if chosen is None else chosen  # the config without a search is no trial
    finished = select_finished(trials)
    plots: dict[str, Any] = {
        "history": draw_history(trials, metric),
        "curves": draw_curves(trials, best, metric, curves),
        "ends": draw_ends(trials),
        "slices": [(axis.label, draw_slice(axis, trials, best)) for axis in axes],
    }
    if summary["importances"]:
        plots["importances"] = draw_importances(summary["importances"])
    if len(finished) > 1:
        plots["parallel"] = draw_parallel(axes, finished, best, metric)
    if summary["retrained"]:
        plots["retrained"] = draw_retrained(summary, trials, metric)
    return plots


MAX_CANDIDATES = 20
"""Candidates of a leaderboard that are drawn beside the members and the baselines"""
MEMBER, OTHER, BASELINE = BLUE, GREY, ORANGE


def draw_answer(summary: SearchSummary, events: Sequence[Event]) -> dict[str, Any]:
    """Draw the plots of `slipstream auto`: its candidates, the weights, the error over time, and
    the test errors."""
    rows = summary["leaderboard"]
    metric = name_ranking(summary)
    weighted = [row for row in rows if row["weight"] > 0]
    weighted.sort(key=lambda row: -row["weight"])
    bars = [
        (name_candidate(row), row["weight"], f"{100 * row['weight']:.0f} %") for row in weighted
    ]
    return {
        "candidates": draw_candidates(rows, metric),
        "weights": render_bars(bars, colour=[_get_row_colour(row) for row in weighted]),
        "progress": draw_progress(events, rows, metric),
        "tests": draw_tests(summary),
    }


def _get_row_colour(row: LeaderboardRow) -> str:
    if row["state"] == "baseline":
        return BASELINE
    return MEMBER if row["weight"] > 0 else OTHER


def draw_candidates(rows: Sequence[LeaderboardRow], metric: str) -> Markup:
    """Draw mean and deviation over the validation blocks of the best candidates, of all members and
    of the baselines; members are filled."""
    ranked = [row for row in rows if row["val"] is not None]
    shown = [
        row
        for place, row in enumerate(ranked)
        if place < MAX_CANDIDATES or row["weight"] > 0 or row["state"] == "baseline"
    ][::-1]
    ends = [
        value + sign * (row["val_sd"] or 0.0)
        for row in shown
        if (value := row["val"]) is not None
        for sign in (-1, 1)
    ]
    x = cover([value for value in ends if value > 0], log=True, margin=0.04)
    ticks = tuple((float(place), name_candidate(row)) for place, row in enumerate(shown))
    y = Scale(-0.6, len(shown) - 0.4, ticks=ticks)
    chart = Chart(x, y, f"validation {metric}, mean ± deviation of the blocks")
    chart.height = 40 + 22 * len(shown)
    for place, row in enumerate(shown):
        value, colour = row["val"], _get_row_colour(row)
        assert value is not None
        if row["val_sd"]:
            low = max(value - row["val_sd"], x.low)
            chart.line([low, value + row["val_sd"]], [place, place], colour, width=1.6)
        is_baseline = row["state"] == "baseline"
        chart.dots([value], [place], colour, size=9, square=is_baseline, hollow=not row["weight"])
    chart.name("dot", MEMBER, "member")
    chart.name("dot hollow", OTHER, "not chosen")
    chart.name("square hollow", BASELINE, "baseline (filled: member)")
    return chart.render()


def draw_progress(
    events: Sequence[Event], rows: Sequence[LeaderboardRow], metric: str
) -> Markup | None:
    """Draw the score of every candidate when its training ended, and the best so far; None
    without any."""
    scores = {row["name"]: row["val"] for row in rows}
    points: list[tuple[float, float]] = []
    offset_s = last_s = 0.0
    for event in events:
        if event.at_s is None:
            continue
        if event.at_s < last_s:  # a resumed part counts from zero
            offset_s += last_s
        last_s = event.at_s
        value = scores.get(f"trial {event.trial}") if isinstance(event, TrialEnd) else None
        if value is not None:
            points.append((offset_s + event.at_s, value))
    if not points:
        return None
    seconds, values = ([point[axis] for point in points] for axis in (0, 1))
    levels = {
        row["name"]: row["val"]
        for row in rows
        if row["state"] == "baseline" and row["val"] is not None
    }
    best = min(levels, key=lambda name: levels[name], default=None)
    known = [levels[best]] if best is not None else []
    last = offset_s + last_s
    y = cover([*values, *known], log=True, margin=0.08)
    chart = Chart(Scale(0.0, last), y, "seconds", f"validation {metric}", 230)
    chart.dots(seconds, values, OTHER, size=6, label="candidates")
    lowest = np.minimum.accumulate(values)
    steps = np.repeat([*seconds, last], 2)[1:]
    chart.line(
        steps, np.repeat([*lowest, lowest[-1]], 2)[:-1], MEMBER, width=2.2, label="best so far"
    )
    if best is not None:
        chart.hline(levels[best], BASELINE, dash="6 4", label=f"best baseline, {best}")
    return chart.render()


def draw_tests(summary: SearchSummary) -> Markup:
    """Draw the test scores of the model, of its members and of the baselines, the best first."""
    result = cast(RunSummary, summary)
    metric = get_tested_metric(result, summary.get("ranked_by"))
    own = read_metric(result, "test", metric)
    rows: Sequence[LeaderboardRow] = summary["leaderboard"]
    members = [row for row in rows if row["weight"] > 0]
    answer = "the ensemble"
    if len(members) == 1:  # its own row would say the same
        answer = f"the model: {name_candidate(members[0])}"
        rows = [row for row in rows if row not in members]
    scores = [(name_candidate(row), row["test"], _get_row_colour(row)) for row in rows]
    scores.append((answer, own, GREEN))
    known = [(name, value, colour) for name, value, colour in scores if value is not None]
    sign = -1 if metric in HIGHER_IS_BETTER else 1
    known.sort(key=lambda entry: sign * entry[1])
    return render_bars(
        [(name, value, format_number(value)) for name, value, _ in known],
        colour=[colour for *_, colour in known],
    )


def select_finished(trials: Sequence[Trial]) -> list[Trial]:
    """Select the trials with a score, or those that were cut off, if none has one; the value of a
    pruned trial is only its last loss."""
    finished = [trial for trial in trials if trial["state"] == "finished"]
    cut_off = [
        trial for trial in trials if trial["state"] == "cut off" and trial["value"] is not None
    ]
    return finished or cut_off


def group_by_state(trials: Sequence[Trial]) -> dict[str, list[Trial]]:
    """Return the trials of each state that occurs, finished ones first."""
    states = dict.fromkeys([*STATES, *(trial["state"] for trial in trials)])
    groups = {state: [trial for trial in trials if trial["state"] == state] for state in states}
    return {state: group for state, group in groups.items() if group}


def get_state_colour(state: str) -> str:
    return STATES.get(state, PURPLE)


def draw_history(trials: Sequence[Trial], metric: str) -> Markup:
    """Draw the score of every trial by its number, and the best score so far."""
    if not trials:
        return Markup("")
    size = 7 if len(trials) <= FEW else 5
    y = cover([trial["value"] for trial in trials], log=True, margin=0.08)
    last = max(trial["trial"] for trial in trials)
    chart = Chart(
        Scale(-0.5, last + 0.5, whole=True), y, "trial", f"validation {metric}", 230, x_ticks=10
    )
    for state, group in group_by_state(trials).items():
        points = [(trial["trial"], trial["value"]) for trial in group if trial["value"] is not None]
        lost = [trial["trial"] for trial in group if trial["value"] is None]
        label = f"{state} ({len(group)})"
        label += ", their last loss" if points and state == "pruned" else ""
        hollow, colour = state != "finished", get_state_colour(state)
        x, values = ([point[i] for point in points] for i in (0, 1))
        chart.dots(x, values, colour, size=size + hollow, hollow=hollow, label=label)
        mark_below(chart, lost, colour)
    finished = select_finished(trials)
    if finished:
        best = np.minimum.accumulate([trial["value"] for trial in finished])
        steps = np.repeat([*(trial["trial"] for trial in finished), last], 2)[1:]
        lowest = np.repeat([*best, best[-1]], 2)[:-1]
        chart.line(steps, lowest, BEST, width=2.2, label="best so far")
    return chart.render()


def mark_below(chart: Chart, x: Sequence[float], colour: str) -> None:
    """Mark trials without a score at the bottom of the chart."""
    ends = chart.y.find_value(0.0), chart.y.find_value(0.05)
    chart.lines([([number, number], ends) for number in x], colour)


def draw_curves(trials: Sequence[Trial], best: int, metric: str, unit: str) -> Markup:
    """Draw the validation losses of every trial, the chosen trial bold."""
    curves = {trial["trial"]: _read_curve(trial) for trial in trials}
    points = [point for curve in curves.values() for point in curve]
    x = replace(cover([epoch for epoch, _ in points], margin=0.02), whole=True)
    y = cover([loss for _, loss in points], log=True)
    chart = Chart(x, y, unit, f"validation {metric}", 260, x_ticks=10)
    opacity = min(0.9, max(0.15, 20 / max(len(trials), 1)))
    for state, group in group_by_state(trials).items():
        curves_of_state = [curves[trial["trial"]] for trial in group if trial["trial"] != best]
        curves_of_state = [curve for curve in curves_of_state if curve]
        if not curves_of_state:
            continue
        colour = get_state_colour(state)
        traces = [([x for x, _ in curve], [y for _, y in curve]) for curve in curves_of_state]
        chart.lines(traces, colour, opacity=opacity, label=state)
        if state != "finished":
            stops = [curve[-1] for curve in curves_of_state]
            chart.dots([epoch for epoch, _ in stops], [loss for _, loss in stops], colour, size=4)
    if curves.get(best):
        epochs, losses = zip(*curves[best], strict=True)
        chart.line(epochs, losses, BEST, width=2.6, label=f"chosen, trial {best}")
        chart.dots(epochs, losses, BEST, size=6)
    return chart.render()


def _read_curve(trial: Trial) -> list[tuple[int, float]]:
    """Return epoch (or fold) and loss of every validation."""
    losses = trial["losses"].items()
    return sorted((int(epoch), float(loss)) for epoch, loss in losses if loss is not None)


def draw_importances(importances: Mapping[str, float]) -> Markup:
    """Draw how much each setting matters, the largest on top."""
    names = shorten_names(importances)
    ranked = sorted(importances.items(), key=lambda item: -item[1])
    return render_bars([(names[name], share, f"{100 * share:.0f} %") for name, share in ranked])


def draw_ends(trials: Sequence[Trial]) -> Markup:
    """Draw after how many epochs trials ended, by state, on top of each other."""
    groups = group_by_state(trials)
    epochs = {
        state: [math.ceil(trial.get("epochs", 0.0)) for trial in group]
        for state, group in groups.items()
    }
    most = max(max(counts) for counts in epochs.values())
    edges = np.arange(-0.5, most + 1) if most <= MAX_BARS else np.linspace(-0.5, most + 0.5, 31)
    bars = {state: np.histogram(counts, edges)[0] for state, counts in epochs.items()}
    highest = float(np.sum(list(bars.values()), axis=0).max())
    x = Scale(-0.5, most + 0.5, whole=True)
    y = Scale(0.0, 1.05 * highest, whole=True)
    chart = Chart(x, y, "epochs", "trials that ended", 200)
    floor, gap = np.zeros(len(edges) - 1), 0.08 * (edges[1] - edges[0])
    for state, counts in bars.items():
        full = counts > 0
        sides = (edges[:-1] + gap)[full], (edges[1:] - gap)[full]
        chart.boxes(sides, (floor[full], (floor + counts)[full]), get_state_colour(state))
        chart.name("full", get_state_colour(state), f"{state} ({len(groups[state])})")
        floor = floor + counts
    return chart.render()


def draw_slice(axis: SettingAxis, trials: Sequence[Trial], best: int) -> Markup:
    """Draw the score over one setting; marks at the bottom are trials without a score."""
    finished = select_finished(trials)
    values = [trial["value"] for trial in finished]
    chart = Chart(axis.build_scale(), cover(values, log=True, margin=0.14), height=150, x_ticks=4)
    size = 7 if len(finished) <= FEW else 4
    for shade in range(SHADES):  # later trials are darker
        part = finished[shade * len(finished) // SHADES : (shade + 1) * len(finished) // SHADES]
        x, y = [_spread(axis, trial) for trial in part], [trial["value"] for trial in part]
        chart.dots(x, y, MODEL, size=size, opacity=0.36 + 0.16 * shade)
    top = [trial for trial in finished if trial["trial"] == best]
    places = [_spread(axis, trial) for trial in top]
    chart.dots(places, [trial["value"] for trial in top], BEST, size=10, square=True)
    for state, group in group_by_state(trials).items():
        if state != "finished":  # a trial of a damaged study may have lost a setting
            marks = [_spread(axis, trial) for trial in group if axis.name in trial["params"]]
            mark_below(chart, marks, get_state_colour(state))
    return chart.render()


def _spread(axis: SettingAxis, trial: Trial) -> float:
    """Return the position of a trial; trials of one choice are spread side by side."""
    position = axis.get_position(trial["params"][axis.name])
    offset = (trial["trial"] * 0.618) % 1 - 0.5
    return position + 0.4 * offset if axis.choices is not None else position


def draw_parallel(
    settings: Sequence[SettingAxis], finished: Sequence[Trial], best: int, metric: str
) -> Markup:
    """Draw a line per finished trial through its settings to its score: darker is better."""
    values = np.array([trial["value"] for trial in finished])
    wide = values.min() > 0 and values.max() > 3 * values.min()
    score = SettingAxis("", metric, None, values.min(), values.max(), log=bool(wide))
    ranked = sorted(finished, key=lambda trial: -trial["value"])
    names = [*(_shorten_label(axis.label) for axis in settings), metric]
    ticks = tuple((float(number), name) for number, name in enumerate(names))
    chart = Chart(Scale(-0.1, len(settings) + 0.3, ticks=ticks), Scale(-0.05, 1.05, ticks=()))
    chart.height = 250
    lines = [(range(len(names)), _list_heights(settings, score, trial)) for trial in ranked]
    for shade in range(SHADES):
        part = lines[shade * len(lines) // SHADES : (shade + 1) * len(lines) // SHADES]
        chart.lines(part, MODEL, opacity=0.2 + 0.8 * shade / (SHADES - 1))
    for line, trial in zip(lines, ranked, strict=True):
        if trial["trial"] == best:
            chart.line(*line, BEST, width=2.6)
    for position, axis in enumerate([*settings, score]):
        chart.vline(position, INK, dash="")
        for height, name in axis.list_ticks():
            chart.note(position, height, name, kind="tag")
    return chart.render()


def _list_heights(settings: Sequence[SettingAxis], score: SettingAxis, trial: Trial) -> list[float]:
    """Return where a trial's line crosses each axis; lines of one choice are apart a little."""
    offset = 0.3 * ((trial["trial"] * 0.618) % 1 - 0.5)
    heights = [
        axis.get_height(trial["params"][axis.name])
        + (offset / len(axis.choices) if axis.choices else 0.0)
        for axis in settings
    ]
    return [*heights, score.get_height(trial["value"])]


def draw_retrained(summary: SearchSummary, trials: Sequence[Trial], metric: str) -> Markup:
    """Draw the loss of every seed, beside the score in the search."""
    scores = {result["trial"]: result["value"] for result in trials}
    rows = summary["retrained"][::-1]
    searched = [scores.get(result["trial"]) for result in rows]
    losses = [[loss for loss in result["losses"] if loss is not None] for result in rows]
    x = cover([*(loss for seeds in losses for loss in seeds), *searched], log=True)
    ticks = tuple((float(row), str(result["what"])) for row, result in enumerate(rows))
    y = Scale(-0.6, len(rows) - 0.4, ticks=ticks)
    chart = Chart(x, y, f"validation {metric}", height=30 + 32 * len(rows))
    for row, result in enumerate(rows):
        colour = BEST if result["chosen"] else MUTED if result["trial"] is None else MODEL
        chart.dots(losses[row], [row] * len(losses[row]), colour, size=9)
        if result["mean"] is not None:
            chart.line([result["mean"]] * 2, [row - 0.3, row + 0.3], INK, width=2)
        if searched[row] is not None:
            chart.dots([searched[row]], [row], MUTED, size=9, square=True, hollow=True)
    chart.name("dot", MODEL, "other seeds")
    chart.name("dot", BEST, "chosen")
    chart.name("line", INK, "their mean")
    chart.name("square hollow", MUTED, "in the search")
    return chart.render()
