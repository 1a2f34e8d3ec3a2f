"""The settings of the other frameworks: their flags, their optimizer, their output."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from slipstream import machine
from slipstream.config import Config

HALF = {"fp16": torch.float16, "bf16": torch.bfloat16}


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
    with machine.set_flags(
        threads=machine.count_available_cores(), tf32=peer.precision == "tf32", cudnn_benchmark=True
    ):
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
    match train.optimizer:
        case "adam":
            return torch.optim.Adam(params, **options)
        case "adamw":
            return torch.optim.AdamW(params, **options)
        case "sgd":
            return torch.optim.SGD(params, momentum=train.momentum, **options)
        case "rmsprop":
            return torch.optim.RMSprop(params, **options)


def print_epoch(epoch: int, loss: float) -> None:
    """Print the validation loss in the format that the bench reads."""
    sys.stderr.write(f"epoch {epoch + 1}: validation {loss:.6g}\n")
    sys.stderr.flush()
