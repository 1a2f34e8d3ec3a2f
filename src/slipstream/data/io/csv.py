"""CSV files, read as text; errors name the file and the line."""

from __future__ import annotations

import csv
import itertools
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv

from slipstream.data.io import quotes
from slipstream.errors import UserError

BLOCK_BYTES = 16 << 20
UNNAMED = "column_"
"""The name of a column without one is this and its position."""
MAGIC = {
    b"\x1f\x8b": "gzip data; decompress it first (gunzip)",
    b"PK\x03\x04": "a ZIP or Excel file; export it as CSV or Parquet",
    b"PAR1": "Parquet data; rename it to .parquet",
    b"ARROW1": "Arrow data; rename it to .arrow",
    b"\xff\xfe": "UTF-16 text; save it as UTF-8",
    b"\xfe\xff": "UTF-16 text; save it as UTF-8",
    b"\x89HDF": "an HDF5 or MAT file; export it as CSV or Parquet",
    b"MATLAB": "a MAT file; export it as CSV or Parquet",
}


def read_csv(path: Path, name: str, head: bytes) -> tuple[pa.Table, str]:
    """Read a CSV file as text, and find its delimiter; `head` is how the file begins."""
    for magic, what in MAGIC.items():
        if head.startswith(magic):
            raise UserError(f"{path}: is not text but {what}")
    delimiter = _find_delimiter(head)
    names, lines = _read_header(path, name, delimiter)
    try:
        table = pa.csv.read_csv(
            path,
            read_options=pa.csv.ReadOptions(
                column_names=names, skip_rows=lines, block_size=BLOCK_BYTES
            ),
            parse_options=pa.csv.ParseOptions(
                delimiter=delimiter,
                newlines_in_values=True,
                ignore_empty_lines=len(names) > 1,  # of one column, it is a missing value
            ),
            convert_options=pa.csv.ConvertOptions(
                column_types=dict.fromkeys(names, pa.string()), strings_can_be_null=False
            ),
        )
    except (pa.ArrowException, OSError) as error:
        _refuse_bad_text(path)
        _refuse_ragged(path, name, delimiter, len(names))
        raise UserError(f"{path}: cannot be read as CSV: {summarize_error(error)}") from None
    quotes.refuse_swallowed(path, name, table, delimiter)
    if len(names) == 1:
        table = _drop_last_blanks(table)
    return table, delimiter


def _drop_last_blanks(table: pa.Table) -> pa.Table:
    """Drop the blank lines that a file of one column may end with."""
    filled = np.flatnonzero(pc.not_equal(table.column(0), "").to_numpy())
    return table.slice(0, int(filled[-1]) + 1 if len(filled) else 0)


def _read_header(path: Path, name: str, delimiter: str) -> tuple[list[str], int]:
    """Return the columns' names and the number of lines above the rows."""
    try:
        records = iter_records(path, delimiter)
        lines, cells = next(((last, cells) for _, last, cells in records if cells), (0, []))
    except UnicodeDecodeError:
        _refuse_bad_text(path)
        raise
    if not cells:
        raise UserError(f"{path}: the file is empty")
    quotes.refuse_open(path, name, cells[-1], delimiter)
    names = [cell.strip() or f"{UNNAMED}{i}" for i, cell in enumerate(cells, start=1)]
    filled = [name for name in names if not name.startswith(UNNAMED)]
    if filled and all(quotes.is_number(name) for name in filled):
        raise UserError(
            f"{path}: line {lines} should name the columns, but reads "
            f'"{delimiter.join(cells)[:60]}"'
        )
    return names, lines


def iter_records(path: Path, delimiter: str) -> Iterator[tuple[int, int, list[str]]]:
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


def find_line(path: Path, delimiter: str, columns: int, row: int) -> int | None:
    """Return the line in which a row below the header begins."""
    rows = iter(iter_records(path, delimiter))
    header = next((cells for _, _, cells in rows if cells), None)
    if header is None:
        return None
    lines = (first for first, _, cells in rows if cells or columns == 1)
    return next(itertools.islice(lines, row, None), None)


def _refuse_ragged(path: Path, name: str, delimiter: str, wanted: int) -> None:
    for first, _, cells in iter_records(path, delimiter):
        if cells and len(cells) != wanted:
            quotes.refuse_open(path, name, cells[-1], delimiter)
            raise UserError(
                f"{name}, line {first}: has {len(cells)} cells where the header has {wanted}; "
                f'it reads "{delimiter.join(cells)[:60]}"'
            )


def _refuse_bad_text(path: Path) -> None:
    with path.open("rb") as lines:
        for at, line in enumerate(lines, start=1):
            try:
                line.decode("utf-8")
            except UnicodeDecodeError:
                raise UserError(
                    f"{path}, line {at}: is not UTF-8 text; save the file as UTF-8"
                ) from None


def _find_delimiter(head: bytes) -> str:
    """Return the most frequent of comma, semicolon and tab in the first line, outside quotes."""
    first = head.lstrip(b"\xef\xbb\xbf\r\n ").split(b"\n", 1)[0]
    outside = b"".join(first.split(b'"')[::2])
    return max(",;\t", key=lambda mark: outside.count(mark.encode()))


def summarize_error(error: Exception) -> str:
    """Return the first line of an error of Arrow's."""
    return str(error).strip().split("\n", 1)[0]
