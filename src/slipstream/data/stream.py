"""Series on disk: a table larger than memory, read in stretches of rows.

Two passes over the file learn how the rows lie (series, gaps, splits) and how columns scale; what
is kept of them is small. After that, any stretch of rows can be read, scaled and cut into windows,
by this process or by workers, and each window belongs to the stretch that it starts in.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from slipstream.config import Data, Signature
from slipstream.data import columns as typed
from slipstream.data import fitting, roles, series, windows
from slipstream.data import scaler as scaling
from slipstream.data.io import table
from slipstream.data.io.table import DataTable
from slipstream.data.scaler import RunningStatistics, Scaler
from slipstream.data.series import MICROSECONDS, Floats, SeriesIndex, Times, is_date
from slipstream.data.splits import SETS, SplitAssignment
from slipstream.data.windows import WindowChunk, WindowRanges
from slipstream.errors import UserError

SCAN_ROWS = 1 << 18


def refuse_unstreamable(data: Data) -> None:
    """Say which settings need the whole table at once."""
    asked = {
        "data.missing": data.missing != "error",
        "data.unsorted": data.unsorted != "error",
        "data.where": bool(data.where),
        "data.short": data.short != "error",
        "data.labels": data.labels is not None,
        "data.split.stratified": data.split.stratified,
    }
    for setting, wanted in asked.items():
        if wanted:
            raise UserError(
                f'{setting} needs all rows in memory, which engine.home = "stream" does without; '
                "prepare the file beforehand, or choose another home"
            )
    if data.split.walk_forward is not None:
        raise UserError(
            'data.split.walk_forward needs all rows in memory, which engine.home = "stream" does '
            'without; set engine.home = "host", or split once, by shares or rows'
        )


@dataclass(frozen=True)
class StreamedSeries:
    """All that is needed to read any stretch of rows as windows. Travels to worker processes."""

    source: DataTable
    data: Data
    signature: Signature
    scaler: Scaler
    index: SeriesIndex
    static: Tensor | None
    """[series, K], scaled"""
    ranges: dict[str, WindowRanges]

    def plan_chunks(self, rows: int) -> list[tuple[int, int]]:
        """Consecutive stretches of about so many rows, along the groups that the file has."""
        borders = [0]
        for begin in (*self.source.row_groups, self.index.num_rows):
            while begin - borders[-1] > 2 * rows:  # a group larger than asked for is cut
                borders.append(borders[-1] + rows)
            if begin - borders[-1] >= rows or begin == self.index.num_rows:
                borders.append(begin)
        return [(a, b) for a, b in itertools.pairwise(borders) if a < b]

    def read_chunk(
        self, which: str, begin: int, end: int, *, with_time: bool = False
    ) -> WindowChunk | None:
        """The windows of a set that start from `begin` to before `end`; None if there are none."""
        ranges = self.ranges[which].restrict(begin, end)
        if not len(ranges):
            return None
        reach = self.signature.lead + self.signature.steps_out
        first = int(ranges.first.min())
        last = int((ranges.first + (ranges.count - 1) * ranges.stride).max()) + reach
        stretch = self.source.slice_rows(first, last)
        wanted = _columns(self.signature)
        values = np.empty((last - first, len(wanted)), dtype=np.float32)
        for i, (name, setting) in enumerate(wanted.items()):
            self.scaler.apply(name, typed.read_numbers(stretch, name, setting), values[:, i])
            table.release_memory()
        offsets = self.index.offsets
        inside = offsets[(offsets > first) & (offsets < last)]
        owners = np.searchsorted(offsets, np.append(first, inside), side="right") - 1
        local = torch.from_numpy(np.concatenate([[0], inside - first, [last - first]]))
        static = None if self.static is None else self.static[torch.from_numpy(owners)]
        time = None
        if with_time and self.data.time is not None:
            time = typed.read_times(stretch, self.data.time, self.data.time_format)
        return WindowChunk(
            series=windows.build_series(torch.from_numpy(values), static, local, self.signature),
            starts=torch.from_numpy(ranges.list_starts() - first),
            first_row=first,
            series_ids=torch.from_numpy(owners),
            time=time,
        )

    def iter_chunks(
        self, which: str, rows: int, *, with_time: bool = False
    ) -> Iterator[WindowChunk]:
        """Every window of a set, stretch after stretch."""
        for begin, end in self.plan_chunks(rows):
            piece = self.read_chunk(which, begin, end, with_time=with_time)
            if piece is not None:
                yield piece


def _columns(signature: Signature) -> dict[str, str]:
    """The columns of a series, in order, and the setting that names each."""
    wanted = dict.fromkeys(fitting.order_columns(signature), "data.targets")
    return wanted | dict.fromkeys(signature.inputs, "data.inputs")


def scan_index(
    source: DataTable, data: Data, static: Sequence[str]
) -> tuple[SeriesIndex, npt.NDArray[np.float64]]:
    """First pass: series, gaps and the split's groups, without the values; and static columns."""
    seen = _Seen()
    for begin in range(0, source.num_rows, SCAN_ROWS):
        stretch = source.slice_rows(begin, min(begin + SCAN_ROWS, source.num_rows))
        _scan(stretch, begin, data, static, seen)
    offsets = np.array([*seen.begins, source.num_rows], dtype=np.int64)
    shortest = int(np.diff(offsets).argmin())
    length = int(np.diff(offsets)[shortest])
    if length < data.context + data.horizon:
        raise UserError(
            f"data.context is {data.context} and data.horizon {data.horizon}, but series "
            f'"{seen.names[shortest]}" has {length} rows; shorten them, or leave it out of the file'
        )
    layout = SeriesIndex(
        series_names=series.make_unique(seen.names),
        offsets=offsets,
        breaks=np.array(sorted(seen.breaks), dtype=np.int64),
        group_begins=np.array(seen.group_begins, dtype=np.int64),
        group_codes=np.array(seen.group_codes, dtype=np.int64),
        group_names=tuple(seen.group_names),
        step=seen.step,
        has_dates=seen.dated,
    )
    return layout, np.array(seen.static, dtype=np.float64).reshape(len(seen.names), len(static))


@dataclass
class _Seen:
    """What the first pass knows so far."""

    names: list[str] = field(default_factory=list)
    known: set[str] = field(default_factory=set)
    begins: list[int] = field(default_factory=list)
    breaks: set[int] = field(default_factory=set)
    group_names: dict[str, int] = field(default_factory=dict)
    group_begins: list[int] = field(default_factory=list)
    group_codes: list[int] = field(default_factory=list)
    static: list[list[float]] = field(default_factory=list)
    last_time: Any = None
    usual: float | None = None
    """Of the series at hand, in the column's own unit"""
    step: float | None = None
    dated: bool = False


def _scan(source: DataTable, begin: int, data: Data, static: Sequence[str], seen: _Seen) -> None:
    codes, names = roles.identify_series(source, data)
    time = None if data.time is None else typed.read_times(source, data.time, data.time_format)
    columns = [typed.read_numbers(source, name, "data.static") for name in static]
    groups = roles.find_split_groups(source, data, codes, names, seen.group_names)
    for at in np.flatnonzero(np.diff(groups, prepend=groups[:1] - 1)):
        if not seen.group_codes or seen.group_codes[-1] != groups[at]:
            seen.group_begins.append(begin + int(at))
            seen.group_codes.append(int(groups[at]))
    firsts = np.flatnonzero(np.diff(codes, prepend=codes[:1] - 1))
    for at, end in zip(firsts, np.append(firsts[1:], source.num_rows), strict=True):
        name = names[codes[at]]
        if not seen.names or seen.names[-1] != name:
            if name in seen.known:
                raise UserError(
                    f'{source.locate_row(int(at))}: series "{name}" goes on here, after another '
                    "one; "
                    "to stream a table, keep each series' rows together (sort it by data.id)"
                )
            seen.names.append(name)
            seen.known.add(name)
            seen.begins.append(begin + int(at))
            seen.breaks.add(begin + int(at))
            seen.static.append([float(values[at]) for values in columns])
            seen.last_time = seen.usual = None
        if time is not None:
            _scan_time(source, begin, int(at), int(end), time, data, seen)


def _scan_time(
    source: DataTable, begin: int, at: int, end: int, time: Times, data: Data, seen: _Seen
) -> None:
    """Order and gaps of one series' rows, which may go on from the stretch before."""
    seen.dated = is_date(time)
    mine = time[at:end]
    before = [] if seen.last_time is None else [seen.last_time]
    steps = np.diff(np.concatenate([np.array(before, dtype=time.dtype), mine]))
    seen.last_time = mine[-1]
    if not len(steps):
        return
    if steps.min() <= 0:
        row = at + int(np.flatnonzero(steps <= 0)[0]) + (0 if before else 1)
        raise UserError(
            f"{source.locate_cell(row, str(data.time))}: not later than the row before it, within "
            "series "
            f'"{seen.names[-1]}"; sort the file by time'
        )
    if seen.usual is None:  # what is usual is told by the series' first stretch
        seen.usual = float(np.partition(steps, len(steps) // 2)[len(steps) // 2])
        if seen.step is None:
            seen.step = seen.usual / MICROSECONDS if seen.dated else seen.usual
    reach = data.gap_tolerance * seen.usual
    gaps = np.flatnonzero((steps < seen.usual - reach) | (steps > seen.usual + reach))
    shift = begin + at + (0 if before else 1)
    seen.breaks.update((gaps + shift).tolist())


def scan_values(
    source: DataTable, signature: Signature, runs: SplitAssignment, kind: str
) -> Scaler:
    """Second pass: how columns scale, from training rows; missing values are refused."""
    sums = RunningStatistics({}, {}, {}, {}, {})
    train = SETS.index("train")
    every, seen = scaling.choose_sample_stride(runs.count_rows(train)), 0
    samples: dict[str, list[Floats]] = {}
    for begin in range(0, source.num_rows, SCAN_ROWS):
        end = min(begin + SCAN_ROWS, source.num_rows)
        stretch = source.slice_rows(begin, end)
        training = np.flatnonzero(runs.mask(train, begin, end))
        for name, setting in _columns(signature).items():
            column = typed.read_numbers(stretch, name, setting)
            label = bool(signature.classes) and name in signature.targets
            holes = np.flatnonzero(np.isnan(column) | (label & (column < 0)))
            if len(holes):
                raise UserError(
                    f"{stretch.locate_cell(int(holes[0]), name)}: is missing; to stream a table, "
                    "fill or "
                    "leave out what is missing beforehand"
                )
            if not label:
                sums.add(name, column[training])
                samples.setdefault(name, []).append(column[training[-seen % every :: every]])
            del column
            table.release_memory()
        seen += len(training)
    scaler = sums.to_scaler(kind)
    for name, parts in samples.items():
        scaling.refuse_lost_digits(name, np.concatenate(parts), scaler)
    return scaler
