"""Sources to one store: series told apart, ordered, gaps marked, missing values settled."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from slipstream.config import Data
from slipstream.data import tables
from slipstream.data.tables import Source
from slipstream.errors import UserError

Times = npt.NDArray[np.int64] | npt.NDArray[np.float64]
MICROSECONDS = 1e6


@dataclass(frozen=True)
class Roles:
    """Which columns do what."""

    inputs: tuple[str, ...]
    targets: tuple[str, ...]
    static: tuple[str, ...] = ()

    @property
    def columns(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(self.inputs + self.targets))


@dataclass(frozen=True)
class Store:
    """Every series end to end, in physical units."""

    columns: dict[str, npt.NDArray[np.float64]]
    static: npt.NDArray[np.float64]
    """[series, static columns]"""
    series: tuple[str, ...]
    offsets: npt.NDArray[np.int64]
    """Series s holds the rows offsets[s] to offsets[s + 1]."""
    time: Times | None
    step: float | None
    """The usual step: seconds for timestamps, else in the column's own unit."""
    breaks: npt.NDArray[np.bool_]
    """True where a row does not follow from the one before it."""
    groups: npt.NDArray[np.int64]
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
    rows: npt.NDArray[np.int64]
    """Rows of the source, in order."""
    columns: dict[str, npt.NDArray[np.float64]]
    static: npt.NDArray[np.float64]
    time: Times | None
    breaks: npt.NDArray[np.bool_]
    groups: npt.NDArray[np.int64]


def roles(source: Source, data: Data) -> tuple[Roles, list[str]]:
    """Columns by role, with notes on what the defaults left out."""
    notes: list[str] = []
    inputs = data.inputs
    if inputs is None:
        spoken_for = {data.time, data.split.by, *data.ids, *data.static, *data.where, *data.ignore}
        if data.horizon == 0:
            spoken_for |= set(data.targets or ())
        free = [name for name in source.table.column_names if name not in spoken_for]
        inputs = tuple(
            name
            for name in free
            if tables.looks_numeric(source, name) and not name.startswith(tables.UNNAMED)
        )
        if data.channels == "independent" and data.targets is not None:
            inputs = tuple(name for name in inputs if name in data.targets)
        left = [name for name in free if name not in inputs]
        if left:
            notes.append(f"not used as inputs: {', '.join(left)}")
        if not inputs:
            raise UserError(f"{source.name}: has no numeric column to read; name data.inputs")
    return Roles(inputs, data.targets or inputs, data.static), notes


def build(
    sources: Sequence[Source], data: Data, roles: Roles, *, min_rows: int, need_targets: bool = True
) -> Store:
    """Assemble the store from every source. A series shorter than `min_rows` is refused or dropped."""
    group_names: dict[str, int] = {}
    notes: list[str] = []
    pieces: list[_Piece] = []
    step: float | None = None
    steps: dict[float, str] = {}
    for source in sources:
        for raw in _series(source, data, roles, group_names, need_targets):
            piece, piece_step = _ordered(raw, data)
            piece = _complete(piece, data, notes)
            if len(piece.breaks) < min_rows:
                _short(piece, data, min_rows, notes)
                continue
            step = step if piece_step is None else piece_step
            if piece_step is not None:
                steps.setdefault(piece_step, piece.name)
            pieces.append(piece)
    if not pieces:
        raise UserError(
            f"no series has the {min_rows} rows of one window; shorten data.context or data.horizon"
        )
    if len(steps) > 1:
        listed = ", ".join(f'{size:g} ("{name}")' for size, name in list(steps.items())[:4])
        notes.append(f"series differ in their usual time step: {listed}")
    return _joined(pieces, roles, step, tuple(group_names), notes)


def _joined(
    pieces: list[_Piece],
    roles: Roles,
    step: float | None,
    group_names: tuple[str, ...],
    notes: list[str],
) -> Store:
    lengths = [len(piece.breaks) for piece in pieces]
    columns = {}
    for name in tuple(pieces[0].columns):  # column by column, so that only one exists twice at a time
        columns[name] = np.concatenate([piece.columns.pop(name) for piece in pieces])
    times = [piece.time for piece in pieces if piece.time is not None]
    return Store(
        columns=columns,
        static=np.array([piece.static for piece in pieces]).reshape(len(pieces), len(roles.static)),
        series=_distinct([piece.name for piece in pieces]),
        offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        time=np.concatenate(times) if len(times) == len(pieces) else None,
        step=step,
        breaks=np.concatenate([piece.breaks for piece in pieces]),
        groups=np.concatenate([piece.groups for piece in pieces]),
        group_names=group_names,
        notes=tuple(notes),
    )


def _distinct(names: list[str]) -> tuple[str, ...]:
    twice = {name for name in names if names.count(name) > 1} if len(set(names)) < len(names) else ()
    return tuple(f"{name} #{i}" if name in twice else name for i, name in enumerate(names, start=1))


def _series(
    source: Source, data: Data, roles: Roles, group_names: dict[str, int], need_targets: bool
) -> Iterator[_Piece]:
    """The series of one source, rows in file order."""
    kept = _matching(source, data)
    present = roles.columns if need_targets else roles.inputs
    wanted = {name: "data.targets" if name in roles.targets else "data.inputs" for name in present}
    columns = {name: tables.numbers(source, name, wanted[name]) for name in present}
    for name, values in columns.items():
        if np.isnan(values).all():
            raise UserError(f'{source.name}: column "{name}" ({wanted[name]}) has no values')
    static = [tables.numbers(source, name, "data.static") for name in roles.static]
    time = None if data.time is None else tables.times(source, data.time, data.time_format)
    codes, names = _identify(source, data)
    groups = _groups(source, data, codes, names, group_names)
    if kept is not None:
        codes = codes[kept]
    order = np.argsort(codes, kind="stable") if len(names) > 1 else np.arange(len(codes))
    bounds = np.searchsorted(codes[order], np.arange(len(names) + 1))
    whole = kept is None and len(names) == 1
    for i, name in enumerate(names):
        rows = order[bounds[i] : bounds[i + 1]]
        if not len(rows):
            continue
        rows = rows if kept is None else kept[rows]
        take: Any = slice(None) if whole else rows
        yield _Piece(
            name=name,
            source=source,
            rows=rows,
            columns={key: values[take] for key, values in columns.items()},
            static=_constant(source, roles.static, static, rows, name),
            time=None if time is None else time[take],
            breaks=np.arange(len(rows)) == 0,
            groups=groups[take],
        )


def _matching(source: Source, data: Data) -> npt.NDArray[np.int64] | None:
    """Rows that `data.where` keeps; None for all."""
    if not data.where:
        return None
    keep = np.ones(source.table.num_rows, dtype=bool)
    for name, value in data.where.items():
        codes, found = tables.labels(source, name, "data.where")
        accepted = {as_text(v) for v in (value if isinstance(value, tuple) else (value,))}
        keep &= np.isin(codes, [i for i, text in enumerate(found) if as_text(text) in accepted])
    if not keep.any():
        asked = ", ".join(f"{name} = {value!r}" for name, value in data.where.items())
        raise UserError(f"{source.name}: no row has data.where: {asked}")
    return np.flatnonzero(keep)


def as_text(value: Any) -> str:
    """25, 25.0 and "25" are one value; so are true and True."""
    try:
        return f"{float(value):g}" if not isinstance(value, bool) else str(value).lower()
    except ValueError:
        return str(value)


def _identify(source: Source, data: Data) -> tuple[npt.NDArray[np.int64], list[str]]:
    """Each row's series, as codes in order of appearance, and the series' names."""
    if not data.ids:
        return np.zeros(source.table.num_rows, dtype=np.int64), [source.name]
    codes, names = tables.labels(source, data.ids[0], "data.id")
    for column in data.ids[1:]:
        more, values = tables.labels(source, column, "data.id")
        pairs, first, codes = np.unique(
            codes * len(values) + more, return_index=True, return_inverse=True
        )
        rank = np.argsort(np.argsort(first))  # back to the order of appearance
        codes = rank[codes]
        names = [f"{names[p // len(values)]}/{values[p % len(values)]}" for p in pairs[np.argsort(first)]]
    return codes, names


def _groups(
    source: Source,
    data: Data,
    codes: npt.NDArray[np.int64],
    series: list[str],
    group_names: dict[str, int],
) -> npt.NDArray[np.int64]:
    """Each row's group for the split: a column's value, the series, or the top folder."""
    by = data.split.by
    if data.split.folders:
        codes, values = np.zeros_like(codes), [source.name.split("/")[0]]
    elif by is None:
        codes, values = np.zeros_like(codes), [""]
    elif by == "series" and by not in source.table.column_names:
        values = series
    else:
        codes, values = tables.labels(source, by, "data.split.by")
    known = [group_names.setdefault(as_text(value), len(group_names)) for value in values]
    return np.array(known, dtype=np.int64)[codes]


def _constant(
    source: Source,
    names: Sequence[str],
    columns: Sequence[npt.NDArray[np.float64]],
    rows: npt.NDArray[np.int64],
    series: str,
) -> npt.NDArray[np.float64]:
    for name, values in zip(names, columns, strict=True):
        changed = np.flatnonzero(~(values[rows] == values[rows[0]]))
        if len(changed):
            row = int(rows[changed[0]])
            raise UserError(
                f'{source.where(row, name)}: is {values[row]:g} but was {values[rows[0]]:g} before; '
                f'data.static columns are constant within a series ("{series}")'
            )
    return np.array([values[rows[0]] for values in columns], dtype=np.float64)


def _take(piece: _Piece, rows: Any, breaks: npt.NDArray[np.bool_]) -> _Piece:
    return _Piece(
        name=piece.name,
        source=piece.source,
        rows=piece.rows[rows],
        columns={key: values[rows] for key, values in piece.columns.items()},
        static=piece.static,
        time=None if piece.time is None else piece.time[rows],
        breaks=breaks,
        groups=piece.groups[rows],
    )


def _ordered(piece: _Piece, data: Data) -> tuple[_Piece, float | None]:
    """The series in time order with its gaps marked, and its usual step."""
    if piece.time is None:
        return piece, None
    assert data.time is not None
    steps = np.diff(piece.time)
    if data.unsorted == "sort" and (steps < 0).any():
        piece = _take(piece, np.argsort(piece.time, kind="stable"), piece.breaks)
        steps = np.diff(piece.time)  # type: ignore[arg-type]
    wrong = np.flatnonzero(steps <= 0)
    if len(wrong):
        row = int(piece.rows[wrong[0] + 1])
        before = piece.source.line(int(piece.rows[wrong[0]]))
        place = piece.source.where(row, data.time)
        if steps[wrong[0]] == 0:
            raise UserError(
                f'{place}: the same time as {before} (series "{piece.name}", {len(wrong)} such '
                "rows); name the column that tells series apart (data.id), or remove duplicates"
            )
        raise UserError(
            f'{place}: is earlier than {before} (series "{piece.name}"); sort the file, set '
            'data.unsorted = "sort", or name the column that tells series apart (data.id)'
        )
    if not len(steps):
        return piece, None
    usual = float(np.median(steps))
    gap = np.abs(steps - usual) > data.gap_tolerance * usual
    piece.breaks[1:] |= gap
    return piece, usual / MICROSECONDS if piece.time.dtype == np.int64 else usual  # type: ignore[union-attr]


def _complete(piece: _Piece, data: Data, notes: list[str]) -> _Piece:
    """The series without missing values: refused, filled from the past, or dropped."""
    holes = {name: np.isnan(values) for name, values in piece.columns.items()}
    missing = {name: hole for name, hole in holes.items() if hole.any()}
    if not missing:
        return piece
    counts = ", ".join(f"{name} {int(hole.sum()):,}" for name, hole in missing.items())
    if data.missing == "error":
        name, hole = next(iter(missing.items()))
        row = int(piece.rows[np.flatnonzero(hole)[0]])
        raise UserError(
            f"{piece.source.where(row, name)}: is missing (in all: {counts}); set data.missing = "
            '"forward" to repeat the last known value, or "drop" to leave such rows out'
        )
    if data.missing == "forward":
        for name, hole in missing.items():
            last_known = np.maximum.accumulate(np.where(hole, -1, np.arange(len(hole))))
            filled = piece.columns[name][last_known]
            filled[last_known < 0] = np.nan
            piece.columns[name] = filled
        notes.append(f'"{piece.name}": filled forward: {counts}')
    else:
        notes.append(f'"{piece.name}": rows dropped for missing values: {counts}')
    hole = np.logical_or.reduce([np.isnan(values) for values in piece.columns.values()])
    keep = np.flatnonzero(~hole)
    if not len(keep):
        raise UserError(
            f'{piece.source.name}: series "{piece.name}" has no row in which every column is known'
        )
    # a kept row starts anew if it did so before, or if any row since the last kept one did or went
    restarts = np.cumsum(piece.breaks | hole)[keep]
    breaks = np.diff(restarts, prepend=restarts[0] - 1) > 0
    return _take(piece, keep, breaks)


def _short(piece: _Piece, data: Data, min_rows: int, notes: list[str]) -> None:
    rows = len(piece.breaks)
    if data.short == "error":
        window = f"data.context + data.horizon = {data.context} + {data.horizon}"
        raise UserError(
            f'{window}, but series "{piece.name}" has {rows} rows; shorten them or drop such '
            'series (data.short = "drop")'
        )
    notes.append(f'"{piece.name}": dropped, {rows} rows are fewer than the {min_rows} of one window')
