"""Attention of short sequences as one kernel each way, of one model or of many lanes.

Kernels made for long sequences work on tiles of 64 x 64 whatever there is, and want copies in
another layout. Here a program has all of one head of one window on chip, read where the joined
projection has it. The backward pass computes the attention weights again, so that only that
projection is saved. How a program computes depends on nothing but T, D and the type: not on how
many windows, heads or lanes there are.

    joined, grad  [K, T, B, 3, HEADS, D]   q, k and v of every head; TP and DP are T and D as powers
                                           of two
    out, dout     [K, T, B, HEADS, D]
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.kernels.launch import launch
from slipstream.kernels.operands import call_with_lanes, operand_format

MAX_TOKENS, MAX_WIDTH = 64, 64
"""The largest number of tokens of a sequence, and of units of a head. In the backward pass a
program holds all weights of its head three times; larger sizes would have to go by tiles, as
torch's kernels do, which then fill theirs."""
MAX_BYTES = 8192
"""The largest number of bytes of q, k or v on chip: in fp32, tokens and width cannot both be above
32, or registers run out"""
MIN_SIZE = 16
"""The smallest number of rows and columns that a tensor core multiplies"""


@triton.jit
def _locate_tokens(T, B, HEADS: tl.constexpr, D: tl.constexpr, TP: tl.constexpr, DP: tl.constexpr):
    """Return the rows of a program's tokens, the columns of its q, and a mask of the existing
    elements."""
    window, head = tl.program_id(0) // HEADS, tl.program_id(0) % HEADS
    lane = tl.program_id(1).to(tl.int64)
    token, column = tl.arange(0, TP), tl.arange(0, DP)
    row = (lane * T + token) * B + window
    valid = (token < T)[:, None] & (column < D)[None, :]
    return row[:, None], (head * D + column)[None, :], valid


@triton.jit
def _attention_weights(q, k, T, SCALE: tl.constexpr, TP: tl.constexpr, PRECISION: tl.constexpr):
    """Return the attention weights of each token, in fp32: rows add up to one."""
    score = tl.dot(q, tl.trans(k), input_precision=PRECISION) * SCALE
    score = tl.where((tl.arange(0, TP) < T)[None, :], score, float("-inf"))
    score = tl.exp(score - tl.max(score, 1)[:, None])
    return score * (1.0 / tl.sum(score, 1))[:, None]


@triton.jit(do_not_specialize=["T", "B"])
def attention_forward(
    joined,
    out,
    T,
    B,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    SCALE: tl.constexpr,
    TP: tl.constexpr,
    DP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    row, column, valid = _locate_tokens(T, B, HEADS, D, TP, DP)
    pointer = joined + row * (3 * HEADS * D) + column
    q = tl.load(pointer, mask=valid, other=0.0)
    k = tl.load(pointer + HEADS * D, mask=valid, other=0.0)
    v = tl.load(pointer + 2 * HEADS * D, mask=valid, other=0.0)
    weight = _attention_weights(q, k, T, SCALE, TP, PRECISION)
    seen = tl.dot(weight.to(v.dtype), v, input_precision=PRECISION)
    tl.store(out + row * (HEADS * D) + column, seen.to(v.dtype), mask=valid)


@triton.jit(do_not_specialize=["T", "B"])
def attention_backward(
    joined,
    dout,
    grad,
    T,
    B,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    SCALE: tl.constexpr,
    TP: tl.constexpr,
    DP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    row, column, valid = _locate_tokens(T, B, HEADS, D, TP, DP)
    offset = row * (3 * HEADS * D) + column
    q = tl.load(joined + offset, mask=valid, other=0.0)
    k = tl.load(joined + offset + HEADS * D, mask=valid, other=0.0)
    v = tl.load(joined + offset + 2 * HEADS * D, mask=valid, other=0.0)
    incoming = tl.load(dout + row * (HEADS * D) + column, mask=valid, other=0.0)
    weight = _attention_weights(q, k, T, SCALE, TP, PRECISION)
    dv = tl.dot(tl.trans(weight.to(v.dtype)), incoming, input_precision=PRECISION)
    tl.store(grad + offset + 2 * HEADS * D, dv.to(v.dtype), mask=valid)
    dweight = tl.dot(incoming, tl.trans(v), input_precision=PRECISION)
    dscore = weight * (dweight - tl.sum(weight * dweight, 1)[:, None])
    dscore = dscore.to(v.dtype)  # scaled after the products: small numbers are few in fp16
    dq = tl.dot(dscore, k, input_precision=PRECISION) * SCALE
    tl.store(grad + offset, dq.to(v.dtype), mask=valid)
    dk = tl.dot(tl.trans(dscore), q, input_precision=PRECISION) * SCALE
    tl.store(grad + offset + HEADS * D, dk.to(v.dtype), mask=valid)


def is_supported(joined: Tensor, heads: int) -> bool:
    """Return whether the kernel runs on this GPU: not on Turing, for which Triton compiles these
    products without tensor cores."""
    T, _, wide = joined.shape
    tensor_cores = torch.cuda.get_device_capability(joined.device) >= (8, 0)
    return tensor_cores and fits(T, wide // (3 * heads), joined.dtype.itemsize)


def fits(T: int, D: int, size: int) -> bool:
    """Return whether the kernel can take so many tokens of this width, in numbers of `size`
    bytes."""
    TP, DP = _padded(T, D)
    return T <= MAX_TOKENS and D <= MAX_WIDTH and TP * DP * size <= MAX_BYTES and size <= 4


def short_attention(joined: Tensor, heads: int) -> Tensor:
    """Return the attention [T, B, D] of q, k and v, [T, B, 3 * D]; under `vmap`, for every lane."""

    apply: Any = _Attention.apply
    _, precision = operand_format(joined)
    return call_with_lanes(lambda lanes: apply(lanes, heads, precision), joined)


class _Attention(torch.autograd.Function):
    """Lanes come first: [K, T, B, 3 * D] to [K, T, B, D]."""

    @staticmethod
    def forward(ctx: Any, joined: Tensor, heads: int, precision: str) -> Tensor:
        joined = joined.contiguous()
        K, T, B, wide = joined.shape
        out = joined.new_empty(K, T, B, wide // 3)
        ctx.options = launch_options(
            T, wide // (3 * heads), heads, joined.dtype.itemsize, precision
        )
        launch(attention_forward, (B * heads, K), joined, out, T, B, **ctx.options)
        ctx.save_for_backward(joined)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (joined,) = ctx.saved_tensors
        K, T, B, _ = joined.shape
        grad = torch.empty_like(joined)
        programs = (B * ctx.options["HEADS"], K)
        args = joined, grads[0].contiguous(), grad, T, B
        launch(attention_backward, programs, *args, **ctx.options)
        return grad, None, None


def launch_options(T: int, D: int, heads: int, size: int, precision: str) -> dict[str, Any]:
    """Return the constants that a kernel is compiled for. A warp takes as many products as its
    registers hold; half as many where they are not by tensor cores."""
    TP, DP = _padded(T, D)
    exact = size == 4 and precision == "ieee"
    warps = TP * TP * DP >> 14 if exact else min(TP * TP * DP >> 15, 4)
    sizes = {"HEADS": heads, "D": D, "SCALE": D**-0.5, "TP": TP, "DP": DP}
    return sizes | {"PRECISION": precision, "num_warps": max(1, warps)}


def _padded(T: int, D: int) -> tuple[int, int]:
    TP, DP = (max(MIN_SIZE, triton.next_power_of_2(size)) for size in (T, D))
    return TP, DP
