"""What the data screen asks for: tasks that run once, in reader processes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream import config as configs
from slipstream.config import Config
from slipstream.webapp.tables.cache import CachedTable, TableCache
from slipstream.webapp.tables.pool import ReaderPool

WAIT_S = 1.5
"""How long a request waits for a task before it is answered with its progress"""
SLOW = ("findings", "correlations")
"""Tasks that nobody waits for: they come after others, with little priority"""


@dataclass
class _Running:
    task: asyncio.Task[Any]
    progress: float = 0.0


class Tables:
    """The tables of a folder, read as they are looked at."""

    def __init__(self, root: Path) -> None:
        self.cache = TableCache(root)
        self._prompt = ReaderPool(3, nice=0)
        self._slow = ReaderPool(1, nice=10)
        self._checks = ReaderPool(1, nice=5)
        self._running: dict[tuple[str, str], _Running] = {}

    async def prepare(self) -> None:
        """Have processes ready for the file that is looked at next: one reads the time, another
        the first column."""
        await self._prompt.prepare(2)

    async def close(self) -> None:
        """End the processes."""
        await self._prompt.close()
        await self._slow.close()
        await self._checks.close()

    async def ensure(self, table: CachedTable, task: str, *arguments: Any) -> float | None:
        """Carry out a task unless it was; return None when it is done, else how far it is."""
        name = "-".join([task, *map(str, arguments)])
        if table.read(name) is not None:
            return None
        key = table.folder.name, name
        running = self._running.get(key)
        if running is None:
            self.cache.open(table)
            running = self._running[key] = self._start(table, task, arguments)
        await asyncio.wait([running.task], timeout=WAIT_S)
        if not running.task.done():
            return running.progress
        if self._running.get(key) is running:
            del self._running[key]
        running.task.result()
        return None

    def _start(self, table: CachedTable, task: str, arguments: Sequence[Any]) -> _Running:
        pool = self._slow if task in SLOW else self._prompt

        def report(progress: float) -> None:
            running.progress = progress

        running = _Running(asyncio.create_task(pool.run(_describe(table, task, arguments), report)))
        return running

    async def check(self, config: Config) -> dict[str, Any]:
        """Return what `readiness.check_data` says about a config; a UserError says why it cannot be
        trained."""
        request = {"task": "check", "arguments": [configs.to_json_values(config)]}
        result: dict[str, Any] = await self._checks.run(request, lambda _: None)
        return result

    async def read_rows(self, table: CachedTable, begin: int, count: int) -> Any:
        """Return a page of rows."""
        request = _describe(table, "rows", (begin, count))
        return await self._prompt.run(request, lambda _: None)


def _describe(table: CachedTable, task: str, arguments: Sequence[Any]) -> dict[str, Any]:
    return {
        "task": task,
        "arguments": list(arguments),
        "path": str(table.path),
        "folder": str(table.folder),
        "overrides": list(table.overrides),
    }
