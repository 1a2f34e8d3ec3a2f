"""Scaling of columns, fitted on training rows only.

Physical values are float64 until they are scaled, and float32 from then on: a column is rounded
once, when it is centred, so neither where it lies nor what else the file holds costs it digits.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from slipstream.errors import UserError

Floats = npt.NDArray[np.float64]
Values = npt.NDArray[np.float32]
Flags = npt.NDArray[np.bool_]
STRETCH = 1 << 20
"""Rows that are worked on at a time"""
SAMPLE = 10_000
"""Training rows that tell how a column's values lie"""
LARGEST_LOSS = 0.01
"""Of the distance between usual values, what rounding a scaled column may take"""


FIELDS = ("shift", "size", "deviation", "low", "high")


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
        for begin in range(0, len(column), STRETCH):
            some = slice(begin, begin + STRETCH)
            with np.errstate(over="ignore"):
                out[some] = (column[some] - self.shift[name]) / self.size[name]
            if np.isinf(out[some]).any():
                raise UserError(
                    f'column "{name}" has a value so far from the training rows that it cannot be '
                    "scaled; correct it, or leave it empty and set data.missing"
                )

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, saved: dict[str, Any]) -> Self:
        return cls(**saved)

    def select(self, columns: Collection[str]) -> Self:
        """The same for some columns, of those that it knows."""
        parts: dict[str, Any] = {
            field: {name: values[name] for name in columns if name in values}
            for field in FIELDS
            for values in (getattr(self, field),)
        }
        return replace(self, **parts)


def merge_scalers(kind: str, parts: Iterable[Scaler]) -> Scaler:
    """One scaler for the columns of all parts; what a later one knows counts."""
    joined = Scaler(kind, {}, {}, {}, {}, {})
    for part in parts:
        for field in FIELDS:
            getattr(joined, field).update(getattr(part, field))
    return joined


def make_identity(name: str, *, high: float) -> Scaler:
    """No scaling, of a column that goes from 0 to `high`."""
    return Scaler("none", {name: 0.0}, {name: 1.0}, {name: 1.0}, {name: 0.0}, {name: high})


def fit_column(name: str, column: Floats, rows: Flags, *, kind: str) -> Scaler:
    """Learn a column's shift and size from `rows`; one that never changes is refused."""
    sums = RunningStatistics({}, {}, {}, {}, {})
    for begin in range(0, len(column), STRETCH):
        some = slice(begin, begin + STRETCH)
        sums.add(name, column[some][rows[some]])
    scaler = sums.to_scaler(kind)
    chosen = np.flatnonzero(rows)
    refuse_lost_digits(name, column[chosen[:: choose_sample_stride(len(chosen))]], scaler)
    return scaler


def choose_sample_stride(num_rows: int) -> int:
    """One in how many training rows is taken for a sample."""
    return max(-(-num_rows // SAMPLE), 1)


def refuse_lost_digits(name: str, sample: Floats, scaler: Scaler) -> None:
    """Refuse a column of which float32 keeps too few digits once it is scaled.

    That is so where a few values, or the distance from zero of what is not scaled, are so large
    beside the usual differences that rounding takes a part of these.
    """
    usual = float(np.median(sample))
    apart = np.abs(sample - usual)
    if not apart.any():
        return
    spread = np.maximum(np.median(apart[apart > 0]), apart)
    shift, size = scaler.shift[name], scaler.size[name]
    scaled = ((sample - shift) / size).astype(np.float32)
    lost = np.abs(scaled.astype(np.float64) * size + shift - sample)
    if (lost <= LARGEST_LOSS * spread).all():
        return
    remedy = (
        'set data.scale = "standard"'
        if scaler.kind == "none"
        else "correct the values that lie far from the others, or leave them empty and set "
        "data.missing"
    )
    raise UserError(
        f'column "{name}": its training rows go from {scaler.low[name]:.10g} to '
        f"{scaler.high[name]:.10g}, but half of those that differ from the median, {usual:.10g}, "
        f"are within {np.median(apart[apart > 0]):.3g} of it; of their differences, scaled by "
        f'data.scale = "{scaler.kind}", float32 keeps too few digits: {remedy}'
    )


@dataclass(frozen=True)
class RunningStatistics:
    """What scaling needs to know of the training rows, taken in stretch by stretch."""

    count: dict[str, int]
    mean: dict[str, float]
    squares: dict[str, float]
    """Sum of squared distances from the mean"""
    low: dict[str, float]
    high: dict[str, float]

    def add(self, name: str, values: Floats) -> None:
        if not len(values):
            return
        count, mean = len(values), float(values.mean())
        squares = float(values.var()) * count
        low, high = float(values.min()), float(values.max())
        if name in self.count:
            apart, whole = mean - self.mean[name], self.count[name] + count
            squares += self.squares[name] + apart**2 * self.count[name] * count / whole
            mean = self.mean[name] + apart * count / whole
            low, high = min(low, self.low[name]), max(high, self.high[name])
            count = whole
        self.count[name], self.mean[name], self.squares[name] = count, mean, squares
        self.low[name], self.high[name] = low, high

    def to_scaler(self, kind: str) -> Scaler:
        shift: dict[str, float] = {}
        size: dict[str, float] = {}
        deviation: dict[str, float] = {}
        for name, low in self.low.items():
            deviation[name] = math.sqrt(self.squares[name] / self.count[name])
            if kind == "none":
                shift[name], size[name] = 0.0, 1.0
            elif not self.high[name] > low or not deviation[name]:  # whose squares vanish
                raise UserError(
                    f'column "{name}" is {low:g} in every training row; it tells the model nothing '
                    "and cannot be scaled: leave it out of data.inputs (or add it to data.ignore), "
                    'or set data.scale = "none"'
                )
            elif kind == "standard":
                shift[name], size[name] = self.mean[name], deviation[name]
            else:
                shift[name], size[name] = low, self.high[name] - low
        return Scaler(kind, shift, size, deviation, dict(self.low), dict(self.high))
