"""The time of each row: which columns hold it, its usual step, gaps and disorder."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from slipstream.data.io.columns import is_text
from slipstream.data.io.times import find_formats, parse_known_times

Floats = npt.NDArray[np.float64]
Columns = Mapping[str, pa.ChunkedArray]

HEAD_ROWS = 200
"""Rows by which the columns of the time are found"""
FORMAT_ROWS = 20_000
"""Rows by which the format is found where the first ones leave it open"""
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
"""A step that is this many times the usual one is a gap, as by `data.gap_tolerance`"""
MAX_DISORDER = 100_000
"""Rows out of order that are remembered"""
MAX_TIMES = 5_000_000
"""Rows whose times are remembered, to find out what sorting them gives"""
MIN_RISING = 0.9
"""Share of the first steps that go one way in a column of numbers that is taken for the time"""
MAX_UNREADABLE = 0.1
"""Share of the first cells that may be no times in a column that is named like one"""
SURE_NAMES = re.compile(r"^(time|date|datetime|timestamp|zeit|datum)([ _(\[].*)?$", re.I)
"""Names of a time whose rows may be in any order"""


class TimeSource(NamedTuple):
    """The columns that hold the time of a row."""

    columns: tuple[str, ...]
    format: str | None
    """Of text that is not ISO 8601"""
    is_date: bool
    """Whether they are dates and times, not numbers"""
    other_format: str | None = None
    """A second format that the first rows have, with day and month swapped"""

    def read(self, batch: Columns, decimal: str | None) -> Floats:
        """Return the times of a batch, in seconds or in the column's unit; NaN where none reads."""
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
    texts = {name: join_text([one]) for name, one in head.items() if is_text(one.type)}
    clocks = {name: mark for name, text in texts.items() if (mark := _find_clock(text))}
    for name, text in texts.items():
        formats = find_formats(text) if name not in clocks and len(text) else []
        if not formats and NAMES.search(name):
            formats = _find_most(text)
        if not formats:
            continue
        other = None
        if len(formats) > 1:
            formats = _rank_formats(join_text([batch[name].slice(0, FORMAT_ROWS)]), formats)
            other = formats[1] if len(formats) > 1 else None
        first = formats[0]
        if clocks and first in (None, "%Y-%m-%d", "%d.%m.%Y", "%d/%m/%Y", "%m/%d/%Y", "%Y/%m/%d"):
            clock, mark = next(iter(clocks.items()))
            date = _find_date_format(text) if first is None else first
            if date is not None:
                other = other and f"{other} {mark}"
                return TimeSource((name, clock), f"{date} {mark}", True, other)
        return TimeSource((name,), first, True, other)
    return None


def _find_most(text: pa.ChunkedArray) -> list[str | None]:
    """Return the format that most cells have, where some are no times."""
    for at in sorted({0, len(text) // 2, len(text) - 1} if len(text) else ()):
        for one in find_formats(text.slice(at, 1)):
            if parse_known_times(text, one).null_count <= MAX_UNREADABLE * len(text):
                return [one]
    return []


def _rank_formats(text: pa.ChunkedArray, formats: Sequence[str | None]) -> list[str | None]:
    """Return the formats that fit the most cells, the likeliest first: that of which the fewest
    rows run backwards, and whose steps are the most even. 01/02/2024 is in January or in
    February."""
    ranked = []
    for place, one in enumerate(formats):
        times = parse_known_times(text, one)
        micros = times.drop_null().cast(pa.int64()).to_numpy()
        steps = np.diff(micros).astype(np.float64)
        uneven = float(np.abs(steps - np.median(steps)).mean()) if len(steps) else 0.0
        ways = min(int((steps < 0).sum()), int((steps > 0).sum()))  # the latest may come first
        ranked.append((times.null_count, ways, uneven, place, one))
    ranked.sort(key=lambda entry: entry[:4])
    fewest = ranked[0][0]
    return [one for missing, *_, one in ranked if missing == fewest]


def _find_date_format(text: pa.ChunkedArray) -> str | None:
    """The format of ISO dates without a time of day."""
    is_date = pc.all(pc.match_substring_regex(text, r"^\d{4}-\d{2}-\d{2}$")).as_py()
    return "%Y-%m-%d" if is_date else None


def _find_clock(text: pa.ChunkedArray) -> str | None:
    for pattern, mark in CLOCKS.items():
        if len(text) and pc.all(pc.match_substring_regex(text, pattern)).as_py():
            return mark
    return None


def _find_parts(head: Columns) -> TimeSource | None:
    """Find columns of years, months, days and hours."""
    names = {name.strip().lower(): name for name in head}
    columns, marks = [], []
    for known, mark in PARTS:
        name = next((names[one] for one in known if one in names), None)
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
    """Find a column of numbers that is named like a time and goes one way; one that is named
    exactly so may have its rows in any order, if no two are the same."""
    for name, values in head.items():
        if not NAMES.search(name) or pa.types.is_dictionary(values.type):
            continue
        numbers = to_floats(values, decimal)
        steps = np.diff(numbers)
        if not steps.any() or np.isnan(numbers).any():
            continue
        # series that take turns share their times
        is_ordered = max((steps >= 0).mean(), (steps < 0).mean()) >= MIN_RISING
        is_sure = SURE_NAMES.match(name) and len(np.unique(numbers)) == len(numbers) > 2
        if is_ordered or is_sure:
            return TimeSource((name,), None, is_date=False)
    return None


class SortedTimes(NamedTuple):
    """What the times are within each series once its rows are sorted."""

    step: float | None
    """The usual one"""
    gaps: int
    repeated: int
    """Rows with the time of another row"""


@dataclass
class TimeOrder:
    """The steps of the time from row to row."""

    num_rows: int = 0
    unreadable: int = 0
    backward: int = 0
    repeated: int = 0
    gaps: int = 0
    step: float | None = None
    """The usual one, by the first rows"""
    low: float = np.inf
    high: float = -np.inf
    disorder: list[int] = field(default_factory=list)
    """Rows whose time is not after that of the row above: the first of them"""
    last: float = np.nan
    file_starts: list[int] = field(default_factory=list)
    """The first rows of files"""
    times: list[Floats] = field(default_factory=list)
    """Of all rows, unless there are too many"""

    def start_file(self) -> None:
        self.last = np.nan
        self.file_starts.append(self.num_rows)

    def sort(self, starts: Sequence[int]) -> SortedTimes | None:
        """Return what the times are once the rows from each start to the next are sorted; None
        where that is not known."""
        if self.unreadable or not self.num_rows or self.num_rows > MAX_TIMES:
            return None
        if set(self.disorder) <= set(starts):  # they are sorted
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
