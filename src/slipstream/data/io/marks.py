"""Cells that mean "missing" by `data.na`, and times that several columns hold together.

Both are added to the reader of a table, so that all that is read above them knows nothing of it.
"""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pyarrow as pa
import pyarrow.compute as pc

from slipstream.data.io.columns import is_text, require_column
from slipstream.data.io.layout import is_number
from slipstream.data.io.table import ColumnReader, DataTable, MemoryReader
from slipstream.errors import UserError

Marks = Sequence[str | int | float]


def mark_missing(table: DataTable, na: Marks) -> DataTable:
    """Return a table without the values that mean "missing"."""
    if not na:
        return table
    reader = _MarkedReader(table.reader, tuple(list_texts(na)), list_numbers(na))
    if isinstance(table.reader, MemoryReader):  # so that columns are never held twice
        for name in table.column_names:
            table.reader.columns[name] = reader.read(name, 0, table.num_rows)
        return table
    return replace(table, reader=reader)


def list_texts(na: Marks) -> list[str]:
    """List the texts that mean "missing"; of a number, its usual spellings."""
    texts = {str(mark).strip() for mark in na}
    for number in list_numbers(na):
        texts |= {str(number), f"{number:g}", f"{number:.0f}" if number.is_integer() else ""}
    return sorted(texts - {""})


def list_numbers(na: Marks) -> tuple[float, ...]:
    """List the numbers that mean "missing"; a text may be one too."""
    return tuple(float(mark) for mark in na if is_number(str(mark)))


@dataclass(frozen=True)
class _MarkedReader:
    """Reads columns with nulls in place of the marks."""

    reader: ColumnReader
    texts: tuple[str, ...]
    numbers: tuple[float, ...]

    def get_type(self, name: str) -> pa.DataType:
        return self.reader.get_type(name)

    def read(self, name: str, begin: int, end: int) -> pa.ChunkedArray:
        values = self.reader.read(name, begin, end)
        kind = values.type
        if pa.types.is_dictionary(kind) and is_text(kind.value_type):
            values, kind = values.cast(kind.value_type), kind.value_type
        if is_text(kind):
            marks = pa.array(self.texts, pa.string())
            marked = pc.is_in(pc.utf8_trim_whitespace(values.cast(pa.string())), value_set=marks)
        elif pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind):
            marks = pa.array(self.numbers, pa.float64())
            marked = pc.is_in(values.cast(pa.float64(), safe=False), value_set=marks)
        else:
            return values
        return pc.if_else(marked, pa.scalar(None, kind), values)


def join_times(table: DataTable, columns: Sequence[str]) -> DataTable:
    """Return a table with one more column, the times that several columns hold together."""
    joined = " ".join(columns)
    if len(columns) < 2 or joined in table.column_set:
        return table
    for name in columns:
        require_column(table, name, "data.time")
    names = (*table.column_names, joined)
    reader = _JoiningReader(table, tuple(columns), joined)
    if isinstance(table.reader, MemoryReader):
        table.reader.columns[joined] = reader.read(joined, 0, table.num_rows)
        return replace(table, column_names=names)
    return replace(table, reader=reader, column_names=names)


@dataclass(frozen=True)
class _JoiningReader:
    """Reads a table's columns, and one more that joins some of them."""

    table: DataTable
    columns: tuple[str, ...]
    joined: str

    def get_type(self, name: str) -> pa.DataType:
        if name != self.joined:
            return self.table.reader.get_type(name)
        first = self.table.reader.get_type(self.columns[0])
        return pa.timestamp("us") if _is_date(first) else pa.string()

    def read(self, name: str, begin: int, end: int) -> pa.ChunkedArray:
        if name != self.joined:
            return self.table.reader.read(name, begin, end)
        parts = [self.table.reader.read(column, begin, end) for column in self.columns]
        if _is_date(parts[0].type):
            return self._add(parts)
        return pc.binary_join_element_wise(*map(_to_text, parts), " ")

    def _add(self, parts: list[pa.ChunkedArray]) -> pa.ChunkedArray:
        """Add times of day to dates."""
        total = parts[0].cast(pa.timestamp("us"), safe=False).cast(pa.int64())
        for column, part in zip(self.columns[1:], parts[1:], strict=True):
            total = pc.add(total, self._read_clock(column, part))
        return total.cast(pa.timestamp("us"))

    def _read_clock(self, column: str, part: pa.ChunkedArray) -> pa.ChunkedArray:
        """Return microseconds since midnight; spreadsheets write times of day as dates, too."""
        kind = part.type
        if pa.types.is_duration(kind):
            return part.cast(pa.duration("us"), safe=False).cast(pa.int64())
        if pa.types.is_timestamp(kind) or pa.types.is_time(kind):
            return part.cast(pa.time64("us"), safe=False).cast(pa.int64())
        raise UserError(
            f'{self.table.name}: "{self.columns[0]}" holds dates, but "{column}" (data.time) holds '
            f"{part.type}, not times of day; make both of them text"
        )


def _is_date(kind: pa.DataType) -> bool:
    return bool(pa.types.is_timestamp(kind) or pa.types.is_date(kind))


def _to_text(part: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return values as text, whole numbers without a fraction."""
    if pa.types.is_floating(part.type):
        with contextlib.suppress(pa.ArrowInvalid):  # it has fractions
            part = part.cast(pa.int64())
    return pc.utf8_trim_whitespace(part.cast(pa.string()))
