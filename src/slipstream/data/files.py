"""The files that a config names, each read as its ending says."""

import codecs
import stat
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, overload

import pyarrow as pa

from slipstream.base.errors import DATA_PATH, UserError
from slipstream.base.phases import report_progress
from slipstream.base.storage import AnyPath, ObjectPath, name_below, parse_path, to_pure
from slipstream.base.text import find_nearest
from slipstream.config import SIMULATED, Data, find_matches
from slipstream.data import columns, compression
from slipstream.data.compression import UnpackedFile, is_readable
from slipstream.data.formats import arrow, csv, excel, matlab
from slipstream.data.formats.csv import describe_layout
from slipstream.data.formats.isolated import read_isolated, stop_reading
from slipstream.data.formats.options import ReadOptions
from slipstream.data.table import (
    FILE_COLUMN,
    DataTable,
    concatenate_tables,
    read_memory,
    wrap_table,
)

READERS = {".csv": "csv", ".tsv": "csv", ".txt": "csv", ".parquet": "parquet", ".pq": "parquet"}
READERS |= dict.fromkeys((".xlsx", ".xlsm", ".xlsb", ".xls", ".ods"), "excel")
READERS |= {".mat": "matlab"}
READERS |= {".arrow": "arrow", ".feather": "arrow", ".ipc": "arrow"}
DELIMITERS = {",": "commas", ";": "semicolons", "\t": "tabs"}
ENDINGS = (*READERS, *compression.SUFFIXES)
SET_FOLDERS = ("train", "val", "test")
HEAD_BYTES = 1 << 16
LARGE_BYTES = 32 << 20
"""Size of a text file from which on some of its rows are read without the others"""
HIDDEN = (".", "~$")
"""How names begin that folders hide: of hidden files, and of those that Excel has open"""
PLAIN = ReadOptions()


def read_tables(data: Data, table: Any) -> list[DataTable]:
    """Read the tables that the config names, or take over the one passed in their place.

    Their columns have a type from here on: numbers in a CSV are parsed once, now. Cells that mean
    "missing" by `data.na` are null, and times over several columns have a column of their own.
    """
    if table is not None:
        tables = [read_memory(table, decimal=data.decimal, time=data.time_column)]
    elif not data.paths or not all(data.paths):
        what = "not set" if not data.paths else "empty"
        raise UserError(
            f"data.path is {what}; name a file or a folder: set it in the config, or pass "
            + DATA_PATH,
            setting="data.path",
        )
    elif data.paths[0].startswith(SIMULATED):
        tables = [_simulate(data.paths[0])]
    else:
        tables = _read_paths(data)
    return [_mark(each, data) for each in tables]


def _mark(table: DataTable, data: Data) -> DataTable:
    return columns.join_times(columns.mark_missing(table, data.na), data.time_columns)


def read_rows(data: Data, file: Path, begin: int, end: int) -> DataTable:
    """Read some rows of one file of a config, as `read_tables` reads all of them.

    A large text file is read up to `end` only; types then follow from these rows alone. Of a
    workbook, the first sheet is read.
    """
    options = ReadOptions.from_data(data)
    is_text = READERS.get(file.suffix.lower()) == "csv" and options.encoding is None
    is_large = is_text and file.exists() and file.stat().st_size > LARGE_BYTES
    if is_large:
        table = _read_text_rows(file, options, begin, end)
    else:
        table = read_parts(file, name=file.name, options=options)[0]
    if FILE_COLUMN in data.ids:
        table = concatenate_tables([table])
    _parse_text([table], data)
    table = _mark(table, data)
    if is_large:
        return table
    if begin >= table.num_rows:
        raise UserError(f"{file.name}: has {table.num_rows:,} rows, none from {begin:,} on")
    return table.slice_rows(begin, min(end, table.num_rows))


def _read_text_rows(path: Path, options: ReadOptions, begin: int, end: int) -> DataTable:
    """Read the cells of some rows of a text file, block by block."""
    opened = csv.open_csv(path, path.name, read_head(path, "data.path"), options.skip_rows)
    parts, first = [], 0
    for batch in opened.batches:
        low, high = max(begin - first, 0), min(end - first, batch.num_rows)
        if low < high:
            parts.append(batch.slice(low, high - low))
        first += batch.num_rows
        if first >= end:
            break
    if not parts:
        raise UserError(f"{path.name}: has {first:,} rows, none from {begin:,} on")
    cells = pa.Table.from_batches(parts)
    decimal = options.decimal
    if decimal is None and opened.delimiter != ",":
        decimal = columns.find_mark(cells)
    table = wrap_table(
        cells, path.name, delimiter=opened.delimiter, header_lines=begin, units=opened.units
    )
    return replace(table, decimal=decimal)


def _read_paths(data: Data) -> list[DataTable]:
    if data.split.folders:
        _check_folders(data)
    tables = list(read_files(data.paths, ReadOptions.from_data(data)))
    formats = {bool(table.delimiter) for table in tables}
    if len(formats) > 1:  # the numbers of a CSV join those of other formats
        _parse_text(tables, data)
    if data.split.folders:  # a set's files stay tables of their own
        if FILE_COLUMN in data.ids:
            tables = [concatenate_tables([each]) for each in tables]
    elif data.ids and (len(tables) > 1 or FILE_COLUMN in data.ids):
        tables = [concatenate_tables(tables)]
    _parse_text(tables, data)
    return tables


def _parse_text(tables: Sequence[DataTable], data: Data) -> None:
    compared = data.targets if data.task == "classify" and data.targets else ()
    keep_text = {*data.time_columns, data.split.by, *data.ids, *data.where, *compared}
    for each in tables:
        columns.parse_text(each, keep_text=keep_text, na=columns.list_texts(data.na))


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
        objects = [one for one in files if isinstance(one, ObjectPath) and not _is_parquet(one)]
        if len(objects) > 1:
            compression.unpack_objects(objects, READERS)
        for file in open_files(folder, files, options):
            yield from file.read()


class OpenFile(NamedTuple):
    """A file that can be read, and perhaps is being read already."""

    path: AnyPath
    name: str
    read: Callable[[], list[DataTable]]


def open_files(
    folder: AnyPath, files: Sequence[AnyPath], options: ReadOptions
) -> Iterator[OpenFile]:
    """Yield the files in order, and report how far reading them has come.

    Workbooks and MATLAB files, which take their time, are read ahead, several at a time.
    """
    from slipstream.base.machine import (
        count_available_cores,  # imports psutil, which a server does not
    )

    num_ahead = count_available_cores()
    sizes = [file.stat().st_size if file.exists() else 0 for file in files]
    total_bytes, done_bytes, is_done = max(sum(sizes), 1), 0, False
    with ThreadPoolExecutor(num_ahead) as pool:

        def prepare(path: AnyPath) -> OpenFile:
            name = name_below(path, folder).as_posix()
            read = partial(read_parts, path, name=name, options=options)
            is_slow = READERS.get(path.suffix.lower()) in ("excel", "matlab") and len(files) > 1
            return OpenFile(path, name, pool.submit(read).result if is_slow else read)

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


def _is_parquet(path: AnyPath) -> bool:
    return READERS.get(path.suffix.lower()) == "parquet"


@overload
def expand_path(path: Path) -> tuple[Path, list[Path]]: ...


@overload
def expand_path(path: AnyPath) -> tuple[AnyPath, list[AnyPath]]: ...


def expand_path(path: AnyPath) -> tuple[AnyPath, Any]:
    """Return the files that a path stands for, and the folder that their names are relative to."""
    if path.is_dir():
        return path, list_files(path)
    folder, matches = find_matches(path) if isinstance(path, Path) else path.find_matches()
    if folder == path or path.exists():  # no pattern, or a file whose name looks like one
        return path.parent, [path]
    files = _select_readable(folder, matches)
    if not files:
        raise UserError(f"{path}: matches no file that ends in {', '.join(ENDINGS)} (data.path)")
    return folder, files


def _select_readable(folder: AnyPath, files: Iterable[AnyPath]) -> list[AnyPath]:
    """Select the files of a known format, except hidden ones."""
    return [
        file
        for file in files
        if file.is_file()
        and is_readable(file, READERS)
        and not any(part.startswith(HIDDEN) for part in name_below(file, folder).parts)
    ]


def list_files(folder: AnyPath) -> list[AnyPath]:
    """List the readable files below a folder, except hidden ones.

    A compressed copy beside its file is left out, and so are ZIP archives beside any files.
    """
    try:
        files = sorted(_select_readable(folder, folder.rglob("*")), key=to_pure)
    except OSError as error:
        raise UserError(f"{folder}: cannot be listed ({error.strerror})") from None
    if not files:
        raise UserError(f"{folder}: contains no {', '.join(ENDINGS)} file")
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
    head = b""
    if isinstance(path, ObjectPath):
        _refuse_missing(path, setting)
    elif path.suffix.lower() in ("", *ENDINGS):
        head = read_head(path, setting)
    if path.suffix.lower() not in ENDINGS:
        known = ", ".join(ENDINGS)
        raise UserError(f'{path}: unsupported format "{path.suffix or path.name}"; use {known}')
    if isinstance(path, ObjectPath) and _is_parquet(path):
        return [arrow.read_parquet(path, name)]
    if isinstance(path, Path) and path.suffix.lower() in READERS:
        return _read_plain(path, name, head, options)
    unpacked = compression.unpack(path, READERS)
    inner = unpacked.label.removeprefix(str(path))
    try:
        head = read_head(unpacked.path, setting)
        return _read_plain(unpacked.path, name + inner, head, options)
    except UserError as error:
        raise restore_name(error, unpacked) from None


def restore_name(error: UserError, unpacked: UnpackedFile) -> UserError:
    """Return an error about a temporary file as one about the file that it was made from."""
    path, label = str(unpacked.path), unpacked.label
    return UserError(error.message.map_texts(lambda text: text.replace(path, label)))


def read_head(path: Path, setting: str) -> bytes:
    """Return how a file begins; one that is absent or empty is refused.

    So is what is no regular file: a FIFO or a device may have no end, or wait for a writer forever.
    """
    try:
        mode = path.stat().st_mode
        if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
            raise UserError(
                f"{path}: is a FIFO, a socket or a device, not a regular file ({setting}); write "
                "the data to a file"
            )
        with path.open("rb") as file:
            head = file.read(HEAD_BYTES)
    except FileNotFoundError:
        raise _explain_missing(path, setting) from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    if not head.strip():
        raise UserError(f"{path}: the file is empty")
    return head


def _refuse_missing(path: ObjectPath, setting: str) -> None:
    """Refuse an object that is absent or empty, before any of it is read."""
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        raise _explain_missing(path, setting) from None
    if not size:
        raise UserError(f"{path}: the file is empty")


def _explain_missing(path: AnyPath, setting: str) -> UserError:
    hint = _suggest_file(path)
    return UserError(f"{path}: there is no such file or folder ({setting}){hint}")


def _suggest_file(path: AnyPath) -> str:
    """Return the name beside a missing file that may have been meant, or the folder that is
    missing."""
    folder = path.parent
    if not folder.is_dir():
        return f"; there is no folder {folder}"
    nearest = find_nearest(path.name, (file.name for file in folder.iterdir()))
    return f'; did you mean "{nearest}"?' if nearest else ""


def _read_plain(path: Path, name: str, head: bytes, options: ReadOptions) -> list[DataTable]:
    match READERS[path.suffix.lower()]:
        case "csv":
            table = _read_text(path, name, head, options)
        case "parquet":
            table = arrow.read_parquet(path, name)
        case "excel":
            excel.refuse_other_files(path, head)
            return read_isolated("excel", path, name, options)
        case "matlab":
            plain = matlab.read_matlab(path, name, head, options)
            table = plain or read_isolated("matlab", path, name, options)[0]
        case _:
            table = arrow.read_arrow(path, name)
    return [replace(table, decimal=table.decimal or options.decimal)]


def _read_text(path: Path, name: str, head: bytes, options: ReadOptions) -> DataTable:
    if options.encoding is None or codecs.lookup(options.encoding).name == "utf-8":
        return _read_csv(path, name, head, options)
    unpacked = compression.transcode(path, options.encoding)
    try:
        return _read_csv(unpacked.path, name, read_head(unpacked.path, ""), options)
    except UserError as error:
        raise restore_name(error, unpacked) from None


def _read_csv(path: Path, name: str, head: bytes, options: ReadOptions) -> DataTable:
    file = csv.read_csv(path, name, head, options.skip_rows)
    decimal = options.decimal
    if decimal is None and file.delimiter != ",":
        decimal = columns.find_mark(file.table)
    table = wrap_table(
        file.table,
        name,
        path=path,
        format=describe_csv(file.delimiter, decimal, options.encoding),
        delimiter=file.delimiter,
        header_lines=file.header_lines,
        units=file.units,
        notes=(*describe_layout(file.lines_above, file.units, options, "line"), *file.notes),
    )
    return replace(table, decimal=decimal)


def describe_csv(delimiter: str, decimal: str | None, encoding: str | None) -> str:
    """Describe the format of a text file."""
    details = [DELIMITERS[delimiter]] if delimiter != "," else []
    details += ["decimal comma"] if decimal == "," else []
    details += [encoding] if encoding else []
    return ", ".join(["CSV", *details])
