"""The learning-rate schedule of a lane: by its epochs, or by the time where that ends first.

The rates of an epoch are computed on the host and lie in a tensor on the device, from which each
step reads its own; so a captured step follows any schedule.
"""

import math

from slipstream.config import Train
from slipstream.engine.lanes.lane import EpochStart, Pace

ENOUGH = 0.9
"""Share of the remaining steps from which on the time counts as enough for all of them"""


def compute_lrs(train: Train, epoch: EpochStart, num_steps: int) -> list[float]:
    """Compute the learning rate of each step of an epoch, before plateau cuts."""
    return [compute_lr(train, epoch, step, num_steps) for step in range(num_steps)]


def compute_lr(train: Train, epoch: EpochStart, step: int, num_steps: int) -> float:
    """Compute the learning rate of one step of an epoch, before plateau cuts."""
    now = find_position(epoch, step, num_steps)
    one_step = epoch.pace.per_step if epoch.pace else 1 / num_steps
    if epoch.exploit_from is not None:
        return _cosine(train.exploit_lr, train.exploit_lr_min, now / max(train.exploit_epochs, 1))
    if now < train.warmup_epochs:
        return train.lr * min((now + one_step) / train.warmup_epochs, 1.0)
    match train.schedule:
        case "cosine":
            length = max(train.epochs - train.warmup_epochs, one_step)
            return _cosine(train.lr, train.lr_min, (now - train.warmup_epochs) / length)
        case "restarts":
            passed = epoch.number + step / num_steps
            start, length = train.warmup_epochs, float(train.restart_epochs)
            while passed >= start + length:
                start, length = start + length, length * train.restart_growth
            return _cosine(train.lr, train.lr_min, max(passed - start, 0.0) / length)
        case "step":
            return train.lr * float(train.step_factor ** (epoch.number // train.step_epochs))
        case _:
            return train.lr


def _cosine(first: float, last: float, progress: float) -> float:
    return last + (first - last) * (1 + math.cos(math.pi * min(progress, 1.0))) / 2


def find_position(epoch: EpochStart, step: int, num_steps: int) -> float:
    """Return where the schedule stands at a step, in epochs since its phase began."""
    if epoch.pace is not None:
        return epoch.pace.find_position(epoch.steps_before + step)
    return epoch.number - (epoch.exploit_from or 0) + step / num_steps


def follows_time(train: Train, epoch: EpochStart) -> bool:
    """Whether the learning rate depends on the time that is left."""
    depends = train.schedule == "cosine" or train.warmup_epochs > 0
    return train.minutes is not None and (depends or epoch.exploit_from is not None)


def choose_pace(
    train: Train, epoch: EpochStart, num_steps: int, steps_in_time: float
) -> Pace | None:
    """Return how the schedule goes on from `epoch.step`, if so many further steps fit into the
    time; None while all steps of all epochs do.

    It goes on from where it stands, so that the learning rate never jumps, and ends with the time
    or with the epochs, whichever comes first.
    """
    length = train.epochs if epoch.exploit_from is None else train.exploit_epochs
    now = find_position(epoch, epoch.step, num_steps)
    end = length + (epoch.exploit_from or 0)
    steps_left = num_steps * (end - epoch.number) - epoch.step
    if steps_in_time >= ENOUGH * steps_left:
        if epoch.pace is None:
            return None
        steps_in_time = steps_left
    per_step = max(length - now, 0.0) / max(steps_in_time, 1.0)
    return Pace(epoch.steps_before + epoch.step, now, per_step)
