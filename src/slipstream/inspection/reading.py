"""The rows of files in batches: tables of any size pass through a bounded piece of memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any, NamedTuple

import pyarrow as pa

from slipstream.config import SIMULATED, Data
from slipstream.data.io import compression, csv, decimals, files
from slipstream.data.io.layout import describe_layout
from slipstream.data.io.options import ReadOptions
from slipstream.data.io.table import DataTable
from slipstream.object_storage import AnyPath, ObjectPath, name_below, parse_path

BATCH_VALUES = 4_000_000
EVERY_SHEET = ReadOptions(sheets=("*",))
Batch = dict[str, pa.ChunkedArray]


class OpenTable(NamedTuple):
    """A table whose rows come in batches."""

    name: str
    format: str
    num_bytes: int | None
    columns: tuple[str, ...]
    units: Mapping[str, str]
    notes: tuple[str, ...]
    decimal: str | None
    delimiter: str | None
    batches: Iterator[Batch]
    scalars: tuple[str, ...] = ()
    """Columns that repeat one value of the file"""
    sheet: str = ""
    """The sheet of a workbook of which several are read"""


def open_tables(path: str, options: ReadOptions = EVERY_SHEET) -> Iterator[OpenTable]:
    """Open every table of a file, a folder or a pattern, one after the other."""
    if path.startswith(SIMULATED):
        for table in files.read_tables(Data(path=path), None):
            yield open_table(table, None)
        return
    folder, paths = files.expand_path(parse_path(path))
    for file in paths:
        name = name_below(file, folder).as_posix()
        if options == EVERY_SHEET and _is_large_text(file):
            yield _open_text(file, name)
        else:
            for table in files.read_parts(file, name=name, options=options):
                yield open_table(table, file)


def _is_large_text(path: AnyPath) -> bool:
    """Whether a file is text that does not fit into little memory; packed text may be."""
    endings = [ending for ending, kind in files.READERS.items() if kind == "csv"]
    is_text = compression.is_readable(path, endings)
    return is_text and path.exists() and path.stat().st_size > files.LARGE_BYTES


def _open_text(path: AnyPath, name: str) -> OpenTable:
    size = path.stat().st_size
    if isinstance(path, ObjectPath) or path.suffix.lower() in compression.SUFFIXES:
        unpacked = compression.unpack(path, files.READERS)
        name, path = name + unpacked.label.removeprefix(str(path)), unpacked.path
    opened = csv.open_csv(path, name, files.read_head(path, "data.path"))
    batches = (pa.Table.from_batches([batch]) for batch in opened.batches)
    first = next(batches, None)
    decimal = None
    if first is not None and opened.delimiter != ",":
        decimal = decimals.find_mark(first)

    def read() -> Iterator[Batch]:
        if first is not None:
            yield _to_batch(first)
            yield from map(_to_batch, batches)

    notes = describe_layout(opened.lines_above, opened.units, ReadOptions(), "line")
    return OpenTable(
        name,
        files.describe_csv(opened.delimiter, decimal, None),
        size,
        tuple(opened.names),
        opened.units,
        tuple(notes),
        decimal,
        opened.delimiter,
        read(),
    )


def _to_batch(table: Any) -> Batch:
    return dict(zip(table.column_names, table.columns, strict=True))


def _list_borders(table: DataTable, num_values: int) -> list[int]:
    """List the rows between which batches lie; a row group, once read, is used as a whole."""
    rows = max(num_values // max(len(table.column_names), 1), 1)
    borders = [0]
    for start in table.row_groups[1:] or range(rows, table.num_rows, rows):
        if start - borders[-1] >= rows:
            borders.append(start)
    return [*borders, table.num_rows]


def open_table(table: DataTable, path: AnyPath | None, num_values: int = BATCH_VALUES) -> OpenTable:
    """Read a table piece by piece, of so many values; one on disk by its row groups."""

    def read() -> Iterator[Batch]:
        for begin, end in pairwise(_list_borders(table, num_values)):
            part = table.slice_rows(begin, end)
            yield {name: part.read_column(name) for name in table.column_names}

    (file,) = table.files
    return OpenTable(
        table.name,
        file.format or "table in memory",
        None if path is None else path.stat().st_size,
        table.column_names,
        file.units,
        file.notes,
        table.decimal,
        table.delimiter,
        read(),
        file.scalars,
        file.part,
    )
