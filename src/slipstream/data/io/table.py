"""Files and in-memory tables, read as they are; `typed` gives their columns a type.

Errors name the file and the line.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.parquet

from slipstream.data.io import csv, decimals
from slipstream.errors import UserError

READERS = {".csv": "csv", ".tsv": "csv", ".txt": "csv", ".parquet": "parquet", ".pq": "parquet"}
READERS |= {".arrow": "arrow", ".feather": "arrow", ".ipc": "arrow"}
MANY_COLUMNS = 1000
READ_AHEAD_BYTES = 16 << 20
"""Of a file with so many columns"""
FILE_COLUMN = "file"
"""What a table made of several files calls the column of their names, where that name is free"""


class ColumnReader(Protocol):
    """Something that gives stretches of its columns."""

    def kind(self, name: str) -> pa.DataType: ...

    def read(self, name: str, begin: int, end: int) -> pa.ChunkedArray: ...


@dataclass(frozen=True)
class DataTable:
    """One table, or a stretch of one, and where it came from. Columns are read when asked for."""

    name: str
    """As shown to the user, and the series' name: the file's name below what was asked for."""
    column_names: tuple[str, ...]
    num_rows: int
    reader: ColumnReader
    first_row: int = 0
    """Where the stretch begins"""
    path: Path | None = None
    delimiter: str | None = None
    """Set for CSV files, whose cells are all text."""
    decimal: str | None = None
    """The decimal mark of numbers that are text, where it is said or certain"""
    row_groups: tuple[int, ...] = ()
    """First rows of the stretches that a file is best read in"""
    parts: tuple[DataTable, ...] = ()
    """The files that make up one long table."""
    file_column: str | None = None
    """The column that says which of them a row came from"""

    @cached_property
    def column_set(self) -> frozenset[str]:
        """The columns' names; to look one up among thousands takes as long as among a few"""
        return frozenset(self.column_names)

    def read_column(self, name: str) -> pa.ChunkedArray:
        return self.reader.read(name, self.first_row, self.first_row + self.num_rows)

    def slice_rows(self, begin: int, end: int) -> DataTable:
        """The rows from `begin` to before `end`."""
        return replace(self, first_row=self.first_row + begin, num_rows=end - begin)

    def locate_row(self, row: int) -> str:
        """Where a row of the table stands: its file and line."""
        row += self.first_row
        for part in self.parts:
            if row < part.num_rows:
                return part.locate_row(row)
            row -= part.num_rows
        if self.path is not None and self.delimiter is not None:
            line = csv.find_line(self.path, self.delimiter, len(self.column_names), row)
            if line is not None:
                return f"{self.name}, line {line}"
        return f"{self.name}, row {row + 1}"

    def locate_cell(self, row: int, column: str) -> str:
        return f'{self.locate_row(row)}, column "{column}"'


@dataclass(frozen=True)
class _InMemory:
    table: pa.Table

    def kind(self, name: str) -> pa.DataType:
        return self.table.schema.field(name).type

    def read(self, name: str, begin: int, end: int) -> pa.ChunkedArray:
        return self.table.column(name).slice(begin, end - begin)


@dataclass(frozen=True)
class _InParquet:
    """Reads the row groups that a stretch touches, and no other."""

    path: Path
    groups: tuple[int, ...]

    def kind(self, name: str) -> pa.DataType:
        return _open_parquet(self.path).types[name]

    def read(self, name: str, begin: int, end: int) -> pa.ChunkedArray:
        first = bisect_right(self.groups, begin) - 1
        past = bisect_left(self.groups, end)
        parquet = _open_parquet(self.path)
        many = READ_AHEAD_BYTES // (8 * (end - begin)) if len(parquet.names) >= MANY_COLUMNS else 0
        try:
            if many > 1:
                table = _read_ahead(
                    self.path, parquet.places[name] // many * many, many, first, past
                )
            else:
                table = parquet.file.read_row_groups(list(range(first, past)), [name])
        except (pa.ArrowException, OSError, ValueError) as error:
            raise _unreadable(self.path, "Parquet", error) from None
        return table.column(name).slice(begin - self.groups[first], end - begin)


class _Parquet(NamedTuple):
    """An open file and its columns; Arrow makes the schema anew whenever it is asked for."""

    file: Any
    types: dict[str, pa.DataType]
    names: tuple[str, ...]
    places: dict[str, int]


@lru_cache(maxsize=1)
def _read_ahead(path: Path, place: int, many: int, first: int, past: int) -> pa.Table:
    """So many columns from one place on, of some row groups. Each read of a file of thousands of
    columns looks at all of them, so that to read one at a time would take minutes."""
    file, _, names, _ = _open_parquet(path)
    return file.read_row_groups(list(range(first, past)), list(names[place : place + many]))


@dataclass(frozen=True)
class _InArrow:
    """Memory-mapped: what is not looked at is not read."""

    path: Path

    def kind(self, name: str) -> pa.DataType:
        return _open_arrow(self.path).schema.field(name).type

    def read(self, name: str, begin: int, end: int) -> pa.ChunkedArray:
        return _open_arrow(self.path).column(name).slice(begin, end - begin)


@dataclass(frozen=True)
class _Joined:
    parts: tuple[DataTable, ...]
    file_column: str

    def kind(self, name: str) -> pa.DataType:
        return pa.string() if name == self.file_column else self.parts[0].reader.kind(name)

    def read(self, name: str, begin: int, end: int) -> pa.ChunkedArray:
        tables, first = [], 0
        for part in self.parts:
            low, high = max(begin - first, 0), min(end - first, part.num_rows)
            if low < high:
                stretch = part.slice_rows(low, high)
                own = name != self.file_column
                column = stretch.read_column(name) if own else _repeated(part.name, stretch)
                tables.append(pa.table({name: column}))
            first += part.num_rows
        try:
            return pa.concat_tables(tables, promote_options="permissive").column(name)
        except pa.ArrowException as error:
            raise UserError(
                f"the files do not make one long table: {csv.summarize_error(error)}"
            ) from None


def _repeated(value: str, source: DataTable) -> pa.Array:
    codes = np.zeros(source.num_rows, dtype=np.int32)
    return pa.DictionaryArray.from_arrays(codes, [value]).cast(pa.string())


@lru_cache(maxsize=16)
def _open_parquet(path: Path) -> _Parquet:
    file = pa.parquet.ParquetFile(path, pre_buffer=False)
    schema = file.schema_arrow
    names = tuple(schema.names)
    places = {name: place for place, name in enumerate(names)}
    return _Parquet(file, {field.name: field.type for field in schema}, names, places)


@lru_cache(maxsize=16)
def _open_arrow(path: Path) -> Any:
    with pa.memory_map(str(path)) as memory:
        try:
            return pa.ipc.open_file(memory).read_all()
        except pa.ArrowInvalid:
            memory.seek(0)
            return pa.ipc.open_stream(memory).read_all()


def read_memory(table: Any, *, decimal: str | None = None) -> DataTable:
    """A pandas, polars, duckdb, pyarrow or other table that speaks Arrow; or a dict of columns."""
    if not (isinstance(table, (pa.Table, dict)) or hasattr(table, "__arrow_c_stream__")):
        raise UserError(
            f"data is a {type(table).__name__}, which does not speak Arrow; pass a pandas, polars, "
            "duckdb or pyarrow table"
        )
    try:
        arrow = pa.table(table)
    except (pa.ArrowException, TypeError, ValueError) as error:
        raise UserError(f"data: cannot be read as an Arrow table: {error}") from None
    return replace(make_table("data", arrow), decimal=decimal)


def release_memory() -> None:
    """Have Arrow give back to the system what it holds on to for later."""
    pa.default_memory_pool().release_unused()


def make_table(
    name: str, table: pa.Table, path: Path | None = None, delimiter: str | None = None
) -> DataTable:
    source = DataTable(
        name,
        tuple(table.column_names),
        table.num_rows,
        _InMemory(table),
        path=path,
        delimiter=delimiter,
    )
    return _checked(source)


def read_files(paths: Iterable[str], *, decimal: str | None = None) -> Iterator[DataTable]:
    """Every file of the paths; a folder stands for the files below it, in order of name."""
    for given in paths:
        path = Path(given)
        if path.is_dir():
            for file in list_files(path):
                yield read_file(file, name=file.relative_to(path).as_posix(), decimal=decimal)
        else:
            yield read_file(path, name=path.name, decimal=decimal)


def concatenate_tables(sources: Sequence[DataTable]) -> DataTable:
    """One long table from several files, with one more column: the file that a row came from."""
    names = [source.name for source in sources]
    wanted = set(sources[0].column_names)
    for source in sources:
        differ = wanted.symmetric_difference(source.column_names)
        if differ:
            raise UserError(
                f"{source.name} and {names[0]} make one long table (data.id), but only one of them "
                f'has the column "{sorted(differ)[0]}"'
            )
    rows = np.cumsum([0, *(source.num_rows for source in sources)]).tolist()
    marks = {source.decimal for source in sources} - {None}
    file_column = FILE_COLUMN
    while file_column in wanted:  # a column of the files' own keeps its name
        file_column += "_"
    return DataTable(
        names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more",
        (*sources[0].column_names, file_column),
        rows[-1],
        _Joined(tuple(sources), file_column),
        delimiter=next((s.delimiter for s in sources if s.delimiter not in (None, ",")), None),
        decimal=marks.pop() if len(marks) == 1 else None,
        row_groups=tuple(
            r + g for r, s in zip(rows[:-1], sources, strict=True) for g in s.row_groups
        ),
        parts=tuple(sources),
        file_column=file_column,
    )


def list_files(folder: Path) -> list[Path]:
    try:
        files = sorted(
            file
            for file in folder.rglob("*")
            if file.is_file()
            and file.suffix.lower() in READERS
            and not any(part.startswith(".") for part in file.relative_to(folder).parts)
        )
    except OSError as error:
        raise UserError(f"{folder}: cannot be listed ({error.strerror})") from None
    if not files:
        raise UserError(f"{folder}: holds no {', '.join(READERS)} file")
    return files


def read_file(
    path: Path, *, name: str, setting: str = "data.path", decimal: str | None = None
) -> DataTable:
    """One file; `decimal` is the decimal mark that its text has, if that is known."""
    reader = READERS.get(path.suffix.lower())
    if reader is None:
        raise UserError(f"{path}: what {path.suffix or 'this'} is, is not known here; {_KNOWN}")
    try:
        with path.open("rb") as file:
            head = file.read(65536)
    except FileNotFoundError:
        raise UserError(f"{path}: there is no such file ({setting})") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    if not head.strip():
        raise UserError(f"{path}: the file is empty")
    match reader:
        case "csv":
            table, delimiter = csv.read_csv(path, name, head)
            if decimal is None and delimiter != ",":
                decimal = decimals.find_mark(table)
            source = make_table(name, table, path, delimiter)
        case "parquet":
            source = _read_parquet(path, name)
        case _:
            source = _read_arrow(path, name)
    return replace(source, decimal=decimal)


_KNOWN = f"the files read are {', '.join(READERS)}"


def _checked(source: DataTable) -> DataTable:
    for name, count in Counter(source.column_names).items():
        if count > 1:
            raise UserError(f'{source.name}: {count} columns are named "{name}"; rename them')
    if not source.num_rows:
        raise UserError(f"{source.name}: has no rows below the header")
    return source


def _unreadable(path: Path, kind: str, error: Exception) -> UserError:
    return UserError(f"{path}: cannot be read as {kind}: {csv.summarize_error(error)}")


def _read_parquet(path: Path, name: str) -> DataTable:
    try:
        _open_parquet.cache_clear()  # a file of the same name may be another one by now
        _read_ahead.cache_clear()
        file, _, names, _ = _open_parquet(path)
        counts = [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)]
    except (pa.ArrowException, OSError, ValueError) as error:
        raise _unreadable(path, "Parquet", error) from None
    groups = tuple(np.cumsum([0, *counts[:-1]]).tolist())
    columns = _InParquet(path, groups)
    return _checked(DataTable(name, names, sum(counts), columns, path=path, row_groups=groups))


def _read_arrow(path: Path, name: str) -> DataTable:
    try:
        _open_arrow.cache_clear()
        table = _open_arrow(path)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise _unreadable(path, "Arrow", error) from None
    counts = [batch.num_rows for batch in table.to_batches()]
    groups = tuple(np.cumsum([0, *counts[:-1]]).tolist())
    names = tuple(table.column_names)
    return _checked(
        DataTable(name, names, table.num_rows, _InArrow(path), path=path, row_groups=groups)
    )
