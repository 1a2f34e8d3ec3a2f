"""The formats of data files.

To add one, write a module here with a `TableReader` and add its line to `FORMATS`. Every reader of
files, `slipstream inspect`, the app's lists and the messages that name endings follow from it.

Endings are known without a reader: the app lists files without importing pyarrow.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import PurePath
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from slipstream.base.storage import AnyPath
    from slipstream.data.formats.reader import TableReader


class FileFormat(NamedTuple):
    """A format of data files: the endings of their names, and the reader for them."""

    reader: str
    """The module in this package, and the class in it"""
    endings: tuple[str, ...]
    is_slow: bool = False
    """Whether a file takes so long that several are read ahead, at a time"""
    reads_objects: bool = False
    """Whether the reader takes a path in object storage; objects of other formats are copied"""

    def matches(self, path: AnyPath | PurePath) -> bool:
        """Return whether a file's name has an ending of this format."""
        return path.suffix.lower() in self.endings

    def load(self) -> TableReader:
        """Return the reader, whose module is imported now."""
        module, _, name = self.reader.partition(".")
        reader: TableReader = getattr(import_module(f"{__name__}.{module}"), name)()
        return reader


FORMATS = (
    FileFormat("csv.CsvReader", (".csv", ".tsv", ".txt")),
    FileFormat("arrow.ParquetReader", (".parquet", ".pq"), reads_objects=True),
    FileFormat("excel.ExcelReader", (".xlsx", ".xlsm", ".xlsb", ".xls", ".ods"), is_slow=True),
    FileFormat("matlab.MatlabReader", (".mat",), is_slow=True),
    FileFormat("arrow.ArrowReader", (".arrow", ".feather", ".ipc")),
    FileFormat("archive.TsReader", (".ts",)),
    FileFormat("archive.ArffReader", (".arff",)),
)
ENDINGS = tuple(ending for file_format in FORMATS for ending in file_format.endings)
"""Endings of files that are tables"""
PACKED = (".gz", ".zip")
"""Endings of files that hold a table, compressed"""


def find_format(path: AnyPath | PurePath) -> FileFormat | None:
    """Return the format of a file by the ending of its name; None for unknown and packed files."""
    return next((file_format for file_format in FORMATS if file_format.matches(path)), None)
