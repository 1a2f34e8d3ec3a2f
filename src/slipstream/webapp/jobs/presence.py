"""Which servers and workers of a folder are alive, and who may wait for or use a device.

Locks are `flock`s: the kernel releases them when their process ends, however it ends.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

import psutil

from slipstream.runs import to_json
from slipstream.webapp.jobs.store import is_alive, read_object

LEAST_FREE = 0.1
"""Share of the memory that is free, or else no process waits with torch in it"""
LEAST_FREE_BYTES = 1 << 30
RETRY_S = 0.01


class DeviceLock:
    """A lock of a device: `use` while a job runs on it, `wait` of the one spare worker."""

    def __init__(self, root: Path, device: str, purpose: str) -> None:
        self.path = root / "workers" / f"{device.replace(':', '-')}.{purpose}"
        self._descriptor: int | None = None

    def acquire(self, most_s: float = 0.0) -> bool:
        """Take the lock; False where another process has it, and keeps it for some seconds."""
        until = time.monotonic() + most_s
        while not (has_lock := self._try()) and time.monotonic() < until:
            time.sleep(RETRY_S)
        return has_lock

    def _try(self) -> bool:
        import fcntl

        self.path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(descriptor)
            return False
        self._descriptor = descriptor
        return True

    def release(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def is_free(self) -> bool:
        """Whether no process has the lock right now."""
        free = self.acquire()
        self.release()
        return free


def announce_server(root: Path) -> Path:
    """Write down that this process serves the folder; workers wait as long as one does."""
    folder = root / "servers"
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.glob("*.json"):
        if not is_alive(read_object(path)):
            path.unlink(missing_ok=True)
    process = psutil.Process()
    path = folder / f"{process.pid}.json"
    path.write_text(
        to_json({"pid": process.pid, "since": process.create_time(), "at": time.time()}),
        encoding="utf-8",
    )
    return path


def announce_ready(root: Path, device: str) -> None:
    """Write down that this process waits for jobs with everything imported."""
    process = psutil.Process()
    path = root / "workers" / f"{device.replace(':', '-')}.json"
    path.write_text(
        to_json({"pid": process.pid, "since": process.create_time(), "at": time.time()}),
        encoding="utf-8",
    )


def has_ready_worker(root: Path, device: str) -> bool:
    """Whether a worker has everything imported and lives."""
    return is_alive(read_object(root / "workers" / f"{device.replace(':', '-')}.json"))


def has_server(root: Path) -> bool:
    """Whether a server of the folder is alive."""
    with suppress(OSError):
        return any(is_alive(read_object(path)) for path in (root / "servers").glob("*.json"))
    return False


def has_spare_memory() -> bool:
    """Whether a process may wait with torch in its memory."""
    memory = psutil.virtual_memory()
    return bool(memory.available >= max(LEAST_FREE * memory.total, LEAST_FREE_BYTES))
