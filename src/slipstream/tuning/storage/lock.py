"""The lock of a journal that processes of several machines write to.

It is a symbolic link beside the journal: creating one succeeds for a single process, also on NFS.
Its target names the holder, so a lock is only ever released by its holder or, where the holder is
dead, by one of those that wait. Optuna's own locks release whatever lock is there, so two processes
that find a dead holder at the same moment may both get it.
"""

import hashlib
import platform
import time
import uuid
from contextlib import suppress
from pathlib import Path

import psutil
from optuna.storages.journal._file import BaseJournalFileLock

GRACE_S = 30.0
"""After which the unchanged lock of another machine counts as that of a dead process; a holder
needs milliseconds"""
LOOK_EVERY_S = 1.0
"""How often those who wait look who the holder is. NFS caches what was looked up, and may then go
on reporting a lock that has been released; it does not cache failures to create one"""
MAX_PAUSE_S = 0.05
"""Between attempts"""


class SymlinkLock(BaseJournalFileLock):
    """A lock on `path`, for one thread at a time."""

    def __init__(self, path: str, grace_s: float = GRACE_S) -> None:
        self.path, self.grace_s = Path(f"{path}.lock"), grace_s
        self._process = _identify_process()
        self._target = ""

    def acquire(self) -> bool:
        self._target = ":".join(map(str, (*self._process, uuid.uuid4().hex[:8])))
        looked_at, pause_s = time.monotonic(), 0.001
        holder, since = "", looked_at
        while True:
            with suppress(FileExistsError):
                self.path.symlink_to(self._target)
                return True
            now = time.monotonic()
            if now - looked_at > LOOK_EVERY_S:
                looked_at = now
                if (current := self._read_target()) != holder:
                    holder, since = current, now
                if holder and (_is_dead(holder, self._process) or now - since > self.grace_s):
                    self._remove(holder)
                    continue
            time.sleep(pause_s)
            pause_s = min(pause_s * 2, MAX_PAUSE_S)

    def is_held(self) -> bool:
        """Whether no other process has taken this lock for that of a dead one."""
        return self._read_target() == self._target

    def release(self) -> None:
        if self.is_held():
            with suppress(OSError):
                self.path.unlink()

    def _read_target(self) -> str:
        """Return the holder; "" where the lock is free."""
        try:
            return str(self.path.readlink())
        except FileNotFoundError:
            return ""
        except OSError:  # a file, as Optuna's other lock creates it
            with suppress(OSError):
                return f"{self.path.lstat().st_ino} {self.path.lstat().st_mtime_ns}"
            return ""

    def _remove(self, holder: str) -> None:
        """Remove the lock of a dead holder, unless another process has just done so."""
        aside = self.path.with_name(f"{self.path.name}.{uuid.uuid4().hex}")
        try:
            self.path.rename(aside)  # succeeds for one of those that wait
        except FileNotFoundError:
            return
        with suppress(OSError):
            if (target := str(aside.readlink())) != holder:
                self.path.symlink_to(target)  # that of a new holder, which gets it back
        aside.unlink(missing_ok=True)


def _identify_process() -> tuple[str, int, int]:
    """Return what tells others on this machine whether this process is alive: the machine, the
    number of the process and when it started.

    Together under 60 characters, since ext4 then stores the link without a block of its own, and
    removes it in microseconds instead of milliseconds.
    """
    names = [platform.node()]
    with suppress(OSError):  # containers may share a name, but not the numbers of processes
        names.append(Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii"))
        names.append(str(Path("/proc/self/ns/pid").readlink()))
    machine = hashlib.sha256("".join(names).encode()).hexdigest()[:12]
    process = psutil.Process()
    return machine, process.pid, int(process.create_time())


def _is_dead(holder: str, observer: tuple[str, int, int]) -> bool:
    """Whether the holder is a process of this machine that has ended."""
    try:
        machine, pid, since, _ = holder.split(":")
        if machine != observer[0]:
            return False
        process = psutil.Process(int(pid))
        same = abs(process.create_time() - int(since)) < 2
        return not same or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
    except (psutil.Error, ValueError, OverflowError):
        return False
