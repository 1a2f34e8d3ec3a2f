"""Find the columns that hold the time of a row, by evidence: which reading of which columns gives
even, increasing steps. `slipstream inspect` proposes it; training notes a time that is not used."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from slipstream.base.text import format_number
from slipstream.config import Data
from slipstream.data.columns import (
    find_formats,
    is_date_type,
    is_text,
    join_columns,
    parse_elapsed,
    parse_known_times,
    to_plain_text,
)
from slipstream.data.table import DataTable

Floats = npt.NDArray[np.float64]
Columns = Mapping[str, pa.ChunkedArray]

HEAD_ROWS = 200
"""Rows in which candidates are looked for"""
EVIDENCE_ROWS = 20_000
"""Rows by which candidates are compared"""
NAMES = re.compile(
    r"(^|[^a-z])(time|date|datetime|timestamp|stamp|ts|t|seconds|elapsed|when|zeit|datum)([^a-z]|$)",
    re.I,
)
SURE_NAMES = re.compile(r"^(time|date|datetime|timestamp|zeit|datum)([ _(\[].*)?$", re.I)
"""Names that mean the time even where the rows are in no order"""
YEARS = re.compile(r"^(year|yr|jahr)s?$", re.I)
"""Names of whole numbers that are the time where rows are a year or more apart"""
PARTS = (
    (("year", "yyyy", "yr", "yy", "jahr"), "%Y"),
    (("month", "mm", "mo", "mon", "mnth", "monat"), "%m"),
    (("day", "dd", "dy", "tag"), "%d"),
    (("hour", "hh", "hr", "stunde"), "%H"),
    (("minute", "min", "mn", "mm"), "%M"),
    (("second", "sec"), "%S"),
)
HOURS = re.compile(r"^(hour|hours|hr|hh|h|stunde|hour_of_day|hourofday)$", re.I)
MINUTES = re.compile(r"^(minute|minutes|min|mm)$", re.I)
CLOCKS = {
    r"^\d{1,2}:\d{2}:\d{2}$": "%H:%M:%S",
    r"^\d{1,2}:\d{2}$": "%H:%M",
    r"^\d{1,2}\.\d{2}\.\d{2}$": "%H.%M.%S",
    r"^\d{1,2}:\d{2}:\d{2}[.,]\d+$": "%H:%M:%S.%f",
    r"^\d{1,2}:\d{2}(:\d{2})? ?[AaPp][Mm]$": "%I:%M:%S %p",
}
DIGIT_CLOCKS = {r"^[0-2]\d[0-5]\d[0-5]\d$": "%H%M%S", r"^[0-2]\d[0-5]\d$": "%H%M"}
"""Clocks without separators, which numbers look like too: their column is named like a time"""
MICROSECONDS = 1e6
DAY_S = 86_400.0
GAP = 1.5
"""A step longer than this many usual steps is a gap: the default of `data.gap_tolerance`"""
MAX_DISORDER = 100_000
"""Rows out of order whose numbers are kept"""
MAX_TIMES = 5_000_000
"""Rows whose times are kept, so that the steps after sorting can be computed"""
MIN_RISING = 0.9
"""Share of the first steps that go one way in a column of numbers that is taken for the time"""
MAX_UNREADABLE = 0.1
"""Share of cells that may be unreadable in a column that is taken for the time"""
MIN_YEAR_S, MAX_YEAR_S = -2_208_988_800.0, 4_102_444_800.0
"""The years 1900 to 2100, in seconds: digits that read as other years are numbers"""
MAX_COST = 1.0
"""The cost up to which training takes a reading for an unused time"""
MARGIN = 0.01
"""Readings whose costs differ by less are equally likely"""


class TimeSource(NamedTuple):
    """The columns that hold the time of a row."""

    columns: tuple[str, ...]
    format: str | None
    """The format of the text; None for ISO 8601, for numbers and for times since a start"""
    is_date: bool
    """Whether the columns hold dates and times, not numbers"""

    def read(self, batch: Columns, decimal: str | None) -> Floats:
        """Return the times of a batch, in seconds or in the column's unit; NaN for unreadable
        cells."""
        values = batch[self.columns[0]]
        if len(self.columns) > 1:
            values = join_columns([batch[name] for name in self.columns])
        if not self.is_date:
            return _read_elapsed(values) if _is_elapsed(values) else to_floats(values, decimal)
        if not is_date_type(values.type):
            values = parse_known_times(to_plain_text(values), self.format)
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


def _is_elapsed(values: pa.ChunkedArray) -> bool:
    """Return whether a column of text begins with a time since a start, 25:19:08.5."""
    if not is_text(values.type) or not len(values):
        return False
    return parse_elapsed(to_plain_text(values.slice(0, 1))) is not None


def _read_elapsed(values: pa.ChunkedArray) -> Floats:
    parsed = parse_elapsed(to_plain_text(values))
    if parsed is None or parsed[1] is not None:
        return np.full(len(values), np.nan)
    return np.asarray(parsed[0].to_numpy(), dtype=np.float64)


class TimeCandidate(NamedTuple):
    """A reading of columns as the time, and the evidence for it in the first rows."""

    source: TimeSource
    unreadable: float
    """Share of cells that are no time"""
    repeated: float
    """Share of rows that have the time of another row"""
    backward: float
    """Share of steps that go against the direction of most steps"""
    uneven: float
    """Share of steps, rows sorted, that differ from the median by more than half of it"""

    @property
    def cost(self) -> float:
        """How unlikely the reading is. A reading that tells rows apart, in order, beats one that
        does not; a name and a date only decide between equals."""
        name = self.source.columns[0]
        bonus = 0.02 * self.source.is_date + 0.02 * bool(SURE_NAMES.match(name))
        cost = 3 * self.unreadable + self.repeated + self.backward + 0.5 * self.uneven
        return cost + 0.001 * len(self.source.columns) - bonus


def find_times(batch: Columns, decimal: str | None) -> list[TimeCandidate]:
    """List the readings of a table's columns as the time of its rows, the likeliest first."""
    head = {name: values.slice(0, HEAD_ROWS) for name, values in batch.items()}
    sample = {name: values.slice(0, EVIDENCE_ROWS) for name, values in batch.items()}
    candidates = []
    for source in dict.fromkeys(_list_sources(head, decimal)):
        candidate = _judge(source, source.read(sample, decimal))
        if candidate.unreadable <= MAX_UNREADABLE:
            candidates.append(candidate)
    return sorted(candidates, key=lambda candidate: candidate.cost)


def find_time(batch: Columns, decimal: str | None) -> TimeSource | None:
    """Return the likeliest columns of the time, from the first rows of a table."""
    candidates = find_times(batch, decimal)
    return candidates[0].source if candidates else None


def _judge(source: TimeSource, times: Floats) -> TimeCandidate:
    known = times[~np.isnan(times)]
    if len(known) < 2:
        return TimeCandidate(source, 1 - len(known) / max(len(times), 1), 0.0, 0.0, 0.0)
    steps = np.diff(known)
    backward = min((steps < 0).mean(), (steps > 0).mean())  # the newest may come first
    distinct = np.unique(known)
    gaps = np.diff(distinct)
    usual = float(np.median(gaps)) if len(gaps) else 0.0
    uneven = float((np.abs(gaps - usual) > 0.5 * usual).mean()) if len(gaps) else 1.0
    repeated = 1 - len(distinct) / len(known)
    return TimeCandidate(source, 1 - len(known) / len(times), repeated, float(backward), uneven)


def _list_sources(head: Columns, decimal: str | None) -> Iterator[TimeSource]:
    """Yield every reading of columns as a time that the first rows allow."""
    clocks = list(_list_clocks(head))
    for name, values in head.items():
        if is_date_type(values.type):
            yield TimeSource((name,), None, is_date=True)
            for names, mark in clocks if _is_midnight(values) else ():
                if mark in ("typed", "%H"):
                    yield TimeSource((name, *names), None, is_date=True)
        elif is_text(values.type) and len(values) and not _is_plain_number(values):
            yield from _list_text_sources(name, to_plain_text(values), clocks)
        elif pa.types.is_integer(values.type) and len(values) and NAMES.search(name):
            text = to_plain_text(values)
            formats = [pattern for pattern in find_formats(text) if pattern is not None]
            for pattern in formats if _is_plausible(text, formats) else ():
                yield TimeSource((name,), pattern, is_date=True)
    yield from _list_parts(head)
    yield from _list_numbers(head, decimal)


def _is_plain_number(values: pa.ChunkedArray) -> bool:
    """Return whether a column of text begins with a number that is no date of digits: most columns
    of a CSV file do, and trying all formats on each takes long."""
    first = str(values[0]).strip() if len(values) else ""
    if first.isdigit():
        return len(first) not in (8, 10, 12, 14)
    return bool(re.fullmatch(r"[+-]?\d*[.,]?\d+(?:[eE][+-]?\d+)?", first))


def _list_clocks(head: Columns) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield columns with a time of day, or an hour and perhaps a minute, and their format."""
    minute = next((name for name in head if MINUTES.match(name.strip())), None)
    for name, values in head.items():
        kind = values.type
        if pa.types.is_time(kind) or pa.types.is_duration(kind):
            yield (name,), "typed"
        elif HOURS.match(name.strip()) and _is_hour(values):
            yield (name,), "%H"
            if minute is not None:
                yield (name, minute), "%H %M"
        elif is_text(kind) and (NAMES.search(name) or not _is_plain_number(values)):
            mark = _find_clock(to_plain_text(values), is_named=bool(NAMES.search(name)))
            if mark is not None:
                yield (name,), mark


def _is_hour(values: pa.ChunkedArray) -> bool:
    """Return whether a column holds whole numbers from 0 to 23."""
    numbers = to_floats(values, None)
    return bool(len(numbers) and np.isin(numbers, np.arange(24.0)).all())


def _find_clock(text: pa.ChunkedArray, *, is_named: bool) -> str | None:
    """Return the format of a column of times of day; None where a cell is none."""
    if not len(text):
        return None
    for pattern, mark in (CLOCKS | (DIGIT_CLOCKS if is_named else {})).items():
        if pc.all(pc.match_substring_regex(text, pattern)).as_py():
            if mark == "%I:%M:%S %p" and str(text[0]).count(":") == 1:
                return "%I:%M %p"
            return mark
    return None


def _is_midnight(values: pa.ChunkedArray) -> bool:
    """Return whether dates have no time of day."""
    micros = values.cast(pa.timestamp("us", getattr(values.type, "tz", None)), safe=False)
    known = micros.drop_null().cast(pa.int64()).to_numpy()
    return bool((known % int(DAY_S * MICROSECONDS) == 0).all())


def _list_text_sources(
    name: str, text: pa.ChunkedArray, clocks: Sequence[tuple[tuple[str, ...], str]]
) -> Iterator[TimeSource]:
    """Yield the readings of a column of text, alone and with a column of times of day."""
    if parse_elapsed(text.slice(0, 1)) is not None:
        yield TimeSource((name,), None, is_date=False)
    elif any(names == (name,) for names, _ in clocks):
        return
    formats = find_formats(text)
    if not formats and NAMES.search(name):
        formats = _find_most(text)
    if not _is_plausible(text, formats):
        return
    for pattern in formats:
        source = TimeSource((name,), pattern, is_date=True)
        yield source
        date = _find_date_format(text, pattern) if clocks else None
        for names, mark in clocks if date is not None else ():
            if mark != "typed":
                yield TimeSource((name, *names), f"{date} {mark}", is_date=True)


def _is_plausible(text: pa.ChunkedArray, formats: Sequence[str | None]) -> bool:
    """Return whether text of digits alone reads as dates of our time; any other text is."""
    if not formats or not str(text[0]).isdigit():
        return bool(formats)
    micros = parse_known_times(text, formats[0]).drop_null().cast(pa.int64()).to_numpy()
    seconds = micros / MICROSECONDS
    return bool(len(seconds) and (seconds >= MIN_YEAR_S).all() and (seconds < MAX_YEAR_S).all())


def _find_most(text: pa.ChunkedArray) -> list[str | None]:
    """Return the formats that fit nearly all cells, where some cells are no times."""
    for position in sorted({0, len(text) // 2, len(text) - 1}):
        fitting = [
            candidate
            for candidate in find_formats(text.slice(position, 1))
            if parse_known_times(text, candidate).null_count <= MAX_UNREADABLE * len(text)
        ]
        if fitting:
            return fitting
    return []


def _find_date_format(text: pa.ChunkedArray, pattern: str | None) -> str | None:
    """Return the format of dates without a time of day, so that one can be joined to it; None
    where they have one."""
    if pattern is not None and not re.search(r"%[HIMSpT]", pattern):
        return pattern
    if pattern is None and pc.all(pc.match_substring_regex(text, r"^\d{4}-\d{2}-\d{2}$")).as_py():
        return "%Y-%m-%d"
    midnight = re.search(r"[ T]0?0:00(:00)?$", str(text[0]))
    if midnight is None or not pc.all(pc.ends_with(text, pattern=midnight.group())).as_py():
        return None
    date = "%Y-%m-%d" if pattern is None else re.split(r"[ T]%[HI]", pattern)[0]
    return date + midnight.group()  # the same in every cell: text of the format


def _list_parts(head: Columns) -> Iterator[TimeSource]:
    """Yield columns of years, months, days and hours. `mm` may be the month, and the minute beside
    a month; the first name of a file may begin with the mark of a comment."""
    plain = {name: name.strip().lower().removeprefix("#") for name in head}
    columns: list[str] = []
    marks: list[str] = []
    for known, mark in PARTS:
        free = {part: name for name, part in reversed(plain.items()) if name not in columns}
        name = next((free[part] for part in known if part in free), None)
        if name is None:
            break
        columns.append(name)
        marks.append(mark)
    while len(columns) >= 2:
        time_format = " ".join(marks)
        text = join_columns([to_plain_text(head[name]) for name in columns])
        times = parse_known_times(text, time_format)
        if len(text) and not times.null_count and pc.min(pc.year(times)).as_py() > 999:
            yield TimeSource(tuple(columns), time_format, is_date=True)
        columns.pop()
        marks.pop()


def _list_numbers(head: Columns, decimal: str | None) -> Iterator[TimeSource]:
    """Yield columns of numbers that are named like a time and rise or fall throughout. A column
    whose name leaves no doubt may be in any order if its numbers are distinct."""
    for name, values in head.items():
        kind = values.type
        if (
            not (NAMES.search(name) or YEARS.match(name.strip()))
            or pa.types.is_dictionary(kind)
            or is_date_type(kind)
        ):
            continue
        if pa.types.is_time(kind) or pa.types.is_duration(kind):
            continue
        numbers = to_floats(values, decimal)
        steps = np.diff(numbers)
        if not steps.any() or np.isnan(numbers).any():
            continue
        # a step of zero counts as rising: series whose rows alternate share their times
        is_ordered = max((steps >= 0).mean(), (steps < 0).mean()) >= MIN_RISING
        is_sure = SURE_NAMES.match(name) and len(np.unique(numbers)) == len(numbers) > 2
        if is_ordered or is_sure:
            yield TimeSource((name,), None, is_date=False)


def describe_unused_time(table: DataTable, data: Data) -> list[str]:
    """Note a column that looks like the time of the rows where `data.time` names none."""
    if data.time_columns or not table.num_rows:
        return []
    head = table.slice_rows(0, min(EVIDENCE_ROWS, table.num_rows))
    batch = {
        name: head.read_column(name)
        for name in table.column_names
        if name != table.file_column and _may_be_time(name, table.reader.get_type(name))
    }
    candidates = [
        candidate
        for candidate in find_times(batch, table.decimal)
        if not set(candidate.source.columns) & {*data.ids, *(data.targets or ())}
        if candidate.cost < MAX_COST
    ]
    if not candidates:
        return []
    best = candidates[0]
    names = " and ".join(f'"{name}"' for name in best.source.columns)
    note = f"{names} may be the time of the rows, but data.time is not set: rows are taken in the "
    if not best.backward:
        return [f"{note}order of the file, and gaps are not seen"]
    share = format_number(100 * best.backward, figures=2)
    return [f"{note}order of the file, in which {share} % of the steps in time go back"]


def _may_be_time(name: str, kind: pa.DataType) -> bool:
    parts = {part for known, _ in PARTS for part in known}
    named = bool(NAMES.search(name) or HOURS.match(name) or name.strip().lower() in parts)
    return named or is_text(kind) or is_date_type(kind)


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
