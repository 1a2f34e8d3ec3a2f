"""The rows that training sees, in physical units, with the set of each row: `slipstream prepare`.

The functions that load the data for training make the rows, so that what a person checks is what a
model learns from. Tables that training would stream from disk come in batches.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from slipstream.base.errors import UserError
from slipstream.config import Config, Signature
from slipstream.data.columns import read_times
from slipstream.data.loading import (
    assign_predicted_rows,
    find_sets,
    load_series,
    read_source,
    should_stream,
)
from slipstream.data.predictions import ROW, SERIES, Column
from slipstream.data.prepare.chain import Source
from slipstream.data.series import Floats, Ints, SeriesIndex, Times
from slipstream.data.splits import SETS, UNUSED, SplitAssignment
from slipstream.data.table import check_table_path, open_table_writer

SPLIT = "split"
"""The column with the set of a row; of a walk-forward split split_1, split_2 ... by fold"""
SET_NAMES = (*SETS, "unused")


class SplitColumn(NamedTuple):
    """A column that says which set each row is in."""

    name: str
    fold: str
    """The label of the walk-forward fold: its test block; empty for a single split"""
    assignment: SplitAssignment

    def count_rows(self) -> dict[str, int]:
        """Return the rows of each set."""
        return {name: self.assignment.count_rows(code) for code, name in enumerate(SET_NAMES)}

    def read(self, begin: int, end: int) -> pa.DictionaryArray:
        """Return the sets of the rows from `begin` to before `end`."""
        codes = np.full(end - begin, UNUSED, dtype=np.int8)
        for code in range(len(SETS)):
            codes[self.assignment.mask(code, begin, end)] = code
        return pa.DictionaryArray.from_arrays(codes, list(SET_NAMES))


@dataclass(frozen=True)
class PreparedRows:
    """All prepared rows of a config."""

    index: SeriesIndex
    splits: tuple[SplitColumn, ...]
    batches: Iterator[pa.Table]
    """The rows, in order; one table where they are in memory"""
    is_streamed: bool
    notes: tuple[str, ...]

    def collect(self) -> pa.Table:
        """Return all rows as one table."""
        return pa.concat_tables(self.batches)

    def summarize(self) -> dict[str, Any]:
        """Return the numbers of rows, series and rows by set."""
        return {
            "rows": self.index.num_rows,
            "series": len(self.index.series_names),
            "splits": [
                {"column": split.name, "fold": split.fold, "rows": split.count_rows()}
                for split in self.splits
            ],
            "notes": list(self.notes),
        }


def load_prepared_rows(
    config: Config, table: Any = None, *, in_memory: bool = False
) -> PreparedRows:
    """Load the rows that a config trains on, from its files or from a table instead of them; those
    that training would stream come in batches, unless all are wanted `in_memory`."""
    source = read_source(config, table, in_memory=in_memory)
    if not in_memory and should_stream(config, source.tables, source.roles):
        return _open_stream(config, source)
    loaded = load_series(config, source)
    raw, signature, data, _ = loaded
    sets = find_sets(loaded)
    folds = [(fold.label, assign_predicted_rows(loaded, fold)) for fold in sets.folds]
    columns = {name: raw.read_column(name) for name in _list_columns(signature)}
    names = _name_columns(signature, data.time_column, len(folds), folds=sets.is_walk_forward)
    splits = _make_splits(names, folds)
    builder = _TableBuilder(signature, raw.index, raw.static, names, splits)
    whole = builder.build(0, raw.index.num_rows, raw.time, columns)
    notes = (*source.notes, *sets.notes, *raw.notes)
    return PreparedRows(raw.index, splits, iter([whole]), is_streamed=False, notes=notes)


def _open_stream(config: Config, source: Source) -> PreparedRows:
    """Return the rows of a table that stays on disk, in batches."""
    from slipstream.data.dataset import open_stream  # imports torch
    from slipstream.data.stream import iter_columns, iter_slices

    opened = open_stream(config, source)
    data, signature, index = opened.data, opened.signature, opened.index
    names = _name_columns(signature, data.time_column, 1, folds=False)
    splits = _make_splits(names, [("", opened.assignment)])
    builder = _TableBuilder(signature, index, opened.static, names, splits)

    def read() -> Iterator[pa.Table]:
        for rows in iter_slices(opened.table):
            begin, end = rows.first_row, rows.first_row + rows.num_rows
            time = None
            if data.time_column is not None:
                time = read_times(rows, data.time_column, data.time_format)
            padded = index.mask_padding(begin, end)
            columns = {name: values for name, values, _ in iter_columns(rows, signature, padded)}
            yield builder.build(begin, end, time, columns)

    return PreparedRows(index, splits, read(), is_streamed=True, notes=tuple(source.notes))


class _Names(NamedTuple):
    """The names of columns that are not the data's own, or of the time."""

    series: str
    row: str
    time: str | None
    splits: tuple[str, ...]


def _list_columns(signature: Signature) -> tuple[str, ...]:
    """Return the inputs and targets, each once."""
    return tuple(dict.fromkeys((*signature.inputs, *signature.targets)))


def _name_columns(signature: Signature, time: str | None, num_folds: int, *, folds: bool) -> _Names:
    """Return names that no input, target or static column has."""
    taken = {*_list_columns(signature), *signature.static}

    def choose(name: str) -> str:
        while name in taken:
            name += "_"
        taken.add(name)
        return name

    splits = [f"{SPLIT}_{number}" for number in range(1, num_folds + 1)] if folds else [SPLIT]
    return _Names(
        time=None if time is None else choose(time),
        series=choose(SERIES),
        row=choose(ROW),
        splits=tuple(map(choose, splits)),
    )


def _make_splits(
    names: _Names, folds: Sequence[tuple[str, SplitAssignment]]
) -> tuple[SplitColumn, ...]:
    pairs = zip(names.splits, folds, strict=True)
    return tuple(SplitColumn(name, label, assignment) for name, (label, assignment) in pairs)


@dataclass(frozen=True)
class _TableBuilder:
    """Makes tables of some rows among all rows of all series."""

    signature: Signature
    index: SeriesIndex
    static: Floats
    names: _Names
    splits: tuple[SplitColumn, ...]

    def build(
        self, begin: int, end: int, time: Times | None, columns: dict[str, Floats]
    ) -> pa.Table:
        """Return the rows from `begin` to before `end`, of which these are times and columns."""
        index, signature = self.index, self.signature
        rows = np.arange(begin, end)
        owners: Ints = np.searchsorted(index.offsets, rows, side="right") - 1
        names = list(index.series_names)
        table: list[Column] = [
            (self.names.series, pa.DictionaryArray.from_arrays(owners.astype(np.int32), names)),
            (self.names.row, index.number_rows(rows, owners)),
        ]
        if time is not None and self.names.time is not None:
            times = pa.array(time)
            table.append(
                (self.names.time, times.cast("timestamp[us]") if index.has_dates else times)
            )
        for name, values in columns.items():
            table.append((name, self._format(name, values)))
        for place, name in enumerate(signature.static):
            table.append((name, pa.array(self.static[owners, place], from_pandas=True)))
        table += [(split.name, split.read(begin, end)) for split in self.splits]
        return pa.table(dict(table))

    def _format(self, name: str, values: Floats) -> pa.Array:
        """Return the values of a column, null where they are missing; of classes, their names."""
        classes = self.signature.classes
        if not classes or name not in self.signature.targets:
            return pa.array(values, from_pandas=True)
        known = ~np.isnan(values) & (values >= 0)
        numbers = np.where(known, values, 0).astype(np.int32)
        return pa.DictionaryArray.from_arrays(pa.array(numbers, mask=~known), list(classes))


def write_prepared_rows(rows: PreparedRows, path: Path) -> pa.Table:
    """Write the rows as CSV, Parquet or Arrow, by the file's ending, batch by batch; return them,
    or of streamed rows, which may be larger than memory, their columns without rows."""
    check_table_path(path, "prepared rows")
    written: list[pa.Table] = []
    try:
        with open_table_writer(path) as write:
            for batch in rows.batches:
                write(batch)
                if not (rows.is_streamed and written):
                    written.append(batch.slice(0, 0) if rows.is_streamed else batch)
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror or error})") from None
    return pa.concat_tables(written)
