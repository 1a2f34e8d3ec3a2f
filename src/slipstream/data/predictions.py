"""The columns of a table of predictions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
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

SERIES, ROW, FOLD, TIME, STEP = "series", "row", "fold", "time", "step"
LABEL, PREDICTED = "label", "predicted"
"""Classes: the true one and the likeliest"""
LEVELS = {"80": 0.80, "95": 0.95}
"""Levels of prediction intervals, by the percentage in their columns' names"""


class PredictionColumns(NamedTuple):
    """The columns of one numeric target."""

    truth: str
    predicted: str
    quantiles: tuple[str, ...]
    """In the order of the levels"""
    intervals: dict[str, tuple[str, str]]
    """By level: from, to"""


def name_columns(target: str, quantiles: Iterable[float] = ()) -> PredictionColumns:
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
        mine = name_columns(target, quantiles)
        yield from (mine.truth, mine.predicted, *mine.quantiles)
        yield from (bound for pair in mine.intervals.values() for bound in pair)


def refuse_clashes(config: Config, table: DataTable, roles: Roles) -> None:
    """Refuse targets of which one would be written over another's column of predictions."""
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


Column = tuple[str, Any]


class PhysicalPredictions(NamedTuple):
    """Predicted numbers in physical units, as float64."""

    point: Floats
    """[N, H, C]"""
    quantiles: Floats | None = None
    """[N, H, C, Q]"""
    intervals: Mapping[str, tuple[Floats, Floats]] = {}
    """By level: from, to, each [N, H, C]"""
    truth: Floats | None = None
    """[N, H, C], where it is known"""


@dataclass(frozen=True)
class WindowPlaces:
    """Where windows lie among the rows of all series."""

    signature: Signature
    index: SeriesIndex
    starts: Ints
    """[N]: their first rows"""
    time: Times | None
    """The times of all rows, or of some from `first_row` on"""
    first_row: int = 0


def to_physical(
    scaled: npt.NDArray[Any],
    signature: Signature,
    scaler: Scaler,
    half_widths: Mapping[str, npt.NDArray[Any]] | None = None,
    truth: npt.NDArray[Any] | None = None,
) -> PhysicalPredictions:
    """Return scaled predictions [N, H, C, Q] and scaled half-widths [H, C] in physical units.

    A scaled value is exact to float32 of its distance from the centre; in physical units, float32
    has no room for that in a column that lies far from zero.
    """
    size = np.array([scaler.size[name] for name in signature.targets])
    shift = np.array([scaler.shift[name] for name in signature.targets])
    values = scaled.astype(np.float64)
    point = select_median(values, signature.quantiles)
    edges = signature.output_range or (-np.inf, np.inf)

    def limit(values: Floats) -> Floats:  # scaled ones are limited but for rounding, intervals not
        return values.clip(*edges)

    return PhysicalPredictions(
        point=limit(point * size + shift),
        quantiles=limit(values * size[:, None] + shift[:, None]) if signature.quantiles else None,
        intervals={
            level: (limit((point - width) * size + shift), limit((point + width) * size + shift))
            for level, width in (half_widths or {}).items()
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


def build_prediction_table(places: WindowPlaces, columns: Iterable[Column]) -> pa.Table:
    """Return the table of these windows: series, row, time and step, then the columns."""
    signature, index, starts = places.signature, places.index, places.starts
    steps = signature.steps_out
    owner = np.repeat(np.searchsorted(index.offsets, starts, side="right") - 1, steps)
    rows = (starts[:, None] + signature.lead + np.arange(steps)).ravel()
    names = pa.DictionaryArray.from_arrays(owner.astype(np.int32), list(index.series_names))
    every: list[Column] = [
        (SERIES, names),
        (ROW, index.number_rows(rows, owner)),
    ]
    if places.time is not None:
        every.append((TIME, _compute_times(places, rows, owner)))
    if signature.horizon:
        step = np.tile(np.arange(1, steps + 1, dtype=np.int32), len(starts))
        every.append((STEP, step))
    every += columns
    if duplicate := find_duplicate_name(name for name, _ in every):
        raise UserError(
            f'two columns of the predictions would be named "{duplicate}"; rename the target and '
            "train the model again"
        )
    return pa.table(dict(every))


def _compute_times(places: WindowPlaces, rows: Ints, owner: Ints) -> pa.Array:
    """Return each row's time; rows past a series' end count on by its usual step."""
    assert places.time is not None
    known = np.minimum(rows, places.index.offsets[1:][owner] - 1)
    times, ahead = places.time[known - places.first_row], rows - known
    step = places.signature.step or 0.0
    if places.index.has_dates:
        return pa.array(times + ahead * round(step * MICROSECONDS)).cast(pa.timestamp("us"))
    return pa.array(times + ahead * step)
