"""Compressed files, gzip and ZIP archives with one table inside, text in other encodings, and
copies of files in object storage.

They are written to a temporary folder, so that readers map them into memory, and read them by row
group, like any other file. The folder is removed when the process ends; that of a process that was
killed, by the next one that unpacks something.
"""

from __future__ import annotations

import atexit
import gzip
import os
import shutil
import stat
import struct
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import cache
from importlib.abc import MetaPathFinder
from pathlib import Path
from typing import IO, Any, NamedTuple

import pyarrow as pa

from slipstream.base.errors import UserError
from slipstream.base.phases import report_progress
from slipstream.base.storage import PARALLEL, AnyPath, ObjectPath, explain
from slipstream.runs import lock as locks

SUFFIXES = (".gz", ".zip")
MOST_NAMES = 5
BLOCK_BYTES, BLOCK_CHARACTERS = 1 << 20, 1 << 20
MAX_RATIO, ANY_RATIO_BYTES = 200, 256 << 20
"""How many times its size a file may unpack to, from so many bytes on. Tables of measurements
unpack to 3 to 30 times their size, a file that is made to fill a disk to up to a thousand times."""
MAX_DISK_SHARE = 0.8
"""Of the free space of the temporary folder"""
FOLDER = "slipstream-unpacked-"
ERRORS = (
    *(zipfile.BadZipFile, gzip.BadGzipFile, EOFError, zlib.error, struct.error),
    *(IndexError, ValueError, RuntimeError),
)
"""What damaged files raise; zipfile lets some errors of its own pass"""


class DamagedArchiveError(Exception):
    """What is packed cannot be unpacked."""


class UnpackedFile(NamedTuple):
    """A file from within a compressed one, or a copy of one in object storage."""

    path: Path
    label: str
    """The original file's path, and the name of the file inside if it is an archive"""


_unpacked: dict[tuple[AnyPath, int, int, str], UnpackedFile] = {}


def is_readable(path: AnyPath, formats: Collection[str]) -> bool:
    """Return whether a file's name promises one of these formats, compressed or not."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes[-1:] == [".gz"]:
        suffixes.pop()
    return suffixes[-1:] == [".zip"] or bool(suffixes and suffixes[-1] in formats)


def unpack(path: AnyPath, formats: Collection[str]) -> UnpackedFile:
    """Unpack a file, once per process while it stays the same; an object is copied at least."""
    if path.suffix.lower() == ".gz":
        return _write_once(path, "", lambda: _unpack_gzip(path, formats))
    if isinstance(path, Path):
        return _write_once(path, "", lambda: _unpack_zip(path, formats))
    copied = _write_once(path, "copy", lambda: _download(path))
    if path.suffix.lower() != ".zip":
        return copied
    inner = _write_once(copied.path, "", lambda: _unpack_zip(copied.path, formats))
    return UnpackedFile(inner.path, inner.label.replace(str(copied.path), str(path)))


def unpack_objects(paths: Sequence[ObjectPath], formats: Collection[str]) -> None:
    """Copy objects ahead, several at a time."""
    _make_folder()
    with ThreadPoolExecutor(PARALLEL) as pool:
        for _ in pool.map(lambda path: unpack(path, formats), paths):
            pass


def _download(path: ObjectPath) -> UnpackedFile:
    size = path.stat().st_size
    if size > (free := _find_room()):
        raise _explain_room(path, size, free)
    target = _make_path(path.name)
    path.download(target)
    return UnpackedFile(target, str(path))


def transcode(path: Path, encoding: str) -> UnpackedFile:
    """Return a text file as UTF-8, written once per process while it stays the same."""
    return _write_once(path, encoding, lambda: _transcode(path, encoding))


def _write_once(path: AnyPath, encoding: str, write: Callable[[], UnpackedFile]) -> UnpackedFile:
    status = path.stat()
    key = (path.resolve(), status.st_size, status.st_mtime_ns, encoding)
    if key not in _unpacked:
        try:
            _unpacked[key] = write()
        except (DamagedArchiveError, *ERRORS) as error:
            raise UserError(f"{path}: cannot be unpacked ({error}); it is damaged") from None
        except OSError as error:
            if isinstance(path, ObjectPath) and error.errno is None:
                raise explain(path, error) from None
            raise UserError(
                f"{path}: cannot be unpacked to {tempfile.gettempdir()} "
                f"({error.strerror or error}); set TMPDIR to another folder, or unpack it yourself"
            ) from None
    return _unpacked[key]


def _transcode(path: Path, encoding: str) -> UnpackedFile:
    line = 1
    with _make_file(path.name) as (target, file):
        try:
            with path.open(encoding=encoding, newline="") as content:
                while block := content.read(BLOCK_CHARACTERS):
                    file.write(block.encode())
                    line += block.count("\n")
        except UnicodeError as error:
            raise UserError(
                f"{path}: is not {encoding} text (data.encoding; from line {line} on: {error})"
            ) from None
    return UnpackedFile(target, str(path))


def _unpack_gzip(path: AnyPath, formats: Collection[str]) -> UnpackedFile:
    inner = Path(path.stem)
    if inner.suffix.lower() not in formats:
        raise UserError(
            f"{path}: the name does not say what is inside; rename it, as in {inner}.csv.gz "
            f"({', '.join(formats)})"
        )
    size = path.stat().st_size
    opened = path.open("rb") if isinstance(path, Path) else path.open_stream()
    with opened as packed, gzip.open(packed) as content:
        try:
            content.peek(1)
        except gzip.BadGzipFile:
            raise UserError(f"{path}: is not gzip data; correct the ending of its name") from None

        def find_share(_: int) -> float | None:  # a stream of an object does not say where it is
            return packed.tell() / size if isinstance(path, Path) else None

        return UnpackedFile(_copy(path, content, inner.name, size, find_share), str(path))


def _unpack_zip(path: Path, formats: Collection[str]) -> UnpackedFile:
    with zipfile.ZipFile(path) as archive:
        members = [one for one in archive.infolist() if not _is_hidden(one) and not one.is_dir()]
        tables = [one for one in members if Path(one.filename).suffix.lower() in formats]
        if not tables:
            raise UserError(f"{path}: contains no {', '.join(formats)} file")
        if len(tables) > 1:
            names = ", ".join(one.filename for one in tables[:MOST_NAMES])
            more = f" and {len(tables) - MOST_NAMES} more" * (len(tables) > MOST_NAMES)
            raise UserError(
                f"{path}: contains {len(tables)} tables ({names}{more}); unpack it and set "
                "data.path to the folder"
            )
        table = tables[0]
        if table.flag_bits & 1:
            raise UserError(f"{path}: is encrypted; unpack it first")
        if table.file_size > (free := _find_room()):
            raise _explain_room(path, table.file_size, free)
        with archive.open(table) as content:
            name, size = Path(table.filename).name, max(table.file_size, 1)
            copy = _copy(path, content, name, table.compress_size, lambda done: done / size)
            return UnpackedFile(copy, f"{path}/{table.filename}")


def _is_hidden(member: zipfile.ZipInfo) -> bool:
    parts = Path(member.filename).parts
    return not parts or any(part.startswith((".", "__MACOSX")) for part in parts)


def _copy(
    path: AnyPath,
    content: gzip.GzipFile | IO[bytes],
    name: str,
    packed_bytes: int,
    find_share: Callable[[int], float | None],
) -> Path:
    """Write what a file unpacks to, block by block; one that would fill the disk is refused."""
    limit = max(MAX_RATIO * packed_bytes, ANY_RATIO_BYTES)
    free = _find_room()
    done = 0
    with _make_file(name) as (target, file):
        while block := _read_block(content):
            file.write(block)
            done += len(block)
            if done > limit:
                raise UserError(
                    f"{path}: unpacks to more than {MAX_RATIO} times its size of "
                    f"{packed_bytes / 1e6:,.1f} MB, as a file does that is made to fill a disk; if "
                    "it is what you expect, unpack it yourself"
                )
            if done > free:
                raise _explain_room(path, done, free)
            report_progress(f"unpacking {path.name}", find_share(done))
        report_progress("")
    return target


def _read_block(content: gzip.GzipFile | IO[bytes]) -> bytes:
    try:
        return content.read(BLOCK_BYTES)
    except OSError as error:  # bz2 raises one without a number for what is damaged
        if error.errno is not None:
            raise
        raise DamagedArchiveError(str(error)) from None


@contextmanager
def _make_file(name: str) -> Iterator[tuple[Path, IO[bytes]]]:
    """Make a file in the temporary folder, which is removed if it does not become whole."""
    target = _make_path(name)
    try:
        with target.open("wb") as file:
            yield target, file
    except BaseException:
        target.unlink(missing_ok=True)
        raise


def _find_room() -> int:
    """Return how many bytes may be unpacked."""
    return int(MAX_DISK_SHARE * shutil.disk_usage(_make_folder()).free)


def _explain_room(path: AnyPath, needed: int, room: int) -> UserError:
    return UserError(
        f"{path}: unpacks to {needed / 1e9:,.1f} GB or more, but {tempfile.gettempdir()} has room "
        f"for {room / 1e9:,.1f} GB; set TMPDIR to another folder, or unpack it yourself"
    )


def _make_path(name: str) -> Path:
    return Path(tempfile.mkdtemp(dir=_make_folder())) / name


@cache
def _make_folder() -> Path:
    """Make the folder of this process, and remove those of processes that were killed."""
    for leftover in Path(tempfile.gettempdir()).glob(f"{FOLDER}*"):
        with suppress(OSError):
            status = leftover.lstat()
            if stat.S_ISDIR(status.st_mode) and status.st_uid == _get_user():
                locks.remove_leftover(leftover)
    while True:
        folder = Path(tempfile.mkdtemp(prefix=FOLDER))
        try:
            locks.acquire(folder)
        except UserError:
            if folder.exists():
                raise
            continue  # another process took it for a leftover
        atexit.register(_remove_folder, folder, os.getpid())
        return folder


def _get_user() -> int:
    return os.getuid() if hasattr(os, "getuid") else 0  # Windows has none, and says 0 for all


def _remove_folder(folder: Path, owner: int) -> None:
    if os.getpid() == owner:  # not in a fork
        shutil.rmtree(folder, ignore_errors=True)


TIME, INDEX = "time", "index"
"""Names of an unnamed index that holds dates: the first that is free"""
ACCEPTED = (
    "pass a pandas, polars, duckdb or pyarrow table, a dict of columns, or a numpy array with "
    "columns=[...]"
)


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
    """Return the fields of a structured array; other arrays have no names."""
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
        free = [one for one in (time, TIME, INDEX) if one and one not in columns]
        name = str(name) if name is not None else free[0] if free else None
        if name is not None and name not in columns:
            table = table.append_column(name, pa.array(index))
    return table


class _PandasRefusal(MetaPathFinder):
    """A finder of modules that says there is no pandas."""

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
