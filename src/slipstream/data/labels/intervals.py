"""Labels from a table beside the data: series, start, end, label.

Both ends belong to a label. Where one ends at the row that the next begins with, the row belongs to
the one that ends there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import numpy as np

from slipstream.config import Data
from slipstream.data import columns
from slipstream.data.io import table
from slipstream.data.io.table import DataTable
from slipstream.data.labels import classes
from slipstream.data.labels.classes import LABEL
from slipstream.data.roles import normalize_value
from slipstream.data.series import Ints, RawSeries, SeriesIndex, Times, is_date
from slipstream.errors import UserError

SETTING = "data.labels"


class LabelIntervals(NamedTuple):
    """Labelled stretches of rows, in the order of the table."""

    first: Ints
    """Among all series' rows"""
    last: Ints
    number: Ints
    """Of the class"""


def attach_labels(
    store: RawSeries, data: Data, known: tuple[str, ...] = ()
) -> tuple[RawSeries, tuple[str, ...], LabelIntervals]:
    """The store with one more column, the class numbers, and the classes' names; `known` are those
    of a trained model."""
    assert data.labels is not None
    path = Path(data.labels)
    source = table.read_file(path, name=path.name, setting=SETTING, decimal=data.decimal)
    codes, texts = classes.read_labels(source, LABEL, SETTING)
    if (codes == classes.UNKNOWN).any():
        row = int(np.flatnonzero(codes == classes.UNKNOWN)[0])
        raise UserError(f"{source.locate_cell(row, LABEL)}: is empty; take the row out")
    names = known or classes.sort_classes(texts)
    numbers = classes.number_labels(codes, texts, names, source, LABEL)
    spans = LabelIntervals(*_rows(source, store, data), numbers)
    _refuse_conflicts(source, spans, names)
    column = np.full(store.index.num_rows, classes.UNKNOWN, dtype=np.float64)
    if data.label_rows == "end":
        column[spans.last] = spans.number
    else:
        order = np.argsort(-spans.first, kind="stable")  # at a shared row, the earlier one wins
        for i in order:
            column[spans.first[i] : spans.last[i] + 1] = spans.number[i]
    labelled = replace(
        store,
        column_names=(*store.column_names, LABEL),
        read_column=lambda name: column if name == LABEL else store.read_column(name),
    )
    return labelled, names, spans


def _rows(source: DataTable, store: RawSeries, data: Data) -> tuple[Ints, Ints]:
    """First and last row of every label."""
    layout = store.index
    owners = match_series(source, layout)
    starts, ends = (_places(source, name, store, data) for name in ("start", "end"))
    backwards = np.flatnonzero(ends < starts)
    if len(backwards):
        raise UserError(f"{source.locate_cell(int(backwards[0]), 'end')}: is before its start")
    first, last = np.empty_like(owners), np.empty_like(owners)
    for owner in np.unique(owners):
        mine = np.flatnonzero(owners == owner)
        begin, end = int(layout.offsets[owner]), int(layout.offsets[owner + 1])
        at: Times = np.arange(end - begin) if store.time is None else store.time[begin:end]
        outside = mine[(starts[mine] < at[0]) | (ends[mine] > at[-1])]
        if len(outside):
            _refuse_outside(source, int(outside[0]), layout.series_names[owner], at, store)
        first[mine] = begin + np.searchsorted(at, starts[mine], side="left")
        last[mine] = begin + np.searchsorted(at, ends[mine], side="right") - 1
    empty = np.flatnonzero(last < first)
    if len(empty):
        raise UserError(
            f"{source.locate_row(int(empty[0]))}: no row of the series lies between start and end"
        )
    return first, last


def match_series(source: DataTable, layout: SeriesIndex) -> Ints:
    """Which series each label is of: by its name, or its file's name without the ending."""
    if "series" not in source.column_names and len(layout.series_names) == 1:
        return np.zeros(source.num_rows, dtype=np.int64)
    codes, texts = columns.read_codes(source, "series", SETTING)
    exact = {name: i for i, name in enumerate(layout.series_names)}
    spelled: dict[str, list[int]] = {}
    for i, name in enumerate(layout.series_names):
        for spelling in _spellings(name):
            spelled.setdefault(spelling, []).append(i)
    owners = []
    for code, text in enumerate(texts):
        found = [exact[text]] if text in exact else spelled.get(normalize_value(text.strip()), [])
        if len(found) != 1:
            where = source.locate_cell(int(np.flatnonzero(codes == code)[0]), "series")
            several = " or ".join(layout.series_names[i] for i in found[:10])
            some = ", ".join(layout.series_names[:10])
            raise UserError(
                f'{where}: "{text}" may be {several}; write the whole name'
                if found
                else f'{where}: there is no series "{text}"; there is {some}'
            )
        owners.append(found[0])
    return np.array(owners, dtype=np.int64)[codes]


def _spellings(name: str) -> set[str]:
    """What a label may call a series: its name, and a file's without its ending or its folder."""
    path = PurePosixPath(name)
    names = {name.strip()}
    if path.suffix.lower() in table.READERS:
        names |= {path.stem, str(path.with_suffix(""))}
    return {normalize_value(each) for each in names}


def _places(source: DataTable, name: str, store: RawSeries, data: Data) -> Times:
    """A column of times, of the kind that the data have, or of row numbers."""
    if store.time is not None:
        times = columns.read_times(source, name, data.time_format, SETTING)
        if is_date(times) != is_date(store.time):
            wanted, found = ("dates", "numbers") if is_date(store.time) else ("numbers", "dates")
            raise UserError(
                f'{source.name}: column "{name}" ({SETTING}) holds {found}, but the data\'s time '
                f'"{data.time}" holds {wanted}'
            )
        return times
    if data.missing == "drop" or data.where:
        asked = "data.where" if data.where else 'data.missing = "drop"'
        raise UserError(
            f"{SETTING} counts rows, since there is no data.time, and {asked} would shift them; "
            "name data.time, or prepare the data beforehand"
        )
    numbers = columns.read_numbers(source, name, SETTING)
    wrong = np.flatnonzero(~(numbers == np.round(numbers)))
    if len(wrong):
        raise UserError(
            f"{source.locate_cell(int(wrong[0]), name)}: is no row number; rows count from 0, or "
            "name "
            "the time column (data.time)"
        )
    return numbers.astype(np.int64)


def _refuse_outside(source: DataTable, row: int, series: str, at: Times, store: RawSeries) -> None:
    what = "rows 0" if store.time is None else str(_shown(at[0], store))
    until = _shown(at[-1], store)
    raise UserError(
        f'{source.locate_row(row)}: the label lies outside of series "{series}", which has {what} '
        "to "
        f"{until}; correct it, or cut it to the data"
    )


def _shown(moment: Any, store: RawSeries) -> Any:
    if store.time is not None and is_date(store.time):
        return np.datetime64(int(moment), "us")
    return moment


def _refuse_conflicts(source: DataTable, spans: LabelIntervals, names: tuple[str, ...]) -> None:
    """Two labels for one row, unless one ends where the other begins."""
    order = np.lexsort((spans.last, spans.first))
    reach, owner = -1, -1
    for i in order:
        overlaps = spans.first[i] < reach or (spans.first[i] == reach == spans.last[i])
        if overlaps and spans.number[i] != spans.number[owner]:
            mine, other = names[spans.number[i]], names[spans.number[owner]]
            raise UserError(
                f'{source.locate_row(int(i))}: is "{mine}", but overlaps with '
                f"{source.locate_row(owner)}, "
                f'which is "{other}"; a row has one label'
            )
        if spans.last[i] > reach:
            reach, owner = int(spans.last[i]), int(i)


def describe_unused(spans: LabelIntervals, starts: Sequence[Ints], lead: int) -> list[str]:
    """A note on labels that have no window of their own."""
    used = np.unique(np.concatenate([some + lead for some in starts]))
    without = int((~np.isin(spans.last, used)).sum())
    if not without:
        return []
    return [
        f"{without:,} of {len(spans.last):,} labels have no window: too few rows in one piece come "
        "before them, or their rows are in no set"
    ]
