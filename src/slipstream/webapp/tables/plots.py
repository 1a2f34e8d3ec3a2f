"""The part of a column that a plot shows: rows, or the lowest and highest of stretches of rows."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from slipstream.errors import UserError
from slipstream.webapp.tables import levels
from slipstream.webapp.tables.cache import CachedTable
from slipstream.webapp.tables.levels import Floats

TIME, ROW = "time", "row"
GAP = 1.5
"""Stretches that are this many times as far apart as usual are not connected"""
COMMON = 0.9
"""Share of the steps that is no longer than the usual one"""
MOST_WIDTH = 4_000


@dataclass(frozen=True)
class Request:
    """What a plot shows."""

    column: int
    axis: str = ROW
    series: int | None = None
    begin: float | None = None
    end: float | None = None
    """In units of the axis; None for everything"""
    width: int = 1000
    """Stretches, at most"""


@dataclass(frozen=True)
class Rows:
    """The rows of a plot: a range of the file, or a list of rows where series take turns."""

    begin: int
    end: int
    order: npt.NDArray[Any] | None = None

    def look_up(self, values: npt.NDArray[Any], at: npt.NDArray[np.int64]) -> Floats:
        """Return the values of rows that are counted from the first."""
        rows = at + self.begin if self.order is None else self.order[at + self.begin]
        return np.asarray(values[rows], dtype=np.float64)


def draw(table: CachedTable, request: Request) -> dict[str, Any]:
    """Return what a plot shows; the column, and where needed the time and the series, were read."""
    rows = _find_rows(table, request.series)
    axis = _Axis(table, rows, request.axis)
    first, last = axis.find_rows(request.begin, request.end)
    width = min(max(request.width, 10), MOST_WIDTH)
    path = table.folder / f"column-{request.column}"
    if last - first <= 2 * width:
        at = np.arange(first, last)
        low = high = rows.look_up(levels.map_values(path), at)
    else:
        at, low, high = _decimate(path, rows, first, last, width)
    x, low, high = axis.place(at, low, high)
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
    one = known["series"][series]
    order = levels.map_values(table.folder / "series", "int64") if known["mixed"] else None
    return Rows(one["begin"], one["begin"] + one["rows"], order)


class _Axis:
    """The horizontal axis: the time, or the number of the row."""

    def __init__(self, table: CachedTable, rows: Rows, kind: str) -> None:
        self.rows, self.num_rows = rows, rows.end - rows.begin
        self.times = levels.map_values(table.folder / "column-time") if kind == TIME else None
        last = np.array([0, max(self.num_rows - 1, 0)])
        self.first, self.last = self._to_units(last).tolist()

    def _to_units(self, at: npt.NDArray[np.int64]) -> Floats:
        if self.times is None:
            return (at + (0 if self.rows.order is not None else self.rows.begin)).astype(np.float64)
        return self.rows.look_up(self.times, at)

    def find_rows(self, begin: float | None, end: float | None) -> tuple[int, int]:
        """Return the rows of a range, and one more at each side."""
        first = 0 if begin is None else self._search(begin) - 1
        last = self.num_rows if end is None else self._search(end) + 1
        first = min(max(first, 0), max(self.num_rows - 1, 0))
        return first, min(max(last, first + 1), self.num_rows)

    def _search(self, value: float) -> int:
        """Return the first row that is not before a place of the axis."""
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
        self, at: npt.NDArray[np.int64], low: Floats, high: Floats
    ) -> tuple[Floats, Floats, Floats]:
        """Return where stretches lie, with an empty one after those that a gap follows."""
        x = self._to_units(at)
        if self.times is None or len(at) < 2:
            return x, low, high
        rows = np.diff(at)
        # series of one file may have different steps, so that it is the step of what is seen
        usual = np.quantile(np.diff(x) / rows, COMMON) * rows
        ends = np.flatnonzero(np.diff(x) > GAP * usual)
        x = np.insert(x, ends + 1, x[ends] + usual[ends])
        lows = np.insert(low, ends + 1, np.nan)
        return x, lows, lows if high is low else np.insert(high, ends + 1, np.nan)


def _decimate(
    path: Any, rows: Rows, first: int, last: int, width: int
) -> tuple[npt.NDArray[np.int64], Floats, Floats]:
    """Return the first rows of stretches, and the lowest and the highest value of each."""
    if rows.order is not None:
        at = np.arange(first, last)
        low = high = rows.look_up(levels.map_values(path), at)
        return _group(low, high, width, first, 1)
    begin, end = rows.begin + first, rows.begin + last
    num_rows = path.with_suffix(".values").stat().st_size // levels.WIDTH
    fitting = [one for one in levels.list_levels(num_rows) if (end - begin) // one.rows >= width]
    if not fitting:
        low = high = levels.read_values(path, begin, end)
        return _group(low, high, width, first, 1)
    level = fitting[-1]
    low, high = levels.read_level(path, level, begin // level.rows, -(-end // level.rows))
    for pair, start, stop in (
        (0, begin, (begin // level.rows + 1) * level.rows),
        (-1, (end - 1) // level.rows * level.rows, end),
    ):  # rows beyond the range, perhaps of another series, are left out
        values = levels.read_values(path, start, stop)
        low[pair], high[pair] = np.fmin.reduce(values), np.fmax.reduce(values)
    at, low, high = _group(low, high, width, first - begin % level.rows, level.rows)
    return np.clip(at, first, last - 1), low, high


def _group(
    low: Floats, high: Floats, width: int, first: int, rows: int
) -> tuple[npt.NDArray[np.int64], Floats, Floats]:
    starts = np.unique(np.linspace(0, len(low), width, endpoint=False).astype(np.int64))
    return first + starts * rows, *levels.reduce_groups(low, high, starts)
