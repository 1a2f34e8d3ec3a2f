"""The home of data larger than memory: workers read stretches of it and draw windows from them.

An epoch takes the stretches in an order of its own, a few at a time into a buffer, and the buffer's
windows in random order. What is left of a buffer when it no longer fills a batch goes into the next
one, and what workers are left with at the end makes up the last batches: every window comes once.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from slipstream.config import Engine
from slipstream.config.base import hash_seed
from slipstream.data import windows
from slipstream.data.stream import StreamedSeries
from slipstream.data.windows import WindowChunk
from slipstream.engine.batches import source
from slipstream.engine.batches.source import BufferedSource, Program

STRETCHES = 8
"""Stretches that a buffer is made of: more mix better, fewer read faster."""
Windows = list[Tensor]
"""As `windows.raw` gives them: inputs [T, B, F], targets [B, H, C], perhaps static [B, K]."""


class _Reader(IterableDataset[Windows]):
    """Batches of one set's windows, as one worker sees them. The epoch is set before each pass."""

    def __init__(
        self, stream: StreamedSeries, which: str, batch: int, seed: int | None, buffer_rows: int
    ) -> None:
        self.stream, self.which, self.batch = stream, which, batch
        self.seed, self.buffer_rows = seed, buffer_rows
        self.epoch = torch.zeros(1, dtype=torch.int64).share_memory_()  # seen by living workers

    def __iter__(self) -> Iterator[Windows]:
        worker = get_worker_info()
        mine = (worker.id, worker.num_workers) if worker else (0, 1)
        rest: Windows | None = None
        for number, stretches in enumerate(self._buffers()):
            if number % mine[1] == mine[0]:
                for found in self._drawn(stretches, number, rest):
                    rest = None
                    if found[1].shape[0] == self.batch:
                        yield found
                    else:
                        rest = found
        if rest is not None:
            yield rest

    def _generator(self, salt: int) -> torch.Generator:
        seed = hash_seed(self.seed or 0) * 1_000_003 + int(self.epoch)
        return torch.Generator().manual_seed((seed * 65_537 + salt) % 2**64)

    def _buffers(self) -> list[list[tuple[int, int]]]:
        """The epoch's stretches, a buffer's worth at a time."""
        stretches = self.stream.plan_chunks(max(self.buffer_rows // STRETCHES, 1))
        if self.seed is not None:
            order = torch.randperm(len(stretches), generator=self._generator(0))
            stretches = [stretches[i] for i in order.tolist()]
        return [stretches[i : i + STRETCHES] for i in range(0, len(stretches), STRETCHES)]

    def _drawn(
        self, stretches: list[tuple[int, int]], number: int, rest: Windows | None
    ) -> Iterator[Windows]:
        """The buffer's windows in batches, `rest` first; the last one may be a part of one."""
        found = (self.stream.read_chunk(self.which, begin, end) for begin, end in stretches)
        pieces = [piece for piece in found if piece is not None]
        if not pieces:
            if rest is not None:
                yield rest
            return
        owner = torch.cat([torch.full((len(p.starts),), i) for i, p in enumerate(pieces)])
        starts = torch.cat([piece.starts for piece in pieces])
        if self.seed is not None:
            order = torch.randperm(len(starts), generator=self._generator(1 + number))
            owner, starts = owner[order], starts[order]
        have = 0 if rest is None else rest[1].shape[0]
        at = 0
        while at < len(starts) or rest is not None:
            upto = min(at + self.batch - have, len(starts))
            batch = _gathered(pieces, owner[at:upto], starts[at:upto])
            yield batch if rest is None else _side_by_side([rest, batch])
            rest, have, at = None, 0, upto


def _gathered(pieces: list[WindowChunk], owner: Tensor, starts: Tensor) -> Windows:
    """Windows from several pieces, in the order asked for."""
    parts, places = [], []
    for i, piece in enumerate(pieces):
        mine = (owner == i).nonzero()[:, 0]
        if len(mine):
            found = windows.gather_raw(piece.series, starts[mine])
            parts.append([tensor for tensor in found if tensor is not None])
            places.append(mine)
    together = _side_by_side(parts)
    back = torch.argsort(torch.cat(places))
    return [together[0][:, back], *(tensor[back] for tensor in together[1:])]


def _side_by_side(parts: list[Windows]) -> Windows:
    inputs = torch.cat([part[0] for part in parts], dim=1)
    others = [torch.cat(same) for same in zip(*(part[1:] for part in parts), strict=True)]
    return [inputs, *others]


class StreamSource(BufferedSource):
    """Windows of a stream, through DataLoader workers."""

    def __init__(
        self,
        stream: StreamedSeries,
        which: str,
        effective: int,
        batch: int,
        seed: int | None,
        device: torch.device,
        engine: Engine,
        *,
        workers: int,
        prefetch: int,
        read: int | None = None,
    ) -> None:
        """`read` is how many windows a worker hands over at a time, if not a pass's: which windows
        a step takes depends on it where there are several workers."""
        self.count, self.effective, self.batch, self.seed = (
            len(stream.ranges[which]),
            effective,
            batch,
            seed,
        )
        self.num_steps = -(-self.count // effective)
        first = next(iter(stream.ranges[which].first.tolist()))
        example = stream.read_chunk(which, first, first + 1)
        assert example is not None
        self.series = example.series
        shape = windows.gather(example.series, example.starts[:1].repeat(batch))
        super().__init__(shape, batch, -(-effective // batch), device, engine)
        self.reader = _Reader(stream, which, read or batch, seed, engine.buffer_rows)
        self.loader: DataLoader[Any] | None = DataLoader(
            self.reader,
            batch_size=None,
            num_workers=workers,
            prefetch_factor=prefetch if workers else None,
            persistent_workers=engine.persistent_workers and workers > 0,
            pin_memory=engine.pinned and device.type == "cuda",
            worker_init_fn=source.ignore_interrupts,
            generator=torch.Generator(),  # else every epoch draws from the one that dropout uses
            # Arrow's threads do not survive a fork
            multiprocessing_context="spawn" if workers else None,
        )
        self.batches: Iterator[Windows] = iter(())
        self.over: Windows | None = None
        """What the last batch had more than was asked for"""

    def start_epoch(self, epoch: int, *, at: int = 0) -> None:
        assert self.loader is not None
        self.reader.epoch.fill_(epoch)
        self.batches, self.over = iter(self.loader), None
        self.step = at
        self._skip(at * self.effective)  # what was trained on already

    def _next(self) -> Windows:
        """What was left over, else the next batch."""
        found, self.over = self.over, None
        return next(self.batches) if found is None else found

    def _skip(self, count: int) -> None:
        """Let so many windows go by, a batch at a time."""
        while count:
            found = self._next()
            size = found[1].shape[0]
            if size > count:
                self.over = _cut(found, count, None)
            count -= min(size, count)

    def _take(self, count: int) -> Windows:
        """The next so many windows. Batches come as large as they are asked for, except the last
        of each worker."""
        parts, have = [], 0
        while have < count:
            parts.append(self._next())
            have += parts[-1][1].shape[0]
        together = parts[0] if len(parts) == 1 else _side_by_side(parts)
        if together[1].shape[0] > count:
            self.over = _cut(together, count, None)
            together = _cut(together, 0, count)
        return together

    def wrap_program(self, program: Program) -> Program:
        def advance() -> None:
            left = min(self.effective, self.count - self.step * self.effective)
            share = 1.0 if self.seed is None else 1.0 / left
            for slot in self.slot:
                count = min(self.batch, left)
                slot.weights.zero_()
                if count:
                    slot.weights[:count] = share
                    self.fill(slot, self._take(count), self.series)
                left -= count
            self.step += 1
            program()

        return advance

    def close(self) -> None:
        self.batches, self.over, self.loader = iter(()), None, None


def _cut(found: Windows, begin: int, end: int | None) -> Windows:
    return [found[0][:, begin:end], *(tensor[begin:end] for tensor in found[1:])]
