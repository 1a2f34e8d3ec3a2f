"""Scaling of columns, fitted on training rows only.

Physical values are float64 until they are scaled, and float32 from then on: a column is rounded
once, when it is centred, so neither where it lies nor what else the file holds costs it digits.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from slipstream.base.errors import LeaveOut, Setting, Text, UserError
from slipstream.base.statistics import Moments
from slipstream.config import Data, Signature
from slipstream.data.series import Flags, Floats, Ints, RawSeries, SeriesIndex

Values = npt.NDArray[np.float32]
BLOCK_ROWS = 1 << 20
"""The number of rows scaled at a time"""
SAMPLE_ROWS = 10_000
"""The number of training rows sampled to judge the usual differences in a column"""
LARGEST_LOSS = 0.01
"""The largest share of the distance between usual values that rounding a scaled column may lose"""
FIELDS = ("shift", "size", "deviation", "low", "high")
CONSTANT = 1e-6
"""Spread of a series, relative to its level, up to which it counts as constant"""
MIN_CHANGES = 8
"""Changes from season to season that a series is scaled by; one that has fewer is scaled by its
deviation"""
LEAST_CHANGE = 0.01
"""The smallest size by changes, relative to the deviation: where seasons repeat exactly, the rest
is rounding"""


class SeriesScales(NamedTuple):
    """How each series of some data is scaled (`data.scale_by = "series"`), relative to the scaling
    of the whole table: table-scaled = factor * series-scaled + offset."""

    factor: Floats
    """[series, columns], in the order of `order_columns`"""
    offset: Floats
    """[series, columns]"""


class ScaledRows(NamedTuple):
    """All series end to end, scaled."""

    values: Values
    """[rows, columns]: inputs first, targets last, columns with both roles between"""
    static: Values | None
    """[series, static columns]"""
    scales: SeriesScales | None = None
    """The scale of each series; None where the whole table has one"""


@dataclass(frozen=True)
class Scaler:
    """scaled = (physical - shift) / size, column by column."""

    kind: str
    shift: dict[str, float]
    size: dict[str, float]
    deviation: dict[str, float]
    """Each column's standard deviation over the training rows, whatever the kind"""
    low: dict[str, float]
    high: dict[str, float]
    """Each column's range over the training rows"""

    series: tuple[str, ...] = ()
    """With `data.scale_by = "series"`: the series of the training data"""
    series_shift: dict[str, list[float]] = field(default_factory=dict)
    series_size: dict[str, list[float]] = field(default_factory=dict)
    """By column that is scaled by series, what each series is scaled by; `shift` and `size` scale
    the other columns, and the units of predictions and errors in all of them"""
    season: int = 0
    """With `data.scale = "seasonal"`: the rows of a season; else 0"""

    def apply(self, name: str, column: Floats, out: Values) -> None:
        """Write a column's values, scaled by `shift` and `size`, to `out`."""
        write_scaled(name, column, out, np.array(self.shift[name]), np.array(self.size[name]))

    def select_series(self, name: str) -> Scaler | None:
        """Return the scaler of one series of the training data; None of another series."""
        if name not in self.series:
            return None
        place = self.series.index(name)
        return self.replace_scale(
            {column: values[place] for column, values in self.series_shift.items()},
            {column: values[place] for column, values in self.series_size.items()},
        )

    def fit_series(self, names: Sequence[str], rows: Floats) -> Scaler:
        """Return the scaler of a new series, from its first rows [rows, columns] of these names."""
        shift, size = {}, {}
        for i, name in enumerate(names):
            if name in self.series_shift:
                moments, owners = SeriesMoments(1), np.zeros(len(rows), dtype=np.int64)
                moments.add(rows[:, i], owners)
                if self.season:
                    changes = np.abs(rows[self.season :, i] - rows[: -self.season, i])
                    moments.add_changes(changes, owners[: len(changes)])
                scale = moments.to_scale(self.kind, self.shift[name], self.size[name])
                shift[name], size[name] = float(scale[0][0]), float(scale[1][0])
        return self.replace_scale(shift, size)

    def replace_scale(self, shift: Mapping[str, float], size: Mapping[str, float]) -> Scaler:
        """Return a scaler with another shift and size of some columns."""
        return replace(self, shift=self.shift | dict(shift), size=self.size | dict(size))

    def scales_alike(self, other: Scaler) -> bool:
        """Return whether another scaler has the same series, each with the same scale."""
        if self.series != other.series or self.series_size.keys() != other.series_size.keys():
            return False
        return all(
            np.allclose(self.series_size[name], other.series_size[name], rtol=1e-6, atol=0)
            and np.all(
                np.abs(np.subtract(self.series_shift[name], other.series_shift[name]))
                <= 1e-6 * np.array(self.series_size[name])
            )
            for name in self.series_size
        )

    def select(self, columns: Collection[str]) -> Self:
        """Return a scaler of those of these columns that this one has."""
        names = (*FIELDS, "series_shift", "series_size")
        fields: dict[str, Any] = {attribute: getattr(self, attribute) for attribute in names}
        for attribute, values in fields.items():
            fields[attribute] = {name: values[name] for name in columns if name in values}
        return replace(self, **fields)


def write_scaled(name: str, column: Floats, out: Values, shift: Floats, size: Floats) -> None:
    """Write a column's values, scaled by one number or by one for each row, to `out`."""
    for begin in range(0, len(column), BLOCK_ROWS):
        block = slice(begin, begin + BLOCK_ROWS)
        by = (shift, size) if not shift.ndim else (shift[block], size[block])
        scaled = column[block] - by[0]
        scaled /= by[1]
        with np.errstate(over="ignore"):
            single = scaled.astype(np.float32)
        out[block] = single
        if np.isinf(single).any():
            raise UserError(
                f'column "{name}" has a value so far from the training rows that it cannot be '
                "scaled; correct it, or leave it empty and set data.missing"
            )


def merge_scalers(kind: str, parts: Iterable[Scaler]) -> Scaler:
    """Return one scaler for the columns of all parts; later parts win."""
    merged = Scaler(kind, {}, {}, {}, {}, {})
    for part in parts:
        for attribute in FIELDS:
            getattr(merged, attribute).update(getattr(part, attribute))
    return merged


def list_series_columns(signature: Signature) -> tuple[str, ...]:
    """Return the columns that `data.scale_by = "series"` scales: the inputs, without those that are
    known ahead, whose values mean the same in each series, and without labels. Other targets are
    not: a new series has none."""
    left_out = {*signature.future, *(signature.targets if signature.classes else ())}
    return tuple(name for name in signature.inputs if name not in left_out)


def make_identity(name: str, *, high: float) -> Scaler:
    """Return a scaler that leaves a column with values from 0 to `high` as it is."""
    return Scaler("none", {name: 0.0}, {name: 1.0}, {name: 1.0}, {name: 0.0}, {name: high})


def order_columns(signature: Signature) -> tuple[str, ...]:
    """Return the columns of a series: inputs first, targets last, columns with both roles
    between."""
    return tuple(dict.fromkeys((*signature.inputs, *signature.targets)))


def fit_scaler(
    raw: RawSeries, signature: Signature, training: Flags, data: Data, known: Scaler | None
) -> tuple[Scaler, ScaledRows]:
    """Fit a scaler on the `training` rows, except for columns of the scaler `known`, and scale all
    rows.

    The numbers of classes are not scaled.
    """
    label = signature.targets[0] if signature.classes else None
    values = np.empty((raw.index.num_rows, len(raw.column_names)), dtype=np.float32)
    parts = []
    trained = np.logical_or.reduceat(training, raw.index.offsets[:-1])
    fit = make_series_fit(raw.index, signature, data, trained, known)
    names = order_columns(signature)
    with ThreadPoolExecutor(1) as reader:  # the next column is read while one is in use
        reading = reader.submit(raw.read_column, names[0])
        for i, name in enumerate(names):
            column = reading.result()
            if name != names[-1]:
                reading = reader.submit(raw.read_column, names[i + 1])
            by_series = fit is not None and name in fit.columns
            if name == label:
                part = make_identity(name, high=len(signature.classes) - 1.0)
            elif known is not None and name in known.shift:
                part = known.select((name,))
            else:
                part = fit_column(name, column, training, kind=data.scale, check=not by_series)
            if fit is not None and by_series:
                fit.add(name, column, training)
                part = fit.finish(name, part, data.scale_by, known)
            if by_series and fit is not None and data.scale_by == "series":
                fit.apply(name, column, values[:, i])
            else:
                part.apply(name, column, values[:, i])
            parts.append(part)
            del column  # before the one after the next is read
    parts += _fit_static(raw.static, signature, trained, data.scale)
    scaler = merge_scalers(data.scale, parts)
    scales = None
    if fit is not None and data.scale_by == "series":
        scaler, scales = fit.to_scaler(scaler), fit.relate_to(scaler)
    return scaler, ScaledRows(values, scale_static(raw.static, scaler, signature), scales)


def complete_scaler(
    scaler: Scaler, signature: Signature, static: Floats, trained: Flags, known: Scaler | None
) -> Scaler:
    """Return a scaler of streamed columns with the columns of `known`, statics and the label added.

    Statics are fitted on the series that have a training row (`trained`).
    """
    parts = [scaler] if known is None else [scaler, known.select(scaler.shift)]
    parts += _fit_static(static, signature, trained, scaler.kind)
    if signature.classes:
        parts.append(make_identity(signature.targets[0], high=len(signature.classes) - 1.0))
    return merge_scalers(scaler.kind, parts)


def _fit_static(static: Floats, signature: Signature, trained: Flags, kind: str) -> list[Scaler]:
    names = enumerate(signature.static)
    return [fit_column(name, static[:, i], trained, kind=kind) for i, name in names]


def scale_rows(raw: RawSeries, scaler: Scaler, signature: Signature) -> ScaledRows:
    """Return the scaled rows of the series; targets without a column are NaN."""
    columns = order_columns(signature)
    values = np.full((raw.index.num_rows, len(columns)), np.nan, dtype=np.float32)
    fit = None
    if scaler.series:
        new = np.zeros(len(raw.index.series_names), dtype=bool)
        fit = SeriesFit(raw.index, signature, scaler.kind, new, scaler, scaler.season)
    for i, name in enumerate(columns):
        if name not in raw.column_names:
            continue
        column = raw.read_column(name)
        if fit is not None and name in fit.columns:
            fit.add(name, column, np.zeros(len(column), dtype=bool))
            fit.finish(name, scaler, "series", scaler)
            fit.apply(name, column, values[:, i])
        else:
            scaler.apply(name, column, values[:, i])
    scales = None if fit is None else fit.relate_to(scaler)
    return ScaledRows(values, scale_static(raw.static, scaler, signature), scales)


def scale_static(static: Floats, scaler: Scaler, signature: Signature) -> Values | None:
    if not signature.static:
        return None
    scaled = np.empty(static.shape, dtype=np.float32)
    for i, name in enumerate(signature.static):
        scaler.apply(name, static[:, i], scaled[:, i])
    return scaled


def fit_column(name: str, column: Floats, rows: Flags, *, kind: str, check: bool = True) -> Scaler:
    """Fit a column's shift and size on the known values of `rows`; a constant column is refused,
    and with `check`, one that loses digits."""
    rows = rows & ~np.isnan(column)
    statistics = RunningStatistics()
    for begin in range(0, len(column), BLOCK_ROWS):
        block = slice(begin, begin + BLOCK_ROWS)
        values, used = column[block], rows[block]
        statistics.add(name, values if used.all() else values[used])
    scaler = statistics.to_scaler(kind)
    if not check:
        return scaler
    selected = np.flatnonzero(rows)
    refuse_lost_digits(name, column[selected[:: choose_sample_stride(len(selected))]], scaler)
    return scaler


def choose_sample_stride(num_rows: int) -> int:
    """Return the distance between sampled training rows."""
    return max(-(-num_rows // SAMPLE_ROWS), 1)


def refuse_lost_digits(name: str, sample: Floats, scaler: Scaler) -> None:
    """Refuse a column of which float32 keeps too few digits once it is scaled.

    This happens where a few values, or the distance from zero of an unscaled column, are so large
    beside the usual differences that rounding takes a part of these.
    """
    usual = float(np.median(sample))
    distance = np.abs(sample - usual)
    if not distance.any():
        return
    usual_distance = np.median(distance[distance > 0])
    shift, size = scaler.shift[name], scaler.size[name]
    scaled = ((sample - shift) / size).astype(np.float32)
    lost = np.abs(scaled.astype(np.float64) * size + shift - sample)
    if (lost <= LARGEST_LOSS * np.maximum(usual_distance, distance)).all():
        return
    remedy: Text = "set " + Setting({"data.scale": "standard"})
    if scaler.kind != "none":
        remedy = (
            "correct the values that lie far from the others, or leave them empty and set "
            "data.missing"
        )
    raise UserError(
        f'column "{name}": its training rows go from {scaler.low[name]:.10g} to '
        f"{scaler.high[name]:.10g}, but half of those that differ from the median, {usual:.10g}, "
        f"are within {usual_distance:.3g} of it; of their differences, scaled by "
        f'data.scale = "{scaler.kind}", float32 keeps too few digits: ' + remedy
    )


@dataclass(frozen=True)
class RunningStatistics:
    """Statistics of the training rows by column, updated block by block."""

    moments: dict[str, Moments] = field(default_factory=dict)

    def add(self, name: str, values: Floats) -> None:
        if len(values):
            self.moments.setdefault(name, Moments()).add(values)

    def to_scaler(self, kind: str) -> Scaler:
        scaler = Scaler(kind, {}, {}, {}, {}, {})
        for name, moments in self.moments.items():
            low, deviation = moments.low, moments.deviation
            scaler.low[name], scaler.high[name] = low, moments.high
            shift, size = 0.0, 1.0
            if kind != "none" and not (moments.high > low and deviation):  # may underflow
                raise UserError(
                    f'column "{name}" is {low:g} in every training row, so it cannot be scaled; '
                    + LeaveOut("leave it out of data.inputs", name, "data.inputs")
                    + " (or add it to data.ignore), or set "
                    + Setting({"data.scale": "none"})
                )
            if kind != "none":
                by_range = kind == "minmax"
                shift = low if by_range else moments.mean
                size = moments.high - low if by_range else deviation
            scaler.shift[name], scaler.size[name], scaler.deviation[name] = shift, size, deviation
        return scaler


class SeriesFit:
    """Fits the scale of each series to its training rows; a series without any, as a new one, to
    its first context. Columns come one after the other, each in blocks of rows."""

    def __init__(
        self,
        index: SeriesIndex,
        signature: Signature,
        kind: str,
        trained: Flags,
        known: Scaler | None,
        season: int = 0,
    ) -> None:
        """`trained` marks the series that have training rows; those that `known` names have their
        scale already. `season`: as in `Scaler`."""
        self.index, self.kind, self.trained, self.season = index, kind, trained, season
        self.order, self.context = order_columns(signature), signature.context
        self.columns = list_series_columns(signature)
        self.begins = index.offsets[:-1] + (0 if index.padding is None else index.padding)
        self.moments: dict[str, SeriesMoments] = {}
        self._before: dict[str, Floats] = {}
        """The values of each column in the season before the next block"""
        self.shift: dict[str, Floats] = {}
        self.size: dict[str, Floats] = {}
        places = {name: i for i, name in enumerate(known.series)} if known is not None else {}
        self.known = np.array([places.get(name, -1) for name in index.series_names])

    def find_owners(self, begin: int, end: int) -> Ints:
        """Return the series of the rows from `begin` to before `end`."""
        owners: Ints = np.searchsorted(self.index.offsets, np.arange(begin, end), side="right") - 1
        return owners

    def add(self, name: str, column: Floats, training: Flags, first_row: int = 0) -> None:
        """Add the values of a column from `first_row` on."""
        series = self.moments.setdefault(name, SeriesMoments(len(self.trained)))
        for begin in range(0, len(column), BLOCK_ROWS):
            block = slice(begin, min(begin + BLOCK_ROWS, len(column)))
            owners = self.find_owners(first_row + block.start, first_row + block.stop)
            rows = first_row + np.arange(block.start, block.stop) - self.begins[owners]
            first = (rows >= 0) & (rows < self.context)
            used = np.where(self.trained[owners], training[block], first) & ~np.isnan(column[block])
            series.add(column[block][used], owners[used])
            if self.season:
                self._add_changes(name, column[block], used, owners, first_row + block.start)

    def _add_changes(
        self, name: str, values: Floats, used: Flags, owners: Ints, first_row: int
    ) -> None:
        """Add the changes of a block's `used` values from the row one season before, in the same
        piece of a series."""
        joined = np.concatenate([self._before.get(name, values[:0]), values])
        self._before[name] = joined[-self.season :].copy()
        changes = np.abs(joined[self.season :] - joined[: -self.season])
        num_first = len(values) - len(changes)  # whose season before is not known
        used, owners = used[num_first:], owners[num_first:]
        rows, breaks = first_row + np.arange(num_first, len(values)), self.index.breaks
        begins = breaks[np.searchsorted(breaks, rows, side="right") - 1]
        begins = np.maximum(begins, self.begins[owners])
        known = used & (rows - begins >= self.season) & ~np.isnan(changes)
        self.moments[name].add_changes(changes[known], owners[known])

    def finish(self, name: str, part: Scaler, scale_by: str, known: Scaler | None) -> Scaler:
        """Compute each series' scale of a column; return the scaler of the whole column.

        A constant series is scaled by its level, or as the whole column where that is 0. With
        `"window"` the model scales each window, and all series share a scale that rounds none of
        them off: that of the smallest.
        """
        moments = self.moments.pop(name)
        shift, size, is_constant = moments.to_scale(self.kind, part.shift[name], part.size[name])
        if scale_by == "window" and known is not None and name in known.shift:
            return part
        if scale_by == "window":
            usual = size[~is_constant] if not is_constant.all() else size
            centre = {name: float(np.median(shift))}
            return replace(part, shift=centre, size={name: float(usual.min())})
        if known is not None and name in known.series_shift:
            is_known = self.known >= 0
            shift[is_known] = np.array(known.series_shift[name])[self.known[is_known]]
            size[is_known] = np.array(known.series_size[name])[self.known[is_known]]
        self.shift[name], self.size[name] = shift, size
        return part

    def apply(self, name: str, column: Floats, out: Values, first_row: int = 0) -> None:
        """Write a column's values from `first_row` on, each scaled by its series, to `out`."""
        owners = self.find_owners(first_row, first_row + len(column))
        write_scaled(name, column, out, self.shift[name][owners], self.size[name][owners])

    def to_scaler(self, scaler: Scaler) -> Scaler:
        """Return the scaler with the scale of each series."""
        return replace(
            scaler,
            season=self.season,
            series=self.index.series_names,
            series_shift={name: values.tolist() for name, values in self.shift.items()},
            series_size={name: values.tolist() for name, values in self.size.items()},
        )

    def relate_to(self, scaler: Scaler) -> SeriesScales:
        """Return the scales of the series relative to that of the whole table."""
        shape = len(self.trained), len(self.order)
        factor, offset = np.ones(shape), np.zeros(shape)
        for i, name in enumerate(self.order):
            if name in self.shift:
                factor[:, i] = self.size[name] / scaler.size[name]
                offset[:, i] = (self.shift[name] - scaler.shift[name]) / scaler.size[name]
        return SeriesScales(factor, offset)


def make_series_fit(
    index: SeriesIndex, signature: Signature, data: Data, trained: Flags, known: Scaler | None
) -> SeriesFit | None:
    """Return what fits the scale of each series; None where all have one."""
    if data.scale_by == "global":
        return None
    season = (data.period or index.infer_period() or 1) if data.scale == "seasonal" else 0
    return SeriesFit(index, signature, data.scale, trained, known, season)


class SeriesMoments:
    """Count, mean, spread, range and changes of each series' values, added block by block."""

    def __init__(self, num_series: int) -> None:
        self.count = np.zeros(num_series)
        self.changes, self.num_changes = np.zeros(num_series), np.zeros(num_series)
        """Sum and number of the absolute changes"""
        self.mean, self.squares = np.zeros(num_series), np.zeros(num_series)
        self.low, self.high = np.full(num_series, np.inf), np.full(num_series, -np.inf)

    def add(self, values: Floats, owners: Ints) -> None:
        """Add values and the series that each is of, in increasing order."""
        if not len(values):
            return
        firsts = np.flatnonzero(np.diff(owners, prepend=-1))
        series, count = owners[firsts], np.diff(firsts, append=len(owners))
        mean = np.add.reduceat(values, firsts) / count
        squares = np.add.reduceat(np.square(values - np.repeat(mean, count)), firsts)
        before = self.count[series]
        distance, total = mean - self.mean[series], before + count
        self.squares[series] += squares + np.square(distance) * before * count / total
        self.mean[series] += distance * count / total
        self.count[series] = total
        low, high = np.minimum.reduceat(values, firsts), np.maximum.reduceat(values, firsts)
        self.low[series] = np.minimum(self.low[series], low)
        self.high[series] = np.maximum(self.high[series], high)

    def add_changes(self, changes: Floats, owners: Ints) -> None:
        """Add absolute changes and the series that each is of."""
        self.changes += np.bincount(owners, weights=changes, minlength=len(self.changes))
        self.num_changes += np.bincount(owners, minlength=len(self.changes))

    def to_scale(self, kind: str, shift: float, size: float) -> tuple[Floats, Floats, Flags]:
        """Return the shift and the size of each series, and which are constant. The size of a
        constant series is its level, or where that is 0, `size`; a series without values has
        `shift` and `size`."""
        shifts = self.low if kind == "minmax" else self.mean
        sizes = self.high - self.low if kind == "minmax" else self.deviation
        is_known, level = self.count > 0, np.abs(self.mean)
        is_constant = ~(is_known & (sizes > CONSTANT * level))
        if kind == "seasonal":
            change = self.changes / np.maximum(self.num_changes, 1)
            change = np.maximum(change, LEAST_CHANGE * sizes)
            sizes = np.where(self.num_changes >= MIN_CHANGES, change, sizes)
        sizes = np.where(is_constant, level, sizes)
        return np.where(is_known, shifts, shift), np.where(sizes > 0, sizes, size), is_constant

    @property
    def deviation(self) -> Floats:
        """The standard deviation of each series; 0 without values."""
        deviation: Floats = np.sqrt(self.squares / np.maximum(self.count, 1))
        return deviation


def scale_limits(signature: Signature, scaler: Scaler) -> tuple[Values, Values] | None:
    """Return the lowest and the highest prediction, each [C, 1], scaled and rounded outwards, so
    that the limits themselves are exact in physical units."""
    if signature.output_range is None or signature.classes:
        return None
    low, high = (
        np.array(
            [[(edge - scaler.shift[name]) / scaler.size[name]] for name in signature.targets],
            dtype=np.float32,
        )
        for edge in signature.output_range
    )
    return np.nextafter(low, np.float32(-math.inf)), np.nextafter(high, np.float32(math.inf))
