"""Parquet, read by column and row group, on disk or in object storage, and Arrow (Feather),
memory-mapped."""

import os
from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from slipstream.base.errors import UserError
from slipstream.base.storage import AnyPath, ObjectPath, explain
from slipstream.data.formats.reader import InputFile, ReadOptions, TableReader
from slipstream.data.table import DataTable, SourceFile, make_table, summarize_error

ERRORS = (pa.ArrowException, OSError, ValueError)
MANY_COLUMNS = 1000
"""A file with at least this many columns is read several columns at a time (`_read_ahead`)"""
READ_AHEAD_BYTES = 16 << 20
"""The number of bytes that one read takes from a file of very many columns"""


class ParquetReader(TableReader):
    """Reads Parquet by column and row group, also from object storage."""

    reads_in_place = True

    def read(self, file: InputFile, options: ReadOptions) -> list[DataTable]:
        return [read_parquet(file.path, file.name)]


class ArrowReader(TableReader):
    """Maps Arrow files and streams (Feather) into memory."""

    reads_in_place = True

    def read(self, file: InputFile, options: ReadOptions) -> list[DataTable]:
        return [read_arrow(file.local_path, file.name)]


def read_parquet(path: AnyPath, name: str) -> DataTable:
    """Open a file; its columns are read when they are needed."""
    try:
        path = path if isinstance(path, Path) else path.pin()
        _open_once.cache_clear()  # a file of the same name may be another one by now
        _read_ahead.cache_clear()
        file, _, names, _ = _open_parquet(path)
        counts = [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)]
    except ERRORS as error:
        raise _explain(path, "Parquet", error) from None
    groups = tuple(np.cumsum([0, *counts[:-1]]).tolist())
    source = SourceFile(name, sum(counts), len(names), path, "Parquet")
    return make_table(_ParquetReader(path, groups), source, names, groups)


def read_arrow(path: Path, name: str) -> DataTable:
    """Map a file into memory; pages that are never accessed are never read."""
    try:
        _open_arrow.cache_clear()  # a file of the same name may be another one by now
        table = _open_arrow(path)
        names = tuple(table.column_names)
    except ERRORS as error:
        raise _explain(path, "Arrow", error) from None
    counts = [batch.num_rows for batch in table.to_batches()]
    groups = tuple(np.cumsum([0, *counts[:-1]]).tolist())
    source = SourceFile(name, table.num_rows, len(names), path, "Arrow")
    return make_table(_ArrowReader(path), source, names, groups)


def _explain(path: AnyPath, kind: str, error: Exception) -> UserError:
    if isinstance(path, ObjectPath) and isinstance(error, OSError):
        return explain(path, error)
    if isinstance(error, UnicodeDecodeError):
        return UserError(f"{path}: the name of a column is not UTF-8 text; write the file again")
    return UserError(f"{path}: cannot be read as {kind}: {summarize_error(error)}")


@dataclass(frozen=True)
class _ParquetReader:
    """Reads the row groups that a range of rows lies in, and no other."""

    path: AnyPath
    row_groups: tuple[int, ...]

    def get_type(self, name: str) -> pa.DataType:
        try:
            return _open_parquet(self.path).types[name]
        except ERRORS as error:
            raise _explain(self.path, "Parquet", error) from None

    def read(self, name: str, begin: int, end: int) -> pa.ChunkedArray:
        first = bisect_right(self.row_groups, begin) - 1
        past = bisect_left(self.row_groups, end)
        try:
            parquet = _open_parquet(self.path)
            is_wide = len(parquet.names) >= MANY_COLUMNS
            many = READ_AHEAD_BYTES // (8 * (end - begin)) if is_wide else 0
            if many > 1:
                column = parquet.positions[name] // many * many
                table = _read_ahead(self.path, column, many, first, past)
            else:
                table = parquet.file.read_row_groups(list(range(first, past)), [name])
        except ERRORS as error:
            raise _explain(self.path, "Parquet", error) from None
        return table.column(name).slice(begin - self.row_groups[first], end - begin)


class _OpenFile(NamedTuple):
    """An open file and its columns; Arrow rebuilds the schema at every access."""

    file: Any
    types: dict[str, pa.DataType]
    names: tuple[str, ...]
    positions: dict[str, int]


def _open_parquet(path: AnyPath) -> _OpenFile:
    return _open_once(path, None if isinstance(path, Path) else os.getpid())


@lru_cache(maxsize=16)
def _open_once(path: AnyPath, _: int | None) -> _OpenFile:
    """Open a file. A fork must not use the connections of its parent, so the process's id is part
    of the key of an object."""
    import pyarrow.parquet as pq  # takes 15 ms

    if isinstance(path, ObjectPath):  # all ranges of a read at a time
        file = pq.ParquetFile(path.open_unchanged(), pre_buffer=True)
    else:
        file = pq.ParquetFile(path, pre_buffer=False)
    schema = file.schema_arrow
    names = tuple(schema.names)
    positions = {name: position for position, name in enumerate(names)}
    return _OpenFile(file, {field.name: field.type for field in schema}, names, positions)


@lru_cache(maxsize=1)
def _read_ahead(path: AnyPath, column: int, many: int, first: int, past: int) -> pa.Table:
    """Read `many` columns, from `column` on. Each read looks at the metadata of all columns, so
    reading thousands of columns one at a time would take minutes."""
    file, _, names, _ = _open_parquet(path)
    return file.read_row_groups(list(range(first, past)), list(names[column : column + many]))


@dataclass(frozen=True)
class _ArrowReader:
    path: Path

    def get_type(self, name: str) -> pa.DataType:
        return _open_arrow(self.path).schema.field(name).type

    def read(self, name: str, begin: int, end: int) -> pa.ChunkedArray:
        values = _open_arrow(self.path).column(name).slice(begin, end - begin)
        if not (pa.types.is_primitive(values.type) or pa.types.is_decimal(values.type)):
            try:  # Arrow follows the offsets and codes of a file wherever they lead
                values.validate(full=True)
            except pa.ArrowInvalid as error:
                raise _explain(self.path, "Arrow", error) from None
        return values


@lru_cache(maxsize=16)
def _open_arrow(path: Path) -> Any:
    with pa.memory_map(str(path)) as memory:
        try:
            table = pa.ipc.open_file(memory).read_all()
        except pa.ArrowInvalid:
            memory.seek(0)
            table = pa.ipc.open_stream(memory).read_all()
    table.validate()  # that buffers are as long as the number of rows demands
    return table
