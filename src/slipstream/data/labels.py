"""Labels of a classifier: their codes, intervals of time, and stratified splits by label."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import PurePosixPath
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from slipstream.base.errors import Setting, UserError
from slipstream.base.storage import parse_path
from slipstream.config import Data, Signature
from slipstream.data import splits
from slipstream.data.columns import (
    is_text,
    mark_missing,
    read_codes,
    read_column,
    read_numbers,
    read_times,
)
from slipstream.data.files import read_file
from slipstream.data.formats import find_format
from slipstream.data.formats.reader import ReadOptions
from slipstream.data.layout import NULLS
from slipstream.data.roles import LABEL, Roles, normalize_value
from slipstream.data.series import (
    Flags,
    Ints,
    RawSeries,
    SeriesIndex,
    Times,
    encode_runs,
    is_date,
    prepare_series,
)
from slipstream.data.splits import SETS
from slipstream.data.table import DataTable

UNKNOWN = -1
NO_LABEL = [text for text in NULLS if text.lower() != "none"]
"""Cells that hold no label; "none" may well be a class"""
WHOLE = r"^(?:\+?(\d+)|(-\d+))(?:\.0*)?$"
MAX_CLASSES = 1000
"""A column with more different labels is refused"""
SCAN_ROWS = 1 << 20
"""The number of rows whose labels are read at a time, to limit memory"""


def encode_labels(
    tables: Sequence[DataTable], name: str, setting: str, classes: tuple[str, ...] = ()
) -> tuple[list[DataTable], tuple[str, ...]]:
    """Return the tables with a column of labels as class numbers, and the classes' names.

    `classes` are the classes of a trained model; other labels are then refused.
    """
    classes = classes or sort_classes(
        text for table in tables for text in _list_labels(table, name, setting)
    )
    readers = [_ClassReader(table, name, setting, classes) for table in tables]
    return [replace(reader.table, reader=reader) for reader in readers], classes


@dataclass(frozen=True)
class _ClassReader:
    """Reads a table's columns, one of them as class numbers."""

    table: DataTable
    name: str
    setting: str
    classes: tuple[str, ...]

    def get_type(self, name: str) -> pa.DataType:
        return pa.float64() if name == self.name else self.table.reader.get_type(name)

    def read(self, name: str, begin: int, end: int) -> pa.ChunkedArray:
        if name != self.name:
            return self.table.reader.read(name, begin, end)
        rows = replace(self.table, first_row=begin, num_rows=end - begin)
        codes, texts = read_labels(rows, name, self.setting)
        numbers = number_labels(codes, texts, self.classes, rows, name)
        return pa.chunked_array([numbers.astype(np.float64)])


def _list_labels(table: DataTable, name: str, setting: str) -> set[str]:
    """List the labels of one table, read a part at a time."""
    labels: set[str] = set()
    for begin in range(0, table.num_rows, SCAN_ROWS):
        rows = table.slice_rows(begin, min(begin + SCAN_ROWS, table.num_rows))
        labels |= set(read_labels(rows, name, setting)[1])
        if len(labels) > MAX_CLASSES:
            raise UserError(
                f'{table.name}: column "{name}" ({setting}) holds more than {MAX_CLASSES:,} '
                "different labels; is it a number to predict ("
                + Setting({"data.task": "regress"})
                + ")?"
            )
    return labels


def read_labels(table: DataTable, name: str, setting: str) -> tuple[Ints, list[str]]:
    """Read a column of labels as codes, UNKNOWN where a cell has no label, and the text of each
    code."""
    values = read_column(table, name, setting)
    kind = values.type
    if pa.types.is_integer(kind) or pa.types.is_boolean(kind):
        text = values.cast(pa.string())
    elif pa.types.is_floating(kind) or pa.types.is_decimal(kind) or pa.types.is_null(kind):
        text = pa.chunked_array([_format_integers(table, name, values, setting)])
    elif is_text(kind):
        text = _clean_labels(values)
    else:
        raise UserError(
            f'{table.name}: column "{name}" ({setting}) holds {kind}; labels are integers or text'
        )
    encoded = text.combine_chunks().dictionary_encode()
    codes = encoded.indices.fill_null(UNKNOWN).to_numpy(zero_copy_only=False)
    return np.asarray(codes, dtype=np.int64), encoded.dictionary.to_pylist()


def _format_integers(table: DataTable, name: str, values: Any, setting: str) -> pa.Array:
    """Return integers as text with all digits, null where there is no number."""
    encoded = values.combine_chunks().dictionary_encode()
    texts: list[str | None] = []
    for code, number in enumerate(encoded.dictionary.to_pylist()):
        if number is None or math.isnan(number):
            texts.append(None)
        elif math.isfinite(number) and number == int(number):
            texts.append(str(int(number)))
        else:
            row = pc.index(encoded.indices, code).as_py()
            raise UserError(
                f"{table.locate_cell(row, name)}: is {number:g}; labels ({setting}) are integers "
                "or text, numbers with a fraction are for " + Setting({"data.task": "regress"})
            )
    return pa.array(texts, pa.string()).take(encoded.indices)


def _clean_labels(values: pa.ChunkedArray) -> pa.ChunkedArray:
    """Trim text, null where there is no label; 1, +1 and 1.0 are one label."""
    text = pc.utf8_trim_whitespace(values.cast(pa.string()))
    absent = pc.is_in(text, value_set=pa.array(NO_LABEL))
    text = pc.if_else(absent, pa.scalar(None, pa.string()), text)
    return pc.replace_substring_regex(text, pattern=WHOLE, replacement=r"\1\2")


def sort_classes(texts: Iterable[str]) -> tuple[str, ...]:
    """Sort the classes' names: integers by size, text by the alphabet."""
    names = set(texts)
    try:
        return tuple(sorted(names, key=lambda text: (int(text), text)))
    except ValueError:
        return tuple(sorted(names))


def number_labels(
    codes: Ints, texts: list[str], classes: tuple[str, ...], table: DataTable, name: str
) -> Ints:
    """Return the class number of each code; a label that is no class is refused."""
    class_numbers = {text: number for number, text in enumerate(classes)}
    for code, text in enumerate(texts):
        if text not in class_numbers:
            row = int(np.flatnonzero(codes == code)[0])
            raise UserError(
                f'{table.locate_cell(row, name)}: "{text}" is not a class of the model, which has '
                f"{', '.join(classes[:20])}; correct it, or leave it empty"
            )
    return np.array([*(class_numbers[text] for text in texts), UNKNOWN], dtype=np.int64)[codes]


def refuse_too_few(classes: tuple[str, ...], source: str) -> None:
    if len(classes) < 2:
        labels = f'one label, "{classes[0]}"' if classes else "no label"
        raise UserError(f"{source} holds {labels}; to classify, there must be two or more")


MAX_NAMED = 10


def split_stratified(
    index: SeriesIndex, numbers: Ints, data: Data, signature: Signature
) -> tuple[dict[str, Ints], Flags]:
    """Split each class's windows by shares, in time order within a series.

    Return the windows by set and a mask of the training rows.

    A window's class is the class of its first target row. Windows that share a row with a window of
    a later set are left out.
    """
    rows = splits.assign_all(index)
    ranges = splits.find_set_windows(index.breaks, rows, 0, data, signature)
    starts = ranges.exclude(index.unknown, signature).list_starts()
    sets = _assign_windows(starts, numbers[starts + signature.lead], index, data)
    length = signature.lead + signature.steps_out
    reach = length + index.look_ahead
    by_set = {name: starts[sets == set_index] for set_index, name in enumerate(SETS)}
    by_set["val"] = _drop_overlapping(by_set["val"], by_set["test"], reach, index.num_rows)
    later = np.union1d(by_set["val"], by_set["test"])
    by_set["train"] = _drop_overlapping(by_set["train"], later, reach, index.num_rows)
    for name, windows in by_set.items():
        if not len(windows):
            raise UserError(
                f"data.split.stratified leaves no {name} window: those of one set must not share "
                f"rows with a later one, and each has {length} rows; shorten data.context, or "
                "split by shares alone",
                setting="data.split.stratified",
            )
    return by_set, _cover_rows(by_set["train"], length, index.num_rows)


def _assign_windows(starts: Ints, numbers: Ints, index: SeriesIndex, data: Data) -> Ints:
    """Return the set of each window, by its position among the windows of the same series and
    class."""
    sets = np.full(len(starts), splits.UNUSED)
    series = np.searchsorted(index.offsets, starts, side="right")
    shares = (data.split.train, data.split.val, data.split.test)
    borders = np.cumsum([0.0, *(share for share in shares if isinstance(share, float))])
    for owner in np.unique(series):
        for number in np.unique(numbers[series == owner]):
            windows = np.flatnonzero((series == owner) & (numbers == number))
            bounds = np.round(borders * len(windows)).astype(np.int64)
            for set_index, (begin, end) in enumerate(pairwise(bounds)):
                sets[windows[begin:end]] = set_index
    return sets


def _cover_rows(starts: Ints, length: int, num_rows: int) -> Flags:
    """Mark the rows that windows of this length contain."""
    change = np.zeros(num_rows + 1, dtype=np.int64)
    np.add.at(change, starts, 1)
    np.add.at(change, np.minimum(starts + length, num_rows), -1)
    return np.asarray(np.cumsum(change)[:-1] > 0)


def _drop_overlapping(starts: Ints, reserved: Ints, length: int, num_rows: int) -> Ints:
    """Return the windows that share no row with the `reserved` windows."""
    before = np.concatenate([[0], np.cumsum(_cover_rows(reserved, length, num_rows))])
    free: Flags = before[np.minimum(starts + length, num_rows)] == before[starts]
    return starts[free]


def balance_weights(counts: Ints) -> tuple[float, ...]:
    """Return weights that make classes count alike in training: 1 on average over the windows."""
    seen = counts > 0
    weights = np.where(seen, counts.sum() / (seen.sum() * np.maximum(counts, 1)), 1.0)
    return tuple(float(weight) for weight in weights)


def describe_classes(
    names: tuple[str, ...], counts: Ints, weights: str | tuple[float, ...], *, fold: str
) -> list[str]:
    """Note the training windows of each class; a list of weights must fit the classes."""
    if isinstance(weights, tuple) and len(weights) != len(names):
        raise UserError(
            f"train.class_weights has {len(weights)} weights, but there are {len(names)} classes: "
            f"{', '.join(names[:20])}",
            setting="train.class_weights",
        )
    largest = np.argsort(-counts, kind="stable")[:MAX_NAMED]
    listed = ", ".join(f"{names[i]} {counts[i]:,}" for i in largest)
    more = f" and {len(names) - len(largest)} more" if len(names) > len(largest) else ""
    unseen = [name for name, count in zip(names, counts, strict=True) if not count]
    notes = [f"classes (training windows{fold}): {listed}{more}"]
    if unseen:
        notes.append(f"no training window{fold} has the class {', '.join(unseen[:MAX_NAMED])}")
    return notes


SETTING = "data.labels"


class LabelIntervals(NamedTuple):
    """Labelled ranges of rows, in the order of the table of labels."""

    first: Ints
    """First row of each interval among all series' rows"""
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
    refuse_too_few(names, data.labels)
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
    codes, texts = read_labels(labels, LABEL, SETTING)
    if (codes == UNKNOWN).any():
        row = int(np.flatnonzero(codes == UNKNOWN)[0])
        raise UserError(f"{labels.locate_cell(row, LABEL)}: is empty; take the row out")
    names = known or sort_classes(texts)
    numbers = number_labels(codes, texts, names, labels, LABEL)
    intervals = LabelIntervals(*_find_rows(labels, raw, data), numbers)
    _refuse_conflicts(labels, intervals, names)
    column = np.full(raw.index.num_rows, UNKNOWN, dtype=np.float64)
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
        intervals = np.flatnonzero(owners == owner)
        begin, end = int(index.offsets[owner]), int(index.offsets[owner + 1])
        rows = np.arange(begin, end)
        times: Times = (
            raw.time[begin:end] if raw.time is not None else index.number_rows(rows, owner)
        )
        outside = intervals[(starts[intervals] < times[0]) | (ends[intervals] > times[-1])]
        if len(outside):
            _refuse_outside(labels, int(outside[0]), index.series_names[owner], times, raw)
        first[intervals] = begin + np.searchsorted(times, starts[intervals], side="left")
        last[intervals] = begin + np.searchsorted(times, ends[intervals], side="right") - 1
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
            available = ", ".join(index.series_names[:10])
            raise UserError(
                f'{where}: "{text}" may be {several}; write the whole name'
                if matches
                else f'{where}: there is no series "{text}"; there is {available}'
            )
        owners.append(matches[0])
    return np.array(owners, dtype=np.int64)[codes]


def _list_spellings(name: str) -> set[str]:
    """List the names by which a label may name a series: its name; for a file also without ending
    or folder, for a sheet also without the file."""
    path = PurePosixPath(name.removesuffix(".gz"))
    names = {name.strip()}
    if find_format(path) is not None:
        names |= {path.stem, str(path.with_suffix(""))}
    if find_format(path.parent) is not None:  # a sheet of a workbook
        names.add(path.name)
    return {normalize_value(spelling) for spelling in names}


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


def _refuse_outside(labels: DataTable, row: int, series: str, times: Times, raw: RawSeries) -> None:
    first, last = times[0], times[-1]
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
        first, last, class_number = (values[i] for values in intervals)
        owner_class = intervals.class_numbers[owner]
        if (first < reach or first == reach == last) and class_number != owner_class:
            raise UserError(
                f'{labels.locate_row(i)}: is "{names[class_number]}", but overlaps with '
                f'{labels.locate_row(owner)}, which is "{names[owner_class]}"; a row has one label'
            )
        if last > reach:
            reach, owner = int(last), i


def describe_unused(intervals: LabelIntervals, starts: Sequence[Ints], lead: int) -> list[str]:
    """Note how many labels have no window."""
    used = np.concatenate([set_starts + lead for set_starts in starts])
    without = int((~np.isin(intervals.last, used)).sum())
    why = "too few rows in one piece come before them, or their rows are in no set"
    note = f"{without:,} of {len(intervals.last):,} labels have no window: {why}"
    return [note] if without else []
