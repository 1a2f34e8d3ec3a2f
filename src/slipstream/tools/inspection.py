"""Inspect files without a config: describe the columns, list problems, propose a first config."""

from __future__ import annotations

import json
import math
import os
import re
import shlex
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from itertools import combinations, pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import tomli_w

from slipstream import config as configs
from slipstream.base import machine
from slipstream.base.errors import (
    EmptyFileError,
    EncodingError,
    NoNamesError,
    Option,
    UserError,
    Wording,
)
from slipstream.base.storage import group_by_content, is_url, parse_path
from slipstream.base.text import find_nearest, format_count, format_number
from slipstream.config import ALL_ROWS, SIMULATED, Config, Data
from slipstream.data import files
from slipstream.data.columns import is_text
from slipstream.data.formats.archive import ARFF, LABEL, TARGET, TS
from slipstream.data.formats.reader import Batch, OpenTable, ReadOptions, open_table
from slipstream.data.layout import UNNAMED
from slipstream.data.roles import SERIES
from slipstream.data.series import is_same
from slipstream.data.table import FILE_COLUMN
from slipstream.data.times import (
    MARGIN,
    NAMES,
    SortedTimes,
    TimeCandidate,
    TimeOrder,
    TimeSource,
    find_times,
    to_floats,
)
from slipstream.reporting.page import Course
from slipstream.reporting.wording import find_unit, format_step
from slipstream.tools.columns import (
    BOOLEAN,
    EMPTY,
    NUMBER,
    TEXT,
    TIME,
    ColumnProfile,
    looks_like_number,
)

Floats = npt.NDArray[np.float64]

EVERY_SHEET = ReadOptions(sheets=("*",))


def open_tables(path: str, options: ReadOptions = EVERY_SHEET) -> Iterator[OpenTable]:
    """Open every table of a file, a folder or a pattern, one after the other."""
    if path.startswith(SIMULATED):
        for table in files.read_tables(Data(path=path), None):
            yield open_table(table)
        return
    folder, paths = files.expand_path(parse_path(path))
    for file in files.open_files(folder, paths, options):
        try:
            yield from file.inspect()
        except EmptyFileError:
            if len(paths) == 1:
                raise
            notes = (files.EMPTY_NOTE,)
            yield OpenTable(file.name, "empty", 0, (), {}, notes, None, None, iter(()))


KEPT_ROWS = 20_000
"""First rows of a table that are kept, for what statistics of single columns do not tell"""
IDS = re.compile(
    r"(^|[^a-z])(id|uid|series|item|store|station|site|sensor|unit|subject|user|customer|machine"
    r"|engine|device|cell|battery|patient|meter|vehicle|sample|case)([^a-z]|$)",
    re.I,
)
"""Names of columns that tell series apart where there is no time"""
NAMELESS = re.compile(r"V\d+")
"""Names of columns without names"""
UNEVEN = 1.1
"""How much longer than the shortest series the longest is where a counter tells series apart"""
INTERLEAVED = 0.3
"""Share of rows with the time of the row above, from which on series are taken to alternate"""


MAX_KEYS = 8
"""Candidates for a series id; up to three of them are combined"""


class FileFacts(NamedTuple):
    """The name, format, size, columns and notes of a file."""

    name: str
    format: str
    num_bytes: int | None
    num_rows: int
    columns: tuple[str, ...]
    notes: tuple[str, ...]
    sheet: str = ""
    """The sheet's name, where a workbook has several"""


class SeriesColumns(NamedTuple):
    """The columns that identify a series, and the series that they give."""

    names: tuple[str, ...]
    num_series: int
    shortest: int
    """Rows of the shortest series"""
    disorder: int
    """Rows whose time is not later than the row above in the same series"""
    is_mixed: bool = False
    """Whether rows of different series alternate"""
    starts: tuple[int, ...] = ()
    """The first row of each series; empty where series alternate"""


MAX_RIVALS = 3
"""Formats of the same cells that are compared over all rows"""
MAX_REPEATED = 0.05
"""Share of rows with the time of another row up to which they are repeats, not other series"""


class TimeReading(NamedTuple):
    """A reading of columns as the time, and its steps over all rows."""

    source: TimeSource
    order: TimeOrder

    @property
    def cost(self) -> float:
        """How unlikely the reading is by all rows: cells that are no time, steps back, gaps."""
        order = self.order
        steps = order.sort(order.file_starts) if order.file_starts else None
        gaps = order.gaps if steps is None else steps.gaps
        backward = min(order.backward, order.num_rows - order.backward - order.repeated)
        weighed = 3 * order.unreadable + backward + 0.5 * gaps
        return weighed / max(order.num_rows, 1)


@dataclass
class Survey:
    """Statistics of all rows of all files."""

    files: list[FileFacts] = field(default_factory=list)
    empty_files: list[FileFacts] = field(default_factory=list)
    columns: dict[str, ColumnProfile] = field(default_factory=dict)
    readings: list[TimeReading] = field(default_factory=list)
    """The likeliest reading of columns as the time; after it, formats that fit the first rows as
    well, until all rows have decided"""
    candidates: list[TimeCandidate] = field(default_factory=list)
    """All readings that the first rows allow, the likeliest first"""
    has_changed_repeats: bool = False
    """Whether a row with the time of the row above differs from it"""
    head: Batch = field(default_factory=dict)
    """The first rows of the first table"""
    decimal: str | None = None
    """The decimal mark of the first table, where it is known"""
    scalars: set[str] = field(default_factory=set)
    has_sheets: bool = False
    """Whether a workbook has several sheets, each of which is a series"""
    threads: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(machine.count_available_cores())
    )

    @property
    def num_rows(self) -> int:
        return sum(file.num_rows for file in self.files)

    @property
    def has_cases(self) -> bool:
        """Whether the files are class archives, which have a series per row."""
        return all(file.format in (TS, ARFF) for file in self.files)

    @property
    def time(self) -> TimeSource | None:
        return self.readings[0].source if self.readings else None

    @property
    def time_columns(self) -> tuple[str, ...]:
        return self.time.columns if self.time else ()

    @property
    def order(self) -> TimeOrder:
        return self.readings[0].order if self.readings else TimeOrder()

    @property
    def order_is_date(self) -> bool:
        return self.time is not None and self.time.is_date

    @property
    def rival(self) -> TimeReading | None:
        """A second reading of the same cells that all rows allow as well."""
        return self.readings[1] if len(self.readings) > 1 else None

    def add(self, table: OpenTable) -> None:
        """Read all rows of a table."""
        num_rows = 0
        for name in table.columns:
            profile = self.columns.setdefault(name, ColumnProfile(name))
            profile.unit = profile.unit or table.units.get(name, "")
        for number, batch in enumerate(table.batches):
            if not self.files and not number:
                self._find_readings(batch, table.decimal)
            if not number:
                for reading in self.readings:
                    if set(reading.source.columns) <= batch.keys():
                        reading.order.start_file()
            self._add_batch(table, batch, is_first=not number)
            num_rows += len(next(iter(batch.values()))) if batch else 0
        self.scalars |= set(table.scalars)
        self.has_sheets |= bool(table.sheet)
        facts = table.name, table.format, table.num_bytes, num_rows, table.columns, table.notes
        (self.files if num_rows else self.empty_files).append(FileFacts(*facts, table.sheet))

    def _add_batch(self, table: OpenTable, batch: Batch, *, is_first: bool) -> None:
        for number, (source, order) in enumerate(self.readings):
            if set(source.columns) <= batch.keys():
                times = source.read(batch, table.decimal)
                order.add(times)
                if not number and not self.has_changed_repeats:
                    self.has_changed_repeats = _has_changed_repeats(batch, times)

        def add(name: str) -> None:
            values, profile = batch[name], self.columns[name]
            profile.add(values, table.decimal)
            if is_text(values.type) or profile.kind == NUMBER:
                profile.runs.add(values, is_first=is_first)

        for _ in self.threads.map(add, batch):  # Arrow and numpy release Python's lock
            pass

    def repeats_are_copies(self, num_repeated: int) -> bool:
        """Return whether all rows with a repeated time repeat the whole row above."""
        return num_repeated == self.order.repeated and not self.has_changed_repeats

    def _find_readings(self, batch: Batch, decimal: str | None) -> None:
        """Find the likeliest reading of the time, and formats of the same cells that are as
        likely by the first rows."""
        self.head = {name: values.slice(0, KEPT_ROWS) for name, values in batch.items()}
        self.decimal = decimal
        self.candidates = find_times(batch, decimal)
        if self.candidates:
            best = self.candidates[0]
            rivals = [
                candidate
                for candidate in self.candidates
                if candidate.source.columns == best.source.columns
                if candidate.cost - best.cost < MARGIN
            ]
            self.readings = [
                TimeReading(rival.source, TimeOrder()) for rival in rivals[:MAX_RIVALS]
            ]

    def decide_time(self) -> None:
        """Order the readings of the time by all rows; only equals of the best stay beside it."""
        self.readings.sort(key=lambda reading: reading.cost)
        best = self.readings[0].cost if self.readings else 0.0
        self.readings = [reading for reading in self.readings if reading.cost == best]

    def find_series_columns(self) -> SeriesColumns | None:
        """Find the columns that identify a series: their values change where the time starts
        again, or alternate where times repeat."""
        order, used = self.order, self.time_columns
        if self.time is None:
            return self._find_named()
        if not order.disorder:
            return None
        whole = order.sort(order.file_starts)
        is_unique = whole is not None and whole.repeated <= MAX_REPEATED * order.num_rows
        if whole is not None and is_unique and 2 * whole.gaps < len(order.disorder):
            return None  # one series, whose rows are not sorted or repeat some times
        if order.repeated >= INTERLEAVED * order.num_rows:
            return self._find_mixed()
        names = [
            name
            for name, profile in self.columns.items()
            if profile.runs.is_open and len(profile.runs.positions) > len(self.files)
            if name not in used and name not in self.scalars
        ]
        names = sorted(names, key=lambda name: len(self.columns[name].runs.positions))[:MAX_KEYS]
        combined = (
            self._combine(key_names)
            for count in (1, 2, 3)
            for key_names in combinations(names, count)
        )
        fitting = [
            candidate
            for candidate in combined
            if candidate and 2 * candidate.disorder < len(order.disorder)
        ]
        return min(
            fitting, key=lambda candidate: (candidate.disorder, len(candidate.names)), default=None
        )

    def _combine(self, names: tuple[str, ...]) -> SeriesColumns | None:
        """Return the series by the values of these columns; None where a series has rows in
        several parts of the table."""
        runs = [self.columns[name].runs for name in names]
        starts = sorted({row for column_runs in runs for row in column_runs.positions})
        keys = {tuple(column_runs.find_value(row) for column_runs in runs) for row in starts}
        if len(keys) < len(starts):
            return None
        ends = [*starts[1:], self.num_rows]
        shortest = min(end - start for start, end in zip(starts, ends, strict=True))
        disorder = len(set(self.order.disorder) - set(starts))
        return SeriesColumns(names, len(starts), shortest, disorder, starts=tuple(starts))

    def _find_mixed(self) -> SeriesColumns | None:
        """Find a column of series ids that alternate: each time occurs once with every id."""
        num_times = self.order.num_rows - self.order.repeated
        for name, profile in self.columns.items():
            count = profile.num_distinct or len(profile.numbers or ())
            distance = abs(count * num_times - profile.num_rows)
            if name in self.time_columns or profile.is_constant:
                continue
            if count > 1 and distance <= 0.05 * profile.num_rows:
                return SeriesColumns((name,), count, profile.num_rows // count, 0, is_mixed=True)
        return self._find_mixed_group()

    def _find_mixed_group(self) -> SeriesColumns | None:
        """Find two or three columns whose values together occur once at each time, by the first
        rows."""
        if self.time is None or not set(self.time.columns) <= self.head.keys():
            return None
        times = _encode(pa.chunked_array([self.time.read(self.head, self.decimal)]))
        per_time = int(np.bincount(times).max())
        codes = {
            name: _encode(self.head[name])
            for name, profile in self.columns.items()
            if name in self.head and name not in self.time_columns and self._may_be_key(profile)
        }
        names = [name for name, found in codes.items() if 1 <= found.max() < 1.5 * per_time]
        for count in (2, 3):
            for group in combinations(names[:MAX_KEYS], count):
                keys = np.unique(
                    np.stack([codes[name] for name in group]), axis=1, return_inverse=True
                )
                num_series = int(keys[1].max()) + 1
                is_once = len(np.unique(np.stack([times, keys[1].ravel()]), axis=1).T) == len(times)
                if is_once and num_series < 1.5 * per_time and 2 * num_series <= len(times):
                    rows = self.num_rows // num_series
                    return SeriesColumns(group, num_series, rows, 0, is_mixed=True)
        return None

    def _may_be_key(self, column: ColumnProfile) -> bool:
        """Return whether a column holds texts or whole numbers that repeat."""
        if column.kind == TEXT:
            return column.num_distinct is not None and not column.is_constant
        numbers = column.numbers
        is_whole = column.kind == NUMBER and numbers is not None and not column.is_constant
        return is_whole and all(number.is_integer() for number in numbers or ())

    def _find_named(self) -> SeriesColumns | None:
        """Find a column that is named like a series id and keeps its value for the rows of a
        series, in a table without times; where columns have no names, one beside a column that
        counts the rows of each series."""
        for name, profile in self.columns.items():
            is_nameless = NAMELESS.fullmatch(name) is not None
            if name in self.scalars or profile.is_constant:
                continue
            if not (is_nameless or IDS.search(name)):
                continue
            if profile.runs.is_open and len(profile.runs.positions) > len(self.files):
                found = self._combine((name,))
                if found is not None and (not is_nameless or self._has_counter(found)):
                    return found
        return None

    def _has_counter(self, series: SeriesColumns) -> bool:
        """Return whether a column counts the rows of each series, which have different lengths: the
        hours of a day are as many every day."""
        lengths = np.diff([*series.starts, self.num_rows])
        return bool(lengths.max() > UNEVEN * lengths.min()) and any(
            column.num_counted and column.num_steps - column.num_counted == series.num_series - 1
            for column in self.columns.values()
        )

    @property
    def file_starts(self) -> list[int]:
        """The number of each file's first row, over all files."""
        ends = np.cumsum([file.num_rows for file in self.files])
        return [0, *ends[:-1].tolist()]

    def list_shared(self) -> list[str]:
        """List the columns that all files have."""
        return [name for name in self.columns if all(name in file.columns for file in self.files)]


def _encode(values: pa.ChunkedArray) -> npt.NDArray[np.int64]:
    """Number the different values of a column from 0 on."""
    encoded = values.combine_chunks()
    if not pa.types.is_dictionary(encoded.type):
        encoded = encoded.dictionary_encode()
    codes = encoded.indices.fill_null(len(encoded.dictionary))
    return np.asarray(codes.to_numpy(zero_copy_only=False), dtype=np.int64)


def _has_changed_repeats(batch: Batch, times: Floats) -> bool:
    """Return whether a row with the time of the row above differs from it in another column."""
    rows = np.flatnonzero(np.diff(times) == 0) + 1
    if not 0 < len(rows) <= MAX_REPEATED * len(times):
        return bool(len(rows))  # so many are no copies
    here, above = pa.array(rows), pa.array(rows - 1)
    return not all(values.take(here).equals(values.take(above)) for values in batch.values())


def survey_tables(tables: Iterable[OpenTable], path: str) -> Survey:
    """Read all rows of all tables once and return their statistics."""
    survey = Survey()
    with survey.threads:
        for table in tables:
            survey.add(table)
    survey.decide_time()
    if not survey.num_rows:
        raise UserError(f"{parse_path(path)}: has no rows")
    return survey


CONTEXT, HORIZON = 96, 24
"""Rows of the proposed windows, where the series are long enough: four days and one, if hourly"""
EPOCHS, FEW_WINDOWS = 20, 10_000
"""Epochs that a config has, and the windows below which it leaves them to the data"""
MAX_INPUTS = 60
"""Inputs up to which `data.inputs` lists them; above, `data.ignore` lists the other columns"""
MAX_MISSING = 0.5
"""Share of missing values from which on a column is no input"""
TARGETS = (
    *("target", "y", "soc", "soh", "rul", "ot", "sales", "close", "price", "load", "demand"),
    *("power", "consumption", "cnt", "count", "pm2.5", "pm25", "traffic", "passengers"),
    *("appliances", "energy", "value"),
)
"""Names of columns that people predict, the likeliest first"""
AXES = {"x", "y", "z"}
"""Names of the axes of a sensor, of which y is no target"""
LABELS = ("label", "class", "activity", "state", "fault", "status", "target", "category", "event")
"""Names of columns of classes"""
MAX_CLASSES = 50
SHORT = 0.3
"""Length of the shortest series, as a share of the mean, below which short ones are dropped"""
MANY_GAPS = 5
"""Gaps up to which windows never cross them; where gaps are the rule, rows count as consecutive"""
INFINITE = [math.inf, -math.inf]
SETS = ("train", "val", "test")
MAX_ALTERNATIVES = 3
"""Less likely readings of the time that the config lists as comments"""


def _format_time(source: TimeSource) -> dict[str, Any]:
    """Return the settings of a reading of the time."""
    columns = source.columns
    settings: dict[str, Any] = {"time": columns[0] if len(columns) == 1 else list(columns)}
    return settings if source.format is None else settings | {"time_format": source.format}


def describe_steps(order: SortedTimes, *, is_date: bool) -> str:
    """Say how regular times are: "every 1 hour, 3 gaps"."""
    if order.step is None:
        return "a single time"
    step = format_step(order.step, is_date)
    parts = [f"every {step}", format_count(order.gaps, "gap") if order.gaps else "no gaps"]
    if order.repeated:
        parts.append(format_count(order.repeated, "repeated time"))
    return ", ".join(parts)


def describe_candidate(candidate: TimeCandidate) -> str:
    """Say what speaks against a reading of the time."""
    shares = {
        "of the cells are no times": candidate.unreadable,
        "of the rows have the time of another row": candidate.repeated,
        "of the steps go back": candidate.backward,
        "of the steps are uneven": candidate.uneven,
    }
    found = [
        f"{format_number(100 * share, figures=2)} % {what}"
        for what, share in shares.items()
        if share
    ]
    return ", ".join(found) or "as regular, but another column is named like the time"


def _simplify(name: str) -> str:
    """Return a column's name in lower case, without units and marks: "Load (kW)" becomes "load"."""
    bare = re.sub(r"\([^)]*\)|\[[^\]]*\]", " ", name.lower())
    return " ".join(re.findall(r"[^\W_]+(?:\.\d+)?", bare))


def find_target(names: Sequence[str]) -> str:
    """Return the column that people would most likely predict: by its name, or the last."""
    return find_named_target(names) or names[-1]


def find_named_target(names: Sequence[str]) -> str | None:
    """Return the column whose name people predict most likely; None where no name is known."""
    simple = {_simplify(name): name for name in reversed(names)}
    words = {word: name for text, name in simple.items() for word in text.split() if len(word) > 1}
    if simple.keys() >= AXES:
        del simple["y"]
    for known in (simple, words):
        for target in TARGETS:
            if target in known:
                return known[target]
    return None


STATES = {"soc", "soh", "rul", "sop", "soe"}
"""Names of states that a model estimates from what is measured"""
ESTIMATE_CONTEXT = 300
"""Rows that an estimate reads, at most"""
MIN_SERIES_COLUMNS = 3
"""Numbered columns from which on each of them is a series, where no target is named"""
MIN_SHARED_SERIES = 6
"""Series from which on an estimate is tested on whole series"""
MIN_ROWS = 30
"""Rows of a series from which on its columns are compared with the target"""
MAX_WHOLE_ROWS = 2_000
"""Rows of the longest series up to which a series of one class is one window"""
VAL_SHARE = 0.1
"""The share of rows that the default split validates on, into which a forecast has to fit"""
TRAIN_FILE, TEST_FILE = re.compile(r"[_-]train\b", re.I), re.compile(r"[_-]test\b", re.I)
"""File names that say which set of an archive they hold"""
MAX_LISTED = 12
"""Columns that a message lists"""
WIDE_COLUMNS = 20
"""Numbered columns from which on a table may have a series per row"""
WIDE_ROWS = 500
"""Rows by which it is decided"""
MIN_CONTRAST = 0.2
"""How much more neighbours along a row correlate than neighbours down a column"""
MIN_SEASON = 0.2
"""The autocorrelation of differences from which on a table has a season"""
SEASONS_IN, SEASONS_OUT = 7, 2
"""Seasons that a model of many series reads and forecasts"""
MAX_WINDOWS = 100_000
"""Windows of all series together, about, that an epoch has"""
MAX_RATIO = 100.0
"""How far the sizes of series may differ and be scaled alike"""


class WideLayout(NamedTuple):
    """A table with a series per row: its values stand in numbered columns."""

    values: tuple[str, ...]
    """The columns of values, in their order"""
    others: tuple[str, ...]
    """The other columns"""
    first: int
    """The place of the first column of values, from 1 on"""
    is_last: bool
    """Whether the table ends with the values"""
    shortest: int
    """Values of the shortest series"""
    longest: int
    ratio: float
    """The size of the largest series divided by that of the smallest"""
    period: int | None
    """Rows of a season; None where none is seen"""


def find_wide_layout(survey: Survey) -> WideLayout | None:
    """Return the layout of a table with a series per row: without times, with numbered columns of
    numbers, in which cells follow from those on their left, not from those above."""
    names = list(survey.columns)
    values = _list_numbered(survey, names)
    if survey.time is not None or len(values) < WIDE_COLUMNS or not survey.head:
        return None
    columns = [to_floats(survey.head[name].slice(0, WIDE_ROWS), None) for name in values]
    cells = np.stack(columns, axis=1)
    if len(cells) < 2 or _correlate(cells) < _correlate(cells.T) + MIN_CONTRAST:
        return None
    lengths = len(values) - np.isnan(cells)[:, ::-1].argmin(axis=1)  # without empty cells behind
    sizes = np.nanmean(np.abs(cells), axis=1)
    sizes = sizes[sizes > 0]
    ratio = float(sizes.max() / sizes.min()) if len(sizes) else 1.0
    others = tuple(name for name in names if name not in set(values))
    place, is_last = 1 + names.index(values[0]), names[-1] == values[-1]
    shortest, longest = int(lengths.min()), int(lengths.max())
    return WideLayout(
        tuple(values), others, place, is_last, shortest, longest, ratio, _find_period(cells)
    )


def _find_period(cells: Floats) -> int | None:
    """Return after how many cells the rows of a table repeat: the first peak of their mean
    autocorrelation that is nearly as high as the highest."""
    length = cells.shape[1]
    steps = np.nan_to_num(np.diff(cells, axis=1))  # of differences, so that a trend is no season
    size = np.linalg.norm(steps, axis=1, keepdims=True)
    steps = steps / np.where(size > 0, size, 1.0)
    power = np.abs(np.fft.rfft(steps, 2 * length, axis=1)) ** 2
    correlation = np.fft.irfft(power, axis=1)[:, : length // 3].mean(axis=0)
    inner = correlation[1:-1]
    is_peak = (inner > correlation[:-2]) & (inner >= correlation[2:])
    peaks = np.flatnonzero(is_peak) + 1
    peaks = peaks[peaks > 1]
    if not len(peaks) or correlation[peaks].max() < MIN_SEASON:
        return None
    return int(peaks[correlation[peaks] >= 0.8 * correlation[peaks].max()][0])


def _correlate(cells: Floats) -> float:
    """Return the correlation of neighbours along rows, each without its mean."""
    parts = cells - np.nanmean(cells, axis=1, keepdims=True)
    left, right = parts[:, :-1].ravel(), parts[:, 1:].ravel()
    known = ~(np.isnan(left) | np.isnan(right))
    left, right = left[known], right[known]
    size = math.sqrt(float(left @ left) * float(right @ right))
    return float(left @ right) / size if size else 0.0


def _list_numbered(survey: Survey, names: Sequence[str]) -> list[str]:
    """List the longest run of columns of numbers whose names count on: V2, V3, V4."""
    longest: list[str] = []
    numbered: list[str] = []
    expected = None
    for name in names:
        match = re.fullmatch(r"(.*?)(\d+)", name)
        if match is None or survey.columns[name].kind not in (NUMBER, EMPTY):
            numbered, expected = [], None
            continue
        prefix, number = match[1], int(match[2])
        numbered = [*numbered, name] if expected == (prefix, number) else [name]
        expected = (prefix, number + 1)
        longest = max(longest, numbered, key=len)
    while len(longest) > 1 and _holds_codes(survey.columns[longest[0]]):
        longest.pop(0)  # a label or the number of a series
    ends_with_codes = [_holds_codes(survey.columns[name]) for name in longest[-2:]]
    if len(longest) > 2 and ends_with_codes == [False, True]:
        longest.pop()  # a label behind the values
    return longest


def _holds_codes(column: ColumnProfile) -> bool:
    """Return whether a column holds a few whole numbers."""
    numbers = column.numbers
    if numbers is None or len(numbers) > MAX_CLASSES:
        return False
    return all(number.is_integer() for number in numbers)


class Doubt(NamedTuple):
    """A question that the rows leave open. Its name is what `data.accept` takes."""

    name: str
    message: str
    settings: tuple[str, ...] = ()
    """Settings of `[data]` any of which answers it"""


class Aim(NamedTuple):
    """What is to be predicted, and what the table is, as far as a person has said it."""

    targets: tuple[str, ...] = ()
    horizon: int | None = None
    """Rows to forecast; 0 estimates the targets at the last row"""
    settings: Mapping[str, Any] = MappingProxyType({})
    """Settings of `[data]` that replace those of the proposal"""

    @property
    def ids(self) -> tuple[str, ...]:
        named = self.settings.get("id", ())
        return (named,) if isinstance(named, str) else tuple(named)


class Proposal:
    """A config to begin with, and the reason for each setting that needs one."""

    def __init__(
        self, survey: Survey, path: str, settings: Mapping[str, Any], aim: Aim | None = None
    ) -> None:
        self.survey, self.path, self.aim = survey, path, aim or Aim()
        self.is_final = aim is not None
        """Whether a model is trained by it at once, as `slipstream auto` does"""
        self.series = self._find_series()
        self.reasons: dict[str, str] = {}
        self.left_out: dict[str, str] = {}
        """Lines that the config has as comments, with the reason"""
        self.doubts: list[Doubt] = []
        """Questions that only a person can answer"""
        self.order = self._sort_times()
        self.roles: dict[str, str] = {}
        self.data: dict[str, Any] = {"path": path, **settings}
        if survey.has_sheets and "sheet" not in settings:
            self.data["sheet"] = "*"
            self.reasons["sheet"] = "every sheet is a series"
        for name in self.aim.targets:
            self._check_target(name)
        self.wide = find_wide_layout(survey)
        if survey.has_cases:
            self._choose_cases()
        elif self.wide is not None:
            self._choose_wide(self.wide)
        elif self._has_series_columns():
            self._choose_marks()
            self._choose_rows()
            self._choose_series_columns()
            self._choose_split()
        else:
            self._choose_marks()
            self._choose_rows()
            self._choose_columns()
            self._choose_split()
            self._ask_about_numbers()
        if self.doubts:
            self.data["undecided"] = {doubt.name: doubt.message for doubt in self.doubts}
            self.reasons["undecided"] = "train refuses until it is answered"

    @property
    def config(self) -> dict[str, Any]:
        model: dict[str, Any] = {"kind": "lstm", "hidden": 64, "layers": 1}
        train: dict[str, Any] = {"epochs": EPOCHS}
        if self.wide is not None and "task" not in self.data:
            # measured on the hourly series of M4: better than an LSTM, in a fraction of its time
            model = {"kind": "mlp", "hidden": 256, "layers": 2}
            train = {"epochs": EPOCHS // 2, "loss": "mae"}
        if self.data.get("context") == "all":  # a few whole series: small steps, many of them
            model = {"kind": "tcn", "hidden": 32}
            train = {"epochs": 2 * EPOCHS, "batch": 16}
        if self._count_windows() < FEW_WINDOWS:
            del train["epochs"]
        sections = {"data": self.data, "model": model, "train": train}
        return {name: section for name, section in sections.items() if section}

    def _count_windows(self) -> int:
        """Return the number of windows, roughly."""
        whole = self.data.get("context") == "all"
        by_column = self.data.get("layout") in ("wide", "columns") and not whole
        return self.survey.num_rows * (len(self.survey.columns) if by_column else 1)

    def _find_series(self) -> SeriesColumns | None:
        """Return the columns that a person has named as the id of a series, or those that the rows
        show."""
        names, survey = self.aim.ids, self.survey
        if not names or not set(names) <= survey.columns.keys():
            return survey.find_series_columns()
        runs = [survey.columns[name].runs for name in names]
        found = survey._combine(names) if all(column_runs.is_open for column_runs in runs) else None
        if found is not None:
            return found
        keys = [_encode(survey.head[name]) for name in names if name in survey.head]
        count = np.unique(np.stack(keys), axis=1).shape[1] if keys else 1
        return SeriesColumns(names, count, survey.num_rows // count, 0, is_mixed=True)

    def _has_series_columns(self) -> bool:
        """Whether every column is a series: a person says so, or none is named as a target and
        their names count on."""
        if "layout" in self.aim.settings:
            return bool(self.aim.settings["layout"] == "columns")
        survey = self.survey
        if self.aim.targets or survey.time is None or not self.is_final:
            return False
        numbers = [name for name, column in survey.columns.items() if column.kind == NUMBER]
        free = [name for name in numbers if name not in survey.time_columns]
        return len(free) >= MIN_SERIES_COLUMNS and _list_numbered(survey, free) == free

    def _choose_series_columns(self) -> None:
        """Choose the columns of a table with a series per column."""
        values = [
            name
            for name, column in self.survey.columns.items()
            if column.kind in (NUMBER, BOOLEAN) and name not in self.roles
            if not column.is_constant and not column.is_counter
        ]
        self.data |= {"layout": "columns", "values": values}
        self.reasons["layout"] = f"a series per column: {len(values):,} series"
        self.roles |= dict.fromkeys(values, "value")
        moments = [self.survey.columns[name].moments for name in values]
        sizes = [max(abs(moment.mean), moment.deviation) for moment in moments]
        sizes = [size for size in sizes if size > 0]
        if sizes and max(sizes) > MAX_RATIO * min(sizes):
            self.data["scale_by"] = "series"
            ratio = max(sizes) / min(sizes)
            self.reasons["scale_by"] = f"sizes differ by a factor of {ratio:,.0f}"
        if any(self.survey.columns[name].num_missing for name in values) or "na" in self.data:
            self.data["missing"] = "forward"
            self.reasons["missing"] = "repeat the last known value"

    def _choose_cases(self) -> None:
        """Choose the settings of a class archive, whose format says what its columns are."""
        label = next((name for name in (LABEL, TARGET) if name in self.survey.columns), None)
        self.roles |= dict.fromkeys(self.survey.columns, "value")
        if label is not None:
            self.roles[label] = "target"
            self.data |= {"layout": "wide", "targets": [label], "context": "all"}
            if label == LABEL:
                self.data["task"] = "classify"
                self.reasons["targets"] = f"{self._count_classes(label)} classes"
            else:
                self.data["horizon"] = 0
            self.reasons["context"] = "a whole series is one window"
            tests = [file.name for file in self.survey.files if TEST_FILE.search(file.name)]
            trains = [file.name for file in self.survey.files if TRAIN_FILE.search(file.name)]
            if trains and tests and len(trains) + len(tests) == len(self.survey.files):
                self.data["split"] = {"by": FILE_COLUMN, "test": tests, "val": 0.2}
                self.reasons["split"] = "as the files are named"
            return
        self.data["layout"] = "wide"
        self.data["split"] = {"train": 0.7, "val": 0.1, "test": 0.2}

    def _choose_wide(self, wide: WideLayout) -> None:
        """Choose the columns and windows of a table with a series per row."""
        survey, columns = self.survey, self.survey.columns
        self.data["layout"] = "wide"
        self.reasons["layout"] = f"a series per row: {survey.num_rows:,} series"
        has_names = any(not name.startswith(UNNAMED) for name in columns)
        first = wide.values[0] if has_names else str(wide.first)
        last = wide.values[-1] if has_names else str(wide.first + len(wide.values) - 1)
        self.data["values"] = f"{first}:" + ("" if wide.is_last else last)
        self.roles |= dict.fromkeys(wide.values, "value")
        keys = [name for name in wide.others if self._is_key(columns[name])]
        if keys:
            self.data["id"] = keys[0]
            self.roles[keys[0]] = "id"
        wanted = self.aim.targets
        labels = [name for name in wide.others if self._is_label(columns[name])]
        named = [name for name in labels if _simplify(name) in LABELS]
        label = wanted[0] if wanted else next(iter(named or labels), None)
        if label is not None and label not in labels:
            self._choose_number_of_series(label)
            return
        if label is not None:
            self.data |= {"task": "classify", "targets": [label], "context": "all"}
            self.reasons["targets"] = f"{self._count_classes(label)} classes, one for each series"
            self.reasons["context"] = "a whole series is one window"
            self.roles[label] = "target"
            return
        self._choose_windows(wide.shortest, wide.longest)
        if wide.period is not None and wide.shortest >= 4 * wide.period:
            self.data["context"] = min(SEASONS_IN * wide.period, wide.shortest // 4)
            if not self.aim.horizon:
                self.data["horizon"] = min(SEASONS_OUT * wide.period, wide.shortest // 10)
            self.data["period"] = wide.period
            self.reasons["period"] = "rows of a season, by the correlation of rows so far apart"
        # every row of a forecast of many series is in several windows; fewer train as well
        stride = survey.num_rows * wide.longest // MAX_WINDOWS
        if stride > 1:
            self.data["stride"] = stride
            self.reasons["stride"] = "rows from one window to the next; 1 takes every window"
        if wide.ratio > MAX_RATIO:
            self.data["scale_by"] = "series"
            self.reasons["scale_by"] = f"sizes differ by a factor of {wide.ratio:,.0f}"
        self.data["split"] = {"train": 0.7, "val": 0.1, "test": 0.2}

    def _is_key(self, column: ColumnProfile) -> bool:
        """Return whether every row of a table with a series per row has a name of its own."""
        count, num_rows = self._count_classes(column.name), self.survey.num_rows
        is_named = column.kind == TEXT or (column.kind == NUMBER and IDS.search(column.name))
        return bool(is_named) and count == num_rows

    def _choose_number_of_series(self, target: str) -> None:
        """Choose to estimate a number of each series, in a table with a series per row."""
        if self.survey.columns[target].kind != NUMBER or target in self.roles:
            raise UserError(
                f'{self.path}: "{target}" is no column of numbers or of a few classes beside the '
                f"{len(self.wide.values) if self.wide else 0:,} values of each row",
                setting="data.targets",
            )
        self.data |= {"targets": [target], "horizon": 0, "context": "all"}
        self.reasons["context"] = "a whole series is one window"
        self.roles[target] = "target"

    def _ask_about_numbers(self) -> None:
        """Ask about columns that would be inputs if some of their cells were written otherwise."""
        for name, column in self.survey.columns.items():
            odd = [text for text in column.texts.counts if looks_like_number(text)]
            if column.kind == NUMBER and odd and name not in self.roles:
                self.doubts.append(
                    Doubt(
                        "numbers",
                        f'"{name}" is left out, because cells of it are written in another way '
                        f'("{odd[0]}"): write all numbers with one decimal mark and no separators '
                        "between thousands (data.decimal names the mark), or accept that it is "
                        "left out",
                        ("decimal", "inputs", "ignore"),
                    )
                )
                return

    def _choose_marks(self) -> None:
        """Choose the values that mean "missing" (data.na), beside empty cells."""
        codes = {
            code.value for profile in self.survey.columns.values() for code in profile.find_codes()
        }
        marks = {mark for profile in self.survey.columns.values() for mark in profile.find_marks()}
        values = [int(code) if code.is_integer() else code for code in sorted(codes)] + sorted(
            marks
        )
        if any(profile.num_infinite for profile in self.survey.columns.values()):
            values += INFINITE
        if values:
            self.data["na"] = values
            self.reasons["na"] = "seem to mean missing"

    def _choose_rows(self) -> None:
        """Choose the columns of time and series id, and whether rows are sorted."""
        survey, series = self.survey, self.series
        if series is not None:
            names = series.names
            self.data["id"] = names[0] if len(names) == 1 else list(names)
            self.roles |= dict.fromkeys(names, "id")
            self.reasons["id"] = f"{series.num_series:,} series"
        if survey.time is None and series is not None and self._choose_counter(series):
            return
        if survey.time is None:
            self._ask_unread_time()
            return
        settings = _format_time(survey.time)
        if survey.order.unreadable:
            self._leave_out_time(settings)
            return
        for name in survey.time.columns:
            self.roles[name] = "time"
        self.data |= settings
        self._explain_time(settings)
        if self.num_backward:
            self.data["unsorted"] = "sort"
            rows = format_count(self.num_backward, "row")
            self.reasons["unsorted"] = f"{rows} earlier than the row above"
        if self.order.repeated:
            self._choose_duplicates()

    def _choose_counter(self, series: SeriesColumns) -> bool:
        """Choose a column that counts the rows of each series as its time; return whether there is
        one."""
        for name, column in self.survey.columns.items():
            is_counted = column.num_counted + series.num_series > column.num_steps
            if name not in self.roles and is_counted and column.num_counted and series.starts:
                self.data["time"] = name
                self.reasons["time"] = "counts the rows of each series"
                self.roles[name] = "time"
                return True
        return False

    def _ask_unread_time(self) -> None:
        """Ask about a column that is named like a time, but holds text of another kind."""
        for name, column in self.survey.columns.items():
            if column.kind == TEXT and NAMES.search(name) and not column.is_constant:
                example = next(iter(column.texts.counts), "")
                shown = f' ("{example}")' if example else ""
                self.doubts.append(
                    Doubt(
                        "time",
                        f'"{name}" is named like a time, but its text{shown} has none of the usual '
                        "formats: name it as data.time with data.time_format, or accept that rows "
                        "are taken in the order of the file",
                        ("time", "time_format"),
                    )
                )
                return

    def _leave_out_time(self, settings: dict[str, Any]) -> None:
        """Leave the time out where cells of it are no times, and ask."""
        columns = self.survey.time_columns
        self.roles |= dict.fromkeys(columns, "")
        cells = format_count(self.survey.order.unreadable, "cell")
        self.left_out = {_format_line(*setting): "" for setting in settings.items()}
        self.left_out[next(iter(self.left_out))] = f"left out: {cells} cannot be read as a time"
        self.doubts.append(
            Doubt(
                "time",
                f'{cells} of "{" and ".join(columns)}" cannot be read as a time, so that data.time '
                "is left out and rows are taken in the order of the file: correct the cells and "
                "set data.time, or accept the order of the file",
                ("time", "time_format"),
            )
        )

    def _explain_time(self, settings: dict[str, Any]) -> None:
        """Say how regular the time is, ask where two readings fit, and list the alternatives."""
        survey, order = self.survey, self.order
        self.reasons["time"] = describe_steps(order, is_date=survey.order_is_date)
        rival = survey.rival
        if rival is not None and rival.source.format != settings.get("time_format"):
            self.doubts.append(
                Doubt(
                    "date format",
                    f'day and month may be swapped: data.time_format = "{settings["time_format"]}" '
                    f'and "{rival.source.format}" fit all rows equally well; keep the right one',
                    ("time_format",),
                )
            )
        chosen = survey.time
        for candidate in survey.candidates:
            source = candidate.source
            if source == chosen or len(self.left_out) >= MAX_ALTERNATIVES:
                continue
            reason = describe_candidate(candidate)
            lines = [_format_line(*setting) for setting in _format_time(source).items()]
            if chosen is not None and source.columns == chosen.columns:
                lines = lines[1:]  # only the format differs
            is_rival = survey.rival is not None and source == survey.rival.source
            if lines:
                why = "as likely" if is_rival else f"less likely: {reason}"
                self.left_out["; ".join(lines)] = why

    def _choose_duplicates(self) -> None:
        """Choose how rows with the same time become one, or ask where they are many."""
        repeated, num_rows = self.order.repeated, self.survey.num_rows
        rows = format_count(repeated, "row")
        if repeated > MAX_REPEATED * num_rows:
            self.doubts.append(
                Doubt(
                    "repeated time",
                    f"{rows} of {num_rows:,} have the time of another row: name the column that "
                    "tells series apart (data.id), resample, or merge them "
                    '(data.duplicates = "mean" | "first" | "last")',
                    ("id", "duplicates", "prepare"),
                )
            )
            return
        self.data["duplicates"] = "first" if self.survey.repeats_are_copies(repeated) else "mean"
        self.reasons["duplicates"] = f"{rows} with the time of another row"

    def _sort_times(self) -> SortedTimes:
        """Return the step and the gaps within each series, its rows sorted by time."""
        order, series = self.survey.order, self.series
        starts: Sequence[int] = order.file_starts if series is None else series.starts
        times = order.sort(starts) if starts else None
        return times or SortedTimes(order.step, order.gaps, order.repeated * (series is None))

    @property
    def num_backward(self) -> int:
        """The number of rows whose time is earlier than the row above in the same series."""
        order = self.survey.order
        if self.series is None:
            return order.backward
        return max(self.series.disorder - self.order.repeated, 0)

    def _choose_columns(self) -> None:
        columns = self.survey.columns
        wanted = self.aim.targets
        shared = set(self.survey.list_shared())
        inputs = [
            name
            for name, profile in columns.items()
            if name in shared
            if self._is_input(profile) or (name in wanted and profile.kind in (NUMBER, BOOLEAN))
        ]
        if not inputs:
            return
        label = self._find_label(wanted or columns)
        if wanted and label is None:
            self._check_numbers(wanted)
        if label is not None:
            self._choose_label(label)
            inputs = [name for name in inputs if name != label]
            targets = [label]
        else:
            targets = list(wanted) or [find_target(inputs)]
        if self.is_estimate(targets):
            inputs = [name for name in inputs if name not in targets]
            given_away = [name for name in inputs if self.gives_away(name, targets)]
            inputs = [name for name in inputs if name not in given_away] or inputs
            self.data["horizon"] = 0
        if len(inputs) <= MAX_INPUTS:
            self.data["inputs"] = inputs
        else:
            numeric = (NUMBER, BOOLEAN)
            used = {*inputs, *self.roles}
            left = [
                n for n, profile in columns.items() if n not in used and profile.kind in numeric
            ]
            self.data["ignore"] = left
        self.data["targets"] = targets
        self.reasons.setdefault("targets", "the column to predict; name another one")
        self.roles |= dict.fromkeys(inputs, "input") | dict.fromkeys(targets, "target")
        if any(columns[name].num_missing or columns[name].texts.total for name in inputs) or (
            "na" in self.data
        ):
            self.data["missing"] = "forward"
            self.reasons["missing"] = "repeat the last known value"

    def _check_target(self, name: str) -> None:
        """Refuse a target that the table, or one of its files, does not have."""
        columns = self.survey.columns
        if name not in columns:
            nearest = find_nearest(name, list(columns))
            hint = f'; did you mean "{nearest}"?' if nearest else ""
            listed = ", ".join(list(columns)[:MAX_LISTED])
            raise UserError(
                f'{self.path} has no column "{name}"{hint} (columns: {listed})',
                setting="data.targets",
            )
        lacking = [file.name for file in self.survey.files if name not in file.columns]
        if lacking:
            raise UserError(
                f'{self.path}: {lacking[0]} has no column "{name}", which '
                f"{len(self.survey.files) - len(lacking):,} of {len(self.survey.files):,} files "
                "have",
                fix="name the files that belong together by a pattern, as in "
                f"{_make_pattern(self.path, self.survey)}",
                setting="data.targets",
            )

    def _check_numbers(self, targets: Sequence[str]) -> None:
        """Refuse targets that are neither numbers nor classes."""
        for name in targets:
            column, role = self.survey.columns[name], self.roles.get(name, "")
            if role:
                what = "the time of the rows" if role == "time" else "what tells series apart"
            elif column.kind in (NUMBER, BOOLEAN):
                continue
            elif column.kind == EMPTY:
                what = "empty"
            elif len(targets) > 1:
                what = "text: classes are predicted alone, not beside other targets"
            else:
                count = "many" if column.num_distinct is None else f"{column.num_distinct:,}"
                what = (
                    f"text with {count} different values: neither numbers nor one of 2 to "
                    f"{MAX_CLASSES} classes"
                )
            numbers = [
                other
                for other, profile in self.survey.columns.items()
                if profile.kind == NUMBER and other not in self.roles
            ]
            raise UserError(
                f'{self.path}: the target "{name}" is {what}',
                fix=f"name another column ({', '.join(numbers[:MAX_LISTED])})",
                setting="data.targets",
            )

    def gives_away(self, name: str, targets: Sequence[str]) -> bool:
        """Return whether a column tells a target of the same row, up to a factor and an offset of
        each series, by the first rows."""
        head = self.survey.head
        if name not in head:
            return False
        values = to_floats(head[name], self.survey.decimal)
        starts = self.series.starts if self.series is not None else (0,)
        for target in targets:
            if target not in head or self.survey.columns[target].kind != NUMBER:
                continue
            known = to_floats(head[target], self.survey.decimal)
            parts = [
                (values[begin:end], known[begin:end])
                for begin, end in pairwise([*starts, len(known)])
                if begin < end <= len(known)
            ]
            samples = [np.stack(part)[:, ~np.isnan(part).any(axis=0)] for part in parts]
            samples = [sample for sample in samples if sample.shape[1] >= MIN_ROWS]
            samples = [sample for sample in samples if sample.std(axis=1).all()]
            if samples and all(is_same(*sample) for sample in samples):
                return True
        return False

    def is_estimate(self, targets: Sequence[str]) -> bool:
        """Whether the targets are estimated from the other columns of the same row: asked for, or
        states by their names, which nobody measures in use."""
        if self.aim.horizon is not None:
            return self.aim.horizon == 0 and "task" not in self.data
        words = {word for name in targets for word in _simplify(name).split()}
        return self.is_final and bool(words & STATES) and "task" not in self.data

    def has_clear_target(self) -> bool:
        """Whether the target is named, or follows from the file: by its name, its classes, or as
        the only column."""
        targets, names = (
            self.data.get("targets", ()),
            [name for name, role in self.roles.items() if role in ("input", "target")],
        )
        if self.aim.targets or "task" in self.data or "layout" in self.data or len(names) == 1:
            return True
        return bool(targets) and find_named_target(names) in targets

    def _find_label(self, names: Collection[str]) -> str | None:
        """Return a column that is named like classes, or the only one of text, and has a few
        values."""
        for name in names:
            column = self.survey.columns[name]
            is_text = column.kind == TEXT and len(names) == 1
            if (_simplify(name) in LABELS or is_text) and self._is_label(column):
                return name
        return None

    def _is_label(self, column: ColumnProfile) -> bool:
        """Return whether a column may hold classes: a few texts or whole numbers."""
        whole = column.kind == TEXT or all(number.is_integer() for number in column.numbers or ())
        few = 2 <= self._count_classes(column.name) <= MAX_CLASSES
        is_free = column.name not in self.roles and not column.num_missing
        return whole and few and is_free and not column.is_constant

    def _count_classes(self, name: str) -> int:
        column = self.survey.columns[name]
        return (column.num_distinct if column.kind == TEXT else len(column.numbers or ())) or 0

    def _choose_label(self, name: str) -> None:
        self.data["task"] = "classify"
        count = self._count_classes(name)
        self.reasons["targets"] = f"{count} classes, one for each row"
        if self._is_label_of_series(name):
            self.reasons["targets"] = f"{count} classes, one for each series"
            self.data["context"] = "all"

    @property
    def _starts(self) -> Sequence[int]:
        """The first row of each series; empty where series alternate."""
        return self.survey.file_starts if self.series is None else self.series.starts

    def _is_label_of_series(self, name: str) -> bool:
        """Return whether all rows of a series have one class, and there are enough series."""
        starts, series = self._starts, self.series
        count = len(starts) if series is None else series.num_series
        if count < MIN_SHARED_SERIES:
            return False
        if starts:
            runs = self.survey.columns[name].runs
            return runs.is_open and set(runs.positions) <= set(starts)
        assert series is not None
        columns = [_encode(self.survey.head[key]) for key in (*series.names, name)]
        keys = np.unique(np.stack(columns[:-1]), axis=1)
        return bool(np.unique(np.stack(columns), axis=1).shape[1] == keys.shape[1])

    def _is_input(self, column: ColumnProfile) -> bool:
        if column.kind not in (NUMBER, BOOLEAN) or column.name in self.roles:
            return False
        if column.is_constant or column.is_constant_in_training or column.is_counter:
            return False
        if column.name in self.survey.scalars or self.find_copied(column) is not None:
            return False
        if column.texts.total and not column.find_marks():
            return False
        return column.num_missing <= MAX_MISSING * column.num_rows

    def find_copied(self, column: ColumnProfile) -> str | None:
        """Return the name of an earlier column with the same values; None without one."""
        first = self._firsts.get(column.digest.digest()) if column.moments.count else None
        return first if first != column.name else None

    @cached_property
    def _firsts(self) -> dict[bytes, str]:
        """The first column with each content, by the content's hash."""
        firsts: dict[bytes, str] = {}
        for name, profile in self.survey.columns.items():
            if profile.moments.count:
                firsts.setdefault(profile.digest.digest(), name)
        return firsts

    def _choose_split(self) -> None:
        """Choose a context and a horizon that fit into the series, and the split."""
        survey, series = self.survey, self.series
        lengths = [file.num_rows for file in survey.files]
        shortest, count = min(lengths), len(lengths)
        if series is not None:
            shortest, count = series.shortest, series.num_series
        if self.data.get("layout") == "columns":
            count = len(self.data["values"])
        if self.data.get("context") == "all":
            ends = [*self._starts, survey.num_rows]
            longest = (
                max(end - start for start, end in pairwise(ends)) if self._starts else shortest
            )
            if longest <= MAX_WHOLE_ROWS:
                self.reasons["context"] = "a whole series is one window"
                return
            self.data["split"] = {"by": SERIES, "val": 0.15, "test": 0.2}
            self.reasons["split"] = "whole series: each has one class"
        self._choose_windows(shortest, survey.num_rows / count)
        window = self.data["context"] + self.data.get("horizon", 0)
        gaps = self.order.gaps  # of series that alternate, those of all of them at once
        gaps *= series.num_series if series is not None and series.is_mixed else 1
        if "time" in self.data and gaps > max(count, MANY_GAPS, survey.num_rows / (8 * window)):
            self.data["gap_tolerance"] = math.inf
            self.reasons["gap_tolerance"] = f"{gaps:,} steps are longer; rows count as consecutive"
        self.data.setdefault("split", {"train": 0.7, "val": 0.1, "test": 0.2})
        if self.data.get("horizon") == 0 and count >= MIN_SHARED_SERIES:
            self.data["split"] = {"by": SERIES, "val": 0.15, "test": 0.2}
            self.reasons["split"] = "whole series: the rows of one are too much alike"
        path = parse_path(self.path)
        if path.is_dir() and all((path / name).is_dir() for name in SETS):
            self.data["split"] = {"folders": True}

    def _choose_windows(self, shortest: int, mean: float) -> None:
        """Choose a context and a horizon that fit into series of this length."""
        if shortest < SHORT * mean and shortest < 4 * (CONTEXT + HORIZON):
            self.data["short"] = "drop"
            self.reasons["short"] = f"the shortest series has {shortest:,} rows"
            shortest = int(SHORT * mean)
        # the shortest series still has several windows in each of its three sets
        self.data["context"] = max(min(CONTEXT, shortest // 5), 1)
        self.reasons["context"] = "rows that the model sees"
        if self.data.get("task") == "classify":
            return
        if self.data.get("horizon") == 0:
            self.data["context"] = max(min(ESTIMATE_CONTEXT, shortest // 5), 1)
            self.reasons["horizon"] = "estimates the target from the other columns up to this row"
            return
        wanted = self.aim.horizon
        self._check_horizon(max(int(mean), shortest))
        self.data["horizon"] = wanted or max(min(HORIZON, shortest // 40), 1)
        if wanted:
            self.data["context"] = max(min(max(CONTEXT, wanted), shortest // 5), 1)
        self.reasons["horizon"] = "rows to forecast; 0 estimates the target at the last row"

    def _check_horizon(self, num_rows: int) -> None:
        """Refuse a forecast that is longer than the rows that validate it."""
        most, wanted = int(VAL_SHARE * num_rows), self.aim.horizon or 0
        if wanted > most and "split" not in self.aim.settings:
            raise UserError(
                f"{self.path}: "
                + Option("horizon")
                + f" is {wanted:,}, but a series has {num_rows:,} rows, of which {most:,} validate",
                fix=f"forecast at most {most:,} rows, or change data.split",
                setting="data.horizon",
            )

    def to_toml(self, path: str | None = None) -> str:
        """Format the config as TOML, each choice with its reason; `path` replaces `data.path`."""
        reasons, left_out = self.reasons, self.left_out.items()
        lines = ["# Written by slipstream inspect: a config to begin with."]
        for section, settings in self.config.items():
            lines += ["", f"[{section}]"]
            for name, value in settings.items():
                if path is not None and (section, name) == ("data", "path"):
                    value = path
                reason = reasons.get(name, "")
                lines.append(_format_line(name, value) + (f"  # {reason}" if reason else ""))
                if name == "undecided":
                    names = _format_line("accept", list(value))
                    lines.append(f"# {names}  # or accept it as it is")
                if (section, name) == ("data", "path"):
                    lines += [f"# {line}" + f"  # {why}" * bool(why) for line, why in left_out]
        return "\n".join(lines) + "\n"


def _format_line(name: str, value: Any) -> str:
    if isinstance(value, dict):
        inner = ", ".join(_format_line(_format_key(key), item) for key, item in value.items())
        return f"{name} = {{ {inner} }}"
    if isinstance(value, list):
        return f"{name} = [{', '.join(_format_value(item) for item in value)}]"
    return f"{name} = {_format_value(value)}"


def _format_key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else _format_value(name)


def _format_value(value: Any) -> str:
    return tomli_w.dumps({"x": value}).removeprefix("x = ").strip()


def _make_pattern(path: str, survey: Survey) -> str:
    """Return a pattern for the files of a folder that have the same columns, and most rows."""
    groups: dict[frozenset[str], list[FileFacts]] = {}
    for file in survey.files:
        groups.setdefault(frozenset(file.columns), []).append(file)
    largest = max(groups.values(), key=lambda group: sum(file.num_rows for file in group))
    names = [file.name for file in largest]
    endings = {Path(name).suffix for name in names}
    others = {Path(file.name).suffix for file in survey.files if file not in largest}
    name = names[0]
    if len(endings) == 1 and not endings & others:
        name = f"*{endings.pop()}"
    elif len(names) > 1:
        shared = [set(letters) for letters in zip(*names, strict=False)]
        count = next((i for i, letters in enumerate(shared) if len(letters) > 1), len(shared))
        name = f"{name[:count]}*"
    folder = path.rpartition("/")[0] if "*" in path else path
    return f"{folder.rstrip('/')}/{name}" if folder else name


def describe_series(proposal: Proposal) -> str:
    """Say how many series there are, and by which columns, rows or files."""
    survey, series = proposal.survey, proposal.series
    if proposal.data.get("layout") == "wide":
        return f"{survey.num_rows:,} series, one per row"
    if proposal.data.get("layout") == "columns":
        return f"{len(proposal.data['values']):,} series, one per column"
    if series is not None:
        return f"{series.num_series:,} series, by {', '.join(series.names)}"
    count = len(survey.files)
    what = "sheet" if survey.has_sheets else "file"
    return "one series" if count == 1 else f"{count:,} series, one per {what}"


def _describe_split(config: Config) -> str:
    """Say in words which part of the rows, or of the series, trains, validates and tests."""
    split, sets = config.data.split, {"train": "training", "val": "validation", "test": "test"}
    if split.folders:
        return "the folders train, val and test"
    if split.rows is not None:
        return ", ".join(
            f"{count:,} rows {name}" for count, name in zip(split.rows, sets.values(), strict=True)
        )
    if split.walk_forward is not None:
        return f"{split.walk_forward} folds, walk-forward"
    parts = []
    for key, name in sets.items():
        share = getattr(split, key)
        if isinstance(share, float):
            parts.append(f"{100 * share:.3g} % {name}")
        elif share:
            parts.append(f"{', '.join(map(str, share[:MAX_NAMED]))} {name}")
    if split.train is None:
        parts.insert(0, "the rest training")
    by_series = split.by == SERIES or (split.by is None and config.data.context == ALL_ROWS)
    what = "whole series" if by_series else f"by {split.by}" if split.by else "in time order"
    return f"{', '.join(parts)}, {what}"


MAX_NAMED = 3


class Remark(NamedTuple):
    """A note or a problem that the user should know about."""

    column: str | None
    """None for a remark about files, or about several columns"""
    message: str
    kind: str = ""
    """The problem in a word: missing, gaps, constant ...; "" for a note without a setting"""
    values: tuple[str | int | float, ...] = ()
    """Values that seem to mean "missing\""""


def list_problems(proposal: Proposal, path: str) -> list[Remark]:
    """List the problems of files, then of the time, then of each column."""
    columns = [
        column
        for column in proposal.survey.columns.values()
        if proposal.roles.get(column.name) != "value"  # one cell of a series, not a column
    ]
    return [
        *_check_files(proposal, path),
        *(() if proposal.data.get("layout") == "wide" else _check_time(proposal)),
        *(remark for column in columns for remark in _check(column, proposal)),
    ]


def _check_files(proposal: Proposal, path: str) -> Iterator[Remark]:
    survey = proposal.survey
    for file in survey.empty_files:
        yield from (Remark(None, f"{file.name}: {note}") for note in file.notes)
    for file in survey.files:
        yield from (Remark(None, f"{file.name}: {note}") for note in file.notes)
        missing = [name for name in survey.columns if name not in file.columns]
        if missing:
            more = f" and {len(missing) - MAX_NAMED} more" * (len(missing) > MAX_NAMED)
            listed = ", ".join(missing[:MAX_NAMED])
            yield Remark(
                None,
                f"{file.name}: lacks {listed}{more}, which other files have; files of one job have "
                "the same columns",
            )
    if len(survey.files) > 1:
        paths = {file: file.name for file in files.expand_path(parse_path(path))[1]}
        for alike in group_by_content(paths):
            first, *copies = (paths[file] for file in alike)
            names = ", ".join(copies)
            yield Remark(None, f"{names}: the same content as {first}; remove the copies")


def _check_time(proposal: Proposal) -> Iterator[Remark]:
    survey, series = proposal.survey, proposal.series
    order, source = proposal.order, survey.time
    if source is None:
        yield Remark(
            None, "no column of times was found; rows are taken in the order of the file", "no time"
        )
        return
    name = " and ".join(source.columns)
    where = "" if series is None else " within a series"
    if survey.order.unreadable:
        count = format_count(survey.order.unreadable, "cell")
        left_out = "data.time is left out, and rows are taken in the order of the file"
        message = f"{count} cannot be read as a time, so that {left_out}; correct them"
        yield Remark(name, message, "unreadable")
        return
    if proposal.num_backward:
        rows = format_count(proposal.num_backward, "row")
        yield Remark(
            name,
            f'{rows} earlier than the row above{where}; sort them by time (data.unsorted = "sort")',
            "disorder",
        )
    if order.repeated:
        rows = format_count(order.repeated, "row")
        yield Remark(
            name,
            f"{rows} with the time of another row{where} (data.duplicates); or name the column "
            "that tells series apart (data.id)",
            "repeated",
        )
    if survey.rival is not None and source.format is not None:
        yield Remark(
            name,
            f'day and month may be swapped: read as data.time_format = "{source.format}"; '
            f'"{survey.rival.source.format}" fits as well',
            "swapped",
            (str(survey.rival.source.format),),
        )
    if order.gaps and order.step is not None:
        step = f"the usual step of {format_step(order.step, source.is_date)}"
        count = format_count(order.gaps, "gap")
        yield Remark(name, f"{count}: more than 1.5 times {step}", "gaps")


def _check(column: ColumnProfile, proposal: Proposal) -> Iterator[Remark]:
    for kind, message, *values in _describe(column, proposal):
        yield Remark(column.name, message, kind, tuple(values))


def _describe(
    column: ColumnProfile, proposal: Proposal
) -> Iterator[tuple[str, str, *tuple[str | int | float, ...]]]:
    """Yield the kind of each problem, the message, and the values that seem to mean "missing"."""
    if column.kind == EMPTY:
        yield "empty", "holds no value"
    if column.kind == EMPTY or column.name in proposal.survey.scalars:  # a note says so
        return
    role = proposal.roles.get(column.name, "")
    if column.num_missing:
        share = format_number(100 * column.num_missing / column.num_rows, figures=2)
        yield "missing", f"{share} % of the values are missing (data.missing)"
    if column.kind == TEXT and not role and not column.is_constant:
        count = "many" if column.num_distinct is None else f"{column.num_distinct:,}"
        yield "text", f"text, {count} different values: not an input"
    if column.is_constant:
        yield "constant", "the same value in every row: not an input"
    elif column.is_constant_in_training and column.kind != TIME:
        message = "the same value in the first 70 % of the rows, which train: not an input"
        yield "constant", message
    if column.is_counter and role != "time":
        yield "counter", "counts the rows: not an input"
    copied = proposal.find_copied(column)
    if copied is not None and not column.is_constant:
        yield "copy", f'the same values as "{copied}": not an input'
    is_sampled = column.sample.stride > 1
    sampled = f" (in a sample of {column.sample.size:,} rows)" if is_sampled else ""
    for code in column.find_codes():
        share = format_number(100 * code.share, figures=2)
        message = (
            f"{share} % of the values{sampled} are {code.value:.6g}, all others {code.low:.6g} to "
            f"{code.high:.6g}; it seems to mean missing (data.na)"
        )
        yield "code", message, int(code.value) if code.value.is_integer() else code.value
    if column.num_infinite:
        count = format_count(column.num_infinite, "infinite value")
        yield "infinite", f"{count}, which no model can read (data.na)", *INFINITE
    if column.kind == NUMBER and column.texts.total and role != "time":
        texts = ", ".join(f'"{text}"' for text, _ in column.texts.counts.most_common(MAX_NAMED))
        marks = column.find_marks()
        count = format_count(column.texts.total, "cell")
        are = "is no number" if column.texts.total == 1 else "are no numbers"
        fix = f"; if {'it means' if column.texts.total == 1 else 'they mean'} missing, set data.na"
        if not marks:
            fix = ""
        if any(map(looks_like_number, column.texts.counts)):
            fix = ": write all numbers with one decimal mark and no separators between thousands"
        yield "no numbers", f"{count} {are} ({texts}){fix}", *marks


SPARK_WIDTH = 32
READING = ("encoding", "decimal", "skip_rows", "names", "sheet", "variable")
"""Settings of `[data]` that say how files are read"""


@dataclass(frozen=True)
class Findings:
    """The result of inspecting files: statistics, problems, and a config to begin with."""

    path: str
    survey: Survey
    proposal: Proposal
    problems: list[Remark]

    def to_dict(self) -> dict[str, Any]:
        """Return everything but the courses of the columns, ready for JSON."""
        return {
            "path": self.path,
            "rows": self.survey.num_rows,
            "series": describe_series(self.proposal),
            "time": None if self.survey.time is None else self._describe_time(),
            "files": [
                {
                    "name": file.name,
                    "format": file.format,
                    "bytes": file.num_bytes,
                    "rows": file.num_rows,
                    "columns": len(file.columns),
                    "notes": list(file.notes),
                }
                for file in self.survey.files
            ],
            "columns": [self._describe(profile) for profile in self.survey.columns.values()],
            "problems": [
                remark._asdict() | {"values": configs.to_json_values(remark.values)}
                for remark in self.problems
            ],
            "questions": [doubt._asdict() for doubt in self.proposal.doubts],
            "config": configs.to_json_values(self.proposal.config),
            "toml": self.proposal.to_toml(),
        }

    def _describe(self, column: ColumnProfile) -> dict[str, Any]:
        moments, source = column.moments, self.survey.time
        is_time = source is not None and source.is_date and column.name in source.columns
        kind = TIME if is_time and column.kind == TEXT else column.kind
        facts: dict[str, Any] = {
            "name": column.name,
            "type": kind,
            "unit": column.unit or find_unit(column.name),
            "role": self.proposal.roles.get(column.name, "ignored"),
            "missing": column.num_missing / max(column.num_rows, 1),
            "constant": column.is_constant,
        }
        if kind == TEXT:
            facts["distinct"] = column.num_distinct
        elif moments.count:
            facts |= {"low": moments.low, "high": moments.high}
            facts |= {"mean": moments.mean, "deviation": moments.deviation}
        if source is not None and source.columns == (column.name,):
            facts |= self._describe_time()
        if kind == NUMBER:
            facts["course"] = column.trace.draw(SPARK_WIDTH)
        return facts

    def _describe_time(self) -> dict[str, Any]:
        order, source = self.survey.order, self.survey.time
        assert source is not None
        ends: list[Any] = [order.low, order.high]
        if source.is_date and order.num_rows > order.unreadable:
            ends = [datetime.fromtimestamp(end, UTC).strftime("%Y-%m-%d %H:%M:%S") for end in ends]
        return {
            "time_columns": list(source.columns),
            "time_format": source.format,
            "first": ends[0],
            "last": ends[1],
            "step": self.proposal.order.step,
            "gaps": self.proposal.order.gaps,
        }

    def describe_choice(self, config: Config) -> list[str]:
        """Say in a few lines what the config reads and predicts."""
        data = config.data
        targets = ", ".join(data.targets or ())
        listed = list(data.inputs or ())
        shown = ", ".join(listed[:MAX_LISTED])
        shown += f" and {len(listed) - MAX_LISTED} more" * (len(listed) > MAX_LISTED)
        if data.task == "classify":
            whole = "each series" if data.context == ALL_ROWS else "each row"
            aim = f"classifies {whole} by {targets}"
        elif data.horizon:
            aim = f"forecasts {targets or 'each series'}, {data.horizon:,} rows ahead"
        else:
            aim = f"estimates {targets} " + (
                "of each series" if data.context == ALL_ROWS else "at each row"
            )
        context = "the whole series" if data.context == ALL_ROWS else f"{data.context:,} rows"
        lines = [
            f"{self.path}: {self.survey.num_rows:,} rows, {describe_series(self.proposal)}"
            + self._name_time(config),
            f"  {aim}, from {context}" + (f" of {shown}" if shown else ""),
            f"  split: {_describe_split(config)}",
        ]
        left = self._list_unused(config)
        if left:
            lines.append(f"  not used: {'; '.join(left)}")
        return lines

    def _name_time(self, config: Config) -> str:
        if not config.data.time_columns:
            return ", without times"
        reason = self.proposal.reasons.get("time", "")
        return f"; time: {' + '.join(config.data.time_columns)}" + f", {reason}" * bool(reason)

    def _list_unused(self, config: Config) -> list[str]:
        """Return the columns that the model does not read, each with the reason."""
        data, survey = config.data, self.survey
        named = {*data.time_columns, *data.ids, *(data.inputs or ()), *(data.targets or ())}
        named |= {*data.future, *data.static}
        shared = set(survey.list_shared())
        reasons: dict[str, list[str]] = {}
        for name, column in survey.columns.items():
            if name in named or self.proposal.roles.get(name) in ("value", "time", "id"):
                continue
            found = [text.split(":")[0] for _, text, *_ in _describe(column, self.proposal)]
            reason = found[-1] if found else "not chosen"
            if name not in shared:
                reason = "not in every file"
            elif data.horizon == 0 and self.proposal.gives_away(name, data.targets or ()):
                reason = "tells the target of the same row"
            reasons.setdefault(reason, []).append(name)
        return [
            ", ".join(names[:MAX_LISTED])
            + f" and {len(names) - MAX_LISTED} more" * (len(names) > MAX_LISTED)
            + f" ({reason})"
            for reason, names in reasons.items()
        ]

    def list_courses(self) -> dict[str, Course]:
        """Return the course of every column of numbers, by name."""
        return {
            name: Course(
                profile.trace.stride,
                profile.trace.low[: profile.trace.num_bins],
                profile.trace.high[: profile.trace.num_bins],
                profile.trace.compute_means(),
            )
            for name, profile in self.survey.columns.items()
            if profile.kind == NUMBER
        }

    def format_config(self, file: Path) -> str:
        """Format the config for a file in which paths are relative to its folder."""
        path = Path(self.path)
        if not is_url(self.path) and not path.is_absolute() and path.exists():
            relative = os.path.relpath(path.resolve(), file.resolve().parent)
            return self.proposal.to_toml(Path(relative).as_posix())
        return self.proposal.to_toml()


def parse_options(overrides: Sequence[str]) -> tuple[ReadOptions, dict[str, Any]]:
    """Parse settings such as `data.decimal=,` into options for the reader; return both."""
    config = configs.load({}, overrides)
    for name in configs.list_differences(Config(), config):
        if name.removeprefix("data.") not in READING:
            known = ", ".join(f"data.{setting}" for setting in READING)
            raise UserError(f"{name} does not change how files are read; inspect takes {known}")
    values = config.data.model_dump(mode="json", include=set(READING))
    settings = {name: value for name, value in values.items() if value is not None}
    options = ReadOptions.from_data(config.data)
    return options if options.sheets else options._replace(sheets=EVERY_SHEET.sheets), settings


def propose_config(path: str, aim: Aim, overrides: Sequence[str] = ()) -> tuple[Config, Findings]:
    """Return a config to begin with for files that nobody has described, for `slipstream auto`;
    refuse what only a person can decide."""
    reading = {f"data.{name}" for name in READING}
    own = [text for text in overrides if text.partition("=")[0].strip() in reading]
    given = configs.read_overrides(overrides).get("data", {})
    settings = given if isinstance(given, dict) else {}
    aim = aim._replace(settings=settings)
    named = settings.get("targets", ())
    if not aim.targets and isinstance(named, list | str):
        aim = aim._replace(targets=(named,) if isinstance(named, str) else tuple(map(str, named)))
    if aim.horizon is None and isinstance(settings.get("horizon"), int):
        aim = aim._replace(horizon=settings["horizon"])
    _refuse_mixed_kinds(path)
    findings = inspect_path(path, own, aim)
    proposal = findings.proposal
    _refuse_other_columns(proposal)
    if not proposal.has_clear_target():
        names = [name for name, role in proposal.roles.items() if role in ("input", "target")]
        raise UserError(
            f"{path}: which column is to be predicted? It has {', '.join(names[:MAX_LISTED])}"
            + (" and others" if len(names) > MAX_LISTED else ""),
            fix="name it with "
            + Option("targets", names[-1])
            + "; where every column is a series of its own, add "
            + _set_option("data.layout", "columns"),
            setting="data.targets",
        )
    config = proposal.config
    config["data"] = {**proposal.data, "undecided": _refuse_doubts(proposal)}
    if not config["data"]["undecided"]:
        del config["data"]["undecided"]
    name = re.sub(r"[^\w-]+", "-", Path(path.rstrip("/")).stem).strip("-") or "auto"
    return configs.load({"name": name[:40], **config}, overrides), findings


def _set_option(setting: str, value: Any) -> Wording:
    """Return the words for a setting on the command line, quoted for a shell, and in Python."""
    text = value if isinstance(value, str) else json.dumps(value)
    return Wording(
        f"--set {shlex.quote(f'{setting}={text}')}",
        f"overrides={json.dumps({setting: value}, ensure_ascii=False)}",
    )


def _refuse_mixed_kinds(path: str) -> None:
    """Refuse a folder of several class archives, or of one beside other tables."""
    if path.startswith(SIMULATED) or is_url(path):
        return
    folder, paths = files.expand_path(parse_path(path))
    endings = {file.suffix.lower() for file in paths}
    cases = [file for file in paths if file.suffix.lower() in (".ts", ".arff")]
    stems = {TRAIN_FILE.sub("", TEST_FILE.sub("", file.stem)) for file in cases}
    if cases and (len(cases) < len(paths) or len(stems) > 1):
        what = f"files of several kinds ({', '.join(sorted(endings))})"
        if len(cases) == len(paths):
            what = f"several archives ({', '.join(sorted(stems)[:MAX_LISTED])})"
        raise UserError(
            f"{path}: holds {what}",
            fix="name those that belong together by a pattern, as in "
            f"'{folder / (min(stems) + '*' + cases[0].suffix)}'",
            setting="data.path",
        )


def _refuse_other_columns(proposal: Proposal) -> None:
    """Refuse files that have no column in common that a model could read and predict."""
    survey = proposal.survey
    if proposal.data.get("targets") or proposal.data.get("layout"):
        names = {*proposal.data.get("targets", ()), *survey.time_columns}
        names = names if "time" in proposal.data else {*proposal.data.get("targets", ())}
        if all(names <= set(file.columns) for file in survey.files):
            return
    if len({frozenset(file.columns) for file in survey.files}) > 1:
        first = survey.files[0]
        other = next(file for file in survey.files if set(file.columns) != set(first.columns))
        described = "; ".join(
            f"{file.name} has {', '.join(file.columns[:MAX_NAMED])}"
            + " ..." * (len(file.columns) > MAX_NAMED)
            for file in (first, other)
        )
        raise UserError(
            f"{proposal.path}: its files have different columns: {described}",
            fix="name those that belong together by a pattern, as in "
            f"{_make_pattern(proposal.path, survey)}",
            setting="data.path",
        )
    kinds = ", ".join(f"{name} ({column.kind})" for name, column in survey.columns.items())
    raise UserError(
        f"{proposal.path}: has no column of numbers that changes, which a model could predict "
        f"(columns: {kinds[:200]})",
        setting="data.targets",
    )


def _refuse_doubts(proposal: Proposal) -> dict[str, str]:
    """Refuse to go on where a question is open, codes for missing values among them; return the
    questions that a person has accepted."""
    given, path = proposal.aim.settings, proposal.path
    accepted: dict[str, str] = {}
    for doubt in proposal.doubts:
        if doubt.name in given.get("accept", ()):
            accepted[doubt.name] = doubt.message
        elif not given.keys() & set(doubt.settings):
            raise UserError(
                f"{path}: {doubt.message}",
                fix="answer it with --set, or accept it with "
                + _set_option("data.accept", [*given.get("accept", ()), doubt.name]),
                setting=f"data.{doubt.settings[0]}",
            )
    if "na" in given:
        return accepted
    used = [
        column
        for name, column in proposal.survey.columns.items()
        if proposal.roles.get(name) in ("input", "target", "value")
    ]
    found = [(column, code) for column in used for code in column.find_codes()]
    if found and "na" in proposal.data:
        values = [value for value in proposal.data["na"] if not _is_infinite(value)]
        column, code = found[0]
        share = format_number(100 * code.share, figures=2)
        others = len({column.name for column, _ in found}) - 1
        more = f" (and in {format_count(others, 'more column')})" * bool(others)
        raise UserError(
            f'{path}: {share} % of the values of "{column.name}"{more} are {code.value:.6g}, all '
            f"others {code.low:.6g} to {code.high:.6g}: a code for missing values?",
            fix="if so, add "
            + _set_option("data.na", values)
            + "; if it was measured, "
            + _set_option("data.na", [value for value in values if isinstance(value, str)]),
            setting="data.na",
        )
    return accepted


def _is_infinite(value: Any) -> bool:
    return isinstance(value, float) and math.isinf(value)


def inspect_path(path: str, overrides: Sequence[str] = (), aim: Aim | None = None) -> Findings:
    """Inspect a file, a folder or a pattern; `overrides` are settings of the reader, `aim` what is
    to be predicted."""
    options, settings = parse_options(overrides)
    try:
        survey = survey_tables(open_tables(path, options), path)
    except EncodingError as error:
        if options.encoding is not None:
            raise
        settings |= {"encoding": error.encoding}
        options = options._replace(encoding=error.encoding)
        survey = survey_tables(open_tables(path, options), path)
    except UserError as error:
        if error.setting != "data.layout" or options.is_wide:
            raise
        # the first line has values, not names: every row is a series, or there are no names
        wide = _survey_wide(path, options)
        if wide is not None:
            survey = wide
        elif isinstance(error, NoNamesError):
            settings |= {"names": "none"}
            options = options._replace(names="none")
            survey = survey_tables(open_tables(path, options), path)
        else:
            raise
    sheets = _select_sheets(survey) if "sheet" not in settings else []
    if sheets:
        settings |= {"sheet": sheets[0] if len(sheets) == 1 else sheets}
        survey = survey_tables(open_tables(path, options._replace(sheets=tuple(sheets))), path)
    proposal = Proposal(survey, path, settings, aim)
    if settings.get("names") == "none":
        proposal.reasons["names"] = "the first line has values; or list the names"
    if sheets:
        proposal.reasons["sheet"] = "the other sheets have other columns"
    return Findings(path, survey, proposal, list_problems(proposal, path))


def _survey_wide(path: str, options: ReadOptions) -> Survey | None:
    """Return the statistics of a table with a series per row; None where it is none, or too large
    to be read as one."""
    try:
        survey = survey_tables(open_tables(path, options._replace(is_wide=True)), path)
    except UserError:  # as where names repeat, which are values
        return None
    return None if find_wide_layout(survey) is None else survey


def _select_sheets(survey: Survey) -> list[str]:
    """Return the sheets of a workbook that have the columns of the largest one, where others have
    not; else nothing."""
    sheets = [file for file in survey.files if file.sheet]
    if not sheets or len({file.name.split("/")[0] for file in survey.files}) > 1:
        return []
    largest = max(sheets, key=lambda file: file.num_rows)
    alike = [file.sheet for file in sheets if set(file.columns) == set(largest.columns)]
    return alike if len(alike) < len(sheets) else []
