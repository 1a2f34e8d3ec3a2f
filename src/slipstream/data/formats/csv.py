"""CSV and other delimited text."""

from __future__ import annotations

import codecs
import contextlib
import mmap
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv

from slipstream.base.errors import (
    EmptyFileError,
    EncodingError,
    Setting,
    Text,
    UserError,
)
from slipstream.base.phases import report_progress
from slipstream.base.text import format_count
from slipstream.data import columns, compression
from slipstream.data.compression import (
    HEAD_BYTES,
    UnpackedFile,
    iterate_restoring,
    read_head,
    restoring_name,
)
from slipstream.data.formats.reader import Batch, InputFile, OpenTable, ReadOptions, TableReader
from slipstream.data.layout import (
    DATE,
    UNNAMED,
    Layout,
    Record,
    add_row_names,
    are_values,
    describe_dropped,
    describe_layout,
    explain_no_names,
    find_layout,
    find_names,
    find_wide_layout,
    is_number,
    is_units,
    iter_records,
    name_columns,
)
from slipstream.data.table import DataTable, summarize_error, wrap_table

Ints = npt.NDArray[np.int64]

BLOCK_BYTES, STREAM_BYTES, COUNT_BYTES = 16 << 20, 2 << 20, 1 << 20
"""Bytes parsed at a time from a whole file, parsed at a time from a file of any size, and searched
for line breaks at a time"""
DELIMITERS = {",": "commas", ";": "semicolons", "\t": "tabs", "|": "bars"}
LARGE_BYTES = 32 << 20
"""A file of at least this size is sampled without reading the rest of it"""
HEAD_RECORDS, HEAD_CELLS = 100, 100_000
"""The number of records, and of cells, that are searched for the row of names"""
UTF_16 = "UTF-16 text; set " + Setting({"data.encoding": "utf-16"}) + ", or save it as UTF-8"
MAGIC: dict[bytes, Text] = {
    b"\x1f\x8b": "gzip data; rename it to .csv.gz",
    b"PK\x03\x04": "a ZIP or Excel file; rename it to .zip or .xlsx",
    b"PAR1": "Parquet data; rename it to .parquet",
    b"ARROW1": "Arrow data; rename it to .arrow",
    b"\xff\xfe": UTF_16,
    b"\xfe\xff": UTF_16,
    b"\x89HDF": "an HDF5 file; export it as CSV or Parquet",
    b"MATLAB": "a MAT file; rename it to .mat",
    b"\xd0\xcf\x11\xe0": "an Excel file (.xls); correct the ending of its name",
}
MAX_NULS = 0.1
"""A file with a larger share of NUL bytes is not taken for UTF-8"""
MAX_REPEATS = 1000
"""The largest repeat count in a regular expression that Arrow accepts"""
FIX = (
    'close it where its cell ends, write it twice ("") where it belongs to the text, or take the '
    "line break out"
)


class CsvReader(TableReader):
    """Reads text with commas, semicolons, tabs, bars or spaces between the cells; a large file in
    batches."""

    def read(self, file: InputFile, options: ReadOptions) -> list[DataTable]:
        plain = _convert(file, options)
        with restoring_name(plain.copy):
            return [_read_table(plain, options)]

    def inspect(self, file: InputFile, options: ReadOptions) -> Iterator[OpenTable]:
        if file.local_path.stat().st_size <= LARGE_BYTES:
            yield from super().inspect(file, options)
            return
        plain = _convert(file, options)
        with restoring_name(plain.copy):
            table = _open_table(plain, options)
        yield table._replace(batches=iterate_restoring(table.batches, plain.copy))

    def can_sample(self, options: ReadOptions) -> bool:
        return options.encoding is None

    def read_sample(
        self, file: InputFile, options: ReadOptions, begin: int, end: int
    ) -> tuple[DataTable, int]:
        """Read a large file up to `end` only; types then follow from these rows alone."""
        is_large = file.local_path.stat().st_size > LARGE_BYTES
        if not (is_large and self.can_sample(options)):
            return super().read_sample(file, options, begin, end)
        plain = _convert(file, options)
        with restoring_name(plain.copy):
            return _read_rows(plain.file, options, begin, end), begin


def _is_utf8(options: ReadOptions) -> bool:
    return options.encoding is None or codecs.lookup(options.encoding).name == "utf-8"


class _PlainFile(NamedTuple):
    """Text in UTF-8 with a delimiter."""

    file: InputFile
    copy: UnpackedFile | None = None
    """The original file that errors about a copy name; None where the file is read itself"""
    is_spaced: bool = False
    """Whether spaces separate the cells of the original file"""


def _convert(file: InputFile, options: ReadOptions) -> _PlainFile:
    """Return a copy of a file in another encoding, or with spaces between its cells."""
    plain = _PlainFile(file)
    if not _is_utf8(options):
        assert options.encoding is not None
        plain = _replace_file(plain, compression.transcode(file.local_path, options.encoding))
    if is_spaced(plain.file.head, options.skip_rows or 0):
        path, head, is_named = plain.file.local_path, plain.file.head, options.names is None
        convert = partial(_join_cells, head, is_named=is_named)
        with restoring_name(plain.copy):
            copy = compression.rewrite(path, "spaces" if is_named else "values", convert)
        plain = _replace_file(plain, copy)._replace(is_spaced=True)
    return plain


def _replace_file(plain: _PlainFile, copy: UnpackedFile) -> _PlainFile:
    with restoring_name(copy):
        file = InputFile(copy.path, plain.file.name, read_head(copy.path, ""))
    label = copy.label if plain.copy is None else plain.copy.label
    return _PlainFile(file, copy._replace(label=label))


def is_spaced(head: bytes, skip_rows: int) -> bool:
    """Return whether spaces separate the cells of a text that begins like this: each line below
    comments has as many cells, most of them numbers, and no other delimiter."""
    lines = _split_head(head)
    lines = [line for line in lines[max(skip_rows, _count_comments(lines)) :] if line.strip()]
    lines = lines[:HEAD_RECORDS]
    if any(mark in line for line in lines for mark in b',;\t|"'):
        return False
    rows = [line.split() for line in lines]
    widths = {len(row) for row in rows[1:]}
    # R names no column of row names
    if len(widths) != 1 or min(widths) < 2 or min(widths) - len(rows[0]) not in (0, 1):
        return False
    cells = [cell.decode("utf-8", "replace") for row in rows[1:] for cell in row]
    return 2 * sum(is_number(cell) or bool(DATE.match(cell)) for cell in cells) > len(cells)


def _split_head(head: bytes) -> list[bytes]:
    """Return the lines that a text begins with."""
    lines = head.removeprefix(b"\xef\xbb\xbf").splitlines()
    return lines[:-1] if len(head) >= HEAD_BYTES else lines  # perhaps the beginning of a line


def _count_comments(lines: Sequence[bytes]) -> int:
    """Count the comments that a text begins with, and blank lines among them."""
    return sum(1 for _ in takewhile(lambda line: line[:1] in (b"", b"#", b"%"), lines))


def _join_cells(head: bytes, block: bytes, *, is_named: bool) -> bytes:
    """Put tabs in place of the spaces between cells; of the comments above them, names and units
    stay where the file names its columns. Every block of a file that begins with `head` is
    converted like this."""
    if block.startswith(head) and (count := _count_comments(lines := _split_head(head))):
        named = _find_named(lines[:count], lines[count:]) if is_named else []
        above = block.splitlines(keepends=True)[:count]
        block = block[sum(map(len, above)) :]
        block = b"".join([*[b"\n"] * (count - len(named)), *named, block])
    return re.sub(rb"^\t|\t(?=\r?$)", b"", re.sub(rb" +", b"\t", block), flags=re.MULTILINE)


def _find_named(comments: Sequence[bytes], below: Sequence[bytes]) -> list[bytes]:
    """Return the line of names among comments, and that of units below it: names are in the last
    comment, or follow its mark at once."""
    width = len(b" ".join(below[:1]).split())
    for number, comment in enumerate(comments):
        names, *units = (line.lstrip(b"#%").split() for line in comments[number:])
        if len(names) != width or (units and comment[1:2].isspace()):
            continue
        plain = [name.removeprefix(b"%d:" % place) for place, name in enumerate(names, start=1)]
        if all(plain) and all(map(bytes.__ne__, plain, names)):
            names = plain
        found = [names]
        texts = [cell.decode("utf-8", "replace") for line in units[:1] for cell in line]
        if len(texts) == width and is_units(texts):
            found += units[:1]
        return [b" ".join(cells) + b"\n" for cells in found]
    return []


def _read_table(plain: _PlainFile, options: ReadOptions) -> DataTable:
    file, path = plain.file, plain.file.local_path
    read = read_csv(path, file.name, file.head, options)
    decimal = options.decimal
    if decimal is None and read.delimiter != ",":
        decimal = columns.find_mark(read.table)
    layout_notes = describe_layout(read.lines_above, read.units, options.skip_rows, "line")
    table = wrap_table(
        read.table,
        file.name,
        path=path,
        format=_describe(plain, read.delimiter, decimal, options.encoding),
        delimiter=read.delimiter,
        header_lines=read.header_lines,
        units=read.units,
        notes=(*layout_notes, *read.notes),
    )
    return replace(table, decimal=decimal)


def _open_table(plain: _PlainFile, options: ReadOptions) -> OpenTable:
    """Open a file of any size; the first batch is read now, since it tells the decimal mark."""
    file, path = plain.file, plain.file.local_path
    opened = open_csv(path, file.name, file.head, options)
    batches = (pa.Table.from_batches([batch]) for batch in opened.batches)
    first = next(batches, None)
    decimal = options.decimal
    if decimal is None and first is not None and opened.delimiter != ",":
        decimal = columns.find_mark(first)
        if decimal is None and not columns.has_points(first):
            decimal = _find_later_mark(file, options)

    def read() -> Iterator[Batch]:
        if first is None:
            return
        yield _to_batch(first)
        size, activity = path.stat().st_size, f"reading {file.name}"
        for number, batch in enumerate(batches, start=1):
            report_progress(activity, number * STREAM_BYTES / size)
            yield _to_batch(batch)

    return OpenTable(
        file.name,
        _describe(plain, opened.delimiter, decimal, options.encoding),
        path.stat().st_size,
        tuple(opened.names),
        opened.units,
        tuple(describe_layout(opened.lines_above, opened.units, options.skip_rows, "line")),
        decimal,
        opened.delimiter,
        read(),
    )


def _to_batch(table: pa.Table) -> Batch:
    return dict(zip(table.column_names, table.columns, strict=True))


def _find_later_mark(file: InputFile, options: ReadOptions) -> str | None:
    """Return the decimal mark of a file whose first rows hold whole numbers only."""
    for batch in open_csv(file.local_path, file.name, file.head, options).batches:
        part = pa.Table.from_batches([batch])
        mark = columns.find_mark(part)
        if mark is not None or columns.has_points(part):
            return mark
    return None


def _read_rows(file: InputFile, options: ReadOptions, begin: int, end: int) -> DataTable:
    """Read the cells of the rows from `begin` to before `end`, block by block."""
    opened = open_csv(file.local_path, file.name, file.head, options)
    parts, first = [], 0
    for batch in opened.batches:
        low, high = max(begin - first, 0), min(end - first, batch.num_rows)
        if low < high:
            parts.append(batch.slice(low, high - low))
        first += batch.num_rows
        if first >= end:
            break
    if not parts:
        raise UserError(f"{file.name}: has {first:,} rows, none from {begin:,} on")
    cells = pa.Table.from_batches(parts)
    decimal = options.decimal
    if decimal is None and opened.delimiter != ",":
        decimal = columns.find_mark(cells)
    table = wrap_table(
        cells, file.name, delimiter=opened.delimiter, header_lines=begin, units=opened.units
    )
    return replace(table, decimal=decimal)


def _describe(plain: _PlainFile, delimiter: str, decimal: str | None, encoding: str | None) -> str:
    """Describe the format of a file in words."""
    mark = "spaces" if plain.is_spaced else DELIMITERS[delimiter]
    details = [mark] if delimiter != "," else []
    details += ["decimal comma"] if decimal == "," else []
    details += [encoding] if encoding else []
    return ", ".join(["CSV", *details])


class CsvFile(NamedTuple):
    """The text of a file, and its layout."""

    table: pa.Table
    delimiter: str
    header_lines: int
    """Lines above the first row of values"""
    lines_above: int
    """Lines above the names"""
    units: dict[str, str]
    notes: tuple[str, ...]


def read_csv(path: Path, name: str, head: bytes, options: ReadOptions) -> CsvFile:
    """Read a CSV file as text, and find its layout; `head` is how the file begins.

    Lines of text above the names are recognised, or counted by the options. With a series per row,
    rows may have fewer cells than others, and there may be no names.
    """
    _refuse_other_content(path, head)
    delimiter, first, lines, header = _read_header(path, name, head, options)
    names = _fill_names(header.names)
    source: Any = path
    if options.is_wide:
        source, width = _pad_rows(path, delimiter, lines, len(names))
        names = _fill_names([*header.names, *[""] * (width - len(names))])
    try:
        table = pa.csv.read_csv(source, *_make_options(names, lines, delimiter))
    except (pa.ArrowException, OSError) as error:
        raise _explain_failure(path, name, delimiter, (len(names), lines), error) from None
    refuse_swallowed(path, name, table, delimiter)
    table, notes = _drop_empty(table, [*header.names, *[""] * (len(names) - len(header.names))])
    return CsvFile(table, delimiter, lines, first - 1, header.units, notes)


class OpenCsv(NamedTuple):
    """A file of any size, whose cells are read block by block."""

    names: list[str]
    delimiter: str
    lines_above: int
    units: dict[str, str]
    batches: Iterator[pa.RecordBatch]
    """Cells as text; raises a UserError where they cannot be read"""


def open_csv(path: Path, name: str, head: bytes, options: ReadOptions) -> OpenCsv:
    """Open a CSV file without reading it; trailing empty rows and columns stay."""
    _refuse_other_content(path, head)
    options = options._replace(is_wide=False)
    delimiter, first, lines, header = _read_header(path, name, head, options)
    names = _fill_names(header.names)

    def read() -> Iterator[pa.RecordBatch]:
        try:
            options = _make_options(names, lines, delimiter, STREAM_BYTES)
            yield from pa.csv.open_csv(path, *options)
        except (pa.ArrowException, OSError) as error:
            raise _explain_failure(path, name, delimiter, (len(names), lines), error) from None

    return OpenCsv(names, delimiter, first - 1, header.units, read())


def _pad_rows(path: Path, delimiter: str, lines: int, width: int) -> tuple[Any, int]:
    """Return a source of rows that have one number of cells, and that number; the file itself
    where all rows have it.

    Rows below so many lines may be shorter than others, as series are. Cells in quotes may hold a
    delimiter; a file with quotes below the names is not changed.
    """
    content = path.read_bytes()
    begin = 0
    for _ in range(lines):
        begin = content.find(b"\n", begin) + 1
    body = content[begin:]
    if b'"' in body or not body:
        return path, width
    letters = np.frombuffer(body, dtype=np.uint8)
    ends = np.append(np.flatnonzero(letters == ord("\n")), len(letters))
    before = np.searchsorted(np.flatnonzero(letters == ord(delimiter)), ends)
    counts = np.diff(before, prepend=0) + 1
    is_filled = np.diff(ends, prepend=-1) > 2  # a line break may have two characters
    if not is_filled.any() or (counts[is_filled] == width).all():
        return path, width
    width = max(width, int(counts[is_filled].max()))
    rows = body.split(b"\n")
    missing = np.where(is_filled, width - counts, 0).tolist()
    mark = delimiter.encode()
    padded = [
        row.rstrip(b"\r") + mark * count if count else row
        for row, count in zip(rows, missing, strict=True)
    ]
    return pa.BufferReader(content[:begin] + b"\n".join(padded)), width


def _fill_names(names: Sequence[str]) -> list[str]:
    return [name or f"{UNNAMED}{i}" for i, name in enumerate(names, start=1)]


def _make_options(
    names: list[str], lines: int, delimiter: str, block: int | None = None
) -> tuple[Any, Any, Any]:
    """Return the options with which Arrow reads the cells below the first `lines` lines as text."""
    return (
        pa.csv.ReadOptions(column_names=names, skip_rows=lines, block_size=block or BLOCK_BYTES),
        # an empty line of one column is a missing value
        pa.csv.ParseOptions(
            delimiter=delimiter, newlines_in_values=True, ignore_empty_lines=len(names) > 1
        ),
        pa.csv.ConvertOptions(
            column_types=dict.fromkeys(names, pa.string()), strings_can_be_null=False
        ),
    )


def _refuse_other_content(path: Path, head: bytes) -> None:
    """Refuse a file that is not UTF-8 text."""
    for magic, content in MAGIC.items():
        if head.startswith(magic):
            if content is UTF_16:
                raise EncodingError(f"{path}: is " + content, "utf-16")
            raise UserError(f"{path}: is " + content)
    # cyclers fill a line above the names with NUL bytes; UTF-16 has them in every line
    text = b"\n".join(line for line in head.split(b"\n") if line.strip(b"\0\r "))
    if text.count(b"\0") > MAX_NULS * len(text):
        raise EncodingError(
            f"{path}: contains NUL bytes, as UTF-16 text does; set data.encoding, as in "
            '"utf-16-le", or save it as UTF-8',
            "utf-16-be" if text.startswith(b"\0") else "utf-16-le",
        )


def _explain_failure(
    path: Path, name: str, delimiter: str, shape: tuple[int, int], error: Exception
) -> UserError:
    """Return the error for a file that Arrow could not read; `shape` is its number of columns and
    of header lines."""
    _refuse_bad_text(path)
    _refuse_ragged(path, name, delimiter, *shape)
    return UserError(f"{path}: cannot be read as CSV: {summarize_error(error)}")


def _drop_empty(table: pa.Table, names: list[str]) -> tuple[pa.Table, tuple[str, ...]]:
    """Return a table without the empty rows and unnamed empty columns at its end, and notes on
    them."""
    num_columns = table.num_columns
    while num_columns > 1 and not names[num_columns - 1] and is_blank(table[num_columns - 1]):
        num_columns -= 1
    used = table.select(list(range(num_columns)))
    num_rows = _count_filled_rows(used)
    # a file of one column may end with blank lines
    dropped_rows = table.num_rows - num_rows if num_columns > 1 else 0
    notes = describe_dropped(table.num_columns - num_columns, dropped_rows)
    return used.slice(0, num_rows), tuple(notes)


def _count_filled_rows(table: pa.Table) -> int:
    """Count the rows up to the last one that is not blank."""
    last = table.slice(max(table.num_rows - 1, 0))
    if not all(is_blank(column) for column in last.columns):
        return int(table.num_rows)
    filled = (pc.not_equal(pc.utf8_trim_whitespace(column), "") for column in table.columns)
    rows = (np.flatnonzero(flags.to_numpy()) for flags in filled)
    return max((int(filled_rows[-1]) + 1 for filled_rows in rows if len(filled_rows)), default=0)


def is_blank(cells: pa.ChunkedArray) -> bool:
    """Return whether no cell holds more than spaces."""
    if len(cells) and cells[0].as_py().strip():
        return False
    return bool(pc.all(pc.equal(pc.utf8_trim_whitespace(cells), ""), min_count=0).as_py())


class _Header(NamedTuple):
    delimiter: str
    first_line: int
    """The line of the names, the first if there are two; 1 where only blank lines are above"""
    lines: int
    """Lines above the first row of values"""
    layout: Layout


def _read_header(path: Path, name: str, head: bytes, options: ReadOptions) -> _Header:
    """Find the delimiter, the names and the units among the first records."""
    skip_rows, is_wide = options.skip_rows, options.is_wide
    has_names = options.names is None
    try:
        delimiter, records = _find_delimiter(path, head, skip_rows, has_names=has_names)
    except UnicodeDecodeError:
        _refuse_bad_text(path)
        raise
    rows = [cells for _, _, cells in records]
    if not has_names:
        header = name_columns(path, rows, options.names or ())
    else:
        header = find_wide_layout(rows) if is_wide else find_layout(rows, search=skip_rows is None)
    if header is None:
        after = f" below line {skip_rows} (data.skip_rows)" if skip_rows else ""
        raise EmptyFileError(f"{path}: the file is empty{after}")
    header = add_row_names(header, rows, delimiter) if has_names and not is_wide else header
    refuse_open(path, name, rows[header.first_name_row][-1], delimiter)
    lines = records[header.first_value_row - 1][1] if header.first_value_row else skip_rows or 0
    filled = [name for name in header.names if name]
    below = rows[header.first_value_row :]
    if has_names and filled and not is_wide and are_values(header.names, below):
        text = delimiter.join(rows[header.first_name_row])[:60]
        raise explain_no_names(f"{path}: line {lines}", text, filled)
    above = any(rows[: header.first_name_row])
    first_line = records[header.first_name_row][0] if above else 1
    return _Header(delimiter, first_line, lines, header)


def _find_delimiter(
    path: Path, head: bytes, skip_rows: int | None, *, has_names: bool
) -> tuple[str, list[Record]]:
    """Return the delimiter and the first records.

    The delimiter is the most frequent of comma, semicolon, tab and bar in the first line, outside
    quotes, unless only another one shows names above numbers.
    """
    lines = head.removeprefix(b"\xef\xbb\xbf").splitlines()[skip_rows or 0 :]
    first = next((line for line in lines if line.strip()), b"")
    outside = b"".join(first.split(b'"')[::2])
    usual = max(DELIMITERS, key=lambda mark: outside.count(mark.encode()))
    records = _read_records(path, usual, skip_rows)
    if has_names and skip_rows is None and find_names([cells for _, _, cells in records]) is None:
        candidates = {}
        for mark in [mark for mark in DELIMITERS if mark != usual]:
            with contextlib.suppress(UserError):
                candidates[mark] = _read_records(path, mark, skip_rows)
        fitting = {
            mark: len(found[names_row][2])
            for mark, found in candidates.items()
            if (names_row := find_names([cells for _, _, cells in found])) is not None
        }
        best = max(fitting, key=lambda mark: fitting[mark], default=usual)
        if fitting.get(best, 0) > 1:
            return best, candidates[best]
    return usual, records


def _read_records(path: Path, delimiter: str, skip_rows: int | None) -> list[Record]:
    """Read the first records below the lines to skip."""
    records, cells = [], 0
    for record in iter_records(path, delimiter):
        if record[0] > (skip_rows or 0):
            records.append(record)
            cells += len(record[2])
        if len(records) >= HEAD_RECORDS or (cells >= HEAD_CELLS and len(records) > 3):
            break
    return records


def _refuse_ragged(path: Path, name: str, delimiter: str, wanted: int, header_lines: int) -> None:
    for first, _, cells in iter_records(path, delimiter):
        if first > header_lines and cells and len(cells) != wanted:
            refuse_open(path, name, cells[-1], delimiter)
            hint = ""
            if first <= HEAD_RECORDS and header_lines == 1:
                hint = "; if other lines stand above the names, set data.skip_rows to their number"
            raise UserError(
                f"{name}, line {first}: has {format_count(len(cells), 'cell')} where the header "
                f'has {wanted}; it reads "{delimiter.join(cells)[:60]}"{hint}'
            )


def _refuse_bad_text(path: Path) -> None:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                line.decode("utf-8")
            except UnicodeDecodeError:
                fix = 'is not UTF-8 text; set data.encoding, as in "cp1252", or save it as UTF-8'
                raise EncodingError(f"{path}, line {number}: {fix}") from None


def refuse_swallowed(path: Path, name: str, table: pa.Table, delimiter: str) -> None:
    """Refuse a file, read as `table`, in which a quote has made one cell of several rows.

    A column may have cells of several lines. A single such cell in a column of one-line cells is
    taken for a slip, and so is a cell that contains the cells of another row.
    """
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        if content.find(b'"') < 0 or not table.num_rows:
            return
    refuse_open(path, name, table.column(table.num_columns - 1)[-1].as_py(), delimiter)
    for index, column in enumerate(table.column_names):
        cells = table.column(index)
        if not columns.has_byte(cells, "\r\n"):
            continue
        rows = np.flatnonzero(pc.match_substring_regex(cells, r"[\r\n]").to_numpy())
        row = int(rows[0]) if len(rows) == 1 else _find_swallowed(table, index, rows, delimiter)
        if row is not None:
            cell = cells[row].as_py()
            raise UserError(
                f"{name}, line {_find_line(path, cell, delimiter)}: the quote that opens here, in "
                f'column "{column}", closes {len(_split_lines(cell)) - 1:,} lines below and may '
                f"swallow rows; {FIX}"
            )


def refuse_open(path: Path, name: str, last: str, delimiter: str) -> None:
    """Refuse a file that ends with this cell, if the cell's quote never closes."""
    if is_open(path, last, delimiter):
        begin = path.stat().st_size - len(_quote(last))
        raise UserError(
            f"{name}, line {_count_lines(path, begin)}: the quote that opens here never closes, so "
            f"that everything below would be one cell; {FIX}"
        )


def is_open(path: Path, last: str, delimiter: str) -> bool:
    """Return whether the file ends within the quotes of its last cell."""
    quoted = _quote(last)
    with path.open("rb") as file:
        before = path.stat().st_size - len(quoted) - 1
        if before < -1:
            return False
        file.seek(max(before, 0))
        ahead = file.read(1) if before >= 0 else b""
        return ahead in (b"", b"\n", b"\r", delimiter.encode()) and file.read() == quoted


def _quote(cell: str) -> bytes:
    """Return a cell as it is written in the file, without its closing quote."""
    return b'"' + cell.encode().replace(b'"', b'""')


def _find_swallowed(table: pa.Table, index: int, rows: Ints, delimiter: str) -> int | None:
    """Return the first of these rows whose cell contains the beginning of another row; None without
    any.

    The first line of such a cell is the end of one row and its second line the beginning of the
    next: as many cells, and numbers where the other columns have numbers.
    """
    before, after = index, table.num_columns - 1 - index
    if not len(rows) or max(before, after) > MAX_REPEATS:
        return None
    mark = re.escape(delimiter)
    cell = f"[^\r\n{mark}]*"
    pattern = f"^{cell}(?:{mark}{cell}){{{after}}}[\r\n]+(?:{cell}{mark}){{{before}}}"
    alike = pc.match_substring_regex(table.column(index), pattern)
    for row in np.flatnonzero(alike.to_numpy()).tolist():
        first, *following = _split_lines(table.column(index)[row].as_py())
        second = next((line for line in following if line), "")
        cells = second.split(delimiter)[:before] + first.split(delimiter)[1:]
        model = [column[0 if row else 1].as_py() for column in table.columns]
        numeric = [is_number(text, comma=True) for text in model[:before] + model[before + 1 :]]
        if any(numeric) and numeric == [is_number(text, comma=True) for text in cells]:
            return int(row)
    return None


def _split_lines(cell: str) -> list[str]:
    return re.split(r"\r\n|\r|\n", cell)


def _find_line(path: Path, cell: str, delimiter: str) -> int:
    """Return the line in which a cell of several lines begins."""
    needle = _quote(_split_lines(cell)[0])
    outside = (b"", b"\n", b"\r", delimiter.encode())
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        position = content.find(needle)
        while position >= 0:
            end = position + len(needle)
            if (
                content[max(position - 1, 0) : position] in outside
                and content[end : end + 1] in outside[1:3]
            ):
                return _count_lines(path, position)
            position = content.find(needle, position + 1)
    return 1


def _count_lines(path: Path, offset: int) -> int:
    """Return the line, counted from 1, that has this byte of the file."""
    feeds = returns = 0
    with path.open("rb") as file:
        while offset > 0:
            block = file.read(min(offset, COUNT_BYTES))
            feeds += block.count(b"\n")
            returns += block.count(b"\r")
            offset -= len(block)
    return 1 + (feeds or returns)
