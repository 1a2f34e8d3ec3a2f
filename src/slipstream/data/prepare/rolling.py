"""Statistics over the last n rows of a column, each window on its own.

Windows of 2k rows are merged from two of k rows, so the work grows with log n. Each window is
summed in the same order wherever it lies: a running sum would carry rounding from row to row, and a
slice of the column would give other digits. Sums are of differences from the window's last value,
so a large offset costs no precision.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from slipstream.base.errors import UserError
from slipstream.config.prepare import parse_duration

Floats = npt.NDArray[np.float64]
State = tuple[Floats, ...]
"""The partial results of all windows: arrays of equal length"""
Merge = Callable[[State, State, int, int], State]
"""A function that merges the states of newer and older windows, given how many rows each has"""
CHUNK_ROWS = 1 << 16
"""The number of rows computed at a time, so that temporary arrays stay in the CPU's cache"""


def compute_mean(values: Floats, rows: int) -> Floats:
    """Return the mean of the last `rows` values, NaN where one is missing."""
    offsets, _ = _compute_moments(values, rows)
    return _pad(values[rows - 1 :] + offsets / rows, values, rows)


def compute_sum(values: Floats, rows: int) -> Floats:
    """Return the sum of the last `rows` values, NaN where one is missing."""
    return _pad(_merge_windows((values,), rows, _add)[0], values, rows)


def compute_std(values: Floats, rows: int) -> Floats:
    """Return the standard deviation (of all `rows` values, not a sample) of the last `rows`."""
    _, squares = _compute_moments(values, rows)
    return _pad(np.sqrt(squares / rows), values, rows)


def compute_zscore(values: Floats, rows: int) -> Floats:
    """Return how many standard deviations a value is above the mean of the last `rows` values.

    The result is 0 where all values are equal.
    """
    offsets, squares = _compute_moments(values, rows)
    std = np.sqrt(squares / rows)
    std[std == 0] = 1.0
    return _pad(-offsets / rows / std, values, rows)


def compute_min(values: Floats, rows: int) -> Floats:
    """Return the smallest of the last `rows` values, NaN where one is missing."""
    return _pad(_merge_windows((values,), rows, _take_min)[0], values, rows)


def compute_max(values: Floats, rows: int) -> Floats:
    """Return the largest of the last `rows` values, NaN where one is missing."""
    return _pad(_merge_windows((values,), rows, _take_max)[0], values, rows)


def compute_median(values: Floats, rows: int) -> Floats:
    """Return the median of the last `rows` values, NaN where one is missing."""
    missing = np.isnan(values)
    if not missing.any():
        return _pad(_rank_windows(values, rows), values, rows)
    medians = _pad(_rank_windows(np.where(missing, 0.0, values), rows), values, rows)
    count = compute_sum(missing.astype(np.float64), rows)
    return np.where(count > 0, np.nan, medians)


def compute_known_mean(values: Floats, rows: int) -> Floats:
    """Return the mean of the known values among the last `rows`, NaN where there are none.

    Windows that begin before the first row have fewer rows.
    """
    before = np.full(rows - 1, np.nan)
    padded = np.concatenate([before, values])
    known = ~np.isnan(padded)
    anchors = np.where(known, padded, 0.0)
    leaves = (anchors, np.zeros(len(padded)), known.astype(np.float64))
    last, sums, counts = _merge_windows(leaves, rows, _merge_known)
    return np.where(counts > 0, last + sums / np.maximum(counts, 1.0), np.nan)


def compute_known_median(values: Floats, rows: int) -> Floats:
    """Return the median of the known values among the last `rows`, NaN where there are none."""
    padded = np.concatenate([np.full(rows - 1, np.nan), values])
    missing = np.isnan(padded)
    filled = np.where(missing, 0.0, padded)
    (num_missing,) = _merge_windows((missing.astype(np.float64),), rows, _add)
    result = _rank_windows(filled, rows)
    partial = np.flatnonzero(num_missing)
    num_windows = max(CHUNK_ROWS * 16 // rows, 1)
    for begin in range(0, len(partial), num_windows):
        chosen = partial[begin : begin + num_windows]
        windows = np.lib.stride_tricks.sliding_window_view(padded, rows)[chosen]
        result[chosen] = _find_known_medians(windows)
    return result


def split_rows(num_rows: int, back: int, ahead: int = 0) -> Iterator[tuple[slice, slice, slice]]:
    """Yield slices for each part of a column: the rows to read, the rows to write, and the latter
    within the former.

    The rows to read include `back` rows before and `ahead` rows after, as far as there are any.
    """
    step = max(CHUNK_ROWS, 4 * (back + ahead))
    for begin in range(0, num_rows, step):
        end = min(begin + step, num_rows)
        first, last = max(begin - back, 0), min(end + ahead, num_rows)
        yield slice(first, last), slice(begin, end), slice(begin - first, end - first)


def _pad(valid: Floats, values: Floats, rows: int) -> Floats:
    """Return the values with NaN in front, for the rows before the first complete window."""
    before = min(rows - 1, len(values))
    return np.concatenate([np.full(before, np.nan), valid[: len(values) - before]])


def _merge_windows(leaves: State, rows: int, merge: Merge) -> State:
    """Return the state of each complete window of `rows` rows; `leaves` are those of single rows.

    The windows of the highest power of two come last in the order, so they hold the oldest rows.
    """
    num_rows = len(leaves[0])
    if num_rows < rows:
        return tuple(np.empty(0) for _ in leaves)
    blocks, size = leaves, 1
    result, covered = leaves, 0  # `result` holds the last `covered` rows of each window
    while True:
        if rows & size:
            if covered:
                newer = tuple(part[size:] for part in result)
                older = tuple(part[: num_rows - covered - size + 1] for part in blocks)
                result = merge(newer, older, covered, size)
            else:
                result = blocks
            covered += size
        if covered == rows:
            return result
        newer, older = (tuple(p[size:] for p in blocks), tuple(p[:-size] for p in blocks))
        blocks, size = merge(newer, older, size, size), 2 * size


def _add(newer: State, older: State, _newer_rows: int, _older_rows: int) -> State:
    return (older[0] + newer[0],)


def _take_min(newer: State, older: State, _newer_rows: int, _older_rows: int) -> State:
    return (np.minimum(older[0], newer[0]),)


def _take_max(newer: State, older: State, _newer_rows: int, _older_rows: int) -> State:
    return (np.maximum(older[0], newer[0]),)


def _merge_moments(newer: State, older: State, newer_rows: int, older_rows: int) -> State:
    """Merge the last value, the sum of differences from it, and the squares about the mean."""
    last, sums, squares = newer
    shift = older[0] - last
    distance = older[1] / older_rows
    distance += shift
    distance -= sums / newer_rows  # of the two means
    distance *= distance
    distance *= newer_rows * older_rows / (newer_rows + older_rows)
    distance += squares
    distance += older[2]
    shift *= older_rows
    shift += sums
    shift += older[1]
    return last, shift, distance


def _merge_known(newer: State, older: State, _newer_rows: int, _older_rows: int) -> State:
    """Merge the last known value, the sum of differences from it, and the number of known
    values."""
    last, sums, counts = newer
    shift = np.where(counts > 0, older[0] - last, 0.0)
    shift *= older[2]
    shift += sums
    shift += older[1]
    return np.where(counts > 0, last, older[0]), shift, counts + older[2]


def _compute_moments(values: Floats, rows: int) -> tuple[Floats, Floats]:
    """Return, for each complete window, the sum of differences from its last value and the sum of
    squares about its mean."""
    zeros = np.zeros(len(values))
    zeros[np.isnan(values)] = np.nan  # of a window of one row, too
    _, sums, squares = _merge_windows((values, zeros, zeros), rows, _merge_moments)
    return sums, squares


def _rank_windows(values: Floats, rows: int) -> Floats:
    """Return the median of each complete window; no value may be missing."""
    if len(values) < rows:
        return np.empty(0)
    middle = rows // 2
    upper = _select_rank(values, middle, rows)
    return upper if rows % 2 else (_select_rank(values, middle - 1, rows) + upper) / 2


def _select_rank(values: Floats, rank: int, rows: int) -> Floats:
    if rows == 1:
        return values.copy()
    from scipy import ndimage  # takes a while to import, and streams do not need it

    # the window ends at the row; rows before the first complete one are dropped
    origin = (rows - 1) // 2
    selected = ndimage.rank_filter(values, rank, size=rows, origin=origin)
    return np.asarray(selected, dtype=np.float64)[rows - 1 :]


def _find_known_medians(windows: Floats) -> Floats:
    """Return the median of the known values of each window, NaN where there are none."""
    ordered = np.sort(windows, axis=-1)  # what is missing comes last
    count = (~np.isnan(ordered)).sum(axis=-1)
    numbers = np.arange(len(windows))
    upper = ordered[numbers, np.minimum(count // 2, windows.shape[1] - 1)]
    lower = ordered[numbers, np.maximum(count - 1, 0) // 2]
    return np.asarray(np.where(count % 2, lower, (lower + upper) / 2))


Times = npt.NDArray[Any]
MICROSECONDS = 1e6


def to_span(value: str | float, times: Times, setting: str) -> int | float:
    """Return a length of time in the unit of the times: microseconds, or that of plain numbers.

    For plain numbers the length has to be a number as well, because their unit is not known.
    """
    if times.dtype != np.int64:
        if isinstance(value, str):
            raise UserError(
                f'{setting} is "{value}", but data.time holds plain numbers; write {setting} as a '
                "number in their unit"
            )
        return float(value)
    exact = parse_duration(value, setting) * MICROSECONDS
    whole = round(exact)
    if not whole or not math.isclose(exact, whole, rel_tol=1e-12):
        raise UserError(f"{setting} is {value}; use a whole number of microseconds")
    return whole
