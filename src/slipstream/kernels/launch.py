"""Launch Triton kernels, and compile those of a step beforehand, several at a time.

Triton compiles a kernel at its first launch, which takes up to a second, and a training step has a
dozen of them. So a step runs once without any: each launch only requests its kernel, threads
compile what is missing, and the first real step finds all of them.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch

from slipstream import machine

MAX_THREADS = 16
_requested: ContextVar[list[Any] | None] = ContextVar("requested", default=None)
"""While precompiling, the kernels so far"""


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    """Run a kernel, or while precompiling request it."""
    requested = _requested.get()
    if requested is None:
        kernel[grid](*args, **options)
    else:
        requested.append(kernel.warmup(*args, grid=grid, **options))


@contextmanager
def precompile() -> Iterator[None]:
    """Within it no kernel of ours runs, and their outputs are undefined. At its end all that were
    launched are compiled and on the current GPU. It ends early where memory runs out; the first
    real step reports that, and a kernel that does not compile."""
    from triton import AsyncCompileMode  # not installed on a machine without a GPU

    requested: list[Any] = []
    with ThreadPoolExecutor(min(machine.count_available_cores(), MAX_THREADS)) as pool:
        before = _requested.set(requested)
        try:
            # the backward pass stays in this thread: others do not see the context variable
            with (
                suppress(torch.OutOfMemoryError),
                torch.autograd.set_multithreading_enabled(False),
                AsyncCompileMode(pool, ignore_errors=True),
            ):
                yield
        finally:
            _requested.reset(before)
        new = {id(kernel): kernel for kernel in requested if hasattr(kernel, "result")}
        if new:
            list(pool.map(partial(_load, torch.cuda.current_device()), new.values()))


def _load(device: int, kernel: Any) -> Any:
    """Wait until a kernel is compiled and bring it onto the GPU."""
    with suppress(Exception), torch.cuda.device(device):
        return kernel.result().run
    return None
