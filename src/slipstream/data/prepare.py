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
from slipstream.data.tables import Source
from slipstream.errors import UserError

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]
Times = npt.NDArray[Any]
"""Microseconds (int64) for dates and timestamps, float64 for plain numbers."""
MICROSECONDS = 1e6


@dataclass(frozen=True)
class Roles:
    """Which columns do what."""

    inputs: tuple[str, ...]
    targets: tuple[str, ...]
    static: tuple[str, ...] = ()


@dataclass(frozen=True)
class Store:
    """Every series end to end, in physical units."""

    columns: dict[str, Floats]
    static: Floats
    """[series, static columns]"""
    series: tuple[str, ...]
    offsets: Ints
    """Series s holds the rows offsets[s] to offsets[s + 1]."""
    time: Times | None
    step: float | None
    """The usual step: seconds for timestamps, else in the column's own unit."""
    breaks: Flags
    """True where a row does not follow from the one before it."""
    groups: npt.NDArray[np.int32]
    """Per row, which of `group_names` the split sees."""
    group_names: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def num_rows(self) -> int:
        return len(self.breaks)


@dataclass(frozen=True)
class _Piece:
    """One series on its way into the store."""

    name: str
    source: Source
    rows: Ints
    """Its rows in the source, in order."""
    columns: dict[str, Floats]
    static: Floats
    time: Times | None
    breaks: Flags
    groups: npt.NDArray[np.int32]

    def take(self, rows: Ints) -> _Piece:
        """Only these rows, in this order; the breaks are the caller's to mend."""
        return replace(
            self,
            rows=self.rows[rows],
            columns={name: values[rows] for name, values in self.columns.items()},
            time=None if self.time is None else self.time[rows],
            breaks=self.breaks[rows],
            groups=self.groups[rows],
        )


def find_roles(source: Source, data: Data) -> tuple[Roles, list[str]]:
    """Columns by role, with a note on what the defaults left out."""
    if data.inputs is not None:
        return Roles(data.inputs, data.targets or data.inputs, data.static), []
    spoken_for = {data.time, data.split.by, *data.ids, *data.static, *data.where, *data.ignore}
    if data.horizon == 0:
        spoken_for |= set(data.targets or ())
    if source.parts:
        spoken_for.add(tables.FILE)
    free = [name for name in source.table.column_names if name not in spoken_for]
    inputs = tuple(
        name
        for name in free
        if typed.looks_numeric(source, name)
        and not name.startswith(tables.UNNAMED)
        and (data.channels == "together" or name in (data.targets or free))
    )
    if not inputs:
        raise UserError(f"{source.name}: has no numeric column to read; name data.inputs")
    left = [name for name in free if name not in inputs]
    notes = [f"not used as inputs: {', '.join(left)}"] if left else []
    return Roles(inputs, data.targets or inputs, data.static), notes


def build(
    sources: Sequence[Source], data: Data, roles: Roles, *, min_rows: int, need_targets: bool = True
) -> Store:
    """Assemble every source's series. One with fewer than `min_rows` rows is refused or dropped."""
    group_names: dict[str, int] = {}
    notes: list[str] = []
    pieces: list[_Piece] = []
    steps: dict[float, str] = {}
    for source in sources:
        for raw in _series(source, data, roles, group_names, need_targets):
            ordered, step = _ordered(raw, data)
            piece = _complete(ordered, data, notes)
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
    return _joined(pieces, next(iter(steps), None), tuple(group_names), notes)


def _joined(
    pieces: list[_Piece], step: float | None, group_names: tuple[str, ...], notes: list[str]
) -> Store:
    columns = dict(pieces[0].columns)
    if len(pieces) > 1:
        for name in columns:  # one by one, so that only one exists twice at a time
            columns[name] = np.concatenate([piece.columns.pop(name) for piece in pieces])
    times = [piece.time for piece in pieces if piece.time is not None]
    if len({time.dtype for time in times}) > 1:
        raise UserError("data.time holds plain numbers in some files and dates in others")
    names = [piece.name for piece in pieces]
    twice = {name for name, count in Counter(names).items() if count > 1}
    return Store(
        columns=columns,
        static=np.stack([piece.static for piece in pieces]),
        series=tuple(f"{name} #{i}" if name in twice else name for i, name in enumerate(names, 1)),
        offsets=np.cumsum([0, *(len(piece.breaks) for piece in pieces)], dtype=np.int64),
        time=np.concatenate(times) if times else None,
        step=step,
        breaks=np.concatenate([piece.breaks for piece in pieces]),
        groups=np.concatenate([piece.groups for piece in pieces]),
        group_names=group_names,
        notes=tuple(notes),
    )


def _series(
    source: Source, data: Data, roles: Roles, group_names: dict[str, int], need_targets: bool
) -> Iterator[_Piece]:
    """The series of one source, rows in file order."""
    wanted = dict.fromkeys(roles.inputs, "data.inputs")
    if need_targets:
        wanted |= dict.fromkeys(roles.targets, "data.targets")
    columns = {}
    for name, setting in wanted.items():
        columns[name] = typed.numbers(source, name, setting)
        if np.isnan(columns[name]).all():
            raise UserError(f'{source.name}: column "{name}" ({setting}) has no values')
    static = {name: typed.numbers(source, name, "data.static") for name in roles.static}
    time = None if data.time is None else typed.times(source, data.time, data.time_format)
    series, names = _identify(source, data)
    groups = _groups(source, data, series, names, group_names)
    kept = _matching(source, data)
    if len(names) == 1 and len(kept) == source.table.num_rows:
        yield _Piece(
            name=names[0],
            source=source,
            rows=kept,
            columns=columns,
            static=_constant(source, static, kept, names[0]),
            time=time,
            breaks=kept == 0,
            groups=groups,
        )
        return
    order = kept[np.argsort(series[kept], kind="stable")]
    bounds = np.searchsorted(series[order], np.arange(len(names) + 1))
    for name, begin, end in zip(names, bounds[:-1], bounds[1:], strict=True):
        rows = order[begin:end]
        if len(rows):
            yield _Piece(
                name=name,
                source=source,
                rows=rows,
                columns={key: values[rows] for key, values in columns.items()},
                static=_constant(source, static, rows, name),
                time=None if time is None else time[rows],
                breaks=np.arange(len(rows)) == 0,
                groups=groups[rows],
            )


def _matching(source: Source, data: Data) -> Ints:
    """The rows that `data.where` keeps."""
    keep = np.ones(source.table.num_rows, dtype=bool)
    for name, value in data.where.items():
        codes, found = typed.labels(source, name, "data.where")
        accepted = {as_text(v) for v in (value if isinstance(value, tuple) else (value,))}
        keep &= np.isin(codes, [i for i, text in enumerate(found) if as_text(text) in accepted])
    if not keep.any():
        asked = ", ".join(f"{name} = {value!r}" for name, value in data.where.items())
        raise UserError(f"{source.name}: no row has what data.where asks for ({asked})")
    return np.flatnonzero(keep)


def as_text(value: Any) -> str:
    """25, 25.0 and "25" are one value; so are true and True."""
    if isinstance(value, bool):
        return str(value).lower()
    try:
        return f"{float(value):.12g}"
    except ValueError:
        return str(value)


def _identify(source: Source, data: Data) -> tuple[Ints, list[str]]:
    """Each row's series, as codes in order of appearance, and the series' names."""
    if not data.ids:
        return np.zeros(source.table.num_rows, dtype=np.int64), [source.name]
    codes, names = typed.labels(source, data.ids[0], "data.id")
    for column in data.ids[1:]:
        more, values = typed.labels(source, column, "data.id")
        pairs, first, codes = np.unique(
            codes * len(values) + more, return_index=True, return_inverse=True
        )
        appearance = np.argsort(first)
        names = [f"{names[p // len(values)]}/{values[p % len(values)]}" for p in pairs[appearance]]
        codes = np.argsort(appearance)[codes]
    return codes, names


def _groups(
    source: Source, data: Data, series: Ints, names: list[str], group_names: dict[str, int]
) -> npt.NDArray[np.int32]:
    """Each row's group for the split: a column's value, the series' name, or the top folder."""
    by = data.split.by
    codes, values = np.zeros_like(series), [""]
    if data.split.folders:
        values = [source.name.split("/")[0]]
    elif by == "series" and by not in source.table.column_names:
        codes, values = series, names
    elif by is not None:
        codes, values = typed.labels(source, by, "data.split.by")
    known = [group_names.setdefault(as_text(value), len(group_names)) for value in values]
    return np.array(known, dtype=np.int32)[codes]


def _constant(source: Source, static: dict[str, Floats], rows: Ints, series: str) -> Floats:
    """The series' static values, which must not change within it."""
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
    usual = np.partition(steps, len(steps) // 2)[len(steps) // 2]
    gaps = np.abs(steps - usual) > data.gap_tolerance * float(usual)
    breaks = piece.breaks | np.concatenate([[False], gaps])
    seconds = float(usual) / MICROSECONDS if time.dtype == np.int64 else float(usual)
    return replace(piece, breaks=breaks), seconds


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


def _complete(piece: _Piece, data: Data, notes: list[str]) -> _Piece:
    """The series without missing values: refused, filled from the past, or dropped."""
    holes = {name: np.isnan(values) for name, values in piece.columns.items()}
    holes = {name: hole for name, hole in holes.items() if hole.any()}
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
        notes.append(f'"{piece.name}": repeated the last known value: {counts}')
        for name, hole in holes.items():
            known = np.maximum.accumulate(np.where(hole, -1, np.arange(len(hole))))
            piece.columns[name] = np.where(known >= 0, piece.columns[name][known], np.nan)
    else:
        notes.append(f'"{piece.name}": left out rows with missing values: {counts}')
    hole = np.logical_or.reduce([np.isnan(values) for values in piece.columns.values()])
    kept = np.flatnonzero(~hole)
    if not len(kept):
        raise UserError(
            f'{piece.source.name}: series "{piece.name}" has no row in which every column is known'
        )
    # a kept row starts anew if it did so before, or if a row since the last kept one did or went
    restarts = np.cumsum(piece.breaks | hole)[kept]
    return replace(piece.take(kept), breaks=np.diff(restarts, prepend=restarts[0] - 1) > 0)


def _dropped_as_short(piece: _Piece, data: Data, min_rows: int) -> str:
    rows = len(piece.breaks)
    if data.short == "error":
        raise UserError(
            f"data.context is {data.context} and data.horizon {data.horizon}, but series "
            f'"{piece.name}" has {rows} rows; shorten them, or leave such series out '
            '(data.short = "drop")'
        )
    return f'"{piece.name}": left out, its {rows} rows are fewer than the {min_rows} of one window'
