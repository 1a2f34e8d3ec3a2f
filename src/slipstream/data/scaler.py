"""Scaling of columns, fitted on training rows only.

Physical values are float64 until they are scaled, and float32 from then on: a column is rounded
once, when it is centred, so neither where it lies nor what else the file holds costs it digits.
"""

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from slipstream.base.errors import LeaveOut, Setting, Text, UserError
from slipstream.base.statistics import Moments
from slipstream.config import Data, Signature
from slipstream.data.series import Flags, Floats, RawSeries

Values = npt.NDArray[np.float32]
BLOCK_ROWS = 1 << 20
"""The number of rows scaled at a time"""
SAMPLE_ROWS = 10_000
"""The number of training rows sampled to judge the usual differences in a column"""
LARGEST_LOSS = 0.01
"""The largest share of the distance between usual values that rounding a scaled column may lose"""
FIELDS = ("shift", "size", "deviation", "low", "high")


class ScaledRows(NamedTuple):
    """All series end to end, scaled."""

    values: Values
    """[rows, columns]: inputs first, targets last, columns with both roles between"""
    static: Values | None
    """[series, static columns]"""


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

    def apply(self, name: str, column: Floats, out: Values) -> None:
        """Write a column's values, scaled, to `out`."""
        for begin in range(0, len(column), BLOCK_ROWS):
            block = slice(begin, begin + BLOCK_ROWS)
            with np.errstate(over="ignore"):
                out[block] = (column[block] - self.shift[name]) / self.size[name]
            if np.isinf(out[block]).any():
                raise UserError(
                    f'column "{name}" has a value so far from the training rows that it cannot be '
                    "scaled; correct it, or leave it empty and set data.missing"
                )

    def select(self, columns: Collection[str]) -> Self:
        """Return a scaler of those of these columns that this one has."""
        fields: dict[str, Any] = {attribute: getattr(self, attribute) for attribute in FIELDS}
        for attribute, values in fields.items():
            fields[attribute] = {name: values[name] for name in columns if name in values}
        return replace(self, **fields)


def merge_scalers(kind: str, parts: Iterable[Scaler]) -> Scaler:
    """Return one scaler for the columns of all parts; later parts win."""
    merged = Scaler(kind, {}, {}, {}, {}, {})
    for part in parts:
        for attribute in FIELDS:
            getattr(merged, attribute).update(getattr(part, attribute))
    return merged


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
    for i, name in enumerate(order_columns(signature)):
        column = raw.read_column(name)
        if name == label:
            part = make_identity(name, high=len(signature.classes) - 1.0)
        elif known is not None and name in known.shift:
            part = known.select((name,))
        else:
            part = fit_column(name, column, training, kind=data.scale)
        part.apply(name, column, values[:, i])
        parts.append(part)
        del column  # before the next one is read
    trained = np.logical_or.reduceat(training, raw.index.offsets[:-1])
    parts += _fit_static(raw.static, signature, trained, data.scale)
    scaler = merge_scalers(data.scale, parts)
    return scaler, ScaledRows(values, scale_static(raw.static, scaler, signature))


def complete_scaler(
    scaler: Scaler, signature: Signature, static: Floats, trained: Flags, known: Scaler | None
) -> Scaler:
    """Return a scaler of streamed columns with the columns of `known`, statics and the label added.
    Statics are fitted on the series that have a training row (`trained`).

    Statics are fitted on the series of which some row is `trained` on.
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
    for i, name in enumerate(columns):
        if name in raw.column_names:
            scaler.apply(name, raw.read_column(name), values[:, i])
    return ScaledRows(values, scale_static(raw.static, scaler, signature))


def scale_static(static: Floats, scaler: Scaler, signature: Signature) -> Values | None:
    if not signature.static:
        return None
    scaled = np.empty(static.shape, dtype=np.float32)
    for i, name in enumerate(signature.static):
        scaler.apply(name, static[:, i], scaled[:, i])
    return scaled


def fit_column(name: str, column: Floats, rows: Flags, *, kind: str) -> Scaler:
    """Fit a column's shift and size on the known values of `rows`; a constant column is refused."""
    rows = rows & ~np.isnan(column)
    statistics = RunningStatistics()
    for begin in range(0, len(column), BLOCK_ROWS):
        block = slice(begin, begin + BLOCK_ROWS)
        statistics.add(name, column[block][rows[block]])
    scaler = statistics.to_scaler(kind)
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
                standard = kind == "standard"
                shift = moments.mean if standard else low
                size = deviation if standard else moments.high - low
            scaler.shift[name], scaler.size[name], scaler.deviation[name] = shift, size, deviation
        return scaler


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
