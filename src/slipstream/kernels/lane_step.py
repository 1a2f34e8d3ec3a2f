"""What a step decides for each of K lanes, beside the update of their weights: whether its
gradients overflowed, what they are divided by, the learning rate, the loss scale and the counters.

In PyTorch these are thirty operations, each on K numbers. S: steps of an epoch.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.kernels.launch import launch

BLOCK = 4096
MAX_PIECE = 4
"""The largest number of values in one read"""


@triton.jit(do_not_specialize=["P", "row"])
def _sum_squares(grads, sums, P, row, PIECE: tl.constexpr, BLOCK: tl.constexpr):
    """Sum the squares of one lane's block of gradients; P and `row` count pieces of PIECE numbers,
    so that the compiler sees how many it may read at a time."""
    lane = tl.program_id(1).to(tl.int64)
    element = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    grad = tl.load(grads + lane * row * PIECE + element, mask=element < P * PIECE, other=0.0)
    tl.store(sums + lane * tl.num_programs(0) + tl.program_id(0), tl.sum(grad * grad))


@triton.jit(do_not_specialize=["count_sums", "S"])
def _settle(
    sums,
    loss,
    clip,
    active,
    frozen,
    rates,
    losses,
    cursor,
    count,
    encoder_count,
    scale,
    since_growth,
    lr,
    divisor,
    moves,
    thawed,
    count_sums,
    S,
    HAS_ENCODER: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    GROW_AFTER: tl.constexpr,
    GROWTH: tl.constexpr,
    BACKOFF: tl.constexpr,
    BLOCK: tl.constexpr,
):
    lane = tl.program_id(0).to(tl.int64)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for begin in range(0, count_sums, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        total += tl.load(sums + lane * count_sums + at, mask=at < count_sums, other=0.0)
    norm = tl.sqrt_rn(tl.sum(total))
    clipped = tl.div_rn(norm, tl.load(clip + lane))
    is_active = tl.load(active + lane)
    does_move = is_active
    if HAS_SCALE:
        factor = tl.load(scale + lane)
        overflow = (norm - norm) != 0.0  # true where it is no number
        does_move = is_active & (overflow == 0)
        tl.store(divisor + lane, tl.maximum(factor, clipped))
        since = tl.load(since_growth + lane) + 1
        grow = (since == GROW_AFTER) & (overflow == 0)
        factor = tl.where(overflow, factor * BACKOFF, tl.where(grow, factor * GROWTH, factor))
        tl.store(scale + lane, factor, mask=is_active)
        tl.store(since_growth + lane, tl.where(grow | overflow, 0, since), mask=is_active)
    else:
        tl.store(divisor + lane, tl.maximum(clipped, 1.0, propagate_nan=tl.PropagateNan.ALL))
    tl.store(moves + lane, does_move)
    step = tl.load(cursor + lane)
    tl.store(lr + lane, tl.load(rates + lane * S + step))
    tl.store(losses + lane * S + step, tl.load(loss + lane))
    tl.store(count + lane, tl.load(count + lane) + 1, mask=does_move)
    if HAS_ENCODER:
        does_thaw = does_move & (tl.load(frozen + lane) == 0)
        tl.store(thawed + lane, does_thaw)
        tl.store(encoder_count + lane, tl.load(encoder_count + lane) + 1, mask=does_thaw)
    tl.store(cursor + lane, step + 1, mask=does_move)


def settle(
    grads: Tensor,
    loss: Tensor,
    *,
    clip: Tensor,
    active: Tensor,
    frozen: Tensor,
    rates: Tensor,
    losses: Tensor,
    cursor: Tensor,
    count: Tensor,
    encoder_count: Tensor | None,
    scale: Tensor | None,
    since_growth: Tensor | None,
    growth: tuple[float, float, int],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Record the loss, count the step and change the loss scale, in place, from the gradients
    [K, P]; return each lane's learning rate, the divisor of its gradients, whether it moves, and
    whether its encoder does, each [K].

    rates and losses are [K, S], everything else [K]. `growth` is the loss scale's factor after so
    many steps without overflow, its factor after one, and that number of steps.
    """
    K, P = grads.shape
    grads = grads if grads.stride(1) == 1 else grads.contiguous()
    piece = math.gcd(P, grads.stride(0), MAX_PIECE)
    blocks = triton.cdiv(P, BLOCK)
    sums = grads.new_empty(K, blocks)
    launch(
        _sum_squares,
        (blocks, K),
        *(grads, sums, P // piece, grads.stride(0) // piece),
        PIECE=piece,
        BLOCK=BLOCK,
    )
    lr, divisor = grads.new_empty(2, K).unbind()
    moves, thawed = torch.empty(2, K, dtype=torch.bool, device=grads.device).unbind()
    moves, thawed = (moves, moves) if encoder_count is None else (moves, thawed)
    launch(
        _settle,
        (K,),
        *(sums, loss, clip, active, frozen, rates, losses, cursor, count, encoder_count),
        *(scale, since_growth, lr, divisor, moves, thawed, blocks, rates.stride(0)),
        HAS_ENCODER=encoder_count is not None,
        HAS_SCALE=scale is not None,
        GROWTH=growth[0],
        BACKOFF=growth[1],
        GROW_AFTER=growth[2],
        BLOCK=1024,
    )
    return lr, divisor, moves, thawed
