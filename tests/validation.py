"""Validates events against the schema, strictly: every kind and every field has to be in it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator

import slipstream
from slipstream.runs.files import to_json
from slipstream.runs.log import CHECKSUM, parse_values

_VALID: set[tuple[Any, ...]] = set()
"""The shapes of valid events: most events of a suite have one of a few"""


@cache
def strict_validator(name: str) -> Draft202012Validator | None:
    """A validator of one kind of event that refuses unknown fields; None for an unknown kind."""
    kinds = slipstream.event_schema()["$defs"]
    if name not in kinds:
        return None
    return Draft202012Validator(kinds[name] | {"additionalProperties": False})


def find_problems(event: Mapping[str, Any]) -> list[str]:
    """What is wrong with an event; empty if it is as the schema says."""
    name = "search" if "space" in event else str(event["event"])
    shape = (name, *((key, _shape(value)) for key, value in event.items() if key != "event"))
    if shape in _VALID:
        return []
    validator = strict_validator(name)
    if validator is None:
        return [f"{name}: is no event of the schema"]
    plain = json.loads(to_json(event))
    problems = [f"{name}: {error.message}" for error in validator.iter_errors(plain)]
    if not problems:
        _VALID.add(shape)
    return problems


def _shape(value: Any) -> Any:
    if isinstance(value, Mapping):
        return frozenset(map(_shape, value.values()))
    if isinstance(value, list | tuple):
        return (list, frozenset(map(_shape, value)))
    return type(value)


def find_log_problems(folder: Path) -> Iterator[str]:
    """What is wrong in the logs below a folder. Damaged lines are left out: tests write such."""
    for log in folder.rglob("events.jsonl"):
        lines = log.read_bytes().split(b"\n") if log.is_file() else [b""]
        if CHECKSUM.encode() not in lines[0]:  # of an earlier version, or of a test's own making
            continue
        for number, event in enumerate(map(parse_values, lines), 1):
            if event is not None:
                yield from (f"{log}:{number}: {one}" for one in find_problems(event))
