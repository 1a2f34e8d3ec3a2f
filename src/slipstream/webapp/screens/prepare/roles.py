"""The role of every column in a draft: read from its settings, and written to them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from slipstream.errors import UserError
from slipstream.webapp.screens.prepare.draft import Draft, format_names, list_names

TIME, ID, INPUT, TARGET, STATIC, FUTURE, IGNORE = (
    *("time", "id", "input", "target", "static", "future", "ignore"),
)
ROLES = (TIME, ID, INPUT, TARGET, STATIC, FUTURE, IGNORE)
SETTINGS = {
    TIME: "data.time",
    ID: "data.id",
    TARGET: "data.targets",
    STATIC: "data.static",
    FUTURE: "data.future",
    IGNORE: "data.ignore",
    INPUT: "data.inputs",
}
"""The setting that lists the columns of each role"""
OUTPUT = "output"
"""A target that the model does not read"""
READABLE = ("number", "boolean")


class Column(NamedTuple):
    """A column of the file, or one that a step makes."""

    name: str
    type: str
    facts: Mapping[str, Any]
    """What `slipstream inspect` says about it"""
    made_by: int | None = None
    """The number of the step that makes it"""


def get_roles(draft: Draft, columns: Sequence[Column]) -> dict[str, str]:
    """Return the role of each column; a target that is no input is an `output`."""
    listed = {role: set(draft.get_names(setting)) for role, setting in SETTINGS.items()}
    is_listed = bool(draft.get(SETTINGS[INPUT]))
    roles = {}
    for column in columns:
        name = column.name
        is_input = name in listed[INPUT]
        if not is_listed:
            is_input = column.type in READABLE and name not in listed[IGNORE]
        role = next((one for one in (TIME, ID, TARGET, STATIC, FUTURE) if name in listed[one]), "")
        if role == TARGET and not (is_input and _reads_targets(draft)):
            role = OUTPUT
        roles[name] = role or (INPUT if is_input else IGNORE)
    return roles


def _reads_targets(draft: Draft) -> bool:
    """Whether a target may be an input as well, whose rows before the horizon are known."""
    return draft.get("data.horizon") != "0" and draft.get("data.task") != "classify"


def find_used(draft: Draft, columns: Sequence[Column]) -> set[str]:
    """Return the columns that the model reads or predicts."""
    used = (INPUT, TARGET, OUTPUT, STATIC, FUTURE)
    return {name for name, role in get_roles(draft, columns).items() if role in used}


def set_role(draft: Draft, columns: Sequence[Column], column: str, role: str) -> Draft:
    """Return the draft in which a column has another role."""
    if role not in (*ROLES, OUTPUT):
        raise UserError(f"{role[:100]} is no role; there are {', '.join(ROLES)}")
    known = [one.name for one in columns]
    if column not in known:
        raise UserError(f'there is no column "{column[:100]}"')
    listed = {one: draft.get_names(setting) for one, setting in SETTINGS.items()}
    is_listed = bool(draft.get(SETTINGS[INPUT]))
    for names in listed.values():
        names[:] = [name for name in names if name != column]
    if role == TIME:
        listed[TIME] = []
    if role in (TARGET, OUTPUT):
        if draft.get("data.task") == "classify":
            listed[TARGET] = []
        listed[TARGET].append(column)
    elif role not in (INPUT, IGNORE):
        listed[role].append(column)
    reads = role == INPUT or (role == TARGET and _reads_targets(draft))
    if is_listed and reads:
        listed[INPUT].append(column)
    elif not is_listed and not reads and role in (OUTPUT, IGNORE):
        listed[IGNORE].append(column)
    texts = {}
    for one, setting in SETTINGS.items():
        names = listed[one] if one in (TARGET, TIME) else sorted(listed[one], key=_rank(known))
        is_plain = one in (TIME, ID) and len(names) == 1 and names == list_names(names[0].strip())
        texts[setting] = names[0] if is_plain else format_names(names)
    if is_listed and not listed[INPUT]:
        texts[SETTINGS[INPUT]] = "[]"  # refused with the reason; without it, every column is one
    if role == TIME and listed[TIME] != draft.get_names(SETTINGS[TIME]):
        texts["data.time_format"] = ""
    return draft.set(texts)


def _rank(known: Sequence[str]) -> Any:
    places = {name: place for place, name in enumerate(known)}
    return lambda name: places.get(name, len(places))
