"""Recurrent layers step by step: one batched product and what follows it over all lanes and
directions per time step. For what `fused` does not take whole: CPUs, and layers too wide for one
processor of a GPU. A step is torch's operations (`steps`), on GPUs one kernel (`pointwise`); where
several processors together hold the weights, one kernel makes all steps (`split`).

The way back is written out. What does not depend on the chain of steps is done for all of them at
once, without a copy for one direction: the products with x, the weights' gradients, dx. Shapes as
in the package, with L = K * W lanes and directions; in [L, T, ...] time runs as the direction does.
Four slots stand for the gates, in an order in which both what belongs to x and what belongs to h
lie side by side:

    LSTM   i, f, g, o
    GRU    the new gate's part that comes from x, r, z, and the part that comes from h

    products  [K, T, B, W, G * H] of x and w_ih, of the slots that have one
    hh        [L, G * H, H]
    bias      [L, 4 * H]          of the slots
    y         [L, T, B, H]        outputs
    slots     [L, T, B, 4 * H]    their gradients, on the way back
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from slipstream.kernels.precision import multiply_in_fp32
from slipstream.kernels.rnn import eager
from slipstream.kernels.rnn.weights import LayerWeights, pad_units, unpad_units

ALIGNED = 16
"""Bytes that rows of operands are a multiple of on a GPU: else products take slow ways"""
FEW = 64
"""Inputs, beside which a few more cost next to nothing"""


class StepwiseOptions(NamedTuple):
    """How a layer is run."""

    kind: str
    last: bool
    """Only each direction's last output"""
    dtype: torch.dtype
    """Of products' operands and outputs; states are fp32"""
    kernels: bool = False
    """A step is one of our kernels, besides its product"""
    quick: bool = False
    """tanh by the GPU's own instruction"""
    tile: Any = None
    """How `split` cuts the layer, where it takes it"""


def run_layer(way: StepwiseOptions, x: Tensor, weights: LayerWeights) -> Tensor:
    """x [K, T, B, D] to [K, T, B, W * H], or with `way.last` to [K, B, W * H]."""
    H = weights.hh.shape[3]
    more = _missing(H, way)
    if more:
        weights = pad_units(weights, more)
    out: Tensor = _Layer.apply(way, x, *weights)  # type: ignore[no-untyped-call]
    return unpad_units(out, H, more) if more else out


class _Layer(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        way: StepwiseOptions,
        x: Tensor,
        ih: Tensor,
        hh: Tensor,
        b_ih: Tensor,
        b_hh: Tensor,
    ) -> Tensor:
        K, T, B, _ = x.shape
        W, H = hh.shape[1], hh.shape[3]
        lstm, keep = way.kind == "lstm", any(ctx.needs_input_grad)
        more = _beside(x, way)
        rows = _rows(x, more, way)
        entering = ih.to(way.dtype)
        entering = entering if lstm else entering.roll(H, dims=2)
        entering = F.pad(entering, (0, more)) if more else entering
        across = hh.to(way.dtype).flatten(0, 1)
        products = torch.bmm(rows, entering.flatten(1, 2).mT).view(K, T, B, W, -1)
        bias = _bias(b_ih.flatten(0, 1), b_hh.flatten(0, 1), H, way)
        how = {"lstm": lstm, "last": way.last, "keep": keep}
        if way.tile:
            from slipstream.kernels.rnn import wide

            across = across.contiguous()
            out, y, kept = wide.forward(way.tile, products, across, bias, **how, quick=way.quick)
        elif way.kernels:
            from slipstream.kernels.rnn import cell

            out, y, kept = cell.forward(products, across, bias, **how, quick=way.quick)
        else:
            out, y, kept = eager.forward(products, across, bias, **how)
        ctx.way, ctx.like = way, (x.dtype, x.shape, ih.dtype, b_ih.dtype)
        ctx.save_for_backward(rows, entering, across, y, *kept)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        rows, entering, across, y, *kept = ctx.saved_tensors
        way: StepwiseOptions | None = ctx.way
        if way is None:
            raise RuntimeError("the way back overwrites what it reads and runs once")
        (K, W), T, H = entering.shape[:2], y.shape[1], y.shape[3]
        lstm = way.kind == "lstm"
        how = {"T": T, "W": W, "lstm": lstm, "last": way.last}
        if way.tile:
            from slipstream.kernels.rnn import wide

            ctx.way = None
            slots = wide.backward(way.tile, dy, across, kept, **how)
        elif way.kernels:
            from slipstream.kernels.rnn import cell

            ctx.way = None
            slots = cell.backward(dy, across, kept, **how)
        else:
            slots = eager.backward(dy, across, kept, **how)

        x_dtype, shape, dtype, bias_dtype = ctx.like
        of_x, of_h = (slots, slots) if lstm else (slots[..., : 3 * H], slots[..., H:])
        d_hh = multiply_in_fp32(of_h[:, 1:].flatten(1, 2).mT, y[:, :-1].flatten(1, 2))
        ways = of_x.flatten(1, 2).unflatten(0, (K, W)).unbind(1)
        d_ih = multiply_in_fp32(ways[0].mT, rows)[:, None]
        if W == 2:
            d_ih = torch.cat([d_ih, multiply_in_fp32(ways[1].mT, _turned(rows, T))[:, None]], dim=1)
        dx = None
        if ctx.needs_input_grad[1]:
            dx = torch.bmm(ways[0], entering[:, 0])
            if W == 2:
                dx += _turned(torch.bmm(ways[1], entering[:, 1]), T)
            dx = dx[..., : shape[3]].reshape(shape).to(x_dtype)
        d_ih, by_ones = d_ih[..., : shape[3]], d_ih[..., shape[3] :]
        total = by_ones[..., 0].flatten(0, 1) if by_ones.numel() else _added_up(of_x)
        d_b_ih = d_b_hh = total
        if not lstm:
            d_ih, d_b_ih = d_ih.roll(-H, dims=2), total.roll(-H, dims=1)
            d_b_hh = torch.cat([total[:, H:], _added_up(slots[..., 3 * H :])], dim=1)
        biases = (one.unflatten(0, (K, W)).to(bias_dtype) for one in (d_b_ih, d_b_hh))
        return (
            *(None, dx, d_ih.to(dtype)),
            *(d_hh.unflatten(0, (K, W)).to(dtype), *biases),
        )


def _missing(size: int, way: StepwiseOptions) -> int:
    """Elements that rows of `size` are short of where the next may begin."""
    return -size % (ALIGNED // way.dtype.itemsize) if way.kernels else 0


def _beside(x: Tensor, way: StepwiseOptions) -> int:
    """Columns that x gets beside its own: those that its rows are short of, and where it has few,
    some in any case, for what `_rows` makes of the first."""
    few = way.kernels and x.shape[3] <= FEW
    return _missing(x.shape[3], way) or few * ALIGNED // way.dtype.itemsize


def _rows(x: Tensor, more: int, way: StepwiseOptions) -> Tensor:
    """x as operands, [K, T * B, D + more]. The first new column is ones, so that the gradients of
    the bias are made with those of w_ih."""
    K, T, B, D = x.shape
    if not more:
        return x.to(way.dtype).flatten(1, 2)
    rows = x.new_zeros(K, T * B, D + more, dtype=way.dtype)
    rows[..., :D] = x.flatten(1, 2)
    rows[..., D].fill_(1.0)
    return rows


def _added_up(slots: Tensor) -> Tensor:
    """Over all steps and windows."""
    return slots.sum(dim=(1, 2), dtype=torch.promote_types(slots.dtype, torch.float32))


def _bias(b_ih: Tensor, b_hh: Tensor, H: int, way: StepwiseOptions) -> Tensor:
    """The slots' biases, of states' precision."""
    both = b_ih + b_hh
    if way.kind == "gru":
        both = torch.cat([b_ih[:, 2 * H :], both[:, : 2 * H], b_hh[:, 2 * H :]], dim=1)
    return both.to(torch.promote_types(way.dtype, torch.float32)).contiguous()


def _turned(rows: Tensor, T: int) -> Tensor:
    """[K, T * B, N] with time from its end."""
    by_time: Tensor = rows.unflatten(1, (T, -1))
    return by_time.flip(1).flatten(1, 2)
