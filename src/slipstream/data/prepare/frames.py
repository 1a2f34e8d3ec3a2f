"""The rows of each series while steps change them, and the table that they become again."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from slipstream.config import Data
from slipstream.data.columns import read_numbers
from slipstream.data.series import (
    MICROSECONDS,
    Flags,
    Floats,
    Ints,
    Times,
    is_date,
    iter_ordered,
    list_rows,
)
from slipstream.data.table import DataTable

POSITION = "\0position"
"""A column that counts the rows of all series as they were before the first step"""


@dataclass(frozen=True)
class SeriesFrame:
    """The rows of one series, in time order. A column is NaN where a value is missing."""

    name: str
    rows: Ints | range
    """The rows of the file, in time order, before the first step"""
    first_position: int
    """The number of rows of all earlier series together, before the first step"""
    times: Times | None
    step: float | None
    """The usual step: seconds for timestamps, else in the time column's own unit"""
    columns: dict[str, Floats]
    origin: Ints | range
    """The position in `rows` that each row was made from, or the last one of several"""
    padding: int = 0
    """The number of rows that pad the series before its first row in the file"""
    skipped: int = 0
    """The number of rows that were cut off at the beginning, padding not counted"""
    ahead: int = 0
    """How many rows at the end are to be predicted, with nothing but what is known ahead"""
    num_merged: int = 0
    """How many rows of the file were merged into another one of the same time"""

    @property
    def num_rows(self) -> int:
        return len(self.origin)

    def write(self, columns: Mapping[str, Floats]) -> SeriesFrame:
        """Return the frame with some columns added or replaced."""
        return replace(self, columns=self.columns | dict(columns))

    def cut(self, begin: int, end: int) -> SeriesFrame:
        """Return the rows from `begin` to before `end`; a view."""
        return replace(
            self,
            times=None if self.times is None else self.times[begin:end],
            columns={name: values[begin:end] for name, values in self.columns.items()},
            origin=self.origin[begin:end],
            padding=max(self.padding - begin, 0),
            skipped=self.skipped + max(begin - self.padding, 0),
            ahead=max(self.ahead - (self.num_rows - end), 0),
        )

    def extend(self, rows: int) -> SeriesFrame:
        """Return the frame with further rows at its usual step, of which only times are known."""
        assert self.times is not None
        unit = MICROSECONDS if is_date(self.times) else 1
        times = self.times[-1] + np.arange(1, rows + 1) * ((self.step or 1.0) * unit)
        return replace(
            self,
            times=np.concatenate([self.times, times.astype(self.times.dtype)]),
            columns={
                name: np.concatenate([values, np.full(rows, np.nan)])
                for name, values in self.columns.items()
            },
            origin=np.concatenate([list_rows(self.origin), np.full(rows, self.origin[-1])]),
            ahead=self.ahead + rows,
        )

    def list_source_rows(self) -> Ints | range:
        """Return the row of the file from which each row was made."""
        if isinstance(self.rows, range) and isinstance(self.origin, range):
            return self.rows[self.origin.start : self.origin.stop]
        origin = list_rows(self.origin)
        rows: Ints = self.rows.start + origin if isinstance(self.rows, range) else self.rows[origin]
        return rows


def split_frames(
    table: DataTable, data: Data, columns: Mapping[str, str], first_position: int
) -> list[SeriesFrame]:
    """Return the frame of each series with these columns, read as numbers; `columns` maps each name
    to the setting that names it."""
    ordered = list(iter_ordered(table, data))
    numbers = {name: read_numbers(table, name, where) for name, where in columns.items()}
    frames = []
    for series in ordered:
        rows = series.rows
        key: Any = slice(rows.start, rows.stop) if isinstance(rows, range) else rows
        series_columns = {name: values[key] for name, values in numbers.items()}
        if series.repeated is not None:
            for name, values in series_columns.items():
                series.repeated.put_means(numbers[name], values)
        frame = SeriesFrame(
            name=series.name,
            rows=rows,
            first_position=first_position,
            times=series.time,
            step=series.step,
            columns=series_columns,
            origin=range(len(rows)),
            num_merged=series.num_merged,
        )
        frames.append(frame)
        first_position += len(rows)
    return frames


def build_table(
    source: DataTable,
    frames: Sequence[SeriesFrame],
    stored: Collection[str],
    labels: Mapping[str, tuple[str, ...]],
    time: str | None,
) -> DataTable:
    """Return the frames of a table as one table, series after series.

    `stored` columns are taken from the frames; others are read from the source when they are
    needed.
    """
    columns: dict[str, pa.ChunkedArray] = {}
    for name in stored:
        values = _concatenate([frame.columns.pop(name) for frame in frames])
        if name in labels:
            columns[name] = pa.chunked_array([to_classes(values, labels[name])])
        else:
            columns[name] = pa.chunked_array([pa.array(values)])
        del values  # before the next one is joined
    if time is not None:
        columns[time] = pa.chunked_array([_to_times([frame.times for frame in frames])])
    rows = _join_rows([frame.list_source_rows() for frame in frames])
    padded = None
    if any(frame.padding for frame in frames):
        padded = np.concatenate([np.arange(f.num_rows) < f.padding for f in frames])
    ahead = None
    if any(frame.ahead for frame in frames):
        ahead = np.concatenate([np.arange(f.num_rows) >= f.num_rows - f.ahead for f in frames])
    num_rows = sum(frame.num_rows for frame in frames)
    new = (name for name in columns if name not in source.column_set)
    return replace(
        source,
        column_names=(*source.column_names, *new),
        num_rows=num_rows,
        reader=PreparedReader(columns, source, rows),
        first_row=0,
        row_groups=(),
        source_rows=rows,
        padded=padded,
        skipped={frame.name: frame.skipped for frame in frames if frame.skipped},
        ahead=ahead,
    )


def add_positions(table: DataTable, frames: Sequence[SeriesFrame]) -> DataTable:
    """Return a table with one more column, hidden from the list of columns: the position of each
    row before the first step."""
    assert isinstance(table.reader, PreparedReader)
    positions = [frame.first_position + list_rows(frame.origin) for frame in frames]
    column = pa.chunked_array([_concatenate(positions).astype(np.float64)])
    reader = replace(table.reader, columns=table.reader.columns | {POSITION: column})
    return replace(table, reader=reader)


@dataclass(frozen=True)
class PreparedReader:
    """Reads columns that steps have made, and the others from the rows that they were made from."""

    columns: dict[str, pa.ChunkedArray]
    source: DataTable
    rows: Ints | None
    """The source's row of each row; None where they are all rows in order"""

    def get_type(self, name: str) -> pa.DataType:
        known = self.columns.get(name)
        return self.source.reader.get_type(name) if known is None else known.type

    def read(self, name: str, begin: int, end: int) -> pa.ChunkedArray:
        if name in self.columns:
            return self.columns[name].slice(begin, end - begin)
        whole = self.source.read_column(name)
        if self.rows is None:
            return whole.slice(begin, end - begin)
        return whole.take(pa.array(self.rows[begin:end]))


def mark_positions(positions: Floats, training: Flags, offsets: Ints) -> Flags:
    """Mark the rows before the first step that training rows were made from.

    `positions` are the positions of the rows after the last step. Rows between two consecutive
    training rows were made into the later one.
    """
    rows = positions.astype(np.int64)
    marks = np.zeros(int(rows.max()) + 1, dtype=bool)
    marks[rows[training]] = True
    follows = training[1:] & training[:-1] & (np.diff(rows) > 1)
    follows[offsets[1:-1] - 1] = False  # the last row of a series and the first of the next
    change = np.zeros(len(marks), dtype=np.int64)
    np.add.at(change, rows[:-1][follows] + 1, 1)
    np.add.at(change, rows[1:][follows], -1)
    return np.asarray(marks | (np.cumsum(change) > 0))


def _join_rows(parts: Sequence[Ints | range]) -> Ints | None:
    """Return the rows of all series; None where they are all rows from the first on, in order."""
    expected = 0
    for rows in parts:
        if not isinstance(rows, range) or rows.start != expected:
            return np.concatenate([list_rows(part) for part in parts])
        expected = rows.stop
    return None


def _concatenate(parts: list[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def to_classes(values: Floats, names: tuple[str, ...]) -> pa.DictionaryArray:
    """Return class numbers as the names of classes, null for NaN."""
    unknown = np.isnan(values)
    codes = pa.array(np.where(unknown, 0, values).astype(np.int8), mask=unknown)
    return pa.DictionaryArray.from_arrays(codes, list(names))


def _to_times(parts: Sequence[Times | None]) -> pa.Array:
    times = _concatenate([part for part in parts if part is not None])
    return pa.array(times).cast(pa.timestamp("us")) if is_date(times) else pa.array(times)
