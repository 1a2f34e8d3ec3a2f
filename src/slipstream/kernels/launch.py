"""Launches kernels; in a rehearsal, builds those that are missing, several at a time.

A kernel is built where it is first launched, which takes up to a second, and a training step has a
dozen of them. So a step is gone through once without any: each is only asked for, threads build
what nobody has built before, and the first real step finds all of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch

from slipstream import machine

MOST_THREADS = 16
_asked_for: ContextVar[list[Any] | None] = ContextVar("asked_for", default=None)
"""In a rehearsal, the kernels so far"""


def launch(kernel: Any, grid: tuple[int, ...], *given: Any, **how: Any) -> None:
    asked_for = _asked_for.get()
    if asked_for is None:
        kernel[grid](*given, **how)
    else:
        asked_for.append(kernel.warmup(*given, grid=grid, **how))


@contextmanager
def precompile() -> Iterator[None]:
    """Within it no kernel of ours runs; what they would have written holds anything. At its end all
    that were launched are built and on the current GPU. Where memory runs out, it ends early; that,
    or a kernel that cannot be built, is for the first real step to tell."""
    from triton import AsyncCompileMode  # not there on a machine without a GPU

    asked_for: list[Any] = []
    with ThreadPoolExecutor(min(machine.count_available_cores(), MOST_THREADS)) as pool:
        before = _asked_for.set(asked_for)
        try:
            # the way back stays in this thread: others would know nothing of a rehearsal
            with (
                suppress(torch.OutOfMemoryError),
                torch.autograd.set_multithreading_enabled(False),
                AsyncCompileMode(pool, ignore_errors=True),
            ):
                yield
        finally:
            _asked_for.reset(before)
        new = {id(kernel): kernel for kernel in asked_for if hasattr(kernel, "result")}
        if new:
            list(pool.map(partial(_launcher, torch.cuda.current_device()), new.values()))


def _launcher(device: int, kernel: Any) -> Any:
    """What launches a kernel; to ask for it builds it, and brings the kernel onto the GPU."""
    with suppress(Exception), torch.cuda.device(device):
        return kernel.result().run
    return None
