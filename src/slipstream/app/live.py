"""The event stream of a tab: a run's log line by line, the jobs, and the load of the machine.

The id of a message is a position in the log, with a checksum of what is before it (`runs.tail`). A
tab that connects again sends the last id it had: where the checksum still fits, the stream goes on
there, without loss or repetition; where a resumed run has cut its log, the tab begins anew.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from slipstream import runs
from slipstream.app.paths import find_run_folder
from slipstream.app.rows import describe_row
from slipstream.app.workspace import Workspace
from slipstream.base.errors import UserError
from slipstream.events import format_event
from slipstream.reporting.run_rows import RUNNING, read_row
from slipstream.runs.log import LOG_START, read_chunk


def read_load(folder: Path) -> dict[str, Any]:
    """Return the load since the last call, and the free memory and disk."""
    memory = psutil.virtual_memory()
    load: dict[str, Any] = {
        "cpu_percent": psutil.cpu_percent(None),
        "cores": os.cpu_count(),
        "memory_used": memory.total - memory.available,
        "memory_total": memory.total,
        "gpus": _read_gpus(),
    }
    with suppress(OSError):
        usage = shutil.disk_usage(folder)
        load |= {"disk_free": usage.free, "disk_total": usage.total}
    return load


_nvml: Any = None
"""The initialized `pynvml`; False where there is none"""


def _read_gpus() -> list[dict[str, Any]]:
    global _nvml
    if _nvml is None:
        try:
            import pynvml

            pynvml.nvmlInit()
            _nvml = pynvml
        except Exception:
            _nvml = False
    if not _nvml:
        return []
    gpus = []
    with suppress(_nvml.NVMLError):
        for index in range(_nvml.nvmlDeviceGetCount()):
            handle = _nvml.nvmlDeviceGetHandleByIndex(index)
            memory = _nvml.nvmlDeviceGetMemoryInfo(handle)
            name = _nvml.nvmlDeviceGetName(handle)
            gpus.append(
                {
                    "name": name.decode() if isinstance(name, bytes) else str(name),
                    "percent": _nvml.nvmlDeviceGetUtilizationRates(handle).gpu,
                    "memory_used": memory.used,
                    "memory_total": memory.total,
                }
            )
    return gpus


POLL_S = 0.2
FIRST_POLL_S = 0.04
"""Seconds between two reads until a run has its first loss"""
STATE_S = 1.0
"""Seconds between two reads of jobs and a run's state"""
LOAD_S = 2.0
FIRST_S = 20.0
"""How long `FIRST_POLL_S` applies to a new run"""
ALIVE_S = 15.0
"""Seconds between two comments that reveal a lost connection"""
MAX_PREVIEW = 1 << 20
"""Bytes of the predictions that a run shows"""


def format_message(kind: str, data: Any, id_: str | None = None) -> bytes:
    """Return one message of an event stream."""
    head = f"id: {id_}\n" if id_ else ""
    return f"{head}event: {kind}\ndata: {json.dumps(data, allow_nan=False)}\n\n".encode()


class Feed:
    """The messages for one tab."""

    def __init__(self, workspace: Workspace, run: str, last: str) -> None:
        self.workspace, self.run, self.last = workspace, run, last
        self._folder: Path | None = None
        self._log_state: tuple[int, int] | None = None
        self._preview_state: tuple[int, int] | None = None
        self._states: dict[str, Any] = {}
        self._due: dict[str, float] = {}
        self.poll_s = FIRST_POLL_S if run else POLL_S
        self._hurries_until = time.monotonic() + FIRST_S

    def collect(self) -> list[bytes]:
        """Return the messages since the last call."""
        messages = list(self._read_log()) if self.run else []
        if b'"event": "log"' in b"".join(messages) or time.monotonic() > self._hurries_until:
            self.poll_s = POLL_S
        if self._is_due("state", STATE_S):
            messages += self._changed("jobs", describe_jobs(self.workspace))
            if self.run:
                messages += self._changed("run", self._describe_run())
                messages += self._read_preview()
        if self._is_due("load", LOAD_S):
            messages.append(format_message("load", read_load(self.workspace.folder)))
        if self._is_due("alive", ALIVE_S):
            messages.append(b": alive\n\n")
        return messages

    def _is_due(self, task: str, every_s: float) -> bool:
        now = time.monotonic()
        if now < self._due.get(task, 0.0):
            return False
        self._due[task] = now + every_s
        return True

    def _changed(self, kind: str, value: Any) -> list[bytes]:
        if self._states.get(kind) == value:
            return []
        self._states[kind] = value
        return [format_message(kind, value)]

    def _read_log(self) -> list[bytes]:
        try:
            self._folder = self._folder or find_run_folder(self.workspace.folder, self.run)
            status = (self._folder / "events.jsonl").stat()
            state = (status.st_size, status.st_mtime_ns)
        except (OSError, UserError):
            state = (0, 0)
        if self._folder is None or state == self._log_state:
            return []
        messages = []
        while True:
            chunk = read_chunk(self._folder / "events.jsonl", self.last)
            if chunk.is_reset:
                messages.append(format_message("reset", {}, LOG_START))
            if chunk.events or chunk.is_reset:
                lines = [format_event(event) for event in chunk.events]
                messages.append(format_message("lines", lines, chunk.position))
            if chunk.position == self.last:
                break
            self.last = chunk.position
        self._log_state = state
        return messages

    def _read_preview(self) -> list[bytes]:
        """Return the run's preview of predictions, if it has changed."""
        if self._folder is None:
            return []
        path = self._folder / runs.PREVIEW
        try:
            status = path.stat()
            state = (status.st_size, status.st_mtime_ns)
            if state == self._preview_state or status.st_size > MAX_PREVIEW:
                return []
            self._preview_state = state
            return [format_message("preview", json.loads(path.read_bytes()))]
        except (OSError, ValueError, RecursionError):
            return []

    def _describe_run(self) -> dict[str, Any]:
        try:
            folder = find_run_folder(self.workspace.folder, self.run)
            row = describe_row(self.workspace.folder, read_row(folder))
        except (OSError, UserError) as error:
            return {"state": "missing", "note": str(error)}
        if row["state"] == RUNNING:
            runs.mark_watched(folder)
        job = self.workspace.store.find_by_run(self.run)
        about = {key: row[key] for key in ("state", "note", "error", "error_of", "against")}
        return about | {"job": job and job.id, "job_state": job and job.state}


def describe_jobs(workspace: Workspace) -> list[dict[str, Any]]:
    """Return the jobs that a page shows, as JSON has them."""
    jobs = [asdict(job) for job in workspace.store.list_recent()]
    return [{key: job[key] for key in job if key not in ("command", "extra")} for job in jobs]


async def stream(request: Request, stopping: Callable[[], bool]) -> Response:
    """Send a tab its events until it leaves or the server stops."""
    workspace: Workspace = request.app.state.workspace
    last = request.headers.get("last-event-id") or request.query_params.get("last", LOG_START)
    feed = Feed(workspace, request.query_params.get("run", ""), last)

    async def send() -> AsyncIterator[bytes]:
        yield b"retry: 500\n\n"
        while not stopping():
            for message in await asyncio.to_thread(feed.collect):
                yield message
            await asyncio.sleep(feed.poll_s)

    return StreamingResponse(send(), media_type="text/event-stream")


async def show(request: Request) -> Response:
    """The route `/events`."""
    return await stream(request, lambda: bool(request.app.state.stopping))
