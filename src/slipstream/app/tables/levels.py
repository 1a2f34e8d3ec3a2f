"""The lowest and highest values of bins of rows at several lengths, in files beside the values.

The first level has one pair for every `BASE` rows, each further one for `RATIO` times as many. A
plot reads the level that has little more than it has pixels, so its cost does not grow with rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from slipstream.app.tables.service import CachedTable
from slipstream.base.errors import UserError

Floats = npt.NDArray[np.float64]

BASE, RATIO = 32, 4
"""Rows of a pair in the first level, and how many times as many each further level has"""
FEWEST = 256
"""The smallest number of pairs of the last level"""
WIDTH = 8
"""Bytes of a number"""


class Level(NamedTuple):
    """One level of a column, in its file."""

    rows: int
    """Rows of one pair"""
    size: int
    offset: int
    """Position of the level's first number in the file: lows, then highs"""


def list_levels(num_rows: int) -> list[Level]:
    """List the levels of a column with this many rows."""
    levels: list[Level] = []
    rows, offset = BASE, 0
    while num_rows > rows and (not levels or levels[-1].size > FEWEST):
        size = -(-num_rows // rows)
        levels.append(Level(rows, size, offset))
        offset += 2 * size
        rows *= RATIO
    return levels


class LevelWriter:
    """Writes a column's values batch by batch, then its levels."""

    def __init__(self, path: Path) -> None:
        self._values = path.with_suffix(".values").open("wb")
        self._path = path.with_suffix(".levels")
        self._rest = np.empty(0)
        self._lows: list[Floats] = []
        self._highs: list[Floats] = []
        self.num_rows = 0

    def add(self, values: Floats) -> None:
        """Add rows, NaN where there is no value."""
        values.tofile(self._values)
        self.num_rows += len(values)
        values = np.concatenate([self._rest, values]) if len(self._rest) else values
        whole = len(values) // BASE * BASE
        self._reduce(values[:whole])
        self._rest = values[whole:].copy()

    def _reduce(self, values: Floats) -> None:
        if len(values):
            low, high = reduce_groups(values, values, np.arange(0, len(values), BASE))
            self._lows.append(low)
            self._highs.append(high)

    def finish(self) -> None:
        """Write the levels."""
        self._values.close()
        self._reduce(self._rest)
        low, high = (np.concatenate(parts or [self._rest]) for parts in (self._lows, self._highs))
        with self._path.open("wb") as file:
            for level in list_levels(self.num_rows):
                if level.rows > BASE:
                    low, high = reduce_groups(low, high, np.arange(0, len(low), RATIO))
                low.tofile(file)
                high.tofile(file)


def reduce_groups(
    low: Floats, high: Floats, starts: npt.NDArray[np.int64]
) -> tuple[Floats, Floats]:
    """Return the lowest and the highest value of groups that begin at `starts`; NaN for a group
    without values."""
    return np.fmin.reduceat(low, starts), np.fmax.reduceat(high, starts)


def read_values(path: Path, begin: int, end: int) -> Floats:
    """Read rows of a column."""
    return np.fromfile(path.with_suffix(".values"), count=max(end - begin, 0), offset=begin * WIDTH)


def map_values(path: Path, kind: str = "float64") -> npt.NDArray[np.generic]:
    """Map a column into memory, to look up single rows."""
    if not path.with_suffix(".values").stat().st_size:
        return np.empty(0, kind)
    return np.memmap(path.with_suffix(".values"), dtype=kind, mode="r")


def iter_values(path: Path, num_rows: int, rows: int = 1 << 20) -> Iterator[Floats]:
    """Read a column part by part."""
    for begin in range(0, num_rows, rows):
        yield read_values(path, begin, min(begin + rows, num_rows))


def read_level(path: Path, level: Level, begin: int, end: int) -> tuple[Floats, Floats]:
    """Read pairs of a level."""
    low, high = (
        np.fromfile(
            path.with_suffix(".levels"), count=end - begin, offset=(level.offset + first) * WIDTH
        )
        for first in (begin, level.size + begin)
    )
    return low, high


TIME, ROW = "time", "row"
GAP = 1.5
"""Bins that are this many usual steps apart are not connected"""
COMMON = 0.9
"""Share of the steps that are at most as long as the usual step"""
MAX_WIDTH = 4_000


@dataclass(frozen=True)
class Request:
    """The range, the column and the width of a plot."""

    column: int
    axis: str = ROW
    series: int | None = None
    begin: float | None = None
    end: float | None = None
    """The range in units of the axis; None for everything"""
    width: int = 1000
    """The largest number of bins"""


@dataclass(frozen=True)
class Rows:
    """The rows of a plot: a range of the file, or a list of rows where series alternate."""

    begin: int
    end: int
    order: npt.NDArray[Any] | None = None

    def look_up(self, values: npt.NDArray[Any], offsets: npt.NDArray[np.int64]) -> Floats:
        """Return the values of rows, counted from the first row of the plot."""
        rows = offsets + self.begin if self.order is None else self.order[offsets + self.begin]
        return np.asarray(values[rows], dtype=np.float64)


def draw(table: CachedTable, request: Request) -> dict[str, Any]:
    """Return the lines of a plot; the column, and where needed the time and the series, must have
    been read."""
    rows = _find_rows(table, request.series)
    axis = _Axis(table, rows, request.axis)
    first, last = axis.find_rows(request.begin, request.end)
    width = min(max(request.width, 10), MAX_WIDTH)
    path = table.folder / f"column-{request.column}"
    if last - first <= 2 * width:
        offsets = np.arange(first, last)
        low = high = rows.look_up(map_values(path), offsets)
    else:
        offsets, low, high = _decimate(path, rows, first, last, width)
    x, low, high = axis.place(offsets, low, high)
    return {
        "x": x.tolist(),
        "low": low.tolist(),
        "high": None if high is low else high.tolist(),
        "rows": last - first,
        "first": axis.first,
        "last": axis.last,
    }


def _find_rows(table: CachedTable, series: int | None) -> Rows:
    if series is None:
        return Rows(0, int(table.read("table")["rows"]))
    known = table.read("series")
    if not 0 <= series < len(known["series"]):
        raise UserError("there is no such series")
    chosen = known["series"][series]
    order = map_values(table.folder / "series", "int64") if known["mixed"] else None
    return Rows(chosen["begin"], chosen["begin"] + chosen["rows"], order)


class _Axis:
    """The horizontal axis: the time, or the number of the row."""

    def __init__(self, table: CachedTable, rows: Rows, kind: str) -> None:
        self.rows, self.num_rows = rows, rows.end - rows.begin
        self.times = map_values(table.folder / "column-time") if kind == TIME else None
        last = np.array([0, max(self.num_rows - 1, 0)])
        self.first, self.last = self._to_units(last).tolist()

    def _to_units(self, offsets: npt.NDArray[np.int64]) -> Floats:
        if self.times is None:
            return (offsets + (0 if self.rows.order is not None else self.rows.begin)).astype(
                np.float64
            )
        return self.rows.look_up(self.times, offsets)

    def find_rows(self, begin: float | None, end: float | None) -> tuple[int, int]:
        """Return the rows of a range, and one more on each side."""
        first = 0 if begin is None else self._search(begin) - 1
        last = self.num_rows if end is None else self._search(end) + 1
        first = min(max(first, 0), max(self.num_rows - 1, 0))
        return first, min(max(last, first + 1), self.num_rows)

    def _search(self, value: float) -> int:
        """Return the first row that is not before a position on the axis."""
        if not math.isfinite(value):
            raise UserError("the range of the plot is no number")
        low, high = 0, self.num_rows
        while low < high:
            middle = (low + high) // 2
            if self._to_units(np.array([middle]))[0] < value:
                low = middle + 1
            else:
                high = middle
        return low

    def place(
        self, offsets: npt.NDArray[np.int64], low: Floats, high: Floats
    ) -> tuple[Floats, Floats, Floats]:
        """Return the positions of bins, with an empty bin after every bin that a gap follows."""
        x = self._to_units(offsets)
        if self.times is None or len(offsets) < 2:
            return x, low, high
        rows = np.diff(offsets)
        # series of one file may have different steps, so that it is the step of what is seen
        usual = np.quantile(np.diff(x) / rows, COMMON) * rows
        ends = np.flatnonzero(np.diff(x) > GAP * usual)
        x = np.insert(x, ends + 1, x[ends] + usual[ends])
        lows = np.insert(low, ends + 1, np.nan)
        return x, lows, lows if high is low else np.insert(high, ends + 1, np.nan)


def _decimate(
    path: Any, rows: Rows, first: int, last: int, width: int
) -> tuple[npt.NDArray[np.int64], Floats, Floats]:
    """Return the first rows of bins, and the lowest and the highest value of each."""
    if rows.order is not None:
        offsets = np.arange(first, last)
        low = high = rows.look_up(map_values(path), offsets)
        return _group(low, high, width, first, 1)
    begin, end = rows.begin + first, rows.begin + last
    num_rows = path.with_suffix(".values").stat().st_size // WIDTH
    fitting = [level for level in list_levels(num_rows) if (end - begin) // level.rows >= width]
    if not fitting:
        low = high = read_values(path, begin, end)
        return _group(low, high, width, first, 1)
    level = fitting[-1]
    low, high = read_level(path, level, begin // level.rows, -(-end // level.rows))
    for pair, start, stop in (
        (0, begin, (begin // level.rows + 1) * level.rows),
        (-1, (end - 1) // level.rows * level.rows, end),
    ):  # rows beyond the range, perhaps of another series, are left out
        values = read_values(path, start, stop)
        low[pair], high[pair] = np.fmin.reduce(values), np.fmax.reduce(values)
    offsets, low, high = _group(low, high, width, first - begin % level.rows, level.rows)
    return np.clip(offsets, first, last - 1), low, high


def _group(
    low: Floats, high: Floats, width: int, first: int, rows: int
) -> tuple[npt.NDArray[np.int64], Floats, Floats]:
    starts = np.unique(np.linspace(0, len(low), width, endpoint=False).astype(np.int64))
    return first + starts * rows, *reduce_groups(low, high, starts)
