"""Where the series live, and how a step's windows reach it.

A home hands each step its batches (`take`, inside the program) and does what has to happen around
the program (`feed`: bring the next windows while this step runs). Every home but `stream` gives the
same batches in the same order.

Shapes: S steps of an epoch, A forward passes per step, B windows per pass.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from slipstream.config import Engine
from slipstream.config.base import hash_seed
from slipstream.data import windows
from slipstream.data.windows import Batch, Series

Program = Callable[[], None]


class MicroBatch(NamedTuple):
    """One forward pass's windows, and what each counts for: 0 where the batch is padded."""

    batch: Batch
    weights: Tensor
    """[B]"""


class BatchSource(Protocol):
    """One set of windows on its way to the device."""

    num_steps: int

    def start_epoch(self, epoch: int, *, at: int = 0) -> None:
        """Lay out an epoch; step `at` is the next one."""

    def get_micro_batches(self, cursor: Tensor) -> Iterator[MicroBatch]:
        """The current step's batches; called inside the program."""

    def wrap_program(self, program: Program) -> Program:
        """The program with what brings its windows."""

    def close(self) -> None:
        """Let go of workers and memory."""


class EpochSampler(NamedTuple):
    """Which windows an epoch takes, in which order, and how they are batched."""

    starts: Tensor
    windows_per_step: int
    """Windows of one step"""
    windows_per_pass: int
    """Windows of one forward pass"""
    seed: int | None
    """None keeps the order and counts every window as one; else losses are means over a step."""

    @property
    def num_steps(self) -> int:
        return -(-len(self.starts) // self.windows_per_step)

    @property
    def num_passes(self) -> int:
        return -(-self.windows_per_step // self.windows_per_pass)

    def sample_epoch(self, epoch: int) -> tuple[Tensor, Tensor]:
        """First rows [S, A, B], 0 where padded, and weights [S, A, B].

        Which windows a step takes depends on the effective batch alone, not on how it is passed.
        """
        starts = self.starts
        if self.seed is not None:
            starts = shuffle_starts(starts, seed=self.seed, epoch=epoch)
        whole, rest = divmod(len(starts), self.windows_per_step)
        mean = self.seed is not None
        weights = np.zeros(
            (self.num_steps, self.num_passes * self.windows_per_pass), dtype=np.float32
        )
        weights[:whole, : self.windows_per_step] = 1 / self.windows_per_step if mean else 1
        weights[whole:, :rest] = 1 / max(rest, 1) if mean else 1
        rows = np.zeros(weights.shape, dtype=np.int64)
        values = starts.numpy()
        rows[:whole, : self.windows_per_step] = values[: len(values) - rest].reshape(
            whole, self.windows_per_step
        )
        rows[whole:, :rest] = values[len(values) - rest :]
        shape = (self.num_steps, self.num_passes, self.windows_per_pass)
        return torch.from_numpy(rows.reshape(shape)), torch.from_numpy(weights.reshape(shape))


def shuffle_starts(starts: Tensor, *, seed: int, epoch: int) -> Tensor:
    """Every window once, in an order fixed by seed and epoch. By NumPy, as all that lays out an
    epoch: torch would wake every thread for each of these small copies."""
    generator = torch.Generator().manual_seed(hash_seed(seed) * 1_000_003 + epoch)
    order = torch.randperm(len(starts), generator=generator)
    return torch.from_numpy(starts.numpy().take(order.numpy()))


class EpochPrefetcher:
    """Epochs' orders: while the device works through one, the next is made."""

    def __init__(self, draw: EpochSampler) -> None:
        self.draw, self.worker = draw, ThreadPoolExecutor(1)
        self.coming: tuple[int, Future[tuple[Tensor, Tensor]]] | None = None

    def sample_epoch(self, epoch: int) -> tuple[Tensor, Tensor]:
        ready = self.coming is not None and self.coming[0] == epoch
        found = self.coming[1].result() if self.coming and ready else self.draw.sample_epoch(epoch)
        self.coming = epoch + 1, self.worker.submit(self.draw.sample_epoch, epoch + 1)
        return found

    def close(self) -> None:
        self.worker.shutdown(cancel_futures=True)


class DeviceSource:
    """Series on the device; windows are gathered there, inside the program."""

    def __init__(self, series: Series, draw: EpochSampler) -> None:
        device = series.values.device
        self.ahead = None if draw.seed is None else EpochPrefetcher(draw)
        self.laid: int | None = None
        """The epoch whose order is on the device"""
        self.series, self.draw, self.num_steps = series, draw, draw.num_steps
        shape = (draw.num_steps, draw.num_passes, draw.windows_per_pass)
        self.rows = torch.zeros(shape, dtype=torch.int64, device=device)
        self.weights = torch.zeros(shape, device=device)

    def start_epoch(self, epoch: int, *, at: int = 0) -> None:
        epoch = epoch if self.ahead else 0  # the order that is kept is the same in all
        if epoch == self.laid:
            return
        rows, weights = (self.ahead or self.draw).sample_epoch(epoch)
        self.rows.copy_(rows)
        self.weights.copy_(weights)
        self.laid = epoch

    def get_micro_batches(self, cursor: Tensor) -> Iterator[MicroBatch]:
        rows = self.rows.index_select(0, cursor)[0]
        weights = self.weights.index_select(0, cursor)[0]
        for i in range(self.draw.num_passes):
            yield MicroBatch(windows.gather(self.series, rows[i]), weights[i])

    def wrap_program(self, program: Program) -> Program:
        return program

    def close(self) -> None:
        if self.ahead:
            self.ahead.close()


class BufferedSource:
    """Windows that come from the host, into buffers whose place a captured step knows."""

    def __init__(
        self, example: Batch, batch: int, passes: int, device: torch.device, engine: Engine
    ) -> None:
        self.device, self.engine = device, engine
        empty = MicroBatch(example, torch.zeros(batch))
        self.slot = [_like(empty, device) for _ in range(passes)]

    def get_micro_batches(self, cursor: Tensor) -> Iterator[MicroBatch]:
        yield from self.slot

    def fill(self, slot: MicroBatch, raw: Sequence[Tensor], series: Series) -> None:
        """Move windows as `windows.raw` gives them into a slot; fewer leave the rest as it was."""
        moved = [tensor.to(self.device, non_blocking=self.engine.non_blocking) for tensor in raw]
        static = moved[2] if len(moved) > 2 else None
        batch = windows.split_channels(moved[0], moved[1], static, series)
        count = batch.targets.shape[0]
        slot.batch.inputs[:, :count].copy_(batch.inputs)
        slot.batch.targets[:count].copy_(batch.targets)
        if slot.batch.static is not None and batch.static is not None:
            slot.batch.static[:count].copy_(batch.static)

    def close(self) -> None:
        pass


def _like(share: MicroBatch, device: torch.device, *, pinned: bool = False) -> MicroBatch:
    """Buffers of the same shapes."""

    def empty(tensor: Tensor) -> Tensor:
        return torch.empty(
            tensor.shape, dtype=tensor.dtype, device=device, pin_memory=pinned
        ).zero_()

    inputs, static, targets = share.batch
    batch = Batch(empty(inputs), None if static is None else empty(static), empty(targets))
    return MicroBatch(batch, empty(share.weights))


def _tensors(share: MicroBatch) -> list[Tensor]:
    return [tensor for tensor in (*share.batch, share.weights) if tensor is not None]


def _copy(source: MicroBatch, to: MicroBatch, *, non_blocking: bool = False) -> None:
    for old, new in zip(_tensors(to), _tensors(source), strict=True):
        old.copy_(new, non_blocking=non_blocking)


class HostSource(BufferedSource):
    """Series in host memory; while a step runs, the next one's windows are gathered and copied."""

    def __init__(
        self, series: Series, draw: EpochSampler, device: torch.device, engine: Engine
    ) -> None:
        self.series, self.draw, self.num_steps = series, draw, draw.num_steps
        example = self.gather(draw.starts[:1].repeat(draw.windows_per_pass))
        super().__init__(example, draw.windows_per_pass, draw.num_passes, device, engine)
        pinned = engine.pinned
        host = torch.device("cpu")
        self.outgoing = [[_like(s, host, pinned=pinned) for s in self.slot] for _ in range(2)]
        self.incoming = [[_like(s, device) for s in self.slot] for _ in range(2)]
        self.side = torch.cuda.Stream(device)
        self.arrived = [torch.cuda.Event() for _ in range(2)]
        self.taken = [torch.cuda.Event() for _ in range(2)]

    def gather(self, rows: Tensor) -> Batch:
        """The windows of a pass, on the host."""
        return windows.gather(self.series, rows)

    def start_epoch(self, epoch: int, *, at: int = 0) -> None:
        self.rows, self.weights = self.draw.sample_epoch(epoch)
        self.sent = self.received = at
        # what the buffers went through so far, their making included, comes before what is sent now
        self.side.wait_stream(torch.cuda.current_stream(self.device))
        self._send()

    def _send(self) -> None:
        """Gather the next step's windows and start their way to the device."""
        if self.sent == self.num_steps:
            return
        turn = self.sent % 2
        self.arrived[turn].synchronize()  # the buffer's last copy, two steps ago
        for i, share in enumerate(self.outgoing[turn]):
            batch = self.gather(self.rows[self.sent, i])
            _copy(MicroBatch(batch, self.weights[self.sent, i]), share)
        with torch.cuda.stream(self.side):
            self.side.wait_event(self.taken[turn])
            for out, into in zip(self.outgoing[turn], self.incoming[turn], strict=True):
                _copy(out, into, non_blocking=self.engine.non_blocking)
            self.arrived[turn].record(self.side)
        self.sent += 1

    def _receive(self) -> None:
        turn = self.received % 2
        stream = torch.cuda.current_stream(self.device)
        stream.wait_event(self.arrived[turn])
        for into, slot in zip(self.incoming[turn], self.slot, strict=True):
            _copy(into, slot)
        self.taken[turn].record(stream)
        self.received += 1

    def wrap_program(self, program: Program) -> Program:
        def advance() -> None:
            self._receive()
            program()
            self._send()  # overlaps with the step, which the device has only begun

        return advance


class WindowDataset(Dataset[Any]):
    """A map-style data set as most scripts have it: one window per item, by slicing."""

    def __init__(self, series: Series) -> None:
        self.series = series
        self.inputs, self.targets = series.inputs, series.targets
        self.context = len(series.context_rows)
        self.lead, self.steps = int(series.target_rows[0]), len(series.target_rows)

    def __getitem__(self, start: int) -> Any:
        first = start + self.lead
        found = (
            self.inputs[start : start + self.context],
            self.targets[first : first + self.steps],
        )
        if self.series.static is None:
            return found
        return *found, self.series.static[self.series.find_series(torch.tensor(start))]


def ignore_interrupts(_: int) -> None:
    """Ctrl-C reaches every process of a terminal; the run's own ends its workers."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


class _Order:
    """A batch sampler whose batches are set anew for each epoch."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


class LoaderSource(BufferedSource):
    """Single windows through a DataLoader: what the presets baseline and classic do."""

    def __init__(
        self,
        series: Series,
        draw: EpochSampler,
        device: torch.device,
        engine: Engine,
        *,
        workers: int,
        prefetch: int,
    ) -> None:
        example = windows.gather(series, draw.starts[:1].repeat(draw.windows_per_pass))
        super().__init__(example, draw.windows_per_pass, draw.num_passes, device, engine)
        self.series, self.draw, self.num_steps = series, draw, draw.num_steps
        self.order = _Order()
        self.loader: DataLoader[Any] | None = DataLoader(
            WindowDataset(series),
            batch_sampler=self.order,
            num_workers=workers,
            prefetch_factor=prefetch if workers else None,
            persistent_workers=engine.persistent_workers and workers > 0,
            pin_memory=engine.pinned and device.type == "cuda",
            worker_init_fn=ignore_interrupts,
            generator=torch.Generator(),  # else every epoch draws from the caller's
        )
        self.batches: Iterator[Any] = iter(())

    def start_epoch(self, epoch: int, *, at: int = 0) -> None:
        assert self.loader is not None
        rows, self.weights = self.draw.sample_epoch(epoch)
        filled = self.weights > 0
        self.order.batches = [
            rows[step, i][filled[step, i]].tolist()
            for step in range(at, self.num_steps)
            for i in range(self.draw.num_passes)
            if filled[step, i].any()
        ]
        self.step = at
        self.batches = iter(self.loader)

    def wrap_program(self, program: Program) -> Program:
        def advance() -> None:
            for i, slot in enumerate(self.slot):
                slot.weights.copy_(self.weights[self.step, i])
                if self.weights[self.step, i].any():
                    inputs, *rest = next(self.batches)
                    self.fill(slot, [inputs.transpose(0, 1), *rest], self.series)
            self.step += 1
            program()

        return advance

    def close(self) -> None:
        self.batches, self.loader = iter(()), None
