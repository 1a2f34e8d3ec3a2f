"""Prepare series from tables: tell them apart, order them in time, mark gaps, fill or drop rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from slipstream.base.errors import Setting, UserError
from slipstream.base.text import format_count
from slipstream.config import Data, Signature, Split
from slipstream.config.prepare import ResampleStep
from slipstream.data.columns import read_numbers, read_times
from slipstream.data.roles import Roles, find_split_groups, identify_series, select_rows
from slipstream.data.table import DataTable

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]

NO_RUNS: Ints = np.empty((0, 2), dtype=np.int64)
CODES = {-99, -200, -999, -9999, -99999, 999, 9999, 99999, 32767, -32768, 65535}
"""Numbers that loggers write where a value is missing"""
CODE_DISTANCE = 0.25
"""How far from all other values, in their standard deviations, a number of CODES must be to count
as a code"""
MIN_REPEATED, MIN_OTHERS = 5, 20
"""How often such a code occurs at least, and how many different values there are beside it"""
SCAN_ROWS = 1 << 18
"""Rows of a table on disk that are looked at together"""
MAX_LISTED = 5
"""Series that a note names"""


class MissingCode(NamedTuple):
    """A number that seems to mean "missing", and the range of all other values."""

    value: float
    share: float
    low: float
    high: float


def find_codes(values: Floats) -> Iterator[MissingCode]:
    """Yield the lowest or the highest value of a column if it is repeated, far from all others."""
    for extreme in (values.min(), values.max()) if len(values) else ():
        is_code = values == extreme
        ordinary = values[~is_code]
        if is_code.sum() < MIN_REPEATED or len(np.unique(ordinary)) < MIN_OTHERS:
            continue
        low, high, spread = float(ordinary.min()), float(ordinary.max()), float(ordinary.std())
        gap = max(low - float(extreme), float(extreme) - high)
        is_usual = any(abs(extreme - code) <= 1e-4 * abs(code) for code in CODES)
        is_zero = abs(extreme) <= 1e-5 * float(values.std())
        if not is_zero and (gap > high - low or (is_usual and gap > CODE_DISTANCE * spread)):
            yield MissingCode(float(extreme), float(is_code.mean()), low, high)


def fill_forward(values: Floats) -> Floats:
    """Return the values with each missing one replaced by the last known one; missing values at the
    beginning stay."""
    missing = np.isnan(values)
    if not missing.any():
        return values
    known = np.maximum.accumulate(np.where(missing, -1, np.arange(len(missing))))
    return np.where(known >= 0, values[known], np.nan)


def encode_runs(rows: Flags) -> Ints:
    """Return the runs of marked rows, [runs, 2]: first row, and row after the last."""
    edges = np.flatnonzero(np.diff(rows, prepend=False, append=False))
    return edges.reshape(-1, 2)


def join_runs(parts: list[Ints]) -> Ints:
    """Return consecutive arrays of runs as one; runs that touch are merged."""
    runs = np.concatenate([NO_RUNS, *parts])
    if not len(runs):
        return runs
    touching = runs[1:, 0] == runs[:-1, 1]
    begins, ends = runs[:, 0], runs[:, 1]
    return np.stack([begins[np.append(True, ~touching)], ends[np.append(~touching, True)]], axis=1)


def describe_missing(dropped: Flags, missing: dict[str, Ints], *, policy: str) -> str:
    """Describe how many values were filled in, and how many rows are left out and for which
    columns."""
    counts = {name: len(rows) for name, rows in missing.items()}
    if policy == "drop":
        return f"left out rows with missing values: {list_counts(counts)}"
    first = int(dropped.sum())  # these rows come before all others
    repeated = {name: int((rows >= first).sum()) for name, rows in missing.items()}
    parts = []
    if any(repeated.values()):
        parts.append(f"repeated the last known value: {list_counts(repeated)}")
    if first:
        unknown = {name: counts[name] - repeated[name] for name in counts}
        rows = "the first row" if first == 1 else f"the first {first:,} rows"
        parts.append(f"left out {rows}, before every value is known: {list_counts(unknown)}")
    return "; ".join(parts)


def list_counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in counts.items() if count)


def describe_left_out(
    left_out: dict[str, int], num_windows: dict[str, int], signature: Signature
) -> list[str]:
    """Note the number of windows that each set leaves out because a value to predict is missing."""
    parts = [
        f"{count:,} of {count + num_windows[name]:,}" + (f" {name}" if len(left_out) > 1 else "")
        for name, count in left_out.items()
        if count
    ]
    if not parts:
        return []
    subject = "windows whose target is missing"
    if signature.classes:
        subject = "windows without a label"
    elif signature.masked:
        subject = "windows in which a value is missing"
    elif signature.steps_out > 1 or len(signature.targets) > 1:
        subject = "windows of which a target is missing"
    return [f"left out {subject}: {', '.join(parts)}"]


Times = npt.NDArray[Any]
"""Microseconds (int64) for dates and timestamps, float64 for plain numbers."""
MICROSECONDS = 1e6
DAY_S = 86400.0
MERGE_HINT = ' to average such rows, "first" or "last" to keep one of them'
"""What an error says behind data.duplicates = "mean" """
FUTURE = "data.future"
"""The setting that names columns known ahead"""


@dataclass(frozen=True)
class SeriesIndex:
    """The position of each series among the rows of all series, end to end."""

    series_names: tuple[str, ...]
    offsets: Ints
    """Series s holds the rows offsets[s] to offsets[s + 1]."""
    breaks: Ints
    """Rows that do not continue the row before, among them the first row of each series"""
    group_begins: Ints
    """First rows of each run of rows in one group of the split"""
    group_codes: Ints
    """The position in `group_names` of each run's group"""
    group_names: tuple[str, ...]
    step: float | None
    """The usual step: seconds for timestamps, else in the column's own unit."""
    has_dates: bool
    """Whether times are dates or timestamps"""
    unknown: Ints = field(default_factory=lambda: NO_RUNS)
    """[runs, 2]: rows without a target, as first row and row after the last"""
    num_missing: dict[str, int] = field(default_factory=dict)
    """Missing values by column, where they were counted, before they were filled or their rows
    dropped"""
    padding: Ints | None = None
    """Rows at the beginning of each series that are context only; None where there are none"""
    skipped: Ints = field(default_factory=lambda: NO_RUNS)
    """[runs, 2]: a row, and the number of rows of its series up to there that are left out, because
    a value is missing or steps of `data.prepare` look back further"""
    look_ahead: int = 0
    """The number of later rows that values may depend on, because of a step of `data.prepare`"""
    strata: Ints | None = None
    """[series]: the class of the last row of each, where the split draws shares of the series"""
    ahead: Ints = field(default_factory=lambda: np.zeros(1, dtype=np.int64))
    """[series] or [1]: the number of rows at a series' end where only the columns of `data.future`
    are known"""

    @property
    def num_rows(self) -> int:
        return int(self.offsets[-1])

    @property
    def segments(self) -> Ints:
        """First rows of the pieces between gaps, after the rows that pad a series."""
        if self.padding is None:
            return self.breaks
        begins = self.breaks.copy()
        begins[np.searchsorted(begins, self.offsets[:-1])] += self.padding
        return begins

    def number_rows(self, rows: Ints, owners: Ints | int) -> Ints:
        """Return the number of each row in its series, from 0 on, in the order of time: rows that
        were left out count, rows that pad a series do not. Rows may lie behind a series' end."""
        first = self.offsets[:-1] + (0 if self.padding is None else self.padding)
        numbers: Ints = rows - first[owners]
        if not len(self.skipped):
            return numbers
        known = np.minimum(rows, self.offsets[1:][owners] - 1)
        runs = np.searchsorted(self.skipped[:, 0], known, side="right") - 1
        numbers += self.skipped[runs, 1]
        return numbers

    def mask_padding(self, begin: int, end: int) -> Flags:
        """Mark the padding rows among the rows from `begin` to before `end`."""
        mask = np.zeros(end - begin, dtype=bool)
        if self.padding is not None:
            bounds = np.searchsorted(self.offsets, [begin, end], side="right") - [1, 0]
            for series in range(int(bounds[0]), min(int(bounds[1]), len(self.padding))):
                first = self.offsets[series]
                low, high = np.clip([first, first + self.padding[series]], begin, end) - begin
                mask[low:high] = True
        return mask

    def infer_period(self) -> int | None:
        """Return the rows per day for steps below a day, per week for days, per year for weeks to
        quarters."""
        if self.step is None or not self.has_dates:
            return None
        days = self.step / DAY_S
        for length, low, high in ((7, 0.99, 1.01), (52, 6.9, 7.1), (12, 27, 32), (4, 88, 93)):
            if low <= days <= high:
                return length
        rows = round(1 / days) if days < 1 else 0
        return rows if rows > 1 and abs(rows * days - 1) < 1e-6 else None


@dataclass(frozen=True)
class RawSeries:
    """Every series end to end, in physical units.

    Columns are read one at a time, so that only one is in memory beside the scaled values.
    """

    index: SeriesIndex
    column_names: tuple[str, ...]
    read_column: Callable[[str], Floats]
    """A function that reads a column's values of all rows; each call reads them again"""
    static: Floats
    """[series, static columns]"""
    time: Times | None
    notes: tuple[str, ...]


@dataclass(frozen=True)
class RepeatedRows:
    """Groups of rows that have the same time, each to be averaged into one row."""

    numbers: Ints
    """Which of the series' rows, after merging, are made from several"""
    rows: Ints
    """The table's rows that they are made from, group after group"""
    begins: Ints
    """Where each group begins among `rows`"""

    def put_means(self, column: Floats, values: Floats) -> None:
        """Write the mean of the known values of each group of a table's column into the series'
        values."""
        parts = column[self.rows]
        known = ~np.isnan(parts)
        sums = np.add.reduceat(np.where(known, parts, 0.0), self.begins)
        counts = np.add.reduceat(known.astype(np.int64), self.begins)
        means = np.divide(sums, counts, out=np.full(len(sums), np.nan), where=counts > 0)
        values[self.numbers] = means

    def cut(self, end: int) -> RepeatedRows | None:
        """Return the groups that become rows before `end`; None where there are none."""
        count = int(np.searchsorted(self.numbers, end))
        bounds = np.append(self.begins, len(self.rows))
        if not count:
            return None
        return RepeatedRows(self.numbers[:count], self.rows[: bounds[count]], self.begins[:count])


def merge_repeated(rows: Ints, repeats: Flags, policy: str) -> tuple[Ints, RepeatedRows | None]:
    """Return which of a series' rows remain where each time occurs once, and what is averaged.

    `repeats` marks the rows that have the time of the row before. The `policy` is that of
    `data.duplicates`: "first", "last" or "mean".
    """
    begins = np.flatnonzero(~repeats)
    if policy == "first":
        return begins, None
    ends = np.append(begins[1:], len(rows))
    if policy == "last":
        return ends - 1, None
    sizes = ends - begins
    numbers = np.flatnonzero(sizes > 1)
    in_group = np.repeat(sizes > 1, sizes)
    group_begins = np.cumsum(sizes[numbers]) - sizes[numbers]
    return begins, RepeatedRows(numbers, rows[in_group], group_begins)


def describe_merged(counts: Mapping[str, int], policy: str) -> list[str]:
    """Note how many rows of each series were merged because of their time."""
    merged = {f'"{name}"': count for name, count in counts.items() if count}
    if not merged:
        return []
    listed = ", ".join(f"{name} {count:,}" for name, count in list(merged.items())[:MAX_LISTED])
    more = f" and {len(merged) - MAX_LISTED:,} more series" if len(merged) > MAX_LISTED else ""
    total = format_count(sum(merged.values()), "row")
    return [
        f'merged {total} with the time of another row (data.duplicates = "{policy}"): '
        f"{listed}{more}"
    ]


@dataclass(frozen=True)
class _TableSeries:
    """One series of a table."""

    name: str
    table: DataTable
    rows: Ints | range
    """The series' rows in the table, in order; a range where they are contiguous"""
    static: Floats
    time: Times | None
    breaks: Flags
    groups: npt.NDArray[np.int32]
    retained: Ints | None = None
    """The positions in `rows` that remain, where rows were dropped because a value is missing"""
    unknown: Flags | None = None
    """Marks the remaining rows that lack a target; None where none does"""
    padded: Flags | None = None
    """Marks the rows that are context only; None where none is"""
    ahead: int = 0
    """The number of rows at the end where only the columns of `data.future` are known"""
    skipped: int = 0
    """Rows before the first of `rows` that steps of `data.prepare` have cut off"""
    repeated: RepeatedRows | None = None
    """Which of `rows` are the mean of several rows of one time; None where none is"""
    num_merged: int = 0
    """Rows that were merged into another one of the same time"""

    def take(self, rows: Ints) -> _TableSeries:
        """Return a series of these rows, in this order; the caller has to correct the breaks."""
        time = None if self.time is None else self.time[rows]
        padded = None if self.padded is None else self.padded[rows]
        breaks, groups = self.breaks[rows], self.groups[rows]
        return replace(self, time=time, breaks=breaks, groups=groups, padded=padded)

    def pick(self, column: Floats, *, is_label: bool = False) -> Floats:
        """Return the table's column at `rows`; a view where they stand together. Rows of one time
        are averaged where they are to be, but for labels, of which the first counts."""
        if isinstance(self.rows, range):
            return column[self.rows.start : self.rows.stop]
        values: Floats = column[self.rows]
        if self.repeated is not None and not is_label:
            self.repeated.put_means(column, values)
        return values

    def find_missing(self, column: Floats, setting: str) -> Flags:
        """Mark the missing values of a column, except in rows ahead, where values are not
        expected."""
        mask: Flags = np.isnan(self.pick(column))
        if self.ahead and setting != FUTURE:
            mask[-self.ahead :] = False
        return mask


def prepare_series(
    tables: Sequence[DataTable], data: Data, roles: Roles, *, min_rows: int, targets: bool = True
) -> RawSeries:
    """Return the series of all tables; a series with fewer than `min_rows` is refused or dropped.

    `data.missing` applies to inputs. Rows that lack only a target stay, marked in the index. Rows
    at the end where only columns known ahead have values stay too if targets are not needed.
    """
    observed = [name for name in roles.inputs if name in roles.targets]
    roles = roles if targets else replace(roles, targets=())
    settings = dict.fromkeys(roles.inputs, "data.inputs") | dict.fromkeys(roles.future, FUTURE)
    settings |= dict.fromkeys(roles.targets, "data.targets")
    inputs = {name: settings[name] for name in roles.inputs}
    group_names: dict[str, int] = {}
    notes: list[str] = []
    num_missing: Counter[str] = Counter()
    all_series: list[_TableSeries] = []
    steps: dict[float, list[str]] = {}
    merged: Counter[str] = Counter()
    for table in tables:
        ordered = [_order(raw, data) for raw in _split_table(table, data, roles, group_names)]
        complete = [series for series, _ in ordered]
        merged.update({series.name: series.num_merged for series in complete})
        if roles.future:
            rows = None if targets else data.horizon
            complete = _find_ahead(complete, inputs, observed, rows, notes)
        if data.missing != "error":
            complete = _drop_incomplete(complete, inputs, data, notes, num_missing)
        complete = _mark_unknown(complete, roles, data)
        for series, (_, step) in zip(complete, ordered, strict=True):
            if len(series.breaks) - series.ahead < min_rows:
                notes.append(_describe_short(series, data, min_rows))
                continue
            all_series.append(series)
            if step is not None:
                steps.setdefault(step, []).append(series.name)
    if not all_series:
        raise UserError(
            f"no series has the {min_rows} rows of one window; shorten data.context or data.horizon"
        )
    notes += [*describe_merged(merged, data.duplicates), *_describe_steps(steps)]
    time = _join_times(all_series)
    groups = _concatenate([series.groups for series in all_series])
    group_begins = np.flatnonzero(np.diff(groups, prepend=groups[:1] - 1))
    index = SeriesIndex(
        series_names=make_unique([series.name for series in all_series]),
        offsets=np.cumsum([0, *(len(series.breaks) for series in all_series)], dtype=np.int64),
        breaks=np.flatnonzero(np.concatenate([series.breaks for series in all_series])),
        group_begins=group_begins,
        group_codes=groups[group_begins].astype(np.int64),
        group_names=tuple(group_names),
        step=max(steps, key=lambda step: len(steps[step]), default=None),
        has_dates=time is not None and is_date(time),
        unknown=_join_unknown(all_series),
        num_missing=dict(num_missing),
        padding=_count_padding(all_series),
        skipped=_join_skipped(all_series),
        look_ahead=max(table.look_ahead for table in tables),
        ahead=np.array([series.ahead for series in all_series], dtype=np.int64),
    )
    read_column = partial(_read_column, all_series, settings, inputs, data)
    if data.task == "classify" and data.split.draws_series and roles.targets:
        last = read_column(roles.targets[0])[index.offsets[1:] - 1]
        index = replace(index, strata=last.astype(np.int64))
    return RawSeries(
        index=index,
        column_names=tuple(settings),
        read_column=read_column,
        static=np.stack([series.static for series in all_series]),
        time=time,
        notes=tuple(notes),
    )


class OrderedRows(NamedTuple):
    """The rows of one series in a table, in time order."""

    name: str
    rows: Ints | range
    time: Times | None
    step: float | None
    """The usual step: seconds for timestamps, else in the column's own unit"""
    repeated: RepeatedRows | None = None
    """Which of `rows` are the mean of several rows of one time; None where none is"""
    num_merged: int = 0
    """Rows that were merged into another one of the same time"""


def iter_ordered(table: DataTable, data: Data) -> Iterator[OrderedRows]:
    """Yield the rows of each series that `data.where` selects, in time order."""
    whole = data.model_copy(update={"split": Split(train=0.7, val=0.1, test=0.2)})
    for raw in _split_table(table, whole, Roles((), ()), {}):
        series, step = _order(raw, data)
        repeated, num_merged = series.repeated, series.num_merged
        yield OrderedRows(series.name, series.rows, series.time, step, repeated, num_merged)


def _join_times(all_series: list[_TableSeries]) -> Times | None:
    times = [series.time for series in all_series if series.time is not None]
    if len({time.dtype for time in times}) > 1:
        raise UserError(
            "data.time holds plain numbers in some files and dates in others", setting="data.time"
        )
    return _concatenate(times) if times else None


def _describe_steps(steps: dict[float, list[str]]) -> list[str]:
    """Note where the usual step differs between series."""
    listed = ", ".join(f'{size:g} ("{names[0]}")' for size, names in list(steps.items())[:4])
    return [f"series differ in their usual time step: {listed}"] if len(steps) > 1 else []


def make_unique(names: list[str]) -> tuple[str, ...]:
    """Return the names, with a number added where a name occurs more than once."""
    repeated = {name for name, count in Counter(names).items() if count > 1}
    return tuple(f"{name} #{i}" if name in repeated else name for i, name in enumerate(names, 1))


def _read_numbers(table: DataTable, name: str, setting: str) -> Floats:
    column = read_numbers(table, name, setting)
    if np.isnan(column).all():
        raise UserError(f'{table.name}: column "{name}" ({setting}) has no values')
    return column


def _read_column(
    all_series: list[_TableSeries],
    settings: dict[str, str],
    inputs: dict[str, str],
    data: Data,
    name: str,
) -> Floats:
    """Read one column of all series, table after table; without a copy where it is one table's.

    The policy decides about missing values of an input; missing values of a target stay NaN.
    """
    parts: list[Floats] = []
    policy, is_label = data.missing, _is_label(name, settings[name], data)
    for _, of_table in groupby(all_series, key=lambda series: id(series.table)):
        table_series = list(of_table)
        read = _read_numbers if name in inputs else read_numbers
        column = read(table_series[0].table, name, settings[name])
        for series in table_series:
            values = series.pick(column, is_label=is_label)
            if name in inputs and policy == "error":
                _refuse_missing(series, name, series.find_missing(column, settings[name]), inputs)
            elif name in inputs and policy == "forward":
                values = fill_forward(values)
            parts.append(values if series.retained is None else values[series.retained])
        del column, values
    return _concatenate(parts)


def _is_label(name: str, setting: str, data: Data) -> bool:
    """Return whether a column holds the numbers of classes, which cannot be averaged."""
    return data.task == "classify" and (setting == "data.targets" or name in (data.targets or ()))


def _concatenate(parts: list[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    """Return the parts as one array, without a copy where they are all slices of one array, in
    order."""
    if len(parts) == 1:
        return parts[0]
    whole = parts[0].base
    if isinstance(whole, np.ndarray) and sum(map(len, parts)) == len(whole):
        addresses = [part.__array_interface__["data"][0] for part in parts]
        ends = addresses[0] + np.cumsum([part.nbytes for part in parts[:-1]])
        if all(part.base is whole for part in parts) and addresses == [addresses[0], *ends]:
            return whole
    return np.concatenate(parts)


def _split_table(
    table: DataTable, data: Data, roles: Roles, group_names: dict[str, int]
) -> Iterator[_TableSeries]:
    """Yield the series of one table, rows in file order."""
    static = {name: read_numbers(table, name, "data.static") for name in roles.static}
    time = None
    if data.time_column is not None:
        time = read_times(table, data.time_column, data.time_format)
    codes, names = identify_series(table, data)
    groups = find_split_groups(table, data, codes, names, group_names)
    order, bounds = _sort_by_series(select_rows(table, data), codes, names)
    for name, begin, end in zip(names, bounds[:-1], bounds[1:], strict=True):
        if begin == end:
            continue
        rows = order[begin:end]
        # a slice where the rows stand together: a view, not a copy
        selection: Any = slice(begin, end) if isinstance(order, range) else rows
        times = None if time is None else time[selection]
        fixed = _read_static(table, static, rows, name)
        breaks = np.arange(len(rows)) == 0
        series = _TableSeries(name, table, rows, fixed, times, breaks, groups[selection])
        if table.padded is not None:
            series = replace(series, padded=table.padded[selection])
        if table.ahead is not None:
            series = replace(series, ahead=int(table.ahead[selection].sum()))
        if table.skipped:
            series = replace(series, skipped=table.skipped.get(name, 0))
        yield series


def _sort_by_series(
    selected: Ints | range, series: Ints, names: list[str]
) -> tuple[Ints | range, list[int]]:
    """Return the selected rows, series after series, and the bounds of the series among them."""
    if len(names) == 1:
        return selected, [0, len(selected)]
    codes = series if isinstance(selected, range) else series[selected]
    if (np.diff(codes) < 0).any():
        by_code = np.argsort(codes, kind="stable")
        selected, codes = list_rows(selected)[by_code], codes[by_code]
    return selected, np.searchsorted(codes, np.arange(len(names) + 1)).tolist()


def _read_static(
    table: DataTable, static: dict[str, Floats], rows: Ints | range, series: str
) -> Floats:
    """Return the series' static values; a value that changes within the series is refused."""
    if not static:
        return np.empty(0)
    rows = list_rows(rows)
    for name, values in static.items():
        wrong = np.flatnonzero(~(values[rows] == values[rows[0]]))
        if len(wrong):
            row = int(rows[wrong[0]])
            value = "missing" if np.isnan(values[row]) else f"{values[row]:g}"
            raise UserError(
                f"{table.locate_cell(row, name)}: is {value}, not the {values[rows[0]]:g} that "
                f'series "{series}" begins with; a data.static column is constant within a series'
            )
    return np.array([values[rows[0]] for values in static.values()], dtype=np.float64)


def _order(series: _TableSeries, data: Data) -> tuple[_TableSeries, float | None]:
    """Return the series in time order with its gaps marked, and its usual step."""
    time = series.time
    if time is None:
        return series, None
    if data.unsorted == "sort" and (np.diff(time) < 0).any():
        order = np.argsort(time, kind="stable")
        rows = list_rows(series.rows)[order]
        series, time = replace(series.take(order), rows=rows, breaks=series.breaks), time[order]
    steps = np.diff(time)
    if len(steps) and steps.min() <= 0:
        if steps.min() < 0 or not accepts_repeated(data):
            _refuse_order(series, data, steps)
        elif data.duplicates != "error":
            series = _merge_rows(series, np.append(False, steps == 0), data.duplicates)
            assert series.time is not None
            time, steps = series.time, np.diff(series.time)
        else:
            steps = steps[steps > 0]  # the first step, which resamples, makes other rows
            usual = find_usual_step(steps) if len(steps) else 0.0
            return series, (usual / MICROSECONDS if is_date(time) else usual) or None
    if not len(steps):
        return series, None
    usual = find_usual_step(steps)
    breaks = series.breaks.copy()
    breaks[1:] |= find_gaps(steps, usual, data)
    return replace(series, breaks=breaks), usual / MICROSECONDS if is_date(time) else usual


def accepts_repeated(data: Data) -> bool:
    """Return whether several rows of a series may have the same time: they are merged, or the
    first step of `data.prepare` makes one row of all that lie in a bin."""
    return data.duplicates != "error" or (
        bool(data.prepare) and isinstance(data.prepare[0], ResampleStep)
    )


def _merge_rows(series: _TableSeries, repeats: Flags, policy: str) -> _TableSeries:
    """Return the series with each time once."""
    rows = list_rows(series.rows)
    remaining, repeated = merge_repeated(rows, repeats, policy)
    return replace(
        series.take(remaining),
        rows=rows[remaining],
        breaks=np.arange(len(remaining)) == 0,
        repeated=repeated,
        num_merged=len(rows) - len(remaining),
    )


@dataclass(frozen=True)
class MergedReader:
    """Reads a table on disk without the rows that repeat a time, which are merged as they are
    read; of the table, only the numbers of these rows are in memory."""

    source: DataTable
    removed: Ints
    """The rows of the source that are merged into another, in order"""
    policy: str
    plain: frozenset[str]
    """Columns that are not averaged: times, ids, labels"""

    def get_type(self, name: str) -> pa.DataType:
        return pa.float64() if self._averages(name) else self.source.reader.get_type(name)

    def read(self, name: str, begin: int, end: int) -> pa.ChunkedArray:
        if begin >= end:
            return self.source.slice_rows(0, 0).read_column(name)
        # before the source's row r lie r - (removed rows before r) rows of this table
        numbers = self.removed - np.arange(len(self.removed))
        first, past = (
            row + int(np.searchsorted(numbers, row, side="right")) for row in (begin, end)
        )
        removed = self.removed[np.searchsorted(self.removed, first) :]
        removed = removed[: np.searchsorted(removed, past)] - first
        rows = self.source.slice_rows(first, past)
        averages = self._averages(name)
        if not len(removed) and not averages:
            return rows.read_column(name)
        remains = np.ones(past - first, dtype=bool)
        remains[removed] = False
        if not averages:
            return rows.read_column(name).take(pa.array(np.flatnonzero(remains)))
        column = read_numbers(rows, name, "data.inputs")
        remaining, repeated = merge_repeated(np.arange(len(column)), ~remains, "mean")
        values = column[remaining]
        if repeated is not None and len(repeated.numbers):
            repeated.put_means(column, values)
        return pa.chunked_array([pa.array(values, from_pandas=True)])

    def _averages(self, name: str) -> bool:
        if self.policy != "mean" or name in self.plain:
            return False
        kind = self.source.reader.get_type(name)
        return bool(pa.types.is_floating(kind) or pa.types.is_integer(kind))


def merge_on_disk(table: DataTable, data: Data) -> tuple[DataTable, list[str]]:
    """Return a table on disk of which each series has each time once, and notes on that."""
    if data.duplicates == "error" or data.time_column is None:
        return table, []
    parts: list[Ints] = []
    counts: Counter[str] = Counter()
    last: tuple[str, Any] | None = None
    for begin in range(0, table.num_rows, SCAN_ROWS):
        rows = table.slice_rows(begin, min(begin + SCAN_ROWS, table.num_rows))
        times = read_times(rows, data.time_column, data.time_format)
        codes, names = identify_series(rows, data)
        repeats = np.append(False, (np.diff(times) == 0) & (np.diff(codes) == 0))
        repeats[0] = last is not None and last == (names[codes[0]], times[0])
        last = names[codes[-1]], times[-1]
        found = np.flatnonzero(repeats)
        counts.update(names[code] for code in codes[found])
        # of rows that have one time, the first remains, or with "last" the last
        parts.append(begin + found - (data.duplicates == "last"))
    removed = np.concatenate(parts)
    if not len(removed):
        return table, []
    plain = {*data.time_columns, data.time_column, *data.ids, *data.where, data.split.by or ""}
    plain |= set(data.targets or ()) if data.task == "classify" else set()
    merged = replace(
        table,
        num_rows=table.num_rows - len(removed),
        reader=MergedReader(table, removed, data.duplicates, frozenset(plain)),
        first_row=0,
        row_groups=tuple(row - int(np.searchsorted(removed, row)) for row in table.row_groups),
    )
    return merged, describe_merged(counts, data.duplicates)


def find_usual_step(steps: Times) -> float:
    """Return the median step, the later one of two."""
    return float(np.partition(steps, len(steps) // 2)[len(steps) // 2])


def find_gaps(steps: Times, usual: float, data: Data) -> Flags:
    """Mark the steps that differ from the usual one by more than `data.gap_tolerance`."""
    reach = data.gap_tolerance * usual
    return np.asarray((steps < usual - reach) | (steps > usual + reach))


def list_rows(rows: Ints | range) -> Ints:
    """Return rows as an array; numpy alone would convert a range number by number."""
    return np.arange(rows.start, rows.stop) if isinstance(rows, range) else rows


def is_date(time: Times) -> bool:
    return time.dtype == np.int64


def _refuse_order(series: _TableSeries, data: Data, steps: Times) -> None:
    first = int(np.flatnonzero(steps < 0 if accepts_repeated(data) else steps <= 0)[0])
    here = series.table.locate_cell(int(series.rows[first + 1]), str(data.time_column))
    before = series.table.locate_row(int(series.rows[first]))
    if steps[first] == 0:
        repeated = format_count(int((steps == 0).sum()), "row")
        raise UserError(
            f'{here}: the same time as {before}, within series "{series.name}", of which '
            f"{repeated} repeat the time of another: set "
            + Setting({"data.duplicates": "mean"})
            + MERGE_HINT
            + ", or name the column that tells series apart (data.id)"
        )
    raise UserError(
        f'{here}: earlier than {before}, within series "{series.name}"; sort the file, '
        "set "
        + Setting({"data.unsorted": "sort"})
        + ", or name the column that tells series apart (data.id)"
    )


def _find_ahead(
    table_series: list[_TableSeries],
    inputs: dict[str, str],
    observed: Sequence[str],
    horizon: int | None,
    notes: list[str],
) -> list[_TableSeries]:
    """Count the rows at the end of each series that are not observed yet: without a value of the
    targets among the inputs or, without such targets, of the inputs that are not known ahead.

    Where every input is known ahead, the last `horizon` rows are those to predict. Without a
    horizon, where nothing is to be predicted, such rows are left out.
    """
    names = observed or [name for name, setting in inputs.items() if setting != FUTURE]
    ends = [0 if names else len(series.breaks) - (horizon or 0) for series in table_series]
    for name in names:
        column = _read_numbers(table_series[0].table, name, inputs[name])
        for i, series in enumerate(table_series):
            known_rows = ~np.isnan(series.pick(column))
            last = len(known_rows) - int(known_rows[::-1].argmax()) if known_rows.any() else 0
            ends[i] = max(ends[i], last)
    ends = [
        min(end, len(series.breaks) - series.ahead)
        for series, end in zip(table_series, ends, strict=True)
    ]
    marked = [
        replace(series, ahead=len(series.breaks) - end) if end > 0 else series
        for series, end in zip(table_series, ends, strict=True)
    ]
    return [_leave_out_ahead(series, notes) for series in marked] if horizon is None else marked


def _leave_out_ahead(series: _TableSeries, notes: list[str]) -> _TableSeries:
    """Return the series without its rows ahead, which have nothing to learn from."""
    if not series.ahead:
        return series
    end = len(series.breaks) - series.ahead
    rows = format_count(series.ahead, "row")
    notes.append(f'"{series.name}": left out {rows} at its end, of which only data.future is known')
    repeated = None if series.repeated is None else series.repeated.cut(end)
    return replace(series.take(np.arange(end)), rows=series.rows[:end], ahead=0, repeated=repeated)


def _drop_incomplete(
    table_series: list[_TableSeries],
    inputs: dict[str, str],
    data: Data,
    notes: list[str],
    counts: Counter[str],
) -> list[_TableSeries]:
    """Return the series without the rows in which an input stays unknown; add notes and counts of
    the missing values."""
    dropped: list[Flags] = [np.zeros(len(series.breaks), dtype=bool) for series in table_series]
    absent: list[dict[str, Ints]] = [{} for _ in table_series]
    for name, setting in inputs.items():
        column = _read_numbers(table_series[0].table, name, setting)
        for series, rows, by_column in zip(table_series, dropped, absent, strict=True):
            mask = series.find_missing(column, setting)
            if mask.any():
                rows |= mask if data.missing == "drop" else np.logical_and.accumulate(mask)
                by_column[name] = np.flatnonzero(mask)
                counts[name] += len(by_column[name])
    complete = []
    for series, rows, by_column in zip(table_series, dropped, absent, strict=True):
        if by_column:
            missing = describe_missing(rows, by_column, policy=data.missing)
            notes.append(f'"{series.name}": {missing}')
        complete.append(_drop_rows(series, rows) if rows.any() else series)
    return complete


def _mark_unknown(table_series: list[_TableSeries], roles: Roles, data: Data) -> list[_TableSeries]:
    """Mark the rows of a table's series that lack a target. A value that was filled in as an input
    is still a missing target."""
    marks: list[Flags | None] = [None] * len(table_series)
    for name in roles.scored:
        if name in roles.inputs and data.missing != "forward" and data.task == "regress":
            continue  # missing values were refused or dropped
        column = read_numbers(table_series[0].table, name, "data.targets")
        is_label = data.task == "classify"
        if ((column < 0) if is_label else np.isnan(column)).any():
            for i, series in enumerate(table_series):
                values = series.pick(column, is_label=is_label)
                rows: Flags = values < 0 if is_label else np.isnan(values)
                rows = rows if series.retained is None else rows[series.retained]
                before = marks[i]
                marks[i] = rows if before is None else before | rows
    return [replace(series, unknown=rows) for series, rows in zip(table_series, marks, strict=True)]


def _join_unknown(all_series: list[_TableSeries]) -> Ints:
    parts, first = [], 0
    for series in all_series:
        if series.unknown is not None:
            parts.append(first + encode_runs(series.unknown))
        first += len(series.breaks)
    return join_runs(parts)


def _join_skipped(all_series: list[_TableSeries]) -> Ints:
    """Return runs of a row and the number of rows left out up to it, [runs, 2]; empty where none
    is."""
    parts, first = [], 0
    for series in all_series:
        begins, counts = np.zeros(1, dtype=np.int64), np.full(1, series.skipped)
        if series.retained is not None:
            lost = series.retained - np.arange(len(series.retained))
            begins = np.flatnonzero(np.diff(lost, prepend=-1))
            counts = series.skipped + lost[begins]
        parts.append(np.stack([first + begins, counts], axis=1))
        first += len(series.breaks)
    runs = np.concatenate(parts)
    return runs if runs[:, 1].any() else NO_RUNS


def _count_padding(all_series: list[_TableSeries]) -> Ints | None:
    """Return the number of padded rows of each series; None where there are none."""
    counts = [0 if series.padded is None else int(series.padded.sum()) for series in all_series]
    return np.array(counts) if any(counts) else None


def _drop_rows(series: _TableSeries, dropped: Flags) -> _TableSeries:
    retained = np.flatnonzero(~dropped)
    if not len(retained):
        problem = f'series "{series.name}" has no row in which every column is known'
        raise UserError(f"{series.table.name}: {problem}")
    # a row is a break if it was one, or if a row between it and the retained one before was a
    # break or is dropped
    restarts = np.cumsum(series.breaks | dropped)[retained]
    breaks = np.diff(restarts, prepend=restarts[0] - 1) > 0
    ahead = int((retained >= len(dropped) - series.ahead).sum())
    return replace(series.take(retained), retained=retained, breaks=breaks, ahead=ahead)


def _refuse_missing(series: _TableSeries, name: str, mask: Flags, inputs: dict[str, str]) -> None:
    if not mask.any():
        return
    counts = {
        column: int(
            series.find_missing(_read_numbers(series.table, column, setting), setting).sum()
        )
        for column, setting in inputs.items()
    }
    where = series.table.locate_cell(int(series.rows[np.flatnonzero(mask)[0]]), name)
    raise UserError(
        f'{where}: is missing (missing values of series "{series.name}": '
        f"{list_counts(counts)}); set "
        + Setting({"data.missing": "forward"})
        + ' to repeat the last known value, or "drop" to leave such rows out'
    )


def _describe_short(series: _TableSeries, data: Data, min_rows: int) -> str:
    rows = len(series.breaks)
    if data.short == "error":
        refuse_short(series.name, rows, data, min_rows)
    return f'"{series.name}": left out, its {rows} rows are fewer than the {min_rows} of one window'


def refuse_short(name: str, rows: int, data: Data, min_rows: int) -> None:
    """Refuse a series with fewer rows than one window."""
    raise UserError(
        f'data.context is {data.context} and data.horizon {data.horizon}, but series "'
        f'{name}" has {format_count(rows, "row")} of the {min_rows} needed; add rows, '
        "leave such series out ("
        + Setting({"data.short": "drop"})
        + "), or train with a shorter window",
        setting="data.context",
    )
