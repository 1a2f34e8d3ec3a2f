"""Whether Triton kernels can run, the launch of kernels, and compiling those of a step beforehand.

Kernels are compiled at their first launch, which takes up to a second, and a training step has a
dozen of them. So a step runs once without any: each launch only requests its kernel, threads
compile what is missing, and the first real step finds all of them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from slipstream.base import machine

MAX_THREADS = 16
"""The number of kernels compiled at a time: a step has about a dozen"""
MAX_WAIT_S = 60.0
"""How long to wait for other processes that build launchers"""


class Requests:
    """What is requested while precompiling."""

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        self.pool = pool
        self.triton: list[Any] = []
        """Triton's kernels"""
        self.programs: dict[int, tuple[CudaProgram, Future[None]]] = {}

    def add_program(self, program: CudaProgram) -> None:
        if id(program) not in self.programs:
            self.programs[id(program)] = program, self.pool.submit(program.load)


_requested: ContextVar[Requests | None] = ContextVar("requested", default=None)
"""None where kernels run"""
_trying = threading.Lock()


def should_use_triton(tensor: Tensor) -> bool:
    """Return whether one of our kernels runs an operation on this tensor. Not within torch.compile,
    which fuses plain operations by itself."""
    return tensor.is_cuda and not torch.compiler.is_compiling() and is_triton_usable(tensor.device)


def is_triton_usable(device: torch.device) -> bool:
    """Return whether Triton is installed, the GPU is Turing or later, and a kernel compiles and
    runs on it, which needs a C compiler."""
    with _trying:  # `prepare_device` may be at it in another thread
        return _try_triton(device)


@cache
def _try_triton(device: torch.device) -> bool:
    if find_spec("triton") is None or torch.cuda.get_device_capability(device) < (7, 5):
        return False
    from slipstream.kernels import dropout

    return dropout.can_launch(device)


def prepare_device(device: torch.device) -> None:
    """Load the driver and the libraries that a first step would otherwise wait for."""
    if device.type != "cuda":
        return
    for dtype in (torch.float32, torch.float16):
        square = torch.zeros(16, 16, device=device, dtype=dtype)
        (square @ square).sum()
    is_triton_usable(device)


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    """Run a kernel, or while precompiling request it."""
    requested = _requested.get()
    if requested is None:
        kernel[grid](*args, **options)
    else:
        requested.triton.append(kernel.warmup(*args, grid=grid, **options))


class CudaProgram(Protocol):
    """A program in CUDA C++ (`kernels.cuda.program`)."""

    def load(self) -> None:
        """Compile it, unless that was done before, and bring it onto the GPU."""

    def launch(
        self, name: str, grid: tuple[int, int], threads: int, shared: int, *args: Any
    ) -> None:
        """Start a kernel on PyTorch's current stream."""


def launch_program(
    program: CudaProgram, name: str, grid: tuple[int, int], threads: int, shared: int, *args: Any
) -> None:
    """Run a kernel of a CUDA program, or while precompiling request the program."""
    requested = _requested.get()
    if requested is None:
        program.launch(name, grid, threads, shared, *args)
    else:
        requested.add_program(program)


def load_programs(programs: Iterable[CudaProgram]) -> None:
    """Bring programs onto the GPU, or while precompiling request them; raises what fails."""
    requested = _requested.get()
    for program in programs:
        if requested is None:
            program.load()
        else:
            requested.add_program(program)


@contextmanager
def precompile() -> Iterator[None]:
    """Within it no kernel of ours runs, and their outputs are undefined. At its end all that were
    launched are compiled and on the current GPU. It ends early where memory runs out; the first
    real step reports that, and a kernel that does not compile."""
    from triton import AsyncCompileMode  # not installed on a machine without a GPU

    with ThreadPoolExecutor(min(machine.count_available_cores(), MAX_THREADS)) as pool:
        requested = Requests(pool)
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
        for _, loading in requested.programs.values():
            with suppress(Exception):  # the first real step reports that
                loading.result()
        new = {id(kernel): kernel for kernel in requested.triton if hasattr(kernel, "result")}
        if new:
            groups = group_by_launcher(new.values())
            with _lock_cache():
                list(pool.map(partial(_load, torch.cuda.current_device()), groups))


def group_by_launcher(kernels: Iterable[Any]) -> list[list[Any]]:
    """Group compiled kernels by their launcher, a library that Triton builds when the first of them
    is loaded.

    The same library must not be built twice at a time: one build replaces the other's file between
    the moment when Python looks at its inode and the one when it opens the library. Python then
    remembers an inode that is free again, and takes the next library that gets it for this one:
    its kernel is launched with "takes exactly 44 arguments (33 given)".
    """
    groups: dict[tuple[str, str], list[Any]] = {}
    for kernel in kernels:
        with suppress(Exception):  # it does not compile; the first real step reports that
            compiled = kernel.result()
            signature, constants = compiled.src.signature, compiled.src.constants
            key = str(list(signature.items())), str(sorted(map(str, constants)))
            groups.setdefault(key, []).append(compiled)
    return list(groups.values())


def _load(device: int, kernels: Sequence[Any]) -> None:
    """Bring kernels onto the GPU, one after the other."""
    for kernel in kernels:
        with suppress(Exception), torch.cuda.device(device):
            kernel.run  # noqa: B018  a property that loads it


@contextmanager
def _lock_cache() -> Iterator[None]:
    """Let one process at a time build launchers in Triton's cache; wait for the lock for a limited
    time only."""
    from triton import knobs

    try:
        import fcntl  # not on Windows

        folder = Path(knobs.cache.dir)
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / "slipstream.lock").open("w")
    except (ImportError, OSError):
        yield
        return
    with file:
        until = time.monotonic() + MAX_WAIT_S
        while time.monotonic() < until:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.01)
            except OSError:  # a file system without locks
                break
        yield
