"""From lines of a log to events."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from importlib import resources
from typing import Any

from slipstream.events import machine, search, training
from slipstream.events.base import Event


@dataclass(frozen=True, kw_only=True)
class Other(Event):
    """An event without a class of its own: of a later version, or of an earlier one that lacks a
    field."""

    name: str
    """As in the log"""
    values: dict[str, Any]
    """Its fields"""


CLASSES: dict[str, type[Event]] = {
    "start": training.Start,
    "resume": training.Resume,
    "step": training.Step,
    "log": training.Log,
    "epoch": training.Epoch,
    "exploit": training.Exploit,
    "lane": training.LaneEnd,
    "trained": training.TrainingEnd,
    "scoring": training.Scoring,
    "end": training.End,
    "checkpoint": training.CheckpointSaved,
    "recovery": training.Recovery,
    "fallback": training.Fallback,
    "trouble": training.Trouble,
    "init": training.EncoderLoaded,
    "thaw": training.EncoderThawed,
    "probe": training.ProbeStep,
    "search": search.SearchStart,
    "pack": search.PackStart,
    "trial": search.TrialEnd,
    "searched": search.SearchEnd,
    "retraining": search.RetrainingStart,
    "retrained": search.Retrained,
    "worker": search.WorkerChange,
    "begun": search.WorkerStart,
    "estimate": machine.Estimate,
    "plan": machine.PlanComparison,
    "review": machine.ThreadsReviewed,
    "monitor": machine.MachineSample,
    "cache": machine.CopiesOnDisk,
}
"""By the name in the log"""


def list_keys(kind: type[Event]) -> dict[str, str]:
    """Return the names of an event's fields by those that they have in the log."""
    return {one.metadata.get("key", one.name): one.name for one in fields(kind)}


_KEYS = {kind: list_keys(kind) for kind in CLASSES.values()}


def parse_event(logged: Mapping[str, Any]) -> Event:
    """Return the event that a line of `events.jsonl`, or a call of the watcher, describes."""
    name = logged["event"]
    kind = search.SearchStart if "space" in logged else CLASSES.get(name, Other)
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
