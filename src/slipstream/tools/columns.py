"""Statistics of a table's columns, collected batch by batch: types, courses, samples."""

from __future__ import annotations

import hashlib
import math
import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from slipstream.base.statistics import Moments
from slipstream.data import columns
from slipstream.data.columns import clean_text, is_text
from slipstream.data.series import MissingCode, find_codes

Floats = npt.NDArray[np.float64]
Columns = Mapping[str, pa.ChunkedArray]

MAX_BINS = 512
"""Bins of a course; once all are used, neighbours are merged and a bin holds twice the rows"""
SAMPLE = 10_000
"""The largest number of values in a sample"""
BARS = "▁▂▃▄▅▆▇█"


def _empty() -> Floats:
    return np.full(MAX_BINS, np.nan)


@dataclass
class RunningCourse:
    """The lowest, the highest and the mean value of each bin: `stride` consecutive rows."""

    stride: int = 1
    """Rows of one bin"""
    num_rows: int = 0
    low: Floats = field(default_factory=_empty)
    high: Floats = field(default_factory=_empty)
    total: Floats = field(default_factory=lambda: np.zeros(MAX_BINS))
    count: Floats = field(default_factory=lambda: np.zeros(MAX_BINS))

    def add(self, values: Floats) -> None:
        """Add rows; NaN where a value is missing."""
        if not len(values):
            return
        while (self.num_rows + len(values) - 1) // self.stride >= MAX_BINS:
            self._halve()
        rows = np.arange(self.num_rows, self.num_rows + len(values))
        bins = rows // self.stride
        starts = np.flatnonzero(np.diff(bins, prepend=-1))
        bins_met = bins[starts]
        known = ~np.isnan(values)
        self.low[bins_met] = np.fmin(self.low[bins_met], np.fmin.reduceat(values, starts))
        self.high[bins_met] = np.fmax(self.high[bins_met], np.fmax.reduceat(values, starts))
        self.total[bins_met] += np.add.reduceat(np.where(known, values, 0.0), starts)
        self.count[bins_met] += np.add.reduceat(known.astype(np.float64), starts)
        self.num_rows += len(values)

    def _halve(self) -> None:
        """Merge neighbouring bins, so that each holds twice as many rows."""
        half = MAX_BINS // 2
        for name, merge in (("low", np.fmin), ("high", np.fmax), ("total", np.add)):
            values = getattr(self, name)
            values[:half] = merge(values[::2], values[1::2])
            values[half:] = 0.0 if name == "total" else np.nan
        self.count[:half] = self.count[::2] + self.count[1::2]
        self.count[half:] = 0.0
        self.stride *= 2

    @property
    def num_bins(self) -> int:
        return -(-self.num_rows // self.stride)

    def compute_means(self) -> Floats:
        """Return the mean of each used bin, NaN where all of its values are missing."""
        count = self.count[: self.num_bins]
        with np.errstate(invalid="ignore"):
            return np.where(count > 0, self.total[: self.num_bins] / np.maximum(count, 1), np.nan)

    def is_constant(self, share: float) -> bool:
        """Return whether this share of the rows, from the first on, holds one value."""
        end = max(int(share * self.num_bins), 1)
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
            " " if math.isnan(point) else BARS[level]
            for point, level in zip(points, levels, strict=True)
        )


@dataclass
class Sample:
    """At most `SAMPLE` values, taken at even distances from all rows."""

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
        """Return the values of the sample that are not missing."""
        values = np.concatenate(self.parts) if self.parts else np.empty(0)
        return values[~np.isnan(values)]


NUMBER, TIME, TEXT, BOOLEAN, EMPTY = "number", "time", "text", "boolean", "empty"
MAX_DISTINCT = 5_000
"""Distinct texts up to which they are counted"""
MAX_NUMBERS = 2_000
"""Different numbers up to which a column may tell series, or classes, apart"""
MAX_RUNS, MAX_STARTS = 20_000, 0.2
"""Runs of a column, and their share of the rows, above which it cannot be a series id"""
MIN_TEXTS = 10_000
"""Texts after which a column without any number is no longer searched for numbers"""
MAX_MARKS = 5
"""Distinct texts among numbers up to which all of them may mean "missing\""""
TRAINING = 0.7
"""The share of rows that the default split trains on"""


def looks_like_number(text: str) -> bool:
    """Return whether a text is a number with a decimal comma or thousands separators."""
    return re.match(columns.LOOKS, text) is not None


def parse_cells(
    clean: pa.ChunkedArray, decimal: str | None
) -> tuple[pa.ChunkedArray, pa.ChunkedArray]:
    """Return each cell as a number, null where it is none, and the cells that hold other text."""
    cells = columns.normalize_decimals(clean, decimal)
    try:
        return cells.cast(pa.float64()), clean.slice(0, 0)
    except pa.ArrowInvalid:
        is_number = pc.match_substring_regex(cells, columns.NUMBER)
    not_numbers = clean.filter(pc.invert(is_number).fill_null(False))
    numbers = pc.if_else(is_number, cells, pa.scalar(None, pa.string())).cast(pa.float64())
    return numbers, not_numbers


@dataclass
class Runs:
    """Runs of rows in which a column keeps its value, as a series id does."""

    positions: list[int] = field(default_factory=list)
    """The first row of each run, counted over all files"""
    values: list[Any] = field(default_factory=list)
    is_open: bool = True
    """Whether the runs are few enough for a series id; False stops the counting"""
    num_rows: int = 0
    last: Any = None

    def add(self, values: pa.ChunkedArray, *, is_first: bool) -> None:
        """Add rows; `is_first` starts a new run, as at the start of a file."""
        if not self.is_open or not len(values):
            return
        changed = np.ones(len(values), dtype=bool)
        inner = pc.not_equal(values.slice(1), values.slice(0, len(values) - 1)).fill_null(False)
        changed[1:] = inner.to_numpy()
        changed[0] = is_first or values[0].as_py() != self.last
        starts = np.flatnonzero(changed)
        if len(starts) > max(MAX_STARTS * len(values), 1):
            self.is_open = False
            return
        self.positions += (self.num_rows + starts).tolist()
        self.values += values.take(pa.array(starts)).to_pylist()
        self.num_rows += len(values)
        self.last = values[-1].as_py()
        self.is_open = len(self.positions) <= MAX_RUNS

    def find_value(self, row: int) -> Any:
        """Return the value of the run that holds a row."""
        return self.values[bisect_right(self.positions, row) - 1]


@dataclass
class TextCounter:
    """Counts the occurrences of each distinct text, up to `MAX_DISTINCT` texts."""

    total: int = 0
    """Cells that were added"""
    counts: Counter[str] = field(default_factory=Counter)
    """Occurrences of each distinct text; empty where there are too many"""
    has_many: bool = False

    def add(self, texts: pa.ChunkedArray) -> None:
        self.total += len(texts)
        if not self.has_many:
            for entry in pc.value_counts(texts).to_pylist():
                self.counts[entry["values"]] += entry["counts"]
            if len(self.counts) > MAX_DISTINCT:
                self.has_many = True
                self.counts.clear()


@dataclass
class ColumnProfile:
    """Statistics of one column over all files."""

    name: str
    unit: str = ""
    num_rows: int = 0
    num_missing: int = 0
    moments: Moments = field(default_factory=Moments)
    trace: RunningCourse = field(default_factory=RunningCourse)
    sample: Sample = field(default_factory=Sample)
    runs: Runs = field(default_factory=Runs)
    num_infinite: int = 0
    texts: TextCounter = field(default_factory=TextCounter)
    """Cells that are neither missing nor a number"""
    numbers: set[float] | None = field(default_factory=set)
    """The different numbers, as an id has few; None where there are too many"""
    num_steps: int = 0
    num_counted: int = 0
    """How many of `num_steps`, the steps from row to row, are exactly 1"""
    is_boolean: bool = False
    is_date: bool = False
    last: float = math.nan
    digest: Any = field(default_factory=hashlib.blake2b)
    """Hash of all values: equal in columns that are copies"""

    def add(self, values: pa.ChunkedArray, decimal: str | None) -> None:
        """Add the rows of a batch."""
        kind = values.type
        if pa.types.is_dictionary(kind):
            values = values.cast(kind.value_type)
            kind = values.type
        self.num_rows += len(values)
        if is_text(kind):
            self._add_text(values, decimal)
        elif kind == pa.bool_():
            self.is_boolean = True
            self._add_numbers(values.cast(pa.float64()))
        elif pa.types.is_timestamp(kind) or pa.types.is_date(kind):
            self.is_date = True
            self.num_missing += values.null_count
        elif pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind):
            self._add_numbers(values.cast(pa.float64(), safe=False))
        elif kind == pa.null():
            self._add_numbers(values.cast(pa.float64()))
        else:
            self.texts.total += len(values)
            self.texts.has_many = True

    def _add_numbers(self, values: pa.ChunkedArray) -> None:
        if not len(values):
            return
        if values.null_count:
            values = values.fill_null(np.nan)
        numbers = np.asarray(values.to_numpy(), dtype=np.float64)
        is_finite = np.isfinite(numbers)
        if is_finite.all():
            self.moments.add(numbers)
        else:
            num_missing = int(np.isnan(numbers).sum())
            self.num_missing += num_missing
            self.num_infinite += int((~is_finite).sum()) - num_missing
            self.moments.add(numbers[is_finite])
            numbers = np.where(is_finite, numbers, np.nan)
        if self.numbers is not None:
            distinct = pc.unique(pa.array(numbers[is_finite]))
            is_few = len(distinct) <= MAX_NUMBERS
            self.numbers = self.numbers | set(distinct.to_pylist()) if is_few else None
        self.trace.add(numbers)
        self.sample.add(numbers)
        steps = np.diff(numbers)
        first = numbers[0] - self.last
        self.num_steps += int(np.count_nonzero(~np.isnan(steps))) + (not math.isnan(first))
        self.num_counted += int(np.count_nonzero(steps == 1)) + bool(first == 1)
        self.last = float(numbers[-1])
        self.digest.update(np.ascontiguousarray(numbers))

    def _add_text(self, text: pa.ChunkedArray, decimal: str | None) -> None:
        """Add text cells; cells that hold a number count as numbers."""
        if decimal != "," and not self.texts.total:
            with suppress(pa.ArrowInvalid):  # a cast of pure numbers is twice as fast as cleaning
                self._add_numbers(text.cast(pa.float64()))
                return
        clean = clean_text(text)
        if self.texts.total > MIN_TEXTS and not self.moments.count:  # no need to look for numbers
            self.num_missing += clean.null_count
            self.texts.add(clean.drop_null())
            return
        numbers, not_numbers = parse_cells(clean, decimal)
        before = self.num_missing
        self._add_numbers(numbers)
        if len(not_numbers):  # null among the numbers, but not missing
            self.num_missing = before + clean.null_count
            self.texts.add(not_numbers)

    @property
    def kind(self) -> str:
        if self.is_date:
            return TIME
        if self.is_boolean:
            return BOOLEAN
        if not self.moments.count and not self.texts.total:
            return EMPTY
        return NUMBER if self.moments.count > self.texts.total else TEXT

    @property
    def is_constant(self) -> bool:
        """Whether all known values are equal."""
        if self.kind == TEXT:
            texts = self.texts
            return not texts.has_many and len(texts.counts) == 1 and not self.moments.count
        return bool(self.moments.count) and self.moments.low == self.moments.high

    @property
    def is_constant_in_training(self) -> bool:
        return self.kind == NUMBER and self.trace.is_constant(TRAINING)

    @property
    def is_counter(self) -> bool:
        """Whether the column counts the rows: nearly every step is 1."""
        return self.num_steps > 1 and self.num_counted >= 0.999 * self.num_steps

    @property
    def num_distinct(self) -> int | None:
        """The number of distinct texts; None above `MAX_DISTINCT`, and for numbers."""
        return None if self.texts.has_many or self.kind != TEXT else len(self.texts.counts)

    def find_codes(self) -> list[MissingCode]:
        """Return the numbers that seem to mean "missing"."""
        return list(find_codes(self.sample.get_values())) if self.kind == NUMBER else []

    def find_marks(self) -> list[str]:
        """Return the texts among numbers that seem to mean "missing". There are none where a text
        such as 2,89 looks like a number in another notation."""
        texts = self.texts.counts
        few = 0 < len(texts) <= MAX_MARKS and not self.texts.has_many
        if self.kind != NUMBER or not few or any(map(looks_like_number, texts)):
            return []
        return sorted(texts)
