"""The tables of the data screen: tasks that run once, in reader processes, and uploads."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import re
import secrets
import shutil
import sys
import time
import unicodedata
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream import config as configs
from slipstream.app.paths import resolve_below
from slipstream.base.errors import UserError, parse_json_message
from slipstream.config import Config
from slipstream.data.formats import ENDINGS, PACKED

IDLE_S = 120.0
"""How long a process waits for another task"""
TASK_S = 3600.0
MAX_LINE = 64 << 20
"""Bytes of an answer, which is one line; asyncio's own limit is 64 kB"""


class ReaderPool:
    """Hands tasks to processes, one task per process at a time."""

    def __init__(self, most: int, *, nice: int) -> None:
        self._slots = asyncio.Semaphore(most)
        self._nice = nice
        self._idle: list[Process] = []
        self._all: set[Process] = set()

    async def prepare(self, count: int) -> None:
        """Keep this many processes waiting, unless all are busy."""
        while len(self._idle) < count and not self._slots.locked():
            self._release(await self._start())

    async def run(self, request: dict[str, Any], report: Callable[[float], None]) -> Any:
        """Return the result of a task; a problem with the file is a UserError."""
        async with self._slots:
            process = await self._take()
            try:
                async with asyncio.timeout(TASK_S):
                    answer = await _talk(process, request, report)
            except TimeoutError:
                raise UserError(f"reading the file took more than {TASK_S:g} s") from None
            finally:
                if process.returncode is None:
                    self._release(process)
        if "error" in answer:
            message = parse_json_message(answer["error"])
            raise UserError(message, setting=answer.get("setting"))
        return answer["result"]

    async def _take(self) -> Process:
        while self._idle:
            process = self._idle.pop()
            if process.returncode is None:
                return process
        return await self._start()

    async def _start(self) -> Process:
        # -P: modules in the folder, which is the working directory, are not imported
        command = (sys.executable, "-P", "-m", "slipstream.app.tables.reader", str(self._nice))
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            limit=MAX_LINE,
        )
        self._all = {started for started in self._all if started.returncode is None} | {process}
        return process

    async def close(self) -> None:
        """End all processes."""
        for process in self._all:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()
            assert process.stdin is not None
            process.stdin.close()

    def _release(self, process: Process) -> None:
        self._idle.append(process)
        asyncio.get_running_loop().call_later(IDLE_S, self._end, process)

    def _end(self, process: Process) -> None:
        """End a process that waits, unless it was used in the meantime."""
        if process in self._idle:
            self._idle.remove(process)
            assert process.stdin is not None
            process.stdin.close()


async def _talk(
    process: Process, request: dict[str, Any], report: Callable[[float], None]
) -> dict[str, Any]:
    assert process.stdin is not None
    assert process.stdout is not None
    is_done = False
    try:
        process.stdin.write(json.dumps(request).encode() + b"\n")
        with suppress(ConnectionError):
            await process.stdin.drain()
        while line := await process.stdout.readline():
            answer: dict[str, Any] = json.loads(line)
            if "progress" not in answer:
                is_done = True
                return answer
            report(answer["progress"])
        raise UserError("the file could not be read: the process that read it ended")
    finally:
        if not is_done:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()


FORMAT = 1
"""Version of the written files; another number makes everything be read again"""
MAX_CACHE_BYTES = 16 << 30
MAX_SHARE = 0.5
"""Largest share of the disk, free and cached, that the cache may use"""
MAX_FILES = 10_000
"""Files of a folder whose times of change are looked at"""

MAX_CORRELATED = 24
"""Columns whose correlations are computed, at most"""


@dataclass(frozen=True)
class CachedTable:
    """A version of a file or folder, and the folder with its findings."""

    path: Path
    folder: Path
    overrides: tuple[str, ...] = ()
    """Settings that say how the file is read, as `--set` takes them"""

    def read(self, name: str) -> Any:
        """Return the result of a task, None where it has not run."""
        try:
            return json.loads((self.folder / f"{name}.json").read_text("utf-8"))
        except (OSError, ValueError):
            return None

    def write(self, name: str, value: Any) -> None:
        """Write the result of a task. It can be computed again, so nothing waits for the disk."""
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
        return numbers[:MAX_CORRELATED]


class TableCache:
    """The folders of all files."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def locate(self, path: Path, overrides: Sequence[str] = ()) -> CachedTable:
        """Return the cache folder for the present version of a file."""
        name = _hash([FORMAT, str(path), *overrides])
        version = _hash([_describe_version(file) for file in _list_files(path)])
        return CachedTable(path, self.root / f"{name}-{version}", tuple(overrides))

    def open(self, table: CachedTable) -> None:
        """Create the cache folder of a file, or mark it as used; remove older versions and, where
        there is too much, the folders that were not used for the longest time."""
        table.folder.mkdir(parents=True, exist_ok=True)
        with suppress(OSError):
            os.utime(table.folder)
        name = table.folder.name.partition("-")[0]
        older = []
        for folder in self.root.iterdir():
            if folder == table.folder:
                continue
            if folder.name.partition("-")[0] == name:
                shutil.rmtree(folder, ignore_errors=True)
            else:
                older.append(folder)
        self._trim(older, _measure(table.folder))

    def _trim(self, folders: list[Path], used: int) -> None:
        sizes = {folder: _measure(folder) for folder in folders}
        total = used + sum(sizes.values())
        limit = min(MAX_CACHE_BYTES, MAX_SHARE * (total + shutil.disk_usage(self.root).free))
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
    return sorted(file for file, _ in zip(files, range(MAX_FILES), strict=False))


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


MAX_UPLOAD_BYTES = 8 << 30
RESERVE_BYTES = 512 << 20
"""Bytes of the disk that uploads leave free"""
SLOW_S, MIN_BYTES = 30.0, 64 << 10
"""Seconds in which at least `MIN_BYTES` must arrive"""
MAX_UPLOADS = 4
"""Uploads at the same time"""
WRITE_BYTES = 1 << 20
"""Bytes that are collected before they are written: chunks of a request are small"""
MAX_NAME = 80
UPLOADS = "data"
"""The folder of uploads, below the app's folder"""
PART = ".upload-"
STALE_S = 3600.0
"""Age from which an unfinished upload is taken for one of a killed server"""


class UploadError(UserError):
    """A refused upload, with its HTTP status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def find_limit(folder: Path) -> int:
    """Return the largest number of bytes that an upload may have now."""
    return max(min(MAX_UPLOAD_BYTES, shutil.disk_usage(folder).free - RESERVE_BYTES), 0)


def clean_name(name: str) -> str:
    """Return a name of plain characters for an upload; its ending must be a known format."""
    last = re.split(r"[/\\]", name)[-1]
    plain = unicodedata.normalize("NFKD", last).encode("ascii", "ignore").decode()
    plain = re.sub(r"[^A-Za-z0-9._-]+", "-", plain)
    lower, ending = plain.lower(), ""
    for packed in PACKED:
        if lower.endswith(packed):
            ending = packed
            lower = lower.removesuffix(packed)
    inner = next(
        (
            known_ending
            for known_ending in sorted(ENDINGS, key=len, reverse=True)
            if lower.endswith(known_ending)
        ),
        "",
    )
    if not inner and ending != ".zip":
        text = Path(last[-100:]).suffix or last[-100:]
        known = ", ".join((*ENDINGS, *PACKED))
        raise UploadError(415, f'unsupported format "{text}"; use {known}')
    stem = lower.removesuffix(inner)
    stem = plain[: len(stem)].strip("._-")[:MAX_NAME].strip("._-") or "table"
    return f"{stem}{inner}{ending}"


class Uploads:
    """Takes uploads for a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._count = 0

    async def receive(self, name: str, size: int | None, chunks: AsyncIterator[bytes]) -> str:
        """Write an upload; return its path below the folder. An upload that is cut off leaves
        nothing."""
        name = clean_name(name)
        if self._count >= MAX_UPLOADS:
            raise UploadError(429, f"{MAX_UPLOADS} uploads are under way; wait for one to end")
        limit = find_limit(self.folder)
        if size is not None and size > limit:
            raise _refuse(size, limit)
        self._count += 1
        try:
            folder = resolve_below(self.folder, UPLOADS)
            folder.mkdir(exist_ok=True)
            _remove_stale(folder)
            part = folder / f"{PART}{secrets.token_hex(8)}"
            try:
                await _write(part, chunks, limit)
                target = await asyncio.to_thread(_publish, part, folder, name)
            finally:
                with suppress(OSError):
                    part.unlink(missing_ok=True)
        finally:
            self._count -= 1
        return f"{UPLOADS}/{target.name}"


def _refuse(size: int, limit: int) -> UploadError:
    if limit < MAX_UPLOAD_BYTES:
        return UploadError(
            507, f"the file has {_format(size)}, but the disk has room for {_format(limit)} more"
        )
    return UploadError(
        413,
        f"the file has {_format(size)} or more; an upload has at most {_format(limit)}. Copy "
        "larger files into the folder instead",
    )


def _format(size: int) -> str:
    return f"{size / 1e9:.2f} GB" if size >= 1e7 else f"{size:,} bytes"


async def _write(path: Path, chunks: AsyncIterator[bytes], limit: int) -> None:
    """Write chunks as they arrive, while they come fast enough and are not too large."""
    total, pending = 0, bytearray()
    with path.open("xb") as file:
        async for chunk in _watch_speed(chunks):
            total += len(chunk)
            if total > limit:
                raise _refuse(total, limit)
            pending += chunk
            if len(pending) >= WRITE_BYTES:
                await asyncio.to_thread(file.write, pending)
                pending = bytearray()
        await asyncio.to_thread(file.write, pending)
    if not total:
        raise UploadError(400, "the file is empty")


async def _watch_speed(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Yield chunks for as long as enough bytes arrive."""
    begin, count = time.monotonic(), 0
    arrival: asyncio.Future[bytes] | None = None
    try:
        while True:
            arrival = arrival or asyncio.ensure_future(anext(chunks, b""))
            await asyncio.wait([arrival], timeout=begin + SLOW_S - time.monotonic())
            if arrival.done():
                chunk, arrival = arrival.result(), None
                if not chunk:
                    return
                count += len(chunk)
                yield chunk
            if time.monotonic() - begin >= SLOW_S:
                if count < MIN_BYTES:
                    slow = f"the upload was too slow: {count:,} bytes in {SLOW_S:g} s"
                    raise UploadError(408, slow)
                begin, count = time.monotonic(), 0
    finally:
        if arrival is not None:
            arrival.cancel()


def _publish(part: Path, folder: Path, name: str) -> Path:
    """Give a finished upload its name, or the next free one."""
    stem, dot, endings = name.partition(".")
    number = 1
    while True:
        target = folder / (name if number == 1 else f"{stem}-{number}{dot}{endings}")
        try:
            os.close(os.open(target, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))
        except FileExistsError:
            number += 1
            continue
        part.replace(target)
        return target


def _remove_stale(folder: Path) -> None:
    """Remove the unfinished uploads of servers that were killed."""
    for path in folder.glob(f"{PART}*"):
        with suppress(OSError):
            if time.time() - path.stat().st_mtime > STALE_S:
                path.unlink()


WAIT_S = 1.5
"""How long a request waits for a task before it is answered with its progress"""
SLOW = ("findings", "correlations")
"""Tasks that nobody waits for: they run after others, at low priority"""


@dataclass
class _Running:
    task: asyncio.Task[Any]
    progress: float = 0.0


class Tables:
    """The tables of a folder, read on request."""

    def __init__(self, root: Path) -> None:
        self.cache = TableCache(root)
        self._prompt = ReaderPool(3, nice=0)
        self._slow = ReaderPool(1, nice=10)
        self._checks = ReaderPool(1, nice=5)
        self._running: dict[tuple[str, str], _Running] = {}

    async def prepare(self) -> None:
        """Start processes for the next file: one reads the time, another the first column."""
        await self._prompt.prepare(2)

    async def close(self) -> None:
        """End the processes."""
        await self._prompt.close()
        await self._slow.close()
        await self._checks.close()

    async def ensure(self, table: CachedTable, task: str, *arguments: Any) -> float | None:
        """Run a task that has not run yet; return None when it is done, else its progress."""
        name = "-".join([task, *map(str, arguments)])
        if table.read(name) is not None:
            return None
        key = table.folder.name, name
        running = self._running.get(key)
        if running is None:
            self.cache.open(table)
            running = self._running[key] = self._start(table, task, arguments)
        await asyncio.wait([running.task], timeout=WAIT_S)
        if not running.task.done():
            return running.progress
        if self._running.get(key) is running:
            del self._running[key]
        running.task.result()
        return None

    def _start(self, table: CachedTable, task: str, arguments: Sequence[Any]) -> _Running:
        pool = self._slow if task in SLOW else self._prompt

        def report(progress: float) -> None:
            running.progress = progress

        running = _Running(asyncio.create_task(pool.run(_describe(table, task, arguments), report)))
        return running

    async def check(self, config: Config) -> dict[str, Any]:
        """Return the result of `check_data` for a config; a UserError says why it cannot be
        trained."""
        request = {"task": "check", "arguments": [configs.to_json_values(config)]}
        result: dict[str, Any] = await self._checks.run(request, lambda _: None)
        return result

    async def read_rows(self, table: CachedTable, begin: int, count: int) -> Any:
        """Return a page of rows."""
        request = _describe(table, "rows", (begin, count))
        return await self._prompt.run(request, lambda _: None)


def _describe(table: CachedTable, task: str, arguments: Sequence[Any]) -> dict[str, Any]:
    return {
        "task": task,
        "arguments": list(arguments),
        "path": str(table.path),
        "folder": str(table.folder),
        "overrides": list(table.overrides),
    }
