"""The same job as others run it: a plain PyTorch loop, and Lightning.

The network, its first weights, the batches, the loss, the optimizer and the clipping are ours; the
loop around them is theirs, with what their documentation advises.

    python -m slipstream.bench.others CONFIG lightning fp16 4    a whole job, told epoch by epoch
"""

from __future__ import annotations

import itertools
import logging
import os
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from slipstream import config as configs
from slipstream import hardware
from slipstream.config import Config
from slipstream.data import dataset as datasets
from slipstream.data import windows
from slipstream.data.dataset import Dataset
from slipstream.engine import optim
from slipstream.engine.homes import Draw, SingleWindows
from slipstream.engine.job import weighed
from slipstream.engine.trial import Timed
from slipstream.models import build, masks
from slipstream.models.recurrent import CELLS
from slipstream.objectives import masked_losses, window_losses

HALF = {"fp16": torch.float16, "bf16": torch.bfloat16}
IN_LIGHTNING = {"fp32": "32-true", "tf32": "32-true", "fp16": "16-mixed", "bf16": "bf16-mixed"}


class Way(NamedTuple):
    """How somebody runs the job."""

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
    """Reads every loss"""


class Found(NamedTuple):
    times: list[float]
    """Milliseconds per step, of each stretch"""
    losses: list[float]
    """Of the first steps"""
    precision: str


class PlainRecurrent(nn.Module):
    """What people write: nn.LSTM or nn.GRU, and a linear layer on the last output."""

    def __init__(self, config: Config, like: Any) -> None:
        super().__init__()
        model, core = config.model, like.core
        cell = CELLS[model.kind]
        width = core.layers[0].input_size
        depth, both = len(model.sizes), model.bidirectional
        self.body = cell(width, model.sizes[0], depth, bidirectional=both, dropout=model.dropout)
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
        found: Tensor = self.head(last).view(self.shape)
        return found


def network(config: Config, dataset: Dataset) -> nn.Module:
    """The network with the weights that ours starts from."""
    with torch.random.fork_rng([]):
        torch.manual_seed(config.seed)
        ours = build(config.model, dataset.signature)
    model = config.model
    as_people_write_it = (
        model.kind in ("lstm", "gru")
        and (model.pool, model.normalize, model.patch) == ("last", "none", 1)
        and len(set(model.sizes)) == 1
        and not (dataset.signature.static or model.layer_norm or dataset.signature.masked)
    )
    return PlainRecurrent(config, ours) if as_people_write_it else ours


class Batches:
    """The batches of one epoch after the other, as ours are drawn."""

    def __init__(self, config: Config, dataset: Dataset, which: str, *, shuffle: bool) -> None:
        assert dataset.memory is not None
        assert config.train.batch != "auto"
        batch = config.train.batch
        seed = config.seed if shuffle else None
        self.draw = Draw(dataset.memory.starts[which], batch, batch, seed)
        self.epoch = 0

    def __len__(self) -> int:
        return self.draw.num_steps

    def __iter__(self) -> Iterator[list[int]]:
        # nothing happens before the first batch is asked for: with workers, a loader begins twice
        rows, weights = self.draw.order(self.epoch)
        self.epoch += 1
        for row, weight in zip(rows, weights, strict=True):
            yield row[0][weight[0] > 0].tolist()


def loader(config: Config, dataset: Dataset, way: Way, which: str = "train") -> DataLoader[Any]:
    assert dataset.memory is not None
    workers = way.workers
    return DataLoader(
        SingleWindows(dataset.memory.series),
        batch_sampler=Batches(config, dataset, which, shuffle=which == "train"),
        num_workers=workers,
        persistent_workers=workers > 0,
        pin_memory=way.pinned and _device(config).type == "cuda",
    )


def _device(config: Config) -> torch.device:
    return hardware.choose_device(config.engine.device)


def loss_of(model: nn.Module, batch: list[Tensor], config: Config, dataset: Dataset) -> Tensor:
    assert dataset.memory is not None
    inputs, targets, *static = batch
    folded = windows.folded(
        inputs.transpose(0, 1), targets, static[0] if static else None, dataset.memory.series
    )
    if dataset.signature.masked:
        return _masked_loss(model, folded.inputs, config)
    out = model(folded.inputs, folded.static)
    return window_losses(out.float(), folded.targets, config.train).mean()


def _masked_loss(model: nn.Module, inputs: Tensor, config: Config) -> Tensor:
    """Of rows that are masked anew in every step; of a validation window always the same."""
    key = torch.randint(2**62, (), device=inputs.device) if model.training else None
    mask = masks.of_windows(config.pretrain, inputs, key)
    places = masks.places(config.pretrain, mask)
    rows, _ = model(inputs, mask)
    given, truth = masks.at(rows.float(), places), masks.at(inputs, places)
    return masked_losses(given, truth, config.train).mean()


@contextmanager
def settings_of(way: Way) -> Iterator[None]:
    """Torch's flags as the advice has them."""
    # Lightning asks in the older way what precision products have, and torch wants one way only
    matmul: Any = torch.backends.cuda.matmul
    rnn: Any = torch.backends.cudnn.rnn
    before = matmul.fp32_precision, rnn.fp32_precision
    with hardware.flags(
        threads=hardware.available_cores(), tf32=way.precision == "tf32", cudnn_benchmark=True
    ):
        torch.set_float32_matmul_precision("high" if way.precision == "tf32" else "highest")
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                yield
        finally:
            torch.set_float32_matmul_precision("highest")
            matmul.fp32_precision, rnn.fp32_precision = before


def optimizer_of(config: Config, params: Any, *, lr: float, fused: bool) -> torch.optim.Optimizer:
    """As a script would write it."""
    train = config.train
    how: dict[str, Any] = {"lr": lr, "weight_decay": train.weight_decay}
    if fused and train.optimizer != "rmsprop":
        how["fused"] = True  # False instead would switch torch's own choice off as well
    match train.optimizer:
        case "adam":
            return torch.optim.Adam(params, **how)
        case "adamw":
            return torch.optim.AdamW(params, **how)
        case "sgd":
            return torch.optim.SGD(params, momentum=train.momentum, **how)
        case "rmsprop":
            return torch.optim.RMSprop(params, **how)


class Plain:
    """A loop without any framework, as good as a page of advice makes it."""

    def __init__(self, config: Config, dataset: Dataset, way: Way) -> None:
        self.config, self.dataset, self.way = weighed(config, dataset), dataset, way
        self.device = _device(config)
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
        self.way, self.device = way, _device(config)
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


def time_plain(
    config: Config, dataset: Dataset, way: Way, *, warm_up: int, stretches: int, steps: int
) -> Found:
    trial = PlainTrial(config, dataset, way, first=warm_up)
    try:
        times = [trial.stretch(steps) for _ in range(stretches)]
        return Found(times, trial.first_losses, way.precision)
    finally:
        trial.close()


def has_lightning() -> bool:
    try:
        import lightning  # noqa: F401
    except ImportError:
        return False
    return True


def _module(config: Config, dataset: Dataset, way: Way, rates: list[float] | None) -> Any:
    """The LightningModule; `rates` are the learning rates of a whole job."""
    import lightning

    config = weighed(config, dataset)

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = network(config, dataset)
            self.first: list[Tensor] = []

        def training_step(self, batch: list[Tensor], number: int) -> Tensor:
            loss = loss_of(self.model, batch, config, dataset)
            if number < 10 and not rates:
                self.first.append(loss.detach())
            if way.habits:
                self.log("loss", loss, prog_bar=True)
            return loss

        def validation_step(self, batch: list[Tensor], _: int) -> None:
            loss = loss_of(self.model, batch, config, dataset)
            self.log("val_loss", loss, batch_size=len(batch[0]))

        def on_validation_epoch_end(self) -> None:
            tell(self.current_epoch, float(self.trainer.callback_metrics["val_loss"]))

        def configure_optimizers(self) -> Any:
            # Lightning refuses to clip what a fused optimizer unscales itself
            fused = not way.habits and (config.train.clip == "off" or way.precision not in HALF)
            first = 1.0 if rates else config.train.lr
            optimizer = optimizer_of(config, self.parameters(), lr=first, fused=fused)
            if not rates:
                return optimizer
            last = len(rates) - 1
            schedule = torch.optim.lr_scheduler.LambdaLR(
                optimizer, lambda step: rates[min(step, last)]
            )
            return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    return Module()


def _trainer(config: Config, way: Way, **more: Any) -> Any:
    import lightning

    for name in ("lightning.pytorch", "lightning.fabric", "lightning"):
        logging.getLogger(name).setLevel(logging.ERROR)
    clip: float | None = None if config.train.clip == "off" else config.train.clip
    device = _device(config)
    return lightning.Trainer(
        accelerator="gpu" if device.type == "cuda" else "cpu",
        devices=[device.index or 0] if device.type == "cuda" else 1,
        precision=IN_LIGHTNING[way.precision],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        gradient_clip_val=(clip or 1.0) if way.habits else clip,
        num_sanity_val_steps=0,
        **more,
    )


def time_lightning(
    config: Config, dataset: Dataset, way: Way, *, warm_up: int, stretches: int, steps: int
) -> Found:
    import lightning

    device = _device(config)

    class Clock(lightning.Callback):
        times: list[float] = []  # noqa: RUF012 (one clock for one fit)
        began = 0.0
        done = 0

        def on_train_batch_end(self, *_: Any) -> None:
            self.done += 1
            past = self.done - warm_up
            if past >= 0 and past % steps == 0:
                hardware.wait(device)
                now = time.perf_counter()
                if past:
                    self.times.append(1e3 * (now - self.began) / steps)
                self.began = now

    clock = Clock()
    clock.times = []
    with settings_of(way):
        trainer = _trainer(
            config,
            way,
            max_steps=warm_up + stretches * steps,
            enable_checkpointing=False,
            callbacks=[clock],
        )
        module = _module(config, dataset, way, None)
        trainer.fit(module, loader(config, dataset, way))
    return Found(clock.times, [float(loss) for loss in module.first], way.precision)


def tell(epoch: int, loss: float) -> None:
    sys.stderr.write(f"epoch {epoch + 1}: validation {loss:.6g}\n")
    sys.stderr.flush()


def whole_job(config: Config, way: Way) -> None:
    """Train to the end, with validations; what a script of somebody's own would do."""
    dataset = datasets.load(config)
    train = config.train
    batches = loader(config, dataset, way)
    check = loader(config, dataset, way, "val")
    rates = [r for e in range(train.epochs) for r in optim.rates(train, e, len(batches))]
    with settings_of(way):
        if way.framework == "lightning":
            import lightning

            kept = lightning.pytorch.callbacks.ModelCheckpoint(
                os.environ.get("TMPDIR", "/tmp"), monitor="val_loss"
            )
            trainer = _trainer(config, way, max_epochs=train.epochs, callbacks=[kept])
            trainer.fit(_module(config, dataset, way, rates), batches, check)
            return
        plain, step = Plain(config, dataset, way), 0
        for epoch in range(train.epochs):
            for batch in batches:
                for group in plain.optimizer.param_groups:
                    group["lr"] = rates[step]
                plain.step(batch)
                step += 1
            tell(epoch, plain.validate(check))


if __name__ == "__main__":
    path, framework, precision, workers, habits = sys.argv[1:6]
    way = Way("", framework, precision, int(workers), habits == "habits")
    whole_job(configs.load(path), way)
