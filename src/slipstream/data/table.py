"""A table of named columns, read from files or from memory (pandas, polars, duckdb, pyarrow, dict).

Columns are read when they are needed, whole or in part. Errors name the file, the line and the
column.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib.abc import MetaPathFinder
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from slipstream import runs
from slipstream.base.errors import EmptyFileError, UserError
from slipstream.base.storage import AnyPath, group_by_content
from slipstream.data import layout

FILE_COLUMN = "file"
"""The name of the column of file names in a concatenated table, unless another column has it"""
MIXED = "mixed"
"""The decimal mark of a file in which some numbers have a comma and others a point"""
MAX_NOTES = 5
TIME, INDEX = "time", "index"
"""Names for an unnamed index that holds dates; the first free one is used"""
ACCEPTED = (
    "pass a pandas, polars, duckdb or pyarrow table, a dict of columns, or a numpy array with "
    "columns=[...]"
)


class ColumnReader(Protocol):
    """Reads the columns of one table."""

    def get_type(self, name: str) -> pa.DataType: ...

    def read(self, name: str, begin: int, end: int) -> pa.ChunkedArray: ...


@dataclass(frozen=True)
class MemoryReader:
    """Columns in memory. Text is replaced by numbers in place, so that both are never held."""

    columns: dict[str, pa.ChunkedArray]

    def get_type(self, name: str) -> pa.DataType:
        return self.columns[name].type

    def read(self, name: str, begin: int, end: int) -> pa.ChunkedArray:
        return self.columns[name].slice(begin, end - begin)


class MeltedRows(NamedTuple):
    """Where the rows of a long table come from, which was made of a file of another layout."""

    runs: npt.NDArray[np.int64]
    """[runs, 2]: a row of the long table, and the row of the file that the run begins with"""
    is_wide: bool
    """Whether all rows of a run are values of one row of the file"""

    def find_row(self, row: int) -> tuple[int, int]:
        """Return the row of the file, and which of its values."""
        run = int(np.searchsorted(self.runs[:, 0], row, side="right")) - 1
        place = row - int(self.runs[run, 0])
        return int(self.runs[run, 1]) + (0 if self.is_wide else place), place


class SourceFile(NamedTuple):
    """A file, or a table in memory, whose rows a table holds."""

    name: str
    """The name in messages and of the series: the file's name below `data.path`"""
    num_rows: int
    num_columns: int
    path: AnyPath | None = None
    format: str = ""
    """The format with its details, in words"""
    delimiter: str | None = None
    """The delimiter of a CSV file"""
    header_lines: int = 0
    """Lines or rows of the file above the first row of values; 0 where rows are counted"""
    part: str = ""
    """The sheet's name, where several sheets of a workbook are read"""
    units: Mapping[str, str] = {}
    """Units by column, where the file has them apart from the names"""
    scalars: tuple[str, ...] = ()
    """Columns that repeat a single value of the file; they are no inputs by default"""
    notes: tuple[str, ...] = ()
    """What was left out or read in a way that the user should know"""
    melted: MeltedRows | None = None
    """Where rows come from, if the file has a series per row or per column"""

    def summarize(self) -> dict[str, Any]:
        """Return a summary of the file, for display and for metrics.json."""
        return {
            "name": self.name,
            "format": self.format or "table in memory",
            "rows": self.num_rows,
            "columns": self.num_columns,
            "notes": list(self.notes),
        }

    def locate_row(self, row: int) -> str:
        if self.melted is not None:
            row, place = self.melted.find_row(row)
            where = self._replace(melted=None).locate_row(row)
            return f"{where}, value {place + 1}" if self.melted.is_wide else where
        if isinstance(self.path, Path) and self.delimiter is not None:
            line = layout.find_line(
                self.path, self.delimiter, self.num_columns, self.header_lines, row
            )
            if line is not None:
                return f"{self.name}, line {line}"
        return f"{self.name}, row {self.header_lines + row + 1}"


@dataclass(frozen=True)
class DataTable:
    """The columns of one table, or of some of its rows, and the files that they come from."""

    name: str
    column_names: tuple[str, ...]
    num_rows: int
    reader: ColumnReader
    files: tuple[SourceFile, ...]
    first_row: int = 0
    """The position of the first row among the rows of the files"""
    delimiter: str | None = None
    """The delimiter of a CSV file, whose columns are text at first"""
    decimal: str | None = None
    """The decimal mark of numbers that are text, where it is configured or certain"""
    row_groups: tuple[int, ...] = ()
    """First rows of the groups that a file on disk is best read by; empty in memory"""
    file_column: str | None = None
    """The column with the file of each row, in a concatenated table"""
    source_rows: npt.NDArray[np.int64] | None = None
    """The row of the files that each row was made from, where steps of `data.prepare` made it"""
    padded: npt.NDArray[np.bool_] | None = None
    """Marks the rows that pad a series before its first row; None where there are none"""
    look_ahead: int = 0
    """The number of later rows that a value may depend on, because of a step of `data.prepare`"""
    skipped: Mapping[str, int] = field(default_factory=dict)
    """The number of first rows that steps of `data.prepare` have cut off, by series"""
    ahead: npt.NDArray[np.bool_] | None = None
    """Marks the rows at the end of each series that are to be predicted from columns known ahead
    only; None where there are none"""

    @cached_property
    def column_set(self) -> frozenset[str]:
        """The names of the columns as a set: with thousands of columns, a lookup in the list is
        slow."""
        return frozenset(self.column_names)

    def read_column(self, name: str) -> pa.ChunkedArray:
        return self.reader.read(name, self.first_row, self.first_row + self.num_rows)

    def slice_rows(self, begin: int, end: int) -> DataTable:
        """Return the rows from `begin` to before `end`."""
        return replace(self, first_row=self.first_row + begin, num_rows=end - begin)

    def find_file(self, row: int) -> tuple[SourceFile, int]:
        """Return the file that holds a row, and the row's number within the file."""
        row += self.first_row
        if self.source_rows is not None:
            row = int(self.source_rows[row])
        for file in self.files[:-1]:
            if row < file.num_rows:
                return file, row
            row -= file.num_rows
        return self.files[-1], row

    def locate_row(self, row: int) -> str:
        """Return the file and the line of a row, for messages."""
        file, row = self.find_file(row)
        return file.locate_row(row)

    def find_cell(self, row: int, pattern: str) -> str | None:
        """Return the first cell that matches a pattern, in the text file that holds a row, for
        messages."""
        file, _ = self.find_file(row)
        if not isinstance(file.path, Path) or file.delimiter is None:
            return None
        for line, _, cells in layout.iter_records(file.path, file.delimiter):
            for name, cell in zip(self.column_names, cells, strict=False):
                if line > file.header_lines and re.match(pattern, cell.strip()):
                    return f'"{cell.strip()}" in line {line}, column "{name}"'
        return None

    def locate_cell(self, row: int, column: str) -> str:
        return f'{self.locate_row(row)}, column "{column}"'


def make_table(
    reader: ColumnReader, file: SourceFile, names: tuple[str, ...], row_groups: tuple[int, ...] = ()
) -> DataTable:
    """Return the table of one file; columns of one name and a table without rows are refused."""
    for name, count in Counter(names).items():
        if count > 1:
            raise UserError(f'{file.name}: {count} columns are named "{name}"; rename them')
    if not file.num_rows:
        raise EmptyFileError(f"{file.name}: has no rows below the header")
    table = DataTable(file.name, names, file.num_rows, reader, (file,))
    return replace(table, delimiter=file.delimiter, row_groups=row_groups)


def read_memory(table: Any, *, decimal: str | None = None, time: str | None = None) -> DataTable:
    """Take over a table in memory; `time` is the column that `data.time` names."""
    return replace(wrap_table(to_arrow(table, time=time), "data"), decimal=decimal)


def wrap_table(table: pa.Table, name: str, **details: Any) -> DataTable:
    """Return an Arrow table as a `DataTable`; `details` describe the file that it comes from."""
    names = tuple(table.column_names)
    source = SourceFile(name, table.num_rows, len(names), **details)
    return make_table(MemoryReader(dict(zip(names, table.columns, strict=True))), source, names)


WRITTEN = (".csv", ".parquet", ".arrow")
"""The endings of tables that are written"""


def check_table_path(path: Path, what: str) -> None:
    """Refuse a file to write a table to, whose rows are `what`, before anything is computed."""
    if path.suffix.lower() not in WRITTEN:
        raise UserError(f"{path}: {what} are written as .csv, .parquet or .arrow")
    if path.is_dir():  # it would be replaced, with all that is in it
        raise UserError(f"{path}: is a folder; name a file")
    if not path.parent.is_dir():
        raise UserError(f"{path}: there is no folder {path.parent}; create it first")


@contextmanager
def open_table_writer(path: Path) -> Iterator[Callable[[pa.Table], None]]:
    """Give a function that takes tables of one schema and writes them as CSV, Parquet or Arrow, by
    the file's ending; the file appears when all are written."""
    with runs.replace_atomically(path) as temporary, ExitStack() as stack:
        write_rows: Callable[[pa.Table], None] | None = None

        def write(table: pa.Table) -> None:
            nonlocal write_rows
            table = _drop_dictionaries(table) if path.suffix.lower() == ".csv" else table
            if write_rows is None:
                write_rows = stack.enter_context(_open_writer(path, temporary, table)).write_table
            write_rows(table)

        yield write


def _open_writer(path: Path, temporary: Path, table: pa.Table) -> Any:
    """Return a writer for tables like this one, which closes the file where it is left."""
    schema = table.schema
    match path.suffix.lower():
        case ".csv":
            from pyarrow.csv import CSVWriter

            return CSVWriter(temporary, schema)
        case ".arrow":
            return pa.ipc.new_file(temporary, schema)
    from pyarrow.parquet import ParquetWriter

    repeating = [name for name in schema.names if _repeats_values(table.column(name))]
    return ParquetWriter(temporary, schema, use_dictionary=repeating)


def _repeats_values(column: pa.ChunkedArray) -> bool:
    """Return whether a dictionary of a column's values is likely to pay. Of numbers that all
    differ, building it takes three quarters of the time of writing, and it makes files larger."""
    if not (pa.types.is_floating(column.type) or pa.types.is_integer(column.type)):
        return True
    return 2 * len(column.unique()) <= len(column)


def _drop_dictionaries(table: pa.Table) -> pa.Table:
    """Return a table with texts themselves instead of numbers in lists of texts."""
    for place, column in enumerate(table.schema):
        if pa.types.is_dictionary(column.type):
            values = table.column(place).cast(column.type.value_type)
            table = table.set_column(place, column.name, values)
    return table


def summarize_error(error: BaseException) -> str:
    """Return the first line of an error's text; Arrow's errors have several lines."""
    return str(error).strip().split("\n", 1)[0]


def release_memory() -> None:
    """Make Arrow return the unused memory of its pool to the system."""
    pa.default_memory_pool().release_unused()


@dataclass(frozen=True)
class _ConcatenatedReader:
    """Reads the tables that a range of rows lies in, and no other."""

    tables: tuple[DataTable, ...]
    file_column: str

    def get_type(self, name: str) -> pa.DataType:
        if name == self.file_column:
            return pa.string()
        types = [table.reader.get_type(name) for table in self.tables]
        if all(kind == types[0] for kind in types):
            return types[0]
        return self.read(name, 0, sum(table.num_rows for table in self.tables)).type

    def read(self, name: str, begin: int, end: int) -> pa.ChunkedArray:
        parts, first = [], 0
        for table in self.tables:
            low, high = max(begin - first, 0), min(end - first, table.num_rows)
            if low < high:
                if name == self.file_column:
                    column = _repeat(table.name, high - low).cast(pa.string())
                else:
                    column = table.slice_rows(low, high).read_column(name)
                parts.append(column)
            first += table.num_rows
        try:
            return _concatenate_columns(_to_one_type(parts))
        except pa.ArrowException as error:
            text = summarize_error(error)
            raise UserError(
                f'the files do not make one long table: column "{name}": {text}'
            ) from None


def _concatenate_columns(parts: Sequence[pa.ChunkedArray]) -> pa.ChunkedArray:
    tables = [pa.table({"column": part}) for part in parts]
    return pa.concat_tables(tables, promote_options="permissive").column("column")


def _to_one_type(parts: Sequence[pa.ChunkedArray]) -> list[pa.ChunkedArray]:
    """Return a column of several files in one type: numbers where text can be converted, else
    text."""
    if len({pa.types.is_string(part.type) for part in parts}) < 2:
        return list(parts)
    plain = [
        part.cast(pa.string()) if pa.types.is_dictionary(part.type) else part for part in parts
    ]
    typed = next((part.type for part in plain if part.type != pa.string()), pa.string())
    try:
        return [part.cast(typed) if part.type == pa.string() else part for part in plain]
    except pa.ArrowException:
        return [part.cast(pa.string()) for part in plain]


def _concatenate_readers(tables: Sequence[DataTable], file_column: str) -> ColumnReader:
    readers = [table.reader for table in tables]
    columns = [reader.columns for reader in readers if isinstance(reader, MemoryReader)]
    types = [
        {name: values.type for name, values in reader_columns.items()} for reader_columns in columns
    ]
    if len(columns) < len(readers) or any(reader_types != types[0] for reader_types in types):
        return _ConcatenatedReader(tuple(tables), file_column)
    joined = {
        name: pa.chunked_array(
            [chunk for reader_columns in columns for chunk in reader_columns[name].chunks]
        )
        for name in tables[0].column_names
    }
    files = [_repeat(table.name, table.num_rows) for table in tables]
    return MemoryReader(joined | {file_column: pa.chunked_array(files)})


def _repeat(value: str, count: int) -> pa.DictionaryArray:
    return pa.DictionaryArray.from_arrays(np.zeros(count, dtype=np.int32), [value])


def concatenate_tables(tables: Sequence[DataTable]) -> DataTable:
    """Return one long table, with one more column: the name of each row's file."""
    names = [table.name for table in tables]
    expected = set(tables[0].column_names)
    for table in tables:
        differing = expected.symmetric_difference(table.column_names)
        if differing:
            raise UserError(
                f"{table.name} and {names[0]} make one long table (data.id), but only one of them "
                f'has the column "{sorted(differing)[0]}"'
            )
    first_rows = np.cumsum([0, *(table.num_rows for table in tables)]).tolist()
    marks = {table.decimal for table in tables} - {None}
    file_column = FILE_COLUMN
    while file_column in expected:  # a column of the files' own keeps its name
        file_column += "_"
    return DataTable(
        names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more",
        (*tables[0].column_names, file_column),
        first_rows[-1],
        _concatenate_readers(tuple(tables), file_column),
        tuple(file for table in tables for file in table.files),
        delimiter=next((t.delimiter for t in tables if t.delimiter not in (None, ",")), None),
        decimal=marks.pop() if len(marks) == 1 else MIXED if marks else None,
        row_groups=tuple(
            first + group
            for first, table in zip(first_rows, tables, strict=False)
            for group in table.row_groups
        ),
        file_column=file_column,
    )


def describe_files(tables: Sequence[DataTable]) -> list[str]:
    """Return the notes on what was read from the files, and on files that are read twice."""
    files = [file for table in tables for file in table.files]
    by_note: dict[str, list[str]] = {}
    for file in files:
        for note in file.notes:
            by_note.setdefault(note, []).append(file.name)
    notes = []
    for note, names in by_note.items():
        more = f" and {len(names) - 1:,} more files" if len(names) > 2 else ""
        listed = f'"{names[0]}"{more}' if len(names) != 2 else " and ".join(f'"{n}"' for n in names)
        notes.append(f"{listed}: {note}")
    return [*notes, *_describe_units(files), *find_duplicates(tables)]


def _describe_units(files: Sequence[SourceFile]) -> list[str]:
    """Note columns whose unit differs from file to file."""
    first: dict[str, tuple[str, str]] = {}
    notes = {}
    for file in files:
        for column, unit in file.units.items():
            known, name = first.setdefault(column, (unit, file.name))
            if known != unit:
                notes[column] = (
                    f'column "{column}" is in {known} in "{name}", but in {unit} in "{file.name}"; '
                    "bring the files to one unit"
                )
    return list(notes.values())


def find_duplicates(tables: Sequence[DataTable]) -> list[str]:
    """Return notes on files that are named twice or have the same content as another one.

    Only files of one size whose ends agree are read as a whole.
    """
    names: dict[AnyPath, str] = {}
    notes = []
    for file in (file for table in tables for file in table.files):
        if file.path is None or file.part:
            continue
        path = file.path.resolve()
        if path in names:
            notes.append(f'"{file.name}" is read twice: data.path names it more than once')
        names.setdefault(path, file.name)
    for alike in group_by_content(names):
        first, *copies = (names[path] for path in alike)
        same = f'has the same content as "{first}", so its rows are used twice'
        notes += [f'"{name}" {same}' for name in copies]
    if len(notes) > MAX_NOTES:
        more = f"{len(notes) - MAX_NOTES:,} further files are read twice or have a copy"
        notes = [*notes[:MAX_NOTES], more]
    return notes


def to_arrow(table: Any, *, time: str | None = None) -> pa.Table:
    """Return a table in memory as an Arrow table; `time` is the column that `data.time` names.

    An index of pandas becomes a column where it has a name. Without one, it becomes the time column
    if it holds dates, and is left out if it numbers the rows.
    """
    if _is_from(table, "polars") and hasattr(table, "collect"):
        table = table.collect()
    if hasattr(table, "to_frame") and not hasattr(table, "columns"):  # one column of pandas, polars
        table = table.to_frame()
    if hasattr(table, "dtype") and hasattr(table, "shape") and not hasattr(table, "columns"):
        table = _split_array(table)
    if not (isinstance(table, (pa.Table, Mapping)) or hasattr(table, "__arrow_c_stream__")):
        kind = type(table).__name__
        article = "an" if kind[0] in "aeiouAEIOU" else "a"
        raise UserError(f"data is {article} {kind}; {ACCEPTED}")
    try:
        if _is_from(table, "pandas"):
            return _from_pandas(table, time)
        return pa.table(dict(table) if isinstance(table, Mapping) else table)
    except (pa.ArrowException, TypeError, ValueError) as error:
        raise UserError(f"data: cannot be read as an Arrow table: {error}") from None


def _is_from(table: Any, library: str) -> bool:
    return type(table).__module__.partition(".")[0] == library


def _split_array(array: Any) -> dict[str, Any]:
    """Return the fields of a structured array as columns; other arrays, which have no names, are
    refused."""
    names = getattr(array.dtype, "names", None)
    if not names:
        raise UserError(
            "data is an array, whose columns have no names; pass their names: columns=[...]"
        )
    return {name: array[name] for name in names}


def _from_pandas(frame: Any, time: str | None) -> pa.Table:
    columns = [str(name) for name in frame.columns]
    twice = sorted({name for name in columns if columns.count(name) > 1})
    if twice:
        raise UserError(f'data: {columns.count(twice[0])} columns are named "{twice[0]}"')
    table = pa.Table.from_pandas(frame.set_axis(columns, axis=1), preserve_index=False)
    for level in range(frame.index.nlevels):
        index = frame.index.get_level_values(level)
        name = index.name
        if name is None and pa.types.is_integer(pa.array(index[:0]).type):
            continue  # it numbers the rows
        free = [
            candidate for candidate in (time, TIME, INDEX) if candidate and candidate not in columns
        ]
        name = str(name) if name is not None else free[0] if free else None
        if name is not None and name not in columns:
            table = table.append_column(name, pa.array(index))
    return table


class _PandasRefusal(MetaPathFinder):
    """A finder of modules that pretends that pandas is not installed."""

    def find_spec(self, fullname: str, *_: Any) -> None:
        if fullname == "pandas":
            raise ModuleNotFoundError("no command needs pandas", name=fullname)


def avoid_pandas() -> None:
    """Make Arrow work without pandas, which its first conversion would import (0.5 s).

    Arrow looks for pandas once and remembers the answer. Afterwards others can still import it.
    """
    refusal = _PandasRefusal()
    sys.meta_path.insert(0, refusal)
    try:
        pa.chunked_array([pa.array([1.0])]).to_numpy()
    finally:
        sys.meta_path.remove(refusal)
