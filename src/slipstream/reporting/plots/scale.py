"""Scales of a chart: from values to places, and the ticks of an axis."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Tick = tuple[float, str]

EXTENT = 1000
"""Places of a chart are from 0 to this, right and down"""
WIDE = 8
"""Ratio of the highest to the lowest value from which on a scale is logarithmic"""
DATE_STEPS = (
    *(("s", n) for n in (1, 5, 15, 30)),
    *(("m", n) for n in (1, 5, 15, 30)),
    *(("h", n) for n in (1, 3, 6, 12)),
    *(("D", n) for n in (1, 2, 3, 7, 14)),
    *(("M", n) for n in (1, 3, 6)),
    *(("Y", n) for n in (1, 2, 5, 10, 20, 50, 100)),
)
"""Unit and count of the steps between the ticks of dates, the shortest first"""


@dataclass(frozen=True)
class Scale:
    """The range of one axis. Dates are microseconds since 1970."""

    low: float
    high: float
    log: bool = False
    dates: bool = False
    whole: bool = False
    """Whether only whole numbers are labelled"""
    ticks: tuple[Tick, ...] | None = None
    """Ticks to use instead of round values"""

    def place(self, values: Any) -> Floats:
        """Return the places of values, 0 for the lowest and EXTENT for the highest."""
        at = np.asarray(values, dtype=float)
        low, high = self.low, self.high
        if self.log:
            at = np.log(np.where(at > 0, at, np.nan))
            low, high = math.log(low), math.log(high)
        return EXTENT * (at - low) / ((high - low) or 1.0)

    def find_value(self, share: float) -> float:
        """Return the value at a share of the axis, 0 for the lowest and 1 for the highest."""
        if self.log:
            return self.low * math.pow(self.high / self.low, share)
        return self.low + share * (self.high - self.low)

    def list_ticks(self, most: int) -> list[Tick]:
        """Return about so many values with their labels, or those that were set."""
        if self.ticks is not None:
            return list(self.ticks)
        if self.dates:
            return _list_dates(self.low, self.high, most)
        if self.log:
            return _list_decades(self.low, self.high, most)
        return _list_round(self.low, self.high, most, least=1.0 if self.whole else 0.0)


def cover(
    values: Iterable[float | None],
    *,
    zero: bool = False,
    log: bool = False,
    margin: float = 0.05,
) -> Scale:
    """Return a scale that covers the finite values; logarithmic, if allowed, where they are far
    apart. With `zero` it begins at zero."""
    array = np.array([v for v in values if v is not None], dtype=float)
    array = array[np.isfinite(array)]
    if not len(array):
        return Scale(0.0, 1.0)
    low, high = float(array.min()), float(array.max())
    if log and low > 0 and high > WIDE * low:
        room = (high / low) ** margin
        return Scale(low / room, high * room, log=True)
    if zero:
        return Scale(min(low, 0.0), high + margin * (high - min(low, 0.0)) or 1.0)
    room = margin * (high - low) or abs(low) * margin or 1.0
    return Scale(low - room, high + room)


def number_places(names: Sequence[str], *, most: int = 12) -> Scale:
    """Return a scale of categories 0, 1, 2 ..., of which at most so many are named."""
    every = max(-(-len(names) // most), 1)
    ticks = tuple((float(i), names[i]) for i in range(0, len(names), every))
    return Scale(-0.6, len(names) - 0.4, ticks=ticks)


def format_tick(value: float, step: float) -> str:
    """Format a value with as many decimals as its step needs."""
    if value and not 1e-4 <= abs(value) < 1e7:
        return f"{value:.3g}"
    decimals = max(0, -math.floor(math.log10(step) + 1e-9)) if step > 0 else 0
    return f"{value:,.{decimals}f}"


def _list_round(low: float, high: float, most: int, *, least: float = 0.0) -> list[Tick]:
    span = high - low
    if not (math.isfinite(span) and span > 0):
        return [(low, f"{low:.4g}")]
    step = 10 ** math.floor(math.log10(span / most))
    step *= next(factor for factor in (1, 2, 5, 10, 20) if span / (factor * step) <= most)
    step = max(step, least)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    ticks = [(n * step, format_tick(n * step, step)) for n in range(first, last + 1)]
    return ticks or [(low + span / 2, f"{low + span / 2:.6g}")]


def _list_decades(low: float, high: float, most: int) -> list[Tick]:
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for factors in ((1, 2, 5), (1, 3), (1,)):
        values = [f * 10.0**decade for decade in decades for f in factors]
        inside = [v for v in values if low <= v <= high]
        if len(inside) <= most:
            break
    if len(inside) < 2:  # a short axis, such as from 6 to 9
        return _list_round(low, high, most)
    every = -(-len(inside) // most)
    return [(v, f"{v:g}") for v in inside[::every]]


def _list_dates(low: float, high: float, most: int) -> list[Tick]:
    ends = np.array([low, high]).astype("datetime64[us]")
    for unit, count in DATE_STEPS:
        first, last = ends.astype(f"datetime64[{unit}]").astype(np.int64).tolist()
        first = first // count * count
        if (last - first) // count <= most:
            break
    steps = np.arange(first, last + 1, count).astype(f"datetime64[{unit}]")
    steps = steps[steps >= ends[0]] if (steps >= ends[0]).any() else ends[:1]
    places = steps.astype("datetime64[us]").astype(np.int64)
    return [(float(at), _format_date(one, unit)) for at, one in zip(places, steps, strict=True)]


def _format_date(date: np.datetime64, unit: str) -> str:
    """Format a date as its step needs: a year, a month, a day, or a time of day."""
    text = str(date.astype("datetime64[s]"))
    day, time = text.split("T")
    if unit in "Y":
        return day[:-6]
    if unit == "M":
        return day[:-3]
    if unit == "D" or time == "00:00:00":
        return day
    return time if unit == "s" else time[:5]
