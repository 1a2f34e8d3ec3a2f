"""One optimizer step of K models whose P weights each lie in flat buffers [K, P].

The formulas are torch's own. Everything that may differ between lanes is a tensor [K], and no
number of one lane reaches another.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.engine.optim import BACKOFF, GROW_AFTER, GROWTH
from slipstream.kernels.precision import BETA1, BETA2, EPSILON

ALPHA = 0.99
"""torch's default for rmsprop"""


def compute_divisor(
    grads: Tensor, clip: Tensor, scale: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Compute what each lane's gradients are divided by to unscale and clip them (no clip: inf),
    and where they overflowed."""
    norm = torch.linalg.vector_norm(grads, dim=1)
    if scale is None:
        return torch.clamp(norm / clip, min=1.0), None
    return torch.maximum(scale, norm / clip), (norm - norm).isnan()


class LaneTensors(NamedTuple):
    """What an update reads and changes of all lanes, each [K, P]."""

    weights: Tensor
    grads: Tensor
    first: Tensor
    """Means of gradients, or momentum"""
    second: Tensor
    """Means of their squares"""


class UpdateSettings(NamedTuple):
    """What an update reads of each lane, each [K]."""

    lr: Tensor
    decay: Tensor
    momentum: Tensor
    step_count: Tensor
    """Steps so far, this one included"""
    divisor: Tensor
    moves: Tensor
    """Whether the lane changes at all"""


def prepare_update(
    optimizer: str, tensors: LaneTensors, settings: UpdateSettings
) -> Callable[[], None]:
    """Prepare the update of weights and moments, in place, of the lanes that move; the others stay.

    All memory is allocated here. What this returns changes the tensors and allocates nothing, so
    that an update happens whole or not at all.
    """
    weights, grads, first, second = tensors
    if weights.is_cuda and optimizer in ("adam", "adamw"):
        from slipstream.kernels import adam  # Triton is installed where CUDA is

        rate, decay, _, count, *rest = settings
        how = {"lr": rate, "decay": decay, "count": count, "divisor": rest[0], "moves": rest[1]}
        return partial(adam.adam_step, *tensors, **how, decoupled=optimizer == "adamw")
    # by `masked_fill`: a product would let through what is no number, and `torch.where` copies a
    # Python number to the device, which no capture allows
    still = ~settings.moves[:, None]
    lr, decay, momentum = (
        one[:, None].masked_fill(still, 0.0)
        for one in (settings.lr, settings.decay, settings.momentum)
    )
    grads = grads / settings.divisor[:, None]
    if optimizer != "adamw":
        grads = torch.addcmul(grads, decay, weights)
    grads = grads.masked_fill(still, 0.0)
    match optimizer:
        case "sgd":
            momentum = momentum.masked_fill(still, 1.0)

            def update() -> None:
                first.mul_(momentum).add_(grads)
                weights.addcmul_(lr, first, value=-1)
        case "rmsprop":
            keep, step, root = _fill(lr, ALPHA, still, 1.0), lr * grads, torch.empty_like(grads)

            def update() -> None:
                # zeros in lanes that stay
                second.mul_(keep).addcmul_(grads, grads, value=1 - ALPHA)
                torch.sqrt(second, out=root).add_(EPSILON)
                weights.addcdiv_(step, root, value=-1)
        case _:
            decays = 1 - lr * decay if optimizer == "adamw" else torch.ones_like(lr)
            blend, keep = _fill(lr, 1 - BETA1, still, 0.0), _fill(lr, BETA2, still, 1.0)
            step_count = settings.step_count.double()[:, None]
            one, two = (-torch.expm1(step_count * math.log(beta)) for beta in (BETA1, BETA2))
            size = (lr / one).float().masked_fill(still, 0.0)
            spread = two.sqrt().float().masked_fill(still, 1.0)
            step, root = grads - first, torch.empty_like(grads)

            def update() -> None:
                if optimizer == "adamw":
                    weights.mul_(decays)
                first.addcmul_(step, blend)
                second.mul_(keep).addcmul_(grads, grads, value=1 - BETA2)
                torch.sqrt(second, out=root).div_(spread).add_(EPSILON)
                torch.mul(size, first, out=step)
                weights.addcdiv_(step, root, value=-1)

    return update


def _fill(like: Tensor, value: float, still: Tensor, other: float) -> Tensor:
    """A value [K, 1] for the lanes that move, and another for those that stay."""
    return torch.full_like(like, value).masked_fill(still, other)


def update_loss_scale(
    scale: Tensor, since_growth: Tensor, overflow: Tensor, active: Tensor
) -> None:
    """Update fp16 loss scales [K] after a step: an overflow halves, many finite steps double."""
    step_count = since_growth + 1
    grow = (step_count == GROW_AFTER) & ~overflow
    factor = 1 + overflow * (BACKOFF - 1) + grow * (GROWTH - 1)
    since_growth.copy_(
        torch.where(active, step_count.masked_fill(grow | overflow, 0), since_growth)
    )
    scale.mul_(factor.masked_fill(~active, 1.0))
