"""The rows of files in batches: tables of any size pass through a bounded piece of memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa

from slipstream.config import SIMULATED, Data
from slipstream.data.io import compression, csv, decimals, files
from slipstream.data.io.compression import UnpackedFile
from slipstream.data.io.layout import describe_layout
from slipstream.data.io.options import ReadOptions
from slipstream.data.io.table import DataTable
from slipstream.errors import UserError
from slipstream.object_storage import AnyPath, parse_path
from slipstream.phases import report_progress

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
    for file in files.open_files(folder, paths, options):
        large = _find_large_text(file.path, options)
        if large is not None:
            yield _open_text(file.path, large, file.name, options)
        else:
            for table in file.read():
                yield open_table(table, file.path)


def _find_large_text(file: AnyPath, options: ReadOptions) -> UnpackedFile | None:
    """Return the file that holds the text of a large table, which does not fit into little memory:
    itself, or what it unpacks to. None for other files."""
    endings = [ending for ending, kind in files.READERS.items() if kind == "csv"]
    if not (compression.is_readable(file, endings) and file.is_file()):
        return None
    text = UnpackedFile(file, str(file)) if isinstance(file, Path) else None
    if text is None or file.suffix.lower() in compression.SUFFIXES:
        text = compression.unpack(file, files.READERS)
    is_text = text.path.suffix.lower() in endings
    if not is_text or text.path.stat().st_size <= files.LARGE_BYTES:
        return None
    if options.encoding is not None:
        transcoded = compression.transcode(text.path, options.encoding)
        return UnpackedFile(transcoded.path, text.label)
    return text


def _open_text(file: AnyPath, text: UnpackedFile, name: str, options: ReadOptions) -> OpenTable:
    name += text.label.removeprefix(str(file))
    try:
        head = files.read_head(text.path, "data.path")
        opened = csv.open_csv(text.path, name, head, options.skip_rows)
        batches = (pa.Table.from_batches([batch]) for batch in opened.batches)
        first = next(batches, None)
    except UserError as error:
        raise files.restore_name(error, text) from None
    decimal = options.decimal
    if decimal is None and first is not None and opened.delimiter != ",":
        decimal = decimals.find_mark(first)
        if decimal is None and not decimals.has_points(first):
            decimal = _find_later_mark(text.path, name, head, options.skip_rows)

    def read() -> Iterator[Batch]:
        if first is None:
            return
        yield _to_batch(first)
        size, what = text.path.stat().st_size, f"reading {name}"
        try:
            for number, batch in enumerate(batches, start=1):
                report_progress(what, number * csv.STREAM_BYTES / size)
                yield _to_batch(batch)
        except UserError as error:
            raise files.restore_name(error, text) from None

    return OpenTable(
        name,
        files.describe_csv(opened.delimiter, decimal, options.encoding),
        file.stat().st_size,
        tuple(opened.names),
        opened.units,
        tuple(describe_layout(opened.lines_above, opened.units, options, "line")),
        decimal,
        opened.delimiter,
        read(),
    )


def _find_later_mark(path: Path, name: str, head: bytes, skip_rows: int | None) -> str | None:
    """Return the decimal mark of a file whose first rows hold whole numbers only."""
    for batch in csv.open_csv(path, name, head, skip_rows).batches:
        part = pa.Table.from_batches([batch])
        mark = decimals.find_mark(part)
        if mark is not None or decimals.has_points(part):
            return mark
    return None


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
