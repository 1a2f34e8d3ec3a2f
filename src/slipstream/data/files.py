"""The files that a config names, each read as its ending says."""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, overload

from slipstream.base.errors import DATA_PATH, EmptyFileError, UserError
from slipstream.base.phases import report_progress
from slipstream.base.storage import AnyPath, ObjectPath, name_below, parse_path, to_pure
from slipstream.config import SIMULATED, Data, find_matches
from slipstream.data import columns, compression, melting
from slipstream.data.compression import UnpackedFile, is_readable, restoring_name
from slipstream.data.formats import ENDINGS, PACKED, FileFormat, find_format, select_tables
from slipstream.data.formats.isolated import stop_reading
from slipstream.data.formats.reader import InputFile, OpenTable, ReadOptions, open_table
from slipstream.data.table import (
    FILE_COLUMN,
    DataTable,
    SourceFile,
    concatenate_tables,
    read_memory,
    wrap_table,
)

READABLE = (*ENDINGS, *PACKED)
SET_FOLDERS = ("train", "val", "test")
HIDDEN = (".", "~$")
"""Beginnings of the names of hidden files, and of the lock files of workbooks that are open in
Excel"""
PLAIN = ReadOptions()
EMPTY_NOTE = "has no rows; it is left out"


def read_tables(data: Data, table: Any) -> list[DataTable]:
    """Read the tables that the config names, or take over the one passed in their place.

    Their columns have a type from here on: numbers in a CSV are parsed once, now. Cells that mean
    "missing" by `data.na` are null, and times over several columns have a column of their own.
    """
    if table is not None:
        tables = [read_memory(table, decimal=data.decimal, time=data.time_column)]
        tables = melting.melt_tables([_mark(tables[0], data)], data)
    elif not data.paths or not all(data.paths):
        state = "not set" if not data.paths else "empty"
        raise UserError(
            f"data.path is {state}; name a file or a folder: set it in the config, or pass "
            + DATA_PATH,
            setting="data.path",
        )
    elif data.paths[0].startswith(SIMULATED):
        tables = [_simulate(data.paths[0])]
    else:
        tables = _read_paths(data)
    return [_mark(unmarked, data) for unmarked in tables]


def _mark(table: DataTable, data: Data) -> DataTable:
    return columns.join_times(columns.mark_missing(table, data.na), data.time_columns)


def read_rows(data: Data, file: Path, begin: int, end: int) -> DataTable:
    """Read some rows of one file of a config, as `read_tables` reads all of them.

    Where the format can, other rows are not read; types then follow from these rows alone. Of a
    workbook, the first sheet is read.
    """
    if data.layout != "long":
        (table,) = read_tables(data.model_copy(update={"path": str(file)}), None)
        return table.slice_rows(min(begin, table.num_rows), min(end, table.num_rows))
    options = ReadOptions.from_data(data)
    with _open_source(file, file.name, "data.path") as source:
        table, first = source.format.load().read_sample(source.file, options, begin, end)
        table = _set_decimal(table, options)
    if FILE_COLUMN in data.ids:
        table = concatenate_tables([table])
    _parse_text([table], data)
    table = _mark(table, data)
    if begin - first >= table.num_rows:
        raise UserError(f"{file.name}: has {first + table.num_rows:,} rows, none from {begin:,} on")
    return table.slice_rows(begin - first, min(end - first, table.num_rows))


def can_sample(file: Path, data: Data) -> bool:
    """Return whether `read_rows` reads a few rows of a large file without all the others."""
    file_format = find_format(file) if data.layout == "long" else None
    return file_format is not None and file_format.load().can_sample(ReadOptions.from_data(data))


def _read_paths(data: Data) -> list[DataTable]:
    if data.split.folders:
        _check_folders(data)
    tables = list(read_files(data.paths, ReadOptions.from_data(data)))
    if data.layout != "long":
        _parse_text(tables, data)
        tables = [columns.mark_missing(table, data.na) for table in tables]
    tables = melting.melt_tables(tables, data)
    if data.layout != "long" and not data.split.folders:
        return [concatenate_tables(tables)]  # with the column that data.split.by = "file" names
    formats = {bool(table.delimiter) for table in tables}
    if (
        len(formats) > 1 and data.layout == "long"
    ):  # the numbers of a CSV join those of other formats
        _parse_text(tables, data)
    if data.split.folders:  # a set's files stay tables of their own
        if FILE_COLUMN in data.ids:
            tables = [concatenate_tables([table]) for table in tables]
    elif data.ids and (len(tables) > 1 or FILE_COLUMN in data.ids):
        tables = [concatenate_tables(tables)]
    if data.layout == "long":
        _parse_text(tables, data)
    return tables


def _parse_text(tables: Sequence[DataTable], data: Data) -> None:
    compared = data.targets if data.task == "classify" and data.targets else ()
    keep_text = {*data.time_columns, data.split.by, *data.ids, *data.where, *compared}
    for table in tables:
        columns.parse_text(table, keep_text=keep_text, na=columns.list_texts(data.na))


def _check_folders(data: Data) -> None:
    if len(data.paths) != 1 or not parse_path(data.paths[0]).is_dir():
        raise UserError(
            "data.split.folders needs data.path to be one folder, with train/, val/ and test/ in "
            "it",
            setting="data.split.folders",
        )
    for name in SET_FOLDERS:
        if not (parse_path(data.paths[0]) / name).is_dir():
            raise UserError(
                f"data.split.folders: {data.paths[0]} has no folder {name}/",
                setting="data.split.folders",
            )


def _simulate(path: str) -> DataTable:
    from slipstream.data.simulated import bars, cell
    from slipstream.data.simulated.cache import load_table

    embedded = {f"{SIMULATED}cell": cell, f"{SIMULATED}bars": bars}
    if path not in embedded:
        known = " and ".join(f'"{name}"' for name in embedded)
        raise UserError(
            f'data.path is "{path}", but the embedded data sets are {known}', setting="data.path"
        )
    return wrap_table(load_table(embedded[path]), path, format="simulated")


def read_files(paths: Iterable[str], options: ReadOptions = PLAIN) -> Iterator[DataTable]:
    """Read every file of the paths; a folder stands for the files below it, and a pattern for those
    that match, in order of name."""
    for path in map(parse_path, paths):
        folder, files = expand_path(path)
        copied = [file for file in files if isinstance(file, ObjectPath) and not _is_remote(file)]
        if len(copied) > 1:
            compression.unpack_objects(copied)
        last, empty = None, []
        for file in open_files(folder, files, options):
            try:
                tables = file.read()
            except EmptyFileError:
                if len(files) == 1:
                    raise
                empty.append(file.name)
                continue
            if last is not None:
                yield last
            yield from tables[:-1]
            last = tables[-1]
        if last is None:
            raise EmptyFileError(f"{path}: no file has rows")
        yield _list_empty_files(last, empty)


def _list_empty_files(table: DataTable, names: Sequence[str]) -> DataTable:
    """Return a table that lists files without rows beside its own, so that a note names them."""
    bare = SourceFile("", 0, 0, delimiter=table.delimiter, notes=(EMPTY_NOTE,))
    return replace(table, files=(*table.files, *(bare._replace(name=name) for name in names)))


@dataclass(frozen=True)
class OpenFile:
    """A file to read; another thread may be reading it already."""

    path: AnyPath
    name: str
    options: ReadOptions
    ahead: Future[list[DataTable]] | None = None
    """The tables, where another thread reads them"""

    def read(self) -> list[DataTable]:
        """Return the tables of the file."""
        if self.ahead is not None:
            return self.ahead.result()
        return read_parts(self.path, name=self.name, options=self.options)

    def inspect(self) -> Iterator[OpenTable]:
        """Yield the tables of the file with their rows in batches, read when asked for."""
        if self.ahead is not None:
            for table in self.ahead.result():
                yield open_table(table)._replace(num_bytes=self.path.stat().st_size)
            return
        with _open_source(self.path, self.name, "data.path") as source:
            num_bytes = self.path.stat().st_size  # a copy that was unpacked has another size
            for opened in source.format.load().inspect(source.file, self.options):
                batches = compression.iterate_restoring(opened.batches, source.unpacked)
                decimal = opened.decimal or self.options.decimal
                yield opened._replace(num_bytes=num_bytes, batches=batches, decimal=decimal)


def open_files(
    folder: AnyPath, files: Sequence[AnyPath], options: ReadOptions
) -> Iterator[OpenFile]:
    """Yield the files in order, and report how far reading them has come.

    Workbooks and MATLAB files are slow to read, so they are read ahead, several at a time.
    """
    from slipstream.base.machine import (
        count_available_cores,  # imports psutil, which a server does not
    )

    num_ahead = count_available_cores()
    sizes = [file.stat().st_size if file.exists() else 0 for file in files]
    total_bytes, done_bytes, is_done = max(sum(sizes), 1), 0, False
    with ThreadPoolExecutor(num_ahead) as pool:

        def prepare(path: AnyPath) -> OpenFile:
            file = OpenFile(path, name_below(path, folder).as_posix(), options)
            file_format = find_format(path)
            if file_format is None or not file_format.is_slow or len(files) == 1:
                return file
            return replace(file, ahead=pool.submit(file.read))

        try:
            ahead = deque(map(prepare, files[:num_ahead]))
            for i, size in enumerate(sizes):
                file = ahead.popleft()
                count = f" ({i + 1:,} of {len(files):,})" if len(files) > 1 else ""
                report_progress(f"reading {file.name}{count}", done_bytes / total_bytes)
                yield file
                done_bytes += size
                ahead.extend(map(prepare, files[i + num_ahead : i + num_ahead + 1]))
            is_done = True
        finally:
            report_progress("")
            if not is_done:
                pool.shutdown(wait=False, cancel_futures=True)
                stop_reading()


def _is_remote(path: ObjectPath) -> bool:
    """Return whether a file is read in object storage directly; others are copied first."""
    file_format = find_format(path)
    return file_format is not None and file_format.reads_objects


@overload
def expand_path(path: Path) -> tuple[Path, list[Path]]: ...


@overload
def expand_path(path: AnyPath) -> tuple[AnyPath, list[AnyPath]]: ...


def expand_path(path: AnyPath) -> tuple[AnyPath, Any]:
    """Return the files that a path stands for, and the folder that their names are relative to; an
    archive with several tables is unpacked."""
    if path.is_dir():
        return path, list_files(path)
    if isinstance(path, Path) and path.suffix.lower() == ".zip" and path.is_file():
        unpacked = compression.unpack_tables(path) if path.stat().st_size else None
        if unpacked is not None:
            return unpacked
    folder, matches = find_matches(path) if isinstance(path, Path) else path.find_matches()
    if folder == path or path.exists():  # no pattern, or a file whose name looks like one
        return path.parent, [path]
    files = _select_readable(folder, matches)
    if not files:
        raise UserError(f"{path}: matches no file that ends in {', '.join(READABLE)} (data.path)")
    return folder, files


def _select_readable(folder: AnyPath, files: Iterable[AnyPath]) -> list[AnyPath]:
    """Select the tables among some files, except hidden ones."""
    readable = [
        file
        for file in files
        if file.is_file()
        and is_readable(file)
        and not any(part.startswith(HIDDEN) for part in name_below(file, folder).parts)
    ]
    return select_tables(readable)


def list_files(folder: AnyPath) -> list[AnyPath]:
    """List the readable files below a folder, except hidden ones.

    A compressed copy beside its file is left out, and so are ZIP archives beside any files.
    """
    try:
        files = sorted(_select_readable(folder, folder.rglob("*")), key=to_pure)
    except OSError as error:
        raise UserError(f"{folder}: cannot be listed ({error.strerror})") from None
    if not files:
        raise UserError(f"{folder}: contains no {', '.join(READABLE)} file")
    present = set(files)
    copies = {file for file in files if file.suffix == ".gz" and file.with_suffix("") in present}
    plain = [file for file in files if file.suffix.lower() != ".zip" and file not in copies]
    return plain or files


def read_file(
    path: AnyPath, *, name: str, setting: str = "data.path", options: ReadOptions = PLAIN
) -> DataTable:
    """Read a file that is one table."""
    return read_parts(path, name=name, setting=setting, options=options)[0]


def read_parts(
    path: AnyPath, *, name: str, setting: str = "data.path", options: ReadOptions = PLAIN
) -> list[DataTable]:
    """Read the tables of one file: one, or one per sheet where the options name several sheets.

    `files` of a table says what was read: the format with its details, units, and notes.
    """
    with _open_source(path, name, setting) as source:
        tables = source.format.load().read(source.file, options)
        return [_set_decimal(table, options) for table in tables]


def _set_decimal(table: DataTable, options: ReadOptions) -> DataTable:
    """Return a table with the configured decimal mark, where the file itself does not show one."""
    return replace(table, decimal=table.decimal or options.decimal)


class _Source(NamedTuple):
    format: FileFormat
    file: InputFile
    unpacked: UnpackedFile | None


@contextmanager
def _open_source(path: AnyPath, name: str, setting: str) -> Iterator[_Source]:
    """Find the format of a file, and unpack or copy the file where its reader needs that.

    An error about the copy becomes one about the file.
    """
    head = b""
    if isinstance(path, ObjectPath):
        compression.refuse_missing(path, setting)
    elif path.suffix.lower() in ("", *READABLE):
        head = compression.read_head(path, setting)
    if path.suffix.lower() not in READABLE:
        known = ", ".join(READABLE)
        raise UserError(f'{path}: unsupported format "{path.suffix or path.name}"; use {known}')
    file_format = find_format(path)
    if file_format is not None and (isinstance(path, Path) or file_format.reads_objects):
        origin = compression.find_origin(path)
        with restoring_name(origin):
            yield _Source(file_format, InputFile(path, name, head), origin)
        return
    unpacked = compression.unpack(path)
    inner_name = name + unpacked.label.removeprefix(str(path))
    with restoring_name(unpacked):
        head = compression.read_head(unpacked.path, setting)
        inner_format = find_format(unpacked.path)
        assert inner_format is not None  # `unpack` refuses other content
        yield _Source(inner_format, InputFile(unpacked.path, inner_name, head), unpacked)
