"""Files as tables: Parquet and Arrow are read where they are, others are copied to an Arrow file.

Cells of text files stay text in the copy, so that a page of rows shows what the file has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import pyarrow as pa

from slipstream.data.io import disk, files
from slipstream.data.io.columns import is_text
from slipstream.data.io.table import FILE_COLUMN, DataTable
from slipstream.errors import UserError
from slipstream.inspection.api import parse_options
from slipstream.inspection.profiles import ColumnProfile
from slipstream.inspection.reading import Batch, OpenTable, open_table, open_tables
from slipstream.inspection.times import FORMAT_ROWS, TimeSource, find_time
from slipstream.reporting.formatting import find_unit
from slipstream.webapp.tables.cache import CachedTable

Report = Callable[[float], None]
COPY = "table.arrow"
PART_VALUES = 1 << 20
"""Values that are read at a time; more at a time are slower"""
MOST_CELL = 200
"""Characters of a cell that a page of rows shows"""
MOST_COLUMNS = 100
"""Columns of a page of rows"""
KINDS = (
    (pa.types.is_boolean, "boolean"),
    (pa.types.is_timestamp, "time"),
    (pa.types.is_date, "time"),
    (pa.types.is_integer, "number"),
    (pa.types.is_floating, "number"),
    (pa.types.is_decimal, "number"),
    (pa.types.is_duration, "number"),
)


def describe_table(cached: CachedTable, report: Report) -> dict[str, Any]:
    """Return rows, columns and the time of a file; copy it first if it cannot be read in place."""
    table = _read_in_place(cached)
    facts: dict[str, Any] = {}
    if table is None:
        facts = _copy(cached, report)
        table = disk.read_arrow(cached.folder / COPY, cached.path.name)
        table = replace(table, decimal=facts["decimal"], delimiter=facts["delimiter"])
    units = facts.pop("units", {})
    head, time = _read_head(table)
    return {
        "rows": table.num_rows,
        "format": table.files[0].format,
        "decimal": table.decimal,
        "delimiter": table.delimiter,
        "notes": [],
        "columns": [
            {
                "name": name,
                "type": _find_kind(table, name, head),
                "unit": units.get(name) or find_unit(name),
            }
            for name in table.column_names
        ],
        "time": time,
        **facts,
    }


def load_table(cached: CachedTable) -> DataTable:
    """Return the table of a file that was described."""
    facts = cached.read("table")
    table = _read_in_place(cached) or disk.read_arrow(cached.folder / COPY, cached.path.name)
    return replace(table, decimal=facts["decimal"], delimiter=facts["delimiter"])


def iter_batches(table: DataTable, names: Iterable[str]) -> Iterator[Batch]:
    """Read columns part by part."""
    return open_table(replace(table, column_names=tuple(names)), None, PART_VALUES).batches


def read_rows(cached: CachedTable, begin: int, count: int) -> dict[str, Any]:
    """Return some rows as text, None where a value is missing."""
    table = load_table(cached)
    begin = min(max(begin, 0), max(table.num_rows - 1, 0))
    part = table.slice_rows(begin, min(begin + count, table.num_rows))
    names = table.column_names[:MOST_COLUMNS]
    columns = [[_format(cell) for cell in part.read_column(name)] for name in names]
    return {
        "begin": begin,
        "names": list(names),
        "rows": [list(cells) for cells in zip(*columns, strict=True)],
    }


def _format(cell: Any) -> str | None:
    try:
        value = cell.as_py()
    except (ValueError, pa.ArrowException):  # text that is not UTF-8, a time beyond year 9999
        return "?"
    if value is None:
        return None
    text = value if isinstance(value, str) else str(value)
    return text if len(text) <= MOST_CELL else f"{text[:MOST_CELL]}…"


def _read_in_place(cached: CachedTable) -> DataTable | None:
    if cached.path.is_dir():
        return None
    if files.READERS.get(cached.path.suffix.lower()) not in ("parquet", "arrow"):
        return None
    return files.read_file(cached.path, name=cached.path.name)


def _copy(cached: CachedTable, report: Report) -> dict[str, Any]:
    """Copy all rows to one Arrow file; return what is known of its format."""
    options, _ = parse_options(cached.overrides)
    _, paths = files.expand_path(cached.path)
    total = sum(path.stat().st_size for path in paths)
    tables = open_tables(str(cached.path), options)
    first = next(tables)
    copy = _Copy(
        cached.folder / COPY, total, report, with_files=len(paths) > 1 or first.sheet != ""
    )
    for table in chain([first], tables):
        copy.add(table)
    copy.finish()
    return {
        "format": first.format,
        "decimal": first.decimal,
        "delimiter": first.delimiter,
        "units": dict(first.units),
        "notes": list(first.notes),
    }


class _Copy:
    """Writes the rows of tables one after the other."""

    def __init__(self, path: Path, total: int, report: Report, *, with_files: bool) -> None:
        self.path, self.total, self.report, self.with_files = path, total, report, with_files
        self.temporary = path.with_suffix(".part")
        self.writer: Any = None
        self.schema: Any = None
        self.num_bytes = 0

    def add(self, table: OpenTable) -> None:
        for batch in table.batches:
            if self.with_files and FILE_COLUMN not in table.columns:
                num_rows = len(next(iter(batch.values()))) if batch else 0
                name = pa.array([table.name] * num_rows)
                batch |= {FILE_COLUMN: pa.chunked_array([name])}
            if self.writer is None:
                self.schema = pa.schema([(name, _get_type(one)) for name, one in batch.items()])
                self.writer = pa.ipc.new_file(str(self.temporary), self.schema)
            self.writer.write_table(_fit(batch, self.schema, table.name))
            self.num_bytes += sum(one.nbytes for one in batch.values())
            self.report(min(self.num_bytes / max(self.total, 1), 0.99))

    def finish(self) -> None:
        if self.writer is None:
            raise UserError(f"{self.path}: has no rows")
        self.writer.close()
        self.temporary.replace(self.path)


def _get_type(values: pa.ChunkedArray) -> pa.DataType:
    kind = values.type
    if kind == pa.null():
        return pa.string()
    return kind.value_type if pa.types.is_dictionary(kind) else kind


def _fit(batch: Batch, schema: pa.Schema, name: str) -> pa.Table:
    """Return rows with the columns of the first file."""
    num_rows = len(next(iter(batch.values())))
    columns = []
    for field in schema:
        values = batch.get(field.name)
        if values is None:
            values = pa.chunked_array([pa.nulls(num_rows, field.type)])
        try:
            columns.append(values if values.type == field.type else values.cast(field.type))
        except pa.ArrowException:
            raise UserError(
                f'{name}: column "{field.name}" holds {values.type}, but {field.type} in the first '
                "file; files of one job have the same columns"
            ) from None
    return pa.table(columns, schema=schema)


def _read_head(table: DataTable) -> tuple[Batch, dict[str, Any] | None]:
    """Return the first rows of the columns whose type they tell, and which columns hold the
    time."""
    types = {name: table.reader.get_type(name) for name in table.column_names}
    dated = [name for name, kind in types.items() if _is_dated(kind)]
    part = table.slice_rows(0, min(FORMAT_ROWS, table.num_rows))
    needed = [name for name, kind in types.items() if not dated or is_text(kind)]
    head = {name: part.read_column(name) for name in needed}
    if dated:
        source: TimeSource | None = TimeSource((dated[0],), None, is_date=True)
    else:
        source = find_time(head, table.decimal)
    return head, None if source is None else _describe_source(source)


def _describe_source(source: TimeSource) -> dict[str, Any]:
    return {"columns": source.columns, "format": source.format, "is_date": source.is_date}


def _is_dated(kind: pa.DataType) -> bool:
    return bool(pa.types.is_timestamp(kind) or pa.types.is_date(kind))


def _find_kind(table: DataTable, name: str, head: Mapping[str, Any]) -> str:
    """Return the type of a column, of text by its first rows."""
    kind = table.reader.get_type(name)
    for test, word in KINDS:
        if test(kind):
            return word
    if name in head and is_text(kind):
        profile = ColumnProfile(name)
        profile.add(head[name], table.decimal)
        return profile.kind
    return "text"
