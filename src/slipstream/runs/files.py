"""Atomic writes: files are written under a temporary name, flushed, then renamed."""

import glob
import hashlib
import json
import math
import os
import platform
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from slipstream.base.errors import UserError

TEMPORARY = re.compile(
    r"\.(?P<name>.+?)\.(?:(?P<host>[0-9a-f]{8})-)?(?P<pid>\d+)\.(?P<end>tmp|old)"
)
"""Temporary names of `replace_atomically`; version 0.1 had no host in them"""


def to_json(value: Any, *, indent: int | None = 1, ascii_only: bool = False) -> str:
    """Format strict JSON: numbers that are not finite become null."""
    return json.dumps(
        _replace_nonfinite(value), indent=indent, allow_nan=False, ensure_ascii=ascii_only
    )


def _replace_nonfinite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {str(k): _replace_nonfinite(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_replace_nonfinite(v) for v in value]
    return value


def read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path}: is missing; was the run finished?") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise UserError(f"{path}: cannot be read as JSON ({error})") from None


def write_text(path: Path, text: str) -> None:
    with replace_atomically(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: Path, value: Any) -> None:
    write_text(path, to_json(value) + "\n")


@contextmanager
def replace_atomically(path: Path) -> Iterator[Path]:
    """Yield a temporary path whose file or folder then replaces `path`, flushed to disk.

    Leftovers of killed writers of the same file are removed.
    """
    for leftover in path.parent.glob(f".{glob.escape(path.name)}.*"):
        match = TEMPORARY.fullmatch(leftover.name)
        if match and match["name"] == path.name and _is_dead(match):
            _recover(leftover, match)
    prefix = f".{path.name}.{_hash_host()}-{os.getpid()}"
    temporary, old = (path.with_name(f"{prefix}.{end}") for end in ("tmp", "old"))
    remove(temporary)
    try:
        yield temporary
        flush_folder(temporary)
        if path.is_dir():  # a rename cannot replace a folder that is not empty
            path.replace(old)
        temporary.replace(path)
        flush(path.parent)
    finally:
        remove(temporary)
        remove(old)


def recover_leftovers(folder: Path, *, all_writers: bool = False) -> None:
    """Remove the leftovers of killed writers in a folder, and restore files that they had moved
    aside.

    With `all_writers`, also leftovers of other machines: the caller knows that nobody writes there.
    """
    with suppress(OSError):  # a read-only folder is reported elsewhere
        for leftover in list(folder.iterdir()):
            match = TEMPORARY.fullmatch(leftover.name)
            is_own = match and match["host"] == _hash_host() and int(match["pid"]) == os.getpid()
            if match and (all_writers or is_own or _is_dead(match)):
                _recover(leftover, match)


def _recover(leftover: Path, match: re.Match[str]) -> None:
    path = leftover.with_name(match["name"])
    with suppress(OSError):  # another process may have been faster
        if match["end"] == "old" and not path.exists():  # killed between its two renames
            leftover.replace(path)
        else:
            remove(leftover)


def _is_dead(match: re.Match[str]) -> bool:
    """Whether the writer of a temporary file ran on this machine and has ended."""
    import psutil  # takes 20 ms

    return match["host"] in (None, _hash_host()) and not psutil.pid_exists(int(match["pid"]))


def _hash_host() -> str:
    return hashlib.sha256(platform.node().encode()).hexdigest()[:8]


def flush_folder(folder: Path) -> None:
    """Flush a file, or a folder with its content, to disk."""
    for path in [*folder.rglob("*"), folder]:
        if not path.is_symlink():
            flush(path)


def flush(path: Path) -> None:
    """Flush a file or a folder's entries to disk. Windows cannot flush a folder, and a file only
    with write access."""
    if os.name == "nt" and path.is_dir():
        return
    descriptor = os.open(path, os.O_RDWR if os.name == "nt" else os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove(path: Path) -> None:
    """Remove a file, a folder with its content, or a link, but never a link's target."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
