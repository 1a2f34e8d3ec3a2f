"""The table in a request's body, by its Content-Type."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

import pyarrow as pa

from slipstream.errors import UserError
from slipstream.serving.formats import ARROW, ARROW_FILE, CSV, JSON
from slipstream.serving.formats.arrow import read_arrow
from slipstream.serving.limits import RequestError, ServerLimits

ROWS, COLUMNS = "rows", "columns"
SHAPES = (
    f'a JSON body is {{"{ROWS}": [{{"name": value, ...}}, ...]}} or '
    f'{{"{COLUMNS}": {{"name": [value, ...], ...}}}}'
)
HEAD_LINES = 50
"""Lines of a CSV of which the number of columns is checked"""


def check_content_type(content_type: str) -> str:
    """Return the media type of a body that can be read."""
    kind = content_type.partition(";")[0].strip().lower()
    if kind not in (JSON, CSV, ARROW, ARROW_FILE):
        accepted = f"{JSON}, {CSV} or {ARROW}"
        what = f'is "{kind[:100]}"' if kind else "is not set"
        raise RequestError(415, f"Content-Type {what}; send {accepted}")
    return kind


def parse_table(body: bytes, kind: str, limits: ServerLimits) -> pa.Table | bytes:
    """Return the table in a body; that of a CSV is its text, once its size is checked."""
    if not body:
        raise RequestError(400, "the body is empty")
    if kind == JSON:
        return _to_table(_parse_json(body), limits)
    if kind == CSV:
        return _check_csv(body, limits)
    return read_arrow(body, limits)


def _parse_json(body: bytes) -> Any:
    try:
        return json.loads(body, parse_constant=_refuse_constant)
    except UnicodeDecodeError:
        raise RequestError(400, "the body is not JSON: it is not UTF-8") from None
    except RecursionError:
        raise RequestError(400, f"the body is nested too deeply; {SHAPES}") from None
    except ValueError as error:
        raise RequestError(400, f"the body is not JSON: {error}") from None


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not part of JSON; write null for a value that is missing")


def _to_table(content: Any, limits: ServerLimits) -> pa.Table:
    rows, columns = content if isinstance(content, list) else None, None
    if isinstance(content, Mapping):
        unknown = content.keys() - {ROWS, COLUMNS}
        if unknown or len(content) != 1:
            what = f' "{min(unknown)[:100]}" is not known' if unknown else ""
            raise UserError(f"{SHAPES};{what or ' it has one of the two'}")
        rows, columns = content.get(ROWS), content.get(COLUMNS)
    if isinstance(rows, list):
        columns = _turn(rows, limits)
    if not isinstance(columns, Mapping) or not all(
        isinstance(values, list) for values in columns.values()
    ):
        raise UserError(SHAPES)
    if not any(columns.values()):
        raise UserError("the body has no rows")
    lengths = {name: len(values) for name, values in columns.items()}
    _check_counts(max(lengths.values()), len(columns), limits)
    if len(set(lengths.values())) > 1:
        (first, count), *others = lengths.items()
        name, other = next(one for one in others if one[1] != count)
        raise UserError(f'column "{first}" has {count} values, column "{name}" has {other}')
    try:
        return pa.table({name: _to_array(name, values) for name, values in columns.items()})
    except UnicodeEncodeError:  # half of a character: "\\ud800"
        raise UserError("the name of a column is not Unicode text") from None


def _turn(rows: list[Any], limits: ServerLimits) -> dict[str, list[Any]]:
    """Return rows as columns; what a row does not have is missing."""
    names: dict[str, None] = {}
    for number, row in enumerate(rows, start=1):
        if not isinstance(row, dict):
            raise UserError(f"row {number} of the body is not an object; {SHAPES}")
        if row.keys() - names.keys():
            names.update(dict.fromkeys(row))
            _check_counts(len(rows), len(names), limits)
    return {name: [row.get(name) for row in rows] for name in names}


def _check_counts(num_rows: int, num_columns: int, limits: ServerLimits) -> None:
    if num_rows > limits.rows:
        raise RequestError(
            413, f"the body has {num_rows:,} rows; a request has at most {limits.rows:,}"
        )
    if num_columns > limits.columns:
        raise RequestError(413, f"the body has more than the {limits.columns:,} columns allowed")
    if num_rows * num_columns > limits.cells:
        raise RequestError(
            413,
            f"the body has {num_rows * num_columns:,} values; a request has at most "
            f"{limits.cells:,}",
        )


def _to_array(name: str, values: list[Any]) -> pa.Array:
    try:
        array = pa.array(values)
    except (pa.ArrowException, OverflowError, TypeError, ValueError) as error:
        raise UserError(f'column "{name}": {_first_line(error)}') from None
    if pa.types.is_nested(array.type):
        raise UserError(f'column "{name}": a value is a list or an object, not a number or a text')
    return array.cast(pa.float64()) if pa.types.is_null(array.type) else array


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


def _check_csv(body: bytes, limits: ServerLimits) -> bytes:
    if b"\0" in body[: 1 << 16]:
        raise RequestError(400, "the body is not CSV: it has bytes that are not text")
    num_rows = body.count(b"\n")
    if num_rows > limits.rows + HEAD_LINES:
        raise RequestError(
            413, f"the body has {num_rows:,} lines; a request has at most {limits.rows:,} rows"
        )
    _check_counts(0, 1 + _count_delimiters(body.split(b"\n", HEAD_LINES)[:HEAD_LINES]), limits)
    return body


def _count_delimiters(lines: Iterable[bytes]) -> int:
    return max((line.count(mark) for line in lines for mark in (b",", b";", b"\t")), default=0)
