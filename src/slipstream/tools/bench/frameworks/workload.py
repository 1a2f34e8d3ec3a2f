"""The work that every framework does: the network, its first weights, batches and loss; and the
settings of the other frameworks."""

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from slipstream.base import machine
from slipstream.config import Config
from slipstream.config.base import hash_seed
from slipstream.data import windows
from slipstream.data.dataset import Dataset
from slipstream.engine.batches import EpochSampler, WindowDataset
from slipstream.models import noise
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
    """Of torch on a CPU; None: every core"""


class StepTimings(NamedTuple):
    times: list[float]
    """Milliseconds per step, of each repeat"""
    losses: list[float]
    """Of the first steps"""
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
        output: Tensor = self.head(last).view(self.shape)
        return output


def build_network(config: Config, dataset: Dataset) -> nn.Module:
    """Build the network with the first weights of ours, as a script would write it if it can."""
    with torch.random.fork_rng([]):
        torch.manual_seed(hash_seed(config.seed))
        ours = build(config.model, dataset.signature)
    model = config.model
    is_usual = (
        model.spec.is_recurrent
        and (model.pool, model.normalize, model.patch) == ("last", "none", 1)
        and len(set(model.sizes)) == 1
        and not (dataset.signature.static_width or model.layer_norm or dataset.signature.masked)
    )
    return PlainRecurrent(config, ours) if is_usual else ours


class PeerBatchSampler:
    """Yields the same batches as ours, one epoch after the other."""

    def __init__(self, config: Config, dataset: Dataset, which: str, *, shuffle: bool) -> None:
        assert dataset.memory is not None
        batch = cast(int, config.train.batch)
        seed = config.order_seed if shuffle else None
        self.sampler = EpochSampler(dataset.memory.starts[which], batch, batch, seed)
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
    config: Config, dataset: Dataset, peer: PeerSettings, which: str = "train"
) -> DataLoader[Any]:
    assert dataset.memory is not None
    return DataLoader(
        WindowDataset(dataset.memory.series),
        batch_sampler=PeerBatchSampler(config, dataset, which, shuffle=which == "train"),
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
    """Compute the loss of masked rows: new ones in every step, in validation always the same."""
    key = torch.randint(2**62, (), device=inputs.device) if model.training else None
    mask = noise.mask_windows(config.pretrain, inputs, key)
    places = noise.find_masked_rows(config.pretrain, mask)
    rows, _ = model(inputs, mask)
    predicted, truth = noise.gather_rows(rows.float(), places), noise.gather_rows(inputs, places)
    return compute_masked_losses(predicted, truth, config.train).mean()
