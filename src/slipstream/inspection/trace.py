"""A column in little memory, however many rows it has: its course, a sample, its moments."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

PLACES = 512
"""Places of a course; when they are used up, each comes to stand for twice as many rows"""
SAMPLE = 10_000
"""Values of a sample at most"""
BARS = "▁▂▃▄▅▆▇█"


def _empty() -> Floats:
    return np.full(PLACES, np.nan)


@dataclass
class RunningCourse:
    """The lowest, the highest and the mean value of each stretch of rows."""

    stride: int = 1
    """Rows of one place"""
    num_rows: int = 0
    low: Floats = field(default_factory=_empty)
    high: Floats = field(default_factory=_empty)
    total: Floats = field(default_factory=lambda: np.zeros(PLACES))
    count: Floats = field(default_factory=lambda: np.zeros(PLACES))

    def add(self, values: Floats) -> None:
        """Add rows; NaN where a value is missing."""
        if not len(values):
            return
        while (self.num_rows + len(values) - 1) // self.stride >= PLACES:
            self._halve()
        rows = np.arange(self.num_rows, self.num_rows + len(values))
        places = rows // self.stride
        starts = np.flatnonzero(np.diff(places, prepend=-1))
        at = places[starts]
        known = ~np.isnan(values)
        self.low[at] = np.fmin(self.low[at], np.fmin.reduceat(values, starts))
        self.high[at] = np.fmax(self.high[at], np.fmax.reduceat(values, starts))
        self.total[at] += np.add.reduceat(np.where(known, values, 0.0), starts)
        self.count[at] += np.add.reduceat(known.astype(np.float64), starts)
        self.num_rows += len(values)

    def _halve(self) -> None:
        """Have every place stand for twice as many rows."""
        half = PLACES // 2
        for name, merge in (("low", np.fmin), ("high", np.fmax), ("total", np.add)):
            values = getattr(self, name)
            values[:half] = merge(values[::2], values[1::2])
            values[half:] = 0.0 if name == "total" else np.nan
        self.count[:half] = self.count[::2] + self.count[1::2]
        self.count[half:] = 0.0
        self.stride *= 2

    @property
    def num_places(self) -> int:
        return -(-self.num_rows // self.stride)

    def compute_means(self) -> Floats:
        """Return the mean of each place that is used, NaN where all of it is missing."""
        count = self.count[: self.num_places]
        with np.errstate(invalid="ignore"):
            return np.where(count > 0, self.total[: self.num_places] / np.maximum(count, 1), np.nan)

    def is_constant(self, share: float) -> bool:
        """Whether the first rows, up to this share of all, hold one value."""
        end = max(int(share * self.num_places), 1)
        low, high = self.low[:end], self.high[:end]
        known = ~np.isnan(low)
        return bool(known.any() and np.nanmin(low) == np.nanmax(high))

    def draw(self, width: int) -> str:
        """Draw the course as a line of bars; a blank where values are missing."""
        means = self.compute_means()
        if not len(means) or np.isnan(means).all():
            return ""
        parts = [part for part in np.array_split(means, min(width, len(means))) if len(part)]
        points = np.array([np.nan if np.isnan(part).all() else np.nanmean(part) for part in parts])
        low, high = np.nanmin(points), np.nanmax(points)
        size = high - low if high > low else 1.0
        levels = np.nan_to_num((points - low) / size * (len(BARS) - 1)).round().astype(int)
        return "".join(
            " " if math.isnan(one) else BARS[level]
            for one, level in zip(points, levels, strict=True)
        )


@dataclass
class Sample:
    """Values that are evenly spread over all rows."""

    stride: int = 1
    num_rows: int = 0
    parts: list[Floats] = field(default_factory=list)
    size: int = 0

    def add(self, values: Floats) -> None:
        part = values[-self.num_rows % self.stride :: self.stride].copy()
        self.num_rows += len(values)
        self.parts.append(part)
        self.size += len(part)
        while self.size > SAMPLE:
            self.parts = [np.concatenate(self.parts)[::2]]
            self.size, self.stride = len(self.parts[0]), 2 * self.stride

    def get_values(self) -> Floats:
        """Return the known values."""
        values = np.concatenate(self.parts) if self.parts else np.empty(0)
        return values[~np.isnan(values)]
