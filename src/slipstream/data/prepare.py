"""Sources to one store: series told apart, ordered, gaps marked, missing values settled."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from slipstream.config import Data
from slipstream.data import tables, typed
from slipstream.data.roles import Roles, find_groups, identify, matching
from slipstream.data.tables import Source
from slipstream.errors import UserError

Floats = npt.NDArray[np.float64]
Values = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]
Times = npt.NDArray[Any]
"""Microseconds (int64) for dates and timestamps, float64 for plain numbers."""
MICROSECONDS = 1e6


@dataclass(frozen=True)
class Layout:
    """How the rows of all series lie, end to end, whatever they hold."""

    series: tuple[str, ...]
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
    dated: bool
    """Whether times are dates or timestamps"""

    @property
    def num_rows(self) -> int:
        return int(self.offsets[-1])


@dataclass(frozen=True)
class Store:
    """Every series end to end. Columns count from their anchors, so that float32 holds them."""

    layout: Layout
    values: Values
    """[rows, columns]"""
    columns: tuple[str, ...]
    anchors: dict[str, float]
    static: Floats
    """[series, static columns]"""
    time: Times | None
    notes: tuple[str, ...]


@dataclass(frozen=True)
class _Piece:
    """One series on its way into the store."""

    name: str
    source: Source
    rows: Ints | range
    """Its rows in the source, in order; a range where they stand together"""
    values: Values
    """[rows, columns]"""
    static: Floats
    time: Times | None
    breaks: Flags
    groups: npt.NDArray[np.int32]

    def take(self, rows: Ints) -> _Piece:
        """Only these rows, in this order; the breaks are the caller's to mend."""
        return replace(
            self,
            rows=np.asarray(self.rows)[rows],
            values=self.values[rows],
            time=None if self.time is None else self.time[rows],
            breaks=self.breaks[rows],
            groups=self.groups[rows],
        )


def build(
    sources: Sequence[Source], data: Data, roles: Roles, *, min_rows: int, need_targets: bool = True
) -> Store:
    """Assemble every source's series. One with fewer than `min_rows` rows is refused or dropped."""
    wanted = dict.fromkeys(roles.inputs, "data.inputs")
    if need_targets:
        wanted |= dict.fromkeys(roles.targets, "data.targets")
    group_names: dict[str, int] = {}
    anchors: dict[str, float] = {}
    notes: list[str] = []
    pieces: list[_Piece] = []
    steps: dict[float, str] = {}
    for source in sources:
        values = read_values(source, wanted, anchors)
        for raw in _series(source, data, roles, group_names, values):
            ordered, step = _ordered(raw, data)
            piece = _complete(ordered, tuple(wanted), data, notes)
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
    layout = Layout(
        series=distinct([piece.name for piece in pieces]),
        offsets=np.cumsum([0, *(len(piece.breaks) for piece in pieces)], dtype=np.int64),
        breaks=np.flatnonzero(np.concatenate([piece.breaks for piece in pieces])),
        group_begins=group_begins,
        group_codes=groups[group_begins].astype(np.int64),
        group_names=tuple(group_names),
        step=next(iter(steps), None),
        dated=bool(times) and is_date(times[0]),
    )
    return Store(
        layout=layout,
        values=_end_to_end([piece.values for piece in pieces]),
        columns=tuple(wanted),
        anchors=anchors,
        static=np.stack([piece.static for piece in pieces]),
        time=_end_to_end(times) if times else None,
        notes=tuple(notes),
    )


def distinct(names: list[str]) -> tuple[str, ...]:
    twice = {name for name, count in Counter(names).items() if count > 1}
    return tuple(f"{name} #{i}" if name in twice else name for i, name in enumerate(names, 1))


def read_values(source: Source, wanted: dict[str, str], anchors: dict[str, float]) -> Values:
    """Columns side by side, float32, each counted from its first known value ever.

    One column at a time, so that no more than one of them is in memory twice.
    """
    values = np.empty((source.num_rows, len(wanted)), dtype=np.float32)
    for i, (name, setting) in enumerate(wanted.items()):
        column = typed.numbers(source, name, setting)
        if name not in anchors:
            known = np.flatnonzero(~np.isnan(column[:1000]))
            known = known if len(known) else np.flatnonzero(~np.isnan(column))
            if not len(known):
                raise UserError(f'{source.name}: column "{name}" ({setting}) has no values')
            anchors[name] = float(column[known[0]])
        np.subtract(column, anchors[name], out=values[:, i], casting="same_kind")
        del column
        tables.release_memory()
    return values


def _end_to_end(parts: list[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    """The parts as one array; without a copy where they already are one."""
    if len(parts) == 1:
        return parts[0]
    whole = parts[0].base
    if whole is not None and sum(map(len, parts)) == len(whole):
        at = [part.__array_interface__["data"][0] for part in parts]
        ends = np.cumsum([part.nbytes for part in parts[:-1]])
        if all(part.base is whole for part in parts) and at == [at[0], *(at[0] + ends)]:
            return whole
    return np.concatenate(parts)


def _series(
    source: Source, data: Data, roles: Roles, group_names: dict[str, int], values: Values
) -> Iterator[_Piece]:
    """The series of one source, rows in file order."""
    static = {name: typed.numbers(source, name, "data.static") for name in roles.static}
    time = None if data.time is None else typed.times(source, data.time, data.time_format)
    tables.release_memory()
    series, names = identify(source, data)
    groups = find_groups(source, data, series, names, group_names)
    order, bounds = _rows_by_series(matching(source, data), series, names)
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
            values=values[rows],
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


def _constant(source: Source, static: dict[str, Floats], rows: Ints | range, series: str) -> Floats:
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
                f"{source.where(row, name)}: is {found}, not the {values[rows[0]]:g} that series "
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
        piece, time = replace(piece.take(order), breaks=piece.breaks), time[order]
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
    here = piece.source.where(int(piece.rows[first + 1]), str(data.time))
    before = piece.source.place(int(piece.rows[first]))
    if steps[first] == 0:
        raise UserError(
            f'{here}: the same time as {before}, within series "{piece.name}"; remove duplicate '
            "rows, or name the column that tells series apart (data.id)"
        )
    raise UserError(
        f'{here}: earlier than {before}, within series "{piece.name}"; sort the file, set '
        'data.unsorted = "sort", or name the column that tells series apart (data.id)'
    )


def _complete(piece: _Piece, columns: tuple[str, ...], data: Data, notes: list[str]) -> _Piece:
    """The series without missing values: refused, filled from the past, or dropped."""
    holes = {}
    for i, name in enumerate(columns):
        hole = np.isnan(piece.values[:, i])
        if hole.any():
            holes[name] = hole
    if not holes:
        return piece
    counts = ", ".join(f"{name} {int(hole.sum()):,}" for name, hole in holes.items())
    if data.missing == "error":
        name, hole = next(iter(holes.items()))
        where = piece.source.where(int(piece.rows[np.flatnonzero(hole)[0]]), name)
        raise UserError(
            f'{where}: is missing (in series "{piece.name}": {counts}); set data.missing = '
            '"forward" to repeat the last known value, or "drop" to leave such rows out'
        )
    if data.missing == "forward":
        notes.append(f'"{piece.name}": {_describe_filling(holes)}')
        place = {name: i for i, name in enumerate(columns)}
        for name, hole in holes.items():
            column = piece.values[:, place[name]]
            known = np.maximum.accumulate(np.where(hole, -1, np.arange(len(hole))))
            column[:] = np.where(known >= 0, column[known], np.nan)
    else:
        notes.append(f'"{piece.name}": left out rows with missing values: {counts}')
    gone: Flags = np.asarray(np.isnan(piece.values).any(axis=1))
    kept = np.flatnonzero(~gone)
    if not len(kept):
        raise UserError(
            f'{piece.source.name}: series "{piece.name}" has no row in which every column is known'
        )
    # a kept row starts anew if it did so before, or if a row since the last kept one did or went
    restarts = np.cumsum(piece.breaks | gone)[kept]
    return replace(piece.take(kept), breaks=np.diff(restarts, prepend=restarts[0] - 1) > 0)


def _describe_filling(holes: dict[str, Flags]) -> str:
    """Say how many values were repeated, and how many rows come before the first known ones."""
    unknown = {name: int(np.cumprod(hole).sum()) for name, hole in holes.items()}
    first = max(unknown.values())
    repeated = {name: int(hole[first:].sum()) for name, hole in holes.items()}
    parts = []
    if any(repeated.values()):
        counts = ", ".join(f"{name} {count:,}" for name, count in repeated.items() if count)
        parts.append(f"repeated the last known value: {counts}")
    if first:
        counts = ", ".join(f"{name} {count:,}" for name, count in unknown.items() if count)
        parts.append(f"left out {first:,} first rows, before every value is known: {counts}")
    return "; ".join(parts)


def _dropped_as_short(piece: _Piece, data: Data, min_rows: int) -> str:
    rows = len(piece.breaks)
    if data.short == "error":
        raise UserError(
            f"data.context is {data.context} and data.horizon {data.horizon}, but series "
            f'"{piece.name}" has {rows} rows; shorten them, or leave such series out '
            '(data.short = "drop")'
        )
    return f'"{piece.name}": left out, its {rows} rows are fewer than the {min_rows} of one window'
