"""Trains under Lightning, which is imported only where it is needed."""

from __future__ import annotations

import importlib
import logging
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from slipstream.base import machine
from slipstream.config import Config
from slipstream.data.dataset import Dataset
from slipstream.engine.context import resolve_settings
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

PRECISIONS = {"fp32": "32-true", "tf32": "32-true", "fp16": "16-mixed", "bf16": "bf16-mixed"}


def has_lightning() -> bool:
    with suppress(ImportError):
        return bool(importlib.import_module("lightning"))
    return False


def _build_module(
    config: Config, dataset: Dataset, peer: PeerSettings, rates: Sequence[float] | None
) -> Any:
    """Build the LightningModule; `rates` are the learning rates of a whole job."""
    import lightning

    config = resolve_settings(config, dataset)

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = build_network(config, dataset)
            self.first: list[Tensor] = []

        def training_step(self, batch: list[Tensor], number: int) -> Tensor:
            loss = compute_loss(self.model, batch, config, dataset)
            if number < 10 and not rates:
                self.first.append(loss.detach())
            if peer.habits:
                self.log("loss", loss, prog_bar=True)
            return loss

        def validation_step(self, batch: list[Tensor], _: int) -> None:
            loss = compute_loss(self.model, batch, config, dataset)
            self.log("val_loss", loss, batch_size=len(batch[0]))

        def on_validation_epoch_end(self) -> None:
            print_epoch(self.current_epoch, float(self.trainer.callback_metrics["val_loss"]))

        def configure_optimizers(self) -> Any:
            # Lightning refuses to clip what a fused optimizer unscales itself
            fused = not peer.habits and (config.train.clip == "off" or peer.precision not in HALF)
            first = 1.0 if rates else config.train.lr
            optimizer = build_optimizer(config, self.parameters(), lr=first, fused=fused)
            if not rates:
                return optimizer
            schedule = torch.optim.lr_scheduler.LambdaLR(
                optimizer, lambda step: rates[min(step, len(rates) - 1)]
            )
            return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    return Module()


def _build_trainer(config: Config, peer: PeerSettings, **more: Any) -> Any:
    import lightning

    for name in ("lightning.pytorch", "lightning.fabric", "lightning"):
        logging.getLogger(name).setLevel(logging.ERROR)
    clip: float | None = None if config.train.clip == "off" else config.train.clip
    device = machine.choose_device(config.engine.device)
    return lightning.Trainer(
        accelerator="gpu" if device.type == "cuda" else "cpu",
        devices=[device.index or 0] if device.type == "cuda" else 1,
        precision=PRECISIONS[peer.precision],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        gradient_clip_val=(clip or 1.0) if peer.habits else clip,
        num_sanity_val_steps=0,
        **more,
    )


def time_steps(
    config: Config, dataset: Dataset, peer: PeerSettings, *, warm_up: int, repeats: int, steps: int
) -> StepTimings:
    import lightning

    device = machine.choose_device(config.engine.device)

    class Clock(lightning.Callback):
        def __init__(self) -> None:
            self.times: list[float] = []
            self.began, self.done = 0.0, 0

        def on_train_batch_end(self, *_: Any) -> None:
            self.done += 1
            past = self.done - warm_up
            if past >= 0 and past % steps == 0:
                machine.synchronize(device)
                now = time.perf_counter()
                if past:
                    self.times.append(1e3 * (now - self.began) / steps)
                self.began = now

    clock = Clock()
    with apply_flags(peer):
        limit: dict[str, Any] = {"max_steps": warm_up + repeats * steps}
        trainer = _build_trainer(
            config, peer, enable_checkpointing=False, callbacks=[clock], **limit
        )
        module = _build_module(config, dataset, peer, None)
        trainer.fit(module, build_loader(config, dataset, peer))
    return StepTimings(clock.times, [float(loss) for loss in module.first], peer.precision)


def train(
    config: Config,
    dataset: Dataset,
    peer: PeerSettings,
    rates: Sequence[float],
    batches: DataLoader[Any],
    val_batches: DataLoader[Any],
) -> None:
    """Train all epochs, each with its validation and a checkpoint, at these learning rates."""
    import lightning

    with tempfile.TemporaryDirectory() as folder:
        checkpoint = lightning.pytorch.callbacks.ModelCheckpoint(folder, monitor="val_loss")
        trainer = _build_trainer(
            config, peer, max_epochs=config.train.epochs, callbacks=[checkpoint]
        )
        trainer.fit(_build_module(config, dataset, peer, rates), batches, val_batches)
