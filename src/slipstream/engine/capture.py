"""Record a program as a CUDA graph once and replay it from then on."""

import gc
import re
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import NamedTuple, Self

import torch

from slipstream.engine.batches import Program

EAGER_FIRST = 3
"""Steps that run eagerly before a capture, in which libraries choose kernels and allocate"""
HIGH_PRIORITY = -1
"""Of CUDA's streams; 0 is the default"""
DECISIVE = re.compile(r"RNN_|LSTM_|GRU_|fmha|flash|(attention|split)_(for|back)ward", re.IGNORECASE)


@cache
def get_capture_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream on which all programs are recorded, and on which nothing is copied.

    torch's streams of one priority are 32 that take turns, and a capture by default takes one of
    them: sooner or later it is the stream of another program that trains. Where a thread then frees
    pinned memory that this program has used, torch records an event on that stream, into the
    capture, and every later allocation of pinned memory fails with "invalid argument". The
    streams of high priority are used for captures alone; a graph does not inherit that.
    """
    return torch.cuda.Stream(device, priority=HIGH_PRIORITY)


def raise_closed() -> None:
    """Stand in for a program that is closed."""
    raise RuntimeError("the program is closed")


class CaptureSeconds(NamedTuple):
    """The time that steps took for building kernels and recording, not for their numbers."""

    training: float = 0.0
    validation: float = 0.0

    def add(self, seconds: Self) -> Self:
        return type(self)(self.training + seconds.training, self.validation + seconds.validation)


class CapturedProgram:
    """A program as a CUDA graph.

    The first calls run eagerly and count as real steps. If the capture fails, which changes no
    result, the program stays eager and `failure` gives the reason. With several steps in one graph,
    calls are collected until there are enough; `flush` runs those that are pending.
    """

    def __init__(self, program: Program, device: torch.device, *, steps: int = 1) -> None:
        self.failure: str | None = None
        self.setup_s = 0.0
        """The host's time in the first calls, which build kernels, and in recording"""
        self._program = program
        self._device = device
        self._side = torch.cuda.Stream(device)
        self._eager_left = EAGER_FIRST
        self._steps = steps
        self.num_runs = 0
        """Calls that have run; others are collected"""
        self._waiting = 0
        self._one: torch.cuda.CUDAGraph | None = None
        self._many: torch.cuda.CUDAGraph | None = None

    def __call__(self) -> None:
        if self._eager_left:
            began = time.perf_counter()
            self._eager_left -= 1
            self._run_eagerly()
            self.setup_s += time.perf_counter() - began
        elif self.failure:
            self._run_eagerly()
        elif self._steps == 1:
            self._replay_one()
        else:
            self._waiting += 1
            if self._waiting == self._steps:
                self._many = self._many or self._record(self._steps)
                if self._many is not None:
                    self._many.replay()
                    self.num_runs += self._steps
                    self._waiting = 0
                self.flush()

    def flush(self) -> None:
        """Run the calls that are pending."""
        while self._waiting:
            self._waiting -= 1
            self._replay_one()

    def kernels(self) -> list[str]:
        """Name the kernels that decide the speed."""
        graph = self._one or self._many
        return [] if graph is None else name_decisive_kernels(_list_kernels(graph))

    def close(self) -> None:
        """Free the graphs' memory, and drop the program and everything that it references."""
        for graph in (self._one, self._many):
            if graph is not None:
                graph.reset()
        self._one = self._many = None
        self._program = raise_closed

    def _replay_one(self) -> None:
        self._one = self._one or self._record(1)
        if self._one is None:
            self._run_eagerly()
        else:
            self._one.replay()
            self.num_runs += 1

    def _run_eagerly(self) -> None:
        current = torch.cuda.current_stream(self._device)
        self._side.wait_stream(current)
        with torch.cuda.stream(self._side):
            self._program()
        current.wait_stream(self._side)
        self.num_runs += 1

    def _record(self, steps: int) -> torch.cuda.CUDAGraph | None:
        if self.failure:
            return None
        began = time.perf_counter()
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        # cuBLAS never frees its workspaces. They lie in the middle of cached memory, which then
        # cannot be returned, so they are cleared before the recording and after it
        torch._C._cuda_clearCublasWorkspaces()
        try:
            with (
                _pause_garbage_collection(),
                torch.cuda.graph(
                    graph,
                    stream=get_capture_stream(self._device),
                    capture_error_mode="thread_local",
                ),
            ):
                for _ in range(steps):
                    self._program()
            graph.instantiate()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            self.failure = str(error).strip().split("\n", 1)[0]
            return None
        finally:
            torch._C._cuda_clearCublasWorkspaces()
            self.setup_s += time.perf_counter() - began
        return graph


@contextmanager
def _pause_garbage_collection() -> Iterator[None]:
    """Collect no garbage: freeing an earlier graph would abort a recording."""
    on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if on:
            gc.enable()


def name_decisive_kernels(names: Iterable[str]) -> list[str]:
    """List recurrent and attention kernels once each; a mangled name, which gives the number type,
    becomes `name<half>`."""
    result = set()
    for name in filter(DECISIVE.search, names):
        if name.startswith("_Z"):  # within a mangled name, each identifier follows its own length
            lengths = re.finditer(r"\d+", name)
            words = (name[length.end() :][: int(length[0])] for length in lengths)
            kind = "half" if "__half" in name else "bf16" if "bfloat16" in name else "float"
            name = f"{next(filter(DECISIVE.search, words), name)}<{kind}>"
        result.add(name)
    return sorted(result)


def _list_kernels(graph: torch.cuda.CUDAGraph) -> list[str]:
    """Name the kernel of each node of a graph; empty without the CUDA driver's bindings."""
    try:
        from cuda.bindings import driver  # torch's CUDA builds bring it
    except ImportError:
        return []
    handle = driver.CUgraph(graph.raw_cuda_graph())
    _, _, count = driver.cuGraphGetNodes(handle)
    _, nodes, _ = driver.cuGraphGetNodes(handle, count)
    names = []
    for node in nodes:
        if driver.cuGraphNodeGetType(node)[1] == driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_KERNEL:
            _, launch = driver.cuGraphKernelNodeGetParams(node)
            failed, name = driver.cuFuncGetName(launch.func)
            if not int(failed):
                names.append(name.decode())
    return names
