"""Compressed files, gzip and ZIP archives with one table inside, text in other encodings, and
copies of files in object storage.

They are written to a temporary folder that is removed when the process ends, so that readers map
them into memory, and read them by row group, like any other file.
"""

import gzip
import shutil
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import IO, NamedTuple

from slipstream.errors import UserError
from slipstream.object_storage import PARALLEL, AnyPath, ObjectPath, explain

SUFFIXES = (".gz", ".zip")
MOST_NAMES = 5
BLOCK_CHARACTERS = 1 << 20
ERRORS = (zipfile.BadZipFile, gzip.BadGzipFile, EOFError, zlib.error, NotImplementedError)
"""What damaged files raise"""


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
        except ERRORS as error:
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
    target = _make_path(path.name)
    line = 1
    with target.open("w", encoding="utf-8", newline="") as file:
        try:
            with path.open(encoding=encoding, newline="") as content:
                while block := content.read(BLOCK_CHARACTERS):
                    file.write(block)
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
    opened = path.open("rb") if isinstance(path, Path) else path.open_stream()
    with opened as packed, gzip.open(packed) as content:
        try:
            content.peek(1)
        except gzip.BadGzipFile:
            raise UserError(f"{path}: is not gzip data; correct the ending of its name") from None
        return UnpackedFile(_copy(content, inner.name), str(path))


def _unpack_zip(path: Path, formats: Collection[str]) -> UnpackedFile:
    with zipfile.ZipFile(path) as archive:
        members = [one for one in archive.infolist() if not one.is_dir() and not _is_hidden(one)]
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
        with archive.open(table) as content:
            return UnpackedFile(
                _copy(content, Path(table.filename).name), f"{path}/{table.filename}"
            )


def _is_hidden(member: zipfile.ZipInfo) -> bool:
    return any(part.startswith((".", "__MACOSX")) for part in Path(member.filename).parts)


def _copy(content: gzip.GzipFile | IO[bytes], name: str) -> Path:
    path = _make_path(name)
    with path.open("wb") as file:
        shutil.copyfileobj(content, file, 1 << 20)
    return path


def _make_path(name: str) -> Path:
    return Path(tempfile.mkdtemp(dir=_make_folder().name)) / name


@cache
def _make_folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="slipstream-")
