"""How others run the job: what they set, and what they tell."""

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


class StepTimings(NamedTuple):
    times: list[float]
    """Milliseconds per step, of each stretch"""
    losses: list[float]
    """Of the first steps"""
    precision: str


@contextmanager
def apply_flags(way: PeerSettings) -> Iterator[None]:
    """Torch's flags as the advice has them."""
    # Lightning asks in the older way what precision products have, and torch wants one way only
    matmul: Any = torch.backends.cuda.matmul
    rnn: Any = torch.backends.cudnn.rnn
    before = matmul.fp32_precision, rnn.fp32_precision
    with machine.set_flags(
        threads=machine.count_available_cores(), tf32=way.precision == "tf32", cudnn_benchmark=True
    ):
        torch.set_float32_matmul_precision("high" if way.precision == "tf32" else "highest")
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


def print_epoch(epoch: int, loss: float) -> None:
    sys.stderr.write(f"epoch {epoch + 1}: validation {loss:.6g}\n")
    sys.stderr.flush()
