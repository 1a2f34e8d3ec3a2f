"""How a draft's rows are split, by the code that training uses: sets, folds and their windows."""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from slipstream.config import SIMULATED, Config, Data, Signature, Split
from slipstream.data import splits
from slipstream.data.io import files
from slipstream.data.io.columns import read_codes
from slipstream.data.io.table import DataTable
from slipstream.data.labels import intervals, selection
from slipstream.data.prepare.chain.source import Source, find_source, mark_source_rows
from slipstream.data.prepare.chain.tables import PrepareChain
from slipstream.data.roles import build_signature
from slipstream.data.series import MICROSECONDS, Ints, RawSeries, SeriesIndex, is_date
from slipstream.data.splits import SETS, SplitAssignment
from slipstream.data.walk_forward import find_fold_windows
from slipstream.errors import UserError
from slipstream.webapp.screens.prepare.preview import (
    MOST_SERIES,
    picture,
    refuse_large,
    refuse_large_joins,
    to_axis,
)

DEFAULT = Split(train=0.7, val=0.1, test=0.2)
MOST_SPANS = 500
MOST_GROUPS = 200


class Sets(NamedTuple):
    """One split, or one fold: rows and windows of each set."""

    label: str
    rows: dict[str, int]
    windows: dict[str, int]
    left_out: dict[str, int]
    spans: list[tuple[int, int, str]]
    """Runs of rows of the series that is drawn: the first, the one after the last, the set"""


class Loaded(NamedTuple):
    """The series of a config, as training has them, but for the scaling."""

    raw: RawSeries
    signature: Signature
    data: Data
    notes: list[str]


def describe_split(config: Config, series: str) -> dict[str, Any]:
    """Return the sets of a config, over all rows, with the target of one series to draw."""
    loaded = load_series(config)
    raw, index = loaded.raw, loaded.raw.index
    names = index.series_names
    place = names.index(series) if series in names else 0
    begin, end = int(index.offsets[place]), int(index.offsets[place + 1])
    for name in raw.column_names:  # a missing value is refused when it is read
        raw.read_column(name)
    every, notes = find_sets(loaded, begin, end)
    target = loaded.signature.targets[0]
    values = raw.read_column(target)[begin:end]
    x = np.arange(end - begin) if raw.time is None else to_axis(raw.time[begin:end])
    folds = [one._replace(spans=_place(one.spans, x)) for one in every]
    return {
        "series": list(names[:MOST_SERIES]),
        "num_series": len(names),
        "shown": names[place],
        "rows": index.num_rows,
        "target": target,
        "classes": list(loaded.signature.classes),
        "dates": index.has_dates,
        "time": loaded.data.time_column,
        "plot": picture(x, np.where(values < 0, np.nan, values))
        if loaded.signature.classes
        else picture(x, values),
        "folds": [one._asdict() for one in folds],
        "gaps": len(index.breaks) - len(names),
        "notes": [*loaded.notes, *notes, *raw.notes][:20],
    }


def _place(spans: Sequence[tuple[int, int, str]], x: Any) -> list[Any]:
    """Return spans on the axis; a set reaches up to where the next row begins."""
    last = len(x) - 1
    return [(float(x[a]), float(x[min(b, last)]), name) for a, b, name in spans[:MOST_SPANS]]


def load_series(config: Config) -> Loaded:
    """Read all rows of a config's data, if they are few enough for a request."""
    data = config.data
    if not data.paths[0].startswith(SIMULATED):
        refuse_large([file for path in data.paths for file in files.expand_path(Path(path))[1]])
    refuse_large_joins(data.prepare)
    return load_all(config)


def load_all(config: Config) -> Loaded:
    """Read all rows of a config's data, however many there are."""
    return _load(config, _read_source(config))


def _load(config: Config, source: Source) -> Loaded:
    data, roles = source.data, source.roles
    raw, names, _ = intervals.prepare_with_labels(
        source.tables, data, roles, source.classes, data.context + data.horizon
    )
    signature = build_signature(config, roles, raw.index.step, names)
    return Loaded(raw, signature, data, list(source.notes))


def _read_source(config: Config) -> Source:
    """Return the tables after all steps, of which those that are fitted know the training rows."""
    data = config.data
    if not data.prepare:
        return find_source(config, data, files.read_tables(data, None), [])
    chain = PrepareChain(data)
    tables = files.read_tables(data, None)
    if chain.is_fitted:
        prepared = chain.apply(tables)
    else:
        draft = chain.draft(tables)
        source = find_source(config, draft.data, draft.tables, [])
        raw, signature, *_ = _load(config, source)
        if data.split.stratified:
            numbers = raw.read_column(signature.targets[0]).astype(np.int64)
            training = selection.split_stratified(raw.index, numbers, data, signature)[1]
        else:
            training = splits.assign_first_split(raw.index, data).mask(splits.TRAIN)
        prepared = chain.fit(tables, mark_source_rows(source, training, raw.index))
    notes = [*prepared.notes, *prepared.left_out]
    return find_source(config, prepared.data, prepared.tables, notes)


def find_sets(loaded: Loaded, begin: int, end: int) -> tuple[list[Sets], list[str]]:
    """Return the sets, or those of each fold; `begin` to `end` are the rows that are drawn."""
    raw, signature, data, _ = loaded
    index = raw.index
    if data.split.stratified:
        numbers = raw.read_column(signature.targets[0]).astype(np.int64)
        starts, _ = selection.split_stratified(index, numbers, data, signature)
        return [_count_stratified(starts, index, signature, begin, end)], []
    if data.split.walk_forward is not None and not signature.masked:
        folds, notes = find_fold_windows(index, raw.time, data, signature)
        return [
            _count(fold.label, fold.assignment, _lengths(fold.starts), fold.left_out, (begin, end))
            for fold in folds
        ], notes
    assignment, ranges = splits.find_windows(index, data, signature)
    ranges, left_out = splits.exclude_unknown(ranges, index, signature)
    return [_count("", assignment, _lengths(ranges), left_out, (begin, end))], []


def _lengths(by_set: Mapping[str, Any]) -> dict[str, int]:
    return {name: len(some) for name, some in by_set.items()}


def _count(
    label: str,
    assignment: SplitAssignment,
    windows: dict[str, int],
    left_out: dict[str, int],
    limits: tuple[int, int],
) -> Sets:
    rows = {name: assignment.count_rows(which) for which, name in enumerate(SETS)}
    spans = []
    for first, past, which in zip(
        assignment.begins.tolist(), assignment.ends.tolist(), assignment.sets.tolist(), strict=True
    ):
        low, high = max(first, limits[0]) - limits[0], min(past, limits[1]) - limits[0]
        if low < high and which < len(SETS):
            spans.append((low, high, SETS[which]))
    return Sets(label, rows, windows, left_out, spans)


def _count_stratified(
    starts: Mapping[str, Ints], index: SeriesIndex, signature: Signature, begin: int, end: int
) -> Sets:
    """Return the rows that the windows of each set predict."""
    sets = np.full(index.num_rows, splits.UNUSED, dtype=np.int8)
    for which, name in enumerate(SETS):
        for ahead in range(signature.steps_out):
            sets[starts[name] + signature.lead + ahead] = which
    changes = np.flatnonzero(np.diff(sets, prepend=np.int8(-1)))
    assignment = SplitAssignment(changes, sets[changes], index.num_rows)
    return _count("", assignment, _lengths(starts), {}, (begin, end))


def list_groups(config: Config, column: str) -> list[str]:
    """Return the values of a column that may assign rows to sets, or the series' names."""
    data = config.data.model_copy(update={"split": DEFAULT})
    if not data.paths[0].startswith(SIMULATED):
        refuse_large([file for path in data.paths for file in files.expand_path(Path(path))[1]])
    tables = files.read_tables(data, None)
    names: dict[str, None] = {}
    for table in tables:
        names |= dict.fromkeys(_list_values(table, data, column))
        if len(names) > MOST_GROUPS:
            raise UserError(f'"{column}" has more than {MOST_GROUPS} values')
    return list(names)


def _list_values(table: DataTable, data: Data, column: str) -> list[str]:
    if column == "series" and column not in table.column_set:
        from slipstream.data.roles import identify_series

        return identify_series(table, data)[1]
    return read_codes(table, column, "data.split.by")[1]


def count_rows_by_date(config: Config, borders: Sequence[str]) -> list[int]:
    """Return the rows of each set that dates bound: those before the first border, up to the
    second, and up to the third or the end. All series must have as many."""
    data = config.data.model_copy(update={"split": DEFAULT})
    raw = load_series(config.model_copy(update={"data": data})).raw
    if raw.time is None:
        raise UserError("dates need the time of each row; choose the time column first")
    dates = is_date(raw.time)
    marks = [_parse_time(text, dates=dates) for text in borders if text.strip()]
    if len(marks) < 2 or marks != sorted(marks):
        raise UserError("give the times from which on rows validate and test, in that order")
    counts = set()
    for begin, end in zip(raw.index.offsets, raw.index.offsets[1:], strict=False):
        time = raw.time[begin:end]
        places = [bisect.bisect_left(time, mark) for mark in marks]
        places = [*places, len(time)][:3]
        counts.add((places[0], places[1] - places[0], places[2] - places[1]))
    if len(counts) > 1:
        raise UserError(
            "data.split.rows counts the same rows in every series, but these dates lie at "
            "different rows; choose shares, or a column that assigns rows to sets (by)"
        )
    (rows,) = counts
    if min(rows) < 1:
        raise UserError("every set needs rows; move the dates")
    return [int(one) for one in rows]


def _parse_time(text: str, *, dates: bool) -> float:
    try:
        if not dates:
            value = float(text)
        else:
            when = datetime.fromisoformat(text.strip())
            value = when.replace(tzinfo=when.tzinfo or UTC).timestamp() * MICROSECONDS
    except (ValueError, OverflowError):
        value = math.nan
    if not math.isfinite(value):
        what = "a time as in 2026-01-31 or 2026-01-31 12:00" if dates else "a number"
        raise UserError(f'"{text[:100]}" is not {what}')
    return value
