"""Brings the windows of requests that arrive together into one call of the model.

A worker thread calls the model; while it does, further requests queue up and form the next batch. A
request that is alone does not wait: only where others are known to be on their way, their bodies
complete but not read yet, does the batch wait for them, for a few milliseconds at most.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

Arrays = Mapping[str, npt.NDArray[Any]]
"""By the name of the graph's input or output: [windows, ...]"""
GATHER_S = 0.003
"""How long a batch waits for requests that are on their way"""
BATCH, SHARE = 256, 64
"""Windows of a call, and those that one request adds before it is the next one's turn"""


@dataclass
class WindowJob:
    """The windows of one request, gathered when their turn comes."""

    num_windows: int
    gather: Callable[[int, int], Arrays]
    """The windows from one number to before another"""
    done: asyncio.Future[Arrays]
    position: int = 0
    """Windows that are in a batch already"""
    parts: list[Arrays] = field(default_factory=list)

    @property
    def cancelled(self) -> bool:
        return self.done.done()


@dataclass(frozen=True)
class _Slice:
    job: WindowJob
    begin: int
    end: int


class Batcher:
    """Runs the windows of all requests, in the order that they arrive, by one thread."""

    def __init__(self, run: Callable[[Arrays], Arrays], count: Callable[[int], None]) -> None:
        self._run, self._count = run, count
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="model")
        self._jobs: deque[WindowJob] = deque()
        self._expected = 0
        self._busy = False
        self._timer: asyncio.TimerHandle | None = None

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        return len(self._jobs)

    @contextmanager
    def expect(self) -> Iterator[None]:
        """Announce a request whose windows are being read; batches wait for it, but briefly."""
        self._expected += 1
        try:
            yield
        finally:
            self._expected -= 1
            self._start()

    async def predict(self, num_windows: int, gather: Callable[[int, int], Arrays]) -> Arrays:
        """Return the model's outputs for all windows."""
        job = WindowJob(num_windows, gather, asyncio.get_running_loop().create_future())
        self._jobs.append(job)
        self._start()
        return await job.done

    async def call(self, function: Callable[[], None]) -> None:
        """Call a function in the model's thread, between batches."""
        await asyncio.get_running_loop().run_in_executor(self._worker, function)

    def close(self) -> None:
        self._worker.shutdown(wait=True)

    def _start(self, *, overdue: bool = False) -> None:
        """Begin the next batch, unless one is running or a request is about to join it."""
        if self._busy or not self._jobs:
            return
        loop = asyncio.get_running_loop()
        if self._expected and not overdue:
            if self._timer is None:
                self._timer = loop.call_later(GATHER_S, lambda: self._start(overdue=True))
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        batch = self._take()
        if batch:
            self._busy = True
            running = loop.run_in_executor(self._worker, self._run_batch, batch)
            running.add_done_callback(lambda result: self._finish(batch, result))

    def _take(self) -> list[_Slice]:
        """Take the next windows, a share of each request in turn."""
        batch: list[_Slice] = []
        room = BATCH
        while self._jobs and room:
            job = self._jobs.popleft()
            if job.cancelled:
                continue
            size = min(SHARE, room, job.num_windows - job.position)
            batch.append(_Slice(job, job.position, job.position + size))
            job.position += size
            room -= size
            if job.position < job.num_windows:
                self._jobs.append(job)
        return batch

    def _run_batch(self, batch: list[_Slice]) -> Arrays:
        parts = [one.job.gather(one.begin, one.end) for one in batch]
        feeds = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        return self._run(feeds)

    def _finish(self, batch: list[_Slice], result: asyncio.Future[Arrays]) -> None:
        """Give every request its part of a batch, and begin the next one."""
        self._busy = False
        error = None if result.cancelled() else result.exception()
        first = 0
        for one in batch:
            past = first + one.end - one.begin
            if one.job.cancelled:
                pass
            elif error is not None:
                one.job.done.set_exception(error)
            else:
                part = {name: array[first:past] for name, array in result.result().items()}
                one.job.parts.append(part)
                self._complete(one.job)
            first = past
        self._count(first)
        self._start()

    @staticmethod
    def _complete(job: WindowJob) -> None:
        if sum(len(next(iter(part.values()))) for part in job.parts) < job.num_windows:
            return
        names = job.parts[0]
        whole = {name: np.concatenate([part[name] for part in job.parts]) for name in names}
        job.done.set_result(whole)
