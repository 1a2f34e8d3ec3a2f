"""What the rows of a column tell: its type, range, missing share, course, and runs of one value."""

from __future__ import annotations

import hashlib
import math
import re
from bisect import bisect_right
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from slipstream.data.io import decimals
from slipstream.data.io.columns import clean_text, is_text
from slipstream.data.missing import MissingCode, find_codes
from slipstream.inspection.trace import RunningCourse, Sample
from slipstream.stats import Moments

Floats = npt.NDArray[np.float64]

NUMBER, TIME, TEXT, BOOLEAN, EMPTY = "number", "time", "text", "boolean", "empty"
MAX_DISTINCT = 5_000
"""Different texts that are counted; of more, it is only known that there are many"""
MAX_RUNS, MOST_STARTS = 20_000, 0.2
"""Runs of a column, and their share of the rows, from which on it does not tell series apart"""
MIN_TEXTS = 10_000
"""Texts after which a column that has held no number is taken to hold none"""
FEW_OTHERS = 5
"""Different texts among numbers that may all mean "missing\""""
TRAINING = 0.7
"""The share of rows that the default split trains on"""


def looks_like_number(text: str) -> bool:
    """Whether a text is a number with a decimal comma or separators between thousands."""
    return re.match(decimals.LOOKS, text) is not None


def parse_cells(
    clean: pa.ChunkedArray, decimal: str | None
) -> tuple[pa.ChunkedArray, pa.ChunkedArray]:
    """Return the numbers of cells, null where there is none, and the cells that are others."""
    cells = decimals.normalize_decimals(clean, decimal)
    try:
        return cells.cast(pa.float64()), clean.slice(0, 0)
    except pa.ArrowInvalid:
        is_number = pc.match_substring_regex(cells, decimals.NUMBER)
    others = clean.filter(pc.invert(is_number).fill_null(False))
    numbers = pc.if_else(is_number, cells, pa.scalar(None, pa.string())).cast(pa.float64())
    return numbers, others


@dataclass
class Runs:
    """Stretches of rows in which a column does not change, as an id's do."""

    positions: list[int] = field(default_factory=list)
    """First rows, among all rows of all files"""
    values: list[Any] = field(default_factory=list)
    is_open: bool = True
    """Whether they are few enough for a column that tells series apart"""
    num_rows: int = 0
    last: Any = None

    def add(self, values: pa.ChunkedArray, *, is_first: bool) -> None:
        """Add rows; `is_first` where a file begins."""
        if not self.is_open or not len(values):
            return
        changed = np.ones(len(values), dtype=bool)
        inner = pc.not_equal(values.slice(1), values.slice(0, len(values) - 1)).fill_null(False)
        changed[1:] = inner.to_numpy()
        changed[0] = is_first or values[0].as_py() != self.last
        starts = np.flatnonzero(changed)
        if len(starts) > max(MOST_STARTS * len(values), 1):
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
class ColumnProfile:
    """A column of all files."""

    name: str
    unit: str = ""
    num_rows: int = 0
    num_missing: int = 0
    moments: Moments = field(default_factory=Moments)
    trace: RunningCourse = field(default_factory=RunningCourse)
    sample: Sample = field(default_factory=Sample)
    runs: Runs = field(default_factory=Runs)
    num_infinite: int = 0
    num_texts: int = 0
    """Cells that are neither missing nor a number"""
    texts: Counter[str] = field(default_factory=Counter)
    """They, unless there are too many"""
    has_many_texts: bool = False
    num_steps: int = 0
    num_counted: int = 0
    """Steps from row to row, and those of them that are 1"""
    is_boolean: bool = False
    is_date: bool = False
    last: float = math.nan
    digest: Any = field(default_factory=hashlib.blake2b)
    """Of all values: equal in columns that are copies"""

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
            self.num_texts += len(values)
            self.has_many_texts = True

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
        self.trace.add(numbers)
        self.sample.add(numbers)
        steps = np.diff(numbers)
        first = numbers[0] - self.last
        self.num_steps += int(np.count_nonzero(~np.isnan(steps))) + (not math.isnan(first))
        self.num_counted += int(np.count_nonzero(steps == 1)) + bool(first == 1)
        self.last = float(numbers[-1])
        self.digest.update(np.ascontiguousarray(numbers))

    def _add_text(self, text: pa.ChunkedArray, decimal: str | None) -> None:
        """Add cells of a CSV file, or texts: those that are numbers count as numbers."""
        if decimal != "," and not self.num_texts:
            with suppress(pa.ArrowInvalid):  # it holds nothing but numbers (twice as fast)
                self._add_numbers(text.cast(pa.float64()))
                return
        clean = clean_text(text)
        if self.num_texts > MIN_TEXTS and not self.moments.count:  # no need to look for numbers
            self.num_missing += clean.null_count
            self._count_texts(clean.drop_null())
            return
        numbers, others = parse_cells(clean, decimal)
        before = self.num_missing
        self._add_numbers(numbers)
        if len(others):  # null among the numbers, but not missing
            self.num_missing = before + clean.null_count
            self._count_texts(others)

    def _count_texts(self, others: pa.ChunkedArray) -> None:
        self.num_texts += len(others)
        if not self.has_many_texts:
            counts = pc.value_counts(others).to_pylist()
            self.texts.update({one["values"]: one["counts"] for one in counts})
            if len(self.texts) > MAX_DISTINCT:
                self.has_many_texts = True
                self.texts.clear()

    @property
    def kind(self) -> str:
        if self.is_date:
            return TIME
        if self.is_boolean:
            return BOOLEAN
        if not self.moments.count and not self.num_texts:
            return EMPTY
        return NUMBER if self.moments.count > self.num_texts else TEXT

    @property
    def is_constant(self) -> bool:
        """Whether all known values are one."""
        if self.kind == TEXT:
            return not self.has_many_texts and len(self.texts) == 1 and not self.moments.count
        return bool(self.moments.count) and self.moments.low == self.moments.high

    @property
    def is_constant_in_training(self) -> bool:
        return self.kind == NUMBER and self.trace.is_constant(TRAINING)

    @property
    def is_counter(self) -> bool:
        """Whether it counts the rows."""
        return self.num_steps > 1 and self.num_counted >= 0.999 * self.num_steps

    @property
    def num_distinct(self) -> int | None:
        """How many different texts there are; None where they are too many, or numbers."""
        return None if self.has_many_texts or self.kind != TEXT else len(self.texts)

    def find_codes(self) -> list[MissingCode]:
        """Numbers that seem to mean "missing"."""
        return list(find_codes(self.sample.get_values())) if self.kind == NUMBER else []

    def find_marks(self) -> list[str]:
        """Texts among the numbers that seem to mean "missing"; 2,89 does not: it is a number."""
        few = 0 < len(self.texts) <= FEW_OTHERS and not self.has_many_texts
        if self.kind != NUMBER or not few or any(map(looks_like_number, self.texts)):
            return []
        return sorted(self.texts)
