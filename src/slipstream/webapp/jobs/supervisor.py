"""Sees to it that jobs find a worker, and stops them. Runs in the server."""

from __future__ import annotations

import os
import platform
import signal
import subprocess
from contextlib import suppress
from pathlib import Path

from slipstream.errors import UserError
from slipstream.webapp.jobs import presence
from slipstream.webapp.jobs.presence import DeviceLock
from slipstream.webapp.jobs.store import OPEN, RUNNING, AppJob, JobStore
from slipstream.webapp.jobs.worker import start_worker

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

    def start_workers(self) -> None:
        """Start a worker for each device where jobs wait, and one that waits on the usual device.

        While a job runs, no other worker is started beside it: it starts its successor itself.
        """
        for device in {self._usual, *self.store.list_devices()}:
            waits = bool(self.store.list_queue(device))
            spare = self.warm and device == self._usual and presence.has_spare_memory()
            if (waits or spare) and self._is_idle(device):
                warm = self.warm and device == self._usual
                self._children[device] = start_worker(self.store.folder, device, warm=warm)

    def _is_idle(self, device: str) -> bool:
        """Whether no worker waits for or uses a device, nor is about to."""
        child = self._children.get(device)
        if child is not None and child.poll() is None:
            return False
        return all(DeviceLock(self.store.root, device, one).is_free() for one in ("wait", "use"))


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
