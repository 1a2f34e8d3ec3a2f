"""Networks that other processes import."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import torch
from torch import Tensor, nn


class Normed(nn.Module):
    def __init__(self, context: int, inputs: int, static: int, outputs: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.BatchNorm1d(inputs), nn.Linear(inputs, outputs))

    def forward(self, inputs: Tensor, static: Tensor | None) -> Tensor:
        out: Tensor = self.layers(inputs[-1])
        return out


class Dying(nn.Module):
    """Ends its process in the first training step, in the second process only."""

    def __init__(self, context: int, inputs: int, static: int, outputs: int) -> None:
        super().__init__()
        self.last = nn.Linear(inputs, outputs)

    def forward(self, inputs: Tensor, static: Tensor | None) -> Tensor:
        dist = torch.distributed
        if self.training and dist.is_initialized() and dist.get_rank() == 1:
            self.end()
        out: Tensor = self.last(inputs[-1])
        return out

    def end(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


class Failing(Dying):
    """Fails where the other one dies."""

    def end(self) -> None:
        raise LookupError("a mistake in the network")


class Held(nn.Module):
    """Runs some passes, validations included, then waits while a file exists: a test has time for
    what it needs."""

    def __init__(
        self, context: int, inputs: int, static: int, outputs: int, hold: str, after: int
    ) -> None:
        super().__init__()
        self.last = nn.Linear(inputs, outputs)
        self.hold, self.left = Path(hold), after

    def forward(self, inputs: Tensor, static: Tensor | None) -> Tensor:
        self.left -= 1
        while self.left < 0 and self.hold.exists():
            time.sleep(0.05)
        out: Tensor = self.last(inputs[-1])
        return out
