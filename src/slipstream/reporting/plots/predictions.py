"""The table of predictions beside the truth, as training and `evaluate` write it: its columns,
series and windows, and which of them to draw. `read_predictions` is its reader."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet

from slipstream.data.prediction_columns import (
    LABEL,
    PREDICTED,
    ROW,
    SERIES,
    STEP,
    TIME,
    name_columns,
    name_probability,
)
from slipstream.errors import UserError

Array = npt.NDArray[Any]
MAX_VALUES = 2_000_000
"""Predicted values that are read; beyond, every second, third ... group of rows"""
MICROSECONDS = 1e6
SIGNIFICANT = 4
EXACT = 2**53
"""Whole numbers below it are written as such"""
GAP = 1.9
"""Times the usual step from which on a line is interrupted"""


class Band(NamedTuple):
    """The columns of a lower and an upper bound, and what they are."""

    low: str
    high: str
    label: str


class Chosen(NamedTuple):
    """A series or a window that is drawn, with its rank among the others."""

    rank: str
    """worst, median or best; empty where there is only one"""
    number: int


@dataclass(frozen=True)
class Predictions:
    """The test set's predictions, or an even sample of very many."""

    table: pa.Table
    sampled: bool
    names: tuple[str, ...]
    """The series"""
    codes: Array
    """Which of `names` each row belongs to"""

    def __getitem__(self, name: str) -> Array:
        return np.asarray(self.table.column(name).to_numpy())

    def __len__(self) -> int:
        return int(self.table.num_rows)

    @property
    def columns(self) -> list[str]:
        return list(self.table.column_names)

    @property
    def targets(self) -> tuple[str, ...]:
        """The numeric targets; none of classes. Where true values are known, only columns that
        have some are targets: a column named `load_predicted` may be a target as well."""
        if self.classes:
            return ()
        ending = f"_{PREDICTED}"
        names = [name.removesuffix(ending) for name in self.columns if name.endswith(ending)]
        return tuple(name for name in names if name in self.columns) or tuple(names)

    @property
    def classes(self) -> tuple[str, ...]:
        """The classes, in the order of their columns; none of numbers."""
        if PREDICTED not in self.columns:
            return ()
        first = self.columns.index(PREDICTED) + 1
        prefix = name_probability("")
        return tuple(name.removeprefix(prefix) for name in self.columns[first:])

    def has_truth(self, target: str) -> bool:
        """Whether the true values are known; `target` is empty for classes."""
        return (target or LABEL) in self.columns

    @property
    def is_forecast(self) -> bool:
        return STEP in self.columns

    @property
    def has_dates(self) -> bool:
        return TIME in self.columns and pa.types.is_timestamp(self.table.schema.field(TIME).type)

    @property
    def x_name(self) -> str:
        """What the horizontal axis is; dates need no name."""
        return ROW if TIME not in self.columns else "" if self.has_dates else TIME

    def read_x(self) -> Array:
        """Return the time of every row, in microseconds where it is a date, or the row number."""
        if TIME not in self.columns:
            return self[ROW].astype(float)
        time = self[TIME]
        if self.has_dates:
            return time.astype("datetime64[us]").astype(np.int64).astype(float)
        return time.astype(float)

    def find_bands(self, target: str) -> list[Band]:
        """Return pairs of quantiles, else intervals, of a target, the widest first."""
        pattern = re.compile(re.escape(target) + r"_q([\d.]+)")
        matches = [match for name in self.columns if (match := pattern.fullmatch(name))]
        # those with a prediction are targets of their own
        matches = [one for one in matches if f"{one[0]}_{PREDICTED}" not in self.columns]
        matches.sort(key=lambda one: float(one[1]))
        if len(matches) > 1:
            pairs = zip(matches, matches[::-1], strict=True)
            label = "quantiles {} to {} %"
            return [
                Band(low[0], high[0], label.format(low[1], high[1]))
                for low, high in list(pairs)[: len(matches) // 2]
            ]
        intervals = name_columns(target).intervals
        return [
            Band(low, high, f"{level} % interval")
            for level, (low, high) in sorted(intervals.items(), reverse=True)
            if low in self.columns and f"{low}_{PREDICTED}" not in self.columns
        ]

    def find_windows(self) -> Array:
        """Return the first row of every window, with the number of rows at the end."""
        begins = np.flatnonzero(self[STEP] == 1) if self.is_forecast else np.arange(len(self))
        return np.append(begins, len(self))

    def compute_errors(self, targets: Sequence[str]) -> Array:
        """Return the absolute error of each row; of several targets, the mean of each one's error
        in relation to that target's average."""
        total = np.zeros(len(self))
        for target in targets:
            error = np.abs(self[name_columns(target).predicted] - self[target])
            finite = error[np.isfinite(error)]
            average = float(finite.mean()) if len(targets) > 1 and len(finite) else 1.0
            total += error / (average or 1.0)
        return total / len(targets)


def read_predictions(path: Path, *, most: int = MAX_VALUES) -> Predictions:
    """Return the predictions of a file, or an even sample where there are more values than `most`;
    a UserError names a file that is damaged."""
    try:
        with pa.parquet.ParquetFile(path) as file:
            targets = sum(name.endswith(f"_{PREDICTED}") for name in file.schema_arrow.names)
            every = max(-(-file.metadata.num_rows * targets // most), 1)
            table = file.read_row_groups(list(range(0, file.num_row_groups, every)))
        return _index_series(table.combine_chunks(), every > 1)
    except (pa.ArrowException, OSError, LookupError) as error:
        first = str(error).partition("\n")[0]
        raise UserError(
            f"{path}: cannot be read; it is damaged ({first}); restore it from a copy, or train "
            "again"
        ) from None


def _index_series(table: pa.Table, sampled: bool) -> Predictions:
    series = table.column(SERIES).cast(pa.string()).dictionary_encode().unify_dictionaries()
    names = series.chunk(0).dictionary.to_pylist() if series.num_chunks else []
    codes = [chunk.indices.to_numpy() for chunk in series.chunks]
    return Predictions(
        table.drop_columns([SERIES]),
        sampled,
        tuple(names),
        np.concatenate(codes) if codes else np.empty(0, dtype=np.int32),
    )


def choose_ranked(errors: Array) -> list[Chosen]:
    """Choose the worst, the median and the best, as far as they differ; what is not finite is worse
    than the rest."""
    order = np.argsort(-np.where(np.isfinite(errors), errors, np.inf), kind="stable")
    if len(order) == 1:
        return [Chosen("", int(order[0]))]
    picked = {"worst": order[0], "best": order[-1]}
    if len(order) > 2:
        picked = {"worst": order[0], "median": order[(len(order) - 1) // 2], "best": order[-1]}
    return [Chosen(rank, int(number)) for rank, number in picked.items()]


def compute_series_errors(predictions: Predictions, errors: Array) -> Array:
    """Return the mean error of each series."""
    counts = np.bincount(predictions.codes, minlength=len(predictions.names))
    sums = np.bincount(predictions.codes, weights=errors, minlength=len(predictions.names))
    return np.asarray(sums / np.maximum(counts, 1))


def compute_window_errors(windows: Array, errors: Array) -> Array:
    """Return the mean error of each window."""
    return np.asarray(np.add.reduceat(errors, windows[:-1]) / np.diff(windows))


def lay_end_to_end(predictions: Predictions, windows: Array, series: int) -> Array:
    """Return the numbers of a series' windows that follow each other without overlap."""
    begins = windows[:-1]
    mine = np.flatnonzero(predictions.codes[begins] == series)
    first = predictions[ROW][begins[mine]]
    order = np.argsort(first, kind="stable")
    mine, first = mine[order], first[order]
    length, chosen, end = np.diff(windows)[mine], [], -np.inf
    for place, (row, rows) in enumerate(zip(first.tolist(), length.tolist(), strict=True)):
        if row >= end:
            chosen.append(place)
            end = row + rows
    return mine[chosen]


def thin(columns: Sequence[Array], most: int) -> Array:
    """Return the rows to draw, at most so many: the known extremes of every column in each
    interval, and both ends, so that all columns of a series span the same time."""
    rows = len(columns[0])
    if rows <= most:
        return np.arange(rows)
    size = -(-rows // max((most - 2) // (2 * len(columns)), 1))
    buckets = np.minimum(np.arange(-(-rows // size) * size), rows - 1).reshape(-1, size)
    extremes = [
        find(np.where(np.isnan(column), unknown, column)[buckets], axis=1)
        for column in columns
        for find, unknown in ((np.argmin, np.inf), (np.argmax, -np.inf))
    ]
    retained = [buckets[np.arange(len(buckets)), at] for at in extremes]
    return np.unique(np.concatenate([*retained, [0, rows - 1]]))


def find_gaps(x: Array) -> Array:
    """Number the stretches of rows that follow each other in the usual step."""
    steps = np.diff(x)
    return np.concatenate([[0], np.cumsum(steps > GAP * np.median(steps))])


def interrupt(
    x: Array, values: Array, stretches: Array, windows: Array | None
) -> tuple[Array, Array]:
    """Insert points that interrupt the lines: all at a gap, predicted ones between windows."""
    gap = np.flatnonzero(np.diff(stretches)) + 1
    joint = np.empty(0, dtype=int)
    if windows is not None:
        joint = np.setdiff1d(np.flatnonzero(np.diff(windows)) + 1, gap)
    at = np.concatenate([gap, joint]).astype(int)
    inserted = np.full((len(values), len(at)), np.nan)
    inserted[0, len(gap) :] = values[0, joint]  # the true values are one line
    order = np.argsort(at, kind="stable")
    at, inserted = at[order], inserted[:, order]
    return np.insert(x, at, x[at]), np.insert(values, at, inserted, axis=1)


def round_values(values: Array, *, decimals: int | None = None) -> list[float | None]:
    """Round to what can be seen, with whole numbers as such and None where nothing is known."""
    if decimals is None:
        finite = values[np.isfinite(values)]
        span = float(np.ptp(finite)) if len(finite) else 0.0
        decimals = SIGNIFICANT - 1 - int(np.floor(np.log10(span or 1.0)))
    rounded = np.round(np.where(np.isfinite(values), values, np.nan), decimals).tolist()
    return [None if v != v else int(v) if abs(v) < EXACT and v == int(v) else v for v in rounded]
