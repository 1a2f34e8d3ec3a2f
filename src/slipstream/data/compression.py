"""Local files to read: how they begin, and copies of compressed files (gzip, and ZIP archives), of
text in other encodings, and of files in object storage.

Copies are written to a temporary folder, so that readers map them into memory, and read them by row
group, like any other file. The folder is removed when the process ends; that of a process that was
killed, by the next one that unpacks something.
"""

from __future__ import annotations

import atexit
import copy
import gzip
import os
import shutil
import stat
import struct
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import IO, NamedTuple, TypeVar

from slipstream.base.errors import EmptyFileError, UserError
from slipstream.base.phases import report_progress
from slipstream.base.storage import PARALLEL, AnyPath, ObjectPath, explain
from slipstream.base.text import find_nearest
from slipstream.data.formats import ENDINGS, select_members
from slipstream.runs import lock as locks

MAX_NAMES = 5
BLOCK_BYTES, BLOCK_CHARACTERS = 1 << 20, 1 << 20
MAX_RATIO, ANY_RATIO_BYTES = 200, 256 << 20
"""How many times its size a file may unpack to, from so many bytes on. Tables of measurements
unpack to 3 to 30 times their size, a file that is made to fill a disk to up to a thousand times."""
MAX_DISK_SHARE = 0.8
"""The share of the temporary folder's free space that copies may fill"""
FOLDER = "slipstream-unpacked-"
ERRORS = (
    *(zipfile.BadZipFile, gzip.BadGzipFile, EOFError, zlib.error, struct.error),
    *(IndexError, ValueError, RuntimeError),
)
"""The exceptions that damaged files raise; some pass through zipfile unchanged"""


class DamagedArchiveError(Exception):
    """A compressed file is damaged and cannot be unpacked."""


class UnpackedFile(NamedTuple):
    """A file from within a compressed one, or a copy of one in object storage."""

    path: Path
    label: str
    """The original file's path, and the name of the file inside if it is an archive"""


Item = TypeVar("Item")
HEAD_BYTES = 1 << 16
"""The number of bytes that are read to recognise a file's format"""
_unpacked: dict[tuple[AnyPath, int, int, str], UnpackedFile] = {}


def restore_name(error: UserError, unpacked: UnpackedFile) -> UserError:
    """Return an error about a temporary file as one about the file that it was made from."""
    path, label = str(unpacked.path), unpacked.label
    result = copy.copy(error)
    result.args = (error.message.map_texts(lambda text: text.replace(path, label)),)
    result.fix = None
    return result


@contextmanager
def restoring_name(unpacked: UnpackedFile | None) -> Iterator[None]:
    """Make errors about a temporary file errors about the file that it was made from."""
    try:
        yield
    except UserError as error:
        if unpacked is None:
            raise
        raise restore_name(error, unpacked) from None


def iterate_restoring(items: Iterable[Item], unpacked: UnpackedFile | None) -> Iterator[Item]:
    """Yield items that are read from a temporary file, with errors about the original file."""
    with restoring_name(unpacked):
        yield from items


def read_head(path: Path, setting: str) -> bytes:
    """Return the first bytes of a file; an absent or empty file is refused.

    A FIFO or a device is refused as well: it may have no end, or wait for a writer forever.
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
        raise EmptyFileError(f"{path}: the file is empty")
    return head


def refuse_missing(path: ObjectPath, setting: str) -> None:
    """Refuse an object that is absent or empty, before any of it is read."""
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        raise _explain_missing(path, setting) from None
    if not size:
        raise EmptyFileError(f"{path}: the file is empty")


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


def is_readable(path: AnyPath) -> bool:
    """Return whether a file's name promises a table, compressed or not."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes[-1:] == [".gz"]:
        suffixes.pop()
    return suffixes[-1:] == [".zip"] or bool(suffixes and suffixes[-1] in ENDINGS)


def unpack(path: AnyPath) -> UnpackedFile:
    """Return a file's unpacked copy, made once per process while the file stays the same; a file in
    object storage is at least copied."""
    if path.suffix.lower() == ".gz":
        return _write_once(path, "", lambda: _unpack_gzip(path))
    if isinstance(path, Path):
        return _write_once(path, "", lambda: _unpack_zip(path))
    copied = _write_once(path, "copy", lambda: _download(path))
    if path.suffix.lower() != ".zip":
        return copied
    inner = _write_once(copied.path, "", lambda: _unpack_zip(copied.path))
    return UnpackedFile(inner.path, inner.label.replace(str(copied.path), str(path)))


def unpack_objects(paths: Sequence[ObjectPath]) -> None:
    """Copy files in object storage to local ones ahead of their use, several at a time."""
    _make_folder()
    with ThreadPoolExecutor(PARALLEL) as pool:
        for _ in pool.map(unpack, paths):
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


def rewrite(path: Path, way: str, convert: Callable[[bytes], bytes]) -> UnpackedFile:
    """Return a text file with its lines converted, some at a time; written once per process, for
    each name of a way, while the file stays the same."""

    def write() -> UnpackedFile:
        target = _make_path(path.name)
        with _open_new(target) as file, path.open("rb") as content:
            while lines := content.readlines(BLOCK_BYTES):
                file.write(convert(b"".join(lines)))
        return UnpackedFile(target, str(path))

    return _write_once(path, way, write)


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
    line, target = 1, _make_path(path.name)
    with _open_new(target) as file:
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


def _unpack_gzip(path: AnyPath) -> UnpackedFile:
    inner = Path(path.stem)
    if inner.suffix.lower() not in ENDINGS:
        raise UserError(
            f"{path}: the name does not say what is inside; rename it, as in {inner}.csv.gz "
            f"({', '.join(ENDINGS)})"
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

        target = _make_path(inner.name)
        _copy(path, content, target, size, find_share)
        return UnpackedFile(target, str(path))


def _unpack_zip(path: Path) -> UnpackedFile:
    with zipfile.ZipFile(path) as archive:
        tables = _list_tables(path, archive)
        if len(tables) > 1:
            names = ", ".join(table.filename for table in tables[:MAX_NAMES])
            more = f" and {len(tables) - MAX_NAMES} more" * (len(tables) > MAX_NAMES)
            raise UserError(
                f"{path}: contains {len(tables)} tables ({names}{more}); unpack it and set "
                "data.path to the folder"
            )
        (table,) = tables
        target = _make_path(Path(table.filename).name)
        _unpack_member(path, archive, table, target)
        return UnpackedFile(target, f"{path}/{table.filename}")


def unpack_tables(path: Path) -> tuple[Path, list[Path]] | None:
    """Return a folder with the tables of a ZIP archive, and these; None where it has only one. They
    are unpacked once per process while the archive stays the same."""

    def write() -> UnpackedFile:
        with zipfile.ZipFile(path) as archive:
            tables = _list_tables(path, archive)
            folder = _make_path("tables")
            for table in tables if len(tables) > 1 else ():
                inner = Path(table.filename)
                parts = inner.relative_to(inner.anchor).parts
                target = folder.joinpath(*(part for part in parts if part != ".."))
                target.parent.mkdir(parents=True, exist_ok=True)
                _unpack_member(path, archive, table, target)
                _origins[target] = UnpackedFile(target, f"{path}/{table.filename}")
        return UnpackedFile(folder, str(path))

    folder = _write_once(path, "tables", write).path
    files = sorted(file for file in _origins if file.is_relative_to(folder))
    return (folder, files) if files else None


_origins: dict[Path, UnpackedFile] = {}
"""The files that archives with several tables were unpacked to"""


def find_origin(path: AnyPath) -> UnpackedFile | None:
    """Return what a file was unpacked from, where an archive has several tables."""
    return _origins.get(path) if isinstance(path, Path) else None


def _list_tables(path: Path, archive: zipfile.ZipFile) -> list[zipfile.ZipInfo]:
    """List the tables of an archive."""
    members = {
        Path(member.filename): member
        for member in archive.infolist()
        if not _is_hidden(member) and not member.is_dir()
    }
    tables = select_members(list(members))
    if not tables:
        raise UserError(f"{path}: contains no {', '.join(ENDINGS)} file")
    return [members[table] for table in tables]


def _unpack_member(
    path: Path, archive: zipfile.ZipFile, table: zipfile.ZipInfo, target: Path
) -> None:
    if table.flag_bits & 1:
        raise UserError(f"{path}: is encrypted; unpack it first")
    if table.file_size > (free := _find_room()):
        raise _explain_room(path, table.file_size, free)
    with archive.open(table) as content:
        size = max(table.file_size, 1)
        _copy(path, content, target, table.compress_size, lambda done: done / size)


def _is_hidden(member: zipfile.ZipInfo) -> bool:
    parts = Path(member.filename).parts
    return not parts or any(part.startswith((".", "__MACOSX")) for part in parts)


def _copy(
    path: AnyPath,
    content: gzip.GzipFile | IO[bytes],
    target: Path,
    packed_bytes: int,
    find_share: Callable[[int], float | None],
) -> None:
    """Write the unpacked content of a file, block by block; a content that would fill the disk is
    refused."""
    limit = max(MAX_RATIO * packed_bytes, ANY_RATIO_BYTES)
    free = _find_room()
    done = 0
    with _open_new(target) as file:
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


def _read_block(content: gzip.GzipFile | IO[bytes]) -> bytes:
    try:
        return content.read(BLOCK_BYTES)
    except OSError as error:  # bz2 raises one without a number for what is damaged
        if error.errno is not None:
            raise
        raise DamagedArchiveError(str(error)) from None


@contextmanager
def _open_new(target: Path) -> Iterator[IO[bytes]]:
    """Open a new file in the temporary folder; it is removed again if it is not written to its
    end."""
    try:
        with target.open("wb") as file:
            yield file
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
    """Return the temporary folder of this process, and remove the folders of processes that were
    killed."""
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
