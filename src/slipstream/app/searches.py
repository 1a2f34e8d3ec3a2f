"""Searches in the app: spaces of settings and tables of trials."""

from __future__ import annotations

import json
import math
import time
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any, cast

from slipstream import config as configs
from slipstream import runs
from slipstream.app import forms
from slipstream.app.jobs import AppJob, read_object
from slipstream.app.paths import MissingError
from slipstream.base.errors import UserError
from slipstream.base.run_names import SEARCHES, find_kind
from slipstream.config import Config, Range, search_space
from slipstream.events import (
    End,
    Event,
    RetrainingStart,
    SearchEnd,
    SearchStart,
    TrialEnd,
    format_event,
)
from slipstream.reporting.wording import format_metric, get_chosen, shorten_names
from slipstream.runs.summary import SCALED, RunSummary, SearchSummary

RANGE, CHOICES = "range", "choices"
MAX_ROWS = 100
MAX_TEXT = 10_000
COMMON = (
    *("train.lr", "train.weight_decay", "model.dropout", "model.hidden", "train.batch"),
    *("model.layers", "model.kind", "data.context", "train.optimizer", "train.schedule"),
)
"""Settings that are offered first"""


def parse_rows(rows: Any) -> dict[str, Any]:
    """Return the rows of the editor as `[tune.space]` has them. Mistakes are left to the config, so
    that the messages are those of the command line."""
    if rows is None:
        return {}
    if not isinstance(rows, list) or len(rows) > MAX_ROWS:
        raise UserError(f"space: expected a list of at most {MAX_ROWS} settings")
    space: dict[str, Any] = {}
    for row in rows:
        if not isinstance(row, dict) or not all(map(_is_cell, row.values())):
            raise UserError("space: expected rows of texts")
        name = str(row.get("setting", "")).strip()
        if not name:
            raise UserError(
                "tune.space: choose a setting for every row, or remove the row",
                setting="tune.space",
            )
        if name in space:
            raise UserError(
                f'tune.space has "{name}" twice; remove one of them', setting="tune.space"
            )
        space[name] = _parse_choices(row) if row.get("kind") == CHOICES else _parse_range(row)
    return space


def _is_cell(value: Any) -> bool:
    return isinstance(value, bool) or (isinstance(value, str) and len(value) <= MAX_TEXT)


def _parse_range(row: Mapping[str, Any]) -> dict[str, Any]:
    ends = {key: str(row.get(key, "")).strip() for key in ("low", "high", "step")}
    entry = {key: _parse_value(text) for key, text in ends.items() if text}
    return entry | ({"log": True} if row.get("log") else {})


def _parse_choices(row: Mapping[str, Any]) -> list[Any]:
    """Return the values of a list: TOML values, separated by commas; names need no quotes."""
    text = str(row.get("choices", "")).strip()
    values: list[Any]
    try:
        values = tomllib.loads(f"values = [{text}]")["values"]
    except (ValueError, RecursionError):
        values = [_parse_value(part.strip()) for part in text.split(",") if part.strip()]
    is_wrapped = text.startswith("[") and len(values) == 1 and isinstance(values[0], list)
    return list(values[0]) if is_wrapped else values


def _parse_value(text: str) -> Any:
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, bool | int | float | str | list) else text


def list_rows(space: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the rows of the editor for a space."""
    rows = []
    for name, entry in space.items():
        row: dict[str, Any] = {"setting": name}
        if isinstance(entry, Range):
            texts = {key: getattr(entry, key) for key in ("low", "high", "step")}
            row |= {"kind": RANGE, "log": entry.log}
            row |= {
                key: "" if number is None else _format_number(number)
                for key, number in texts.items()
            }
        else:
            is_plain = all(map(_is_plain, entry))
            values = ", ".join(_format_choice(choice, is_plain=is_plain) for choice in entry)
            is_nested = len(entry) == 1 and isinstance(entry[0], list | tuple)
            row |= {"kind": CHOICES, "choices": f"[{values}]" if is_nested else values}
        rows.append(row)
    return rows


def _format_number(value: float) -> str:
    """Return a number as people type it: 1e-4, not 0.0001, which TOML reads alike."""
    if not math.isfinite(value):
        return str(value)
    if isinstance(value, float) and (0 < abs(value) < 1e-2 or abs(value) >= 1e6):
        mantissa, _, exponent = f"{value!r}".partition("e")
        if not exponent:
            mantissa, _, exponent = f"{value:.15e}".partition("e")
            mantissa = mantissa.rstrip("0").rstrip(".")
        short = f"{mantissa}e{int(exponent)}"
        return short if float(short) == value else repr(value)
    return repr(value)


def _is_plain(value: Any) -> bool:
    """Return whether a choice needs no quotes: it is no text, or reads as nothing else."""
    if not isinstance(value, str):
        return True
    is_simple = bool(value) and value.isprintable() and value == value.strip() and "," not in value
    return is_simple and value[0] not in "[\"'" and _parse_value(value) == value


def _format_choice(value: Any, *, is_plain: bool) -> str:
    if isinstance(value, str):
        return value if is_plain else forms.format_toml(value)
    return _format_number(value) if isinstance(value, float) else forms.format_toml(value)


def list_settings() -> list[dict[str, Any]]:
    """Return the settings that can be searched, with the editor's suggestions for each."""
    controls = {control.setting: control for control in forms.list_controls(forms.TUNE)}
    values = Config().model_dump()  # numbers to suggest ranges from, not "auto"
    names = [name for name in search_space.list_searchable() if name in controls]
    names.sort(key=lambda name: (name not in COMMON, COMMON.index(name) if name in COMMON else 0))
    return [
        {
            "name": name,
            "help": controls[name].summary.rstrip(".") + ".",
            "default": forms.format_value(forms.get_value(values, name)),
            "limits": controls[name].limits,
            "choices": [
                choice for choice in controls[name].choices if choice not in ("auto", "off")
            ],
            "is_common": name in COMMON,
        }
        for name in names
    ]


Trial = dict[str, Any]
KEYS = ("trial", "state", "value", "params", "epochs", "best_epoch", "seconds", "stopped")
"""Keys of a trial that the page shows"""
IN_TRAINING, ENDED = "running", "ended"
LOGGED = tuple(
    f'{{"event": "{name}"'.encode()
    for name in ("search", "resume", "trial", "searched", "retraining", "end")
)
"""The beginnings of the log's lines that are read"""
CREATE_TRIAL, SET_PARAM, SET_STATE, SET_LOSS = 4, 5, 6, 7
"""Operations of Optuna's journal"""
RUNNING_STATE = 0
DAMAGE_ERRORS = (AttributeError, LookupError, TypeError, ValueError, OverflowError, RecursionError)


def is_search(folder: Path, job: AppJob | None) -> bool:
    """Whether a run is a search. One that begins has no file yet that says so, but a job."""
    return find_kind(folder) in SEARCHES or (
        job is not None and job.command[:1] in (("tune",), ("auto",))
    )


def read_search_events(folder: Path) -> list[Event]:
    """Return the events of a search and its trials; the packs' losses are left out."""
    try:
        lines = (folder / "events.jsonl").read_bytes().split(b"\n")[:-1]
    except OSError:
        return []
    parsed = (runs.parse_line(line) for line in lines if line.startswith(LOGGED))
    return [event for event in parsed if event is not None]


def read_trials(folder: Path, events: Iterable[Event]) -> list[Trial]:
    """Return every trial that has begun, in the order of their numbers."""
    trials = _read_running(folder / "study.log") | _read_running(folder / "study-shared.log")
    ended = [format_event(event) for event in events if isinstance(event, TrialEnd)]
    for trial in [*_read_list(folder / "trials.json"), *ended]:
        number = trial.get("trial")
        if isinstance(trial.get("params"), dict) and isinstance(number, int) and number >= 0:
            trials[number] = {key: trial.get(key) for key in KEYS}
    return [trials[number] for number in sorted(trials)]


def _read_list(path: Path) -> list[dict[str, Any]]:
    try:
        values = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return []
    return (
        [value for value in values if isinstance(value, dict)] if isinstance(values, list) else []
    )


def _read_running(path: Path) -> dict[int, Trial]:
    """Return the trials of a journal that have not ended, with their last loss."""
    trials: dict[int, Trial] = {}
    created = 0
    for log in _iter_journal(path):
        with suppress(*DAMAGE_ERRORS):
            code = log["op_code"]
            if code == CREATE_TRIAL:
                number, created = log.get("number", created), created + 1
                if log.get("state", RUNNING_STATE) == RUNNING_STATE:
                    trials[number] = _make_running(number)
            elif code == SET_STATE and log["state"] == RUNNING_STATE:  # it was given, and waited
                trials[log["trial_id"]] = _make_running(log["trial_id"])
            elif code == SET_STATE:
                trials.pop(log["trial_id"], None)
            elif code == SET_PARAM and log["trial_id"] in trials:
                value = _parse_param(log["param_value_internal"], log["distribution"])
                trials[log["trial_id"]]["params"][str(log["param_name"])] = value
            elif code == SET_LOSS and log["trial_id"] in trials:
                loss, step = log["intermediate_value"], log["step"]
                trials[log["trial_id"]] |= {"value": loss, "epochs": step + 1}
    return trials


def _make_running(number: int) -> Trial:
    return dict.fromkeys(KEYS) | {"trial": number, "state": IN_TRAINING, "params": {}}


def _iter_journal(path: Path) -> Iterator[dict[str, Any]]:
    try:
        lines = path.read_bytes().split(b"\n")[:-1]
    except OSError:
        return
    for line in lines:
        with suppress(ValueError, RecursionError):
            log = json.loads(line)
            if isinstance(log, dict):
                yield log


def _parse_param(value: Any, distribution: str) -> Any:
    """Return a parameter's value from the journal, which holds choices as indices and integers as
    floats."""
    kind = json.loads(distribution)
    if kind["name"] == "CategoricalDistribution":
        return kind["attributes"]["choices"][int(value)]
    return int(value) if kind["name"] == "IntDistribution" else float(value)


def describe_search(folder: Path) -> dict[str, Any]:
    """Return the data of a search's page."""
    events, summary = read_search_events(folder), _read_summary(folder)
    trials = read_trials(folder, events)
    config = _load_config(folder)
    ended = [one for one in trials if one["state"] != IN_TRAINING]
    states = [one["state"] for one in trials]
    begin, phase = _find_start(events), _find_phase(events)
    total = begin and begin.trials
    total = total or (config.tune.trials if config else len(trials))
    is_timed = find_kind(folder) == "auto"
    return {
        "metric": config.tune.metric if config else "loss",
        "total": None if is_timed else total,
        "minutes": begin and begin.minutes,
        "counts": {str(state): states.count(state) for state in dict.fromkeys(states)},
        "ended": len(ended),
        "trials": trials,
        "axes": list_axes(_read_space(config, summary), trials),
        "best": find_best(trials),
        "answer": _read_answer(summary) if is_timed and phase == ENDED else None,
        "chosen": _find_chosen(summary, trials) if phase == ENDED and not is_timed else None,
        "phase": phase,
        **_measure_speed(events, total - len(ended)),
        **({"left_s": _compute_left_s(begin)} if is_timed else {}),
        **(_read_speed(summary) if phase == ENDED else {}),
        "importances": _read_importances(summary),
        "seconds": summary.get("seconds"),
    }


def _load_config(folder: Path) -> Config | None:
    try:
        return configs.load(folder / "config.toml")
    except UserError:
        return None


def _read_summary(folder: Path) -> SearchSummary:
    """Return the summary of a search; empty where it is missing or damaged."""
    return cast(SearchSummary, read_object(folder / "metrics.json"))


def _read_space(config: Config | None, summary: SearchSummary) -> dict[str, Any]:
    """Return the space by setting: a range as a table, or choices."""
    if isinstance(summary.get("space"), dict):
        return dict(summary["space"])
    try:
        return search_space.describe_space(search_space.make_space(config)) if config else {}
    except UserError:  # of a config that another version wrote
        return {}


def list_axes(space: Mapping[str, Any], trials: Iterable[Trial]) -> list[dict[str, Any]]:
    """Return the axes of the settings: numbers from low to high, or choices."""
    names = dict.fromkeys(space)
    for trial in trials:
        names |= dict.fromkeys(map(str, trial["params"]))
    axes = []
    for name, label in shorten_names(names).items():
        entry = space.get(name)
        axis: dict[str, Any] = {"name": name, "label": label}
        if isinstance(entry, dict):
            axis |= {key: entry.get(key) for key in ("low", "high", "log")}
        else:
            values = entry or [trial["params"].get(name) for trial in trials]
            axis["choices"] = list(dict.fromkeys(map(format_choice, values)))
        axes.append(axis)
    return axes


def format_choice(value: Any) -> str:
    """Return a choice as the page shows it."""
    return value if isinstance(value, str) else json.dumps(value)


def _find_chosen(summary: SearchSummary, trials: Iterable[Trial]) -> int | None:
    """Return the trial that retraining chose; it need not have the lowest score."""
    with suppress(*DAMAGE_ERRORS):
        if any(trial["trial"] == (chosen := get_chosen(summary)["trial"]) for trial in trials):
            return None if chosen is None else int(chosen)
    return None


def _read_answer(summary: SearchSummary) -> dict[str, Any] | None:
    """Return the test score of the model that `slipstream auto` has made, as its leaderboard
    compares models; None where there is none."""
    with suppress(*DAMAGE_ERRORS):
        result = cast(RunSummary, summary)
        metric, scaled = result["judged_by"], result.get("scaled")
        value = (scaled or result["metrics"] or {})["test"][metric]
        name = format_metric(f"{SCALED}{metric}" if scaled else metric)
        return None if value is None else {"value": value, "note": f"{name} on the test set"}
    return None


def _read_speed(summary: SearchSummary) -> dict[str, Any]:
    """Return the trials an hour of a search that has ended, as its summary and report say them."""
    value = summary.get("trials_per_hour")
    return {"per_hour": value, "left_s": None} if isinstance(value, int | float) else {}


def find_best(trials: Iterable[Trial]) -> int | None:
    """Return the trial with the lowest score. Trials that `tune.minutes` cut off count only if no
    other trial has a score."""
    for state in ("finished", "cut off"):
        scores = [
            (trial["value"], trial["trial"])
            for trial in trials
            if trial["state"] == state and isinstance(trial["value"], int | float)
        ]
        if scores:
            return int(min(scores)[1])
    return None


def _find_start(events: Sequence[Event]) -> SearchStart | None:
    """Return the last start, or resume, of a search."""
    return next((event for event in reversed(events) if isinstance(event, SearchStart)), None)


def _find_phase(events: Sequence[Event]) -> str:
    """Return what a search does, or did last: searching, retraining, or ended."""
    for event in reversed(events):
        match event:
            case SearchStart():
                return "searching"
            case SearchEnd() | RetrainingStart():
                return "retraining"
            case End():
                return ENDED
    return "searching"


def _measure_speed(events: Sequence[Event], num_left: int) -> dict[str, Any]:
    """Return the trials an hour since the search was started or resumed, and the time left."""
    positions = [n for n, event in enumerate(events) if isinstance(event, SearchStart)]
    if not positions:
        return {"per_hour": None, "left_s": None}
    start, *later = events[positions[-1] :]
    begin, times = start.at_s, [event.at_s for event in later if isinstance(event, TrialEnd)]
    if not times or times[-1] is None or begin is None or times[-1] <= begin:
        return {"per_hour": None, "left_s": None}
    per_s = len(times) / (times[-1] - begin)
    return {"per_hour": 3600 * per_s, "left_s": max(num_left, 0) / per_s}


def _compute_left_s(begin: SearchStart | None) -> float | None:
    """Return the time that is left of a search's minutes, by the clock of this machine."""
    if begin is None or begin.left_s is None or begin.at_s is None or begin.opened_at is None:
        return None
    with suppress(ValueError):
        started_at = datetime.fromisoformat(begin.opened_at).timestamp() + begin.at_s
        return max(begin.left_s - (time.time() - started_at), 0.0)
    return None


def _read_importances(summary: SearchSummary) -> list[tuple[str, float]]:
    """Return how strongly each setting separates good trials from others, the strongest first."""
    values = summary.get("importances")
    values = values if isinstance(values, dict) else {}
    pairs = [
        (name, importance)
        for name, importance in values.items()
        if isinstance(importance, int | float)
    ]
    return sorted(pairs, key=lambda pair: -pair[1])


def load_trial(folder: Path, number: str) -> Config:
    """Return the config of one trial of a search."""
    for trial in read_trials(folder, read_search_events(folder)):
        if str(trial["trial"]) == number:
            config = configs.load(folder / "config.toml")
            space = search_space.make_space(config)
            try:
                return search_space.apply_params(config, space, trial["params"])
            except (KeyError, ValueError):
                raise UserError(f"trial {number} does not fit the space of this search") from None
    raise MissingError("there is no such trial")
