"""A file of predictions, read by groups of rows: only those that a view needs, however many there
are. `open_predictions` finds once which series and times each group holds."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from slipstream.data.prediction_columns import LABEL, PREDICTED, ROW, SERIES, STEP, TIME
from slipstream.errors import UserError
from slipstream.reporting.plots.predictions import Array, Predictions
from slipstream.webapp.paths import MissingError

MOST_FILES = 8
"""Files whose groups are remembered"""


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
        ending = f"_{PREDICTED}"
        return tuple(
            name.removesuffix(ending) for name in self.shape.columns if name.endswith(ending)
        )

    @property
    def classes(self) -> tuple[str, ...]:
        """The classes, in the order of their columns."""
        if self.targets or PREDICTED not in self.shape.columns:
            return ()
        first = self.shape.columns.index(PREDICTED) + 1
        return tuple(name.removeprefix("p_") for name in self.shape.columns[first:])

    def has_truth(self, target: str) -> bool:
        """Whether the true values are known; `target` is empty for classes."""
        return (target or LABEL) in self.shape.columns

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
        with pq.ParquetFile(self.path) as file:
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
    """Return a file of predictions; what its groups hold is read once."""
    try:
        state = path.stat()
    except OSError:
        raise MissingError("there are no predictions here") from None
    try:
        return _open(os.fspath(path), state.st_mtime_ns, state.st_size)
    except (pa.ArrowException, OSError, KeyError) as error:
        raise UserError(f"{path.name}: cannot be read; it is damaged ({error})") from None


@lru_cache(MOST_FILES)
def _open(name: str, _changed: int, _size: int) -> PredictionFile:
    path, names, groups = Path(name), dict[str, int](), []
    with pq.ParquetFile(path) as file:
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
        result[mine] = part[f"p_{name}"][mine]
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
        return [*label, PREDICTED, *(f"p_{name}" for name in file.classes)]
    columns = [target] if file.has_truth(target) else []
    columns.append(f"{target}_{PREDICTED}")
    if bands:
        columns += [name for one in file.shape.find_bands(target) for name in (one.low, one.high)]
    return columns


def find_starts(part: Predictions) -> Array:
    """Return the first predicted row of each row's window."""
    return np.asarray(part[ROW] - part[STEP] + 1 if part.is_forecast else part[ROW])
