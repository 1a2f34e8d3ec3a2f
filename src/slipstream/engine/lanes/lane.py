"""A lane: one model to train, alone or among others, and where an epoch of it begins."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from slipstream.config import Config
from slipstream.engine.batches.source import EpochSampler


@dataclass(frozen=True)
class Lane:
    """One model to train: its config, and the first rows of its windows in train and val."""

    config: Config
    starts: dict[str, Tensor]
    """By set; none where the windows are streamed"""
    init: Mapping[str, Tensor] = field(default_factory=dict, kw_only=True)
    """Weights that it starts from, where they are not drawn: a pre-trained encoder's"""

    def build_sampler(self) -> EpochSampler:
        batch = self.config.train.batch
        assert batch != "auto"
        effective = batch * self.config.train.accumulate
        return EpochSampler(self.starts["train"], effective, batch, self.config.order_seed)


class Pace(NamedTuple):
    """How a schedule goes on where the time ends before the epochs do."""

    step: int
    """The lane's step from which on it holds"""
    position: float
    """Where the schedule stands there, in epochs since its phase began"""
    per_step: float

    def find_position(self, step: int) -> float:
        return max(self.position + (step - self.step) * self.per_step, 0.0)


class EpochStart(NamedTuple):
    """Where an epoch of a lane begins, or goes on."""

    number: int = 0
    rate: float = 1.0
    """What plateaus and recoveries have left of the learning rate"""
    steps_before: int = 0
    """The lane's steps before this epoch"""
    step: int = 0
    """Steps of this epoch that are done"""
    exploit_from: int | None = None
    """Epochs before those at a low learning rate, once they have begun"""
    pace: Pace | None = None
    """How the schedule goes on; None while it follows the epochs"""

    def has_schedule_of(self, other: EpochStart) -> bool:
        """Whether another description of the same epoch has the same learning rates."""
        return (self.exploit_from, self.pace) == (other.exploit_from, other.pace)
