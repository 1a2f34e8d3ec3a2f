"""Several files at a time, and the bytes that are done."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from slipstream.object_storage import PARALLEL

Show = Callable[[int, int], None]
"""Is called with the bytes that are copied and those to copy"""


def map_parallel(function: Callable[[str], Any], names: Sequence[str]) -> Iterator[Any]:
    """Yield results in order; at the first error what has not begun is left out."""
    with ThreadPoolExecutor(PARALLEL) as pool:
        try:
            yield from pool.map(function, names)
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise


class Meter:
    """Counts the bytes that several threads have copied."""

    def __init__(self, total: int, show: Show | None) -> None:
        self.total, self.show, self.count, self.lock = total, show, 0, threading.Lock()

    def add(self, count: int) -> None:
        with self.lock:
            self.count += count
            if self.show is not None:
                self.show(self.count, self.total)
