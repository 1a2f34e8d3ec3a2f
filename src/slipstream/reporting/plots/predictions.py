"""The table of predictions, beside the truth where it is known, as training, `evaluate` and
`predict` write it: its columns, series and windows, and which of them to draw.

`read_predictions` reads it at once, or an even sample; `open_predictions` by groups of rows, only
those that a view needs, however many there are.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet

from slipstream.base.errors import UserError
from slipstream.data.predictions import (
    LABEL,
    PREDICTED,
    ROW,
    SERIES,
    STEP,
    TIME,
    name_columns,
    name_probability,
)

Array = npt.NDArray[Any]
MAX_VALUES = 2_000_000
"""Predicted values that are read; beyond, every second, third ... group of rows"""
MOST_FILES = 8
"""Files whose groups of rows are remembered"""
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
    with _explain_damage(path):
        with pa.parquet.ParquetFile(path) as file:
            targets = sum(name.endswith(f"_{PREDICTED}") for name in file.schema_arrow.names)
            every = max(-(-file.metadata.num_rows * targets // most), 1)
            table = file.read_row_groups(list(range(0, file.num_row_groups, every)))
        return _index_series(table.combine_chunks(), every > 1)


@contextmanager
def _explain_damage(path: Path) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        raise UserError(f"{path}: is missing; was the run finished?") from None
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


class RowGroup(NamedTuple):
    """What a group of rows holds."""

    number: int
    series: frozenset[int]
    low: float
    high: float
    """The range of x"""


@dataclass(frozen=True, eq=False)
class PredictionFile:
    """Predictions beside the truth, where it is known."""

    path: Path
    shape: Predictions
    """Without rows: what the columns are"""
    names: tuple[str, ...]
    """The series, in the order of the file"""
    groups: tuple[RowGroup, ...]
    num_rows: int

    @property
    def targets(self) -> tuple[str, ...]:
        """The numeric targets; none of classes."""
        return self.shape.targets

    @property
    def classes(self) -> tuple[str, ...]:
        """The classes, in the order of their columns."""
        return self.shape.classes

    def has_truth(self, target: str) -> bool:
        """Whether the true values are known; `target` is empty for classes."""
        return self.shape.has_truth(target)

    @property
    def range(self) -> tuple[float, float]:
        """The first and the last x of all series."""
        lows, highs = [one.low for one in self.groups], [one.high for one in self.groups]
        return min(lows, default=0.0), max(highs, default=0.0)

    def read(
        self,
        columns: Sequence[str],
        *,
        series: int | None = None,
        between: tuple[float, float] = (-np.inf, np.inf),
    ) -> Iterator[Predictions]:
        """Yield groups of rows that may hold a series between two times, with these columns beside
        series, row, time and step."""
        place = [name for name in (SERIES, ROW, TIME, STEP) if name in self.all_columns]
        wanted = list(dict.fromkeys([*place, *columns]))
        numbers = {name: number for number, name in enumerate(self.names)}
        with pa.parquet.ParquetFile(self.path) as file:
            for group in self.groups:
                if series is not None and series not in group.series:
                    continue
                if group.high < between[0] or group.low > between[1]:
                    continue
                table = file.read_row_group(group.number, columns=wanted)
                yield _make_predictions(table, self.names, numbers)

    @property
    def all_columns(self) -> list[str]:
        return [SERIES, *self.shape.columns]


def _make_predictions(
    table: pa.Table, names: tuple[str, ...], numbers: dict[str, int]
) -> Predictions:
    codes = [np.empty(0, dtype=np.int64)]
    for chunk in table.column(SERIES).chunks:
        coded = chunk if pa.types.is_dictionary(chunk.type) else chunk.dictionary_encode()
        own = np.array(
            [numbers.get(name, -1) for name in coded.dictionary.to_pylist()], dtype=np.int64
        )
        codes.append(own[coded.indices.to_numpy()])
    return Predictions(table.drop_columns([SERIES]), False, names, np.concatenate(codes))


def open_predictions(path: Path) -> PredictionFile:
    """Return a file of predictions; what its groups hold is read once. A UserError says what is
    wrong with it."""
    with _explain_damage(path):
        state = path.stat()
        return _open(os.fspath(path), state.st_mtime_ns, state.st_size)


@lru_cache(MOST_FILES)
def _open(name: str, _changed: int, _size: int) -> PredictionFile:
    path, names, groups = Path(name), dict[str, int](), []
    with pa.parquet.ParquetFile(path) as file:
        schema = file.schema_arrow
        x_columns = [TIME if TIME in schema.names else ROW]
        for number in range(file.num_row_groups):
            table = file.read_row_group(number, columns=[SERIES, *x_columns])
            mine = {names.setdefault(one, len(names)) for one in _list_series(table)}
            x = Predictions(table, False, (), _no_codes()).read_x()
            ends = (np.nanmin(x), np.nanmax(x)) if np.isfinite(x).any() else (np.inf, -np.inf)
            groups.append(RowGroup(number, frozenset(mine), *map(float, ends)))
        num_rows = file.metadata.num_rows
    empty = Predictions(schema.empty_table().drop_columns([SERIES]), False, (), _no_codes())
    return PredictionFile(path, empty, tuple(names), tuple(groups), num_rows)


def _list_series(table: pa.Table) -> list[str]:
    """Return the series of a table, in the order in which they come."""
    return [str(name) for name in table.column(SERIES).unique().to_pylist()]


def _no_codes() -> Array:
    return np.empty(0, dtype=np.int64)


def read_errors(part: Predictions, target: str, classes: Sequence[str]) -> Array:
    """Return the error of each row: predicted less true, or of classes the negative logarithm of
    the true one's probability."""
    if not classes:
        return np.asarray(part[f"{target}_{PREDICTED}"] - part[target])
    return np.asarray(-np.log(np.maximum(read_label_probability(part, classes), 1e-12)))


def read_label_probability(part: Predictions, classes: Sequence[str]) -> Array:
    """Return the probability of the true class; of the predicted one, where that is not known."""
    numbers = read_classes(part, LABEL if LABEL in part.columns else PREDICTED, classes)
    result = np.full(len(part), np.nan)
    for number, name in enumerate(classes):
        mine = numbers == number
        result[mine] = part[name_probability(name)][mine]
    return result


def read_classes(part: Predictions, column: str, classes: Sequence[str]) -> Array:
    """Return the numbers of a column's classes; -1 for one that is not among them."""
    coded = part.table.column(column).combine_chunks().dictionary_encode()
    if isinstance(coded, pa.ChunkedArray):
        coded = coded.combine_chunks()
    numbers = {name: number for number, name in enumerate(classes)}
    own = np.array([numbers.get(name, -1) for name in coded.dictionary.to_pylist()] or [-1])
    return np.asarray(own[coded.indices.to_numpy(zero_copy_only=False)])


def list_columns(file: PredictionFile, target: str, *, bands: bool = False) -> list[str]:
    """Return the columns that the errors of a target, or of the classes, are computed from."""
    if file.classes:
        label = [LABEL] if file.has_truth("") else []
        return [*label, PREDICTED, *(name_probability(name) for name in file.classes)]
    columns = [target] if file.has_truth(target) else []
    columns.append(f"{target}_{PREDICTED}")
    if bands:
        columns += [name for one in file.shape.find_bands(target) for name in (one.low, one.high)]
    return columns


def find_starts(part: Predictions) -> Array:
    """Return the first predicted row of each row's window."""
    return np.asarray(part[ROW] - part[STEP] + 1 if part.is_forecast else part[ROW])


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
