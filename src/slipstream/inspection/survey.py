"""One pass over all rows of all files."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import combinations
from typing import NamedTuple

from slipstream import machine
from slipstream.data.io.columns import is_text
from slipstream.errors import UserError
from slipstream.inspection.profiles import NUMBER, TEXT, ColumnProfile
from slipstream.inspection.reading import Batch, OpenTable
from slipstream.inspection.times import TimeOrder, TimeSource, find_time
from slipstream.object_storage import parse_path

INTERLEAVED = 0.3
"""Share of rows with the time of the row above, from which on series are taken to be mixed"""


MOST_KEYS = 8
"""Columns among which those that tell series apart are looked for"""


class FileFacts(NamedTuple):
    """What was read from a file."""

    name: str
    format: str
    num_bytes: int | None
    num_rows: int
    columns: tuple[str, ...]
    notes: tuple[str, ...]


class SeriesColumns(NamedTuple):
    """The columns that tell series apart."""

    names: tuple[str, ...]
    num_series: int
    shortest: int
    """Rows of the shortest series"""
    disorder: int
    """Rows of a series whose time is not after that of the row above"""
    is_mixed: bool = False
    """Whether the rows of different series take turns"""
    starts: tuple[int, ...] = ()
    """The first rows of the series; of mixed ones they are not known"""


@dataclass
class Survey:
    """What all rows tell."""

    files: list[FileFacts] = field(default_factory=list)
    columns: dict[str, ColumnProfile] = field(default_factory=dict)
    time: TimeSource | None = None
    order: TimeOrder = field(default_factory=TimeOrder)
    scalars: set[str] = field(default_factory=set)
    has_sheets: bool = False
    """Whether a workbook has several sheets, each of which is a series"""
    threads: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(machine.count_available_cores())
    )

    @property
    def num_rows(self) -> int:
        return sum(file.num_rows for file in self.files)

    def add(self, table: OpenTable) -> None:
        """Read all rows of a table."""
        num_rows = 0
        self.order.start_file()
        for name in table.columns:
            profile = self.columns.setdefault(name, ColumnProfile(name))
            profile.unit = profile.unit or table.units.get(name, "")
        for number, batch in enumerate(table.batches):
            if self.time is None and not self.files and not number:
                self.time = find_time(batch, table.decimal)
            self._add_batch(table, batch, is_first=not number)
            num_rows += len(next(iter(batch.values()))) if batch else 0
        self.scalars |= set(table.scalars)
        self.has_sheets |= bool(table.sheet)
        facts = table.name, table.format, table.num_bytes, num_rows, table.columns, table.notes
        self.files.append(FileFacts(*facts))

    def _add_batch(self, table: OpenTable, batch: Batch, *, is_first: bool) -> None:
        if self.time is not None and set(self.time.columns) <= batch.keys():
            self.order.add(self.time.read(batch, table.decimal))

        def add(name: str) -> None:
            values, profile = batch[name], self.columns[name]
            profile.add(values, table.decimal)
            if is_text(values.type) or profile.kind == NUMBER:
                profile.runs.add(values, is_first=is_first)

        for _ in self.threads.map(add, batch):  # Arrow and numpy release Python's lock
            pass

    def find_series_columns(self) -> SeriesColumns | None:
        """Find the columns that tell series apart: their values stay together, or take turns,
        where the time of the table starts again or repeats."""
        order, used = self.order, self.time.columns if self.time else ()
        if self.time is None or not order.disorder:
            return None
        whole = order.sort(order.file_starts)
        if whole is not None and not whole.repeated and 2 * whole.gaps < len(order.disorder):
            return None  # one series, whose rows are not sorted
        if order.repeated >= INTERLEAVED * order.num_rows:
            return self._find_mixed()
        names = [
            name
            for name, one in self.columns.items()
            if one.runs.is_open and len(one.runs.positions) > len(self.files)
            if name not in used and name not in self.scalars
        ]
        names = sorted(names, key=lambda name: len(self.columns[name].runs.positions))[:MOST_KEYS]
        combined = (
            self._combine(some) for count in (1, 2, 3) for some in combinations(names, count)
        )
        fitting = [one for one in combined if one and 2 * one.disorder < len(order.disorder)]
        return min(fitting, key=lambda one: (one.disorder, len(one.names)), default=None)

    def _combine(self, names: tuple[str, ...]) -> SeriesColumns | None:
        """Return the series that columns tell apart; None where their rows are not together."""
        runs = [self.columns[name].runs for name in names]
        starts = sorted({row for one in runs for row in one.positions})
        keys = {tuple(one.find_value(row) for one in runs) for row in starts}
        if len(keys) < len(starts):
            return None
        ends = [*starts[1:], self.num_rows]
        shortest = min(end - start for start, end in zip(starts, ends, strict=True))
        disorder = len(set(self.order.disorder) - set(starts))
        return SeriesColumns(names, len(starts), shortest, disorder, starts=tuple(starts))

    def _find_mixed(self) -> SeriesColumns | None:
        """Find a column of which every time has all values."""
        num_times = self.order.num_rows - self.order.repeated
        for name, one in self.columns.items():
            count = one.num_distinct or 0
            distance = abs(count * num_times - one.num_rows)
            if one.kind == TEXT and count > 1 and distance <= 0.05 * one.num_rows:
                return SeriesColumns((name,), count, one.num_rows // count, 0, is_mixed=True)
        return None


def survey_tables(tables: Iterable[OpenTable], path: str) -> Survey:
    """Read all rows of all tables, once."""
    survey = Survey()
    with survey.threads:
        for table in tables:
            survey.add(table)
    if not survey.num_rows:
        raise UserError(f"{parse_path(path)}: has no rows")
    return survey
