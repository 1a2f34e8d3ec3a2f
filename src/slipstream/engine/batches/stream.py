"""Data larger than memory: workers read chunks of it and draw windows from them.

An epoch takes the chunks in an order of its own, a few at a time into a buffer, and the buffer's
windows in random order. Windows that no longer fill a batch go into the next buffer, and those that
workers have left at the end make up the last batches: every window comes once.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from slipstream.config.base import hash_seed
from slipstream.data import windows
from slipstream.data.stream import StreamedSeries
from slipstream.data.windows import WindowChunk
from slipstream.engine.batches.host import (
    BufferedSource,
    TransferOptions,
    build_loader,
    end_workers,
    take_batch,
)

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
        self, stream: StreamedSeries, which: str, batch: int, seed: int | None, buffer_rows: int
    ) -> None:
        self.stream, self.which, self.batch = stream, which, batch
        self.seed, self.buffer_rows = seed, buffer_rows
        self.epoch = torch.zeros(1, dtype=torch.int64).share_memory_()  # seen by living workers

    def __iter__(self) -> Iterator[Windows]:
        worker = get_worker_info()
        index, num_workers = (worker.id, worker.num_workers) if worker else (0, 1)
        rest: Windows | None = None
        for number, chunks in enumerate(self._plan_buffers()):
            if number % num_workers == index:
                for batch in self._draw_batches(chunks, number, rest):
                    rest = None
                    if batch[1].shape[0] == self.batch:
                        yield batch
                    else:
                        rest = batch
        if rest is not None:
            yield rest

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
        self, ranges: list[tuple[int, int]], number: int, rest: Windows | None
    ) -> Iterator[Windows]:
        """Yield the buffer's windows in batches, `rest` first; the last batch may be smaller."""
        read = (self.stream.read_chunk(self.which, begin, end) for begin, end in ranges)
        chunks = [chunk for chunk in read if chunk is not None]
        if not chunks:
            if rest is not None:
                yield rest
            return
        owner = torch.cat([torch.full((len(c.starts),), i) for i, c in enumerate(chunks)])
        starts = torch.cat([chunk.starts for chunk in chunks])
        if self.seed is not None:
            order = torch.randperm(len(starts), generator=self._make_generator(1 + number))
            owner, starts = owner[order], starts[order]
        begin, num_rest = 0, 0 if rest is None else rest[1].shape[0]
        while begin < len(starts) or rest is not None:
            end = min(begin + self.batch - num_rest, len(starts))
            batch = _gather(chunks, owner[begin:end], starts[begin:end])
            yield batch if rest is None else _concatenate([rest, batch])
            rest, num_rest, begin = None, 0, end


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
    others = [torch.cat(same) for same in zip(*(part[1:] for part in parts), strict=True)]
    return [inputs, *others]


class StreamSource(BufferedSource):
    """Reads the windows of a stream through DataLoader workers."""

    def __init__(
        self, stream: StreamedSeries, which: str, batching: StreamBatching, options: TransferOptions
    ) -> None:
        self.batching, self.num_windows = batching, len(stream.ranges[which])
        self.num_steps = -(-self.num_windows // batching.windows_per_step)
        first = next(iter(stream.ranges[which].first.tolist()))
        chunk = stream.read_chunk(which, first, first + 1)
        assert chunk is not None
        self.series, size = chunk.series, batching.windows_per_pass
        example = windows.gather(chunk.series, chunk.starts[:1].repeat(size))
        super().__init__(example, size, -(-batching.windows_per_step // size), options)
        read = batching.windows_per_read or size
        self._reader = _Reader(stream, which, read, batching.seed, options.engine.buffer_rows)
        context = "spawn" if options.workers else None  # Arrow's threads do not survive a fork
        self._loader: Any = build_loader(
            self._reader, options, batch_size=None, multiprocessing_context=context
        )
        self._batches: Iterator[Windows] = iter(())
        self._rest: Windows | None = None
        """Windows of the last batch that were not needed yet"""

    def start_epoch(self, epoch: int, *, at: int = 0) -> None:
        self._reader.epoch.fill_(epoch)
        self._batches, self._rest = iter(self._loader), None
        self.next_step = at
        self._skip(at * self.batching.windows_per_step)  # what was trained on already

    def _next_batch(self) -> Windows:
        """Return the rest of the last batch, or the next one."""
        rest, self._rest = self._rest, None
        if rest is not None:
            return rest
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
