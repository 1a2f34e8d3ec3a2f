"""The bodies of requests and answers: formats, limits, and the errors of requests beyond them."""

from __future__ import annotations

import io
import json
import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
import pyarrow as pa

from slipstream.base.errors import UserError
from slipstream.base.statistics import select_median
from slipstream.base.text import escape_controls
from slipstream.config import Signature
from slipstream.data.predictions import (
    PhysicalPredictions,
    WindowPositions,
    build_prediction_table,
    list_class_columns,
    list_number_columns,
)
from slipstream.data.series import Floats
from slipstream.inference.portable import Widths

MEGABYTE = 1 << 20


@dataclass(frozen=True)
class ServerLimits:
    """Bounds of requests, queues and streams; each is an option of `slipstream serve`."""

    body_bytes: int = 8 * MEGABYTE
    rows: int = 100_000
    """Rows of one request"""
    columns: int = 2_000
    """Columns of one request, including columns that the model does not read"""
    requests: int = 256
    """Requests that are worked on at a time; more get status 503"""
    request_s: float = 30.0
    """Seconds from a request's first byte to the last of its response"""
    streams: int = 10_000
    idle_s: float = 3600.0
    """Seconds without a row after which a stream is removed"""

    @property
    def all_bodies_bytes(self) -> int:
        """Bytes that the bodies of all requests may hold together."""
        return 8 * self.body_bytes

    @property
    def cells(self) -> int:
        """Values of one request: a table of many columns must have fewer rows."""
        return max(self.rows, self.columns) * 50


class RequestError(Exception):
    """A request that cannot be served; the message is for the client."""

    def __init__(
        self,
        status: int,
        message: str,
        headers: Mapping[str, str] | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.headers = dict(headers or {})
        self.content = {"error": escape_controls(message), **(extra or {})}


JSON, CSV, ARROW = "application/json", "text/csv", "application/vnd.apache.arrow.stream"
ARROW_FILE = "application/vnd.apache.arrow.file"


@dataclass(frozen=True)
class TableMaker:
    """Turns predictions of windows [N, H, C], or [N, H, C, Q] with quantiles or classes, into a
    table."""

    signature: Signature
    half_widths: Widths | None

    def make(
        self, places: WindowPositions, values: Floats, factors: Floats | None = None
    ) -> pa.Table:
        """Return the predictions of these windows as a table, with the series and time of each;
        intervals are multiplied by `factors` [N, 1, C], the relative sizes of the series."""
        if classes := self.signature.classes:
            columns = list_class_columns(values.reshape(-1, len(classes)), classes)
            return build_prediction_table(places, columns)
        levels = self.signature.quantiles
        point = select_median(values, levels) if levels else values
        limits = self.signature.output_range or (-np.inf, np.inf)
        intervals = {
            level: ((point - width).clip(*limits), (point + width).clip(*limits))
            for level, width in (
                (level, width if factors is None else width * factors)
                for level, width in (self.half_widths or {}).items()
            )
        }
        physical = PhysicalPredictions(point, values if levels else None, intervals)
        return build_prediction_table(places, list_number_columns(physical, self.signature))


FILE_MAGIC = b"ARROW1\0\0"
"""The beginning of an Arrow file; a stream of the same messages follows"""
RECORDS, DICTIONARY = 3, 2
"""Kinds of messages that have a body"""
NOT_ARROW = "the body is not Arrow IPC, which its Content-Type names"


def read_arrow(body: bytes, limits: ServerLimits) -> pa.Table:
    """Return the table of an IPC stream or file (Feather)."""
    data = body[len(FILE_MAGIC) :] if body.startswith(FILE_MAGIC) else body
    try:
        _check_sizes(data, limits)
        with pa.ipc.open_stream(data) as reader:
            _check_schema(reader.schema, limits)
            table = reader.read_all()
        table.validate(full=True)  # offsets and indices of a hostile body point anywhere
    except (pa.ArrowException, OSError, struct.error, EOFError) as error:
        raise RequestError(400, f"{NOT_ARROW}: {error}") from None
    except UnicodeDecodeError:
        raise RequestError(400, "the name of a column is not UTF-8 text") from None
    return table


def _check_sizes(data: bytes, limits: ServerLimits) -> None:
    """Refuse messages with too many rows, or with buffers that would decompress to too much."""
    num_rows = num_bytes = 0
    for message in pa.ipc.MessageReader.open_stream(data):
        batch, kind = _find_batch(message.metadata.to_pybytes())
        if batch is None:
            continue
        num_rows += batch.read("<q", 0) if kind == RECORDS else 0
        num_bytes += _count_bytes(batch, message.body)
        if num_rows > limits.rows:
            raise RequestError(413, f"the body has more than the {limits.rows:,} rows of a request")
        if num_bytes > 4 * limits.body_bytes:
            text = f"the body decompresses to more than {4 * limits.body_bytes:,} bytes"
            raise RequestError(413, text)


def _check_schema(schema: pa.Schema, limits: ServerLimits) -> None:
    if len(schema) > limits.columns:
        raise RequestError(
            413, f"the body has {len(schema):,} columns; a request has at most {limits.columns:,}"
        )
    for field in schema:
        kind = field.type.value_type if pa.types.is_dictionary(field.type) else field.type
        if pa.types.is_nested(kind) or pa.types.is_run_end_encoded(kind):
            raise UserError(f'column "{field.name}": holds {kind}; a cell is a number or a text')


class _FlatTable:
    """A table of a flatbuffer: the few fields of an IPC message that Arrow's Python has no name
    for. Reads outside of the buffer raise struct.error."""

    def __init__(self, data: bytes, position: int) -> None:
        self.data, self.position = data, position
        self.fields = position - self._unpack("<i", position)
        self.num_fields = (self._unpack("<H", self.fields) - 4) // 2

    def _unpack(self, form: str, position: int) -> Any:
        if position < 0:
            raise struct.error("an offset is before the message")
        return struct.unpack_from(form, self.data, position)[0]

    def locate(self, field: int) -> int | None:
        """Return the position of a field; None where it has its default."""
        if field >= self.num_fields:
            return None
        offset = self._unpack("<H", self.fields + 4 + 2 * field)
        return self.position + offset if offset else None

    def read(self, form: str, field: int) -> int:
        position = self.locate(field)
        return 0 if position is None else int(self._unpack(form, position))

    def follow(self, field: int) -> int | None:
        """Return the position of the table or vector that a field points to."""
        position = self.locate(field)
        return None if position is None else position + int(self._unpack("<I", position))


def _find_batch(metadata: bytes) -> tuple[_FlatTable | None, int]:
    """Return the record batch of a message's metadata, if it has one, and the message's kind.

    Message: version, header_type, header, bodyLength. RecordBatch: length, nodes, buffers,
    compression. DictionaryBatch: id, data.
    """
    message = _FlatTable(metadata, struct.unpack_from("<I", metadata, 0)[0])
    kind, header = message.read("<B", 1), message.follow(2)
    if kind not in (RECORDS, DICTIONARY) or header is None:
        return None, kind
    if kind == RECORDS:
        return _FlatTable(metadata, header), kind
    records = _FlatTable(metadata, header).follow(1)
    return (None if records is None else _FlatTable(metadata, records)), kind


def _count_bytes(batch: _FlatTable, body: pa.Buffer) -> int:
    """Return the bytes of a batch's buffers once they are decompressed."""
    vector = batch.follow(2)
    if batch.locate(3) is None or vector is None:
        return 0 if body is None else int(body.size)
    (count,) = struct.unpack_from("<I", batch.data, vector)
    content, total = memoryview(body), 0
    for number in range(count):
        offset, length = struct.unpack_from("<qq", batch.data, vector + 4 + 16 * number)
        if length:  # a compressed buffer begins with its size, -1 where it is not compressed
            (size,) = struct.unpack_from("<q", content, offset)
            if size < -1 or length < 0:
                raise struct.error("a buffer has a negative size")
            total += length if size == -1 else size
    return total


WILDCARDS = ("*/*", "application/*")


def choose_format(accept: str) -> str:
    """Return the media type of the answer: the one that Accept weighs most, JSON where all are
    equal."""
    if not accept:
        return JSON
    best, result = 0.0, ""
    for part in accept.split(","):
        name, *parameters = (word.strip().lower() for word in part.split(";"))
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
    for parameter in parameters:
        if parameter.startswith("q="):
            try:
                return float(parameter.removeprefix("q="))
            except ValueError:
                return 0.0
    return 1.0


def encode_table(table: pa.Table, kind: str, extra: dict[str, Any]) -> bytes:
    """Return a table in a format; in JSON, `extra` comes beside its rows."""
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
    """Return the rows of a table for JSON: times as text, NaN and infinity as null."""
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
    for index, field in enumerate(table.schema):
        if pa.types.is_dictionary(field.type):
            table = table.set_column(index, field.name, table.column(index).cast(pa.string()))
    return table


def to_json(content: Any) -> bytes:
    return json.dumps(content, allow_nan=False, separators=(",", ":")).encode()


ROWS, COLUMNS = "rows", "columns"
SHAPES = (
    f'a JSON body is {{"{ROWS}": [{{"name": value, ...}}, ...]}} or '
    f'{{"{COLUMNS}": {{"name": [value, ...], ...}}}}'
)
HEAD_LINES = 50
"""Lines of a CSV whose number of columns is checked"""


def check_content_type(content_type: str) -> str:
    """Return the media type of a body; refuse types that cannot be read."""
    kind = content_type.partition(";")[0].strip().lower()
    if kind not in (JSON, CSV, ARROW, ARROW_FILE):
        accepted = f"{JSON}, {CSV} or {ARROW}"
        problem = f'is "{kind[:100]}"' if kind else "is not set"
        raise RequestError(415, f"Content-Type {problem}; send {accepted}")
    return kind


def parse_table(body: bytes, kind: str, limits: ServerLimits) -> pa.Table | bytes:
    """Return the table in a body; a CSV stays bytes, once its size is checked."""
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
            problem = f' "{min(unknown)[:100]}" is not known' if unknown else ""
            raise UserError(f"{SHAPES};{problem or ' it has one of the two'}")
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
        (first, count), *further = lengths.items()
        name, size = next((name, size) for name, size in further if size != count)
        raise UserError(f'column "{first}" has {count} values, column "{name}" has {size}')
    try:
        return pa.table({name: _to_array(name, values) for name, values in columns.items()})
    except UnicodeEncodeError:  # half of a character: "\\ud800"
        raise UserError("the name of a column is not Unicode text") from None


def _turn(rows: list[Any], limits: ServerLimits) -> dict[str, list[Any]]:
    """Return rows as columns; a value that a row does not have is missing."""
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
    return max(
        (line.count(mark) for line in lines for mark in (b",", b";", b"\t", b"|")), default=0
    )
