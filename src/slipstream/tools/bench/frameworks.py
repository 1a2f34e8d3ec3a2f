"""The same job in a plain PyTorch loop, or under Lightning.

The network, its first weights, the batches, the loss, the optimizer and the clipping are
Slipstream's; the loop around them is the framework's, set up as its documentation advises. Run as a
command, this module trains a whole job and prints every validation loss:

    python -m slipstream.tools.bench.frameworks CONFIG lightning fp16 4 habits

Lightning is imported only where it is needed.
"""

from __future__ import annotations

import importlib
import itertools
import logging
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from slipstream import config as configs
from slipstream.base import machine
from slipstream.config import Config
from slipstream.config.base import hash_seed
from slipstream.data import dataset as datasets
from slipstream.data import windows
from slipstream.data.dataset import Dataset
from slipstream.engine.batches import EpochSampler, WindowDataset
from slipstream.engine.context import resolve_settings
from slipstream.engine.lanes import EpochStart, compute_lrs
from slipstream.engine.planning import TimedWorkload
from slipstream.models import custom, noise
from slipstream.models.forecaster import build
from slipstream.models.losses import compute_masked_losses, compute_window_losses
from slipstream.models.rnn import CELLS

HALF = {"fp16": torch.float16, "bf16": torch.bfloat16}
OPTIMIZERS: dict[str, type[torch.optim.Optimizer]] = {
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "sgd": torch.optim.SGD,
    "rmsprop": torch.optim.RMSprop,
}
PRECISIONS = {"fp32": "32-true", "tf32": "32-true", "fp16": "16-mixed", "bf16": "bf16-mixed"}
"""Names of the precisions in Lightning"""


class PeerSettings(NamedTuple):
    """How a plain loop or Lightning runs the job."""

    name: str
    framework: str
    """`plain` or `lightning`"""
    precision: str
    workers: int
    habits: bool = False
    """Clipping and a logged loss, as in most scripts"""
    fused: bool = True
    pinned: bool = True
    waits: bool = False
    """Whether it reads every loss, and so waits for the device"""
    threads: int | None = None
    """Threads of torch on a CPU; None for one per core"""


class StepTimings(NamedTuple):
    times: list[float]
    """Milliseconds per step in each repeat"""
    losses: list[float]
    """The losses of the first steps"""
    precision: str


@contextmanager
def apply_flags(peer: PeerSettings) -> Iterator[None]:
    """Set torch's flags by the usual advice."""
    # Lightning uses torch's older setting of the precision, and torch refuses a mix of both
    matmul: Any = torch.backends.cuda.matmul
    rnn: Any = torch.backends.cudnn.rnn
    before = matmul.fp32_precision, rnn.fp32_precision
    threads = peer.threads or machine.count_available_cores()
    with machine.set_flags(threads=threads, tf32=peer.precision == "tf32", cudnn_benchmark=True):
        torch.set_float32_matmul_precision("high" if peer.precision == "tf32" else "highest")
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                yield
        finally:
            torch.set_float32_matmul_precision("highest")
            matmul.fp32_precision, rnn.fp32_precision = before


def build_optimizer(
    config: Config, params: Any, *, lr: float, fused: bool
) -> torch.optim.Optimizer:
    """Build the optimizer as a script would."""
    train = config.train
    options: dict[str, Any] = {"lr": lr, "weight_decay": train.weight_decay}
    if fused and train.optimizer != "rmsprop":
        options["fused"] = True  # False would also switch off torch's own choice
    if train.optimizer == "sgd":
        options["momentum"] = train.momentum
    return OPTIMIZERS[train.optimizer](params, **options)


def print_epoch(epoch: int, loss: float) -> None:
    """Print the validation loss in the format that the bench reads."""
    sys.stderr.write(f"epoch {epoch + 1}: validation {loss:.6g}\n")
    sys.stderr.flush()


class PlainRecurrent(nn.Module):
    """The usual script's network: nn.LSTM or nn.GRU, and a linear layer on the last output."""

    def __init__(self, config: Config, like: Any) -> None:
        super().__init__()
        model, core = config.model, like.core
        cell = CELLS[model.kind]
        width = core.layers[0].input_size
        depth, bidirectional = len(model.sizes), model.bidirectional
        self.body = cell(
            width, model.sizes[0], depth, bidirectional=bidirectional, dropout=model.dropout
        )
        self.shape = (-1, like.steps, like.targets, like.quantiles)
        with torch.no_grad():
            for i, layer in enumerate(core.layers):
                for name, value in layer.named_parameters():
                    getattr(self.body, name.replace("_l0", f"_l{i}")).copy_(value)
        self.head: nn.Linear = core.head.linear

    def forward(self, inputs: Tensor, _: Tensor | None) -> Tensor:
        out = self.body(inputs)[0]
        last = out[-1]
        if self.body.bidirectional:
            half = self.body.hidden_size
            last = torch.cat([last[:, :half], out[0][:, half:]], dim=-1)
        output: Tensor = self.head(last).view(self.shape)
        return output


def build_network(config: Config, dataset: Dataset) -> nn.Module:
    """Build Slipstream's network with its first weights, as plain PyTorch layers where possible."""
    with torch.random.fork_rng([]):
        torch.manual_seed(hash_seed(config.seed))
        network = build(config.model, dataset.signature)
    model = config.model
    is_usual = (
        model.spec.is_recurrent
        and (model.pool, model.normalize, model.patch) == ("last", "none", 1)
        and len(set(model.sizes)) == 1
        and not (dataset.signature.static_width or model.layer_norm or dataset.signature.masked)
    )
    return PlainRecurrent(config, network) if is_usual else network


class PeerBatchSampler:
    """Yields the batches that Slipstream trains on, one epoch after the other."""

    def __init__(self, config: Config, dataset: Dataset, set_name: str, *, shuffle: bool) -> None:
        assert dataset.memory is not None
        batch = cast(int, config.train.batch)
        seed = config.order_seed if shuffle else None
        self.sampler = EpochSampler(dataset.memory.starts[set_name], batch, batch, seed)
        self.epoch = 0

    def __len__(self) -> int:
        return self.sampler.num_steps

    def __iter__(self) -> Iterator[list[int]]:
        # a generator, which starts with the first batch: with workers, a loader calls this twice
        rows, weights = self.sampler.sample_epoch(self.epoch)
        self.epoch += 1
        for row, weight in zip(rows, weights, strict=True):
            yield row[0][weight[0] > 0].tolist()


def build_loader(
    config: Config, dataset: Dataset, peer: PeerSettings, set_name: str = "train"
) -> DataLoader[Any]:
    assert dataset.memory is not None
    return DataLoader(
        WindowDataset(dataset.memory.series),
        batch_sampler=PeerBatchSampler(config, dataset, set_name, shuffle=set_name == "train"),
        num_workers=peer.workers,
        persistent_workers=peer.workers > 0,
        pin_memory=peer.pinned and machine.choose_device(config.engine.device).type == "cuda",
    )


def compute_loss(model: nn.Module, batch: list[Tensor], config: Config, dataset: Dataset) -> Tensor:
    assert dataset.memory is not None
    inputs, targets, *static = batch
    split = windows.split_channels(
        inputs.transpose(0, 1), targets, static[0] if static else None, dataset.memory.series
    )
    if dataset.signature.masked:
        return _compute_masked_loss(model, split.inputs, config)
    out = model(split.inputs, split.static)
    return compute_window_losses(out.float(), split.targets, config.train).mean()


def _compute_masked_loss(model: nn.Module, inputs: Tensor, config: Config) -> Tensor:
    """Compute the loss of masked rows: a new mask in every step, a fixed one in validation."""
    key = torch.randint(2**62, (), device=inputs.device) if model.training else None
    mask = noise.mask_windows(config.pretrain, inputs, key)
    places = noise.find_masked_rows(config.pretrain, mask)
    rows, _ = model(inputs, mask)
    predicted, truth = noise.gather_rows(rows.float(), places), noise.gather_rows(inputs, places)
    return compute_masked_losses(predicted, truth, config.train).mean()


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


def time_plain_steps(
    config: Config, dataset: Dataset, peer: PeerSettings, *, warm_up: int, repeats: int, steps: int
) -> StepTimings:
    """Time steps of the plain loop after some steps to warm up."""
    trial = PlainTrial(config, dataset, peer, first=warm_up)
    try:
        times = [trial.measure_ms_per_step(steps) for _ in range(repeats)]
        return StepTimings(times, trial.first_losses, peer.precision)
    finally:
        trial.close()


def train_plain(
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


def has_lightning() -> bool:
    """Return whether Lightning is installed and can be imported."""
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


def time_lightning_steps(
    config: Config, dataset: Dataset, peer: PeerSettings, *, warm_up: int, repeats: int, steps: int
) -> StepTimings:
    """Time steps under Lightning after some steps to warm up."""
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


def train_lightning(
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


def run_job(config: Config, peer: PeerSettings) -> None:
    """Train to the end, with validations, as a user's own script would."""
    dataset = datasets.load_dataset(config)
    batches = build_loader(config, dataset, peer)
    val_batches = build_loader(config, dataset, peer, "val")
    epochs = range(config.train.epochs)
    rates = [
        rate for e in epochs for rate in compute_lrs(config.train, EpochStart(e), len(batches))
    ]
    train = train_lightning if peer.framework == "lightning" else train_plain
    with apply_flags(peer):
        train(config, dataset, peer, rates, batches, val_batches)


if __name__ == "__main__":
    path, framework, precision, workers, habits, *threads = sys.argv[1:7]
    config = configs.load(path)
    custom.allow_classes(config)
    peer = PeerSettings("", framework, precision, int(workers), habits == "habits")
    run_job(config, peer._replace(threads=int(threads[0]) if any(threads) else None))
