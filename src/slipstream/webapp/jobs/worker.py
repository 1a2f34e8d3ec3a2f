"""The worker: waits for the next job of a device, becomes that command, and records how it ended.

A warm worker has imported torch and prepared the device before the job comes. Each process runs one
job and starts its successor, so that nothing of a job, not even its GPU memory, stays behind.
"""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType

from slipstream import runs
from slipstream.phases import set_process_start
from slipstream.webapp.jobs import presence
from slipstream.webapp.jobs.presence import DeviceLock
from slipstream.webapp.jobs.store import JobStore

POLL_S = 0.03
SLOW_POLL_S = 0.25
CHECK_S = 1.0
"""Between two looks at memory and servers"""
MODULES = (
    *("slipstream.cli.commands", "slipstream.config", "slipstream.training"),
    *("slipstream.training.single", "slipstream.training.lanes", "slipstream.reporting.page"),
)
"""What most jobs import"""


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
    """Wait for a job, run it with `main`, and start the next worker; return the exit code."""
    store = JobStore(folder)
    waiting = DeviceLock(store.root, device, "wait")
    if not waiting.acquire():
        return 0  # another worker waits already
    if warm and not store.list_queue(device):
        warm_up(device)
    use = DeviceLock(store.root, device, "use")
    job = _wait_for_job(store, device, use, warm=warm)
    if job is None:
        return 0
    waiting.release()
    code = run_job(store, job, main)
    keep_warm = warm and presence.has_server(store.root) and presence.has_spare_memory()
    use.release()
    if keep_warm or store.list_queue(device):
        start_worker(folder, device, warm=warm)
    return code


def warm_up(device: str) -> None:
    """Import what jobs need, and create the device's context."""
    with suppress(Exception):  # the job meets the same problem, and reports it
        for name in MODULES:
            importlib.import_module(name)
        from slipstream import kernels, machine

        setting = "auto" if device == "cuda:0" else device
        kernels.prepare_device(machine.choose_device(setting))


def _wait_for_job(store: JobStore, device: str, use: DeviceLock, *, warm: bool) -> str | None:
    """Return the job that this process has to run; None where it is no longer needed."""
    checked_at = 0.0
    while True:
        if store.list_queue(device):
            if use.acquire():
                if job := store.take_next(device):
                    return job
                use.release()
        elif not warm:
            return None
        if time.monotonic() - checked_at > CHECK_S:
            checked_at = time.monotonic()
            needed = presence.has_server(store.root) and presence.has_spare_memory()
            if not needed and not store.list_queue(device):
                return None
        time.sleep(POLL_S)


def run_job(store: JobStore, job: str, main: Callable[[], None]) -> int:
    """Run a job's command in this process; return its exit code, which is recorded."""
    signal.signal(signal.SIGTERM, _leave)
    set_process_start(time.perf_counter())
    folder = store.jobs / job
    for name, descriptor in (("output.json", 1), ("log.txt", 2)):
        file = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        os.dup2(file, descriptor)
        os.close(file)
    command = list(store.read(job).command)
    os.chdir(store.folder)
    done = threading.Event()
    finder = threading.Thread(target=_find_run, args=(store, job, done), daemon=True)
    finder.start()
    sys.argv[1:] = command
    code = 1
    try:
        main()
        code = 0
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    finally:
        done.set()
        finder.join(1.0)
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):
                stream.flush()
        store.record_end(job, code)
    return code


def _leave(number: int, _: FrameType | None) -> None:
    raise SystemExit(128 + number)


def _find_run(store: JobStore, job: str, done: threading.Event) -> None:
    """Record the run that this process creates or resumes: the one whose lock it holds."""
    request = store.read(job)
    if request.run is not None:
        return
    out = Path(request.extra.get("out") or store.folder)
    earlier, began = _list_names(out), time.monotonic()
    while True:
        ended = done.wait(POLL_S if time.monotonic() - began < 10 else SLOW_POLL_S)
        for name in _list_names(out) - earlier:
            holder = runs.find_holder(out / name)
            if holder.get("pid") == os.getpid() or (ended and _is_named(store, job, out / name)):
                store.record_run(job, str((out / name).relative_to(store.folder)))
                return
        if ended:
            return


def _is_named(store: JobStore, job: str, folder: Path) -> bool:
    """Whether a command that has ended names this run in its output."""
    with suppress(OSError):
        return str(folder) in (store.jobs / job / "output.json").read_text(encoding="utf-8")
    return False


def _list_names(folder: Path) -> set[str]:
    try:
        return {one.name for one in folder.iterdir() if one.name[0] != "."}
    except OSError:
        return set()
