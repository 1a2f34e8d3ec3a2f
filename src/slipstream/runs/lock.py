"""A lock that one process holds at a time, and that ends with it however it ends.

`flock` on a file, not the file's existence, is the lock: the kernel gives it to one taker, and
frees it when the holder dies. POSIX record locks (`lockf`) would not do: two threads of one process
share them, and they are lost as soon as any descriptor of the file is closed. What a fork keeps of
a `flock` is its descriptor; a forked child closes it at once, so a worker that outlives its parent
holds nothing. The file only names the holder, for the message to others.

The file is removed when the lock is given back. A taker may then have locked a file that has no
name any more, so each checks that the name still is that of the file it has locked.
"""

from __future__ import annotations

import errno
import json
import os
import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from slipstream.errors import ResumableError, UserError
from slipstream.runs.files import remove

NAME = "lock.json"
WITHOUT_FLOCK = "lock.held"
"""Holds the lock by its existence where the file system, or the system, has no `flock`"""
NO_FLOCK = {errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL}
DISK_FULL = {errno.ENOSPC, errno.EDQUOT}
_held: set[int] = set()
"""Descriptors of this process, for a forked child to close"""
_closes_in_children = False


class Lock:
    """A lock that this process holds. Its folder may be renamed meanwhile."""

    def __init__(self, folder: Path, descriptor: int | None) -> None:
        self.folder, self._descriptor, self._owner = folder, descriptor, os.getpid()

    def release(self) -> None:
        """Give it back; in a forked child, which never had it, do nothing."""
        if os.getpid() != self._owner:
            return
        for name in (NAME,) if self._descriptor is not None else (NAME, WITHOUT_FLOCK):
            with suppress(OSError):
                (self.folder / name).unlink()
        if self._descriptor is not None:
            import fcntl

            _held.discard(self._descriptor)
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)  # also where a fork kept a descriptor
            os.close(self._descriptor)


def take(folder: Path) -> Lock:
    """Lock a folder; a UserError names the holder where there is one."""
    while True:
        try:
            descriptor = os.open(folder / NAME, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            raise _cannot_be_written(folder, error) from None
        try:
            locked = _flock(descriptor)
            if locked is None:
                return _take_without_flock(folder)
            if not locked:
                raise UserError(_who_writes(folder))
            if not _is_at(folder / NAME, descriptor):  # its holder gave it back just now
                continue
            _refuse_others(folder)
            _name_holder(descriptor)
            _close_in_children(descriptor)
            lock, descriptor = Lock(folder, descriptor), -1
            return lock
        finally:
            if descriptor >= 0:
                os.close(descriptor)


def remove_leftover(folder: Path) -> None:
    """Remove a folder whose process was killed: its lock is free, or was not even made."""
    try:
        descriptor = os.open(folder / NAME, os.O_RDWR)
    except FileNotFoundError:
        with suppress(OSError):  # only an empty folder goes away
            folder.rmdir()
        return
    except OSError:
        return
    try:
        others = _holder(folder / NAME).get("host", platform.node()) != platform.node()
        if _flock(descriptor) and not others:
            with suppress(OSError):  # another one may have been faster
                remove(folder)
    finally:
        os.close(descriptor)


def _flock(descriptor: int) -> bool | None:
    """Whether the lock was got; None where there are no such locks."""
    try:
        import fcntl
    except ImportError:  # Windows
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno in NO_FLOCK:
            return None
        raise
    return True


def _is_at(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _close_in_children(descriptor: int) -> None:
    global _closes_in_children
    _held.add(descriptor)
    if not _closes_in_children:
        _closes_in_children = True
        os.register_at_fork(after_in_child=_close_inherited)


def _close_inherited() -> None:
    while _held:
        with suppress(OSError):
            os.close(_held.pop())


def _take_without_flock(folder: Path) -> Lock:
    """Lock by a file that only one can create. What a killed process leaves has to be removed by
    hand: to tell that its process is gone and to remove it are two steps, and another may come in
    between."""
    path = folder / WITHOUT_FLOCK
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
    except FileExistsError:
        who = _holder(path)
        said = f"process {who['pid']} on {who['host']} holds" if who else "a process holds"
        raise UserError(
            f"{folder}: {said} this run; if that one is gone, remove {path} (there are no file "
            "locks here that would tell)"
        ) from None
    except OSError as error:
        raise _cannot_be_written(folder, error) from None
    _name_holder(descriptor)
    os.close(descriptor)
    return Lock(folder, None)


def _name_holder(descriptor: int) -> None:
    process = psutil.Process()
    mine = {"host": platform.node(), "pid": process.pid, "since": process.create_time()}
    with suppress(OSError):  # on a full disk the lock holds all the same
        os.ftruncate(descriptor, 0)
        os.write(descriptor, json.dumps(mine | {"by": "flock"}).encode())


def _holder(path: Path) -> dict[str, Any]:
    """Who a lock file names; nobody where it names none (any more)."""
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return found | {"host": str(found["host"]), "pid": int(found["pid"])}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def _who_writes(folder: Path) -> str:
    for _ in range(20):  # the holder may be about to write its name
        who = _holder(folder / NAME)
        if who:
            where = "this machine" if who["host"] == platform.node() else who["host"]
            return f"{folder}: process {who['pid']} on {where} is writing to this run"
        time.sleep(0.005)
    return f"{folder}: another process is writing to this run"


def _refuse_others(folder: Path) -> None:
    """Refuse a lock whose `flock` says nothing: of another machine, which this file system may not
    ask, and of version 0.1, which held it by the file alone."""
    who = _holder(folder / NAME)
    if who and who["host"] != platform.node():
        raise UserError(
            f"{folder}: process {who['pid']} on {who['host']} holds this run; if that one is gone, "
            f"remove {folder / NAME}"
        )
    if who and "by" not in who and _lives(who):
        raise UserError(f"{folder}: process {who['pid']} on this machine is writing to this run")


def _lives(who: dict[str, Any]) -> bool:
    try:
        process = psutil.Process(who["pid"])
        same = abs(process.create_time() - float(who["since"])) < 1.0
        return bool(same and process.status() != psutil.STATUS_ZOMBIE)
    except (psutil.Error, KeyError, TypeError, ValueError, OverflowError):
        return False


def _cannot_be_written(folder: Path, error: OSError) -> Exception:
    said = f"{folder}: cannot be written to ({error.strerror})"
    return (
        ResumableError(f"{said}; make room and try again")
        if error.errno in DISK_FULL
        else UserError(said)
    )


@contextmanager
def holding(folder: Path) -> Iterator[Lock]:
    """Hold a folder's lock meanwhile."""
    lock = take(folder)
    try:
        yield lock
    finally:
        lock.release()
