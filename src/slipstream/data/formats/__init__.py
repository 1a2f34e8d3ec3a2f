"""The formats of data files.

To add one, write a module here with a `TableReader` and add its line to `FORMATS`. Every reader of
files, `slipstream inspect`, the app's lists and the messages that name endings follow from it.

Endings are known without a reader: the app lists files without importing pyarrow.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from pathlib import PurePath
from typing import TYPE_CHECKING, NamedTuple, TypeVar

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
    FileFormat("csv.CsvReader", (".csv", ".tsv", ".txt", ".dat", ".data")),
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
ANY_CONTENT = (".dat", ".data")
"""Endings of tables, but of other files too: beside tables of other endings they are left out"""
ABOUT = ("readme", "read_me", "read-me", "read me", "license", "licence", "copying", "citation")
"""Beginnings of the names of texts beside tables"""


def find_format(path: AnyPath | PurePath) -> FileFormat | None:
    """Return the format of a file by the ending of its name; None for unknown and packed files."""
    return next((file_format for file_format in FORMATS if file_format.matches(path)), None)


Named = TypeVar("Named", bound="AnyPath | PurePath")


def select_tables(files: Sequence[Named]) -> list[Named]:
    """Return the files of a folder or archive that are its tables: no texts about them, and where
    some have an ending that says so, none that may hold anything."""

    def find_ending(file: Named) -> str:
        suffixes = [suffix.lower() for suffix in file.suffixes]
        return next((suffix for suffix in reversed(suffixes) if suffix not in PACKED), "")

    def is_about(file: Named) -> bool:
        return find_ending(file) in (".txt", *ANY_CONTENT) and file.name.lower().startswith(ABOUT)

    tables = [file for file in files if not is_about(file)] or list(files)
    return [file for file in tables if find_ending(file) not in ANY_CONTENT] or tables


def select_members(files: Sequence[Named]) -> list[Named]:
    """Return the tables of an archive: of one that is there in several formats the first of these,
    of text files the `.txt` ones only where there are no others, since these may be about the
    tables; where series of classes are in a format of their own, these alone."""
    for ending in (".ts", ".arff"):
        if cases := [file for file in files if file.suffix.lower() == ending]:
            return cases
    tables = select_tables([file for file in files if file.suffix.lower() in ENDINGS])
    tables = [file for file in tables if file.suffix.lower() != ".txt"] or tables
    tables.sort(key=lambda file: ENDINGS.index(file.suffix.lower()))
    first = {file.with_suffix(""): file for file in reversed(tables)}
    return [file for file in files if file in first.values()]
