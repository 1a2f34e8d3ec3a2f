"""What is kept of files: a folder for each version of a file, the least used removed first."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FORMAT = 1
"""Of what is written; another number makes everything be read again"""
MOST_BYTES = 16 << 30
MOST_SHARE = 0.5
"""Of the free disk and what is kept"""
MOST_FILES = 10_000
"""Files of a folder whose times of change are looked at"""

MOST_CORRELATED = 24
"""Columns whose correlations are computed, at most"""


@dataclass(frozen=True)
class CachedTable:
    """A version of a file or a folder of files, and where is kept what was found in it."""

    path: Path
    folder: Path
    overrides: tuple[str, ...] = ()
    """Settings that say how the file is read, as `--set` takes them"""

    def read(self, name: str) -> Any:
        """Return what a task found, None where it has not run."""
        try:
            return json.loads((self.folder / f"{name}.json").read_text("utf-8"))
        except (OSError, ValueError):
            return None

    def write(self, name: str, value: Any) -> None:
        """Write what a task found. It can be found again, so that nothing waits for the disk."""
        path = self.folder / f"{name}.json"
        temporary = path.with_name(f".{name}.{os.getpid()}")
        temporary.write_text(json.dumps(value), "utf-8")
        temporary.replace(path)

    def list_correlated(self) -> list[int]:
        """Return the columns of the matrix of correlations: numbers, in the order of the file."""
        facts = self.read("table")
        times = facts["time"]["columns"] if facts["time"] else ()
        numbers = [
            number
            for number, column in enumerate(facts["columns"])
            if column["type"] == "number" and column["name"] not in times
        ]
        return numbers[:MOST_CORRELATED]


class TableCache:
    """The folders of all files."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def locate(self, path: Path, overrides: Sequence[str] = ()) -> CachedTable:
        """Return the place of the present version of a file."""
        name = _hash([FORMAT, str(path), *overrides])
        version = _hash([_describe_version(one) for one in _list_files(path)])
        return CachedTable(path, self.root / f"{name}-{version}", tuple(overrides))

    def open(self, table: CachedTable) -> None:
        """Make the place of a file, or mark it as used; remove older versions and, where there is
        too much, what was not used for the longest time."""
        table.folder.mkdir(parents=True, exist_ok=True)
        with suppress(OSError):
            os.utime(table.folder)
        name = table.folder.name.partition("-")[0]
        others = []
        for folder in self.root.iterdir():
            if folder == table.folder:
                continue
            if folder.name.partition("-")[0] == name:
                shutil.rmtree(folder, ignore_errors=True)
            else:
                others.append(folder)
        self._trim(others, _measure(table.folder))

    def _trim(self, folders: list[Path], used: int) -> None:
        sizes = {folder: _measure(folder) for folder in folders}
        total = used + sum(sizes.values())
        limit = min(MOST_BYTES, MOST_SHARE * (total + shutil.disk_usage(self.root).free))
        for folder in sorted(sizes, key=_read_time):
            if total <= limit:
                return
            shutil.rmtree(folder, ignore_errors=True)
            total -= sizes[folder]


def _hash(values: Sequence[Any]) -> str:
    text = json.dumps(values).encode()
    return hashlib.blake2b(text, digest_size=12).hexdigest()


def _list_files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    files = (file for file in path.rglob("[!.]*") if file.is_file())
    return sorted(file for file, _ in zip(files, range(MOST_FILES), strict=False))


def _describe_version(path: Path) -> tuple[str, int, int]:
    status = path.stat()
    return str(path), status.st_size, status.st_mtime_ns


def _measure(folder: Path) -> int:
    total = 0
    with suppress(OSError):
        for entry in os.scandir(folder):
            total += entry.stat().st_size
    return total


def _read_time(folder: Path) -> float:
    try:
        return folder.stat().st_mtime
    except OSError:
        return 0.0
