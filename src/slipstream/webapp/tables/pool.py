"""Reader processes: started when there is something to read, ended when there is not."""

from __future__ import annotations

import asyncio
import json
import sys
from asyncio.subprocess import Process
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from slipstream.errors import UserError

IDLE_S = 120.0
"""How long a process waits for more"""
TASK_S = 3600.0
MOST_LINE = 64 << 20


class ReaderPool:
    """Hands tasks to processes, each of which has one at a time."""

    def __init__(self, most: int, *, nice: int) -> None:
        self._slots = asyncio.Semaphore(most)
        self._nice = nice
        self._idle: list[Process] = []
        self._all: set[Process] = set()

    async def prepare(self, count: int) -> None:
        """Have so many processes wait, unless all are at work."""
        while len(self._idle) < count and not self._slots.locked():
            self._release(await self._start())

    async def run(self, request: dict[str, Any], report: Callable[[float], None]) -> Any:
        """Return the result of a task; a problem with the file is a UserError."""
        async with self._slots:
            process = await self._take()
            try:
                async with asyncio.timeout(TASK_S):
                    answer = await _talk(process, request, report)
            except TimeoutError:
                raise UserError(f"reading the file took more than {TASK_S:g} s") from None
            finally:
                if process.returncode is None:
                    self._release(process)
        if "error" in answer:
            raise UserError(answer["error"])
        return answer["result"]

    async def _take(self) -> Process:
        while self._idle:
            process = self._idle.pop()
            if process.returncode is None:
                return process
        return await self._start()

    async def _start(self) -> Process:
        # -P: modules in the folder, which is the working directory, are not imported
        command = (sys.executable, "-P", "-m", "slipstream.webapp.tables.reader", str(self._nice))
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            limit=MOST_LINE,
        )
        self._all = {one for one in self._all if one.returncode is None} | {process}
        return process

    async def close(self) -> None:
        """End all processes."""
        for process in self._all:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()
            assert process.stdin is not None
            process.stdin.close()

    def _release(self, process: Process) -> None:
        self._idle.append(process)
        asyncio.get_running_loop().call_later(IDLE_S, self._end, process)

    def _end(self, process: Process) -> None:
        """End a process that waits; one that was used meanwhile waits anew."""
        if process in self._idle:
            self._idle.remove(process)
            assert process.stdin is not None
            process.stdin.close()


async def _talk(
    process: Process, request: dict[str, Any], report: Callable[[float], None]
) -> dict[str, Any]:
    assert process.stdin is not None
    assert process.stdout is not None
    is_done = False
    try:
        process.stdin.write(json.dumps(request).encode() + b"\n")
        with suppress(ConnectionError):
            await process.stdin.drain()
        while line := await process.stdout.readline():
            answer: dict[str, Any] = json.loads(line)
            if "progress" not in answer:
                is_done = True
                return answer
            report(answer["progress"])
        raise UserError("the file could not be read: the process that read it ended")
    finally:
        if not is_done:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()
