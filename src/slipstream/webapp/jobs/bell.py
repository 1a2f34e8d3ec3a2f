"""A named pipe that wakes the worker of a device, which need not look for jobs all the time."""

from __future__ import annotations

import os
import select
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

POLL_S = 0.03
"""Between two looks where the file system has no pipes"""


class Bell:
    """The worker's end."""

    def __init__(self, root: Path, device: str) -> None:
        self.path = _get_path(root, device)
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

    def wait(self, most_s: float) -> None:
        """Return when the bell is rung, or after some seconds."""
        if self._descriptor is None:
            time.sleep(POLL_S)
        elif select.select([self._descriptor], [], [], most_s)[0]:
            with suppress(OSError):
                os.read(self._descriptor, 4096)


def ring(root: Path, device: str) -> None:
    """Wake the worker that waits for a device, if one does."""
    with suppress(OSError):  # nobody waits, or there are no pipes
        descriptor = os.open(_get_path(root, device), os.O_WRONLY | os.O_NONBLOCK)
        try:
            os.write(descriptor, b"1")
        finally:
            os.close(descriptor)


def _get_path(root: Path, device: str) -> Path:
    return root / "workers" / f"{device.replace(':', '-')}.bell"
