"""Write the tables of docs/events.md and the JSON schema of the events from their classes, so that
these cannot differ.

python dev/events.py [--check]
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from slipstream.config.base import read_descriptions
from slipstream.events.classes import Estimate, Event, SearchStart, Start
from slipstream.events.parsing import CLASSES, list_keys
from slipstream.runs.log import SCHEMA

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "events.md"
FILE = ROOT / "src" / "slipstream" / "events" / "schema.json"
UNLOGGED = ("step", "trouble", "probe")
"""Events that only `on_event` gets"""
DIAGNOSTIC = (
    *("step", "probe", "init", "thaw", "pack", "retraining", "begun"),
    *("estimate", "plan", "review", "monitor", "cache"),
)
"""Events whose fields may change with any version of Slipstream"""
TITLES = {Start: "A run", SearchStart: "A search", Estimate: "The machine"}
"""The first class of each group"""
JSON_TYPES = {int: "integer", float: "number", str: "string", bool: "boolean"}
MARK = "<!-- From here on by dev/events.py, from the classes of the events. -->"


def to_schema(annotation: Any) -> dict[str, Any]:
    """The JSON schema of a type; numbers that are not finite are null."""
    if annotation is Any:
        return {}
    if isinstance(annotation, types.UnionType):
        (inner,) = (part for part in get_args(annotation) if part is not types.NoneType)
        schema = to_schema(inner)
        known = schema["type"]
        return schema | {"type": known if isinstance(known, list) else [known, "null"]}
    if get_origin(annotation) is list:
        return {"type": "array", "items": to_schema(get_args(annotation)[0])}
    if get_origin(annotation) is dict:
        return {"type": "object", "additionalProperties": to_schema(get_args(annotation)[1])}
    if annotation is float:
        return {"type": ["number", "null"]}
    return {"type": JSON_TYPES[annotation]}


def list_fields(kind: type[Event]) -> Iterator[tuple[str, dataclasses.Field[Any], Any, str]]:
    """Name in the log, field, type and text of what an event has besides `at_s`."""
    types_, texts = get_type_hints(kind), read_descriptions(kind)
    by_name = {one.name: one for one in dataclasses.fields(kind)}
    for key, name in list_keys(kind).items():
        if key != "at_s":
            yield key, by_name[name], types_[name], " ".join(texts[name].split())


def is_required(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def describe_event(name: str, kind: type[Event]) -> dict[str, Any]:
    properties: dict[str, Any] = {
        "event": {},
        "at_s": {"type": "number"},
        "crc": {"type": "string"},
    }
    required = ["event"] if name in UNLOGGED else ["event", "at_s"]
    for key, field, annotation, text in list_fields(kind):
        properties[key] = to_schema(annotation) | {"description": text}
        required += [key] if is_required(field) else []
    return {
        "description": " ".join((kind.__doc__ or "").split()),
        "x-stable": name not in DIAGNOSTIC,
        "type": "object",
        "properties": properties,
        "required": required,
    }


def schema() -> dict[str, Any]:
    is_search = {"required": ["space"]}
    rules = []
    for name in CLASSES:
        chosen = {"properties": {"event": {"const": name}}}
        if name == "resume":
            chosen["not"] = is_search
        rules.append({"if": chosen, "then": {"$ref": f"#/$defs/{name}"}})
    resumed = {"properties": {"event": {"const": "resume"}}} | is_search
    rules.append({"if": resumed, "then": {"$ref": "#/$defs/search"}})
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": f"urn:slipstream:events:{SCHEMA}",
        "title": "A line of events.jsonl",
        "description": "docs/events.md describes the events, and how they may change.",
        "version": SCHEMA,
        "type": "object",
        "required": ["event"],
        "properties": {"event": {"type": "string"}},
        "allOf": rules,
        "$defs": {name: describe_event(name, kind) for name, kind in CLASSES.items()},
    }


def schema_text() -> str:
    return json.dumps(schema(), indent=1) + "\n"


def name_type(annotation: Any) -> str:
    """A type in words of JSON."""
    if isinstance(annotation, types.UnionType):
        (annotation,) = (part for part in get_args(annotation) if part is not types.NoneType)
    if annotation is Any:
        return "value"
    if get_origin(annotation) is list:
        return f"list of {name_type(get_args(annotation)[0])}s"
    if get_origin(annotation) is dict:
        return f"object of {name_type(get_args(annotation)[1])}s"
    return {int: "whole number", float: "number", str: "text", bool: "true or false"}[annotation]


def describe(name: str, kind: type[Event]) -> str:
    title = "search` and `resume` (of a search)" if kind is SearchStart else f"{name}`"
    marks = ["diagnostic" if name in DIAGNOSTIC else "stable"]
    marks += ["not logged"] if name in UNLOGGED else []
    text = " ".join((kind.__doc__ or "").split())
    rows = ["| field | type | |", "|---|---|---|"]
    for key, field, annotation, about in list_fields(kind):
        optional = "" if is_required(field) else " (optional)"
        about = about.replace("|", "\\|")
        rows.append(f"| `{key}`{optional} | {name_type(annotation)} | {about} |")
    head = f"### `{title}: `{kind.__name__}`" if title.endswith("`") else f"### `{title}"
    return "\n\n".join([head, f"{text} *{', '.join(marks)}*", "\n".join(rows)])


def find_line(kind: type[Event]) -> int:
    """The line of events/classes.py where a class begins; its groups stand in this order."""
    return inspect.getsourcelines(kind)[1]


def page() -> str:
    parts = [PAGE.read_text(encoding="utf-8").partition(MARK)[0] + MARK]
    for name, kind in sorted(CLASSES.items(), key=lambda item: find_line(item[1])):
        parts += [f"## {TITLES[kind]}"] if kind in TITLES else []
        parts.append(describe(name, kind))
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    content = {PAGE: page(), FILE: schema_text()}
    if "--check" in sys.argv:
        differ = [path for path, text in content.items() if path.read_text("utf-8") != text]
        sys.exit("run `make docs`" if differ else 0)
    for path, text in content.items():
        path.write_text(text, encoding="utf-8")
        print(f"wrote {path}")
