"""CSV: header blocks, names, unit rows and cells."""

from __future__ import annotations

import contextlib
import csv
import itertools
import mmap
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv

from slipstream.base.errors import Setting, Text, UserError
from slipstream.base.text import format_count
from slipstream.data.formats.options import ReadOptions

Rows = Sequence[Sequence[str]]

TAIL_ROWS = 10
"""Last rows of the sample, whose usual width is the table's"""
NULLS = ["", "NA", "N/A", "n/a", "#N/A", "NaN", "nan", "NAN", "-nan"]
NULLS += ["null", "NULL", "None", "none"]
"""Cells that mean "missing", whatever the settings say"""
_SYMBOL = (
    r"(?:[numµμkMGTcdh]?(?:V|A|W|Wh|Ah|VA|var|s|sec|Hz|m|g|Pa|bar|J|N|Nm|K|C|F|S|Ω|[Oo]hm|rad|l|L|mol)"
    r"|%|°C?|°F|deg[CF]?|min|h|d|t|psi|dB|rpm|ppm|ppb|EUR|USD|counts?|[vw]ol%)(?:\^?-?\d)?"
)
UNIT = re.compile(rf"-+|[\[(].+[\])]|{_SYMBOL}(?:\s?[/*·]?\s?{_SYMBOL})*")
"""A dash for "no unit", text in brackets, or symbols as in mA, m^3/h and Wh"""
LONGEST_UNIT = 20
MOST_NAMED = 5


class Layout(NamedTuple):
    """Where the names, the units and the first row of values are; rows count from 0."""

    names: list[str]
    """Empty where a column has none"""
    first_name_row: int
    first_value_row: int
    units: dict[str, str]


def is_number(cell: str, *, comma: bool = False) -> bool:
    """Return whether a cell is a number; with `comma`, also one with a decimal comma."""
    try:
        float(cell.replace(",", ".") if comma else cell)
    except ValueError:
        return False
    return True


def find_layout(rows: Rows, *, search: bool = True) -> Layout | None:
    """Find the names, and a row of units below them; None where all rows are blank.

    Without `search`, or where no row looks like names above numbers, the first row has the names.
    """
    filled = [i for i, row in enumerate(rows) if _has_text(row)]
    if not filled:
        return None
    at = filled[0]
    if search:
        names_row = find_names(rows)
        merged = _find_merged(rows, filled) if names_row is None else None
        if merged is not None:
            return merged
        at = at if names_row is None else names_row
    return _finish(rows, _strip(rows[at]), at, at + 1)


def find_names(rows: Rows) -> int | None:
    """Find the first row of names right above numbers, or above units and numbers.

    Rows above it must be lines of text; None where there is no such row.
    """
    filled = [i for i, row in enumerate(rows) if _has_text(row)]
    width = _find_width(rows)
    for place, at in enumerate(filled):
        below = [rows[i] for i in filled[place + 1 : place + 1 + TAIL_ROWS]]
        names = _trim(rows[at])
        used = {i for row in below for i, cell in enumerate(row) if cell.strip()}
        unnamed = any(i >= len(names) or not names[i] for i in used)
        if unnamed or len(names) > width or not _starts_values(below[:2]):
            continue
        if _has_number(names) or (place and _has_doubles(names)):
            continue
        above = [rows[i] for i in filled[:place]]
        return at if all(_is_text_line(row, width) for row in above) else None
    return None


def describe_layout(
    lines_above: int, units: Mapping[str, str], options: ReadOptions, what: str
) -> list[str]:
    """Note the lines, or rows, that were recognised above the names, and the units below them."""
    notes = []
    if lines_above and options.skip_rows is None:
        lines = f"{what} 1 is" if lines_above == 1 else f"{what}s 1 to {lines_above} are"
        notes.append(f"{lines} above the names (data.skip_rows = {lines_above})")
    if units:
        listed = ", ".join(f"{name} [{unit}]" for name, unit in islice(units.items(), MOST_NAMED))
        more = f" and {len(units) - MOST_NAMED} more" * (len(units) > MOST_NAMED)
        notes.append(f"a row of units is below the names: {listed}{more}")
    return notes


def describe_dropped(num_columns: int, num_rows: int) -> list[str]:
    """Note the empty columns and rows that were left out."""
    notes = [f"{format_count(num_columns, 'empty column')} left out"] if num_columns else []
    if num_rows:
        notes.append(f"{format_count(num_rows, 'empty row')} at the end left out")
    return notes


def _find_width(rows: Rows) -> int:
    """Return how many cells the last rows usually have."""
    widths = Counter(len(row) for row in [row for row in rows if _has_text(row)][-TAIL_ROWS:])
    return widths.most_common(1)[0][0] if widths else 0


def _strip(row: Sequence[str]) -> list[str]:
    return [cell.strip() for cell in row]


def _trim(row: Sequence[str]) -> list[str]:
    """Return the cells without the empty ones at the end."""
    cells = _strip(row)
    while cells and not cells[-1]:
        cells.pop()
    return cells


def _has_text(row: Sequence[str]) -> bool:
    return any(cell.strip() for cell in row)


def _has_number(row: Sequence[str]) -> bool:
    return any(is_number(cell, comma=True) for cell in row if cell.strip() not in NULLS)


def _has_doubles(cells: list[str]) -> bool:
    names = list(filter(None, cells))
    return len(set(names)) < len(names)


def _starts_values(below: Rows) -> bool:
    """Whether numbers follow, at once or below a row without any."""
    return any(_has_number(row) for row in below)


def _is_text_line(row: Sequence[str], width: int) -> bool:
    """Whether a row above the names is no row of values, and not the names either: another width,
    or mostly empty. Of a single column, nothing tells."""
    cells = _trim(row)
    if all(is_number(cell, comma=True) for cell in cells if cell):
        return False
    return len(row) != width or 2 * sum(map(bool, cells)) <= width


def _find_merged(rows: Rows, filled: list[int]) -> Layout | None:
    """Find names over two rows, as merged cells give: a group above, and names below it."""
    width = _find_width(rows)
    for above, below in pairwise(filled):
        under = [rows[i] for i in filled if i > below][:2]
        first, second = (
            [*_strip(row), *[""] * width][:width] for row in (rows[above], rows[below])
        )
        if _has_number(first) or _has_number(second) or not _starts_values(under):
            continue
        groups = _fill_groups(first, second)
        names = [" ".join(filter(None, pair)) for pair in zip(groups, second, strict=True)]
        has_group = any(name and not cell for cell, name in zip(first, second, strict=True))
        if has_group and all(names) and len(set(names)) == width > 1:
            lines = [rows[i] for i in filled if i < above]
            if all(_is_text_line(row, width) for row in lines):
                return _finish(rows, names, above, below + 1)
    return None


def _fill_groups(first: list[str], second: list[str]) -> list[str]:
    """Repeat a group's name over the empty cells to its right that have a name below."""
    groups, last = [], ""
    for group, name in zip(first, second, strict=True):
        last = group or (last if name else "")
        groups.append(last)
    return groups


def _finish(rows: Rows, names: list[str], at: int, first: int) -> Layout:
    """Add the units; where only empty cells differ, adapt the number of names to that of values."""
    units = _find_units(names, [row for row in rows[first:] if _has_text(row)][:2])
    if units is not None:
        first = next(i for i in range(first, len(rows)) if _has_text(rows[i])) + 1
    values = next((row for row in rows[first:] if row), None)
    if values is not None and len(values) < len(names) and not any(names[len(values) :]):
        names = names[: len(values)]
    elif values is not None and len(values) > len(names) and not _has_text(values[len(names) :]):
        names = [*names, *[""] * (len(values) - len(names))]
    return Layout(names, at, first, units or {})


def _find_units(names: list[str], below: Rows) -> dict[str, str] | None:
    """Return the units that the first of two rows gives to columns whose next cell is a number.

    None where it is a row of values. Half of the columns must have a unit that is known.
    """
    if len(below) < 2 or _has_number(below[0]):
        return None
    triples = list(zip(names, _strip(below[0]), _strip(below[1]), strict=False))
    units = {name: unit for name, unit, value in triples if is_number(value, comma=True)}
    others = [(unit, value) for _, unit, value in triples if not is_number(value, comma=True)]
    if any(_has_digit(unit) and _has_digit(value) for unit, value in others):
        return None  # a date above a date
    known = sum(bool(UNIT.fullmatch(unit)) for unit in units.values())
    if 2 * known < len(units) or not all(map(_may_be_unit, units.values())):
        return None
    plain = {name: unit.strip("[]()- ") for name, unit in units.items()}
    # a row of dashes alone has no values: they mean "missing"
    return {name: unit for name, unit in plain.items() if name and unit} or None


def _has_digit(cell: str) -> bool:
    return any(char.isdigit() for char in cell)


def _may_be_unit(cell: str) -> bool:
    return not cell or (cell not in NULLS and len(cell) <= LONGEST_UNIT)


Ints = npt.NDArray[np.int64]
Record = tuple[int, int, list[str]]
"""First line, last line and cells"""

BLOCK_BYTES, STREAM_BYTES, COUNT_BYTES = 16 << 20, 2 << 20, 1 << 20
"""Bytes that are parsed at a time, in a file of any size, and searched for line breaks"""
DELIMITERS = ",;\t"
HEAD_RECORDS, HEAD_CELLS = 100, 100_000
"""Records among which the names are looked for"""
UNNAMED = "column_"
"""The name of a column without one is this and its position."""
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
MOST_NULS = 0.1
"""The share of NUL bytes from which on a file is not UTF-8"""
MOST_REPEATS = 1000
"""How often Arrow lets a part of a regular expression repeat"""
FIX = (
    'close it where its cell ends, write it twice ("") where it belongs to the text, or take the '
    "line break out"
)


class CsvFile(NamedTuple):
    """The text of a file, and how it is laid out."""

    table: pa.Table
    delimiter: str
    header_lines: int
    """Lines above the first row of values"""
    lines_above: int
    """Lines above the names"""
    units: dict[str, str]
    notes: tuple[str, ...]


def read_csv(path: Path, name: str, head: bytes, skip_rows: int | None = None) -> CsvFile:
    """Read a CSV file as text, and find its layout; `head` is how the file begins.

    Lines of text above the names are recognised, or counted by `skip_rows`.
    """
    _refuse_other_content(path, head)
    delimiter, first, lines, header = _read_header(path, name, head, skip_rows)
    names = _fill_names(header.names)
    try:
        table = pa.csv.read_csv(path, *_make_options(names, lines, delimiter))
    except (pa.ArrowException, OSError) as error:
        raise _explain_failure(path, name, delimiter, (len(names), lines), error) from None
    refuse_swallowed(path, name, table, delimiter)
    table, notes = _drop_empty(table, header.names)
    return CsvFile(table, delimiter, lines, first - 1, header.units, notes)


class OpenCsv(NamedTuple):
    """A file of any size, whose cells are read block by block."""

    names: list[str]
    delimiter: str
    lines_above: int
    units: dict[str, str]
    batches: Iterator[pa.RecordBatch]
    """Cells as text; raises a UserError where they cannot be read"""


def open_csv(path: Path, name: str, head: bytes, skip_rows: int | None = None) -> OpenCsv:
    """Open a CSV file without reading it; trailing empty rows and columns stay."""
    _refuse_other_content(path, head)
    delimiter, first, lines, header = _read_header(path, name, head, skip_rows)
    names = _fill_names(header.names)

    def read() -> Iterator[pa.RecordBatch]:
        try:
            options = _make_options(names, lines, delimiter, STREAM_BYTES)
            yield from pa.csv.open_csv(path, *options)
        except (pa.ArrowException, OSError) as error:
            raise _explain_failure(path, name, delimiter, (len(names), lines), error) from None

    return OpenCsv(names, delimiter, first - 1, header.units, read())


def _fill_names(names: Sequence[str]) -> list[str]:
    return [name or f"{UNNAMED}{i}" for i, name in enumerate(names, start=1)]


def _make_options(
    names: list[str], lines: int, delimiter: str, block: int | None = None
) -> tuple[Any, Any, Any]:
    """Return how Arrow reads the cells below so many lines, as text."""
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
    """Refuse what is no text in UTF-8."""
    for magic, what in MAGIC.items():
        if head.startswith(magic):
            raise UserError(f"{path}: is " + what)
    if head.count(b"\0") > MOST_NULS * len(head):
        raise UserError(
            f"{path}: contains NUL bytes, as UTF-16 text does; set data.encoding, as in "
            '"utf-16-le", or save it as UTF-8'
        )


def _explain_failure(
    path: Path, name: str, delimiter: str, shape: tuple[int, int], error: Exception
) -> UserError:
    """Say what is wrong with a file of so many columns, below so many lines."""
    _refuse_bad_text(path)
    _refuse_ragged(path, name, delimiter, *shape)
    return UserError(f"{path}: cannot be read as CSV: {summarize_error(error)}")


def _drop_empty(table: pa.Table, names: list[str]) -> tuple[pa.Table, tuple[str, ...]]:
    """Drop empty rows and unnamed empty columns at the end of a table; say so."""
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
    return max((int(some[-1]) + 1 for some in rows if len(some)), default=0)


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


def _read_header(path: Path, name: str, head: bytes, skip_rows: int | None) -> _Header:
    """Find the delimiter, the names and the units among the first records."""
    try:
        delimiter, records = _find_delimiter(path, head, skip_rows)
    except UnicodeDecodeError:
        _refuse_bad_text(path)
        raise
    rows = [cells for _, _, cells in records]
    header = find_layout(rows, search=skip_rows is None)
    if header is None:
        after = f" below line {skip_rows} (data.skip_rows)" if skip_rows else ""
        raise UserError(f"{path}: the file is empty{after}")
    refuse_open(path, name, rows[header.first_name_row][-1], delimiter)
    lines = records[header.first_value_row - 1][1]
    filled = [name for name in header.names if name]
    if filled and all(is_number(name) for name in filled):
        text = delimiter.join(rows[header.first_name_row])[:60]
        raise UserError(
            f'{path}: line {lines} should name the columns, but reads "{text}"; add a line with '
            "their names above it"
        )
    above = any(rows[: header.first_name_row])
    first_line = records[header.first_name_row][0] if above else 1
    return _Header(delimiter, first_line, lines, header)


def _find_delimiter(path: Path, head: bytes, skip_rows: int | None) -> tuple[str, list[Record]]:
    """Return the delimiter and the first records.

    It is the most frequent of comma, semicolon and tab in the first line, outside quotes, unless
    only another one shows names above numbers.
    """
    lines = head.removeprefix(b"\xef\xbb\xbf").splitlines()[skip_rows or 0 :]
    first = next((line for line in lines if line.strip()), b"")
    outside = b"".join(first.split(b'"')[::2])
    usual = max(DELIMITERS, key=lambda mark: outside.count(mark.encode()))
    records = _read_records(path, usual, skip_rows)
    if skip_rows is None and find_names([cells for _, _, cells in records]) is None:
        others = {}
        for mark in DELIMITERS.replace(usual, ""):
            with contextlib.suppress(UserError):
                others[mark] = _read_records(path, mark, skip_rows)
        fitting = {
            mark: len(some[at][2])
            for mark, some in others.items()
            if (at := find_names([cells for _, _, cells in some])) is not None
        }
        best = max(fitting, key=lambda mark: fitting[mark], default=usual)
        if fitting.get(best, 0) > 1:
            return best, others[best]
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


def iter_records(path: Path, delimiter: str) -> Iterator[Record]:
    """Yield each record with its first and last line; slow, so for the header and errors only."""
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.reader(file, delimiter=delimiter)
        first = 1
        try:
            for cells in reader:
                yield first, reader.line_num, cells
                first = reader.line_num + 1
        except csv.Error as error:
            if "field limit" in str(error):
                raise UserError(
                    f"{path}, line {first}: a cell has more than {csv.field_size_limit():,} "
                    "characters; is there a quote that never closes?"
                ) from None
            raise UserError(f"{path}, line {first}: cannot be read as CSV: {error}") from None


def find_line(path: Path, delimiter: str, columns: int, header_lines: int, row: int) -> int | None:
    """Return the line in which a row below the header begins."""
    rows = iter_records(path, delimiter)
    lines = (first for first, _, cells in rows if first > header_lines and (cells or columns == 1))
    return next(itertools.islice(lines, row, None), None)


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
        for at, line in enumerate(lines, start=1):
            try:
                line.decode("utf-8")
            except UnicodeDecodeError:
                fix = 'is not UTF-8 text; set data.encoding, as in "cp1252", or save it as UTF-8'
                raise UserError(f"{path}, line {at}: {fix}") from None


def summarize_error(error: BaseException) -> str:
    """Return the first line of an error of Arrow's."""
    return str(error).strip().split("\n", 1)[0]


def refuse_swallowed(path: Path, name: str, table: pa.Table, delimiter: str) -> None:
    """Refuse a file, read as `table`, in which a quote has made one cell of several rows.

    A column may have cells of several lines. A single one among cells of one line is taken for a
    slip, and so is one that has the cells of another row in it.
    """
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        if content.find(b'"') < 0 or not table.num_rows:
            return
    refuse_open(path, name, table.column(table.num_columns - 1)[-1].as_py(), delimiter)
    for index, column in enumerate(table.column_names):
        cells = table.column(index)
        if not has_byte(cells, "\r\n"):
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


def has_byte(cells: pa.ChunkedArray, marks: str) -> bool:
    """Look for a character among the bytes of all cells (60 MB: 0.1 s; cell by cell 1.8 s)."""
    texts = (np.frombuffer(chunk.buffers()[2] or b"", dtype=np.uint8) for chunk in cells.chunks)
    return any((text == ord(mark)).any() for text in texts for mark in marks)


def refuse_open(path: Path, name: str, last: str, delimiter: str) -> None:
    """Refuse a file whose last cell is this one if its quote never closes."""
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
    """Return a cell as it stands in the file, without the quote that closes it."""
    return b'"' + cell.encode().replace(b'"', b'""')


def _find_swallowed(table: pa.Table, index: int, rows: Ints, delimiter: str) -> int | None:
    """Find the first of these rows whose cell holds another row.

    Its first line then is a row's end and its second the next row's beginning: as many cells, and
    numbers where the other columns have numbers.
    """
    before, after = index, table.num_columns - 1 - index
    if not len(rows) or max(before, after) > MOST_REPEATS:
        return None
    cell = f"[^\r\n{delimiter}]*"
    pattern = f"^{cell}(?:{delimiter}{cell}){{{after}}}[\r\n]+(?:{cell}{delimiter}){{{before}}}"
    alike = pc.match_substring_regex(table.column(index), pattern)
    for row in np.flatnonzero(alike.to_numpy()).tolist():
        first, *others = _split_lines(table.column(index)[row].as_py())
        second = next((line for line in others if line), "")
        cells = second.split(delimiter)[:before] + first.split(delimiter)[1:]
        model = [column[0 if row else 1].as_py() for column in table.columns]
        numeric = [is_number(each, comma=True) for each in model[:before] + model[before + 1 :]]
        if any(numeric) and numeric == [is_number(each, comma=True) for each in cells]:
            return int(row)
    return None


def _split_lines(cell: str) -> list[str]:
    return re.split(r"\r\n|\r|\n", cell)


def _find_line(path: Path, cell: str, delimiter: str) -> int:
    """Return the line in which a cell of several lines begins."""
    needle = _quote(_split_lines(cell)[0])
    outside = (b"", b"\n", b"\r", delimiter.encode())
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        at = content.find(needle)
        while at >= 0:
            end = at + len(needle)
            if content[max(at - 1, 0) : at] in outside and content[end : end + 1] in outside[1:3]:
                return _count_lines(path, at)
            at = content.find(needle, at + 1)
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
