"""Sources to one store: series told apart, ordered, gaps marked, missing values settled."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from typing import Any

import numpy as np
import numpy.typing as npt

from slipstream.config import Data
from slipstream.data import columns as typed
from slipstream.data.io import table
from slipstream.data.io.table import DataTable
from slipstream.data.roles import Roles, find_split_groups, identify_series, select_rows
from slipstream.errors import UserError

Floats = npt.NDArray[np.float64]

Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]
Times = npt.NDArray[Any]
"""Microseconds (int64) for dates and timestamps, float64 for plain numbers."""
MICROSECONDS = 1e6


@dataclass(frozen=True)
class SeriesIndex:
    """How the rows of all series lie, end to end, whatever they hold."""

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

    @property
    def num_rows(self) -> int:
        return int(self.offsets[-1])


@dataclass(frozen=True)
class RawSeries:
    """Every series end to end. Columns are read one at a time, so that one is in memory twice."""

    index: SeriesIndex
    column_names: tuple[str, ...]
    read_column: Callable[[str], Floats]
    """A column's values, row after row, in physical units; read anew at every call"""
    static: Floats
    """[series, static columns]"""
    time: Times | None
    notes: tuple[str, ...]


@dataclass(frozen=True)
class _Piece:
    """One series on its way into the store."""

    name: str
    source: DataTable
    rows: Ints | range
    """Its rows in the source, in order; a range where they stand together"""
    static: Floats
    time: Times | None
    breaks: Flags
    groups: npt.NDArray[np.int32]
    kept: Ints | None = None
    """Which of `rows` are left, where some were dropped for want of a value"""

    def take(self, rows: Ints) -> _Piece:
        """Only these rows, in this order; the breaks are the caller's to mend."""
        return replace(
            self,
            time=None if self.time is None else self.time[rows],
            breaks=self.breaks[rows],
            groups=self.groups[rows],
        )

    def pick(self, column: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """What a column of the source holds at `rows`; a view where they stand together."""
        if isinstance(self.rows, range):
            return column[self.rows.start : self.rows.stop]
        return column[self.rows]


def prepare_series(
    sources: Sequence[DataTable],
    data: Data,
    roles: Roles,
    *,
    min_rows: int,
    need_targets: bool = True,
) -> RawSeries:
    """Assemble every source's series. One with fewer than `min_rows` rows is refused or dropped."""
    wanted = dict.fromkeys(roles.inputs, "data.inputs")
    if need_targets:
        wanted |= dict.fromkeys(roles.targets, "data.targets")
    group_names: dict[str, int] = {}
    notes: list[str] = []
    pieces: list[_Piece] = []
    steps: dict[float, str] = {}
    for source in sources:
        found = [_ordered(raw, data) for raw in _series(source, data, roles, group_names)]
        whole = [piece for piece, _ in found]
        if data.missing != "error":
            whole = _complete(source, whole, wanted, data, notes)
        for piece, (_, step) in zip(whole, found, strict=True):
            if len(piece.breaks) < min_rows:
                notes.append(_dropped_as_short(piece, data, min_rows))
                continue
            pieces.append(piece)
            if step is not None:
                steps.setdefault(step, piece.name)
    if not pieces:
        raise UserError(
            f"no series has the {min_rows} rows of one window; shorten data.context or data.horizon"
        )
    if len(steps) > 1:
        listed = ", ".join(f'{size:g} ("{name}")' for size, name in list(steps.items())[:4])
        notes.append(f"series differ in their usual time step: {listed}")
    times = [piece.time for piece in pieces if piece.time is not None]
    if len({time.dtype for time in times}) > 1:
        raise UserError("data.time holds plain numbers in some files and dates in others")
    groups = _end_to_end([piece.groups for piece in pieces])
    group_begins = np.flatnonzero(np.diff(groups, prepend=groups[:1] - 1))
    layout = SeriesIndex(
        series_names=make_unique([piece.name for piece in pieces]),
        offsets=np.cumsum([0, *(len(piece.breaks) for piece in pieces)], dtype=np.int64),
        breaks=np.flatnonzero(np.concatenate([piece.breaks for piece in pieces])),
        group_begins=group_begins,
        group_codes=groups[group_begins].astype(np.int64),
        group_names=tuple(group_names),
        step=next(iter(steps), None),
        has_dates=bool(times) and is_date(times[0]),
    )
    return RawSeries(
        index=layout,
        column_names=tuple(wanted),
        read_column=partial(_read, pieces, wanted, data.missing),
        static=np.stack([piece.static for piece in pieces]),
        time=_end_to_end(times) if times else None,
        notes=tuple(notes),
    )


def make_unique(names: list[str]) -> tuple[str, ...]:
    twice = {name for name, count in Counter(names).items() if count > 1}
    return tuple(f"{name} #{i}" if name in twice else name for i, name in enumerate(names, 1))


def _numbers(source: DataTable, name: str, setting: str) -> Floats:
    """A column of a source; one without a single value is refused."""
    column = typed.read_numbers(source, name, setting)
    table.release_memory()
    if np.isnan(column).all():
        raise UserError(f'{source.name}: column "{name}" ({setting}) has no values')
    return column


def _read(pieces: list[_Piece], wanted: dict[str, str], missing: str, name: str) -> Floats:
    """One column of all pieces, source after source; without a copy where it is a source's own."""
    parts: list[Floats] = []
    for _, mine in groupby(pieces, key=lambda piece: id(piece.source)):
        some = list(mine)
        column = _numbers(some[0].source, name, wanted[name])
        for piece in some:
            values = piece.pick(column)
            if missing == "error":
                _refuse_holes(piece, name, np.isnan(values), wanted)
            elif missing == "forward":
                values = _repeat_last(values)
            parts.append(values if piece.kept is None else values[piece.kept])
        del column, values
    return _end_to_end(parts)


def _repeat_last(values: Floats) -> Floats:
    """Each missing value replaced by the last known one; missing stays what comes before any."""
    hole = np.isnan(values)
    if not hole.any():
        return values
    known = np.maximum.accumulate(np.where(hole, -1, np.arange(len(hole))))
    return np.where(known >= 0, values[known], np.nan)


def _end_to_end(parts: list[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    """The parts as one array; without a copy where they already are one."""
    if len(parts) == 1:
        return parts[0]
    whole = parts[0].base
    if isinstance(whole, np.ndarray) and sum(map(len, parts)) == len(whole):
        at = [part.__array_interface__["data"][0] for part in parts]
        ends = np.cumsum([part.nbytes for part in parts[:-1]])
        if all(part.base is whole for part in parts) and at == [at[0], *(at[0] + ends)]:
            return whole
    return np.concatenate(parts)


def _series(
    source: DataTable, data: Data, roles: Roles, group_names: dict[str, int]
) -> Iterator[_Piece]:
    """The series of one source, rows in file order."""
    static = {name: typed.read_numbers(source, name, "data.static") for name in roles.static}
    time = None if data.time is None else typed.read_times(source, data.time, data.time_format)
    table.release_memory()
    series, names = identify_series(source, data)
    groups = find_split_groups(source, data, series, names, group_names)
    order, bounds = _rows_by_series(select_rows(source, data), series, names)
    for name, begin, end in zip(names, bounds[:-1], bounds[1:], strict=True):
        if begin == end:
            continue
        # a slice where the rows stand together: a view, not a copy
        rows: Any = slice(begin, end) if isinstance(order, range) else order[begin:end]
        named = range(begin, end) if isinstance(order, range) else order[begin:end]
        yield _Piece(
            name=name,
            source=source,
            rows=named,
            static=_constant(source, static, named, name),
            time=None if time is None else time[rows],
            breaks=np.arange(end - begin) == 0,
            groups=groups[rows],
        )


def _rows_by_series(
    kept: Ints | range, series: Ints, names: list[str]
) -> tuple[Ints | range, list[int]]:
    """The kept rows, series after series, and where each series begins and the last one ends."""
    if len(names) == 1:
        return kept, [0, len(kept)]
    codes = series if isinstance(kept, range) else series[kept]
    if (np.diff(codes) >= 0).all():
        order = kept
    else:
        by_code = np.argsort(codes, kind="stable")
        order = np.asarray(kept)[by_code]
        codes = codes[by_code]
    return order, np.searchsorted(codes, np.arange(len(names) + 1)).tolist()


def _constant(
    source: DataTable, static: dict[str, Floats], rows: Ints | range, series: str
) -> Floats:
    """The series' static values, which must not change within it."""
    if not static:
        return np.empty(0)
    rows = np.asarray(rows)
    for name, values in static.items():
        wrong = np.flatnonzero(~(values[rows] == values[rows[0]]))
        if len(wrong):
            row = int(rows[wrong[0]])
            found = "missing" if np.isnan(values[row]) else f"{values[row]:g}"
            raise UserError(
                f"{source.locate_cell(row, name)}: is {found}, not the {values[rows[0]]:g} that "
                "series "
                f'"{series}" begins with; a data.static column is constant within a series'
            )
    return np.array([values[rows[0]] for values in static.values()], dtype=np.float64)


def _ordered(piece: _Piece, data: Data) -> tuple[_Piece, float | None]:
    """The series in time order with its gaps marked, and its usual step."""
    time = piece.time
    if time is None:
        return piece, None
    if data.unsorted == "sort" and (np.diff(time) < 0).any():
        order = np.argsort(time, kind="stable")
        rows = np.asarray(piece.rows)[order]
        piece, time = replace(piece.take(order), rows=rows, breaks=piece.breaks), time[order]
    steps = np.diff(time)
    if not len(steps):
        return piece, None
    if steps.min() <= 0:
        _refuse_order(piece, data, steps)
    usual = float(np.partition(steps, len(steps) // 2)[len(steps) // 2])
    reach = data.gap_tolerance * usual
    breaks = piece.breaks.copy()
    breaks[1:] |= (steps < usual - reach) | (steps > usual + reach)
    return replace(piece, breaks=breaks), usual / MICROSECONDS if is_date(time) else usual


def is_date(time: Times) -> bool:
    return time.dtype == np.int64


def _refuse_order(piece: _Piece, data: Data, steps: Times) -> None:
    first = int(np.flatnonzero(steps <= 0)[0])
    here = piece.source.locate_cell(int(piece.rows[first + 1]), str(data.time))
    before = piece.source.locate_row(int(piece.rows[first]))
    if steps[first] == 0:
        raise UserError(
            f'{here}: the same time as {before}, within series "{piece.name}"; remove duplicate '
            "rows, or name the column that tells series apart (data.id)"
        )
    raise UserError(
        f'{here}: earlier than {before}, within series "{piece.name}"; sort the file, set '
        'data.unsorted = "sort", or name the column that tells series apart (data.id)'
    )


def _complete(
    source: DataTable, pieces: list[_Piece], wanted: dict[str, str], data: Data, notes: list[str]
) -> list[_Piece]:
    """The source's series without the rows that stay unknown, with notes on what is missing."""
    gone: list[Flags] = [np.zeros(len(piece.breaks), dtype=bool) for piece in pieces]
    holes: list[dict[str, Ints]] = [{} for _ in pieces]
    for name, setting in wanted.items():
        unknown = np.isnan(_numbers(source, name, setting))
        for piece, dropped, missing in zip(pieces, gone, holes, strict=True):
            hole = piece.pick(unknown)
            if hole.any():
                dropped |= hole if data.missing == "drop" else np.logical_and.accumulate(hole)
                missing[name] = np.flatnonzero(hole)
    completed = []
    for piece, dropped, missing in zip(pieces, gone, holes, strict=True):
        if missing:
            notes.append(f'"{piece.name}": {_describe_holes(dropped, missing, data)}')
        completed.append(_without(piece, dropped) if dropped.any() else piece)
    return completed


def _describe_holes(dropped: Flags, missing: dict[str, Ints], data: Data) -> str:
    """Say how many values were repeated, and how many rows are left out and for which columns."""
    counts = {name: len(rows) for name, rows in missing.items()}
    if data.missing == "drop":
        return f"left out rows with missing values: {_list_counts(counts)}"
    first = int(dropped.sum())  # these rows come before all others
    repeated = {name: int((rows >= first).sum()) for name, rows in missing.items()}
    parts = []
    if any(repeated.values()):
        parts.append(f"repeated the last known value: {_list_counts(repeated)}")
    if first:
        unknown = {name: counts[name] - repeated[name] for name in counts}
        rows = "the first row" if first == 1 else f"the first {first:,} rows"
        parts.append(f"left out {rows}, before every value is known: {_list_counts(unknown)}")
    return "; ".join(parts)


def _list_counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in counts.items() if count)


def _without(piece: _Piece, gone: Flags) -> _Piece:
    kept = np.flatnonzero(~gone)
    if not len(kept):
        raise UserError(
            f'{piece.source.name}: series "{piece.name}" has no row in which every column is known'
        )
    # a kept row starts anew if it did so before, or if a row since the last kept one did or went
    restarts = np.cumsum(piece.breaks | gone)[kept]
    breaks = np.diff(restarts, prepend=restarts[0] - 1) > 0
    return replace(piece.take(kept), kept=kept, breaks=breaks)


def _refuse_holes(piece: _Piece, name: str, hole: Flags, wanted: dict[str, str]) -> None:
    if not hole.any():
        return
    counts: dict[str, int] = {}
    for other, setting in wanted.items():
        number = int(np.isnan(piece.pick(_numbers(piece.source, other, setting))).sum())
        counts |= {other: number} if number else {}
    listed = ", ".join(f"{other} {number:,}" for other, number in counts.items())
    where = piece.source.locate_cell(int(piece.rows[np.flatnonzero(hole)[0]]), name)
    raise UserError(
        f'{where}: is missing (in series "{piece.name}": {listed}); set data.missing = '
        '"forward" to repeat the last known value, or "drop" to leave such rows out'
    )


def _dropped_as_short(piece: _Piece, data: Data, min_rows: int) -> str:
    rows = len(piece.breaks)
    if data.short == "error":
        raise UserError(
            f"data.context is {data.context} and data.horizon {data.horizon}, but series "
            f'"{piece.name}" has {rows} rows; shorten them, or leave such series out '
            '(data.short = "drop")'
        )
    return f'"{piece.name}": left out, its {rows} rows are fewer than the {min_rows} of one window'
