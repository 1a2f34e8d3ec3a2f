"""Single windows through a DataLoader, as in most scripts: the presets baseline and classic."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from slipstream.data import windows
from slipstream.data.windows import Series
from slipstream.engine.batches.host import BufferedSource, TransferOptions
from slipstream.engine.batches.source import EpochSampler, Program


class WindowDataset(Dataset[Any]):
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
        if self.series.static is None:
            return inputs, targets
        return inputs, targets, self.series.static[self.series.find_series(torch.tensor(start))]


class _BatchSampler:
    """A batch sampler whose batches are set for each epoch."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


def build_loader(dataset: Dataset[Any], options: TransferOptions, **more: Any) -> DataLoader[Any]:
    """Build a DataLoader by the options."""
    workers, engine = options.workers, options.engine
    return DataLoader(
        dataset,
        num_workers=workers,
        prefetch_factor=options.prefetch if workers else None,
        persistent_workers=engine.persistent_workers and workers > 0,
        pin_memory=engine.pinned and options.device.type == "cuda",
        worker_init_fn=_ignore_interrupts,
        generator=torch.Generator(),  # otherwise every epoch draws from the generator of dropout
        **more,
    )


def _ignore_interrupts(_: int) -> None:
    """Leave Ctrl-C, which reaches every process of a terminal, to the run: it ends its workers."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


class LoaderSource(BufferedSource):
    """Reads single windows through a DataLoader and collates them into batches."""

    def __init__(self, series: Series, sampler: EpochSampler, options: TransferOptions) -> None:
        example = windows.gather(series, sampler.starts[:1].repeat(sampler.windows_per_pass))
        super().__init__(example, sampler.windows_per_pass, sampler.num_passes, options)
        self.series, self.sampler, self.num_steps = series, sampler, sampler.num_steps
        self._order = _BatchSampler()
        dataset = WindowDataset(series)
        self._loader: DataLoader[Any] | None = build_loader(
            dataset, options, batch_sampler=self._order
        )
        self._batches: Iterator[Any] = iter(())

    def start_epoch(self, epoch: int, *, at: int = 0) -> None:
        assert self._loader is not None
        rows, self._weights = self.sampler.sample_epoch(epoch)
        real = self._weights > 0
        self._order.batches = [
            rows[step, i][real[step, i]].tolist()
            for step in range(at, self.num_steps)
            for i in range(self.sampler.num_passes)
            if real[step, i].any()
        ]
        self._step = at
        self._batches = iter(self._loader)

    def wrap_program(self, program: Program) -> Program:
        def advance() -> None:
            for buffer, weights in zip(self.buffers, self._weights[self._step], strict=True):
                buffer.weights.copy_(weights)
                if weights.any():
                    inputs, *rest = next(self._batches)
                    self.fill(buffer, [inputs.transpose(0, 1), *rest], self.series)
            self._step += 1
            program()

        return advance

    def close(self) -> None:
        self._batches, self._loader = iter(()), None
