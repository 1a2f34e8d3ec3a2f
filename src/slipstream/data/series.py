"""Prepare series from tables: tell them apart, order them in time, mark gaps, fill or drop rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
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
"""How far from all other values, in their deviations, such a number is a code"""
MIN_REPEATED, MIN_OTHERS = 5, 20
"""How often such a code occurs at least, and how many different values there are beside it"""
SCAN_ROWS = 1 << 18
"""Rows of a table on disk that are looked at together"""
MAX_LISTED = 5
"""Series that a note names"""
MAX_NOTES = 20
"""Series up to which each has its own note"""
MAX_PARTITIONED = 64
"""Series with uneven steps up to which each is looked at by itself"""
SAME = 0.99999
"""Two columns with at least this correlation count as copies of each other"""


class MissingCode(NamedTuple):
    """A number that seems to mean "missing", and the range of all other values."""

    value: float
    share: float
    low: float
    high: float


def is_same(values: npt.NDArray[Any], target: npt.NDArray[Any]) -> bool:
    """Return whether values are those of a target up to a factor and an offset."""
    if not (values.std() > 0 and target.std() > 0):
        return False
    return bool(abs(np.corrcoef(values, target)[0, 1]) >= SAME)


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
    """Replace each missing value by the last known one; those before any stay missing."""
    missing = np.isnan(values)
    if not missing.any():
        return values
    known = np.maximum.accumulate(np.where(missing, -1, np.arange(len(missing))))
    return np.where(known >= 0, values[known], np.nan)


def encode_runs(rows: Flags) -> Ints:
    """Return runs of marked rows, [runs, 2]: from one row to before another."""
    edges = np.flatnonzero(np.diff(rows, prepend=False, append=False))
    return edges.reshape(-1, 2)


def mark_runs(runs: Ints, begin: int, end: int) -> Flags:
    """Mark the rows of runs, [runs, 2], among those from `begin` to before `end`; runs do not
    overlap and are in order."""
    inside = (runs[:, 0] < end) & (runs[:, 1] > begin) & (runs[:, 0] < runs[:, 1])
    edges = np.clip(runs[inside], begin, end) - begin
    change = np.zeros(end - begin + 1, dtype=np.int8)
    change[edges[:, 0]] = 1
    change[edges[:, 1]] -= 1  # where the next run begins at once, nothing changes
    return np.cumsum(change[:-1], dtype=np.int8).astype(bool)


def join_runs(parts: list[Ints]) -> Ints:
    """Return runs that follow each other as one array; those that touch become one."""
    runs = np.concatenate([NO_RUNS, *parts])
    if not len(runs):
        return runs
    touching = runs[1:, 0] == runs[:-1, 1]
    begins, ends = runs[:, 0], runs[:, 1]
    return np.stack([begins[np.append(True, ~touching)], ends[np.append(~touching, True)]], axis=1)


def describe_missing(dropped: Flags, missing: dict[str, Ints], *, policy: str) -> str:
    """Say how many values were repeated, and how many rows are left out and for which columns."""
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
    """Note how many windows of each set are left out because what they predict is missing."""
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
    """Where each series lies among the rows of all of them, end to end."""

    series_names: tuple[str, ...]
    offsets: Ints
    """Series s holds the rows offsets[s] to offsets[s + 1]."""
    breaks: Ints
    """Rows that do not follow from the one before them; each series' first is one"""
    group_begins: Ints
    """Rows from which on the split's group is another"""
    group_codes: Ints
    """Which of `group_names`, from each of those rows on"""
    group_names: tuple[str, ...]
    step: float | None
    """The usual step: seconds for timestamps, else in the column's own unit."""
    has_dates: bool
    """Whether times are dates or timestamps"""
    unknown: Ints = field(default_factory=lambda: NO_RUNS)
    """[runs, 2]: rows without a target, each run from one row to before another"""
    num_missing: dict[str, int] = field(default_factory=dict)
    """By column, where they were counted: values that were missing before they were filled or their
    rows dropped"""
    padding: Ints | None = None
    """Rows at the beginning of each series that are context only; None where there are none"""
    skipped: Ints = field(default_factory=lambda: NO_RUNS)
    """[runs, 2]: a row, and how many rows of its series up to there are not among these rows,
    because a value is missing or steps of `data.prepare` look back further"""
    look_ahead: int = 0
    """Rows ahead that values may depend on, because of a step of `data.prepare`"""
    strata: Ints | None = None
    """[series]: the class of the last row of each, where the split draws shares of the series"""
    ahead: Ints = field(default_factory=lambda: np.zeros(1, dtype=np.int64))
    """[series] or [1]: rows at its end of which only the columns of `data.future` are known"""

    @property
    def num_rows(self) -> int:
        return int(self.offsets[-1])

    @property
    def segments(self) -> Ints:
        """First rows of the pieces between gaps, after rows that pad a series."""
        if self.padding is None:
            return self.breaks
        begins = self.breaks.copy()
        begins[np.searchsorted(begins, self.offsets[:-1])] += self.padding
        return begins

    def number_rows(self, rows: Ints, owners: Ints | int) -> Ints:
        """Return the number of each row in its series, from 0 on, in the order of time: rows that
        were left out count, those that pad a series do not. Rows may lie behind a series' end."""
        first = self.offsets[:-1] + (0 if self.padding is None else self.padding)
        numbers: Ints = rows - first[owners]
        if not len(self.skipped):
            return numbers
        known = np.minimum(rows, self.offsets[1:][owners] - 1)
        runs = np.searchsorted(self.skipped[:, 0], known, side="right") - 1
        numbers += self.skipped[runs, 1]
        return numbers

    def mask_padding(self, begin: int, end: int) -> Flags:
        """Mark the padded ones among the rows from `begin` to before `end`."""
        if self.padding is None:
            return np.zeros(end - begin, dtype=bool)
        first = self.offsets[:-1]
        return mark_runs(np.stack([first, first + self.padding], axis=1), begin, end)

    def infer_period(self) -> int | None:
        """Rows per day for steps below a day, per week for days, per year for weeks to quarters."""
        if self.step is None or not self.has_dates:
            return None
        days = self.step / DAY_S
        for length, low, high in ((7, 0.99, 1.01), (52, 6.9, 7.1), (12, 27, 32), (4, 88, 93)):
            if low <= days <= high:
                return length
        rows = round(1 / days) if days < 1 else 0
        return rows if rows > 1 and abs(rows * days - 1) < 1e-6 else None

    def list_periods(self) -> tuple[int, ...]:
        """Return the rows of a day, a week and a year, those that the usual step divides; empty
        where it is not known."""
        period = self.infer_period()
        if period is None or self.step is None:
            return ()
        day = DAY_S / self.step
        if day >= 0.99:
            period = round(day)
            return tuple(rows for rows in (period, 7 * period, 365 * period) if rows > 1)
        return (period,)  # of weeks to quarters: a year


@dataclass(frozen=True)
class RawSeries:
    """Every series end to end, in physical units.

    Columns are read one at a time, so that only one is in memory beside the scaled values.
    """

    index: SeriesIndex
    column_names: tuple[str, ...]
    read_column: Callable[[str], Floats]
    """A column's values, row after row; read anew at every call"""
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

    def select(self, mask: Flags) -> RepeatedRows | None:
        """Return the groups that become rows which are marked, counted among these; None where
        there are none."""
        chosen = mask[self.numbers]
        if not chosen.any():
            return None
        sizes = np.diff(np.append(self.begins, len(self.rows)))
        rows = self.rows[np.repeat(chosen, sizes)]
        begins = np.cumsum(sizes[chosen]) - sizes[chosen]
        return RepeatedRows(np.cumsum(mask)[self.numbers[chosen]] - 1, rows, begins)

    def cut(self, begin: int, end: int) -> RepeatedRows | None:
        """Return the groups that become rows from `begin` to before `end`, counted from there;
        None where there are none."""
        first, past = np.searchsorted(self.numbers, [begin, end])
        if first == past:
            return None
        bounds = np.append(self.begins, len(self.rows))
        rows = self.rows[bounds[first] : bounds[past]]
        begins = self.begins[first:past] - self.begins[first]
        return RepeatedRows(self.numbers[first:past] - begin, rows, begins)


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
    """All series of a table, end to end. A position counts their rows, left out or not.

    There is no object per series: a million short series take as long as a long one.
    """

    table: DataTable
    names: list[str]
    """[series]"""
    rows: Ints | range
    """The table's row at each position; a range where the rows are in order already"""
    bounds: Ints
    """[series + 1]: series s has the positions bounds[s] to bounds[s + 1]"""
    static: Floats
    """[series, static columns]"""
    time: Times | None
    breaks: Flags
    groups: npt.NDArray[np.int32]
    ahead: Ints
    """[series]: rows at the end of which only the columns of `data.future` are known"""
    skipped: Ints
    """[series]: rows before the first one that steps of `data.prepare` have cut off"""
    steps: Floats
    """[series]: the usual step, seconds for timestamps, else in the column's own unit; NaN where
    there is none"""
    retained: Flags | None = None
    """Which positions remain, where some were left out"""
    unknown: Flags | None = None
    """Which positions lack a target; None where none does"""
    padded: Flags | None = None
    """Which positions are context only; None where none is"""
    repeated: RepeatedRows | None = None
    """Which positions are the mean of several rows of one time; None where none is"""
    num_merged: Ints | None = None
    """[series]: rows that were merged into another one of the same time"""

    @property
    def num_positions(self) -> int:
        return int(self.bounds[-1])

    @property
    def sizes(self) -> Ints:
        """[series]: how many rows remain."""
        return self.count(self.retained)

    def count(self, mask: Flags | None) -> Ints:
        """Return how many positions of each series a mask marks; None marks all."""
        if mask is None:
            return np.diff(self.bounds)
        before = np.append(0, np.cumsum(mask, dtype=np.int64))
        return np.diff(before[self.bounds])

    def spread(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return the value of its series for every position."""
        return np.repeat(values, np.diff(self.bounds))

    def leave_out(self, mask: Flags) -> Flags:
        """Return which positions remain without those that are marked."""
        return ~mask if self.retained is None else self.retained & ~mask

    def mark_ahead(self) -> Flags:
        """Mark the rows of which only the columns of `data.future` are known."""
        first: Ints = self.bounds[1:] - self.ahead
        return np.asarray(np.arange(self.num_positions) >= self.spread(first))

    def pick(self, column: Floats, *, is_label: bool = False) -> Floats:
        """Return the table's column at every position; a view where rows are in order. Rows of one
        time are averaged where they are to be, but for labels, of which the first counts."""
        if isinstance(self.rows, range):
            return column[self.rows.start : self.rows.stop]
        values: Floats = column[self.rows]
        if self.repeated is not None and not is_label:
            self.repeated.put_means(column, values)
        return values

    def find_missing(self, values: Floats, setting: str) -> Flags:
        """Mark the missing values of a picked column, of the rows that remain; those of rows ahead
        are not expected to be known."""
        mask: Flags = np.isnan(values)
        if not mask.any():
            return mask
        if self.retained is not None:
            mask &= self.retained
        if self.ahead.any() and setting != FUTURE:
            mask &= ~self.mark_ahead()
        return mask

    def take(self, column: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return the rows that remain, of values at every position."""
        return column if self.retained is None else column[self.retained]

    def find_last(self, mask: Flags) -> Ints:
        """Return the last marked position of each series; one before its first where there is
        none."""
        last = np.maximum.accumulate(np.where(mask, np.arange(len(mask)), -1))
        return np.maximum(last[self.bounds[1:] - 1], self.bounds[:-1] - 1)


def prepare_series(
    tables: Sequence[DataTable], data: Data, roles: Roles, *, min_rows: int, targets: bool = True
) -> RawSeries:
    """Assemble the series of all tables; one with fewer than `min_rows` is refused or dropped.

    `data.missing` is about inputs. Rows that lack only a target stay, marked in the index. Rows at
    the end that have only what is known ahead stay too where targets are not needed.
    """
    observed = [name for name in roles.inputs if name in roles.targets]
    roles = roles if targets else replace(roles, targets=())
    settings = dict.fromkeys(roles.inputs, "data.inputs") | dict.fromkeys(roles.future, FUTURE)
    settings |= dict.fromkeys(roles.targets, "data.targets")
    inputs = {name: settings[name] for name in roles.inputs}
    group_names: dict[str, int] = {}
    notes: list[str] = []
    num_missing: Counter[str] = Counter()
    parts: list[_TableSeries] = []
    merged: Counter[str] = Counter()
    for table in tables:
        part = _order(_split_table(table, data, roles, group_names), data)
        if part.num_merged is not None:
            merged.update(dict(zip(part.names, part.num_merged.tolist(), strict=True)))
        if roles.future:
            rows = None if targets else data.horizon
            part = _find_ahead(part, inputs, observed, rows, notes)
        if data.missing != "error":
            part = _drop_incomplete(part, inputs, data, notes, num_missing)
        part = _drop_short(_mark_unknown(part, roles, data), data, min_rows, notes)
        if part.names:
            parts.append(part)
    if not parts:
        raise UserError(
            f"no series has the {min_rows} rows of one window; shorten data.context or data.horizon"
        )
    steps = np.concatenate([part.steps for part in parts])
    names = [name for part in parts for name in part.names]
    notes += [*describe_merged(merged, data.duplicates), *_describe_steps(steps, names)]
    time = _join_times(parts)
    groups = _concatenate([part.take(part.groups) for part in parts])
    group_begins = np.flatnonzero(np.diff(groups, prepend=groups[:1] - 1))
    offsets = np.append(0, np.cumsum(np.concatenate([part.sizes for part in parts])))
    index = SeriesIndex(
        series_names=make_unique(names),
        offsets=offsets,
        breaks=np.flatnonzero(_concatenate([_find_breaks(part) for part in parts])),
        group_begins=group_begins,
        group_codes=groups[group_begins].astype(np.int64),
        group_names=tuple(group_names),
        step=_find_most_frequent(steps),
        has_dates=time is not None and is_date(time),
        unknown=_join_unknown(parts, offsets),
        num_missing=dict(num_missing),
        padding=_count_padding(parts),
        skipped=_join_skipped(parts),
        look_ahead=max(table.look_ahead for table in tables),
        ahead=np.concatenate([part.ahead for part in parts]),
    )
    read_column = partial(_read_column, parts, settings, inputs, data)
    if data.task == "classify" and data.split.draws_series and roles.targets:
        last = read_column(roles.targets[0])[index.offsets[1:] - 1]
        index = replace(index, strata=last.astype(np.int64))
    return RawSeries(
        index=index,
        column_names=tuple(settings),
        read_column=read_column,
        static=np.concatenate([part.static for part in parts]),
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
    part = _order(_split_table(table, whole, Roles((), ()), {}), data)
    bounds, steps = part.bounds.tolist(), part.steps.tolist()
    for i, (name, begin, end) in enumerate(zip(part.names, bounds, bounds[1:], strict=False)):
        yield OrderedRows(
            name,
            part.rows[begin:end],
            None if part.time is None else part.time[begin:end],
            None if np.isnan(steps[i]) else steps[i],
            None if part.repeated is None else part.repeated.cut(begin, end),
            0 if part.num_merged is None else int(part.num_merged[i]),
        )


def _join_times(parts: list[_TableSeries]) -> Times | None:
    times = [part.take(part.time) for part in parts if part.time is not None]
    if len({time.dtype for time in times}) > 1:
        raise UserError(
            "data.time holds plain numbers in some files and dates in others", setting="data.time"
        )
    return _concatenate(times) if times else None


def _describe_steps(steps: Floats, names: list[str]) -> list[str]:
    """Note where the usual step differs between series."""
    known = np.flatnonzero(~np.isnan(steps))
    sizes, first = np.unique(steps[known], return_index=True)
    order = np.argsort(first)[:4]
    listed = ", ".join(f'{sizes[i]:g} ("{names[known[first[i]]]}")' for i in order)
    return [f"series differ in their usual time step: {listed}"] if len(sizes) > 1 else []


def _find_most_frequent(steps: Floats) -> float | None:
    """Return the step that most series have, the first of several; None where none has any."""
    known = steps[~np.isnan(steps)]
    if not len(known):
        return None
    sizes, first, counts = np.unique(known, return_index=True, return_counts=True)
    most = np.flatnonzero(counts == counts.max())
    return float(sizes[most[first[most].argmin()]])


def make_unique(names: list[str]) -> tuple[str, ...]:
    """Number the names that occur more than once."""
    if len(set(names)) == len(names):
        return tuple(names)
    repeated = {name for name, count in Counter(names).items() if count > 1}
    return tuple(f"{name} #{i}" if name in repeated else name for i, name in enumerate(names, 1))


def _read_numbers(table: DataTable, name: str, setting: str) -> Floats:
    column = read_numbers(table, name, setting)
    if np.isnan(column[:1]).all() and np.isnan(column).all():
        raise UserError(f'{table.name}: column "{name}" ({setting}) has no values')
    return column


def _read_column(
    parts: list[_TableSeries],
    settings: dict[str, str],
    inputs: dict[str, str],
    data: Data,
    name: str,
) -> Floats:
    """Read one column of all series, table after table; without a copy where it is one table's.

    What is missing of an input follows the policy; what is missing of a target alone is NaN.
    """
    values_by_table: list[Floats] = []
    policy, is_label = data.missing, _is_label(name, settings[name], data)
    for part in parts:
        read = _read_numbers if name in inputs else read_numbers
        values = part.pick(read(part.table, name, settings[name]), is_label=is_label)
        if name in inputs and policy == "error":
            _refuse_missing(part, name, part.find_missing(values, settings[name]), inputs)
        elif name in inputs and policy == "forward":
            values = _fill_series_forward(values, part)
        values_by_table.append(part.take(values))
        del values
    return _concatenate(values_by_table)


def _fill_series_forward(values: Floats, part: _TableSeries) -> Floats:
    """Replace each missing value by the last known one of its series."""
    missing = np.isnan(values)
    if not missing.any():
        return values
    known = np.maximum.accumulate(np.where(missing, -1, np.arange(len(missing))))
    return np.where(known >= part.spread(part.bounds[:-1]), values[known], np.nan)


def _is_label(name: str, setting: str, data: Data) -> bool:
    """Return whether a column holds the numbers of classes, which cannot be averaged."""
    return data.task == "classify" and (setting == "data.targets" or name in (data.targets or ()))


def _concatenate(parts: list[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    """Return the parts as one array; without a copy where there is one."""
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _split_table(
    table: DataTable, data: Data, roles: Roles, group_names: dict[str, int]
) -> _TableSeries:
    """Return the series of one table, rows in file order."""
    static = {name: read_numbers(table, name, "data.static") for name in roles.static}
    time = None
    if data.time_column is not None:
        time = read_times(table, data.time_column, data.time_format)
    codes, names = identify_series(table, data)
    groups = find_split_groups(table, data, codes, names, group_names)
    order, bounds = _sort_by_series(select_rows(table, data), codes, names)
    if not np.diff(bounds).all():  # a series of which `data.where` selects no row
        present = np.flatnonzero(np.diff(bounds))
        names = [names[i] for i in present]
        bounds = np.append(bounds[:-1][present], bounds[-1])
    # a slice where the rows stand together: a view, not a copy
    selection: Any = slice(order.start, order.stop) if isinstance(order, range) else order
    breaks = np.zeros(int(bounds[-1]), dtype=bool)
    breaks[bounds[:-1]] = True
    skipped = np.zeros(len(names), dtype=np.int64)
    if table.skipped:
        skipped = np.array([table.skipped.get(name, 0) for name in names], dtype=np.int64)
    part = _TableSeries(
        table,
        names,
        order,
        bounds,
        _read_static(table, static, order, bounds, names),
        None if time is None else time[selection],
        breaks,
        groups[selection],
        ahead=np.zeros(len(names), dtype=np.int64),
        skipped=skipped,
        steps=np.full(len(names), np.nan),
        padded=None if table.padded is None else table.padded[selection],
    )
    return part if table.ahead is None else replace(part, ahead=part.count(table.ahead[selection]))


def _sort_by_series(
    selected: Ints | range, series: Ints, names: list[str]
) -> tuple[Ints | range, Ints]:
    """Return the selected rows, series after series, and where each begins and the last ends."""
    if len(names) == 1:
        return selected, np.array([0, len(selected)])
    codes = series if isinstance(selected, range) else series[selected]
    if (np.diff(codes) < 0).any():
        by_code = np.argsort(codes, kind="stable")
        selected, codes = list_rows(selected)[by_code], codes[by_code]
    return selected, np.searchsorted(codes, np.arange(len(names) + 1))


def _read_static(
    table: DataTable,
    static: dict[str, Floats],
    rows: Ints | range,
    bounds: Ints,
    names: list[str],
) -> Floats:
    """Return the static values of each series, which must not change within it."""
    result = np.empty((len(names), len(static)))
    rows = list_rows(rows) if static else rows
    for number, (name, values) in enumerate(static.items()):
        result[:, number] = values[rows[bounds[:-1]]]
        first = np.repeat(result[:, number], np.diff(bounds))
        wrong = np.flatnonzero(~(values[rows] == first))
        if len(wrong):
            row, series = int(rows[wrong[0]]), names[_find_owner(bounds, int(wrong[0]))]
            value = "missing" if np.isnan(values[row]) else f"{values[row]:g}"
            raise UserError(
                f"{table.locate_cell(row, name)}: is {value}, not the {first[wrong[0]]:g} that "
                f'series "{series}" begins with; a data.static column is constant within a series'
            )
    return result


def _find_owner(bounds: Ints, position: int) -> int:
    """Return the series that has a position."""
    return int(np.searchsorted(bounds, position, side="right")) - 1


def _order(part: _TableSeries, data: Data) -> _TableSeries:
    """Return the series in time order with their gaps marked and their usual steps."""
    time = part.time
    if time is None:
        return part
    if data.unsorted == "sort" and (_find_steps(part) < 0).any():
        owners = part.spread(np.arange(len(part.names)))
        order = np.lexsort((time, owners))  # stable
        part = _reorder(part, order)
    steps = _find_steps(part)
    if len(steps) and steps.min() <= 0:
        if steps.min() < 0 or not accepts_repeated(data):
            _refuse_order(part, data, steps)
        elif data.duplicates != "error":
            part = _merge_rows(part, steps, data.duplicates)
            steps = _find_steps(part)
    inside = ~part.breaks  # each has the step from the row before
    bounds = part.bounds - np.arange(len(part.bounds))  # of the steps of each series
    # repeated times that are left are for the first step, which resamples and makes other rows
    is_positive = steps > 0
    has_repeats = np.zeros(len(part.names), dtype=bool)
    usable = steps
    if not is_positive.all():
        before = np.append(0, np.cumsum(is_positive))
        has_repeats = np.diff(before[bounds]) < np.diff(bounds)
        usable, bounds = steps[is_positive], before[bounds]
    usual = _find_usual_steps(usable, bounds)
    breaks = part.breaks.copy()
    if not has_repeats.all():
        expected = np.repeat(usual, np.diff(part.bounds) - 1)
        gaps = find_gaps(steps, expected, data)
        breaks[inside] = gaps & ~np.repeat(has_repeats, np.diff(part.bounds) - 1)
    unit = MICROSECONDS if part.time is not None and is_date(part.time) else 1.0
    return replace(part, breaks=breaks, steps=usual / unit)


def _find_steps(part: _TableSeries) -> Times:
    """Return the steps within each series, series after series."""
    assert part.time is not None
    steps = np.diff(part.time)
    if len(part.names) == 1:
        return steps
    inside = np.ones(len(steps), dtype=bool)
    inside[part.bounds[1:-1] - 1] = False
    return steps[inside]


def _find_usual_steps(steps: Times, bounds: Ints) -> Floats:
    """Return the median step of each series, NaN where it has none; those of series s are
    bounds[s] to bounds[s + 1]."""
    usual = np.full(len(bounds) - 1, np.nan)
    present = np.flatnonzero(np.diff(bounds))
    if not len(present):
        return usual
    begins = bounds[:-1][present]
    low, high = np.minimum.reduceat(steps, begins), np.maximum.reduceat(steps, begins)
    usual[present] = low
    uneven = present[low < high]
    if len(uneven) <= MAX_PARTITIONED:
        for series in uneven:
            usual[series] = find_usual_step(steps[bounds[series] : bounds[series + 1]])
        return usual
    sizes = np.diff(bounds)
    is_uneven = np.zeros(len(usual), dtype=bool)
    is_uneven[uneven] = True
    values = steps[np.repeat(is_uneven, sizes)]
    values = values[np.lexsort((values, np.repeat(uneven, sizes[uneven])))]
    first = np.cumsum(sizes[uneven]) - sizes[uneven]
    usual[uneven] = values[first + sizes[uneven] // 2]
    return usual


def _reorder(part: _TableSeries, order: Ints) -> _TableSeries:
    """Return these positions, in this order, which keeps series together."""
    return replace(
        part,
        rows=list_rows(part.rows)[order],
        time=None if part.time is None else part.time[order],
        groups=part.groups[order],
        padded=None if part.padded is None else part.padded[order],
    )


def accepts_repeated(data: Data) -> bool:
    """Return whether several rows of a series may have the same time: they are merged, or the
    first step of `data.prepare` makes one row of all that lie in a bin."""
    return data.duplicates != "error" or (
        bool(data.prepare) and isinstance(data.prepare[0], ResampleStep)
    )


def _merge_rows(part: _TableSeries, steps: Times, policy: str) -> _TableSeries:
    """Return the series with each time once."""
    repeats = ~part.breaks
    repeats[repeats] = steps == 0
    rows = list_rows(part.rows)
    remaining, repeated = merge_repeated(rows, repeats, policy)
    num_merged = part.count(repeats)
    bounds = part.bounds - np.append(0, np.cumsum(num_merged))
    breaks = np.zeros(len(remaining), dtype=bool)
    breaks[bounds[:-1]] = True
    return replace(
        _reorder(part, remaining),
        bounds=bounds,
        breaks=breaks,
        repeated=repeated,
        num_merged=num_merged,
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


def find_gaps(steps: Times, usual: float | Floats, data: Data) -> Flags:
    """Mark the steps that differ from the usual one, of all or of each, by more than
    `data.gap_tolerance`."""
    reach = data.gap_tolerance * usual
    return np.asarray((steps < usual - reach) | (steps > usual + reach))


def list_rows(rows: Ints | range) -> Ints:
    """Return rows as an array; numpy would walk through a range number by number."""
    return np.arange(rows.start, rows.stop) if isinstance(rows, range) else rows


def is_date(time: Times) -> bool:
    return time.dtype == np.int64


def _require_time(part: _TableSeries) -> Times:
    assert part.time is not None
    return part.time


def _refuse_order(part: _TableSeries, data: Data, steps: Times) -> None:
    wrong = int(np.flatnonzero(steps < 0 if accepts_repeated(data) else steps <= 0)[0])
    position = int(np.flatnonzero(~part.breaks)[wrong])
    series = _find_owner(part.bounds, position)
    first = position - int(part.bounds[series]) - 1
    steps = np.diff(_require_time(part)[part.bounds[series] : part.bounds[series + 1]])
    name = part.names[series]
    here = part.table.locate_cell(int(part.rows[position]), str(data.time_column))
    before = part.table.locate_row(int(part.rows[position - 1]))
    if steps[first] == 0:
        repeated = format_count(int((steps == 0).sum()), "row")
        raise UserError(
            f'{here}: the same time as {before}, within series "{name}", of which '
            f"{repeated} repeat the time of another: set "
            + Setting({"data.duplicates": "mean"})
            + MERGE_HINT
            + ", or name the column that tells series apart (data.id)"
        )
    raise UserError(
        f'{here}: earlier than {before}, within series "{name}"; sort the file, '
        "set "
        + Setting({"data.unsorted": "sort"})
        + ", or name the column that tells series apart (data.id)"
    )


def _find_ahead(
    part: _TableSeries,
    inputs: dict[str, str],
    observed: Sequence[str],
    horizon: int | None,
    notes: list[str],
) -> _TableSeries:
    """Count the rows at the end of a table's series that are not observed yet: without a value of
    the targets among the inputs or, where none is, of the inputs that are not known ahead.

    Where every input is known ahead, the last `horizon` rows are those to predict. Without a
    horizon, where nothing is to be predicted, such rows are left out.
    """
    names = observed or [name for name, setting in inputs.items() if setting != FUTURE]
    lengths = np.diff(part.bounds)
    ends = np.zeros_like(lengths) if names else lengths - (horizon or 0)
    for name in names:
        values = part.pick(_read_numbers(part.table, name, inputs[name]))
        ends = np.maximum(ends, part.find_last(~np.isnan(values)) + 1 - part.bounds[:-1])
    ends = np.minimum(ends, lengths - part.ahead)
    part = replace(part, ahead=np.where(ends > 0, lengths - ends, part.ahead))
    if horizon is not None or not part.ahead.any():
        return part
    late = np.flatnonzero(part.ahead)
    notes += _limit_notes(
        [
            f'"{part.names[i]}": left out {format_count(int(part.ahead[i]), "row")} at its end, of '
            "which only data.future is known"
            for i in late[:MAX_NOTES]
        ],
        f"{len(late):,} series: left out {format_count(int(part.ahead.sum()), 'row')} at their "
        "ends, of which only data.future is known",
        len(late),
    )
    retained = part.leave_out(part.mark_ahead())
    return replace(part, retained=retained, ahead=np.zeros_like(part.ahead))


def _limit_notes(notes: list[str], summary: str, count: int) -> list[str]:
    """Return a note on each series, or one on all of them where there are many."""
    return notes if count <= MAX_NOTES else [summary]


def _drop_incomplete(
    part: _TableSeries,
    inputs: dict[str, str],
    data: Data,
    notes: list[str],
    counts: Counter[str],
) -> _TableSeries:
    """Return the table's series without the rows of which an input stays unknown; note and count
    what is missing."""
    dropped: Flags = np.zeros(part.num_positions, dtype=bool)
    absent: dict[str, Ints] = {}
    for name, setting in inputs.items():
        values = part.pick(_read_numbers(part.table, name, setting))
        mask = part.find_missing(values, setting)
        if mask.any():
            dropped |= mask if data.missing == "drop" else _mark_leading(part, mask)
            absent[name] = np.flatnonzero(mask)
            counts[name] += len(absent[name])
    if not absent:
        return part
    owners = np.unique(np.searchsorted(part.bounds, _join(absent), side="right") - 1)
    described = []
    for i in owners[:MAX_NOTES]:
        begin, end = int(part.bounds[i]), int(part.bounds[i + 1])
        of_series = {
            name: rows[slice(*np.searchsorted(rows, [begin, end]))] - begin
            for name, rows in absent.items()
        }
        present = {name: rows for name, rows in of_series.items() if len(rows)}
        missing = describe_missing(dropped[begin:end], present, policy=data.missing)
        described.append(f'"{part.names[i]}": {missing}')
    totals = list_counts({name: len(rows) for name, rows in absent.items()})
    what = "left out rows with missing values"
    if data.missing == "forward":
        what = "repeated the last known values, and left out rows before every value is known"
    notes += _limit_notes(described, f"{len(owners):,} series: {what}: {totals}", len(owners))
    if not dropped.any():
        return part
    retained = part.leave_out(dropped)
    empty = np.flatnonzero((part.count(retained) == 0) & (part.sizes > 0))
    if len(empty):
        problem = f'series "{part.names[empty[0]]}" has no row in which every column is known'
        raise UserError(f"{part.table.name}: {problem}")
    ahead = part.count(retained & part.mark_ahead()) if part.ahead.any() else part.ahead
    return replace(part, retained=retained, ahead=ahead)


def _join(rows: Mapping[str, Ints]) -> Ints:
    return np.concatenate(list(rows.values()))


def _mark_leading(part: _TableSeries, mask: Flags) -> Flags:
    """Mark the rows of each series before its first one that is not marked already."""
    known = ~mask
    before = np.append(0, np.cumsum(known))
    return np.asarray(before[1:] == part.spread(before[part.bounds[:-1]]))


def _mark_unknown(part: _TableSeries, roles: Roles, data: Data) -> _TableSeries:
    """Mark the rows of a table's series that lack a target; filling in an input gives it none."""
    unknown: Flags | None = None
    for name in roles.scored:
        if name in roles.inputs and data.missing != "forward" and data.task == "regress":
            continue  # missing values were refused or dropped
        is_label = data.task == "classify"
        values = part.pick(read_numbers(part.table, name, "data.targets"), is_label=is_label)
        rows: Flags = values < 0 if is_label else np.isnan(values)
        if rows.any():
            unknown = rows if unknown is None else unknown | rows
    return replace(part, unknown=unknown)


def _drop_short(part: _TableSeries, data: Data, min_rows: int, notes: list[str]) -> _TableSeries:
    """Return the series without those that are shorter than one window; refuse or note them."""
    sizes = part.sizes
    short = sizes - part.ahead < min_rows
    if not short.any():
        return part
    found = np.flatnonzero(short)
    if data.short == "error":
        refuse_short(part.names[found[0]], int(sizes[found[0]]), data, min_rows)
    few = f"fewer than the {min_rows} of one window"
    described = [
        f'"{part.names[i]}": left out, its {sizes[i]} rows are {few}' for i in found[:MAX_NOTES]
    ]
    summary = f"{len(found):,} series: left out, their {sizes[short].max()} rows or less are {few}"
    notes += _limit_notes(described, summary, len(found))
    long, rows = ~short, part.spread(~short)
    bounds = np.append(0, np.cumsum(np.diff(part.bounds)[long]))
    repeated = None if part.repeated is None else part.repeated.select(rows)
    return replace(
        _reorder(part, np.flatnonzero(rows)),
        names=[name for name, is_long in zip(part.names, long.tolist(), strict=True) if is_long],
        bounds=bounds,
        static=part.static[long],
        breaks=part.breaks[rows],
        ahead=part.ahead[long],
        skipped=part.skipped[long],
        steps=part.steps[long],
        retained=None if part.retained is None else part.retained[rows],
        unknown=None if part.unknown is None else part.unknown[rows],
        repeated=repeated,
        num_merged=None if part.num_merged is None else part.num_merged[long],
    )


def _find_breaks(part: _TableSeries) -> Flags:
    """Mark the rows that do not follow from the one before, of those that remain: a row that was
    marked already, or that comes after one which was left out or marked."""
    if part.retained is None:
        return part.breaks
    restarts = np.cumsum(part.breaks | ~part.retained)[part.retained]
    return np.asarray(np.diff(restarts, prepend=restarts[:1] - 1) > 0)


def _join_unknown(parts: list[_TableSeries], offsets: Ints) -> Ints:
    runs, first, series = [], 0, 0
    for part in parts:
        if part.unknown is not None:
            runs.append(first + encode_runs(part.take(part.unknown)))
        series += len(part.names)
        first = int(offsets[series])
    return join_runs(runs)


def _join_skipped(parts: list[_TableSeries]) -> Ints:
    """Return from which rows on how many rows of the series are left out; empty where none is."""
    runs, first = [], 0
    for part in parts:
        sizes = part.sizes
        offsets = np.cumsum(sizes) - sizes
        begins, counts = offsets, part.skipped
        if part.retained is not None:
            before = np.cumsum(~part.retained) - part.spread(
                np.append(0, np.cumsum(~part.retained))[part.bounds[:-1]]
            )
            lost = before[part.retained]
            changes = np.diff(lost, prepend=-1) != 0
            changes[offsets] = True
            begins = np.flatnonzero(changes)
            counts = lost[begins] + np.repeat(part.skipped, sizes)[begins]
        runs.append(np.stack([first + begins, counts], axis=1))
        first += int(sizes.sum())
    joined = np.concatenate(runs)
    return joined if joined[:, 1].any() else NO_RUNS


def _count_padding(parts: list[_TableSeries]) -> Ints | None:
    """Return the number of padded rows of each series; None where there are none."""
    counts = [
        np.zeros(len(part.names), dtype=np.int64)
        if part.padded is None
        else part.count(part.padded if part.retained is None else part.padded & part.retained)
        for part in parts
    ]
    joined = np.concatenate(counts)
    return joined if joined.any() else None


def _refuse_missing(part: _TableSeries, name: str, mask: Flags, inputs: dict[str, str]) -> None:
    if not mask.any():
        return
    position = int(np.flatnonzero(mask)[0])
    series = _find_owner(part.bounds, position)
    begin, end = int(part.bounds[series]), int(part.bounds[series + 1])
    counts = {}
    for column, setting in inputs.items():
        values = part.pick(_read_numbers(part.table, column, setting))
        counts[column] = int(part.find_missing(values, setting)[begin:end].sum())
    where = part.table.locate_cell(int(part.rows[position]), name)
    raise UserError(
        f'{where}: is missing (missing values of series "{part.names[series]}": '
        f"{list_counts(counts)}); set "
        + Setting({"data.missing": "forward"})
        + ' to repeat the last known value, or "drop" to leave such rows out'
    )


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
