"""Resampling: rows at regular times, made from rows at any times.

New rows lie at whole multiples of `every` (since 1970 for timestamps, since 0 for plain numbers),
from the first row on up to the last one. So cutting the series never changes the rows before.

| method | the value at time t | looks ahead |
|---|---|---|
| mean | the mean of the rows in (t - every, t]; where there are none, as `last` | no |
| last | the last value at or before t | no |
| linear | on the line between the values before and after t | up to `limit` |
| nearest | the value that is nearest in time, the earlier one of two | up to half of `limit` |
| ohlc | a bar of the rows in (t - every, t]; other columns as `last` | no |

A bar without a row opens and stays at the last close, with a volume of 0.

Rows further apart than `limit` have a gap between them. In it, `mean` and `last` hold the last
value for as long as `limit`, `nearest` for half of it, `linear` not at all; the other rows are left
out. A missing value counts as no row of its column.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from slipstream.base.errors import Setting, UserError
from slipstream.config.prepare import ResampleStep, parse_duration
from slipstream.data.prepare.rolling import to_span
from slipstream.data.table import release_memory

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]
Times = npt.NDArray[Any]
Method = Literal["mean", "last", "linear", "nearest", "ohlc"]
CAUSAL = ("mean", "last", "ohlc")
"""Methods that do not look ahead"""
ROUNDING = 1e-6
"""The share of a step by which a row may be late where times are plain numbers: 0.1 + 0.2 is not
exactly 0.3"""
DEFAULT_STEPS = 3
"""The limit, as a multiple of `every`, where none is set"""
CONSTANT = 1e-14
"""How far the mean of equal values may be from them, relative to their size"""
MAX_ROWS = 200_000_000
"""More rows than this are refused: `every` is then most likely a mistake, and memory would fill"""


@dataclass(frozen=True)
class Resampled:
    """A series at regular times."""

    times: Times
    columns: dict[str, Floats]
    rows: Ints
    """The last row of the series at or before each time, for columns that are not numbers; with
    `nearest`, the row before a gap where the nearest row comes after it"""


class BarColumns(NamedTuple):
    """The columns of bars: where each number comes from, and its name."""

    sources: tuple[str, str, str, str]
    """Open, high, low and close of the rows; of ticks, four times the price"""
    names: tuple[str, str, str, str]
    volumes: tuple[str, ...] = ()
    is_start: bool = False
    """Whether times are the start of the period that a bar covers, not its end"""

    @classmethod
    def from_step(cls, step: ResampleStep) -> BarColumns | None:
        """Return the columns of a step; None where it makes no bars."""
        if step.method != "ohlc":
            return None
        price = step.price
        sources = step.bars if price is None else (price, price, price, price)
        return cls(sources, step.bars, step.volumes, step.label == "start")


@dataclass(frozen=True)
class _Grid:
    """The times of the new rows, and lengths in their unit."""

    times: Times
    step: int | float
    limit: int | float
    rounding: int | float


@dataclass(frozen=True)
class _Bins:
    """The new times that two or more rows belong to."""

    numbers: Ints
    """Positions of these times among the new times"""
    bounds: Ints
    """The first row of each bin and the row after its last, alternately"""
    counts: Ints


@dataclass(frozen=True)
class _Neighbors:
    """The rows before and after each new time."""

    before: Ints
    """The last row at or before each new time, -1 where there is none"""
    age: Times
    """Time since the row before; longer than any limit where there is none"""
    usable: Flags
    """Whether the rows around each new time give a value"""
    wait: Times | None = None
    """Time to the row after, for methods that look ahead; 0 where the row before is at this time"""
    bins: _Bins | None = None
    """The bins, for the method `mean`"""


def resample(
    times: Times,
    columns: dict[str, Floats],
    *,
    every: str | float,
    method: str = "mean",
    limit: str | float | None = None,
    bars: BarColumns | None = None,
    keep: bool = True,
) -> Resampled:
    """Return the series with one row every `every`; rows further apart than `limit` keep their gap.

    Without a `limit`, it is three times `every`. `bars` are the columns of "ohlc". Without `keep`,
    each column is removed from `columns` when its new one is there, so that not all of both are in
    memory.
    """
    steps = np.diff(times)
    if len(steps) and steps.min() < 0:
        row = int(np.flatnonzero(steps < 0)[0]) + 2
        raise UserError(
            f"resample needs rows in time order, and row {row} of the series is earlier than the "
            "row before; sort the file, or set " + Setting({"data.unsorted": "sort"})
        )
    step, longest = get_lengths(times, every, limit)
    if limit is None and 2 * np.count_nonzero(steps > longest) > len(steps):
        raise UserError(
            f"most rows are further apart than {DEFAULT_STEPS} times every = {every}; set limit, "
            "to the usual step between rows or more"
        )
    del steps
    is_start = bars is not None and bars.is_start
    if is_start:
        times = times + get_shift(times, step)
    grid = _make_grid(times, step, longest, method)
    neighbors = _find_neighbors(times, grid, method)
    if not neighbors.usable.all():
        grid = replace(grid, times=grid.times[neighbors.usable])
        neighbors = _find_neighbors(times, grid, method)
    result = {}
    if bars is not None:
        result = _make_bars(times, columns, grid, neighbors, bars)
    for name in list(columns):
        if name not in result:
            result[name] = _sample_column(times, columns[name], grid, neighbors, method)
        if not keep:
            del columns[name]
            release_memory()
    new_times = (grid.times - step).astype(times.dtype) if is_start else grid.times
    return Resampled(new_times, result, neighbors.before)


def get_shift(times: Times, step: int | float) -> int | float:
    """Return how much later a row counts whose time is the start of a period: just enough for one
    at the border of two bins to belong to the second."""
    return 1 if times.dtype == np.int64 else 2 * ROUNDING * step


def get_look_ahead(every: str | float, limit: str | float | None, method: str) -> int:
    """Return how many new rows a method looks ahead."""
    if method in CAUSAL:
        return 0
    step = parse_duration(every, "every")
    reach = DEFAULT_STEPS * step if limit is None else parse_duration(limit, "limit")
    return math.ceil((reach / 2 if method == "nearest" else reach) / step - ROUNDING)


def get_lengths(
    times: Times, every: str | float, limit: str | float | None
) -> tuple[int | float, int | float]:
    """Return the step (`every`) and the limit in the unit of the times."""
    step = to_span(every, times, "every")
    longest = DEFAULT_STEPS * step if limit is None else to_span(limit, times, "limit")
    if longest < step:
        raise UserError(f"limit is {limit}, shorter than every = {every}; rows would be lost")
    return step, longest


def _make_grid(times: Times, step: int | float, limit: int | float, method: str) -> _Grid:
    """Return the times of the new rows, with a few more in gaps but not all times of a long gap."""
    rounding = 0 if times.dtype == np.int64 else ROUNDING * step
    if not len(times):
        return _Grid(times, step, limit, rounding)
    gaps = np.flatnonzero(np.diff(times) > limit + step)
    begins, ends = times[np.append(0, gaps + 1)], times[np.append(gaps, len(times) - 1)]
    # rows after a gap's begin and before its end that the method may fill
    filled = limit / 2 if method == "nearest" else limit
    early = np.where(np.arange(len(begins)) > 0, filled if method == "nearest" else 0, 0)
    late = np.where(np.arange(len(ends)) < len(ends) - 1, filled, 0)
    first = _divide_up(begins - early.astype(times.dtype) - rounding, step)
    last = -_divide_up(-(ends + late.astype(times.dtype)) - rounding, step)
    counts = np.maximum(last - first + 1, 0)
    if counts.sum() > MAX_ROWS:
        raise UserError(
            f"resampling would make {counts.sum():,} rows of {len(times):,}; use a longer every"
        )
    offsets = np.repeat(first - np.cumsum(counts) + counts, counts)
    numbers = offsets + np.arange(counts.sum())
    return _Grid((numbers * step).astype(times.dtype), step, limit, rounding)


def _divide_up(times: Times, step: int | float) -> Ints:
    """Return the index of the first grid time at or after each time: the time divided by the step,
    rounded up."""
    if times.dtype == np.int64:
        return np.asarray(-(-times // int(step)))
    return np.ceil(times / step).astype(np.int64)


def _find_neighbors(times: Times, grid: _Grid, method: str) -> _Neighbors:
    far = 4 * grid.limit
    longest = grid.limit + grid.rounding
    before = np.searchsorted(times, grid.times + grid.rounding, side="right") - 1
    age = grid.times - times[np.maximum(before, 0)]
    age[before < 0] = far
    age[np.abs(age) <= grid.rounding] = 0
    if method in CAUSAL:
        bins = _find_bins(before) if method == "mean" else None
        return _Neighbors(before, age, np.asarray(age < grid.limit - grid.rounding), bins=bins)
    wait = times[np.minimum(before + 1, len(times) - 1)] - grid.times
    wait[before == len(times) - 1] = far
    wait[age == 0] = 0
    if method == "linear":
        return _Neighbors(before, age, np.asarray((age == 0) | (age + wait <= longest)), wait)
    return _Neighbors(before, age, np.asarray(2 * np.minimum(age, wait) <= longest), wait)


def _sample_column(
    times: Times, values: Floats, grid: _Grid, neighbors: _Neighbors, method: str
) -> Floats:
    """Return a column at the new times; rows without a value of this column are skipped."""
    missing = np.isnan(values)
    if missing.all():
        return np.full(len(grid.times), np.nan)
    if missing.any():
        times, values = times[~missing], values[~missing]
        neighbors = _find_neighbors(times, grid, method)
    before = neighbors.before
    result = values[np.maximum(before, 0)]
    if neighbors.bins is not None:
        _put_means(result, values, neighbors.bins)
    if neighbors.wait is not None:
        after = values[np.minimum(before + 1, len(values) - 1)]
        age, wait = neighbors.age, neighbors.wait
        if method == "linear":
            share = age / np.where(age > 0, age + wait, 1)
            result += np.where(age > 0, (after - result) * share, 0.0)
        else:
            result = np.where(wait < age, after, result)
    if not neighbors.usable.all():
        result[~neighbors.usable] = np.nan
    return result


def _make_bars(
    times: Times,
    columns: dict[str, Floats],
    grid: _Grid,
    neighbors: _Neighbors,
    bars: BarColumns,
) -> dict[str, Floats]:
    """Return the columns of the bars that end at the new times."""
    *others, close = bars.sources
    closes = _sample_column(times, columns[close], grid, neighbors, "last")
    functions: list[np.ufunc | None] = [None, np.maximum, np.minimum]
    result: dict[str, Floats] = {}
    for source, name, function in zip(others, bars.names, functions, strict=False):
        result[name] = closes.copy()  # where there is no row
        _put_bins(result[name], times, columns[source], grid, function)
    result[bars.names[3]] = closes
    for name in bars.volumes:
        result[name] = np.zeros(len(grid.times))
        _put_bins(result[name], times, columns[name], grid, np.add)
    return result


def _put_bins(
    result: Floats, times: Times, values: Floats, grid: _Grid, function: np.ufunc | None
) -> None:
    """Write a function of the known values of each bin where there are any; None: the first."""
    known = ~np.isnan(values)
    if not known.any() or not len(result):
        return
    if not known.all():
        times, values = times[known], values[known]
    last = np.searchsorted(times, grid.times + grid.rounding, side="right") - 1
    counts = np.diff(last, prepend=-1)
    numbers = np.flatnonzero(counts)
    first = last[numbers] - counts[numbers] + 1
    if function is None:
        result[numbers] = values[first]
    else:
        end = int(last[-1]) + 1
        result[numbers] = function.reduceat(values[:end], first)


def _find_bins(last: Ints) -> _Bins:
    """Return the bins of two or more rows; `last` is the last row of each new time."""
    counts = np.diff(last, prepend=-1)
    numbers = np.flatnonzero(counts > 1)
    ends, counts = last[numbers] + 1, counts[numbers]
    return _Bins(numbers, np.stack([ends - counts, ends], axis=1).ravel(), counts)


def _put_means(result: Floats, values: Floats, bins: _Bins) -> None:
    """Write the mean of the rows of each bin into the result."""
    if not len(bins.numbers):
        return
    # every second segment lies between two bins; the last one may end with the column
    bounds = bins.bounds[:-1] if bins.bounds[-1] == len(values) else bins.bounds
    mean = np.add.reduceat(values, bounds)[::2] / bins.counts
    first = values[bins.bounds[::2]]
    # a constant stays constant, though its sum was rounded
    result[bins.numbers] = np.where(np.abs(mean - first) <= CONSTANT * np.abs(first), first, mean)
