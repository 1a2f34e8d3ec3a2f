"""Series in device memory: the step gathers its windows there, inside the program."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from slipstream.data import windows
from slipstream.data.windows import Series
from slipstream.engine.batches.source import EpochPrefetcher, EpochSampler, MicroBatch, Program


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
        rows = self.rows.index_select(0, cursor)[0]
        weights = self.weights.index_select(0, cursor)[0]
        for i in range(self.sampler.num_passes):
            yield MicroBatch(windows.gather(self.series, rows[i]), weights[i])

    def wrap_program(self, program: Program) -> Program:
        return program

    def close(self) -> None:
        if self._prefetcher:
            self._prefetcher.close()
