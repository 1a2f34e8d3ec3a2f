"""The table of test predictions: its columns, series and windows, and which of them to draw."""

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
    def is_forecast(self) -> bool:
        return "step" in self.columns

    @property
    def has_dates(self) -> bool:
        return "time" in self.columns and pa.types.is_timestamp(
            self.table.schema.field("time").type
        )

    @property
    def x_name(self) -> str:
        """What the horizontal axis is; dates need no name."""
        return "row" if "time" not in self.columns else "" if self.has_dates else "time"

    def read_x(self) -> Array:
        """Return the time of every row, in microseconds where it is a date, or the row number."""
        if "time" not in self.columns:
            return self["row"].astype(float)
        time = self["time"]
        if self.has_dates:
            return time.astype("datetime64[us]").astype(np.int64).astype(float)
        return time.astype(float)

    def find_bands(self, target: str) -> list[Band]:
        """Return pairs of quantiles, else intervals, of a target, the widest first."""
        pattern = re.compile(re.escape(target) + r"_q([\d.]+)")
        matches = [match for name in self.columns if (match := pattern.fullmatch(name))]
        # those with a prediction are targets of their own
        matches = [one for one in matches if f"{one[0]}_predicted" not in self.columns]
        matches.sort(key=lambda one: float(one[1]))
        if len(matches) > 1:
            pairs = zip(matches, matches[::-1], strict=True)
            label = "quantiles {} to {} %"
            return [
                Band(low[0], high[0], label.format(low[1], high[1]))
                for low, high in list(pairs)[: len(matches) // 2]
            ]
        bands = [(f"{target}_lo{level}", f"{target}_hi{level}", level) for level in ("95", "80")]
        return [
            Band(low, high, f"{level} % interval")
            for low, high, level in bands
            if low in self.columns and f"{low}_predicted" not in self.columns
        ]

    def find_windows(self) -> Array:
        """Return the first row of every window, with the number of rows at the end."""
        begins = np.flatnonzero(self["step"] == 1) if self.is_forecast else np.arange(len(self))
        return np.append(begins, len(self))

    def compute_errors(self, targets: Sequence[str]) -> Array:
        """Return the absolute error of each row; of several targets, the mean of each one's error
        in relation to that target's average."""
        total = np.zeros(len(self))
        for target in targets:
            error = np.abs(self[f"{target}_predicted"] - self[target])
            finite = error[np.isfinite(error)]
            average = float(finite.mean()) if len(targets) > 1 and len(finite) else 1.0
            total += error / (average or 1.0)
        return total / len(targets)


def read_predictions(path: Path) -> Predictions:
    with pa.parquet.ParquetFile(path) as file:
        targets = sum(name.endswith("_predicted") for name in file.schema_arrow.names)
        every = max(-(-file.metadata.num_rows * targets // MAX_VALUES), 1)
        table = file.read_row_groups(list(range(0, file.num_row_groups, every)))
    table = table.combine_chunks()
    series = table.column("series").cast(pa.string()).dictionary_encode().unify_dictionaries()
    names = series.chunk(0).dictionary.to_pylist() if series.num_chunks else []
    codes = [chunk.indices.to_numpy() for chunk in series.chunks]
    return Predictions(
        table.drop_columns(["series"]),
        every > 1,
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
    first = predictions["row"][begins[mine]]
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
