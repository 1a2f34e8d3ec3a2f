"""One model of many: what is asked of it, and what it takes to have it among others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from slipstream import config as configs
from slipstream.config import Config, Model
from slipstream.engine import step
from slipstream.engine.batches.source import EpochSampler
from slipstream.errors import UserError
from slipstream.models import has_dropout, padding

MAY_DIFFER = {
    *("name", "out", "seed", "data.split", "model.hidden", "model.dropout"),
    *("train.optimizer", "train.lr", "train.momentum", "train.weight_decay", "train.schedule"),
    *("train.warmup_epochs", "train.lr_min", "train.step_epochs", "train.step_factor"),
    *("train.plateau_patience", "train.plateau_factor", "train.restart_epochs"),
    *("train.restart_growth", "train.batch", "train.epochs", "train.clip", "train.patience"),
    *("train.min_delta", "train.validate_every", "train.minutes"),
}
"""Settings that lanes of one pack may have each for itself"""


@dataclass(frozen=True)
class Lane:
    """One model to train: what is asked of it, and its windows' first rows, train and val."""

    config: Config
    starts: dict[str, Tensor]
    init: Mapping[str, Tensor] = field(default_factory=dict, kw_only=True)
    """Weights that it starts from, where they are not drawn: a pre-trained encoder's"""

    def batch_order(self) -> EpochSampler:
        batch = self.config.train.batch
        assert batch != "auto"
        effective = batch * self.config.train.accumulate
        return EpochSampler(self.starts["train"], effective, batch, self.config.order_seed)


class EpochStart(NamedTuple):
    """Where a lane begins, or goes on."""

    number: int = 0
    rate: float = 1.0
    """What plateaus and recoveries have left of the learning rate"""
    steps_before: int = 0
    """The lane's steps before this epoch"""
    step: int = 0
    """Steps of this epoch that are done"""


class PackCapacity(NamedTuple):
    """What the places of a pack can hold."""

    config: Config
    """Of one lane: what all of them share"""
    model: Model
    """The widest"""
    steps: int
    passes: int
    batch: int
    val_steps: int
    chunk: int
    optimizers: tuple[str, ...]
    drops: bool


def check_compatible(lanes: Sequence[Lane]) -> None:
    """A UserError names the settings that keep lanes from being one program."""
    first = lanes[0].config
    if first.train.batch == "auto":
        raise UserError('train.batch is "auto"; lanes of a pack need a number')
    for lane in lanes[1:]:
        found = configs.list_differences(first, lane.config)
        unlike = [name for name in found if name not in MAY_DIFFER]
        wider = first.model.sizes != lane.config.model.sizes
        if wider and not first.model.spec.can_pad:
            unlike.append(f"model.hidden (of {first.model.kind})")
        if wider and first.model.layer_norm:
            unlike.append("model.hidden (with model.layer_norm)")
        if wider and first.masked and first.pretrain.variance:
            unlike.append("model.hidden (with pretrain.variance)")
        if unlike:
            raise UserError(
                f"models trained together cannot differ in {', '.join(unlike)}; train them in "
                "packs of their own"
            )


def compute_capacity(lanes: Sequence[Lane], *, places: int) -> PackCapacity:
    """The least that holds each of these."""
    check_compatible(lanes)
    draws = [lane.batch_order() for lane in lanes]
    batch = max(draw.windows_per_pass for draw in draws)
    most = max(len(lane.starts["val"]) for lane in lanes)
    chunk = min(max(batch, step.EVAL_BATCH // places), most)
    return PackCapacity(
        config=lanes[0].config,
        model=padding.find_widest([lane.config.model for lane in lanes]),
        steps=max(draw.num_steps for draw in draws),
        passes=lanes[0].config.train.accumulate,
        batch=batch,
        val_steps=-(-most // chunk),
        chunk=chunk,
        optimizers=tuple(sorted({lane.config.train.optimizer for lane in lanes})),
        drops=any(has_dropout(lane.config.model) for lane in lanes),
    )


def check_capacity(lane: Lane, room: PackCapacity) -> None:
    """A UserError says what of a lane has no room."""
    check_compatible([Lane(room.config, lane.starts), lane])
    asked = compute_capacity([lane], places=1)
    fits = {
        "model.hidden": padding.find_widest([room.model, asked.model]).sizes == room.model.sizes,
        "train.batch": asked.batch <= room.batch,
        "training windows": asked.steps <= room.steps,
        "validation windows": len(lane.starts["val"]) <= room.val_steps * room.chunk,
        "train.optimizer": lane.config.train.optimizer in room.optimizers,
        "model.dropout": room.drops or not asked.drops,
    }
    tight = [name for name, fit in fits.items() if not fit]
    if tight:
        raise UserError(
            f"the pack has no room for a lane's {', '.join(tight)}; make it with such a lane among "
            "`room`"
        )
