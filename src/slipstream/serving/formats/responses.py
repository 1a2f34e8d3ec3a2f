"""Predictions as the body of a response, in the format that the client accepts."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from slipstream.serving.formats import ARROW, CSV, JSON
from slipstream.serving.limits import RequestError

WILDCARDS = ("*/*", "application/*")


def choose_format(accept: str) -> str:
    """Return the media type to answer in: what Accept weighs most, JSON where all are equal."""
    if not accept:
        return JSON
    best, result = 0.0, ""
    for part in accept.split(","):
        name, *parameters = (one.strip().lower() for one in part.split(";"))
        known = JSON if name in WILDCARDS else CSV if name == "text/*" else name
        weight = _read_weight(parameters)
        if known in (JSON, CSV, ARROW) and weight > best:
            best, result = weight, known
    if not result:
        raise RequestError(
            406, f'Accept is "{accept[:100]}"; the answer is {JSON}, {CSV} or {ARROW}'
        )
    return result


def _read_weight(parameters: Sequence[str]) -> float:
    for one in parameters:
        if one.startswith("q="):
            try:
                return float(one.removeprefix("q="))
            except ValueError:
                return 0.0
    return 1.0


def encode_table(table: pa.Table, kind: str, extra: dict[str, Any]) -> bytes:
    """Return a table in a format; in JSON `extra` stands beside its rows."""
    if kind == CSV:
        import pyarrow.csv

        sink = io.BytesIO()
        pyarrow.csv.write_csv(_write_names(table), sink)
        return sink.getvalue()
    if kind == ARROW:
        sink = io.BytesIO()
        with pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
        return sink.getvalue()
    return to_json({"predictions": list_rows(table), **extra})


def list_rows(table: pa.Table) -> list[dict[str, Any]]:
    """Return the rows of a table as JSON has them: times as text, what is no number as null."""
    columns = [_to_values(column) for column in table.columns]
    names = table.column_names
    return [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]


def _to_values(column: pa.ChunkedArray) -> list[Any]:
    if pa.types.is_temporal(column.type):
        return [value and value.isoformat() for value in column.to_pylist()]
    values: list[Any] = column.to_pylist()
    if pa.types.is_floating(column.type):
        return [value if value is not None and math.isfinite(value) else None for value in values]
    return values


def _write_names(table: pa.Table) -> pa.Table:
    """Return a table without dictionaries, which a CSV cannot have."""
    for at, field in enumerate(table.schema):
        if pa.types.is_dictionary(field.type):
            table = table.set_column(at, field.name, table.column(at).cast(pa.string()))
    return table


def to_json(content: Any) -> bytes:
    return json.dumps(content, allow_nan=False, separators=(",", ":")).encode()
