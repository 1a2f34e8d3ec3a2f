"""The worker: waits for the next job of a device, runs its command, and records how it ended.

A warm worker has imported torch and trained a tiny model before the first job comes. After a
training that left nothing behind it waits for the next one in the same process; after any other
job it ends and starts its successor.
"""

from __future__ import annotations

import gc
import importlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType

import psutil

from slipstream import runs
from slipstream.errors import Interrupted
from slipstream.phases import set_process_start
from slipstream.webapp.jobs import presence
from slipstream.webapp.jobs.bell import Bell
from slipstream.webapp.jobs.presence import DeviceLock
from slipstream.webapp.jobs.store import FINISHED, STOPPED, JobStore

POLL_S = 0.03
SLOW_POLL_S = 0.25
CHECK_S = 1.0
"""Between two looks at memory and servers"""
LOCK_S = 2.0
"""How long another process may look whether a lock is free"""
MODULES = (
    *("slipstream.cli.commands", "slipstream.config", "slipstream.training"),
    *("slipstream.training.single", "slipstream.training.lanes", "slipstream.reporting.page"),
)
"""What most jobs import"""
TINY = (
    *("data.context=10", "data.stride=400", "model.hidden=8", "model.layers=1", "train.epochs=1"),
    *("train.batch=16", "engine.plan=off", "engine.monitor=false", "data.horizon=0"),
)
"""Settings of the demo with which a worker warms up"""
MOST_GROWTH = 1 << 30
"""Bytes that a process may have more than before its first job, and still wait for the next one"""
MOST_GPU_BYTES = 256 << 20
"""Of tensors, the same"""
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
    waiting, use = (DeviceLock(store.root, device, one) for one in ("wait", "use"))
    if not waiting.acquire(LOCK_S):
        return 0  # another worker waits already
    if warm:
        warm_up(device, is_idle=not store.list_queue(device))
        presence.announce_ready(store.root, device)
    most_bytes = psutil.Process().memory_info().rss + MOST_GROWTH
    streams = [os.dup(descriptor) for descriptor in (1, 2)]
    while True:
        job = _wait_for_job(store, device, use, warm=warm)
        if job is None:
            return 0
        waiting.release()
        code = run_job(store, job, main)
        _point_streams(streams)
        if not (warm and _is_reusable(store, job, device, most_bytes)):
            break
        if not waiting.acquire(LOCK_S):
            return code
        use.release()
    keep_warm = warm and presence.has_server(store.root) and presence.has_spare_memory()
    use.release()
    if keep_warm or store.list_queue(device):
        start_worker(folder, device, warm=warm)
    return code


def warm_up(device: str, *, is_idle: bool = True) -> None:
    """Import what jobs need and, unless one waits, train a tiny model: what is loaded or built at
    its first use is there afterwards."""
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
    with Bell(store.root, device) as bell:
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
                bell.wait(CHECK_S)
            if time.monotonic() - checked_at > CHECK_S:
                checked_at = time.monotonic()
                needed = presence.has_server(store.root) and presence.has_spare_memory()
                if not needed and not store.list_queue(device):
                    return None


def _is_reusable(store: JobStore, job: str, device: str, most_bytes: int) -> bool:
    """Whether the process is as it was before a job, and needed for the next one.

    Training alone leaves nothing behind, unless it runs code of the user's, which may change.
    """
    ended = store.read(job)
    is_plain = ended.command[:1] == ("train",) and "--allow-code" not in ended.command
    if not is_plain or ended.state not in (FINISHED, STOPPED):
        return False
    gc.collect()
    has_room = psutil.Process().memory_info().rss <= most_bytes and presence.has_spare_memory()
    return has_room and _is_device_free(device) and presence.has_server(store.root)


def _is_device_free(device: str) -> bool:
    """Whether this process holds no memory of a GPU beyond its context."""
    if device == "cpu":
        return True
    import torch

    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved(device) <= MOST_GPU_BYTES


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
        return {one.name for one in folder.iterdir() if one.name[0] != "."}
    except OSError:
        return set()
