"""Tables of predictions, beside the truth where it is known, as training, `evaluate` and `predict`
write them: the names of their columns, how they are built, and how they are read.

A table has one row for each predicted row of a window: its series and row, the fold, time and step
where there are any, and then either truth, prediction, quantiles and interval bounds of each target
or the label, the likeliest class and the probability of each class. `PredictionShape` says which.
`read_predictions` reads a file at once, or an even sample; `open_predictions` by groups of rows,
only those that a view needs.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from slipstream.base.errors import UserError
from slipstream.base.statistics import select_median
from slipstream.config import Config, Signature
from slipstream.data.roles import Roles
from slipstream.data.scaler import Scaler
from slipstream.data.series import MICROSECONDS, Floats, Ints, SeriesIndex, Times
from slipstream.data.table import DataTable

PREDICTIONS = "predictions.parquet"
"""The file in the folder of a run"""
SERIES, ROW, FOLD, TIME, STEP = "series", "row", "fold", "time", "step"
LABEL, PREDICTED = "label", "predicted"
"""The columns of a classifier: the true class and the likeliest one"""
Array = npt.NDArray[Any]
Column = tuple[str, Any]
"""The name and the values of a column"""
LEVELS = {"80": 0.80, "95": 0.95}
"""Levels of prediction intervals, by the percentage in the names of their columns"""
MAX_VALUES = 2_000_000
"""The number of predicted values that are read; of a larger file, every second, third ... group of
rows"""
MAX_FILES = 8
"""The number of files whose row groups stay in the cache"""
MIN_PROBABILITY = 1e-12
"""Smaller probabilities count as this one in a log-loss"""


class PredictionColumns(NamedTuple):
    """The columns of one numeric target."""

    truth: str
    predicted: str
    quantiles: tuple[str, ...]
    """The columns of the quantiles, in the order of their levels"""
    intervals: dict[str, tuple[str, str]]
    """The columns of the lower and the upper bound, by level"""


def name_columns(target: str, quantiles: Iterable[float] = ()) -> PredictionColumns:
    """Return the names of the columns of a numeric target."""
    return PredictionColumns(
        truth=target,
        predicted=f"{target}_{PREDICTED}",
        quantiles=tuple(f"{target}_q{100 * level:g}" for level in quantiles),
        intervals={
            percent: (f"{target}_lo{percent}", f"{target}_hi{percent}") for percent in LEVELS
        },
    )


def name_probability(name: str) -> str:
    """Return the name of the column with a class's probability."""
    return f"p_{name}"


def _list_names(config: Config, table: DataTable, targets: Iterable[str]) -> Iterator[str]:
    """List all columns that a regression run may write.

    Intervals are among them even if it has none: a search trains its best settings again from
    several seeds, and those runs have intervals.
    """
    data = config.data
    yield from (SERIES, ROW)
    yield from (FOLD,) if data.split.walk_forward is not None else ()
    if data.time_column in table.column_names:  # another check refuses a missing column
        yield TIME
    yield from (STEP,) if data.horizon else ()
    quantiles = config.train.quantiles if config.train.loss == "quantile" else ()
    for target in targets:
        names = name_columns(target, quantiles)
        yield from (names.truth, names.predicted, *names.quantiles)
        yield from (bound for pair in names.intervals.values() for bound in pair)


def refuse_clashes(config: Config, table: DataTable, roles: Roles) -> None:
    """Refuse targets whose columns of predictions would have the same name."""
    if config.data.task != "regress":
        return  # classes have fixed names, and none of the data's columns is written
    duplicate = find_duplicate_name(_list_names(config, table, roles.targets))
    if not duplicate:
        return
    if duplicate in roles.targets:
        raise UserError(
            f'the target "{duplicate}" has the name of another column of predictions.parquet; '
            "rename it, or leave it out of data.targets (or add it to data.ignore)"
        )
    raise UserError(
        f'two columns of predictions.parquet would be named "{duplicate}"; give train.quantiles '
        "that differ in their first six digits"
    )


def find_duplicate_name(names: Iterable[str]) -> str | None:
    """Return the first name that occurs more than once."""
    return next((name for name, count in Counter(names).items() if count > 1), None)


class PhysicalPredictions(NamedTuple):
    """Predicted numbers in physical units, as float64."""

    point: Floats
    """[N, H, C]"""
    quantiles: Floats | None = None
    """[N, H, C, Q]"""
    intervals: Mapping[str, tuple[Floats, Floats]] = {}
    """Lower and upper bounds by level, each [N, H, C]"""
    truth: Floats | None = None
    """[N, H, C], where it is known"""


@dataclass(frozen=True)
class WindowPositions:
    """The positions of windows among the rows of all series."""

    signature: Signature
    index: SeriesIndex
    starts: Ints
    """[N]: the first rows of the windows"""
    time: Times | None
    """The times of all rows, or of some from `first_row` on"""
    first_row: int = 0


def to_physical(
    scaled: npt.NDArray[Any],
    signature: Signature,
    scaler: Scaler,
    half_widths: Mapping[str, npt.NDArray[Any]] | None = None,
    truth: npt.NDArray[Any] | None = None,
    factor: npt.NDArray[Any] | None = None,
) -> PhysicalPredictions:
    """Return scaled predictions [N, H, C, Q] and scaled half-widths [H, C] in physical units.
    Half-widths are multiplied by `factor` [N, 1, C], the relative size of each window's series.

    A scaled value is exact to float32 of its distance from the centre; in physical units, float32
    has no room for that in a column that lies far from zero.
    """
    size = np.array([scaler.size[name] for name in signature.targets])
    shift = np.array([scaler.shift[name] for name in signature.targets])
    values = scaled.astype(np.float64)
    point = select_median(values, signature.quantiles)
    by_series = 1.0 if factor is None else factor
    edges = signature.output_range or (-np.inf, np.inf)

    def limit(values: Floats) -> Floats:  # scaled ones are limited but for rounding, intervals not
        return values.clip(*edges)

    return PhysicalPredictions(
        point=limit(point * size + shift),
        quantiles=limit(values * size[:, None] + shift[:, None]) if signature.quantiles else None,
        intervals={
            level: (limit((point - width) * size + shift), limit((point + width) * size + shift))
            for level, width in (
                (level, width * by_series) for level, width in (half_widths or {}).items()
            )
        },
        truth=None if truth is None else truth.astype(np.float64) * size + shift,
    )


def list_number_columns(values: PhysicalPredictions, signature: Signature) -> Iterator[Column]:
    """Yield truths, predictions, quantiles and intervals, target by target."""
    for i, target in enumerate(signature.targets):
        names = name_columns(target, signature.quantiles)
        if values.truth is not None:
            yield names.truth, values.truth[..., i].ravel()
        yield names.predicted, values.point[..., i].ravel()
        if values.quantiles is not None:
            for q, name in enumerate(names.quantiles):
                yield name, values.quantiles[..., i, q].ravel()
        for level, bounds in values.intervals.items():
            for name, bound in zip(names.intervals[level], bounds, strict=True):
                yield name, bound[..., i].ravel()


def list_class_columns(
    probabilities: npt.NDArray[Any],
    classes: tuple[str, ...],
    truth: npt.NDArray[Any] | None = None,
) -> Iterator[Column]:
    """Yield the label where it is known, the likeliest class, and the probability of each.

    `probabilities` are [N * H, K], the numbers of the true classes [N * H].
    """
    if truth is not None:
        yield LABEL, _name_classes(truth, classes)
    yield PREDICTED, _name_classes(probabilities.argmax(axis=1), classes)
    for i, name in enumerate(classes):
        yield name_probability(name), probabilities[:, i]


def _name_classes(numbers: npt.NDArray[Any], classes: tuple[str, ...]) -> pa.Array:
    coded = pa.DictionaryArray.from_arrays(numbers.astype(np.int32), list(classes))
    return coded.cast(pa.string())


def build_prediction_table(positions: WindowPositions, columns: Iterable[Column]) -> pa.Table:
    """Return the table of predictions of these windows: series, row, time and step, then
    `columns`."""
    signature, index, starts = positions.signature, positions.index, positions.starts
    steps = signature.steps_out
    owner = np.repeat(np.searchsorted(index.offsets, starts, side="right") - 1, steps)
    rows = (starts[:, None] + signature.lead + np.arange(steps)).ravel()
    names = pa.DictionaryArray.from_arrays(owner.astype(np.int32), list(index.series_names))
    table: list[Column] = [(SERIES, names), (ROW, index.number_rows(rows, owner))]
    if positions.time is not None:
        table.append((TIME, _compute_times(positions, rows, owner)))
    if signature.horizon:
        step = np.tile(np.arange(1, steps + 1, dtype=np.int32), len(starts))
        table.append((STEP, step))
    table += columns
    if duplicate := find_duplicate_name(name for name, _ in table):
        raise UserError(
            f'two columns of the predictions would be named "{duplicate}"; rename the target and '
            "train the model again"
        )
    return pa.table(dict(table))


def _compute_times(positions: WindowPositions, rows: Ints, owner: Ints) -> pa.Array:
    """Return each row's time; rows past a series' end count on by its usual step."""
    assert positions.time is not None
    known = np.minimum(rows, positions.index.offsets[1:][owner] - 1)
    times, ahead = positions.time[known - positions.first_row], rows - known
    step = positions.signature.step or 0.0
    if positions.index.has_dates:
        return pa.array(times + ahead * round(step * MICROSECONDS)).cast(pa.timestamp("us"))
    return pa.array(times + ahead * step)


class Band(NamedTuple):
    """The columns of a lower and an upper bound of a target, and their label."""

    low: str
    high: str
    label: str


@dataclass(frozen=True)
class PredictionShape:
    """The columns of a table of predictions, and what they say about the run that wrote it."""

    schema: pa.Schema

    @cached_property
    def columns(self) -> tuple[str, ...]:
        return tuple(self.schema.names)

    @cached_property
    def targets(self) -> tuple[str, ...]:
        """The numeric targets; empty for classes.

        Where true values are known, only columns that have some are targets: a column named
        `load_predicted` may be a target as well.
        """
        if self.classes:
            return ()
        ending = f"_{PREDICTED}"
        names = [name.removesuffix(ending) for name in self.columns if name.endswith(ending)]
        return tuple(name for name in names if name in self.columns) or tuple(names)

    @cached_property
    def classes(self) -> tuple[str, ...]:
        """The classes, in the order of their columns; empty for numbers."""
        if PREDICTED not in self.columns:
            return ()
        first = self.columns.index(PREDICTED) + 1
        prefix = name_probability("")
        return tuple(name.removeprefix(prefix) for name in self.columns[first:])

    @property
    def is_forecast(self) -> bool:
        """Whether windows predict rows ahead; with horizon 0 each predicts its last row."""
        return STEP in self.columns

    @property
    def has_time(self) -> bool:
        return TIME in self.columns

    @property
    def has_dates(self) -> bool:
        return self.has_time and pa.types.is_timestamp(self.schema.field(TIME).type)

    @property
    def x_name(self) -> str:
        """The name of the horizontal axis: row, time, or empty for dates."""
        return ROW if not self.has_time else "" if self.has_dates else TIME

    @property
    def x_size(self) -> float:
        """The divisor of x for a plot: dates are read in microseconds and drawn in seconds."""
        return MICROSECONDS if self.has_dates else 1.0

    def has_truth(self, target: str) -> bool:
        """Whether the true values of a target, or of the classes (""), are known."""
        return (target or LABEL) in self.columns

    def find_bands(self, target: str) -> list[Band]:
        """Return pairs of quantiles, else intervals, of a target, the widest first."""
        pattern = re.compile(re.escape(target) + r"_q([\d.]+)")
        matches = [match for name in self.columns if (match := pattern.fullmatch(name))]
        # a column that has a prediction of its own is another target
        matches = [match for match in matches if f"{match[0]}_{PREDICTED}" not in self.columns]
        matches.sort(key=lambda match: float(match[1]))
        if len(matches) > 1:
            pairs = list(zip(matches, matches[::-1], strict=True))[: len(matches) // 2]
            return [
                Band(low[0], high[0], f"quantiles {low[1]} to {high[1]} %") for low, high in pairs
            ]
        intervals = name_columns(target).intervals
        return [
            Band(low, high, f"{level} % interval")
            for level, (low, high) in sorted(intervals.items(), reverse=True)
            if low in self.columns and f"{low}_{PREDICTED}" not in self.columns
        ]

    def list_columns(self, target: str, *, bands: bool = False) -> list[str]:
        """Return the columns that the errors of a target, or of the classes (""), need."""
        if self.classes:
            label = [LABEL] if self.has_truth("") else []
            return [*label, PREDICTED, *map(name_probability, self.classes)]
        truth = [target] if self.has_truth(target) else []
        edges = [name for band in self.find_bands(target) for name in (band.low, band.high)]
        return [*truth, name_columns(target).predicted, *(edges if bands else ())]


@dataclass(frozen=True)
class Predictions:
    """Rows of a table of predictions: all, an even sample of very many, or a group of rows."""

    shape: PredictionShape
    """The shape of the whole table, also where only some of its columns were read"""
    table: pa.Table
    """The columns that were read, without the series column"""
    names: tuple[str, ...]
    """The names of the series"""
    codes: Array
    """The position in `names` of each row's series"""
    sampled: bool = False

    def __getitem__(self, name: str) -> Array:
        return np.asarray(self.table.column(name).to_numpy())

    def __len__(self) -> int:
        return int(self.table.num_rows)

    def read_x(self) -> Array:
        """Return the time of every row, in microseconds where it is a date, or the row number."""
        if not self.shape.has_time:
            return self[ROW].astype(float)
        time = self[TIME]
        if self.shape.has_dates:
            return time.astype("datetime64[us]").astype(np.int64).astype(float)
        return time.astype(float)

    def read_truth(self, target: str) -> Array:
        """Return the true values of a target, NaN where they are not known."""
        if not self.shape.has_truth(target):
            return np.full(len(self), np.nan)
        return self[target].astype(float)

    def read_predicted(self, target: str) -> Array:
        """Return the predicted values of a target."""
        return self[name_columns(target).predicted].astype(float)

    def read_errors(self, target: str) -> Array:
        """Return the errors of a target, predicted less true value; for classes (""), the log-
        loss."""
        if not self.shape.classes:
            return self.read_predicted(target) - self.read_truth(target)
        return np.asarray(-np.log(np.maximum(self.read_probability(), MIN_PROBABILITY)))

    def read_classes(self, column: str) -> Array:
        """Return the numbers of the classes in a column, LABEL or PREDICTED; -1 for others."""
        coded = self.table.column(column).combine_chunks().dictionary_encode()
        if isinstance(coded, pa.ChunkedArray):
            coded = coded.combine_chunks()
        numbers = {name: number for number, name in enumerate(self.shape.classes)}
        known = [numbers.get(name, -1) for name in coded.dictionary.to_pylist()]
        return np.asarray(np.array(known or [-1])[coded.indices.to_numpy(zero_copy_only=False)])

    def read_probability(self) -> Array:
        """Return the probability of the true class, or where labels are missing of the predicted
        one; NaN for a class that the model does not know."""
        numbers = self.read_classes(LABEL if self.shape.has_truth("") else PREDICTED)
        result = np.full(len(self), np.nan)
        for number, name in enumerate(self.shape.classes):
            rows = numbers == number
            result[rows] = self[name_probability(name)][rows]
        return result

    def find_starts(self) -> Array:
        """Return the first predicted row of each row's window."""
        return np.asarray(self[ROW] - self[STEP] + 1 if self.shape.is_forecast else self[ROW])

    def find_windows(self) -> Array:
        """Return the first row of every window, with the number of rows at the end."""
        is_first = self[STEP] == 1 if self.shape.is_forecast else np.ones(len(self), dtype=bool)
        return np.append(np.flatnonzero(is_first), len(self))

    def compute_errors(self, targets: Sequence[str]) -> Array:
        """Return the absolute error of each row, NaN where the truth is missing and infinite where
        the prediction is no number; of several targets, the mean of their errors, each in relation
        to the average of that target."""
        total, count = np.zeros(len(self)), np.zeros(len(self))
        for target in targets:
            truth, predicted = self.read_truth(target), self.read_predicted(target)
            known = np.isfinite(truth)
            error = np.where(np.isfinite(predicted), np.abs(predicted - truth), np.inf)
            finite = error[known & np.isfinite(error)]
            average = float(finite.mean()) if len(targets) > 1 and len(finite) else 1.0
            total[known] += error[known] / (average or 1.0)
            count += known
        with np.errstate(invalid="ignore"):
            return np.asarray(np.where(count > 0, total / count, np.nan))


class RowGroup(NamedTuple):
    """The series of a group of rows, and its range of x."""

    number: int
    series: frozenset[int]
    low: float
    high: float


@dataclass(frozen=True, eq=False)
class PredictionFile:
    """A file of predictions that is read group by group."""

    path: Path
    shape: PredictionShape
    names: tuple[str, ...]
    """The names of the series, in the order of the file"""
    groups: tuple[RowGroup, ...]
    num_rows: int

    @property
    def range(self) -> tuple[float, float]:
        """The first and the last x of all series."""
        lows, highs = ([group.low for group in self.groups], [group.high for group in self.groups])
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
        always = [name for name in (SERIES, ROW, TIME, STEP) if name in self.shape.columns]
        wanted = list(dict.fromkeys([*always, *columns]))
        with _open_parquet(self.path) as file:
            for group in self.groups:
                if series is not None and series not in group.series:
                    continue
                if group.high < between[0] or group.low > between[1]:
                    continue
                table = file.read_row_group(group.number, columns=wanted)
                yield _index_series(table, self.shape, self.names)


def read_predictions(path: Path, *, limit: int = MAX_VALUES) -> Predictions:
    """Return the predictions of a file, or an even sample where it has more values than `limit`; a
    UserError names a file that is damaged."""
    with _explain_damage(path):
        with _open_parquet(path) as file:
            shape = PredictionShape(file.schema_arrow)
            stride = max(-(-file.metadata.num_rows * len(shape.targets) // limit), 1)
            table = file.read_row_groups(list(range(0, file.num_row_groups, stride)))
        table = table.combine_chunks()
        return _index_series(table, shape, _list_series(table), sampled=stride > 1)


def open_predictions(path: Path) -> PredictionFile:
    """Return a file of predictions, whose groups of rows are listed once as long as it does not
    change; a UserError names a file that is damaged."""
    with _explain_damage(path):
        state = path.stat()
        return _list_groups(os.fspath(path), state.st_mtime_ns, state.st_size)


@lru_cache(MAX_FILES)
def _list_groups(name: str, _changed: int, _size: int) -> PredictionFile:
    path, names, groups = Path(name), dict[str, int](), []
    with _open_parquet(path) as file:
        shape = PredictionShape(file.schema_arrow)
        x_column = TIME if shape.has_time else ROW
        for number in range(file.num_row_groups):
            table = file.read_row_group(number, columns=[SERIES, x_column])
            series = {names.setdefault(name, len(names)) for name in _list_series(table)}
            x = _index_series(table, shape, tuple(names)).read_x()
            ends = (np.nanmin(x), np.nanmax(x)) if np.isfinite(x).any() else (np.inf, -np.inf)
            groups.append(RowGroup(number, frozenset(series), *map(float, ends)))
        return PredictionFile(path, shape, tuple(names), tuple(groups), file.metadata.num_rows)


def _list_series(table: pa.Table) -> tuple[str, ...]:
    """Return the series of a table, in the order in which they come."""
    return tuple(str(name) for name in table.column(SERIES).unique().to_pylist())


def _index_series(
    table: pa.Table, shape: PredictionShape, names: tuple[str, ...], *, sampled: bool = False
) -> Predictions:
    """Return a table whose series are numbers, the positions of their names in `names`."""
    numbers = {name: number for number, name in enumerate(names)}
    codes = [np.empty(0, dtype=np.int64)]
    for chunk in table.column(SERIES).chunks:
        coded = chunk if pa.types.is_dictionary(chunk.type) else chunk.dictionary_encode()
        known = [numbers.get(str(name), -1) for name in coded.dictionary.to_pylist()]
        codes.append(np.array(known, dtype=np.int64)[coded.indices.to_numpy()])
    joined = np.concatenate(codes)
    return Predictions(shape, table.drop_columns([SERIES]), names, joined, sampled)


def chain_windows(firsts: Array, length: int, last: float = -np.inf) -> list[int]:
    """Return the first rows, out of ascending ones, that are at least `length` rows apart, the
    earliest first; `last` is the first row of a window before them."""
    firsts = firsts[firsts >= last + length]
    if not bool((np.diff(firsts) < length).any()):  # as windows of one row, of which are millions
        return list(firsts.tolist())
    following = np.searchsorted(firsts, firsts + length).tolist()
    chosen, place = list[int](), 0
    while place < len(firsts):
        chosen.append(place)
        place = following[place]
    return list(firsts[chosen].tolist())


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


def _open_parquet(path: Path) -> Any:
    import pyarrow.parquet as pq  # takes 15 ms, and a server writes no such file

    return pq.ParquetFile(path)
