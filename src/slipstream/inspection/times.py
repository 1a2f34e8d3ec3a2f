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
MIN_RISING = 0.9
"""Share of the first steps that do not go back in a column of numbers that is taken for the time"""


class TimeSource(NamedTuple):
    """The columns that hold the time of a row."""

    columns: tuple[str, ...]
    format: str | None
    """Of text that is not ISO 8601"""
    is_date: bool
    """Whether they are dates and times, not numbers"""

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
    return _find_text(head) or _find_parts(head) or _find_number(head, decimal)


def _find_text(head: Columns) -> TimeSource | None:
    """Find text that reads as times, or as dates beside a column of times of day."""
    texts = {name: join_text([one]) for name, one in head.items() if is_text(one.type)}
    clocks = {name: mark for name, text in texts.items() if (mark := _find_clock(text))}
    for name, text in texts.items():
        formats = find_formats(text) if name not in clocks and len(text) else []
        if not formats:
            continue
        first = formats[0]
        if clocks and first in (None, "%Y-%m-%d", "%d.%m.%Y", "%d/%m/%Y", "%m/%d/%Y", "%Y/%m/%d"):
            clock, mark = next(iter(clocks.items()))
            date = _find_date_format(text) if first is None else first
            if date is not None:
                return TimeSource((name, clock), f"{date} {mark}", is_date=True)
        return TimeSource((name,), first, is_date=True)
    return None


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
    """Find a column of numbers that is named like a time and goes forward."""
    for name, values in head.items():
        if not NAMES.search(name) or pa.types.is_dictionary(values.type):
            continue
        numbers = to_floats(values, decimal)
        steps = np.diff(numbers)
        if not (steps > 0).any() or np.isnan(numbers).any():
            continue
        if (steps >= 0).mean() >= MIN_RISING:  # series that take turns share their times
            return TimeSource((name,), None, is_date=False)
    return None


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

    def start_file(self) -> None:
        self.last = np.nan

    def add(self, times: Floats) -> None:
        steps = np.diff(times, prepend=self.last)
        forward = steps[steps > 0]
        if self.step is None and len(forward):
            self.step = float(np.median(forward))
        back, same = steps < 0, steps == 0
        if len(self.disorder) < MAX_DISORDER:
            self.disorder += (self.num_rows + np.flatnonzero(back | same)).tolist()
        self.num_rows += len(times)
        self.unreadable += int(np.isnan(times).sum())
        self.backward += int(back.sum())
        self.repeated += int(same.sum())
        if self.step is not None:
            self.gaps += int((steps > GAP * self.step).sum())
        if not np.isnan(times).all():
            self.low, self.high = min(self.low, np.nanmin(times)), max(self.high, np.nanmax(times))
        if len(times):
            self.last = float(times[-1])
