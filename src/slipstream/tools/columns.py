"""Statistics of a table's columns, collected batch by batch: types, times, courses, samples."""

from __future__ import annotations

import hashlib
import math
import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from slipstream.base.statistics import Moments
from slipstream.data import columns
from slipstream.data.columns import clean_text, find_formats, is_text, parse_known_times
from slipstream.data.series import MissingCode, find_codes

Floats = npt.NDArray[np.float64]
Columns = Mapping[str, pa.ChunkedArray]

HEAD_ROWS = 200
"""Rows that are examined to find the columns of the time"""
FORMAT_ROWS = 20_000
"""Rows that decide between formats where the first `HEAD_ROWS` rows fit several"""
NAMES = re.compile(r"(^|[^a-z])(time|date|datetime|timestamp|t|seconds|zeit|datum)([^a-z]|$)", re.I)
PARTS = (
    (("year", "yyyy"), "%Y"),
    (("month", "mm"), "%m"),
    (("day", "dd"), "%d"),
    (("hour", "hh"), "%H"),
    (("minute",), "%M"),
    (("second",), "%S"),
)
CLOCKS = {r"^\d{1,2}:\d{2}:\d{2}$": "%H:%M:%S", r"^\d{1,2}:\d{2}$": "%H:%M"}
CLOCKS |= {r"^\d{1,2}\.\d{2}\.\d{2}$": "%H.%M.%S", r"^\d{1,2}:\d{2}:\d{2}[.,]\d+$": "%H:%M:%S.%f"}
MICROSECONDS = 1e6
GAP = 1.5
"""A step longer than this many usual steps is a gap: the default of `data.gap_tolerance`"""
MAX_DISORDER = 100_000
"""Rows out of order whose numbers are kept"""
MAX_TIMES = 5_000_000
"""Rows whose times are kept, so that the steps after sorting can be computed"""
MIN_RISING = 0.9
"""Share of the first steps that go one way in a column of numbers that is taken for the time"""
MAX_UNREADABLE = 0.1
"""Share of the first cells that may be unreadable in a column named like a time"""
SURE_NAMES = re.compile(r"^(time|date|datetime|timestamp|zeit|datum)([ _(\[].*)?$", re.I)
"""Names that mean the time even where the rows are in no order"""


class TimeSource(NamedTuple):
    """The columns that hold the time of a row."""

    columns: tuple[str, ...]
    format: str | None
    """The format of the text; None for ISO 8601 and for numbers"""
    is_date: bool
    """Whether the columns hold dates and times, not numbers"""
    other_format: str | None = None
    """A second format that fits the first rows, with day and month swapped"""

    def read(self, batch: Columns, decimal: str | None) -> Floats:
        """Return the times of a batch, in seconds or in the column's unit, unreadable ones NaN."""
        values = batch[self.columns[0]]
        if not self.is_date:
            return to_floats(values, decimal)
        if len(self.columns) > 1 or is_text(values.type):
            text = join_text([batch[name] for name in self.columns])
            values = parse_known_times(text, self.format)
        micros = values.cast(pa.timestamp("us", getattr(values.type, "tz", None)), safe=False)
        numbers = micros.cast(pa.int64()).cast(pa.float64(), safe=False)
        return np.asarray(numbers.fill_null(np.nan).to_numpy()) / MICROSECONDS


def to_floats(values: pa.ChunkedArray, decimal: str | None) -> Floats:
    """Return a column's numbers, NaN for the missing ones and for text that is no number."""
    if is_text(values.type):
        values = pc.replace_substring(values, ",", ".") if decimal == "," else values
        number = pc.match_substring_regex(values, r"^\s*[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?\s*$")
        values = pc.if_else(number, values, pa.scalar(None, pa.string()))
    values = values.cast(pa.float64(), safe=False).fill_null(np.nan)
    return np.asarray(values.to_numpy(), dtype=np.float64)


def join_text(parts: Sequence[pa.ChunkedArray]) -> pa.ChunkedArray:
    """Return the cells of several columns joined by a blank, without surrounding blanks."""
    texts = [pc.utf8_trim_whitespace(part.cast(pa.string())) for part in parts]
    return texts[0] if len(texts) == 1 else pc.binary_join_element_wise(*texts, " ")


def find_time(batch: Columns, decimal: str | None) -> TimeSource | None:
    """Find the columns that hold the time, from the first rows of a table."""
    head = {name: values.slice(0, HEAD_ROWS) for name, values in batch.items()}
    for name, values in head.items():
        if pa.types.is_timestamp(values.type) or pa.types.is_date(values.type):
            return TimeSource((name,), None, is_date=True)
    return _find_text(head, batch) or _find_parts(head) or _find_number(head, decimal)


def _find_text(head: Columns, batch: Columns) -> TimeSource | None:
    """Find text that reads as times, or as dates beside a column of times of day."""
    texts = {name: join_text([values]) for name, values in head.items() if is_text(values.type)}
    clocks = {name: mark for name, text in texts.items() if (mark := _find_clock(text))}
    for name, text in texts.items():
        formats = find_formats(text) if name not in clocks and len(text) else []
        if not formats and NAMES.search(name):
            formats = _find_most(text)
        if not formats:
            continue
        other_format = None
        if len(formats) > 1:
            formats = _rank_formats(join_text([batch[name].slice(0, FORMAT_ROWS)]), formats)
            other_format = formats[1] if len(formats) > 1 else None
        first = formats[0]
        if clocks and first in (None, "%Y-%m-%d", "%d.%m.%Y", "%d/%m/%Y", "%m/%d/%Y", "%Y/%m/%d"):
            clock, mark = next(iter(clocks.items()))
            date = _find_date_format(text) if first is None else first
            if date is not None:
                other_format = other_format and f"{other_format} {mark}"
                return TimeSource((name, clock), f"{date} {mark}", True, other_format)
        return TimeSource((name,), first, True, other_format)
    return None


def _find_most(text: pa.ChunkedArray) -> list[str | None]:
    """Return the format that fits nearly all cells in a list; an empty list without one."""
    for position in sorted({0, len(text) // 2, len(text) - 1} if len(text) else ()):
        for candidate in find_formats(text.slice(position, 1)):
            if parse_known_times(text, candidate).null_count <= MAX_UNREADABLE * len(text):
                return [candidate]
    return []


def _rank_formats(text: pa.ChunkedArray, formats: Sequence[str | None]) -> list[str | None]:
    """Return the formats that fit the most cells, the likeliest first: the one with the fewest
    backward steps, then the one with the most even steps. 01/02/2024 is in January or February."""
    ranked = []
    for rank, candidate in enumerate(formats):
        times = parse_known_times(text, candidate)
        micros = times.drop_null().cast(pa.int64()).to_numpy()
        steps = np.diff(micros).astype(np.float64)
        uneven = float(np.abs(steps - np.median(steps)).mean()) if len(steps) else 0.0
        ways = min(int((steps < 0).sum()), int((steps > 0).sum()))  # the latest may come first
        ranked.append((times.null_count, ways, uneven, rank, candidate))
    ranked.sort(key=lambda entry: entry[:4])
    fewest = ranked[0][0]
    return [candidate for missing, *_, candidate in ranked if missing == fewest]


def _find_date_format(text: pa.ChunkedArray) -> str | None:
    """Return the format of ISO dates without a time of day; None for any other text."""
    is_date = pc.all(pc.match_substring_regex(text, r"^\d{4}-\d{2}-\d{2}$")).as_py()
    return "%Y-%m-%d" if is_date else None


def _find_clock(text: pa.ChunkedArray) -> str | None:
    """Return the format of a column of times of day; None where a cell is none."""
    for pattern, mark in CLOCKS.items():
        if len(text) and pc.all(pc.match_substring_regex(text, pattern)).as_py():
            return mark
    return None


def _find_parts(head: Columns) -> TimeSource | None:
    """Find columns of years, months, days and hours."""
    names = {name.strip().lower(): name for name in head}
    columns, marks = [], []
    for known, mark in PARTS:
        name = next((names[part] for part in known if part in names), None)
        if name is None:
            break
        columns.append(name)
        marks.append(mark)
    if len(columns) < 3:
        return None
    time_format = " ".join(marks)
    text = join_text([head[name] for name in columns])
    if parse_known_times(text, time_format).null_count:
        return None
    return TimeSource(tuple(columns), time_format, is_date=True)


def _find_number(head: Columns, decimal: str | None) -> TimeSource | None:
    """Find a column of numbers that is named like a time and rises or falls throughout. A column
    whose name leaves no doubt may be in any order if its numbers are distinct."""
    for name, values in head.items():
        if not NAMES.search(name) or pa.types.is_dictionary(values.type):
            continue
        numbers = to_floats(values, decimal)
        steps = np.diff(numbers)
        if not steps.any() or np.isnan(numbers).any():
            continue
        # a step of zero counts as rising: series whose rows alternate share their times
        is_ordered = max((steps >= 0).mean(), (steps < 0).mean()) >= MIN_RISING
        is_sure = SURE_NAMES.match(name) and len(np.unique(numbers)) == len(numbers) > 2
        if is_ordered or is_sure:
            return TimeSource((name,), None, is_date=False)
    return None


class SortedTimes(NamedTuple):
    """The step, gaps and repeated times within each series once its rows are sorted."""

    step: float | None
    """The median step"""
    gaps: int
    repeated: int
    """Rows with the time of another row"""


@dataclass
class TimeOrder:
    """Running statistics of the time's steps from row to row."""

    num_rows: int = 0
    unreadable: int = 0
    backward: int = 0
    repeated: int = 0
    gaps: int = 0
    step: float | None = None
    """The median step of the first batch"""
    low: float = np.inf
    high: float = -np.inf
    disorder: list[int] = field(default_factory=list)
    """Rows whose time is not later than the row above, up to `MAX_DISORDER` of them"""
    last: float = np.nan
    file_starts: list[int] = field(default_factory=list)
    """The number of each file's first row"""
    times: list[Floats] = field(default_factory=list)
    """The times of all rows; empty above `MAX_TIMES` rows"""

    def start_file(self) -> None:
        self.last = np.nan
        self.file_starts.append(self.num_rows)

    def sort(self, starts: Sequence[int]) -> SortedTimes | None:
        """Return the steps after sorting the rows from each start to the next by time; None where
        a time is unreadable or there are too many rows."""
        if self.unreadable or not self.num_rows or self.num_rows > MAX_TIMES:
            return None
        if set(self.disorder) <= set(starts):  # every series is sorted already
            steps = np.diff(np.concatenate(self.times))
            steps = np.delete(steps, np.asarray(starts[1:], dtype=np.int64) - 1)
        else:
            times = np.concatenate(self.times)
            series = np.searchsorted(np.asarray(starts), np.arange(len(times)), side="right")
            order = np.lexsort((times, series))
            steps = np.diff(times[order])[np.diff(series[order]) == 0]
        forward = steps[steps > 0]
        step = float(np.median(forward)) if len(forward) else None
        gaps = int((forward > GAP * step).sum()) if step is not None else 0
        return SortedTimes(step, gaps, int((steps == 0).sum()))

    def add(self, times: Floats) -> None:
        steps = np.diff(times, prepend=self.last)
        forward = steps[steps > 0]
        if self.step is None and len(forward):
            self.step = float(np.median(forward))
        back, same = steps < 0, steps == 0
        if len(self.disorder) < MAX_DISORDER:
            self.disorder += (self.num_rows + np.flatnonzero(back | same)).tolist()
        self.num_rows += len(times)
        if self.num_rows <= MAX_TIMES:
            self.times.append(times)
        else:
            self.times.clear()
        self.unreadable += int(np.isnan(times).sum())
        self.backward += int(back.sum())
        self.repeated += int(same.sum())
        if self.step is not None:
            self.gaps += int((steps > GAP * self.step).sum())
        if not np.isnan(times).all():
            self.low, self.high = min(self.low, np.nanmin(times)), max(self.high, np.nanmax(times))
        if len(times):
            self.last = float(times[-1])


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
    num_texts: int = 0
    """Cells that are neither missing nor a number"""
    texts: Counter[str] = field(default_factory=Counter)
    """Occurrences of each distinct text; empty above `MAX_DISTINCT`"""
    has_many_texts: bool = False
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
        """Add text cells; cells that hold a number count as numbers."""
        if decimal != "," and not self.num_texts:
            with suppress(pa.ArrowInvalid):  # a cast of pure numbers is twice as fast as cleaning
                self._add_numbers(text.cast(pa.float64()))
                return
        clean = clean_text(text)
        if self.num_texts > MIN_TEXTS and not self.moments.count:  # no need to look for numbers
            self.num_missing += clean.null_count
            self._count_texts(clean.drop_null())
            return
        numbers, not_numbers = parse_cells(clean, decimal)
        before = self.num_missing
        self._add_numbers(numbers)
        if len(not_numbers):  # null among the numbers, but not missing
            self.num_missing = before + clean.null_count
            self._count_texts(not_numbers)

    def _count_texts(self, not_numbers: pa.ChunkedArray) -> None:
        self.num_texts += len(not_numbers)
        if not self.has_many_texts:
            counts = pc.value_counts(not_numbers).to_pylist()
            self.texts.update({entry["values"]: entry["counts"] for entry in counts})
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
        """Whether all known values are equal."""
        if self.kind == TEXT:
            return not self.has_many_texts and len(self.texts) == 1 and not self.moments.count
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
        return None if self.has_many_texts or self.kind != TEXT else len(self.texts)

    def find_codes(self) -> list[MissingCode]:
        """Return the numbers that seem to mean "missing"."""
        return list(find_codes(self.sample.get_values())) if self.kind == NUMBER else []

    def find_marks(self) -> list[str]:
        """Return the texts among numbers that seem to mean "missing". There are none where a text
        such as 2,89 looks like a number in another notation."""
        few = 0 < len(self.texts) <= MAX_MARKS and not self.has_many_texts
        if self.kind != NUMBER or not few or any(map(looks_like_number, self.texts)):
            return []
        return sorted(self.texts)
