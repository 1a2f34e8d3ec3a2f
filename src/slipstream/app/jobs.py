"""Jobs of the app: their folders and queues, and the worker processes that run them."""

from __future__ import annotations

import gc
import importlib
import json
import os
import platform
import secrets
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

import psutil

from slipstream import runs
from slipstream.base import machine
from slipstream.base.errors import Interrupted, UserError
from slipstream.base.phases import set_process_start
from slipstream.runs import to_json, write_text

FOLDER = ".slipstream"
QUEUED, RUNNING, FINISHED, STOPPED = "queued", "running", "finished", "stopped"
FAILED, CANCELLED, KILLED = "failed", "cancelled", "killed"
OPEN = (QUEUED, RUNNING)
RESUMABLE_CODES = (75, 130, 143)
"""Exit codes of a run that can be resumed"""
SHOWN_LOG = 4_000
"""Bytes at the end of a job's log that an error shows"""
MAX_RECENT = 30
"""Ended jobs that are still listed"""


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
    """The position in the queue, from 1"""
    extra: dict[str, Any] = field(default_factory=dict)


class JobStore:
    """The jobs of a folder."""

    STOP = "stop.json"
    """The file in a job's folder that requests its end"""

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
        wake_worker(self.root, device)

    def _get_queue(self, device: str) -> Path:
        return self.root / "queue" / device.replace(":", "-")

    def list_queue(self, device: str) -> list[tuple[Path, str]]:
        """Return the marks and ids of the jobs that wait for a device, the next one first."""
        try:
            names = sorted(mark.name for mark in self._get_queue(device).iterdir())
        except OSError:
            return []
        pairs = [(self._get_queue(device) / name, name.partition("-")[2]) for name in names]
        return [(mark, job) for mark, job in pairs if job]

    def list_devices(self) -> list[str]:
        """Return the devices that jobs have waited for."""
        with suppress(OSError):
            return sorted(queue.name.replace("-", ":") for queue in (self.root / "queue").iterdir())
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
        """Write the request to end a job into its folder; its worker reads it upon a signal."""
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
                (folder.name for folder in self.jobs.iterdir() if folder.name[0] != "."),
                reverse=True,
            )

    def list_recent(self) -> list[AppJob]:
        """Return the jobs that wait or run, and the most recent of the others, newest first."""
        jobs, closed = [], 0
        for name in self.iter_ids():
            if closed >= MAX_RECENT:
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


POLL_S = 0.03
"""Seconds between two checks where the file system has no pipes"""


class WakePipe:
    """A named pipe on which a worker waits for the next job of its device."""

    def __init__(self, root: Path, device: str) -> None:
        self.path = _get_pipe_path(root, device)
        self._descriptor: int | None = None

    def __enter__(self) -> Self:
        with suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with suppress(FileExistsError):
                os.mkfifo(self.path)
            # also for writing: a pipe without a writer is at its end, which would wake at once
            flags = os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC
            self._descriptor = os.open(self.path, flags)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)

    def wait(self, max_s: float) -> None:
        """Return when `wake_worker` is called, or after `max_s` seconds."""
        if self._descriptor is None:
            time.sleep(POLL_S)
        elif select.select([self._descriptor], [], [], max_s)[0]:
            with suppress(OSError):
                os.read(self._descriptor, 4096)


def wake_worker(root: Path, device: str) -> None:
    """Wake the worker that waits for a device, if one does."""
    with suppress(OSError):  # nobody waits, or there are no pipes
        descriptor = os.open(_get_pipe_path(root, device), os.O_WRONLY | os.O_NONBLOCK)
        try:
            os.write(descriptor, b"1")
        finally:
            os.close(descriptor)


def _get_pipe_path(root: Path, device: str) -> Path:
    return root / "workers" / f"{device.replace(':', '-')}.wake"


MIN_FREE_SHARE = 0.1
"""Share of the memory that must be free for a process to wait with torch in it"""
MIN_FREE_BYTES = 1 << 30
RETRY_S = 0.01


class DeviceLock:
    """A lock of a device: `use` while a job runs on it, `wait` of the one spare worker."""

    def __init__(self, root: Path, device: str, purpose: str) -> None:
        self.path = root / "workers" / f"{device.replace(':', '-')}.{purpose}"
        self._descriptor: int | None = None

    def acquire(self, max_s: float = 0.0) -> bool:
        """Take the lock; False where another process has it, and keeps it for some seconds."""
        until = time.monotonic() + max_s
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
    """Record that this process serves the folder; workers wait for jobs as long as one does."""
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
    """Record that this process waits for jobs with everything imported."""
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
    return bool(memory.available >= max(MIN_FREE_SHARE * memory.total, MIN_FREE_BYTES))


SLOW_POLL_S = 0.25
"""Seconds between two looks for the run's folder after the first ten seconds of a job"""
CHECK_S = 1.0
"""Seconds between two checks of memory and servers"""
LOCK_S = 2.0
"""How long another process may hold a lock only to test whether it is free"""
MODULES = (
    *("slipstream.cli.commands", "slipstream.config", "slipstream.training"),
    "slipstream.reporting.page",
)
"""Modules that most jobs import"""
TINY = (
    *("data.context=10", "data.stride=400", "model.hidden=8", "model.layers=1", "train.epochs=1"),
    *("train.batch=16", "engine.plan=off", "engine.monitor=false", "data.horizon=0"),
)
"""Settings of the demo with which a worker warms up"""
MAX_GROWTH_BYTES = 1 << 30
"""Bytes that a process may have more than before its first job, and still wait for the next one"""
MAX_GPU_BYTES = 256 << 20
"""Bytes of tensors that a process may hold on a GPU, and still wait for the next job"""
_current: Path | None = None
"""The folder of the job that runs in this process"""


def start_worker(folder: Path, device: str, *, warm: bool) -> subprocess.Popen[bytes]:
    """Start a worker that outlives this process."""
    log = folder / ".slipstream" / "workers" / f"{device.replace(':', '-')}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "slipstream", "ui-worker", str(folder), device]
    with log.open("wb") as output:
        return subprocess.Popen(
            command + (["--warm"] if warm else []),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )


def work(folder: Path, device: str, main: Callable[[], None], *, warm: bool) -> int:
    """Wait for jobs and run them with `main`, one after another; return the last exit code."""
    signal.signal(signal.SIGUSR1, _stop_current)
    store = JobStore(folder)
    waiting, use = (DeviceLock(store.root, device, purpose) for purpose in ("wait", "use"))
    if not waiting.acquire(LOCK_S):
        return 0  # another worker waits already
    if warm:
        warm_up(device, is_idle=not store.list_queue(device))
        announce_ready(store.root, device)
    max_bytes = psutil.Process().memory_info().rss + MAX_GROWTH_BYTES
    streams = [os.dup(descriptor) for descriptor in (1, 2)]
    while True:
        job = _wait_for_job(store, device, use, warm=warm)
        if job is None:
            return 0
        waiting.release()
        code = run_job(store, job, main)
        _point_streams(streams)
        if not (warm and _is_reusable(store, job, device, max_bytes)):
            break
        if not waiting.acquire(LOCK_S):
            return code
        use.release()
    keep_warm = warm and has_server(store.root) and has_spare_memory()
    use.release()
    if keep_warm or store.list_queue(device):
        machine.disown_process(start_worker(folder, device, warm=warm))
    return code


def warm_up(device: str, *, is_idle: bool = True) -> None:
    """Import the modules of jobs and, unless a job waits, train a tiny model, so that everything
    that is loaded or built at its first use is ready."""
    setting = "auto" if device == "cuda:0" else device
    try:
        for name in MODULES:
            importlib.import_module(name)
        from slipstream import config, training

        with tempfile.TemporaryDirectory() as out:
            overrides = (*TINY, f"engine.device={setting}", f"out={out}")
            if is_idle:
                training.train(config.load(config.load_demo(), overrides))
    except Interrupted:
        raise SystemExit(128 + signal.SIGTERM) from None
    except Exception:
        return  # the job meets the same problem, and reports it
    gc.collect()
    gc.freeze()  # what is here now stays, and no job has to look for garbage in it


def _wait_for_job(store: JobStore, device: str, use: DeviceLock, *, warm: bool) -> str | None:
    """Return the job that this process has to run; None where it is no longer needed."""
    checked_at = 0.0
    with WakePipe(store.root, device) as pipe:
        while True:
            if store.list_queue(device):
                if use.acquire():
                    if job := store.take_next(device):
                        return job
                    use.release()
                time.sleep(POLL_S)
            elif not warm:
                return None
            else:
                pipe.wait(CHECK_S)
            if time.monotonic() - checked_at > CHECK_S:
                checked_at = time.monotonic()
                needed = has_server(store.root) and has_spare_memory()
                if not needed and not store.list_queue(device):
                    return None


def _is_reusable(store: JobStore, job: str, device: str, max_bytes: int) -> bool:
    """Whether the process is as it was before a job, and needed for the next one.

    Training alone leaves nothing behind, unless it runs code of the user's, which may change.
    """
    ended = store.read(job)
    is_plain = ended.command[:1] == ("train",) and "--allow-code" not in ended.command
    if not is_plain or ended.state not in (FINISHED, STOPPED):
        return False
    gc.collect()
    has_room = psutil.Process().memory_info().rss <= max_bytes and has_spare_memory()
    return has_room and _is_device_free(device) and has_server(store.root)


def _is_device_free(device: str) -> bool:
    """Whether this process holds no memory of a GPU beyond its context."""
    if device == "cpu":
        return True
    import torch

    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved(device) <= MAX_GPU_BYTES


def run_job(store: JobStore, job: str, main: Callable[[], None]) -> int:
    """Run a job's command in this process; return its exit code, which is recorded."""
    global _current
    signal.signal(signal.SIGTERM, _leave)
    set_process_start(time.perf_counter())
    folder = store.jobs / job
    _point_streams(
        [
            os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
            for name in ("output.json", "log.txt")
        ],
        close=True,
    )
    request = store.read(job)
    os.chdir(store.folder)
    done = threading.Event()
    finder = RunFinder(store, job, done)
    finder.start()
    sys.argv[1:] = request.command
    code = 1
    try:
        _current = folder
        if store.is_stop_requested(job):  # before this process could take the signal
            raise SystemExit(128 + signal.SIGTERM)
        main()
        code = 0
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    finally:
        _current = None
        done.set()
        finder.join(1.0)
        store.record_end(job, code)
    return code


def _point_streams(descriptors: list[int], *, close: bool = False) -> None:
    """Have stdout and stderr write to other files."""
    for number, descriptor in enumerate(descriptors, 1):
        with suppress(Exception):
            (sys.stdout if number == 1 else sys.stderr).flush()
        os.dup2(descriptor, number)
        if close:
            os.close(descriptor)


def _leave(number: int, _: FrameType | None) -> None:
    raise SystemExit(128 + number)


def _stop_current(*_: object) -> None:
    """Stop the job that runs, if its end is requested: the one that was meant may have ended."""
    if _current is not None and (_current / JobStore.STOP).exists():
        signal.raise_signal(signal.SIGTERM)


class RunFinder(threading.Thread):
    """Records the run that this process creates: the new one whose lock it holds."""

    def __init__(self, store: JobStore, job: str, done: threading.Event) -> None:
        super().__init__(daemon=True)
        self.store, self.job, self.done = store, job, done
        request = store.read(job)
        self.out = Path(request.extra.get("out") or store.folder)
        self.is_known = request.run is not None
        self.earlier = _list_names(self.out)

    def run(self) -> None:
        began = time.monotonic()
        while not self.is_known:
            ended = self.done.wait(POLL_S if time.monotonic() - began < 10 else SLOW_POLL_S)
            for name in _list_names(self.out) - self.earlier:
                holder = runs.find_holder(self.out / name)
                if holder.get("pid") == os.getpid() or (ended and self._is_named(name)):
                    run = str((self.out / name).relative_to(self.store.folder))
                    self.store.record_run(self.job, run)
                    self.is_known = True
            if ended:
                return

    def _is_named(self, name: str) -> bool:
        """Whether a command that has ended names this run in its output."""
        with suppress(OSError):
            output = self.store.jobs / self.job / "output.json"
            return str(self.out / name) in output.read_text(encoding="utf-8")
        return False


def _list_names(folder: Path) -> set[str]:
    try:
        return {path.name for path in folder.iterdir() if path.name[0] != "."}
    except OSError:
        return set()


GPU_FILES = ("/dev/nvidiactl", "/dev/dxg")


def find_default_device() -> str:
    """Return the device that `engine.device = "auto"` means here, without torch."""
    if not any(map(os.path.exists, GPU_FILES)):
        return "cpu"
    with suppress(Exception):
        import pynvml

        pynvml.nvmlInit()
        return "cuda:0" if pynvml.nvmlDeviceGetCount() else "cpu"
    return "cpu"


def choose_queue(setting: str) -> str:
    """Return the queue of a config's `engine.device`."""
    if setting == "auto":
        return find_default_device()
    return "cuda:0" if setting == "cuda" else setting


class Supervisor:
    """Starts the workers of a folder."""

    def __init__(self, store: JobStore, *, warm: bool) -> None:
        self.store, self.warm = store, warm
        self._usual = find_default_device()
        self._children: dict[str, subprocess.Popen[bytes]] = {}
        weakref.finalize(self, _disown_workers, self._children)

    def start_workers(self) -> None:
        """Start a worker for each device where jobs wait, and one that waits on the usual device.

        While a job runs, no other worker is started beside it: it starts its successor itself.
        """
        for device in {self._usual, *self.store.list_devices()}:
            waits = bool(self.store.list_queue(device))
            spare = self.warm and device == self._usual and has_spare_memory()
            if (waits or spare) and self._is_idle(device):
                warm = self.warm and device == self._usual
                self._children[device] = start_worker(self.store.folder, device, warm=warm)

    def _is_idle(self, device: str) -> bool:
        """Whether no worker waits for or uses a device, nor is about to."""
        child = self._children.get(device)
        if child is not None and child.poll() is None:
            return False
        return all(
            DeviceLock(self.store.root, device, purpose).is_free() for purpose in ("wait", "use")
        )


def _disown_workers(workers: dict[str, subprocess.Popen[bytes]]) -> None:
    """Let the workers run on: their jobs do not depend on the server that started them."""
    for process in workers.values():
        machine.disown_process(process)


def stop_job(store: JobStore, name: str) -> AppJob:
    """Cancel a job that waits, or ask one that runs to save and stop."""
    job = store.read(name)
    if job.state in OPEN and store.cancel(name):
        return store.read(name)
    job = store.read(name)
    if job.state == RUNNING and job.pid:
        # a signal for this job alone: its worker may have begun another by the time it arrives
        store.request_stop(name)
        with suppress(ProcessLookupError):
            os.kill(job.pid, signal.SIGUSR1)
    return job


def stop_run(folder: Path, holder: dict[str, object]) -> None:
    """Ask the process that writes to a run, which no job of this folder started, to stop."""
    if holder.get("host") != platform.node():
        raise UserError(f"{folder.name} runs on {holder.get('host')}; stop it there")
    with suppress(ProcessLookupError):
        os.kill(int(str(holder["pid"])), signal.SIGTERM)
