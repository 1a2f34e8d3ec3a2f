"""Where batches come from: series on the GPU, in pinned memory, in a DataLoader, on disk."""

from __future__ import annotations

import hashlib
import json
import shutil
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from torch.utils.data import Dataset as TorchDataset

from slipstream import runs
from slipstream.base.errors import WARNING, UserError
from slipstream.base.signals import CTRL_C
from slipstream.base.storage import MANIFEST, compute_sha256
from slipstream.config import Config, Engine
from slipstream.config.base import hash_seed
from slipstream.data import windows
from slipstream.data.dataset import Dataset
from slipstream.data.stream import StreamedSeries
from slipstream.data.windows import Batch, Series, WindowChunk
from slipstream.events import CopiesOnDisk
from slipstream.models import noise
from slipstream.models.noise import Noise
from slipstream.runs import Run

Program = Callable[[], None]


class CarriedStates(NamedTuple):
    """The states of recurrent layers before and after a forward pass, one tensor per layer."""

    before: list[Tensor]
    after: list[Tensor]
    """Empty until the pass is done"""


class MicroBatch(NamedTuple):
    """The windows of one forward pass, and the weight of each: 0 where the batch is padded."""

    batch: Batch
    weights: Tensor
    """[B]"""
    carried: CarriedStates | None = None
    """Where every row of the batch predicts, from the rows before it"""


class BatchSource(Protocol):
    """Brings one set of windows to the device."""

    num_steps: int

    def start_epoch(self, epoch: int, *, step: int = 0) -> None:
        """Prepare an epoch; step `at` is the next one."""

    def get_micro_batches(self, cursor: Tensor) -> Iterator[MicroBatch]:
        """Yield the current step's micro-batches; called inside the program."""

    def wrap_program(self, program: Program, cursor: Tensor | None = None) -> Program:
        """Return the program together with the transfers that feed it.

        `cursor` is the step that the program has reached, where it may have to repeat one.
        """

    def close(self) -> None:
        """Release workers and memory."""


class BatchShare(NamedTuple):
    """The windows of every batch that one of several processes computes: the same columns of each,
    whatever part of the batch is filled. What a window draws follows from its place in the batch.

    Where memory forces a process to smaller passes, it splits its own share; the others go on.
    """

    rank: int
    size: int
    batch: int
    """Windows of one pass of all processes"""

    @property
    def width(self) -> int:
        """Windows of one pass of each process"""
        return -(-self.batch // self.size)

    def count_parts(self, windows_per_pass: int) -> int:
        """Return the passes of this process in place of one of all of them."""
        return -(-self.width // windows_per_pass)

    def locate(self, number: int, windows_per_pass: int) -> tuple[int, int]:
        """Return which pass of the whole batch a pass is part of, and its first window there."""
        whole, part = divmod(number, self.count_parts(windows_per_pass))
        return whole, self.rank * self.width + part * windows_per_pass

    def select(self, values: Tensor, windows_per_pass: int) -> Tensor:
        """Cut the passes [S, A, B] of all processes down to this one's, 0 where there is none."""
        parts, first = self.count_parts(windows_per_pass), self.rank * self.width
        share = values[:, :, first : first + self.width].numpy()
        missing = parts * windows_per_pass - share.shape[2]
        padded = np.pad(share, ((0, 0), (0, 0), (0, missing)))
        return torch.from_numpy(padded.reshape(len(share), -1, windows_per_pass))


class EpochSampler(NamedTuple):
    """Decides which windows an epoch takes, in which order, and how they are batched."""

    starts: Tensor
    windows_per_step: int
    windows_per_pass: int
    seed: int | None
    """None keeps the order and weighs every window as 1; otherwise losses are means over a step."""
    share: BatchShare | None = None
    """Where several processes train together, what this one takes of every step"""

    @property
    def num_steps(self) -> int:
        return -(-len(self.starts) // self.windows_per_step)

    @property
    def num_passes(self) -> int:
        if self.share is None:
            return -(-self.windows_per_step // self.windows_per_pass)
        whole = -(-self.windows_per_step // self.share.batch)
        return whole * self.share.count_parts(self.windows_per_pass)

    def sample_epoch(self, epoch: int) -> tuple[Tensor, Tensor]:
        """Return first rows [S, A, B], 0 where padded, and weights [S, A, B].

        The windows of a step depend on `windows_per_step` alone, not on the size of a pass.
        """
        if self.share is not None:
            batch, size_of_pass = self.share.batch, self.windows_per_pass
            first, second = self._replace(windows_per_pass=batch, share=None).sample_epoch(epoch)
            return self.share.select(first, size_of_pass), self.share.select(second, size_of_pass)
        size, (whole, remainder) = (
            self.windows_per_step,
            divmod(len(self.starts), self.windows_per_step),
        )
        starts, mean = self.starts, self.seed is not None
        if self.seed is not None:
            starts = shuffle_starts(starts, seed=self.seed, epoch=epoch)
        shape = (self.num_steps, self.num_passes, self.windows_per_pass)
        weights = np.zeros((self.num_steps, self.num_passes * self.windows_per_pass), np.float32)
        weights[:whole, :size] = 1 / size if mean else 1
        weights[whole:, :remainder] = 1 / max(remainder, 1) if mean else 1
        rows = np.zeros(weights.shape, np.int64)
        values = starts.numpy()
        rows[:whole, :size] = values[: whole * size].reshape(whole, size)
        rows[whole:, :remainder] = values[whole * size :]
        return torch.from_numpy(rows.reshape(shape)), torch.from_numpy(weights.reshape(shape))


def shuffle_starts(starts: Tensor, *, seed: int, epoch: int) -> Tensor:
    """Return every window once, in an order fixed by seed and epoch.

    NumPy does the copying here and in `sample_epoch`: torch would wake every thread for each of
    these small copies.
    """
    generator = torch.Generator().manual_seed(hash_seed(seed) * 1_000_003 + epoch)
    order = torch.randperm(len(starts), generator=generator)
    return torch.from_numpy(starts.numpy().take(order.numpy()))


class EpochPrefetcher:
    """Samples the next epoch in a thread while the device works through the current one."""

    def __init__(self, sampler: EpochSampler) -> None:
        self._sampler, self._thread = sampler, ThreadPoolExecutor(1)
        self._next: tuple[int, Future[tuple[Tensor, Tensor]]] | None = None

    def sample_epoch(self, epoch: int) -> tuple[Tensor, Tensor]:
        ready = self._next and self._next[0] == epoch and self._next[1].result()
        order = ready or self._sampler.sample_epoch(epoch)
        self._next = epoch + 1, self._thread.submit(self._sampler.sample_epoch, epoch + 1)
        return order

    def close(self) -> None:
        self._thread.shutdown(cancel_futures=True)


class DeviceSource:
    """Gathers windows on the device, by the order of an epoch that is copied there once."""

    def __init__(self, series: Series, sampler: EpochSampler) -> None:
        device = series.values.device
        self.series, self.sampler, self.num_steps = series, sampler, sampler.num_steps
        self._prefetcher = None if sampler.seed is None else EpochPrefetcher(sampler)
        self._loaded_epoch: int | None = None
        """The epoch whose order is on the device"""
        shape = (sampler.num_steps, sampler.num_passes, sampler.windows_per_pass)
        self.rows = torch.zeros(shape, dtype=torch.int64, device=device)
        self.weights = torch.zeros(shape, device=device)

    def start_epoch(self, epoch: int, *, step: int = 0) -> None:
        epoch = epoch if self._prefetcher else 0  # without shuffling, all epochs are the same
        if epoch == self._loaded_epoch:
            return
        rows, weights = (self._prefetcher or self.sampler).sample_epoch(epoch)
        self.rows.copy_(rows)
        self.weights.copy_(weights)
        self._loaded_epoch = epoch

    def get_micro_batches(self, cursor: Tensor) -> Iterator[MicroBatch]:
        rows, weights = (values.index_select(0, cursor)[0] for values in (self.rows, self.weights))
        for i in range(self.sampler.num_passes):
            yield MicroBatch(windows.gather(self.series, rows[i]), weights[i])

    def wrap_program(self, program: Program, cursor: Tensor | None = None) -> Program:
        return program

    def close(self) -> None:
        if self._prefetcher:
            self._prefetcher.close()


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
        self._staging = [
            [_allocate_like(b, host, pinned=pinned) for b in buffers] for buffers in twice
        ]
        self._incoming = [[_allocate_like(b, device) for b in buffers] for buffers in twice]
        self._copy_stream = torch.cuda.Stream(device)
        self._copied = [torch.cuda.Event() for _ in range(2)]
        self._consumed = [torch.cuda.Event() for _ in range(2)]

    def gather(self, rows: Tensor) -> Batch:
        """Return the windows of a pass, on the host."""
        return windows.gather(self.series, rows)

    def start_epoch(self, epoch: int, *, step: int = 0) -> None:
        self._rows, self._weights = self.sampler.sample_epoch(epoch)
        self._num_sent = self.next_step = step
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

    def start_epoch(self, epoch: int, *, step: int = 0) -> None:
        rows, self._weights = self.sampler.sample_epoch(epoch)
        real = self._weights > 0
        self._order.batches = [
            rows[number, i][real[number, i]].tolist()
            for number in range(step, self.num_steps)
            for i in range(self.sampler.num_passes)
            if real[number, i].any()
        ]
        self.next_step = step
        self._batches = iter(self._loader)

    def receive(self) -> None:
        for buffer, weights in zip(self.buffers, self._weights[self.next_step], strict=True):
            buffer.weights.copy_(weights)
            if weights.any():
                inputs, *targets = take_batch(self._batches)
                self.fill(buffer, [inputs.transpose(0, 1), *targets], self.series)
        self.next_step += 1

    def close(self) -> None:
        end_workers(self._batches)
        self._batches, self._loader = iter(()), None


CHUNKS_PER_BUFFER = 8
"""More chunks mix better, fewer read faster."""
Windows = list[Tensor]
"""As `windows.gather_raw` returns them: inputs [T, B, F], targets [B, H, C], maybe static [B, K]"""


class StreamBatching(NamedTuple):
    """How the windows of a stream are batched."""

    windows_per_step: int
    windows_per_pass: int
    seed: int | None
    """None keeps the order and weighs every window as 1; otherwise losses are means over a step."""
    windows_per_read: int | None = None
    """What a worker returns at a time, if not a pass: with several workers, the windows of a step
    depend on it."""


class _Reader(IterableDataset[Windows]):
    """Yields batches of one set's windows, in one worker. The epoch is set before each pass."""

    def __init__(
        self, stream: StreamedSeries, subset: str, batch: int, seed: int | None, buffer_rows: int
    ) -> None:
        self.stream, self.subset, self.batch = stream, subset, batch
        self.seed, self.buffer_rows = seed, buffer_rows
        self.epoch = torch.zeros(1, dtype=torch.int64).share_memory_()  # seen by living workers

    def __iter__(self) -> Iterator[Windows]:
        worker = get_worker_info()
        index, num_workers = (worker.id, worker.num_workers) if worker else (0, 1)
        incomplete: Windows | None = None
        for number, chunks in enumerate(self._plan_buffers()):
            if number % num_workers == index:
                for batch in self._draw_batches(chunks, number, incomplete):
                    incomplete = None
                    if batch[1].shape[0] == self.batch:
                        yield batch
                    else:
                        incomplete = batch
        if incomplete is not None:
            yield incomplete

    def _make_generator(self, salt: int) -> torch.Generator:
        seed = hash_seed(self.seed or 0) * 1_000_003 + int(self.epoch)
        return torch.Generator().manual_seed((seed * 65_537 + salt) % 2**64)

    def _plan_buffers(self) -> list[list[tuple[int, int]]]:
        """Return the row ranges of the epoch's chunks, grouped by buffer."""
        count = CHUNKS_PER_BUFFER
        chunks = self.stream.plan_chunks(max(self.buffer_rows // count, 1))
        if self.seed is not None:
            order = torch.randperm(len(chunks), generator=self._make_generator(0))
            chunks = [chunks[i] for i in order.tolist()]
        return [chunks[i : i + count] for i in range(0, len(chunks), count)]

    def _draw_batches(
        self, ranges: list[tuple[int, int]], number: int, incomplete: Windows | None
    ) -> Iterator[Windows]:
        """Yield the buffer's windows in batches, `incomplete` of an earlier one first; the last
        batch may be smaller."""
        read = (self.stream.read_chunk(self.subset, begin, end) for begin, end in ranges)
        chunks = [chunk for chunk in read if chunk is not None]
        if not chunks:
            if incomplete is not None:
                yield incomplete
            return
        owner = torch.cat([torch.full((len(c.starts),), i) for i, c in enumerate(chunks)])
        starts = torch.cat([chunk.starts for chunk in chunks])
        if self.seed is not None:
            order = torch.randperm(len(starts), generator=self._make_generator(1 + number))
            owner, starts = owner[order], starts[order]
        begin, num_left = 0, 0 if incomplete is None else incomplete[1].shape[0]
        while begin < len(starts) or incomplete is not None:
            end = min(begin + self.batch - num_left, len(starts))
            batch = _gather(chunks, owner[begin:end], starts[begin:end])
            yield batch if incomplete is None else _concatenate([incomplete, batch])
            incomplete, num_left, begin = None, 0, end


def _gather(chunks: list[WindowChunk], owner: Tensor, starts: Tensor) -> Windows:
    """Gather windows from several chunks, in the order of `starts`."""
    parts, positions = [], []
    for i, chunk in enumerate(chunks):
        position = (owner == i).nonzero()[:, 0]
        if len(position):
            raw = windows.gather_raw(chunk.series, starts[position])
            parts.append([tensor for tensor in raw if tensor is not None])
            positions.append(position)
    batch = _concatenate(parts)
    order = torch.argsort(torch.cat(positions))
    return [batch[0][:, order], *(tensor[order] for tensor in batch[1:])]


def _concatenate(parts: list[Windows]) -> Windows:
    inputs = torch.cat([part[0] for part in parts], dim=1)
    tensors = [torch.cat(same) for same in zip(*(part[1:] for part in parts), strict=True)]
    return [inputs, *tensors]


class StreamSource(BufferedSource):
    """Reads the windows of a stream through DataLoader workers."""

    def __init__(
        self,
        stream: StreamedSeries,
        subset: str,
        batching: StreamBatching,
        options: TransferOptions,
    ) -> None:
        self.batching, self.num_windows = batching, len(stream.ranges[subset])
        self.num_steps = -(-self.num_windows // batching.windows_per_step)
        first = next(iter(stream.ranges[subset].first.tolist()))
        chunk = stream.read_chunk(subset, first, first + 1)
        assert chunk is not None
        self.series, size = chunk.series, batching.windows_per_pass
        example = windows.gather(chunk.series, chunk.starts[:1].repeat(size))
        super().__init__(example, size, -(-batching.windows_per_step // size), options)
        read = batching.windows_per_read or size
        self._reader = _Reader(stream, subset, read, batching.seed, options.engine.buffer_rows)
        context = "spawn" if options.workers else None  # Arrow's threads do not survive a fork
        self._loader: Any = build_loader(
            self._reader, options, batch_size=None, multiprocessing_context=context
        )
        self._batches: Iterator[Windows] = iter(())
        self._rest: Windows | None = None
        """Windows of the last batch that were not needed yet"""

    def start_epoch(self, epoch: int, *, step: int = 0) -> None:
        self._reader.epoch.fill_(epoch)
        self._batches, self._rest = iter(self._loader), None
        self.next_step = step
        self._skip(step * self.batching.windows_per_step)  # what was trained on already

    def _next_batch(self) -> Windows:
        """Return the rest of the last batch, or the next one."""
        incomplete, self._rest = self._rest, None
        if incomplete is not None:
            return incomplete
        batch: Windows = take_batch(self._batches)
        return batch

    def _skip(self, count: int) -> None:
        """Drop `count` windows, a batch at a time."""
        while count:
            batch = self._next_batch()
            size = batch[1].shape[0]
            if size > count:
                self._rest = _slice(batch, count, None)
            count -= min(size, count)

    def _take(self, count: int) -> Windows:
        """Return the next `count` windows. Batches have the requested size, except the last one of
        each worker."""
        parts, size = [], 0
        while size < count:
            parts.append(self._next_batch())
            size += parts[-1][1].shape[0]
        batch = parts[0] if len(parts) == 1 else _concatenate(parts)
        if size > count:
            self._rest = _slice(batch, count, None)
            batch = _slice(batch, 0, count)
        return batch

    def receive(self) -> None:
        per_step, per_pass = self.batching.windows_per_step, self.batching.windows_per_pass
        left = min(per_step, self.num_windows - self.next_step * per_step)
        weight = 1.0 if self.batching.seed is None else 1.0 / left
        for buffer in self.buffers:
            count = min(per_pass, left)
            buffer.weights.zero_()
            if count:
                buffer.weights[:count] = weight
                self.fill(buffer, self._take(count), self.series)
            left -= count
        self.next_step += 1

    def close(self) -> None:
        end_workers(self._batches)
        self._batches, self._rest, self._loader = iter(()), None, None


def _slice(batch: Windows, begin: int, end: int | None) -> Windows:
    return [batch[0][:, begin:end], *(tensor[begin:end] for tensor in batch[1:])]


FORMAT_VERSION = 2
"""Copies of another version are written again"""
CHUNK = 1024
"""Windows augmented at a time; their noise depends on it"""


@dataclass(frozen=True)
class AugmentedCopies:
    """Windows on disk, mapped into memory."""

    inputs: Tensor
    """[N, W, C, T, F]"""
    targets: Tensor
    """[N, W, C, H, targets of a sequence]"""
    series: Series
    """On the host, for what is known beside the context"""
    starts: Tensor
    """[W]: the windows' first rows"""

    def gather(self, copy: int, index: Tensor) -> Batch:
        """Return some windows of a copy, as `windows.gather` does."""
        inputs, targets = self.inputs[copy][index], self.targets[copy][index]
        static = windows.gather_static(self.series, self.starts[index])
        if static is not None:
            static = static.repeat_interleave(self.series.sequences_per_window, dim=0)
        return Batch(inputs.flatten(0, 1).transpose(0, 1), static, targets.flatten(0, 1))

    def build_sampler(self, per_step: int, per_pass: int, seed: int | None) -> EpochSampler:
        """Build a sampler of window numbers instead of first rows, in the same order."""
        return EpochSampler(torch.arange(len(self.starts)), per_step, per_pass, seed)


def prepare_copies(config: Config, dataset: Dataset, run: Run) -> AugmentedCopies | None:
    """Return the copies that `augment.cache` requests, written where no intact ones are on disk."""
    settings = config.augment
    if not settings.cache or settings.for_step == settings:
        return None
    memory = dataset.memory
    if memory is None:
        raise UserError(
            "augment.cache writes copies of windows that are in memory, and these are streamed; "
            "set augment.cache = 0, or cut the data"
        )
    shapes = _compute_shapes(config, dataset)
    size = sum(4 * int(np.prod(shape)) for shape in shapes.values())
    folder = runs.get_cache_folder() / "augmented" / _compute_key(config, dataset)
    intact = _is_intact(folder)
    activity = "reading" if intact else "writing"
    copies = settings.cache
    run.append(CopiesOnDisk(what=activity, copies=copies, bytes=size, folder=str(folder)))
    if not intact:
        _write(config, dataset, folder, shapes, size)
    inputs, targets = (_map_file(folder / f"{name}.bin", shape) for name, shape in shapes.items())
    return AugmentedCopies(inputs, targets, memory.series, memory.starts["train"])


def _compute_shapes(config: Config, dataset: Dataset) -> dict[str, tuple[int, ...]]:
    signature, copies = dataset.signature, config.augment.cache
    lead = (copies, dataset.num_windows["train"], signature.sequences_per_window)
    return {
        "inputs": (*lead, signature.context, signature.model_inputs),
        "targets": (*lead, signature.steps_out, signature.model_targets),
    }


def _compute_key(config: Config, dataset: Dataset) -> str:
    """Hash everything that the copies depend on."""
    contents = {
        "data": dataset.compute_fingerprint(),
        "signature": dataset.signature.model_dump(),
        "augment": config.augment.model_dump(),
        "seed": config.seed,
        "making": FORMAT_VERSION,
    }
    return hashlib.sha256(json.dumps(contents, sort_keys=True).encode()).hexdigest()[:32]


def _is_intact(folder: Path) -> bool:
    """Return whether copies exist and match their checksums."""
    try:
        sums = runs.read_json(folder / MANIFEST)
        return bool(sums) and all(compute_sha256(folder / name) == sums[name] for name in sums)
    except (UserError, OSError):
        return False


def _write(
    config: Config, dataset: Dataset, folder: Path, shapes: dict[str, tuple[int, ...]], size: int
) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder.parent).free
    if size > free:
        raise UserError(
            f"augment.cache = {config.augment.cache} needs {size / 1e9:.1f} GB in {folder.parent}, "
            f"which has {free / 1e9:.1f} GB free; lower it, or set SLIPSTREAM_CACHE to another disk"
        )
    with runs.replace_atomically(folder) as temporary:
        temporary.mkdir()
        files = {name: temporary / f"{name}.bin" for name in shapes}
        with files["inputs"].open("wb") as inputs, files["targets"].open("wb") as targets:
            for batch in _augment_windows(config, dataset):
                inputs.write(batch.inputs.transpose(0, 1).contiguous().numpy().tobytes())
                targets.write(batch.targets.contiguous().numpy().tobytes())
        sums = {path.name: compute_sha256(path) for path in files.values()}
        runs.write_json(temporary / MANIFEST, sums)


def _augment_windows(config: Config, dataset: Dataset) -> Iterator[Batch]:
    """Yield the augmented windows of every copy, in order."""
    memory, signature = dataset.memory, dataset.signature
    assert memory is not None
    first = Noise(torch.tensor(config.seed), torch.tensor(0.0))
    layout = noise.make_layout(config.augment, signature, torch.device("cpu"))
    for copy in range(config.augment.cache):
        for number, starts in enumerate(memory.starts["train"].split(CHUNK)):
            batch = windows.gather(memory.series, starts)
            changed = noise.augment(
                config.augment.for_cache,
                first.for_pass(torch.tensor(-1 - copy), number).key,  # no step of a run is negative
                batch.inputs,
                batch.targets,
                layout=layout,
                shares=torch.ones(len(starts)),
            )
            yield Batch(changed.inputs, None, changed.targets)


def _map_file(path: Path, shape: tuple[int, ...]) -> Tensor:
    if not np.prod(shape):  # an encoder has no targets
        return torch.zeros(shape)
    # copy on write: torch wants memory that may be written, and the file must stay
    return torch.from_numpy(np.memmap(path, dtype=np.float32, mode="c", shape=shape))


class AugmentedSource:
    """Reads copies in the memory of the CPU, on which the step runs."""

    def __init__(self, copies: AugmentedCopies, sampler: EpochSampler) -> None:
        self.copies, self.sampler, self.num_steps = copies, sampler, sampler.num_steps
        self._epoch = 0

    def start_epoch(self, epoch: int, *, step: int = 0) -> None:
        self._epoch = epoch
        self._rows, self._weights = self.sampler.sample_epoch(epoch)

    def get_micro_batches(self, cursor: Tensor) -> Iterator[MicroBatch]:
        step, copy = int(cursor), self._epoch % len(self.copies.inputs)
        for rows, weights in zip(self._rows[step], self._weights[step], strict=True):
            yield MicroBatch(self.copies.gather(copy, rows), weights)

    def wrap_program(self, program: Program, cursor: Tensor | None = None) -> Program:
        return program

    def close(self) -> None:
        pass


class AugmentedHostSource(HostSource):
    """Reads copies on the host and copies them to the device while the current step runs."""

    def __init__(
        self, copies: AugmentedCopies, sampler: EpochSampler, how: TransferOptions
    ) -> None:
        self.copies, self._epoch = copies, 0
        super().__init__(copies.series, sampler, how)

    def start_epoch(self, epoch: int, *, step: int = 0) -> None:
        self._epoch = epoch
        super().start_epoch(epoch, step=step)

    def gather(self, rows: Tensor) -> Batch:
        return self.copies.gather(self._epoch % len(self.copies.inputs), rows)
