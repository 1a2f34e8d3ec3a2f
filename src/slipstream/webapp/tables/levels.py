"""The lowest and highest values of stretches of rows, at several lengths, in files beside them.

The first level has one pair for every `BASE` rows, each further one for `RATIO` times as many. A
plot reads the level that has little more than it has pixels, so its cost does not grow with rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

BASE, RATIO = 32, 4
FEWEST = 256
"""Pairs of the last level, at least"""
WIDTH = 8
"""Bytes of a number"""


class Level(NamedTuple):
    """One level of a column, in its file."""

    rows: int
    """Rows of a pair"""
    size: int
    offset: int
    """Where its numbers begin, among the numbers of the file: lows, then highs"""


def list_levels(num_rows: int) -> list[Level]:
    """List the levels of a column of so many rows."""
    levels: list[Level] = []
    rows, offset = BASE, 0
    while num_rows > rows and (not levels or levels[-1].size > FEWEST):
        size = -(-num_rows // rows)
        levels.append(Level(rows, size, offset))
        offset += 2 * size
        rows *= RATIO
    return levels


class LevelWriter:
    """Writes a column's values as they come, then its levels."""

    def __init__(self, path: Path) -> None:
        self._values = path.with_suffix(".values").open("wb")
        self._path = path.with_suffix(".levels")
        self._rest = np.empty(0)
        self._lows: list[Floats] = []
        self._highs: list[Floats] = []
        self.num_rows = 0

    def add(self, values: Floats) -> None:
        """Add rows, NaN where there is no value."""
        values.tofile(self._values)
        self.num_rows += len(values)
        values = np.concatenate([self._rest, values]) if len(self._rest) else values
        whole = len(values) // BASE * BASE
        self._reduce(values[:whole])
        self._rest = values[whole:].copy()

    def _reduce(self, values: Floats) -> None:
        if len(values):
            low, high = reduce_groups(values, values, np.arange(0, len(values), BASE))
            self._lows.append(low)
            self._highs.append(high)

    def finish(self) -> None:
        """Write the levels."""
        self._values.close()
        self._reduce(self._rest)
        low, high = (np.concatenate(parts or [self._rest]) for parts in (self._lows, self._highs))
        with self._path.open("wb") as file:
            for level in list_levels(self.num_rows):
                if level.rows > BASE:
                    low, high = reduce_groups(low, high, np.arange(0, len(low), RATIO))
                low.tofile(file)
                high.tofile(file)


def reduce_groups(
    low: Floats, high: Floats, starts: npt.NDArray[np.int64]
) -> tuple[Floats, Floats]:
    """Return the lowest and the highest value of groups that begin at `starts`; NaN where a group
    has none."""
    return np.fmin.reduceat(low, starts), np.fmax.reduceat(high, starts)


def read_values(path: Path, begin: int, end: int) -> Floats:
    """Read rows of a column."""
    return np.fromfile(path.with_suffix(".values"), count=max(end - begin, 0), offset=begin * WIDTH)


def map_values(path: Path, kind: str = "float64") -> npt.NDArray[np.generic]:
    """Map a column into memory, where single rows are looked up."""
    if not path.with_suffix(".values").stat().st_size:
        return np.empty(0, kind)
    return np.memmap(path.with_suffix(".values"), dtype=kind, mode="r")


def iter_values(path: Path, num_rows: int, rows: int = 1 << 20) -> Iterator[Floats]:
    """Read a column part by part."""
    for begin in range(0, num_rows, rows):
        yield read_values(path, begin, min(begin + rows, num_rows))


def read_level(path: Path, level: Level, begin: int, end: int) -> tuple[Floats, Floats]:
    """Read pairs of a level."""
    low, high = (
        np.fromfile(
            path.with_suffix(".levels"), count=end - begin, offset=(level.offset + at) * WIDTH
        )
        for at in (begin, level.size + begin)
    )
    return low, high
