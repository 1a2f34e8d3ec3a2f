"""A lane: one model to train, alone or among others, and where an epoch of it begins."""

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


class EpochStart(NamedTuple):
    """Where an epoch of a lane begins, or goes on."""

    number: int = 0
    rate: float = 1.0
    """What plateaus and recoveries have left of the learning rate"""
    steps_before: int = 0
    """The lane's steps before this epoch"""
    step: int = 0
    """Steps of this epoch that are done"""
