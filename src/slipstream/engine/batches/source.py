"""The interface through which a step receives its windows, and the order of an epoch.

A batch source hands the step its micro-batches (`get_micro_batches`, called inside the program) and
does what has to happen around the program (`wrap_program`: fetch the next windows while this step
runs). Every source but the stream gives the same batches in the same order.

Shapes: S steps of an epoch, A forward passes per step, B windows per pass.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from slipstream.config.base import hash_seed
from slipstream.data import windows
from slipstream.data.windows import Batch, Series

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

    def start_epoch(self, epoch: int, *, at: int = 0) -> None:
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
        own = values[:, :, first : first + self.width].numpy()
        missing = parts * windows_per_pass - own.shape[2]
        padded = np.pad(own, ((0, 0), (0, 0), (0, missing)))
        return torch.from_numpy(padded.reshape(len(own), -1, windows_per_pass))


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
            batch, own = self.share.batch, self.windows_per_pass
            first, second = self._replace(windows_per_pass=batch, share=None).sample_epoch(epoch)
            return self.share.select(first, own), self.share.select(second, own)
        size, (whole, rest) = self.windows_per_step, divmod(len(self.starts), self.windows_per_step)
        starts, mean = self.starts, self.seed is not None
        if self.seed is not None:
            starts = shuffle_starts(starts, seed=self.seed, epoch=epoch)
        shape = (self.num_steps, self.num_passes, self.windows_per_pass)
        weights = np.zeros((self.num_steps, self.num_passes * self.windows_per_pass), np.float32)
        weights[:whole, :size] = 1 / size if mean else 1
        weights[whole:, :rest] = 1 / max(rest, 1) if mean else 1
        rows = np.zeros(weights.shape, np.int64)
        values = starts.numpy()
        rows[:whole, :size] = values[: whole * size].reshape(whole, size)
        rows[whole:, :rest] = values[whole * size :]
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

    def start_epoch(self, epoch: int, *, at: int = 0) -> None:
        epoch = epoch if self._prefetcher else 0  # without shuffling, all epochs are the same
        if epoch == self._loaded_epoch:
            return
        rows, weights = (self._prefetcher or self.sampler).sample_epoch(epoch)
        self.rows.copy_(rows)
        self.weights.copy_(weights)
        self._loaded_epoch = epoch

    def get_micro_batches(self, cursor: Tensor) -> Iterator[MicroBatch]:
        rows, weights = (one.index_select(0, cursor)[0] for one in (self.rows, self.weights))
        for i in range(self.sampler.num_passes):
            yield MicroBatch(windows.gather(self.series, rows[i]), weights[i])

    def wrap_program(self, program: Program, cursor: Tensor | None = None) -> Program:
        return program

    def close(self) -> None:
        if self._prefetcher:
            self._prefetcher.close()
