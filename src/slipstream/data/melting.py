"""Tables with a series per row or per column, made long: a row per value, series after series.

A long table has the columns `series` (or those of `data.id`), `value`, and the other columns of
the file, whose cells are repeated over the rows of a series. All that follows reads it as any
other long table.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from slipstream.base.errors import Setting, UserError
from slipstream.base.text import format_count
from slipstream.config import SERIES_COLUMN, VALUE_COLUMN, Data
from slipstream.data.columns import (
    is_numeric,
    is_text,
    read_column,
    read_numbers,
    require_column,
)
from slipstream.data.formats.archive import ARFF, DIMENSION, TS
from slipstream.data.table import DataTable, MeltedRows, MemoryReader, release_memory

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

SETTING = "data.values"


def melt_tables(tables: Sequence[DataTable], data: Data) -> list[DataTable]:
    """Return tables of the layout that `data.layout` names as long ones."""
    if data.layout == "long":
        _refuse_cases(tables)
        return list(tables)
    is_several = len(tables) > 1
    return [
        table
        if _is_long(table)
        else _melt_columns(table, data)
        if data.layout == "columns"
        else _melt_rows(table, data, f"{table.name}/" if is_several else "")
        for table in tables
    ]


def _refuse_cases(tables: Sequence[DataTable]) -> None:
    """Refuse files that have a series per row by their format, which is not the configured one."""
    for table in tables:
        if any(file.format in (TS, ARFF) for file in table.files):
            raise UserError(
                f"{table.name}: has a series per row; set " + Setting({"data.layout": "wide"}),
                setting="data.layout",
            )


def _is_long(table: DataTable) -> bool:
    """Return whether a table has a row per value already, as rows to predict from may have."""
    names = (VALUE_COLUMN, f"{DIMENSION}1")
    return any(
        name in table.column_set and not _is_list(table.reader.get_type(name)) for name in names
    )


def _is_list(kind: pa.DataType) -> bool:
    return bool(
        pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    )


def find_values(table: DataTable, data: Data) -> tuple[str, ...]:
    """Return the columns that hold the values of series, in their order."""
    if data.values is not None:
        return select_columns(table, data.values)
    reserved = {
        *data.time_columns,
        data.time_column,
        data.split.by,
        table.file_column,
        *data.ids,
        *data.where,
        *data.ignore,
        *data.static,
        *data.future,
    }
    if data.layout == "wide":
        reserved |= set(data.targets or ())
    reserved |= {name for file in table.files for name in file.scalars}
    free = [name for name in table.column_names if name not in reserved]
    lists = [name for name in free if _is_list(table.reader.get_type(name))]
    values = lists if data.layout == "wide" and lists else []
    values = values or [name for name in free if is_numeric(table, name)]
    if not values:
        raise UserError(
            f"{table.name}: has no numeric column without another role that could hold the values "
            f"of series; set {SETTING} (it has {', '.join(table.column_names[:20])})",
            setting=SETTING,
        )
    return tuple(values)


def select_columns(table: DataTable, values: str | Sequence[str]) -> tuple[str, ...]:
    """Return the columns that `data.values` names: a list, or a range from one to another."""
    if not isinstance(values, str):
        for name in values:
            require_column(table, name, SETTING)
        return tuple(values)
    names = table.column_names
    if values in table.column_set:
        return (values,)
    for place in (i for i, letter in enumerate(values) if letter == ":"):  # a name may have colons
        first, last = values[:place].strip(), values[place + 1 :].strip()
        begin = _find_place(names, first) if first else 0
        end = _find_place(names, last) if last else len(names) - 1
        if begin is not None and end is not None:
            if begin > end:
                raise UserError(
                    f'{table.name}: {SETTING} = "{values}" ends before it begins; columns are in '
                    f"the order {', '.join(names[:20])}",
                    setting=SETTING,
                )
            return names[begin : end + 1]
    known = f"{', '.join(names[:8])}{' ...' if len(names) > 8 else ''}"
    raise UserError(
        f'{table.name}: {SETTING} = "{values}" is no range of its {len(names):,} columns '
        f'({known}); write it by name or by number, as in "{names[-1]}:" or "2:"',
        setting=SETTING,
    )


def _find_place(names: Sequence[str], text: str) -> int | None:
    """Return the place of a column by its name or, from 1 on, by its number."""
    if text in names:
        return names.index(text)
    number = int(text) if text.isdecimal() else 0
    return number - 1 if 1 <= number <= len(names) else None


class _RowValues(NamedTuple):
    """The values of a table with a series per row, row after row."""

    columns: dict[str, Floats]
    lengths: Ints
    """How many values each row has, without the empty cells at its end"""


def _melt_rows(table: DataTable, data: Data, prefix: str) -> DataTable:
    """Return a table with a series per row as a long one; series without an id are named by the
    number of their row, after `prefix`."""
    values = find_values(table, data)
    if all(_is_list(table.reader.get_type(name)) for name in values):
        rows = _read_lists(table, values)
    else:
        rows = _read_cells(table, values)
    if not rows.lengths.any():
        raise UserError(f"{table.name}: its rows hold no values ({SETTING})", setting=SETTING)
    owners = np.repeat(np.arange(table.num_rows, dtype=np.int32), rows.lengths)
    columns: dict[str, pa.ChunkedArray] = {}
    if SERIES_COLUMN in data.ids and SERIES_COLUMN not in table.column_set:
        numbers = pa.array(np.arange(1, table.num_rows + 1)).cast(pa.string())
        names = pc.binary_join_element_wise(prefix, numbers, "") if prefix else numbers
        columns[SERIES_COLUMN] = _repeat(names, owners)
    used = set(values)
    for name in table.column_names:
        if name not in used:
            cells = read_column(table, name, "data.layout").combine_chunks()
            if name in data.ids:
                _refuse_repeated(table, name, cells, data)
            columns[name] = _repeat(cells, owners)
    _refuse_clashes(table, columns, rows.columns)
    scalars = tuple(columns)
    columns |= {name: pa.chunked_array([column]) for name, column in rows.columns.items()}
    shortest, longest = rows.lengths.min(), rows.lengths.max()
    span = f"{longest:,}" if shortest == longest else f"{shortest:,} to {longest:,}"
    note = f"a series per row: {table.num_rows:,} series of {span} values"
    first = np.cumsum(rows.lengths) - rows.lengths
    runs = np.stack([first, np.arange(table.num_rows)], axis=1)
    return _make_long(table, columns, note, scalars, MeltedRows(runs, is_wide=True))


def _read_cells(table: DataTable, names: Sequence[str]) -> _RowValues:
    """Read values that lie side by side; empty cells at the end of a row end the series."""
    matrix = np.empty((table.num_rows, len(names)))
    for place, name in enumerate(names):
        matrix[:, place] = read_numbers(table, name, SETTING)
    release_memory()
    known = ~np.isnan(matrix)
    if known[:, -1].all():
        lengths = np.full(len(matrix), len(names), dtype=np.int64)
        return _RowValues({VALUE_COLUMN: matrix.reshape(-1)}, lengths)
    lengths = np.where(known.any(axis=1), len(names) - known[:, ::-1].argmax(axis=1), 0)
    inside = np.arange(len(names)) < lengths[:, None]
    return _RowValues({VALUE_COLUMN: matrix[inside]}, lengths)


def _read_lists(table: DataTable, names: Sequence[str]) -> _RowValues:
    """Read values that are a list in each cell; several lists are the columns of a series."""
    parts: dict[str, tuple[Floats, Ints]] = {}
    for name in names:
        cells = table.read_column(name).combine_chunks()
        lengths = pc.list_value_length(cells).fill_null(0).to_numpy(zero_copy_only=False)
        try:
            numbers = pc.list_flatten(cells).cast(pa.float64(), safe=False)
        except pa.ArrowException:
            raise UserError(
                f'{table.name}: column "{name}" ({SETTING}) holds {cells.type}, not lists of '
                "numbers"
            ) from None
        flat = np.asarray(numbers.to_numpy(zero_copy_only=False), dtype=np.float64)
        parts[name] = flat, np.asarray(lengths, dtype=np.int64)
    longest: Ints = np.max([lengths for _, lengths in parts.values()], axis=0)
    columns = {}
    for name, (flat, lengths) in parts.items():
        if not np.array_equal(lengths, longest):  # a column that ends earlier is missing there
            first = np.cumsum(longest) - longest
            place = np.arange(len(flat)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
            padded = np.full(int(longest.sum()), np.nan)
            padded[np.repeat(first, lengths) + place] = flat
            flat = padded
        columns[name if len(parts) > 1 else VALUE_COLUMN] = flat
    return _cut_ends(_RowValues(columns, longest))


def _cut_ends(rows: _RowValues) -> _RowValues:
    """Return the rows without the missing values at their ends, as archives pad short series."""
    missing = np.logical_and.reduce([np.isnan(column) for column in rows.columns.values()])
    ends = np.cumsum(rows.lengths)
    if not missing[ends[rows.lengths > 0] - 1].any():
        return rows
    last = np.maximum.accumulate(np.where(missing, -1, np.arange(len(missing))))
    last = np.append(last, -1)[ends - 1]  # of a row without values, any
    lengths = np.clip(last + 1 - (ends - rows.lengths), 0, rows.lengths)
    place = np.arange(len(missing)) - np.repeat(ends - rows.lengths, rows.lengths)
    inside = place < np.repeat(lengths, rows.lengths)
    return _RowValues({name: column[inside] for name, column in rows.columns.items()}, lengths)


def _melt_columns(table: DataTable, data: Data) -> DataTable:
    """Return a table with a series per column as a long one: column after column, each from its
    first value to its last."""
    values = find_values(table, data)
    shared = [name for name in table.column_names if name not in set(values)]
    # rows of another series in between, or rows ahead of which only data.future is known, stay
    is_whole = bool(data.future) or len(data.ids) > 1
    spans, parts, names = [], [], []
    for name in values:
        column = read_numbers(table, name, SETTING)
        known = np.flatnonzero(~np.isnan(column))
        if not len(known):
            continue
        begin, end = (0, len(column)) if is_whole else (int(known[0]), int(known[-1]) + 1)
        spans.append((begin, end))
        parts.append(column[begin:end])
        names.append(name)
    if not names:
        raise UserError(f"{table.name}: its columns hold no values ({SETTING})", setting=SETTING)
    lengths = [end - begin for begin, end in spans]
    columns = {
        SERIES_COLUMN: _repeat(pa.array(names), np.repeat(np.arange(len(names)), lengths)),
        VALUE_COLUMN: pa.chunked_array([np.concatenate(parts)]),
    }
    _refuse_clashes(table, dict.fromkeys(shared), columns)
    for name in shared:
        column = table.read_column(name)
        slices = [column.slice(begin, end - begin).chunks for begin, end in spans]
        chunks = [chunk for chunks in slices for chunk in chunks]
        columns[name] = pa.chunked_array(chunks, type=column.type)
    note = f"a series per column: {len(names):,} series"
    if len(names) < len(values):
        note += f"; {format_count(len(values) - len(names), 'column')} without values left out"
    first = np.cumsum(lengths) - lengths
    runs = np.stack([first, np.array([begin for begin, _ in spans])], axis=1)
    return _make_long(table, columns, note, (), MeltedRows(runs, is_wide=False))


def _repeat(values: Any, owners: npt.NDArray[Any]) -> pa.ChunkedArray:
    """Return one value per row; text as a dictionary, which is small however often it repeats."""
    if is_text(values.type):
        indices = pa.array(owners.astype(np.int32, copy=False))
        return pa.chunked_array([pa.DictionaryArray.from_arrays(indices, values.cast(pa.string()))])
    return pa.chunked_array([values.take(pa.array(owners))])


def _refuse_repeated(table: DataTable, name: str, cells: Any, data: Data) -> None:
    """Refuse an id that two rows of a file have, each of which is a series."""
    if len(data.ids) > 1 or pc.count_distinct(cells, mode="all").as_py() == len(cells):
        return
    encoded = cells.dictionary_encode().indices.fill_null(-1).to_numpy(zero_copy_only=False)
    order = np.argsort(encoded, kind="stable")
    second = int(order[1:][np.diff(encoded[order]) == 0].min())
    first = int(np.flatnonzero(encoded == encoded[second])[0])
    raise UserError(
        f'{table.locate_cell(second, name)}: "{cells[second]}" is the name of the series of '
        f'{table.locate_row(first)}, too; with data.layout = "wide" every row is a series: name '
        "the column whose values differ (data.id), or none, and rows are numbered",
        setting="data.id",
    )


def _refuse_clashes(table: DataTable, columns: Any, values: Any) -> None:
    for name in values:
        if name in columns:
            raise UserError(
                f'{table.name}: has a column "{name}", the name of the column that its values get; '
                "rename it"
            )


def _make_long(
    table: DataTable,
    columns: dict[str, pa.ChunkedArray],
    note: str,
    scalars: tuple[str, ...],
    melted: MeltedRows,
) -> DataTable:
    """Return the long table of one file; `scalars` are no inputs by default."""
    num_rows = len(next(iter(columns.values())))
    (file,) = table.files
    file = file._replace(
        num_rows=num_rows,
        notes=(*file.notes, note),
        scalars=(*file.scalars, *scalars),
        melted=melted,
    )
    return DataTable(table.name, tuple(columns), num_rows, MemoryReader(columns), (file,))
