"""Scaling of columns, fitted on training rows only."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import asdict, dataclass, replace
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from slipstream.errors import UserError

Values = npt.NDArray[np.float32]


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

    def apply(self, name: str, values: Values, anchor: float) -> None:
        """Scale, in place, values that count from `anchor`."""
        with np.errstate(over="ignore"):
            values += np.float32(anchor - self.shift[name])
            values /= np.float32(self.size[name])
        if not np.isfinite(values).all():
            raise UserError(
                f'column "{name}" has a value so far from the training rows that it cannot be '
                "scaled; correct it, or leave it empty and set data.missing"
            )

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, saved: dict[str, Any]) -> Self:
        return cls(**saved)

    def only(self, columns: Collection[str]) -> Self:
        """The same for some columns."""
        parts: dict[str, Any] = {
            field: {name: value for name, value in getattr(self, field).items() if name in columns}
            for field in ("shift", "size", "deviation", "low", "high")
        }
        return replace(self, **parts)

    def joined(self, other: Self) -> Self:
        """One scaler for the columns of both."""
        return replace(
            self,
            shift=self.shift | other.shift,
            size=self.size | other.size,
            deviation=self.deviation | other.deviation,
            low=self.low | other.low,
            high=self.high | other.high,
        )


def as_it_is(name: str, *, high: float) -> Scaler:
    """No scaling, of a column that goes from 0 to `high`."""
    return Scaler("none", {name: 0.0}, {name: 1.0}, {name: 1.0}, {name: 0.0}, {name: high})


def fit(
    values: Values,
    columns: tuple[str, ...],
    anchors: dict[str, float],
    rows: npt.NDArray[np.bool_],
    *,
    kind: str,
    known: Scaler | None = None,
) -> Scaler:
    """Learn each column's shift and size from `rows`, or take those that are known.

    A column that never changes is refused.
    """
    sums = Sums({}, {}, {}, {}, {})
    for i, name in enumerate(columns):
        if known is None or name not in known.shift:
            sums.add(name, values[rows, i], anchors[name])
    scaler = sums.scaler(kind)
    return scaler if known is None else scaler.joined(known.only(columns))


@dataclass(frozen=True)
class Sums:
    """What scaling needs to know of the training rows, taken in stretch by stretch."""

    count: dict[str, int]
    mean: dict[str, float]
    squares: dict[str, float]
    """Sum of squared distances from the mean"""
    low: dict[str, float]
    high: dict[str, float]

    def add(self, name: str, values: Values, anchor: float) -> None:
        if not len(values):
            return
        count, mean = len(values), float(values.mean(dtype=np.float64)) + anchor
        squares = float(values.var(dtype=np.float64)) * count
        low, high = float(values.min()) + anchor, float(values.max()) + anchor
        if name in self.count:
            apart, whole = mean - self.mean[name], self.count[name] + count
            squares += self.squares[name] + apart**2 * self.count[name] * count / whole
            mean = self.mean[name] + apart * count / whole
            low, high = min(low, self.low[name]), max(high, self.high[name])
            count = whole
        self.count[name], self.mean[name], self.squares[name] = count, mean, squares
        self.low[name], self.high[name] = low, high

    def scaler(self, kind: str) -> Scaler:
        shift: dict[str, float] = {}
        size: dict[str, float] = {}
        deviation: dict[str, float] = {}
        for name, low in self.low.items():
            deviation[name] = math.sqrt(self.squares[name] / self.count[name])
            if kind == "none":
                shift[name], size[name] = 0.0, 1.0
            elif not self.high[name] > low:
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
