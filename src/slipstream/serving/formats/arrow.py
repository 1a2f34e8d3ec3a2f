"""Arrow IPC from clients: sizes are checked before anything is decompressed, content before use."""

import struct
from typing import Any

import pyarrow as pa

from slipstream.errors import UserError
from slipstream.serving.limits import RequestError, ServerLimits

FILE_MAGIC = b"ARROW1\0\0"
"""How a file begins; a stream of the same messages follows"""
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

    def __init__(self, data: bytes, at: int) -> None:
        self.data, self.at = data, at
        self.fields = at - self._unpack("<i", at)
        self.num_fields = (self._unpack("<H", self.fields) - 4) // 2

    def _unpack(self, form: str, at: int) -> Any:
        if at < 0:
            raise struct.error("an offset is before the message")
        return struct.unpack_from(form, self.data, at)[0]

    def locate(self, field: int) -> int | None:
        """Return where a field is; None where it has its default."""
        if field >= self.num_fields:
            return None
        offset = self._unpack("<H", self.fields + 4 + 2 * field)
        return self.at + offset if offset else None

    def read(self, form: str, field: int) -> int:
        at = self.locate(field)
        return 0 if at is None else int(self._unpack(form, at))

    def follow(self, field: int) -> int | None:
        """Return where the table or vector that a field points to is."""
        at = self.locate(field)
        return None if at is None else at + int(self._unpack("<I", at))


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
