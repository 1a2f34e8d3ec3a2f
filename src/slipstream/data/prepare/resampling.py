"""One row every so often, from rows at any times.

New rows lie at whole multiples of `every` (since 1970 for timestamps, since 0 for plain numbers),
from the first row on up to the last one. So cutting the series never changes the rows before.

| method | the value at time t | looks ahead |
|---|---|---|
| mean | the mean of the rows in (t - every, t]; where there are none, as `last` | no |
| last | the last value at or before t | no |
| linear | on the line between the values before and after t | up to `limit` |
| nearest | the value that is nearest in time, the earlier one of two | up to half of `limit` |

Rows further apart than `limit` have a gap between them. In it, `mean` and `last` hold the last
value for as long as `limit`, `nearest` for half of it, `linear` not at all; the other rows are left
out. A missing value counts as no row of its column.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from slipstream.config.prepare import parse_duration
from slipstream.data.prepare.spans import to_span
from slipstream.errors import UserError

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]
Times = npt.NDArray[Any]
Method = Literal["mean", "last", "linear", "nearest"]
ROUNDING = 1e-6
"""Of a step: how late a row may come where times are plain numbers, 0.1 + 0.2 for 0.3"""
DEFAULT_STEPS = 3
"""The limit, as a multiple of `every`, where none is set"""
MOST_ROWS = 200_000_000


@dataclass(frozen=True)
class Resampled:
    """A series at regular times."""

    times: Times
    columns: dict[str, Floats]
    rows: Ints
    """The last row of the series at or before each time, for columns that are not numbers; with
    `nearest`, the one before the gap where the nearest comes after it"""


@dataclass(frozen=True)
class _Grid:
    """The times of the new rows, and lengths in their unit."""

    times: Times
    every: int | float
    limit: int | float
    rounding: int | float


@dataclass(frozen=True)
class _Neighbors:
    """The rows before and after each new time."""

    before: Ints
    """The last row at or before it; 0 where there is none"""
    after: Ints
    """The row after that; the last one where there is none"""
    age: Times
    """Time since the row before; longer than any limit where there is none"""
    wait: Times
    """Time to the row after; 0 where the row before is at this time"""

    def find_usable(self, grid: _Grid, method: str) -> Flags:
        """Return where the rows give a value."""
        longest = grid.limit + grid.rounding
        if method == "linear":
            return np.asarray((self.age == 0) | (self.age + self.wait <= longest))
        if method == "nearest":
            return np.asarray(2 * np.minimum(self.age, self.wait) <= longest)
        return np.asarray(self.age < grid.limit - grid.rounding)


def resample(
    times: Times,
    columns: Mapping[str, Floats],
    *,
    every: str | float,
    method: str = "mean",
    limit: str | float | None = None,
) -> Resampled:
    """Return the series with one row every `every`; rows further apart than `limit` keep their gap.

    Without a `limit`, it is three times `every`.
    """
    steps = np.diff(times)
    if len(steps) and steps.min() <= 0:
        row = int(np.flatnonzero(steps <= 0)[0]) + 2
        raise UserError(
            f"resample needs rows in time order, each time once, and row {row} of the series is "
            'not later than the row before; sort the file, or set data.unsorted = "sort"'
        )
    step, longest = get_lengths(times, every, limit)
    if limit is None and 2 * np.count_nonzero(steps > longest) > len(steps):
        raise UserError(
            f"most rows are further apart than {DEFAULT_STEPS} times every = {every}; set limit, "
            "to the usual step between rows or more"
        )
    del steps
    grid = _make_grid(times, step, longest, method)
    neighbors = _find_neighbors(times, grid)
    usable = neighbors.find_usable(grid, method)
    if not usable.all():
        grid = replace(grid, times=grid.times[usable])
        neighbors = _find_neighbors(times, grid)
    result = {
        name: _sample_column(times, values, grid, neighbors, method)
        for name, values in columns.items()
    }
    return Resampled(grid.times, result, neighbors.before)


def get_look_ahead(every: str | float, limit: str | float | None, method: str) -> int:
    """Return how many new rows a method looks ahead."""
    if method in ("mean", "last"):
        return 0
    step = parse_duration(every, "every")
    reach = DEFAULT_STEPS * step if limit is None else parse_duration(limit, "limit")
    return math.ceil((reach / 2 if method == "nearest" else reach) / step - ROUNDING)


def get_lengths(
    times: Times, every: str | float, limit: str | float | None
) -> tuple[int | float, int | float]:
    """Return `every` and the limit in the unit of the times."""
    step = to_span(every, times, "every")
    longest = DEFAULT_STEPS * step if limit is None else to_span(limit, times, "limit")
    if longest < step:
        raise UserError(f"limit is {limit}, shorter than every = {every}; rows would be lost")
    return step, longest


def _make_grid(times: Times, every: int | float, limit: int | float, method: str) -> _Grid:
    """Return the times of the new rows, and a few more in gaps; not all times of a long gap."""
    rounding = 0 if times.dtype == np.int64 else ROUNDING * every
    if not len(times):
        return _Grid(times, every, limit, rounding)
    gaps = np.flatnonzero(np.diff(times) > limit + every)
    begins, ends = times[np.append(0, gaps + 1)], times[np.append(gaps, len(times) - 1)]
    # rows after a gap's begin and before its end that the method may fill
    filled = limit / 2 if method == "nearest" else limit
    early = np.where(np.arange(len(begins)) > 0, filled if method == "nearest" else 0, 0)
    late = np.where(np.arange(len(ends)) < len(ends) - 1, filled, 0)
    first = _divide_up(begins - early.astype(times.dtype) - rounding, every)
    last = -_divide_up(-(ends + late.astype(times.dtype)) - rounding, every)
    counts = np.maximum(last - first + 1, 0)
    if counts.sum() > MOST_ROWS:
        raise UserError(
            f"resampling would make {counts.sum():,} rows of {len(times):,}; use a longer every"
        )
    offsets = np.repeat(first - np.cumsum(counts) + counts, counts)
    numbers = offsets + np.arange(counts.sum())
    return _Grid((numbers * every).astype(times.dtype), every, limit, rounding)


def _divide_up(times: Times, every: int | float) -> Ints:
    """Return the number of the first new time at or after each time."""
    if times.dtype == np.int64:
        return np.asarray(-(-times // int(every)))
    return np.ceil(times / every).astype(np.int64)


def _find_neighbors(times: Times, grid: _Grid) -> _Neighbors:
    far = 4 * grid.limit
    last = len(times) - 1
    before = np.searchsorted(times, grid.times + grid.rounding, side="right") - 1
    first = before < 0
    age = grid.times - times[np.maximum(before, 0)]
    age[first] = far
    age[np.abs(age) <= grid.rounding] = 0
    after = np.minimum(before + 1, last)
    wait = times[after] - grid.times
    wait[before == last] = far
    wait[age == 0] = 0
    return _Neighbors(np.maximum(before, 0), after, age, wait)


def _sample_column(
    times: Times, values: Floats, grid: _Grid, neighbors: _Neighbors, method: str
) -> Floats:
    """Return a column at the new times; rows in which it is missing are passed over."""
    missing = np.isnan(values)
    if missing.all():
        return np.full(len(grid.times), np.nan)
    if missing.any():
        times, values = times[~missing], values[~missing]
        neighbors = _find_neighbors(times, grid)
    result = values[neighbors.before]
    if method == "linear":
        between = neighbors.age > 0
        span = np.where(between, neighbors.age + neighbors.wait, 1)
        rise = values[neighbors.after] - result
        result = np.where(between, result + rise * (neighbors.age / span), result)
    elif method == "nearest":
        result = np.where(neighbors.wait < neighbors.age, values[neighbors.after], result)
    result[~neighbors.find_usable(grid, method)] = np.nan
    if method == "mean":
        _put_means(result, times, values, grid)
    return result


def _put_means(result: Floats, times: Times, values: Floats, grid: _Grid) -> None:
    """Put the mean of the rows since the time before, where there are any."""
    ends = grid.times + grid.rounding
    begin = np.searchsorted(times, ends - grid.every, side="right")
    end = np.searchsorted(times, ends, side="right")
    filled = begin < end
    if not filled.any():
        return
    starts, values = begin[filled], values[: end[filled][-1]]
    mean = np.add.reduceat(values, starts) / (end - begin)[filled]
    # rounding must not take it out of the range of its rows: a constant stays constant
    mean = np.maximum(mean, np.minimum.reduceat(values, starts))
    result[filled] = np.minimum(mean, np.maximum.reduceat(values, starts))
