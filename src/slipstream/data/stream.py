"""Series on disk: a table larger than memory, read in chunks of rows.

Two passes over the file find the series, gaps and splits, and how columns scale; only little of
them stays in memory. After that, any chunk of rows can be read, scaled and cut into windows, by
this process or by workers. A window belongs to the chunk that it starts in.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch

from slipstream.base.errors import Setting, UserError
from slipstream.base.text import format_count
from slipstream.config import Data, Signature
from slipstream.data import scaler as scaling
from slipstream.data import series, windows
from slipstream.data.columns import read_numbers, read_times
from slipstream.data.roles import find_split_groups, identify_series
from slipstream.data.scaler import RunningStatistics, Scaler, SeriesFit, SeriesScales, Values
from slipstream.data.series import Flags, Floats, Ints, SeriesIndex, Times
from slipstream.data.splits import TRAIN, SplitAssignment, WindowRanges
from slipstream.data.table import DataTable
from slipstream.data.windows import WindowChunk

SCAN_ROWS = 1 << 18
"""The number of rows that each pass over the file holds at a time"""


def refuse_unstreamable(data: Data) -> None:
    """Refuse settings that need the whole table at once."""
    settings = {
        "data.missing": data.missing != "error",
        "data.unsorted": data.unsorted != "error",
        "data.where": bool(data.where),
        "data.short": data.short != "error",
        "data.labels": data.labels is not None,
        "data.split.stratified": data.split.stratified,
    }
    for setting, is_set in settings.items():
        if is_set:
            raise UserError(
                f'{setting} does not work with engine.home = "stream", since it needs all rows in '
                "memory; prepare the file beforehand, or "
                + "set "
                + Setting({"engine.home": "host"})
            )
    if data.split.walk_forward is not None:
        raise UserError(
            'data.split.walk_forward does not work with engine.home = "stream", since it '
            "needs all rows in memory; "
            + "set "
            + Setting({"engine.home": "host"})
            + ", or split once, by fractions or rows",
            setting="data.split.walk_forward",
        )


@dataclass(frozen=True)
class StreamedSeries:
    """Series on disk, read in chunks of rows. An object of this class can be sent to worker
    processes."""

    table: DataTable
    data: Data
    signature: Signature
    scaler: Scaler
    index: SeriesIndex
    static: Values | None
    """[series, K], scaled"""
    ranges: dict[str, WindowRanges]
    fit: SeriesFit | None = None
    """What scales each series (`data.scale_by = "series"`)"""

    @cached_property
    def scales(self) -> SeriesScales | None:
        """The scale of each series, relative to that of the whole table."""
        return None if self.fit is None else self.fit.relate_to(self.scaler)

    def plan_chunks(self, rows: int) -> list[tuple[int, int]]:
        """Return the bounds of chunks of about `rows` rows, along the file's row groups."""
        borders = [0]
        for begin in (*self.table.row_groups, self.index.num_rows):
            while begin - borders[-1] > 2 * rows:  # a row group that is too large is cut
                borders.append(borders[-1] + rows)
            if begin - borders[-1] >= rows or begin == self.index.num_rows:
                borders.append(begin)
        return [(a, b) for a, b in itertools.pairwise(borders) if a < b]

    def read_chunk(
        self, set_name: str, begin: int, end: int, *, with_time: bool = False
    ) -> WindowChunk | None:
        """Read the windows of a set that start from `begin` to before `end`; None without any."""
        ranges = self.ranges[set_name].restrict(begin, end)
        if not len(ranges):
            return None
        reach = self.signature.lead + self.signature.steps_out
        first = int(ranges.first.min())
        past = int((ranges.first + (ranges.count - 1) * ranges.stride).max()) + reach
        rows = self.table.slice_rows(first, past)
        settings = _find_settings(self.signature)
        values = np.empty((past - first, len(settings)), dtype=np.float32)
        for i, (name, setting) in enumerate(settings.items()):
            column = read_numbers(rows, name, setting)
            if self.fit is not None and name in self.fit.columns:
                self.fit.apply(name, column, values[:, i], first)
            else:
                self.scaler.apply(name, column, values[:, i])
        offsets = self.index.offsets
        inside = offsets[(offsets > first) & (offsets < past)]
        owners = np.searchsorted(offsets, np.append(first, inside), side="right") - 1
        local = np.concatenate([[0], inside - first, [past - first]])
        static = None if self.static is None else self.static[owners]
        time = None
        if with_time and self.data.time_column is not None:
            time = read_times(rows, self.data.time_column, self.data.time_format)
        begins = self.index.segments
        begins = begins[(begins > first) & (begins < past)] - first
        segments = np.concatenate([[0], begins])
        scales = None
        if self.scales is not None:
            scales = SeriesScales(self.scales.factor[owners], self.scales.offset[owners])
        built = windows.build_series(values, static, scales, local, self.signature, segments)
        starts = torch.from_numpy(ranges.list_starts() - first)
        return WindowChunk(built, starts, first, torch.from_numpy(owners), time)

    def iter_chunks(
        self, set_name: str, rows: int, *, with_time: bool = False
    ) -> Iterator[WindowChunk]:
        """Yield every window of a set, chunk after chunk."""
        for begin, end in self.plan_chunks(rows):
            chunk = self.read_chunk(set_name, begin, end, with_time=with_time)
            if chunk is not None:
                yield chunk


def _find_settings(signature: Signature) -> dict[str, str]:
    """Return the columns of a series, in order, and the setting that names each."""
    settings = dict.fromkeys(scaling.order_columns(signature), "data.targets")
    settings |= dict.fromkeys(signature.inputs, "data.inputs")
    return settings | dict.fromkeys(signature.future, series.FUTURE)


def iter_slices(table: DataTable) -> Iterator[DataTable]:
    """Yield the rows of a table, so many at a time as fit in memory."""
    for begin in range(0, table.num_rows, SCAN_ROWS):
        yield table.slice_rows(begin, min(begin + SCAN_ROWS, table.num_rows))


def scan_index(table: DataTable, data: Data, static: Sequence[str]) -> tuple[SeriesIndex, Floats]:
    """Find series, gaps and the split's groups in a first pass, and read static columns."""
    scan = _IndexScan(data, static)
    for rows in iter_slices(table):
        scan.add_rows(rows)
    offsets = np.array([*scan.begins, table.num_rows], dtype=np.int64)
    lengths = np.diff(offsets)
    shortest, least = int(lengths.argmin()), lengths.min()
    if least < data.context + data.horizon:
        raise UserError(
            f"data.context is {data.context} and data.horizon {data.horizon}, but series "
            f'"{scan.names[shortest]}" has {format_count(least, "row")}; shorten them, or leave it '
            "out of the file",
            setting="data.context",
        )
    index = SeriesIndex(
        series_names=series.make_unique(scan.names),
        offsets=offsets,
        breaks=np.array(sorted(scan.breaks), dtype=np.int64),
        group_begins=np.array(scan.group_begins, dtype=np.int64),
        group_codes=np.array(scan.group_codes, dtype=np.int64),
        group_names=tuple(scan.group_names),
        step=scan.step,
        has_dates=scan.has_dates,
    )
    return index, np.array(scan.static, dtype=np.float64).reshape(len(scan.names), len(static))


@dataclass
class _IndexScan:
    """The series, gaps and groups of the rows read so far."""

    data: Data
    static_names: Sequence[str]
    names: list[str] = field(default_factory=list)
    known: set[str] = field(default_factory=set)
    begins: list[int] = field(default_factory=list)
    breaks: set[int] = field(default_factory=set)
    group_names: dict[str, int] = field(default_factory=dict)
    group_begins: list[int] = field(default_factory=list)
    group_codes: list[int] = field(default_factory=list)
    static: list[list[float]] = field(default_factory=list)
    last_time: Any = None
    usual_step: float | None = None
    """The current series' usual step, in the column's own unit"""
    step: float | None = None
    has_dates: bool = False

    def add_rows(self, rows: DataTable) -> None:
        """Add the next rows of the table to the scan."""
        data = self.data
        codes, names = identify_series(rows, data)
        time = None
        if data.time_column is not None:
            time = read_times(rows, data.time_column, data.time_format)
        static = [read_numbers(rows, name, "data.static") for name in self.static_names]
        groups = find_split_groups(rows, data, codes, names, self.group_names)
        for row in np.flatnonzero(np.diff(groups, prepend=groups[:1] - 1)):
            if not self.group_codes or self.group_codes[-1] != groups[row]:
                self.group_begins.append(rows.first_row + int(row))
                self.group_codes.append(int(groups[row]))
        firsts = np.flatnonzero(np.diff(codes, prepend=codes[:1] - 1)).tolist()
        for first, past in zip(firsts, [*firsts[1:], rows.num_rows], strict=True):
            name = names[codes[first]]
            if not self.names or self.names[-1] != name:
                self._begin_series(rows, first, name)
                self.static.append([float(values[first]) for values in static])
            if time is not None:
                self._add_times(rows, first, time[first:past])

    def _begin_series(self, rows: DataTable, first: int, name: str) -> None:
        if name in self.known:
            raise UserError(
                f'{rows.locate_row(first)}: series "{name}" continues here, after another one; '
                "to stream a table, keep the rows of each series together (sort it by data.id)"
            )
        self.names.append(name)
        self.known.add(name)
        self.begins.append(rows.first_row + first)
        self.breaks.add(rows.first_row + first)
        self.last_time = self.usual_step = None

    def _add_times(self, rows: DataTable, first: int, time: Times) -> None:
        """Check the order of one series' times, from row `first` on, and mark its gaps."""
        self.has_dates = series.is_date(time)
        before = [] if self.last_time is None else [self.last_time]
        steps = np.diff(np.concatenate([np.array(before, dtype=time.dtype), time]))
        self.last_time = time[-1]
        if not len(steps):
            return
        later = first + (0 if before else 1)  # the row that the first step leads to
        if steps.min() <= 0:
            row = later + int(np.flatnonzero(steps <= 0)[0])
            here = rows.locate_cell(row, str(self.data.time_column))
            if steps[row - later] < 0:
                raise UserError(
                    f"{here}: earlier than the row before it, within series "
                    f'"{self.names[-1]}"; sort the file by time'
                )
            repeated = format_count(int((steps == 0).sum()), "row")
            raise UserError(
                f'{here}: the same time as the row before it, within series "{self.names[-1]}" '
                f"({repeated} repeat the time of another, up to here); set "
                + Setting({"data.duplicates": "mean"})
                + series.MERGE_HINT
            )
        if self.usual_step is None:  # the first rows of a series determine its usual step
            self.usual_step = series.find_usual_step(steps)
            if self.step is None:
                self.step = self.usual_step / (series.MICROSECONDS if self.has_dates else 1)
        gaps = np.flatnonzero(series.find_gaps(steps, self.usual_step, self.data))
        self.breaks.update((gaps + rows.first_row + later).tolist())


def iter_columns(
    rows: DataTable, signature: Signature, unused: Flags
) -> Iterator[tuple[str, Floats, Flags]]:
    """Yield the name and values of each column of some rows, one in memory at a time, with a mark
    where a value is missing; a missing input is refused, except in `unused` rows."""
    for name, setting in _find_settings(signature).items():
        column = read_numbers(rows, name, setting)
        is_label = bool(signature.classes) and name in signature.targets
        absent = (np.isnan(column) | (is_label & (column < 0))) & ~unused
        if absent.any() and name in signature.inputs:
            row = int(np.flatnonzero(absent)[0])
            raise UserError(
                f"{rows.locate_cell(row, name)}: is missing; to stream a table, "
                "fill or leave out missing inputs beforehand"
            )
        yield name, column, absent
        del column, absent  # before the next one is read


def scan_values(
    table: DataTable,
    signature: Signature,
    assignment: SplitAssignment,
    kind: str,
    index: SeriesIndex,
    fit: SeriesFit | None = None,
) -> tuple[Scaler, Ints, dict[str, int]]:
    """Fit a scaler on the training rows in a second pass, find the runs of rows without a target,
    and count the missing values of each column; missing inputs are refused."""
    statistics = RunningStatistics()
    stride = scaling.choose_sample_stride(assignment.count_rows(TRAIN))
    num_scanned = 0
    samples: dict[str, list[Floats]] = {}
    runs: list[Ints] = []
    num_missing = dict.fromkeys(_find_settings(signature), 0)
    for rows in iter_slices(table):
        end = rows.first_row + rows.num_rows
        training = np.flatnonzero(assignment.mask(TRAIN, rows.first_row, end))
        unknown = np.zeros(rows.num_rows, dtype=bool)
        unused = index.mask_padding(rows.first_row, end)
        for name, column, absent in iter_columns(rows, signature, unused):
            is_label = bool(signature.classes) and name in signature.targets
            unknown |= absent
            num_missing[name] += int(absent.sum())
            if not is_label:
                values = column[training]
                statistics.add(name, values[~np.isnan(values)])
                if fit is not None and name in fit.columns:
                    mask = np.zeros(rows.num_rows, dtype=bool)
                    mask[training] = True
                    fit.add(name, column, mask, rows.first_row)
                    continue  # each series is rounded by itself
                sampled = training[-num_scanned % stride :: stride]
                samples.setdefault(name, []).append(column[sampled])
            del column, absent  # before the next one is read
        runs.append(rows.first_row + series.encode_runs(unknown))
        num_scanned += len(training)
    scaler = statistics.to_scaler(kind)
    for name, parts in samples.items():
        sample = np.concatenate(parts)
        sample = sample[~np.isnan(sample)]
        if len(sample):
            scaling.refuse_lost_digits(name, sample, scaler)
    return scaler, series.join_runs(runs), num_missing
