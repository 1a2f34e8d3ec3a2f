"""Parquet files, read by column and row group."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet

from slipstream.data.io.table import DataTable, SourceFile, make_read_error, make_table

MANY_COLUMNS = 1000
READ_AHEAD_BYTES = 16 << 20
"""Bytes that one read takes from a file with so many columns"""


def read_parquet(path: Path, name: str) -> DataTable:
    """Open a file; its columns are read when they are needed."""
    try:
        _open_file.cache_clear()  # a file of the same name may be another one by now
        _read_ahead.cache_clear()
        file, _, names, _ = _open_file(path)
        counts = [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)]
    except (pa.ArrowException, OSError, ValueError) as error:
        raise make_read_error(path, "Parquet", error) from None
    groups = tuple(np.cumsum([0, *counts[:-1]]).tolist())
    source = SourceFile(name, sum(counts), len(names), path)
    return make_table(_ParquetReader(path, groups), source, names, row_groups=groups)


@dataclass(frozen=True)
class _ParquetReader:
    """Reads the row groups that a range of rows lies in, and no other."""

    path: Path
    row_groups: tuple[int, ...]

    def get_type(self, name: str) -> pa.DataType:
        return _open_file(self.path).types[name]

    def read(self, name: str, begin: int, end: int) -> pa.ChunkedArray:
        first = bisect_right(self.row_groups, begin) - 1
        past = bisect_left(self.row_groups, end)
        parquet = _open_file(self.path)
        many = READ_AHEAD_BYTES // (8 * (end - begin)) if len(parquet.names) >= MANY_COLUMNS else 0
        try:
            if many > 1:
                column = parquet.positions[name] // many * many
                table = _read_ahead(self.path, column, many, first, past)
            else:
                table = parquet.file.read_row_groups(list(range(first, past)), [name])
        except (pa.ArrowException, OSError, ValueError) as error:
            raise make_read_error(self.path, "Parquet", error) from None
        return table.column(name).slice(begin - self.row_groups[first], end - begin)


class _OpenFile(NamedTuple):
    """An open file and its columns; Arrow rebuilds the schema at every access."""

    file: Any
    types: dict[str, pa.DataType]
    names: tuple[str, ...]
    positions: dict[str, int]


@lru_cache(maxsize=16)
def _open_file(path: Path) -> _OpenFile:
    file = pa.parquet.ParquetFile(path, pre_buffer=False)
    schema = file.schema_arrow
    names = tuple(schema.names)
    positions = {name: position for position, name in enumerate(names)}
    return _OpenFile(file, {field.name: field.type for field in schema}, names, positions)


@lru_cache(maxsize=1)
def _read_ahead(path: Path, column: int, many: int, first: int, past: int) -> pa.Table:
    """Read `many` columns from one on. Each read of a file of thousands of columns looks at all of
    them, so that reading one at a time would take minutes."""
    file, _, names, _ = _open_file(path)
    return file.read_row_groups(list(range(first, past)), list(names[column : column + many]))
