"""The editor of a search space: its rows, as texts, and `[tune.space]`."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping
from typing import Any

from slipstream import search_space
from slipstream.config import Range
from slipstream.errors import UserError
from slipstream.webapp import forms

RANGE, CHOICES = "range", "choices"
MOST_ROWS = 100
MOST_TEXT = 10_000
COMMON = (
    *("train.lr", "train.weight_decay", "model.dropout", "model.hidden", "train.batch"),
    *("model.layers", "model.kind", "data.context", "train.optimizer", "train.schedule"),
)
"""Settings that are offered first"""


def parse_rows(rows: Any) -> dict[str, Any]:
    """Return the rows of the editor as `[tune.space]` has them. What is wrong in them is left to
    the config, whose messages the command line has too."""
    if rows is None:
        return {}
    if not isinstance(rows, list) or len(rows) > MOST_ROWS:
        raise UserError(f"space: expected a list of at most {MOST_ROWS} settings")
    space: dict[str, Any] = {}
    for row in rows:
        if not isinstance(row, dict) or not all(map(_is_cell, row.values())):
            raise UserError("space: expected rows of texts")
        name = str(row.get("setting", "")).strip()
        if not name:
            raise UserError("tune.space: choose a setting for every row, or remove the row")
        if name in space:
            raise UserError(f'tune.space has "{name}" twice; remove one of them')
        space[name] = _parse_choices(row) if row.get("kind") == CHOICES else _parse_range(row)
    return space


def _is_cell(value: Any) -> bool:
    return isinstance(value, bool) or (isinstance(value, str) and len(value) <= MOST_TEXT)


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
        values = [_parse_value(one.strip()) for one in text.split(",") if one.strip()]
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
            row |= {key: "" if one is None else _format_number(one) for key, one in texts.items()}
        else:
            is_plain = all(map(_is_plain, entry))
            values = ", ".join(_format_choice(one, is_plain=is_plain) for one in entry)
            is_nested = len(entry) == 1 and isinstance(entry[0], list | tuple)
            row |= {"kind": CHOICES, "choices": f"[{values}]" if is_nested else values}
        rows.append(row)
    return rows


def _format_number(value: float) -> str:
    """Return a number as one types it: 1e-4, not 0.0001; TOML reads 1e-4 as it reads 1.0e-4."""
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
    """Whether a choice needs no quotes: no text, or one that cannot be read as something else."""
    if not isinstance(value, str):
        return True
    is_simple = bool(value) and value.isprintable() and value == value.strip() and "," not in value
    return is_simple and value[0] not in "[\"'" and _parse_value(value) == value


def _format_choice(value: Any, *, is_plain: bool) -> str:
    if isinstance(value, str):
        return value if is_plain else forms.format_toml(value)
    return _format_number(value) if isinstance(value, float) else forms.format_toml(value)


def list_settings() -> list[dict[str, Any]]:
    """Return the settings that can be searched, with what the editor suggests for each."""
    controls = {one.setting: one for one in forms.list_controls(forms.TUNE)}
    names = [name for name in search_space.list_searchable() if name in controls]
    names.sort(key=lambda name: (name not in COMMON, COMMON.index(name) if name in COMMON else 0))
    return [
        {
            "name": name,
            "help": controls[name].summary.rstrip(".") + ".",
            "default": controls[name].default,
            "limits": controls[name].limits,
            "choices": [one for one in controls[name].choices if one not in ("auto", "off")],
            "is_common": name in COMMON,
        }
        for name in names
    ]
