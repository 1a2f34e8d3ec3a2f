"""Layers in PyTorch, of one model or under `vmap` of many: linear, causal convolution, attention.

Linear. For lanes, PyTorch runs a product, an addition and a cast of every operand; in the backward
pass it sums rows for the biases by a kernel that is slow where rows are many and columns few, and
casts each gradient. Here the bias is added by the product, the sums are products as well, and their
results are fp32.

Convolution. The taps of each output row are stacked into one row, so that a convolution is one
matrix product and the convolutions of all lanes are one batched product. `vmap` would turn `conv1d`
into a grouped convolution: on a CPU, 8 lanes of 32 channels took 1.7 times as long that way.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from slipstream.kernels.launch import should_use_triton
from slipstream.kernels.operands import (
    call_under_vmap,
    call_with_lanes,
    is_vmapped,
    multiply_in_fp32,
    operand_format,
)


def linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Apply weight [N, D] and bias [N] to x [..., D], giving [..., N]; under `vmap`, each lane has
    its own."""
    if x.is_cuda and x.dim() > 1 and is_vmapped(x, weight, bias):
        apply: Any = _Linear.apply
        return call_under_vmap(apply, x, weight, bias)
    return F.linear(x, weight, bias)


class _Linear(torch.autograd.Function):
    """Lanes come first: x [K, ..., D], weight [K, N, D], bias [K, N]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        dtype, _ = operand_format(x)
        rows, across = x.to(dtype).flatten(1, -2), weight.to(dtype)
        out = torch.baddbmm(bias.to(dtype)[:, None], rows, across.mT)
        ctx.like = x.dtype, x.shape, weight.dtype, bias.dtype
        ctx.save_for_backward(rows, across)
        return out.view(*x.shape[:-1], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor, Tensor]:
        rows, across = ctx.saved_tensors
        dtype, shape, weight_dtype, bias_dtype = ctx.like
        grad = grad.flatten(1, -2)
        dx = None
        if ctx.needs_input_grad[0]:
            dx = torch.bmm(grad, across).view(shape).to(dtype)
        ones_row = grad.new_ones(1, 1, grad.shape[1]).expand(len(grad), -1, -1)
        d_weight, d_bias = multiply_in_fp32(grad.mT, rows), multiply_in_fp32(ones_row, grad)[:, 0]
        return dx, d_weight.to(weight_dtype), d_bias.to(bias_dtype)


def causal_conv(x: Tensor, weight: Tensor, bias: Tensor, *, dilation: int) -> Tensor:
    """Convolve x [T, B, C] with weight [N, C, taps], as `nn.Conv1d` has it, to [T, B, N].

    Row t of the output reads rows t, t - dilation, t - 2 * dilation and so on; rows before the
    first are zero. Under `vmap`, each lane has its own weights.
    """
    if torch.compiler.is_compiling():  # it fuses plain operations by itself
        columns = _stack_taps(x[None], weight.shape[2], dilation)[0]
        return F.linear(columns, weight.transpose(1, 2).flatten(1), bias)
    apply: Any = _CausalConv.apply
    return call_with_lanes(lambda *lanes: apply(*lanes, dilation), x, weight, bias)


class _CausalConv(torch.autograd.Function):
    """Lanes come first: x [K, T, B, C], weight [K, N, C, taps], bias [K, N]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, dilation: int) -> Tensor:
        dtype, _ = operand_format(x)
        rows, matrix = x.to(dtype), weight.to(dtype).transpose(2, 3).flatten(2)
        columns = _stack_taps(rows, weight.shape[3], dilation).flatten(1, 2)
        out = torch.baddbmm(bias.to(dtype)[:, None], columns, matrix.mT)
        ctx.like = x.dtype, weight.shape, weight.dtype, bias.dtype, dilation
        ctx.save_for_backward(rows, matrix)
        return out.view(*x.shape[:3], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor, Tensor, None]:
        rows, matrix = ctx.saved_tensors
        dtype, shape, weight_dtype, bias_dtype, dilation = ctx.like
        grad = grad.flatten(1, 2)
        dx = None
        if ctx.needs_input_grad[0]:
            by_tap = torch.bmm(grad, matrix).view(*rows.shape[:3], shape[3], -1)
            dx = _add_taps(by_tap, dilation).to(dtype)
        # stacked again rather than kept: the stack is `taps` times as large as the rows
        columns = _stack_taps(rows, shape[3], dilation).flatten(1, 2)
        d_weight = multiply_in_fp32(grad.mT, columns).unflatten(2, (shape[3], -1)).transpose(2, 3)
        ones_row = grad.new_ones(1, 1, grad.shape[1]).expand(len(grad), -1, -1)
        d_bias = multiply_in_fp32(ones_row, grad)[:, 0]
        return dx, d_weight.to(weight_dtype), d_bias.to(bias_dtype), None


def _stack_taps(rows: Tensor, taps: int, dilation: int) -> Tensor:
    """Stack the rows that each row reads, oldest first: [K, T, B, C] to [K, T, B, taps * C]."""
    T = rows.shape[1]
    before = min((taps - 1) * dilation, T)
    padded = F.pad(rows, (0, 0, 0, 0, before, 0))
    starts = (max(before - (taps - 1 - tap) * dilation, 0) for tap in range(taps))
    return torch.cat([padded.narrow(1, start, T) for start in starts], dim=-1)


def _add_taps(by_tap: Tensor, dilation: int) -> Tensor:
    """Return the gradient of the rows [K, T, B, C] from the gradient of the stack [K, T, B, taps,
    C]."""
    _, T, _, taps, _ = by_tap.shape
    total = by_tap[..., taps - 1, :].contiguous()
    for tap in range(taps - 1):
        shift = (taps - 1 - tap) * dilation
        if shift < T:
            total[:, : T - shift] += by_tap[:, shift:, :, tap]
    return total


def attention(joined: Tensor, heads: int) -> Tensor:
    """Map [T, B, 3 * D], which is q, k and v of all heads, to [T, B, D]; no token is masked.

    Short sequences go through a kernel of our own. Otherwise, under `vmap`, lanes become more
    windows, since PyTorch's kernels have no vmap rule.
    """
    if should_use_triton(joined):
        from slipstream.kernels import short_attention

        if short_attention.is_supported(joined, heads):
            return short_attention.short_attention(joined, heads)
    q, k, v = joined.unflatten(-1, (3, heads, -1)).permute(2, 1, 3, 0, 4)
    if is_vmapped(joined):
        out = call_under_vmap(_attend_in_lanes, q, k, v)
    else:
        out = F.scaled_dot_product_attention(q, k, v)
    return out.permute(2, 0, 1, 3).flatten(2)


def _attend_in_lanes(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    K = len(q)
    q, k, v = (tensor.flatten(0, 1) for tensor in (q, k, v))
    out: Tensor = F.scaled_dot_product_attention(q, k, v).unflatten(0, (K, -1))
    return out
