"""Lay out the epochs of a pack's lanes ahead of time: in threads where a GPU trains meanwhile.

Shapes: S steps of an epoch, A passes per step, B windows per pass.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from slipstream import machine
from slipstream.engine.lanes import schedule
from slipstream.engine.lanes.capacity import PackCapacity
from slipstream.engine.lanes.lane import EpochStart, Lane

MAX_THREADS = 4
MAX_PINNED_BYTES = 1 << 28
"""Of all lanes' next epochs in memory that a GPU reads without a copy"""


class EpochLayout(NamedTuple):
    """An epoch in the pack's shapes, on the host."""

    epoch: EpochStart
    rows: Tensor
    """[S, A, B]"""
    shares: Tensor
    """[S, A, B]"""
    rates: Tensor
    """[S], in float64, before cuts"""


class EpochPreparer:
    """Lays out the next epoch of each place."""

    def __init__(self, capacity: PackCapacity, num_places: int, device: torch.device) -> None:
        self._capacity = capacity
        self._shape = (capacity.steps, capacity.passes, capacity.batch)
        size = 12 * num_places * capacity.steps * capacity.passes * capacity.batch
        self._pins = device.type == "cuda" and size <= MAX_PINNED_BYTES
        self._pool: ThreadPoolExecutor | None = None
        if device.type == "cuda":
            cores = machine.count_available_cores()
            self._pool = ThreadPoolExecutor(max(1, min(MAX_THREADS, cores // 2)))
        self._ahead: dict[int, tuple[int, EpochLayout | Future[EpochLayout]]] = {}
        """By place: the epoch's number, and its layout"""

    def prepare(self, place: int, lane: Lane, epoch: EpochStart) -> bool:
        """Lay out an epoch, or begin to; return whether that took the caller's time."""
        if place in self._ahead and self._ahead[place][0] == epoch.number:
            return False
        if self._pool is None:
            self._ahead[place] = epoch.number, self._lay_out(lane, epoch)
            return True
        self._ahead[place] = epoch.number, self._pool.submit(self._lay_out, lane, epoch)
        return False

    def take(self, place: int, lane: Lane, epoch: EpochStart) -> EpochLayout:
        """Return the layout of an epoch; what it has of the schedule may have changed since."""
        self.prepare(place, lane, epoch)
        _, ahead = self._ahead.pop(place)
        layout = ahead.result() if isinstance(ahead, Future) else ahead
        if epoch.has_schedule_of(layout.epoch):
            return layout
        return layout._replace(epoch=epoch, rates=self.compute_rates(lane, epoch))

    def drop(self, place: int) -> None:
        """Forget what was prepared for a place."""
        self._ahead.pop(place, None)

    def compute_rates(self, lane: Lane, epoch: EpochStart) -> Tensor:
        """Return the learning rates of an epoch, [S] in float64."""
        num_steps = lane.build_sampler().num_steps
        lrs = schedule.compute_lrs(lane.config.train, epoch, num_steps)
        rates = torch.zeros(self._capacity.steps, dtype=torch.float64)
        rates[: len(lrs)] = torch.tensor(lrs, dtype=torch.float64)
        return rates

    def close(self) -> None:
        self._ahead.clear()
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)

    def _lay_out(self, lane: Lane, epoch: EpochStart) -> EpochLayout:
        sampled = lane.build_sampler().sample_epoch(epoch.number)
        rows, shares = (_widen(part, self._shape) for part in sampled)
        if self._pins:
            rows, shares = rows.pin_memory(), shares.pin_memory()
        return EpochLayout(epoch, rows, shares, self.compute_rates(lane, epoch))


def _widen(part: Tensor, shape: tuple[int, int, int]) -> Tensor:
    """Pad steps, passes and windows with zeros."""
    if part.shape == shape:
        return part
    whole = np.zeros(shape, dtype=part.numpy().dtype)
    steps, passes, batch = part.shape
    whole[:steps, :passes, :batch] = part.numpy()
    return torch.from_numpy(whole)
