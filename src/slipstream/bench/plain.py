"""The job in a plain PyTorch loop, with what its documentation advises."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from slipstream import hardware
from slipstream.bench.ways import HALF, Found, Way, optimizer_of, settings_of, tell
from slipstream.bench.work import loader, loss_of, network
from slipstream.config import Config
from slipstream.data.dataset import Dataset
from slipstream.engine.job import weighed
from slipstream.engine.trial import Timed


class Plain:
    """A loop without any framework, as good as a page of advice makes it."""

    def __init__(self, config: Config, dataset: Dataset, way: Way) -> None:
        self.config, self.dataset, self.way = weighed(config, dataset), dataset, way
        self.device = hardware.choose_device(config.engine.device)
        self.model = network(config, dataset).to(self.device)
        self.parameters = list(self.model.parameters())
        self.optimizer = optimizer_of(config, self.parameters, lr=config.train.lr, fused=way.fused)
        scaled = way.precision == "fp16" and self.device.type == "cuda"
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=scaled)

    def step(self, batch: list[Tensor]) -> Tensor:
        pinned = self.way.pinned
        moved = [tensor.to(self.device, non_blocking=pinned) for tensor in batch]
        kind, half = self.device.type, HALF.get(self.way.precision)
        with torch.autocast(kind, dtype=half, enabled=half is not None):
            loss = loss_of(self.model, moved, self.config, self.dataset)
        self.optimizer.zero_grad(set_to_none=True)
        self.scaler.scale(loss).backward()
        clip = self.config.train.clip
        if clip != "off":
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.parameters, clip)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss.detach()

    @torch.no_grad()
    def validate(self, batches: DataLoader[Any]) -> float:
        self.model.eval()
        total = 0.0
        half = HALF.get(self.way.precision)
        for batch in batches:
            moved = [tensor.to(self.device, non_blocking=True) for tensor in batch]
            with torch.autocast(self.device.type, dtype=half, enabled=half is not None):
                loss = loss_of(self.model, moved, self.config, self.dataset)
            total += float(loss) * len(moved[0])
        self.model.train()
        return total / self.dataset.count["val"]


class PlainTrial(Timed):
    """The plain loop, to be timed."""

    def __init__(self, config: Config, dataset: Dataset, way: Way, *, first: int = 1) -> None:
        self.way, self.device = way, hardware.choose_device(config.engine.device)
        self.head_start = 2 * way.workers
        with self.settings():
            self.plain = Plain(config, dataset, way)
            source = loader(config, dataset, way)
            self.num_steps = len(source)
            self.batches = itertools.chain.from_iterable(itertools.repeat(source))
            self.first_losses = [float(self.plain.step(next(self.batches))) for _ in range(first)]

    @property
    def windows(self) -> int:
        batch = self.plain.config.train.batch
        assert batch != "auto"
        return batch

    def settings(self) -> AbstractContextManager[None]:
        return settings_of(self.way)

    def step(self) -> None:
        loss = self.plain.step(next(self.batches))
        if self.way.waits:
            float(loss)

    def close(self) -> None:
        """Let go of the workers."""
        self.batches = itertools.chain()


def time_steps(
    config: Config, dataset: Dataset, way: Way, *, warm_up: int, stretches: int, steps: int
) -> Found:
    trial = PlainTrial(config, dataset, way, first=warm_up)
    try:
        times = [trial.stretch(steps) for _ in range(stretches)]
        return Found(times, trial.first_losses, way.precision)
    finally:
        trial.close()


def train(
    config: Config,
    dataset: Dataset,
    way: Way,
    rates: Sequence[float],
    batches: DataLoader[Any],
    check: DataLoader[Any],
) -> None:
    """All epochs, each with its validation; `rates` are the steps' learning rates."""
    plain, step = Plain(config, dataset, way), 0
    for epoch in range(config.train.epochs):
        for batch in batches:
            for group in plain.optimizer.param_groups:
                group["lr"] = rates[step]
            plain.step(batch)
            step += 1
        tell(epoch, plain.validate(check))
