"""Processes and devices with little memory, and devices that fail."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import psutil
import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.utils._python_dispatch import TorchDispatchMode

from slipstream.models.forecaster import WindowPredictor

Fault = Callable[[str, Tensor], Exception | None]
"""Returns the error of an operation, from its name and its result; None where it works"""


def run_within(megabytes, work):
    """What `work` gives as text in a forked process that may take so much more memory."""
    resource = pytest.importorskip("resource", reason="this system limits no process")
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:  # nothing of the parent's may run here but `work`
        try:
            limit = psutil.Process().memory_info().vms + megabytes * 2**20
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
            try:
                told = work()
            except BaseException:
                told = traceback.format_exc()
            os.write(writing, told.encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as answer:
        told = answer.read()
    os.waitpid(child, 0)
    return told


def run_out_of_memory() -> Exception:
    return torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")


class FaultyDevice(TorchDispatchMode):
    """Fails PyTorch's operations within a `with` block, as a device does: `fault` says which."""

    def __init__(self, fault: Fault) -> None:
        super().__init__()
        self.fault, self.num_failures = fault, 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = operation(*args, **kwargs)
        if isinstance(result, Tensor) and "out" not in kwargs:  # which takes no memory
            error = self.fault(operation.overloadpacket.__name__, result)
            if error is not None:
                self.num_failures += 1
                raise error
        return result


class CrowdedDevice(FaultyDevice):
    """Has memory for steps of at most `holds` lanes, from step `since` on; counts the steps done.

    Every step of a pack reads the lanes' learning rates by one `gather`, before it changes them.
    """

    def __init__(self, *, holds: int, since: int = 1) -> None:
        super().__init__(self._refuse)
        self.holds, self.since, self.num_steps = holds, since, 0

    def _refuse(self, name: str, result: Tensor) -> Exception | None:
        if name != "gather" or result.shape[1:] != (1,):
            return None
        if self.num_steps + 1 >= self.since and len(result) > self.holds:
            return run_out_of_memory()
        self.num_steps += 1
        return None


@contextmanager
def hooked_models(
    before: Callable[[nn.Module, Tensor], None] | None = None,
    after: Callable[[nn.Module, Tensor], Tensor | None] | None = None,
) -> Iterator[None]:
    """Within a `with` block, call `before` with each model and its inputs, and `after` with each
    model and its output, which it may replace."""

    def call_before(module, given):
        if before is not None and isinstance(module, WindowPredictor):
            before(module, given[0])

    def call_after(module, _, output):
        if after is not None and isinstance(module, WindowPredictor):
            return after(module, output)
        return None

    handles = (
        register_module_forward_pre_hook(call_before),
        register_module_forward_hook(call_after),
    )
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def allocate_lanes(holds: int) -> FaultyDevice:
    """A device with memory for packs of at most `holds` lanes: their order of windows is the one
    tensor of zeros with four dimensions."""
    return FaultyDevice(
        lambda name, result: (
            run_out_of_memory()
            if name == "zeros" and result.ndim == 4 and len(result) > holds
            else None
        )
    )
