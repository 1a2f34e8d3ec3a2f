"""Labels from a table beside the data: series, start, end, label.

Both ends belong to a label. Where one ends at the row that the next begins with, the row belongs to
the one that ends there.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import PurePosixPath
from typing import NamedTuple

import numpy as np

from slipstream.config import Data
from slipstream.data.io.columns import read_codes, read_numbers, read_times
from slipstream.data.io.files import READERS, read_file
from slipstream.data.io.marks import mark_missing
from slipstream.data.io.options import ReadOptions
from slipstream.data.io.table import DataTable
from slipstream.data.labels import classes
from slipstream.data.missing import encode_runs
from slipstream.data.roles import LABEL, Roles, normalize_value
from slipstream.data.series import Ints, RawSeries, SeriesIndex, Times, is_date, prepare_series
from slipstream.errors import UserError
from slipstream.object_storage import parse_path

SETTING = "data.labels"


class LabelIntervals(NamedTuple):
    """Labelled ranges of rows, in the order of the table of labels."""

    first: Ints
    """First row of each among all series' rows"""
    last: Ints
    class_numbers: Ints


def prepare_with_labels(
    tables: Sequence[DataTable], data: Data, roles: Roles, names: tuple[str, ...], min_rows: int
) -> tuple[RawSeries, tuple[str, ...], LabelIntervals | None]:
    """Return the series, their classes, and the labelled intervals of a table of labels."""
    if data.labels is None:
        return prepare_series(tables, data, roles, min_rows=min_rows), names, None
    raw = prepare_series(tables, data, replace(roles, targets=()), min_rows=min_rows)
    raw, names, intervals = attach_labels(raw, data, names)
    classes.refuse_too_few(names, data.labels)
    return raw, names, intervals


def attach_labels(
    raw: RawSeries, data: Data, known: tuple[str, ...] = ()
) -> tuple[RawSeries, tuple[str, ...], LabelIntervals]:
    """Return the series with one more column, the class numbers, the classes' names, and the
    labelled intervals; `known` are the classes of a trained model."""
    assert data.labels is not None
    path = parse_path(data.labels)
    options = ReadOptions.from_data(data).for_side_table()
    table = read_file(path, name=path.name, setting=SETTING, options=options)
    labels = mark_missing(table, data.na)
    codes, texts = classes.read_labels(labels, LABEL, SETTING)
    if (codes == classes.UNKNOWN).any():
        row = int(np.flatnonzero(codes == classes.UNKNOWN)[0])
        raise UserError(f"{labels.locate_cell(row, LABEL)}: is empty; take the row out")
    names = known or classes.sort_classes(texts)
    numbers = classes.number_labels(codes, texts, names, labels, LABEL)
    intervals = LabelIntervals(*_find_rows(labels, raw, data), numbers)
    _refuse_conflicts(labels, intervals, names)
    column = np.full(raw.index.num_rows, classes.UNKNOWN, dtype=np.float64)
    if data.label_rows == "end":
        column[intervals.last] = intervals.class_numbers
    else:
        for i in np.argsort(-intervals.first, kind="stable"):  # at a shared row, the earlier wins
            column[intervals.first[i] : intervals.last[i] + 1] = intervals.class_numbers[i]
    with_labels = replace(
        raw,
        index=replace(raw.index, unknown=encode_runs(column < 0)),
        column_names=(*raw.column_names, LABEL),
        read_column=lambda name: column if name == LABEL else raw.read_column(name),
    )
    return with_labels, names, intervals


def _find_rows(labels: DataTable, raw: RawSeries, data: Data) -> tuple[Ints, Ints]:
    """Return the first and last row of every label."""
    index = raw.index
    owners = match_series(labels, index)
    starts, ends = (_read_bounds(labels, name, raw, data) for name in ("start", "end"))
    backwards = np.flatnonzero(ends < starts)
    if len(backwards):
        raise UserError(f"{labels.locate_cell(int(backwards[0]), 'end')}: is before its start")
    first, last = np.empty_like(owners), np.empty_like(owners)
    for owner in np.unique(owners):
        mine = np.flatnonzero(owners == owner)
        begin, end = int(index.offsets[owner]), int(index.offsets[owner + 1])
        rows = np.arange(begin, end)
        at: Times = raw.time[begin:end] if raw.time is not None else index.number_rows(rows, owner)
        outside = mine[(starts[mine] < at[0]) | (ends[mine] > at[-1])]
        if len(outside):
            _refuse_outside(labels, int(outside[0]), index.series_names[owner], at, raw)
        first[mine] = begin + np.searchsorted(at, starts[mine], side="left")
        last[mine] = begin + np.searchsorted(at, ends[mine], side="right") - 1
    empty = np.flatnonzero(last < first)
    if len(empty):
        raise UserError(
            f"{labels.locate_row(int(empty[0]))}: no row of the series lies between start and end"
        )
    return first, last


def match_series(labels: DataTable, index: SeriesIndex) -> Ints:
    """Return the series of each label: by its name, or its file's name without the ending."""
    if "series" not in labels.column_names and len(index.series_names) == 1:
        return np.zeros(labels.num_rows, dtype=np.int64)
    codes, texts = read_codes(labels, "series", SETTING)
    exact = {name: i for i, name in enumerate(index.series_names)}
    spelled: dict[str, list[int]] = {}
    for i, name in enumerate(index.series_names):
        for spelling in _list_spellings(name):
            spelled.setdefault(spelling, []).append(i)
    owners = []
    for code, text in enumerate(texts):
        matches = [exact[text]] if text in exact else spelled.get(normalize_value(text.strip()), [])
        if len(matches) != 1:
            where = labels.locate_cell(int(np.flatnonzero(codes == code)[0]), "series")
            several = " or ".join(index.series_names[i] for i in matches[:10])
            some = ", ".join(index.series_names[:10])
            raise UserError(
                f'{where}: "{text}" may be {several}; write the whole name'
                if matches
                else f'{where}: there is no series "{text}"; there is {some}'
            )
        owners.append(matches[0])
    return np.array(owners, dtype=np.int64)[codes]


def _list_spellings(name: str) -> set[str]:
    """List what a label may call a series: its name; a file's also without ending or folder, a
    sheet's also without the file."""
    path = PurePosixPath(name.removesuffix(".gz"))
    names = {name.strip()}
    if path.suffix.lower() in READERS:
        names |= {path.stem, str(path.with_suffix(""))}
    if path.parent.suffix.lower() in READERS:  # a sheet of a workbook
        names.add(path.name)
    return {normalize_value(each) for each in names}


def _read_bounds(labels: DataTable, name: str, raw: RawSeries, data: Data) -> Times:
    """Read a column of times, of the same kind as the data's, or of row numbers."""
    if raw.time is not None:
        times = read_times(labels, name, data.time_format, SETTING)
        if is_date(times) != is_date(raw.time):
            wanted, present = ("dates", "numbers") if is_date(raw.time) else ("numbers", "dates")
            raise UserError(
                f'{labels.name}: column "{name}" ({SETTING}) holds {present}, but the data\'s time '
                f'"{data.time_column}" holds {wanted}'
            )
        return times
    if data.missing == "drop" or data.where or data.prepare:
        setting = "data.where" if data.where else 'data.missing = "drop"'
        setting = "data.prepare" if data.prepare else setting
        raise UserError(
            f"{SETTING} counts rows, since there is no data.time, and {setting} would shift them; "
            "name data.time, or prepare the data beforehand"
        )
    numbers = read_numbers(labels, name, SETTING)
    wrong = np.flatnonzero(~(numbers == np.round(numbers)))
    if len(wrong):
        raise UserError(
            f"{labels.locate_cell(int(wrong[0]), name)}: is not a row number; rows count from 0; "
            "or name the time column (data.time)"
        )
    return numbers.astype(np.int64)


def _refuse_outside(labels: DataTable, row: int, series: str, at: Times, raw: RawSeries) -> None:
    first, last = at[0], at[-1]
    if raw.time is not None and is_date(raw.time):
        first, last = (np.datetime64(int(time), "us") for time in (first, last))
    raise UserError(
        f'{labels.locate_row(row)}: the label lies outside of series "{series}", which has '
        f"{'rows ' if raw.time is None else ''}{first} to {last}; correct it, or cut it to the data"
    )


def _refuse_conflicts(labels: DataTable, intervals: LabelIntervals, names: tuple[str, ...]) -> None:
    """Refuse two labels for one row, unless one ends where the other begins."""
    reach, owner = -1, -1
    for i in np.lexsort((intervals.last, intervals.first)).tolist():
        first, last, mine = (values[i] for values in intervals)
        other = intervals.class_numbers[owner]
        if (first < reach or first == reach == last) and mine != other:
            raise UserError(
                f'{labels.locate_row(i)}: is "{names[mine]}", but overlaps with '
                f'{labels.locate_row(owner)}, which is "{names[other]}"; a row has one label'
            )
        if last > reach:
            reach, owner = int(last), i


def describe_unused(intervals: LabelIntervals, starts: Sequence[Ints], lead: int) -> list[str]:
    """Note how many labels have no window."""
    used = np.concatenate([some + lead for some in starts])
    without = int((~np.isin(intervals.last, used)).sum())
    why = "too few rows in one piece come before them, or their rows are in no set"
    note = f"{without:,} of {len(intervals.last):,} labels have no window: {why}"
    return [note] if without else []
