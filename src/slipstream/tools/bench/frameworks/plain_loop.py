"""Trains in a plain PyTorch loop, with what PyTorch's documentation advises."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from slipstream.base import machine
from slipstream.config import Config
from slipstream.data.dataset import Dataset
from slipstream.engine.context import resolve_settings
from slipstream.engine.planning import TimedWorkload
from slipstream.tools.bench.frameworks.workload import (
    HALF,
    PeerSettings,
    StepTimings,
    apply_flags,
    build_loader,
    build_network,
    build_optimizer,
    compute_loss,
    print_epoch,
)


class PlainLoop:
    """A loop without any framework."""

    def __init__(self, config: Config, dataset: Dataset, peer: PeerSettings) -> None:
        self.config, self.dataset, self.peer = resolve_settings(config, dataset), dataset, peer
        self.device = machine.choose_device(config.engine.device)
        self.model = build_network(config, dataset).to(self.device)
        self.parameters = list(self.model.parameters())
        lr = config.train.lr
        self.optimizer = build_optimizer(config, self.parameters, lr=lr, fused=peer.fused)
        scaled = peer.precision == "fp16" and self.device.type == "cuda"
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=scaled)

    def compute_loss(self, batch: list[Tensor], *, non_blocking: bool) -> Tensor:
        moved = [tensor.to(self.device, non_blocking=non_blocking) for tensor in batch]
        half = HALF.get(self.peer.precision)
        with torch.autocast(self.device.type, dtype=half, enabled=half is not None):
            return compute_loss(self.model, moved, self.config, self.dataset)

    def step(self, batch: list[Tensor]) -> Tensor:
        loss = self.compute_loss(batch, non_blocking=self.peer.pinned)
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
        for batch in batches:
            total += float(self.compute_loss(batch, non_blocking=True)) * len(batch[0])
        self.model.train()
        return total / self.dataset.num_windows["val"]


class PlainTrial(TimedWorkload):
    """The plain loop as a workload to be timed."""

    def __init__(
        self, config: Config, dataset: Dataset, peer: PeerSettings, *, first: int = 1
    ) -> None:
        self.peer, self.device = peer, machine.choose_device(config.engine.device)
        self.num_prefetched = 2 * peer.workers
        with self.settings():
            self.loop = PlainLoop(config, dataset, peer)
            source = build_loader(config, dataset, peer)
            self.num_steps, self.windows_per_step = len(source), cast(int, config.train.batch)
            self.batches = itertools.chain.from_iterable(itertools.repeat(source))
            self.first_losses = [float(self.loop.step(next(self.batches))) for _ in range(first)]

    def settings(self) -> AbstractContextManager[None]:
        return apply_flags(self.peer)

    def step(self) -> None:
        loss = self.loop.step(next(self.batches))
        if self.peer.waits:
            float(loss)

    def close(self) -> None:
        """Release the workers."""
        self.batches = itertools.chain()


def time_steps(
    config: Config, dataset: Dataset, peer: PeerSettings, *, warm_up: int, repeats: int, steps: int
) -> StepTimings:
    trial = PlainTrial(config, dataset, peer, first=warm_up)
    try:
        times = [trial.measure_ms_per_step(steps) for _ in range(repeats)]
        return StepTimings(times, trial.first_losses, peer.precision)
    finally:
        trial.close()


def train(
    config: Config,
    dataset: Dataset,
    peer: PeerSettings,
    rates: Sequence[float],
    batches: DataLoader[Any],
    val_batches: DataLoader[Any],
) -> None:
    """Train all epochs, each with its validation, at these learning rates."""
    loop, step = PlainLoop(config, dataset, peer), 0
    for epoch in range(config.train.epochs):
        for batch in batches:
            for group in loop.optimizer.param_groups:
                group["lr"] = rates[step]
            loop.step(batch)
            step += 1
        print_epoch(epoch, loop.validate(val_batches))
