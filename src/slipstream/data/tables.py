"""Files and in-memory tables, read as they are; `typed` gives their columns a type.

Errors name the file and the line.
"""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet

from slipstream.errors import UserError

READERS = {".csv": "csv", ".tsv": "csv", ".txt": "csv", ".parquet": "parquet", ".pq": "parquet"}
READERS |= {".arrow": "arrow", ".feather": "arrow", ".ipc": "arrow"}
BLOCK_BYTES = 16 << 20
UNNAMED = "column_"
FILE = "file"
MAGIC = {
    b"\x1f\x8b": "gzip data; decompress it first (gunzip)",
    b"PK\x03\x04": "a ZIP or Excel file; export it as CSV or Parquet",
    b"PAR1": "Parquet data; rename it to .parquet",
    b"ARROW1": "Arrow data; rename it to .arrow",
    b"\xff\xfe": "UTF-16 text; save it as UTF-8",
    b"\xfe\xff": "UTF-16 text; save it as UTF-8",
    b"\x89HDF": "an HDF5 or MAT file; export it as CSV or Parquet",
    b"MATLAB": "a MAT file; export it as CSV or Parquet",
}


@dataclass(frozen=True)
class Source:
    """One table and where it came from."""

    name: str
    """As shown to the user, and the series' name: the file's name below what was asked for."""
    table: pa.Table
    path: Path | None = None
    delimiter: str | None = None
    """Set for CSV files, whose cells are all text."""
    parts: tuple[Source, ...] = ()
    """The files that make up one long table."""

    def place(self, row: int) -> str:
        """Where a row of the table stands: its file and line."""
        for part in self.parts:
            if row < part.table.num_rows:
                return part.place(row)
            row -= part.table.num_rows
        if self.path is not None and self.delimiter is not None:
            records = (at for at, _, cells in _records(self.path, self.delimiter) if cells)
            for seen, at in enumerate(records):
                if seen == row + 1:  # the first record is the header
                    return f"{self.name}, line {at}"
        return f"{self.name}, row {row + 1}"

    def where(self, row: int, column: str) -> str:
        return f'{self.place(row)}, column "{column}"'


def from_memory(table: Any) -> Source:
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
    return _checked(Source("data", arrow))


def read_all(paths: Iterable[str], wanted: set[str] | None = None) -> Iterator[Source]:
    """Every file of the paths; a folder stands for the files below it, in order of name."""
    for text in paths:
        path = Path(text)
        if path.is_dir():
            for file in files_in(path):
                yield read(file, name=file.relative_to(path).as_posix(), wanted=wanted)
        else:
            yield read(path, name=path.name, wanted=wanted)


def join(sources: Sequence[Source]) -> Source:
    """One long table from several files, with the column FILE that says where a row came from."""
    names = [source.name for source in sources]
    wanted = set(sources[0].table.column_names)
    for source in sources:
        differ = wanted.symmetric_difference(source.table.column_names)
        if differ:
            raise UserError(
                f"{source.name} and {names[0]} make one long table (data.id), but only one of them "
                f'has the column "{sorted(differ)[0]}"'
            )
    try:
        table = pa.concat_tables([s.table for s in sources], promote_options="permissive")
    except pa.ArrowException as error:
        raise UserError(f"the files do not make one long table: {_first_line(error)}") from None
    if FILE not in wanted:
        files = np.repeat(
            np.arange(len(names), dtype=np.int32), [s.table.num_rows for s in sources]
        )
        table = table.append_column(FILE, pa.DictionaryArray.from_arrays(files, names))
    delimiter = next((s.delimiter for s in sources if s.delimiter not in (None, ",")), None)
    name = names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
    return Source(name, table, None, delimiter, tuple(sources))


def files_in(folder: Path) -> list[Path]:
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


def read(path: Path, *, name: str, wanted: set[str] | None = None) -> Source:
    """One file. `wanted` leaves out the columns that nobody asked for."""
    reader = READERS.get(path.suffix.lower())
    if reader is None:
        raise UserError(f"{path}: what {path.suffix or 'this'} is, is not known here; {_KNOWN}")
    try:
        with path.open("rb") as file:
            head = file.read(65536)
    except FileNotFoundError:
        raise UserError(f"{path}: there is no such file (data.path)") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    if not head.strip():
        raise UserError(f"{path}: the file is empty")
    match reader:
        case "csv":
            source = _read_csv(path, name, head)
        case "parquet":
            source = Source(name, _read_binary(path, "Parquet", wanted), path)
        case _:
            source = Source(name, _read_binary(path, "Arrow", wanted), path)
    return _checked(source)


_KNOWN = f"the files read are {', '.join(READERS)}"


def _checked(source: Source) -> Source:
    for name, count in Counter(source.table.column_names).items():
        if count > 1:
            raise UserError(f'{source.name}: {count} columns are named "{name}"; rename them')
    if not source.table.num_rows:
        raise UserError(f"{source.name}: has no rows below the header")
    return source


def _read_binary(path: Path, kind: str, wanted: set[str] | None) -> pa.Table:
    try:
        if kind == "Parquet":
            file = pa.parquet.ParquetFile(path)
            # where a wanted column is missing, all are read, so that the error can name the nearest
            prune = wanted is not None and wanted <= set(file.schema_arrow.names)
            return file.read(columns=sorted(wanted) if wanted and prune else None)
        with pa.memory_map(str(path)) as memory:
            try:
                return pa.ipc.open_file(memory).read_all()
            except pa.ArrowInvalid:
                memory.seek(0)
                return pa.ipc.open_stream(memory).read_all()
    except (pa.ArrowException, OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read as {kind}: {_first_line(error)}") from None


def _read_csv(path: Path, name: str, head: bytes) -> Source:
    for magic, what in MAGIC.items():
        if head.startswith(magic):
            raise UserError(f"{path}: is not text but {what}")
    delimiter = _delimiter(head)
    names, lines = _header(path, delimiter)
    try:
        table = pa.csv.read_csv(
            path,
            read_options=pa.csv.ReadOptions(
                column_names=names, skip_rows=lines, block_size=BLOCK_BYTES
            ),
            parse_options=pa.csv.ParseOptions(delimiter=delimiter, newlines_in_values=True),
            convert_options=pa.csv.ConvertOptions(
                column_types=dict.fromkeys(names, pa.string()), strings_can_be_null=False
            ),
        )
    except (pa.ArrowException, OSError) as error:
        _refuse_bad_text(path)
        _refuse_ragged(path, name, delimiter, len(names))
        raise UserError(f"{path}: cannot be read as CSV: {_first_line(error)}") from None
    return Source(name, table, path, delimiter)


def _header(path: Path, delimiter: str) -> tuple[list[str], int]:
    """The columns' names and the lines that they take up; a nameless one is called by its place."""
    try:
        records = _records(path, delimiter)
        lines, cells = next(((last, cells) for _, last, cells in records if cells), (0, []))
    except UnicodeDecodeError:
        _refuse_bad_text(path)
        raise
    if not cells:
        raise UserError(f"{path}: the file is empty")
    names = [cell.strip() or f"{UNNAMED}{i}" for i, cell in enumerate(cells, start=1)]
    filled = [name for name in names if not name.startswith(UNNAMED)]
    if filled and all(_is_number(name) for name in filled):
        raise UserError(
            f"{path}: line {lines} should name the columns, but reads "
            f'"{delimiter.join(cells)[:60]}"'
        )
    return names, lines


def _records(path: Path, delimiter: str) -> Iterator[tuple[int, int, list[str]]]:
    """Each record with its first and last line; slow, so for the header and for errors only."""
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.reader(file, delimiter=delimiter)
        first = 1
        try:
            for cells in reader:
                yield first, reader.line_num, cells
                first = reader.line_num + 1
        except csv.Error as error:
            raise UserError(f"{path}, line {first}: cannot be read as CSV: {error}") from None


def _refuse_ragged(path: Path, name: str, delimiter: str, wanted: int) -> None:
    for first, _, cells in _records(path, delimiter):
        if cells and len(cells) != wanted:
            raise UserError(
                f"{name}, line {first}: has {len(cells)} cells where the header has {wanted}; "
                f'it reads "{delimiter.join(cells)[:60]}"'
            )


def _refuse_bad_text(path: Path) -> None:
    with path.open("rb") as lines:
        for at, line in enumerate(lines, start=1):
            try:
                line.decode("utf-8")
            except UnicodeDecodeError:
                raise UserError(
                    f"{path}, line {at}: is not UTF-8 text; save the file as UTF-8"
                ) from None


def _delimiter(head: bytes) -> str:
    """Whichever of comma, semicolon and tab stands most often in the first line, unquoted."""
    first = head.lstrip(b"\xef\xbb\xbf\r\n ").split(b"\n", 1)[0]
    outside = b"".join(first.split(b'"')[::2])
    return max(",;\t", key=lambda mark: outside.count(mark.encode()))


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n", 1)[0]
