"""Series in host memory: windows are gathered there and copied to the device ahead of the step."""

import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader
from torch.utils.data import Dataset as TorchDataset

from slipstream.config import Engine
from slipstream.data import windows
from slipstream.data.windows import Batch, Series
from slipstream.engine.batches.source import EpochSampler, MicroBatch, Program
from slipstream.errors import WARNING, UserError
from slipstream.errors.stop_signals import CTRL_C

GRACE_S = 20
"""Until a worker that SIGTERM reached ends, unless the run has ended it before"""


@dataclass(frozen=True)
class TransferOptions:
    """How windows travel from the host to the device."""

    device: torch.device
    engine: Engine
    """For `pinned`, `non_blocking`, `persistent_workers` and `buffer_rows`"""
    workers: int = 0
    prefetch: int = 2


class BufferedSource:
    """Receives windows from the host in buffers whose addresses a captured step knows."""

    next_step: int
    """Of the epoch, whose windows come next"""

    def __init__(
        self, example: Batch, windows_per_pass: int, num_passes: int, options: TransferOptions
    ) -> None:
        self.options = options
        empty = MicroBatch(example, torch.zeros(windows_per_pass))
        self.buffers = [_allocate_like(empty, options.device) for _ in range(num_passes)]

    def get_micro_batches(self, cursor: Tensor) -> Iterator[MicroBatch]:
        yield from self.buffers

    def wrap_program(self, program: Program, cursor: Tensor | None = None) -> Program:
        def advance() -> None:
            # a step whose fp16 gradients overflowed takes the same windows again; to find out, the
            # host has to wait for it
            is_repeated = cursor is not None and int(cursor) < self.next_step
            if not is_repeated:
                self.receive()
            program()
            if not is_repeated:
                self.send_ahead()  # overlaps with the step, which the device has only begun

        return advance

    def receive(self) -> None:
        """Bring the windows of `next_step` into the buffers, and count it up."""
        raise NotImplementedError

    def send_ahead(self) -> None:
        """Begin to bring the windows after those in the buffers."""

    def fill(self, buffer: MicroBatch, raw: Sequence[Tensor], series: Series) -> None:
        """Copy the tensors of `windows.gather_raw` into a buffer; its rest keeps its values."""
        device, non_blocking = self.options.device, self.options.engine.non_blocking
        moved = [tensor.to(device, non_blocking=non_blocking) for tensor in raw]
        static = moved[2] if len(moved) > 2 else None
        batch = windows.split_channels(moved[0], moved[1], static, series)
        count = batch.targets.shape[0]
        buffer.batch.inputs[:, :count].copy_(batch.inputs)
        buffer.batch.targets[:count].copy_(batch.targets)
        if buffer.batch.static is not None and batch.static is not None:
            buffer.batch.static[:count].copy_(batch.static)

    def close(self) -> None:
        pass


def _allocate_like(
    example: MicroBatch, device: torch.device, *, pinned: bool = False
) -> MicroBatch:
    """Return buffers of zeros with the example's shapes."""

    def allocate(tensor: Tensor) -> Tensor:
        shape, dtype = tensor.shape, tensor.dtype
        return torch.empty(shape, dtype=dtype, device=device, pin_memory=pinned).zero_()

    inputs, static, targets = example.batch
    batch = Batch(allocate(inputs), None if static is None else allocate(static), allocate(targets))
    return MicroBatch(batch, allocate(example.weights))


def _list_tensors(micro_batch: MicroBatch) -> list[Tensor]:
    tensors = (*micro_batch.batch, micro_batch.weights)
    return [tensor for tensor in tensors if tensor is not None]


def _copy(source: MicroBatch, target: MicroBatch, *, non_blocking: bool = False) -> None:
    for old, new in zip(_list_tensors(target), _list_tensors(source), strict=True):
        old.copy_(new, non_blocking=non_blocking)


class HostSource(BufferedSource):
    """Gathers the next step's windows on the host and copies them while the current step runs.

    Two pairs of buffers take turns: `staging` on the host, `incoming` on the device.
    """

    def __init__(self, series: Series, sampler: EpochSampler, options: TransferOptions) -> None:
        self.series, self.sampler, self.num_steps = series, sampler, sampler.num_steps
        example = self.gather(sampler.starts[:1].repeat(sampler.windows_per_pass))
        super().__init__(example, sampler.windows_per_pass, sampler.num_passes, options)
        host, device, pinned = torch.device("cpu"), options.device, options.engine.pinned
        twice = [self.buffers] * 2
        self._staging = [[_allocate_like(b, host, pinned=pinned) for b in one] for one in twice]
        self._incoming = [[_allocate_like(b, device) for b in one] for one in twice]
        self._copy_stream = torch.cuda.Stream(device)
        self._copied = [torch.cuda.Event() for _ in range(2)]
        self._consumed = [torch.cuda.Event() for _ in range(2)]

    def gather(self, rows: Tensor) -> Batch:
        """Return the windows of a pass, on the host."""
        return windows.gather(self.series, rows)

    def start_epoch(self, epoch: int, *, at: int = 0) -> None:
        self._rows, self._weights = self.sampler.sample_epoch(epoch)
        self._num_sent = self.next_step = at
        # the copies below must come after all earlier work on the buffers, their zeroing included
        self._copy_stream.wait_stream(torch.cuda.current_stream(self.options.device))
        self.send_ahead()

    def send_ahead(self) -> None:
        """Gather the next step's windows and start their copy to the device."""
        if self._num_sent == self.num_steps:
            return
        turn = self._num_sent % 2
        self._copied[turn].synchronize()  # the buffer's last copy, two steps ago
        for i, staged in enumerate(self._staging[turn]):
            batch = self.gather(self._rows[self._num_sent, i])
            _copy(MicroBatch(batch, self._weights[self._num_sent, i]), staged)
        with torch.cuda.stream(self._copy_stream):
            self._copy_stream.wait_event(self._consumed[turn])
            for staged, incoming in zip(self._staging[turn], self._incoming[turn], strict=True):
                _copy(staged, incoming, non_blocking=self.options.engine.non_blocking)
            self._copied[turn].record(self._copy_stream)
        self._num_sent += 1

    def receive(self) -> None:
        turn = self.next_step % 2
        stream = torch.cuda.current_stream(self.options.device)
        stream.wait_event(self._copied[turn])
        for incoming, buffer in zip(self._incoming[turn], self.buffers, strict=True):
            _copy(incoming, buffer)
        self._consumed[turn].record(stream)
        self.next_step += 1


class WindowDataset(TorchDataset[Any]):
    """A map-style dataset with one window per item, cut out by slicing."""

    def __init__(self, series: Series) -> None:
        self.series = series
        self.inputs, self.targets = series.inputs, series.targets
        self.context = len(series.context_rows)
        self.lead, self.steps = int(series.target_rows[0]), len(series.target_rows)

    def __getitem__(self, start: int) -> Any:
        first = start + self.lead
        inputs = self.inputs[start : start + self.context]
        targets = self.targets[first : first + self.steps]
        if self.series.static is None and not self.series.num_future:
            return inputs, targets
        return inputs, targets, windows.gather_static(self.series, torch.tensor(start))


class _BatchSampler:
    """A batch sampler whose batches are set for each epoch."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


def build_loader(
    dataset: TorchDataset[Any], options: TransferOptions, **more: Any
) -> DataLoader[Any]:
    """Build a DataLoader by the options."""
    workers, engine = options.workers, options.engine
    return DataLoader(
        dataset,
        num_workers=workers,
        prefetch_factor=options.prefetch if workers else None,
        persistent_workers=engine.persistent_workers and workers > 0,
        pin_memory=engine.pinned and options.device.type == "cuda",
        worker_init_fn=_survive_signals,
        generator=torch.Generator(),  # otherwise every epoch draws from the generator of dropout
        **more,
    )


def take_batch(batches: Iterator[Any]) -> Any:
    """Return the next batch of a loader; a UserError of its worker has its own message only."""
    try:
        return next(batches)
    except UserError as error:
        kind = type(error)  # torch puts "Caught ... Original Traceback ..." before the message
        message = str(error.args[0]).rpartition(f"\n{kind.__module__}.{kind.__qualname__}: ")[2]
        raise kind(message.strip()) from None


def end_workers(batches: Iterator[Any]) -> None:
    """End the worker processes of a loader's iterator, which a traceback may still hold."""
    end = getattr(batches, "_shutdown_workers", None)
    if end is not None:  # there are some
        end()


def _survive_signals(_: int) -> None:
    """Leave signals that reach every process of a terminal or of a batch job to the run: it ends
    its workers. One that is only told to end does so once the run has had time to save."""
    for number in (CTRL_C, WARNING):
        if number is not None:
            signal.signal(number, signal.SIG_IGN)
    if hasattr(signal, "alarm"):  # not on Windows
        signal.signal(signal.SIGTERM, lambda *_: signal.alarm(GRACE_S))


class LoaderSource(BufferedSource):
    """Reads single windows through a DataLoader and collates them into batches."""

    def __init__(self, series: Series, sampler: EpochSampler, options: TransferOptions) -> None:
        example = windows.gather(series, sampler.starts[:1].repeat(sampler.windows_per_pass))
        super().__init__(example, sampler.windows_per_pass, sampler.num_passes, options)
        self.series, self.sampler, self.num_steps = series, sampler, sampler.num_steps
        self._order = _BatchSampler()
        dataset = WindowDataset(series)
        self._loader: Any = build_loader(dataset, options, batch_sampler=self._order)
        self._batches: Iterator[Any] = iter(())

    def start_epoch(self, epoch: int, *, at: int = 0) -> None:
        rows, self._weights = self.sampler.sample_epoch(epoch)
        real = self._weights > 0
        self._order.batches = [
            rows[step, i][real[step, i]].tolist()
            for step in range(at, self.num_steps)
            for i in range(self.sampler.num_passes)
            if real[step, i].any()
        ]
        self.next_step = at
        self._batches = iter(self._loader)

    def receive(self) -> None:
        for buffer, weights in zip(self.buffers, self._weights[self.next_step], strict=True):
            buffer.weights.copy_(weights)
            if weights.any():
                inputs, *rest = take_batch(self._batches)
                self.fill(buffer, [inputs.transpose(0, 1), *rest], self.series)
        self.next_step += 1

    def close(self) -> None:
        end_workers(self._batches)
        self._batches, self._loader = iter(()), None
