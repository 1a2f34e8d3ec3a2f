"""Refuse CSV files in which a quote swallows rows: it never closes, or closes in a later row."""

from __future__ import annotations

import mmap
import re
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from slipstream.errors import UserError

Ints = npt.NDArray[np.int64]

BLOCK_BYTES = 1 << 20
MOST_REPEATS = 1000
"""How often Arrow lets a part of a regular expression repeat"""
BREAK = r"[\r\n]"
FIX = (
    'close it where its cell ends, write it twice ("") where it belongs to the text, or take the '
    "line break out"
)


def refuse_swallowed(path: Path, name: str, table: pa.Table, delimiter: str) -> None:
    """Refuse a file, read as `table`, in which a quote has made one cell of several rows.

    A column may have cells of several lines. A single one among cells of one line is taken for a
    slip, and so is one that has the cells of another row in it.
    """
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        if content.find(b'"') < 0:
            return
    if not table.num_rows:
        return
    refuse_open(path, name, table.column(table.num_columns - 1)[-1].as_py(), delimiter)
    for index, column in enumerate(table.column_names):
        cells = table.column(index)
        if not _has_breaks(cells):
            continue
        rows = np.flatnonzero(pc.match_substring_regex(cells, BREAK).to_numpy())
        row = int(rows[0]) if len(rows) == 1 else _find_swallowed(table, index, rows, delimiter)
        if row is not None:
            cell = cells[row].as_py()
            raise UserError(
                f"{name}, line {_find_line(path, cell, delimiter)}: the quote that opens here, in "
                f'column "{column}", closes {len(_split_lines(cell)) - 1:,} lines below and may '
                f"swallow rows; {FIX}"
            )


def _has_breaks(cells: pa.ChunkedArray) -> bool:
    """Look for a line break among the bytes of all cells (60 MB: 0.1 s; cell by cell 1.8 s)."""
    for chunk in cells.chunks:
        text = np.frombuffer(chunk.buffers()[2] or b"", dtype=np.uint8)
        if (text == ord("\n")).any() or (text == ord("\r")).any():
            return True
    return False


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


def is_number(cell: str, *, comma: bool = False) -> bool:
    """Return whether a cell is a number; with `comma`, also one with a decimal comma."""
    try:
        float(cell.replace(",", ".") if comma else cell)
    except ValueError:
        return False
    return True


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
            block = file.read(min(offset, BLOCK_BYTES))
            feeds += block.count(b"\n")
            returns += block.count(b"\r")
            offset -= len(block)
    return 1 + (feeds or returns)
