"""Adam's and AdamW's step of K models as one kernel over flat buffers [K, P]."""

import math

import triton
import triton.language as tl
from torch import Tensor

from slipstream.kernels.launch import launch
from slipstream.kernels.operands import BETA1, BETA2, EPSILON

BLOCK = 1024
MAX_PIECE = 4
"""The largest number of values in one read or write"""


@triton.jit(do_not_specialize=["P", "row", "grad_row"])
def _adam(
    weights,
    grads,
    first,
    second,
    lr,
    decay,
    count,
    divisor,
    moves,
    P,
    row,
    grad_row,
    DECOUPLED: tl.constexpr,
    BETA1: tl.constexpr,
    BETA2: tl.constexpr,
    LOG1: tl.constexpr,
    LOG2: tl.constexpr,
    EPSILON: tl.constexpr,
    PIECE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Update the weights and moments of one lane's block. P, `row` and `grad_row` count pieces of
    PIECE numbers: four, where the sizes allow it, so that the compiler sees that it may read and
    write four at a time."""
    lane = tl.program_id(1).to(tl.int64)
    if tl.load(moves + lane):
        element = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        valid, here = element < P * PIECE, lane * row * PIECE + element
        of_grads = lane * grad_row * PIECE + element
        rate, shrink = tl.load(lr + lane), tl.load(decay + lane)
        steps = tl.load(count + lane).to(tl.float64)
        first_correction = 1 - tl.exp(steps * LOG1)
        second_correction = 1 - tl.exp(steps * LOG2)
        size = (rate / first_correction).to(tl.float32)
        spread = tl.sqrt(second_correction).to(tl.float32)

        weight = tl.load(weights + here, mask=valid, other=0.0)
        grad = tl.load(grads + of_grads, mask=valid, other=0.0) / tl.load(divisor + lane)
        if DECOUPLED:
            weight *= 1 - rate * shrink
        else:
            grad += shrink * weight
        mean = tl.load(first + here, mask=valid, other=0.0)
        mean += (grad - mean) * (1 - BETA1)
        square = tl.load(second + here, mask=valid, other=0.0)
        square = square * BETA2 + grad * grad * (1 - BETA2)
        weight -= size * mean / (tl.sqrt(square) / spread + EPSILON)
        tl.store(weights + here, weight, mask=valid)
        tl.store(first + here, mean, mask=valid)
        tl.store(second + here, square, mask=valid)


def adam_step(
    weights: Tensor,
    grads: Tensor,
    first: Tensor,
    second: Tensor,
    *,
    lr: Tensor,
    decay: Tensor,
    count: Tensor,
    divisor: Tensor,
    moves: Tensor,
    decoupled: bool,
) -> None:
    """Update the lanes that move, in place. `decoupled` decay is AdamW's.

    The buffers may be columns of larger ones, all of one width; gradients of another.
    """
    K, P = weights.shape
    grads = grads if grads.stride(1) == 1 else grads.contiguous()
    lengths = P, weights.stride(0), grads.stride(0)
    piece = math.gcd(*lengths, MAX_PIECE)
    launch(
        _adam,
        (triton.cdiv(P, BLOCK), K),
        *(weights, grads, first, second, lr, decay, count, divisor, moves),
        *(length // piece for length in lengths),
        DECOUPLED=decoupled,
        BETA1=BETA1,
        BETA2=BETA2,
        LOG1=math.log(BETA1),
        LOG2=math.log(BETA2),
        EPSILON=EPSILON,
        PIECE=piece,
        BLOCK=BLOCK,
    )
