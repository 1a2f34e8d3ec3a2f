"""From lines of a log to events."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields
from importlib import resources
from typing import Any, NamedTuple

from slipstream.events import classes
from slipstream.events.classes import Event


@dataclass(frozen=True, kw_only=True)
class Other(Event):
    """An event without a class of its own: of a later version, or of an earlier one that lacks a
    field."""

    name: str
    """As in the log"""
    values: dict[str, Any]
    """Its fields"""


CLASSES: dict[str, type[Event]] = {
    "start": classes.Start,
    "resume": classes.Resume,
    "step": classes.Step,
    "log": classes.Log,
    "epoch": classes.Epoch,
    "exploit": classes.Exploit,
    "lane": classes.LaneEnd,
    "trained": classes.TrainingEnd,
    "scoring": classes.Scoring,
    "end": classes.End,
    "checkpoint": classes.CheckpointSaved,
    "recovery": classes.Recovery,
    "fallback": classes.Fallback,
    "trouble": classes.Trouble,
    "init": classes.EncoderLoaded,
    "thaw": classes.EncoderThawed,
    "probe": classes.ProbeStep,
    "search": classes.SearchStart,
    "pack": classes.PackStart,
    "trial": classes.TrialEnd,
    "searched": classes.SearchEnd,
    "retraining": classes.RetrainingStart,
    "retrained": classes.Retrained,
    "refit": classes.RefitStart,
    "worker": classes.WorkerChange,
    "begun": classes.WorkerStart,
    "estimate": classes.Estimate,
    "plan": classes.PlanComparison,
    "review": classes.ThreadsReviewed,
    "monitor": classes.MachineSample,
    "cache": classes.CopiesOnDisk,
}
"""By the name in the log"""


_NAMES = {kind: name for name, kind in CLASSES.items()}
"""The name in the log, by class"""
RESUMED = "resume"
"""The name of a `SearchStart` that resumes a search"""


def list_keys(kind: type[Event]) -> dict[str, str]:
    """Return the names of an event's fields by their keys in the log."""
    return {
        known.metadata.get("key", known.name): known.name
        for known in fields(kind)
        if known.metadata.get("key", known.name) is not None
    }


class _Form(NamedTuple):
    """How a class of events is read from a line of the log, and written to one."""

    names: dict[str, str]
    """The fields, by their keys in the log"""
    defaults: dict[str, Any]
    """The values of fields that a line may lack"""
    factories: dict[str, Callable[[], Any]]
    """Make the values of other fields that it may lack"""
    required: frozenset[str]
    """The fields that a line must have"""
    omitted: frozenset[str]
    """The keys that a line lacks where their value is None"""

    @classmethod
    def of(cls, kind: type[Event]) -> _Form:
        names = list_keys(kind)
        optional = {known.name for known in fields(kind) if known.default is None}
        required = {
            known.name
            for known in fields(kind)
            if known.default is MISSING and known.default_factory is MISSING
        }
        return cls(
            names,
            {known.name: known.default for known in fields(kind) if known.default is not MISSING},
            {
                known.name: known.default_factory
                for known in fields(kind)
                if known.default_factory is not MISSING
            },
            frozenset(required),
            frozenset(key for key, name in names.items() if name in optional),
        )


_FORMS = {kind: _Form.of(kind) for kind in CLASSES.values()}


def name_event(event: Event) -> str:
    """Return the name of an event in the log."""
    if isinstance(event, Other):
        return event.name
    if isinstance(event, classes.SearchStart) and event.is_resumed:
        return RESUMED
    return _NAMES[type(event)]


def format_event(event: Event) -> dict[str, Any]:
    """Return the line of the log that describes an event, which `parse_event` reads; a field that
    may be None and is so is left out."""
    if isinstance(event, Other):
        at_s = {} if event.at_s is None else {"at_s": event.at_s}
        return {"event": event.name, **at_s, **event.values}
    names, *_, omitted = _FORMS[type(event)]
    line: dict[str, Any] = {"event": name_event(event)}
    for key, name in names.items():
        value = getattr(event, name)
        if value is not None or key not in omitted:
            line[key] = value
    return line


def parse_event(logged: Mapping[str, Any]) -> Event:
    """Return the event that a line of `events.jsonl` describes. Fields that its class does not have
    are dropped; without a field that its class needs it is an `Other`."""
    name = logged["event"]
    kind = classes.SearchStart if "space" in logged else CLASSES.get(name)
    if kind is None:
        return _parse_other(logged)
    names, defaults, factories, required, _ = _FORMS[kind]
    values = defaults.copy()
    for field_name, make in factories.items():
        values[field_name] = make()
    for key, value in logged.items():
        if key in names:
            values[names[key]] = value
    if not required <= values.keys():  # an event of another version
        return _parse_other(logged)
    if kind is classes.Log and isinstance(values["losses"], dict):
        try:  # the keys of a JSON object are texts
            values["losses"] = {int(lane): loss for lane, loss in values["losses"].items()}
        except ValueError:
            return _parse_other(logged)
    elif kind is classes.SearchStart:
        values["is_resumed"] = name == RESUMED
    # the constructor of a frozen dataclass takes twice as long, and a log may have 100,000 lines
    event = object.__new__(kind)
    event.__dict__.update(values)
    return event


def _parse_other(logged: Mapping[str, Any]) -> Other:
    values = {key: value for key, value in logged.items() if key != "event"}
    return Other(at_s=values.pop("at_s", None), name=logged["event"], values=values)


def event_schema() -> dict[str, Any]:
    """Return the JSON schema of the lines of `events.jsonl`, which docs/events.md describes.

    It accepts fields and kinds of events that it does not know, since later builds may add some.
    The file is `schema.json` in the package `slipstream.events`.

    Returns:
        The schema (draft 2020-12), for any validator. `version` is the version of the events.

    Raises:
        OSError: The file is missing from the installed package.

    Example:
        validator = jsonschema.Draft202012Validator(slipstream.event_schema())
        for line in open(result.run / "events.jsonl"):
            validator.validate(json.loads(line))
    """
    text = resources.files("slipstream.events").joinpath("schema.json").read_text(encoding="utf-8")
    schema: dict[str, Any] = json.loads(text)
    return schema
