"""The interface of a file format: a reader of its files, whole or in batches of rows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple, Self

import pyarrow as pa

from slipstream.base.storage import AnyPath
from slipstream.data.table import DataTable

if TYPE_CHECKING:  # a process that reads workbooks starts in half the time without the settings
    from slipstream.config import Data

BATCH_VALUES = 4_000_000
"""The number of values in a batch, where a table is read in batches"""
Batch = dict[str, pa.ChunkedArray]
"""Some rows of a table: the columns by name"""


class ReadOptions(NamedTuple):
    """The settings that every file is read by, in training and for new data alike."""

    decimal: str | None = None
    """The decimal mark of numbers that are text"""
    na: tuple[str | int | float, ...] = ()
    encoding: str | None = None
    skip_rows: int | None = None
    sheets: tuple[str, ...] = ()
    variable: str | None = None
    is_wide: bool = False
    """Whether a row is a series: rows may differ in length, and the first one may be values"""
    names: Literal["none"] | tuple[str, ...] | None = None
    """The names of the columns of text files and workbooks that have no row of names"""

    @classmethod
    def from_data(cls, data: Data) -> Self:
        return cls(
            data.decimal,
            data.na,
            data.encoding,
            data.skip_rows,
            data.sheets,
            data.variable,
            data.layout == "wide",
            data.names,
        )

    def for_side_table(self) -> Self:
        """Return the options of a file beside the data: its rows, sheets and variables differ."""
        return self._replace(skip_rows=None, sheets=(), variable=None, is_wide=False, names=None)


class InputFile(NamedTuple):
    """A file to read, unpacked where it was compressed."""

    path: AnyPath
    """A local path; a path in object storage only where the format's reader accepts it"""
    name: str
    """The file's name as users know it"""
    head: bytes
    """The first bytes of a local file"""

    @property
    def local_path(self) -> Path:
        assert isinstance(self.path, Path)
        return self.path


class OpenTable(NamedTuple):
    """A table whose rows come in batches."""

    name: str
    format: str
    num_bytes: int | None
    columns: tuple[str, ...]
    units: Mapping[str, str]
    notes: tuple[str, ...]
    decimal: str | None
    delimiter: str | None
    batches: Iterator[Batch]
    scalars: tuple[str, ...] = ()
    """Columns that repeat a single value of the file"""
    sheet: str = ""
    """The sheet's name, where several sheets of a workbook are read"""


class TableReader(ABC):
    """Reads the files of one format. A format implements `read`.

    The other methods follow from it; a format overrides them where it can do with less memory.
    """

    reads_in_place = False
    """Whether the tables read columns and row groups from the file when they are needed"""

    @abstractmethod
    def read(self, file: InputFile, options: ReadOptions) -> list[DataTable]:
        """Read the tables of a file: one, or one per sheet where the options name several sheets.

        `files` of a table says what was read: the format with its details, units, and notes.
        """

    def inspect(self, file: InputFile, options: ReadOptions) -> Iterator[OpenTable]:
        """Yield the tables of a file with their rows in batches, each read when asked for."""
        for table in self.read(file, options):
            yield open_table(table)

    def can_sample(self, options: ReadOptions) -> bool:
        """Return whether a few rows of a large file are read without all the others."""
        return self.reads_in_place

    def read_sample(
        self, file: InputFile, options: ReadOptions, begin: int, end: int
    ) -> tuple[DataTable, int]:
        """Read at least the rows of the first table from `begin` to before `end`, if it has them.

        Also return the number, in the file, of the first row that was read.
        """
        return self.read(file, options)[0], 0


def open_table(table: DataTable, num_values: int = BATCH_VALUES) -> OpenTable:
    """Return a table whose rows come in batches of about `num_values`; a table on disk is read by
    its row groups."""

    def read() -> Iterator[Batch]:
        for begin, end in pairwise(_list_borders(table, num_values)):
            part = table.slice_rows(begin, end)
            yield {name: part.read_column(name) for name in table.column_names}

    (file,) = table.files
    return OpenTable(
        table.name,
        file.format or "table in memory",
        None if file.path is None else file.path.stat().st_size,
        table.column_names,
        file.units,
        file.notes,
        table.decimal,
        table.delimiter,
        read(),
        file.scalars,
        file.part,
    )


def _list_borders(table: DataTable, num_values: int) -> list[int]:
    """List the first rows of the batches, and the end; a row group, once read, is used as a
    whole."""
    rows = max(num_values // max(len(table.column_names), 1), 1)
    borders = [0]
    for start in table.row_groups[1:] or range(rows, table.num_rows, rows):
        if start - borders[-1] >= rows:
            borders.append(start)
    return [*borders, table.num_rows]
