"""What the places of a pack can hold, and which lanes can share a pack."""

from collections.abc import Sequence
from typing import NamedTuple

from slipstream import config as configs
from slipstream.config import Config, Model
from slipstream.engine import step
from slipstream.engine.lanes.lane import Lane
from slipstream.errors import UserError
from slipstream.models import has_dropout, padding

MAY_DIFFER = {
    *("name", "out", "seed", "data.split", "model.hidden", "model.dropout"),
    *("train.optimizer", "train.lr", "train.momentum", "train.weight_decay", "train.schedule"),
    *("train.warmup_epochs", "train.lr_min", "train.step_epochs", "train.step_factor"),
    *("train.plateau_patience", "train.plateau_factor", "train.restart_epochs"),
    *("train.restart_growth", "train.batch", "train.epochs", "train.clip", "train.patience"),
    *("train.min_delta", "train.validate_every", "train.minutes", "train.exploit_epochs"),
    *("train.exploit_lr", "train.exploit_lr_min"),
}
"""Settings in which lanes of one pack may differ"""


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
    """Raise a UserError that names the settings which keep lanes from sharing a program."""
    first = lanes[0].config
    if first.train.batch == "auto":
        raise UserError('train.batch is "auto"; lanes of a pack need a number')
    for lane in lanes[1:]:
        differences = configs.list_differences(first, lane.config)
        unlike = [name for name in differences if name not in MAY_DIFFER]
        wider = first.model.sizes != lane.config.model.sizes
        if wider and not first.model.spec.can_pad:
            kind = first.model.kind
            unlike.append(f"model.hidden (of {kind if first.model.is_custom else f'a {kind}'})")
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
    """The smallest capacity that holds each of these lanes."""
    check_compatible(lanes)
    samplers = [lane.build_sampler() for lane in lanes]
    batch = max(sampler.windows_per_pass for sampler in samplers)
    most = max(len(lane.starts["val"]) for lane in lanes)
    chunk = min(max(batch, step.EVAL_BATCH // places), most)
    return PackCapacity(
        config=lanes[0].config,
        model=padding.find_widest([lane.config.model for lane in lanes]),
        steps=max(sampler.num_steps for sampler in samplers),
        passes=lanes[0].config.train.accumulate,
        batch=batch,
        val_steps=-(-most // chunk),
        chunk=chunk,
        optimizers=tuple(sorted({lane.config.train.optimizer for lane in lanes})),
        drops=any(has_dropout(lane.config.model) for lane in lanes),
    )


def check_capacity(lane: Lane, capacity: PackCapacity) -> None:
    """Raise a UserError that says what of a lane the pack cannot hold."""
    check_compatible([Lane(capacity.config, lane.starts), lane])
    needed = compute_capacity([lane], places=1)
    fits = {
        "model.hidden": padding.find_widest([capacity.model, needed.model]).sizes
        == capacity.model.sizes,
        "train.batch": needed.batch <= capacity.batch,
        "training windows": needed.steps <= capacity.steps,
        "validation windows": len(lane.starts["val"]) <= capacity.val_steps * capacity.chunk,
        "train.optimizer": lane.config.train.optimizer in capacity.optimizers,
        "model.dropout": capacity.drops or not needed.drops,
    }
    tight = [name for name, fit in fits.items() if not fit]
    if tight:
        raise UserError(
            f"the pack has no room for a lane's {', '.join(tight)}; build it with such a lane "
            "among those that it has room for"
        )
