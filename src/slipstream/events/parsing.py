"""From lines of a log to events."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from importlib import resources
from typing import Any

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


def list_keys(kind: type[Event]) -> dict[str, str]:
    """Return the names of an event's fields by those that they have in the log."""
    return {known.metadata.get("key", known.name): known.name for known in fields(kind)}


_KEYS = {kind: list_keys(kind) for kind in CLASSES.values()}
_OPTIONAL = {
    kind: {known.name for known in fields(kind) if known.default is None}
    for kind in CLASSES.values()
}
"""The fields whose None means that the line of the log lacks them"""


def format_event(event: Event) -> dict[str, Any]:
    """Return the line of the log that describes an event, which `parse_event` reads; a field that
    may be None and is so is left out."""
    if isinstance(event, Other):
        at_s = {} if event.at_s is None else {"at_s": event.at_s}
        return {"event": event.name, **at_s, **event.values}
    kind = type(event)
    values = {key: getattr(event, name) for key, name in _KEYS[kind].items()}
    absent = {key for key, name in _KEYS[kind].items() if name in _OPTIONAL[kind]}
    present = {
        key: value for key, value in values.items() if value is not None or key not in absent
    }
    return {"event": _NAMES[kind], **present}


def parse_event(logged: Mapping[str, Any]) -> Event:
    """Return the event that a line of `events.jsonl`, or a call of the watcher, describes."""
    name = logged["event"]
    kind = classes.SearchStart if "space" in logged else CLASSES.get(name, Other)
    if kind is not Other:
        names = _KEYS[kind]
        try:
            return kind(**{names[key]: value for key, value in logged.items() if key in names})
        except TypeError:  # an event of another version lacks a field
            pass
    values = {key: value for key, value in logged.items() if key != "event"}
    return Other(at_s=values.pop("at_s", None), name=name, values=values)


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
