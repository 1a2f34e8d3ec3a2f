"""The autograd function around the implementations that take a layer step by step, or as programs
that exchange their outputs at each step: `eager`, `cell` and `wide`, which have the same functions.

What does not depend on the chain of steps is done for all of them at once, without a copy for one
direction: the products with x, the weights' gradients, dx. Shapes and slots as in the package; in
[L, T, ...] time runs as the direction does.

    products  [K, T, B, W, G * H] of x and w_ih, of the slots that have one
    hh        [L, G * H, H]
    bias      [L, 4 * H]          of the slots
    y         [L, T, B, H]        outputs
    slots     [L, T, B, 4 * H]    their gradients
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from slipstream.kernels.operands import multiply_in_fp32
from slipstream.kernels.rnn.weights import (
    ONE_BACKWARD,
    LayerWeights,
    StepwiseOptions,
    pad_units,
    unpad_units,
)

ALIGNED = 16
"""Rows of operands are a multiple of so many bytes on a GPU: otherwise cuBLAS has only slow
kernels"""
FEW = 64
"""With at most this many inputs, a few more columns cost next to nothing"""


def run_layer(options: StepwiseOptions, x: Tensor, weights: LayerWeights) -> Tensor:
    """Map x [K, T, B, D] to [K, T, B, W * H], or with `options.last` to [K, B, W * H]."""
    H = weights.hh.shape[3]
    more = _count_missing(H, options)
    if more:
        weights = pad_units(weights, more)
    out: Tensor = _StepwiseLayer.apply(options, x, *weights)  # type: ignore[no-untyped-call]
    return unpad_units(out, H, more) if more else out


def _import_steps(options: StepwiseOptions) -> Any:
    """Return the module that runs the steps; it is imported late, because without a GPU Triton may
    be missing."""
    if options.tile:
        from slipstream.kernels.rnn import wide

        return wide
    if options.use_triton:
        from slipstream.kernels.rnn import cell

        return cell
    from slipstream.kernels.rnn import eager

    return eager


class _StepwiseLayer(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        options: StepwiseOptions,
        x: Tensor,
        ih: Tensor,
        hh: Tensor,
        b_ih: Tensor,
        b_hh: Tensor,
    ) -> Tensor:
        K, T, B, _ = x.shape
        W, H = hh.shape[1], hh.shape[3]
        more = _count_extra_columns(x, options)
        rows = _make_rows(x, more, options)
        entering = ih.to(options.dtype)
        entering = entering if options.is_lstm else entering.roll(H, dims=2)
        entering = F.pad(entering, (0, more)) if more else entering
        across = hh.to(options.dtype).flatten(0, 1)
        across = across.contiguous() if options.tile else across
        products = torch.bmm(rows, entering.flatten(1, 2).mT).view(K, T, B, W, -1)
        bias = _order_bias(b_ih.flatten(0, 1), b_hh.flatten(0, 1), H, options)
        save = any(ctx.needs_input_grad)
        steps = _import_steps(options)
        out: Tensor
        out, y, saved = steps.forward(products, across, bias, options, save=save)
        ctx.options, ctx.like = options, (x.dtype, x.shape, ih.dtype, b_ih.dtype)
        ctx.save_for_backward(rows, entering, across, y, *saved)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        rows, entering, across, y, *saved = ctx.saved_tensors
        options: StepwiseOptions | None = ctx.options
        if options is None:
            raise RuntimeError(ONE_BACKWARD)
        if options.use_triton:
            ctx.options = None
        (K, W), T, H = entering.shape[:2], y.shape[1], y.shape[3]
        slots = _import_steps(options).backward(dy, across, saved, options, T=T, W=W)

        x_dtype, shape, dtype, bias_dtype = ctx.like
        of_x, of_h = (slots, slots) if options.is_lstm else (slots[..., : 3 * H], slots[..., H:])
        d_hh = multiply_in_fp32(of_h[:, 1:].flatten(1, 2).mT, y[:, :-1].flatten(1, 2))
        directions = of_x.flatten(1, 2).unflatten(0, (K, W)).unbind(1)
        d_ih = multiply_in_fp32(directions[0].mT, rows)[:, None]
        if W == 2:
            backwards = multiply_in_fp32(directions[1].mT, _reverse_time(rows, T))
            d_ih = torch.cat([d_ih, backwards[:, None]], dim=1)
        dx = None
        if ctx.needs_input_grad[1]:
            dx = torch.bmm(directions[0], entering[:, 0])
            if W == 2:
                dx += _reverse_time(torch.bmm(directions[1], entering[:, 1]), T)
            dx = dx[..., : shape[3]].reshape(shape).to(x_dtype)
        d_ih, by_ones = d_ih[..., : shape[3]], d_ih[..., shape[3] :]
        total = by_ones[..., 0].flatten(0, 1) if by_ones.numel() else _sum_rows(of_x)
        d_b_ih = d_b_hh = total
        if not options.is_lstm:
            d_ih, d_b_ih = d_ih.roll(-H, dims=2), total.roll(-H, dims=1)
            d_b_hh = torch.cat([total[:, H:], _sum_rows(slots[..., 3 * H :])], dim=1)
        biases = (bias.unflatten(0, (K, W)).to(bias_dtype) for bias in (d_b_ih, d_b_hh))
        return None, dx, d_ih.to(dtype), d_hh.unflatten(0, (K, W)).to(dtype), *biases


def _count_missing(size: int, options: StepwiseOptions) -> int:
    """Return the number of elements that a row of `size` lacks to be aligned."""
    return -size % (ALIGNED // options.dtype.itemsize) if options.use_triton else 0


def _count_extra_columns(x: Tensor, options: StepwiseOptions) -> int:
    """Return the number of columns added to x: those that its rows lack to be aligned and, where it
    has few, some in any case, because `_make_rows` uses the first one."""
    few = options.use_triton and x.shape[3] <= FEW
    return _count_missing(x.shape[3], options) or few * ALIGNED // options.dtype.itemsize


def _make_rows(x: Tensor, more: int, options: StepwiseOptions) -> Tensor:
    """Return x as operands, [K, T * B, D + more]. The first new column is ones, so that the product
    for the gradient of w_ih also gives the gradient of the bias."""
    K, T, B, D = x.shape
    if not more:
        return x.to(options.dtype).flatten(1, 2)
    rows = x.new_zeros(K, T * B, D + more, dtype=options.dtype)
    rows[..., :D] = x.flatten(1, 2)
    rows[..., D].fill_(1.0)
    return rows


def _sum_rows(slots: Tensor) -> Tensor:
    """Return the sums over all steps and windows, in at least fp32."""
    return slots.sum(dim=(1, 2), dtype=torch.promote_types(slots.dtype, torch.float32))


def _order_bias(b_ih: Tensor, b_hh: Tensor, H: int, options: StepwiseOptions) -> Tensor:
    """Return the biases in the order of the slots, in the states' precision."""
    summed = b_ih + b_hh
    if not options.is_lstm:
        summed = torch.cat([b_ih[:, 2 * H :], summed[:, : 2 * H], b_hh[:, 2 * H :]], dim=1)
    return summed.to(torch.promote_types(options.dtype, torch.float32)).contiguous()


def _reverse_time(rows: Tensor, T: int) -> Tensor:
    """Return [K, T * B, N] reversed in time."""
    by_time: Tensor = rows.unflatten(1, (T, -1))
    return by_time.flip(1).flatten(1, 2)
