"""One optimizer step of K models whose P weights each lie in flat buffers [K, P].

The formulas are torch's own. Everything that may differ between lanes is a tensor [K], and no
number of one lane reaches another.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from slipstream.engine.optim import BACKOFF, GROW_AFTER, GROWTH
from slipstream.kernels.precision import BETA1, BETA2, EPSILON

ALPHA = 0.99
"""torch's default for rmsprop"""


def compute_divisor(
    grads: Tensor, clip: Tensor, scale: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """What each lane's gradients are to be divided by, to unscale and clip them (no clip: inf), and
    where they have overflowed."""
    norm = torch.linalg.vector_norm(grads, dim=1)
    if scale is None:
        return torch.clamp(norm / clip, min=1.0), None
    return torch.maximum(scale, norm / clip), (norm - norm).isnan()


def update_lanes(
    optimizer: str,
    weights: Tensor,
    grads: Tensor,
    first: Tensor,
    second: Tensor,
    *,
    lr: Tensor,
    decay: Tensor,
    momentum: Tensor,
    count: Tensor,
    divisor: Tensor,
    moves: Tensor,
) -> None:
    """Update weights and moments of the lanes that move, in place; the others stay.

    `first` holds means of gradients or momentum, `second` means of their squares, `count` the steps
    taken, this one included.
    """
    if weights.is_cuda and optimizer in ("adam", "adamw"):
        from slipstream.kernels import adam  # Triton is there where CUDA is

        adam.adam_step(
            weights,
            grads,
            first,
            second,
            lr=lr,
            decay=decay,
            count=count,
            divisor=divisor,
            moves=moves,
            decoupled=optimizer == "adamw",
        )
        return
    # by `masked_fill`: a product would let through what is no number, and `torch.where` copies a
    # Python number to the device, which no capture allows
    still = ~moves[:, None]
    lr, decay, momentum = (one[:, None].masked_fill(still, 0.0) for one in (lr, decay, momentum))
    grads = grads / divisor[:, None]
    if optimizer != "adamw":
        grads = torch.addcmul(grads, decay, weights)
    grads = grads.masked_fill(still, 0.0)
    match optimizer:
        case "sgd":
            first.mul_(momentum.masked_fill(still, 1.0)).add_(grads)
            weights.addcmul_(lr, first, value=-1)
        case "rmsprop":
            _follow(second, grads, ALPHA, still)
            weights.addcdiv_(lr * grads, second.sqrt().add_(EPSILON), value=-1)
        case "adam" | "adamw":
            if optimizer == "adamw":
                weights.mul_(1 - lr * decay)
            first.addcmul_(grads - first, torch.full_like(lr, 1 - BETA1).masked_fill(still, 0.0))
            _follow(second, grads, BETA2, still)
            taken = count.double()[:, None]
            one, two = (-torch.expm1(taken * math.log(beta)) for beta in (BETA1, BETA2))
            size = (lr / one).float().masked_fill(still, 0.0)
            spread = two.sqrt().float().masked_fill(still, 1.0)
            weights.addcdiv_(size * first, (second.sqrt() / spread).add_(EPSILON), value=-1)


def _follow(squares: Tensor, grads: Tensor, keep: float, still: Tensor) -> None:
    """A running mean of squares."""
    squares.mul_(torch.full_like(still, keep, dtype=squares.dtype).masked_fill(still, 1.0))
    squares.addcmul_(grads, grads, value=1 - keep)  # zeros in lanes that stay


def update_loss_scale(
    scale: Tensor, since_growth: Tensor, overflow: Tensor, active: Tensor
) -> None:
    """fp16's loss scales, [K], after a step: an overflow halves them, many without one double."""
    taken = since_growth + 1
    grow = (taken == GROW_AFTER) & ~overflow
    factor = 1 + overflow * (BACKOFF - 1) + grow * (GROWTH - 1)
    since_growth.copy_(torch.where(active, taken.masked_fill(grow | overflow, 0), since_growth))
    scale.mul_(factor.masked_fill(~active, 1.0))
