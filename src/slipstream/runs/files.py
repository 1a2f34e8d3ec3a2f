"""Files that are written whole or not at all: under a temporary name, flushed, then renamed."""

from __future__ import annotations

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

import psutil

from slipstream.errors import UserError

TEMPORARY = re.compile(
    r"\.(?P<name>.+?)\.(?:(?P<host>[0-9a-f]{8})-)?(?P<pid>\d+)\.(?P<end>tmp|old)"
)
"""What `replacing` writes to; version 0.1 left the host out"""


def to_json(value: Any, *, indent: int | None = 1, ascii_only: bool = False) -> str:
    """JSON that every reader takes: what is not finite becomes null."""
    return json.dumps(_finite(value), indent=indent, allow_nan=False, ensure_ascii=ascii_only)


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {str(k): _finite(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(v) for v in value]
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
    """Yield a temporary name; what is written there takes `path`'s place, flushed to disk.

    What a writer of the same file left behind when it was killed is removed.
    """
    for leftover in path.parent.glob(f".{_escaped(path.name)}.*"):
        found = TEMPORARY.fullmatch(leftover.name)
        if found and found["name"] == path.name and _is_dead(found):
            _recover(leftover, found)
    temporary, old = (_beside(path, end) for end in ("tmp", "old"))
    remove(temporary)
    try:
        yield temporary
        flush_folder(temporary)
        if path.is_dir():  # a folder can only take the place of an empty one
            path.replace(old)
        temporary.replace(path)
        flush(path.parent)
    finally:
        remove(temporary)
        remove(old)


def recover_leftovers(folder: Path, *, all_writers: bool = False) -> None:
    """Remove what killed writers left in a folder, and put back what they had moved aside.

    With `all_writers`, whoever wrote it: the caller knows that nobody else writes there.
    """
    with suppress(OSError):  # a folder that takes no change has its own message
        for leftover in list(folder.iterdir()):
            found = TEMPORARY.fullmatch(leftover.name)
            mine = found and found["host"] == _host() and int(found["pid"]) == os.getpid()
            if found and (all_writers or mine or _is_dead(found)):
                _recover(leftover, found)


def _recover(leftover: Path, found: re.Match[str]) -> None:
    path = leftover.with_name(found["name"])
    with suppress(OSError):  # another one may have been faster
        if found["end"] == "old" and not path.exists():  # killed between its two renames
            leftover.replace(path)
        else:
            remove(leftover)


def _is_dead(found: re.Match[str]) -> bool:
    """Whether the writer of a temporary file ran on this machine, and runs no more."""
    host = found["host"]
    return host in (None, _host()) and not psutil.pid_exists(int(found["pid"]))


def _beside(path: Path, end: str) -> Path:
    return path.with_name(f".{path.name}.{_host()}-{os.getpid()}.{end}")


def _host() -> str:
    return hashlib.sha256(platform.node().encode()).hexdigest()[:8]


def _escaped(name: str) -> str:
    return re.sub(r"([*?[])", r"[\1]", name)


def flush_folder(folder: Path) -> None:
    """Flush a folder and all that is in it to disk."""
    for path in [*folder.rglob("*"), folder]:
        flush(path)


def flush(path: Path) -> None:
    """Have the system write a file or a folder's list of names to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
