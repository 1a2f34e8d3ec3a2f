"""Jobs as files: `FOLDER/.slipstream/jobs/<id>/`, and a mark in the queue of a device.

A job is a command and its config. Whoever creates `claim.json` first, which only one process can,
runs or cancels it, so that no job starts twice, however many servers and workers there are.
"""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from slipstream.errors import UserError
from slipstream.runs import to_json, write_text
from slipstream.webapp.jobs.bell import ring

FOLDER = ".slipstream"
QUEUED, RUNNING, FINISHED, STOPPED = "queued", "running", "finished", "stopped"
FAILED, CANCELLED, KILLED = "failed", "cancelled", "killed"
OPEN = (QUEUED, RUNNING)
RESUMABLE_CODES = (75, 130, 143)
"""Exit codes of a run that can be resumed"""
SHOWN_LOG = 4_000
"""Bytes at the end of a job's log that an error shows"""
MOST_RECENT = 30
"""Jobs that are no longer open and still listed"""


@dataclass(frozen=True)
class AppJob:
    """A command that waits, runs or has ended."""

    id: str
    command: tuple[str, ...]
    device: str
    name: str
    state: str
    created_at: float
    run: str | None = None
    """The run's id: its path below the folder"""
    pid: int | None = None
    exit_code: int | None = None
    error: str = ""
    started_at: float | None = None
    ended_at: float | None = None
    position: int | None = None
    """Its place in the queue, from 1"""
    extra: dict[str, Any] = field(default_factory=dict)


class JobStore:
    """The jobs of a folder."""

    STOP = "stop.json"
    """In a job's folder: somebody wants it to end"""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.root = folder / FOLDER
        self.jobs = self.root / "jobs"

    def create_folder(self) -> tuple[str, Path]:
        """Create the folder of a new job, whose id orders jobs by time."""
        self.jobs.mkdir(parents=True, exist_ok=True)
        ignore = self.root / ".gitignore"
        if not ignore.exists():
            ignore.write_text("*\n", encoding="utf-8")
        now_ns = time.time_ns()
        second = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(now_ns // 10**9))
        name = f"{second}-{now_ns // 1000 % 10**6:06d}-{secrets.token_hex(4)}"
        (self.jobs / name).mkdir()
        return name, self.jobs / name

    def submit(self, job: str, command: Sequence[str], *, device: str, **about: Any) -> None:
        """Put a job, whose folder exists, at the end of a device's queue."""
        request = {"command": list(command), "device": device, "created_at": time.time(), **about}
        write_text(self.jobs / job / "job.json", to_json(request) + "\n")
        queue = self._get_queue(device)
        queue.mkdir(parents=True, exist_ok=True)
        (queue / f"{time.time_ns():020d}-{job}").touch()
        ring(self.root, device)

    def _get_queue(self, device: str) -> Path:
        return self.root / "queue" / device.replace(":", "-")

    def list_queue(self, device: str) -> list[tuple[Path, str]]:
        """Return the marks and ids of the jobs that wait for a device, the next one first."""
        try:
            names = sorted(one.name for one in self._get_queue(device).iterdir())
        except OSError:
            return []
        pairs = [(self._get_queue(device) / name, name.partition("-")[2]) for name in names]
        return [(mark, job) for mark, job in pairs if job]

    def list_devices(self) -> list[str]:
        """Return the devices that jobs have waited for."""
        with suppress(OSError):
            return sorted(one.name.replace("-", ":") for one in (self.root / "queue").iterdir())
        return []

    def claim(self, job: str, **about: Any) -> bool:
        """Take a job; False where another process was faster."""
        process = psutil.Process()
        holder = {"pid": process.pid, "since": process.create_time(), "at": time.time(), **about}
        path = self.jobs / job / "claim.json"
        temporary = path.with_name(f".claim.{process.pid}.{secrets.token_hex(4)}")
        try:
            temporary.write_text(to_json(holder), encoding="utf-8")
            os.link(temporary, path)
        except OSError:
            return False
        finally:
            temporary.unlink(missing_ok=True)
        return True

    def take_next(self, device: str) -> str | None:
        """Claim the first job of a queue for this process."""
        for mark, job in self.list_queue(device):
            won = self.claim(job)
            mark.unlink(missing_ok=True)
            if won:
                return job
        return None

    def cancel(self, job: str) -> bool:
        """Cancel a job that waits; False where it runs or has ended."""
        self._read_request(job)
        if not self.claim(job, cancelled=True):
            return False
        self._remove_mark(job)
        return True

    def request_stop(self, job: str) -> None:
        """Write down that a job has to end; its worker looks when it gets a signal."""
        write_text(self.jobs / job / self.STOP, to_json({"at": time.time()}))

    def is_stop_requested(self, job: str) -> bool:
        return (self.jobs / job / self.STOP).exists()

    def _remove_mark(self, job: str) -> None:
        for device in self.list_devices():
            for mark, name in self.list_queue(device):
                if name == job:
                    mark.unlink(missing_ok=True)

    def move_first(self, job: str) -> None:
        """Put a waiting job before the others of its device."""
        device = str(self._read_request(job).get("device"))
        queue = self.list_queue(device)
        marks = [mark for mark, name in queue if name == job]
        if marks and queue[0][1] != job:
            first = int(queue[0][0].name.partition("-")[0])
            with suppress(OSError):  # a worker has just taken it
                marks[0].rename(marks[0].with_name(f"{first - 1:020d}-{job}"))

    def record_run(self, job: str, run: str) -> None:
        write_text(self.jobs / job / "run.json", to_json({"run": run}))

    def record_end(self, job: str, exit_code: int) -> None:
        ended = {"exit_code": exit_code, "at": time.time()}
        write_text(self.jobs / job / "end.json", to_json(ended))

    def _read_request(self, job: str) -> dict[str, Any]:
        path = self.jobs / job / "job.json"
        if "/" in job or job.startswith(".") or not path.is_file():
            raise UserError("there is no such job")
        return read_object(path)

    def read(self, job: str) -> AppJob:
        """Return a job as its files describe it."""
        request = self._read_request(job)
        folder = self.jobs / job
        claim, end = read_object(folder / "claim.json"), read_object(folder / "end.json")
        state = _find_state(claim, end)
        run = read_object(folder / "run.json").get("run") or request.get("run")
        device = str(request.get("device", "cpu"))
        position = None
        if state == QUEUED:
            waiting = [name for _, name in self.list_queue(device)]
            position = waiting.index(job) + 1 if job in waiting else None
        return AppJob(
            id=job,
            command=tuple(map(str, request.get("command", ()))),
            device=device,
            name=str(request.get("name", "")),
            state=state,
            created_at=float(request.get("created_at", 0.0)),
            run=run,
            pid=claim.get("pid") if state == RUNNING else None,
            exit_code=end.get("exit_code"),
            error=self._read_error(folder) if state in (FAILED, KILLED) else "",
            started_at=claim.get("at"),
            ended_at=end.get("at"),
            position=position,
            extra=dict(request.get("extra") or {}),
        )

    def _read_error(self, folder: Path) -> str:
        """Return the message that the command ended with, or else the end of its log."""
        if message := read_object(folder / "output.json").get("error"):
            return str(message)
        try:
            with (folder / "log.txt").open("rb") as log:
                log.seek(max(log.seek(0, 2) - SHOWN_LOG, 0))
                text = log.read().decode("utf-8", errors="replace").strip()
        except OSError:
            text = ""
        return text or "The process ended without a message: it was killed, or ran out of memory."

    def iter_ids(self) -> Iterator[str]:
        """Yield the ids of all jobs, the newest first."""
        with suppress(OSError):
            yield from sorted(
                (one.name for one in self.jobs.iterdir() if one.name[0] != "."), reverse=True
            )

    def list_recent(self) -> list[AppJob]:
        """Return the jobs that wait or run, and the most recent of the others, newest first."""
        jobs, closed = [], 0
        for name in self.iter_ids():
            if closed >= MOST_RECENT:
                break
            with suppress(UserError):
                jobs.append(self.read(name))
                closed += jobs[-1].state not in OPEN
        return jobs

    def find_by_run(self, run: str) -> AppJob | None:
        """Return the newest job of a run."""
        return next((job for job in self.list_recent() if job.run == run), None)


def _find_state(claim: dict[str, Any], end: dict[str, Any]) -> str:
    if not claim:
        return QUEUED
    if claim.get("cancelled"):
        return CANCELLED
    if end:
        code = end.get("exit_code")
        return FINISHED if code == 0 else STOPPED if code in RESUMABLE_CODES else FAILED
    return RUNNING if is_alive(claim) else KILLED


def is_alive(holder: dict[str, Any]) -> bool:
    """Whether the process of a file with `pid` and `since` still runs."""
    try:
        process = psutil.Process(int(holder["pid"]))
        same = abs(process.create_time() - float(holder["since"])) < 1.0
        return bool(same and process.status() != psutil.STATUS_ZOMBIE)
    except (psutil.Error, KeyError, TypeError, ValueError, OverflowError):
        return False


def read_object(path: Path) -> dict[str, Any]:
    """Return the object of a JSON file; empty where it is missing or damaged."""
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
