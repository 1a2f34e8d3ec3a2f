"""Scaling of columns, fitted on training rows only."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from slipstream.errors import UserError

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Scaler:
    """scaled = (physical - shift) / size, column by column."""

    kind: str
    shift: dict[str, float]
    size: dict[str, float]
    deviation: dict[str, float]
    """Each column's standard deviation over the training rows, whatever the kind"""

    def apply(self, name: str, values: Array) -> npt.NDArray[np.float32]:
        with np.errstate(over="ignore"):
            return ((values - self.shift[name]) / self.size[name]).astype(np.float32)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, saved: dict[str, Any]) -> Self:
        return cls(**saved)

    def joined(self, other: Self) -> Self:
        """One scaler for the columns of both."""
        return replace(
            self,
            shift=self.shift | other.shift,
            size=self.size | other.size,
            deviation=self.deviation | other.deviation,
        )


def fit(columns: dict[str, Array], rows: npt.NDArray[np.bool_] | slice, *, kind: str) -> Scaler:
    """Learn each column's shift and size from `rows`. A column that never changes is refused."""
    shift: dict[str, float] = {}
    size: dict[str, float] = {}
    deviation: dict[str, float] = {}
    for name, values in columns.items():
        known = values[rows]
        low, high = float(known.min()), float(known.max())
        deviation[name] = float(known.std())
        if kind == "none":
            shift[name], size[name] = 0.0, 1.0
        elif not high > low:
            raise UserError(
                f'column "{name}" is {low:g} in every training row; it tells the model nothing and '
                "cannot be scaled: leave it out of data.inputs (or add it to data.ignore), or set "
                'data.scale = "none"'
            )
        elif kind == "standard":
            shift[name], size[name] = float(known.mean()), deviation[name]
        else:
            shift[name], size[name] = low, high - low
    return Scaler(kind, shift, size, deviation)
