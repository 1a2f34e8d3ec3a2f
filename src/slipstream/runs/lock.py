"""A lock that one process holds at a time and that the kernel releases when the process ends.

The lock is `flock` on a file, not the file's existence: the kernel grants it to one process and
releases it when that process dies. POSIX record locks (`lockf`) do not suffice: two threads of one
process share them, and closing any descriptor of the file releases them. A fork inherits the
descriptor of a `flock`; the child closes it at once, so a worker that outlives its parent holds
nothing. The file's content only names the holder for error messages.

The file is removed when the lock is released. Another process may then have locked a file that no
longer has a name, so after locking it checks that the name still refers to the same file.
"""

from __future__ import annotations

import errno
import json
import os
import platform
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

from slipstream.base.errors import ResumableError, UserError
from slipstream.runs.files import remove

ASK_EVERY_S = 10.0
"""The shortest interval between two queries of SLURM: lists of runs check every lock each time, and
the controller serves the whole cluster"""
QUERY_LIMIT_S = 30.0
"""How long an answer of SLURM's controller is waited for"""


def describe_job() -> dict[str, Any]:
    """Return the job of this process, and how often SLURM has started it again; empty outside of
    SLURM."""
    job = os.environ.get("SLURM_JOB_ID")
    if not job:
        return {}
    restarts = os.environ.get("SLURM_RESTART_COUNT", "")
    return {
        "cluster": os.environ.get("SLURM_CLUSTER_NAME", ""),
        "job": job,
        "restarts": int(restarts) if restarts.isdecimal() else 0,
    }


def has_ended(job: Mapping[str, Any]) -> bool:
    """Whether a job, as `describe_job` returned it on some node, is known to be over: SLURM ends it
    before it starts it again."""
    own_job = describe_job()
    if not own_job or job.get("cluster") != own_job["cluster"]:
        return False
    if job.get("job") == own_job["job"]:
        return bool(int(job.get("restarts", 0)) < own_job["restarts"])
    now = int(time.monotonic() / ASK_EVERY_S)
    return str(job.get("job", "")).isdecimal() and is_gone(str(job["job"]), now)


@lru_cache(maxsize=1024)
def is_gone(job: str, _: int) -> bool:
    """Ask SLURM whether a job is neither waiting nor running, at most once in each interval."""
    command = ["squeue", "--noheader", "--jobs", job]
    try:
        answer = subprocess.run(
            command, capture_output=True, text=True, timeout=QUERY_LIMIT_S, check=False
        )
    except (OSError, subprocess.SubprocessError):
        return False
    forgotten = answer.returncode != 0 and "Invalid job id" in answer.stderr
    return forgotten or (answer.returncode == 0 and not answer.stdout.strip())


NAME = "lock.json"
WITHOUT_FLOCK = "lock.held"
"""The lock file where there is no `flock`: its existence is the lock"""
NO_FLOCK = {errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL}
DISK_FULL = {errno.ENOSPC, errno.EDQUOT}
LEASE_S, RETRY_S = 180.0, 1.0
"""How long to retry, and how often: NFS releases the locks of a machine that died after 90 s"""
_open_locks: set[int] = set()
"""Descriptors of held locks, which a forked child closes"""
_closes_in_children = False


class Lock:
    """A lock that this process holds; its folder may be renamed."""

    def __init__(self, folder: Path, descriptor: int | None) -> None:
        self.folder, self._descriptor, self._owner = folder, descriptor, os.getpid()

    def release(self) -> None:
        """Release the lock; do nothing in a forked child, which does not hold it."""
        if os.getpid() != self._owner:
            return
        for name in (NAME,) if self._descriptor is not None else (NAME, WITHOUT_FLOCK):
            with suppress(OSError):
                (self.folder / name).unlink()
        if self._descriptor is not None:
            import fcntl

            _open_locks.discard(self._descriptor)
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)  # also where a fork inherited it
            os.close(self._descriptor)


def acquire(folder: Path) -> Lock:
    """Lock a folder; a UserError names the current holder.

    A file server may hold the lock of a machine that died for some time; where SLURM knows that its
    job is over, this waits.
    """
    give_up_at = time.monotonic() + LEASE_S
    while True:
        try:
            descriptor = os.open(folder / NAME, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            raise _explain_failure(folder, error) from None
        try:
            locked = _try_flock(descriptor)
            if locked is None:
                return _acquire_without_try_flock(folder)
            if not locked:
                if time.monotonic() < give_up_at and _is_over(_read_holder(folder / NAME)):
                    time.sleep(RETRY_S)
                    continue
                raise UserError(_describe_holder(folder))
            if not _refers_to(folder / NAME, descriptor):  # its holder has just released it
                continue
            _check_holder(folder)
            _write_holder(descriptor)
            _close_in_children(descriptor)
            lock, descriptor = Lock(folder, descriptor), -1
            return lock
        finally:
            if descriptor >= 0:
                os.close(descriptor)


def find_holder(folder: Path) -> dict[str, Any]:
    """Return the host and the process that hold a folder's lock, as far as its files tell; empty
    where it is free. The lock itself is left alone: trying it would disturb whoever starts now."""
    for name in (NAME, WITHOUT_FLOCK):
        holder = _read_holder(folder / name)
        if holder and (
            not _is_over(holder) if holder["host"] != platform.node() else _is_alive(holder)
        ):
            return holder
    return {}


def remove_leftover(folder: Path) -> None:
    """Remove the folder of a killed process: its lock is free, or was never created."""
    try:
        descriptor = os.open(folder / NAME, os.O_RDWR)
    except FileNotFoundError:
        with suppress(OSError):  # removes only an empty folder
            folder.rmdir()
        return
    except OSError:
        return
    try:
        is_elsewhere = _read_holder(folder / NAME).get("host", platform.node()) != platform.node()
        if _try_flock(descriptor) and not is_elsewhere:
            with suppress(OSError):  # another process may have been faster
                remove(folder)
    finally:
        os.close(descriptor)


def _try_flock(descriptor: int) -> bool | None:
    """Return whether the lock was acquired; None where there is no `flock`."""
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


def _refers_to(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _close_in_children(descriptor: int) -> None:
    global _closes_in_children
    _open_locks.add(descriptor)
    if not _closes_in_children:
        _closes_in_children = True
        os.register_at_fork(after_in_child=_close_inherited)


def _close_inherited() -> None:
    while _open_locks:
        with suppress(OSError):
            os.close(_open_locks.pop())


def _acquire_without_try_flock(folder: Path) -> Lock:
    """Lock by a file that only one process can create. The file of a killed process has to be
    removed by hand, unless SLURM knows that its job is over: checking that the process is gone and
    removing the file are two steps, and another process may come in between."""
    path = folder / WITHOUT_FLOCK
    if _is_over(_read_holder(path)):
        _take_over(path)
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
    except FileExistsError:
        holder = _read_holder(path)
        process = _name_process(holder) if holder else "a process"
        raise UserError(
            f"{folder}: {process} holds this run; if it has ended, remove {path} (this file system "
            "has no locks that would tell)"
        ) from None
    except OSError as error:
        raise _explain_failure(folder, error) from None
    _write_holder(descriptor)
    os.close(descriptor)
    return Lock(folder, None)


def _take_over(path: Path) -> None:
    """Remove the lock of a job that is over; if several processes try, exactly one succeeds."""
    claim = path.with_name(f"{path.name}.claim")
    try:
        os.close(os.open(claim, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
    except OSError:
        return
    try:
        if _is_over(_read_holder(path)):  # still
            path.unlink(missing_ok=True)
    finally:
        claim.unlink(missing_ok=True)


def _write_holder(descriptor: int) -> None:
    import psutil

    process = psutil.Process()
    holder = {"host": platform.node(), "pid": process.pid, "since": process.create_time()}
    if job := describe_job():
        holder["slurm"] = job
    with suppress(OSError):  # the lock works on a full disk too
        os.ftruncate(descriptor, 0)
        os.write(descriptor, json.dumps(holder | {"by": "flock"}).encode())


def _read_holder(path: Path) -> dict[str, Any]:
    """Return the holder that a lock file names; empty where it names none."""
    try:
        holder: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return holder | {"host": str(holder["host"]), "pid": int(holder["pid"])}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def _describe_holder(folder: Path) -> str:
    for _ in range(20):  # the holder may be about to write its name
        holder = _read_holder(folder / NAME)
        if holder:
            where = "this machine" if holder["host"] == platform.node() else holder["host"]
            return f"{folder}: process {holder['pid']} on {where} is writing to this run"
        time.sleep(0.005)
    return f"{folder}: another process is writing to this run"


def _check_holder(folder: Path) -> None:
    """Refuse holders that `flock` does not cover: other machines, where the file system may keep
    locks local, and version 0.1, whose lock was the file alone."""
    holder = _read_holder(folder / NAME)
    if holder and holder["host"] != platform.node() and not _is_over(holder):
        raise UserError(
            f"{folder}: {_name_process(holder)} holds this run; if it has ended, remove "
            f"{folder / NAME}"
        )
    if holder and "by" not in holder and _is_alive(holder):
        raise UserError(f"{folder}: process {holder['pid']} on this machine is writing to this run")


def _name_process(holder: dict[str, Any]) -> str:
    job = holder.get("slurm")
    of_job = f" (SLURM job {job['job']})" if isinstance(job, dict) and "job" in job else ""
    return f"process {holder['pid']} on {holder['host']}{of_job}"


def _is_over(holder: dict[str, Any]) -> bool:
    """Whether a holder on any machine belongs to a SLURM job that is over."""
    job = holder.get("slurm")
    return isinstance(job, dict) and has_ended(job)


def _is_alive(holder: dict[str, Any]) -> bool:
    import psutil

    try:
        process = psutil.Process(holder["pid"])
        same = abs(process.create_time() - float(holder["since"])) < 1.0
        return bool(same and process.status() != psutil.STATUS_ZOMBIE)
    except (psutil.Error, KeyError, TypeError, ValueError, OverflowError):
        return False


def _explain_failure(folder: Path, error: OSError) -> Exception:
    message = f"{folder}: cannot be written to ({error.strerror})"
    if error.errno in DISK_FULL:
        return ResumableError(f"{message}; make room and try again")
    return UserError(message)


@contextmanager
def hold_lock(folder: Path) -> Iterator[Lock]:
    """Hold a folder's lock inside the block."""
    lock = acquire(folder)
    try:
        yield lock
    finally:
        lock.release()
