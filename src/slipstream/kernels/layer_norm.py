"""Layer normalization as one kernel each way, of one model or of many lanes.

torch's own reads tall inputs slowly for the weights' gradients, wants fp32 where half precision
comes in and goes out, and is a dozen operations under `vmap`. Mean and deviation are computed again
on the way back, which has the rows at hand, so that nothing is kept but the input.

    x, out, dy, dx  [K, R, D]      rows of each lane; DP is D as a power of two
    weight, bias    [K, D]         fp32; lanes may lie apart
    sums            [P, K, 2, D]   gradients of weight and bias, by share of the rows
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.kernels.launch import launch
from slipstream.kernels.vmap import call_with_lanes

ELEMENTS = 2048
"""Of the rows that a program has on chip at a time; wider ones are left to torch"""
MOST_SHARES, ROUNDS = 256, 4
"""Of the rows, on the way back: so many, and so many rounds of each at least. How rows are shared
out must not depend on the number of lanes, or it would show in a lane's weights."""


@triton.jit
def _normal(x, lane, row, rows, D: tl.constexpr, DP: tl.constexpr, EPS: tl.constexpr):
    """Some rows without their mean and over their deviation, one over that deviation, where they
    lie, and which of their elements there are."""
    column = tl.arange(0, DP)
    there = (row < rows)[:, None] & (column < D)[None, :]
    at = (lane * rows + row)[:, None] * D + column[None, :]
    value = tl.load(x + at, mask=there, other=0.0).to(tl.float32)
    value = tl.where(there, value - (tl.sum(value, 1) / D)[:, None], 0.0)
    over = 1.0 / tl.sqrt(tl.sum(value * value, 1) / D + EPS)
    return value * over[:, None], over, at, there


@triton.jit(do_not_specialize=["rows"])
def forward(
    x,
    weight,
    bias,
    out,
    rows,
    weight_lane,
    bias_lane,
    D: tl.constexpr,
    DP: tl.constexpr,
    EPS: tl.constexpr,
    BR: tl.constexpr,
):
    lane = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0) * BR + tl.arange(0, BR)
    normal, _, at, there = _normal(x, lane, row, rows, D, DP, EPS)
    column = tl.arange(0, DP)
    w = tl.load(weight + lane * weight_lane + column, mask=column < D, other=0.0)
    b = tl.load(bias + lane * bias_lane + column, mask=column < D, other=0.0)
    found = normal * w[None, :] + b[None, :]
    tl.store(out + at, found.to(out.dtype.element_ty), mask=there)


@triton.jit(do_not_specialize=["rows", "share"])
def backward(
    x,
    weight,
    dy,
    dx,
    sums,
    rows,
    share,
    weight_lane,
    D: tl.constexpr,
    DP: tl.constexpr,
    EPS: tl.constexpr,
    BR: tl.constexpr,
):
    """Of a share of the rows: dx, and what they add to the gradients of weight and bias."""
    part, lane = tl.program_id(0), tl.program_id(1).to(tl.int64)
    column = tl.arange(0, DP)
    w = tl.load(weight + lane * weight_lane + column, mask=column < D, other=0.0)
    dw = tl.zeros([BR, DP], dtype=tl.float32)
    db = tl.zeros([BR, DP], dtype=tl.float32)
    for start in range(part * share, tl.minimum((part + 1) * share, rows), BR):
        row = start + tl.arange(0, BR)
        normal, over, at, there = _normal(x, lane, row, rows, D, DP, EPS)
        arriving = tl.load(dy + at, mask=there, other=0.0).to(tl.float32)
        dw += arriving * normal
        db += arriving
        arriving *= w[None, :]
        along = tl.sum(arriving * normal, 1) / D
        level = tl.sum(arriving, 1) / D
        found = (arriving - level[:, None] - normal * along[:, None]) * over[:, None]
        tl.store(dx + at, found.to(dx.dtype.element_ty), mask=there)
    sums_at = sums + (part.to(tl.int64) * tl.num_programs(1) + lane) * (2 * D) + column
    tl.store(sums_at, tl.sum(dw, 0), mask=column < D)
    tl.store(sums_at + D, tl.sum(db, 0), mask=column < D)


def is_supported(x: Tensor) -> bool:
    return x.shape[-1] <= ELEMENTS and x.dtype.itemsize <= 4


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """x [..., D] normalized, in that type; under `vmap`, each lane by its own weight and bias."""

    apply: Any = _Norm.apply
    return call_with_lanes(lambda *lanes: apply(*lanes, eps, dtype), x, weight, bias)


class _Norm(torch.autograd.Function):
    """Lanes come first: x [K, ..., D], weight and bias [K, D]."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float, dtype: torch.dtype
    ) -> Tensor:
        x = x.contiguous()
        weight, bias = (w if w.stride(-1) == 1 else w.contiguous() for w in (weight, bias))
        K, D = weight.shape
        rows, cut = x.numel() // (K * D), _cut(D)
        out = torch.empty(x.shape, dtype=dtype, device=x.device)
        lanes = weight.stride(0), bias.stride(0)
        grid = (triton.cdiv(rows, cut["BR"]), K)
        launch(forward, grid, x, weight, bias, out, rows, *lanes, D=D, EPS=eps, **cut)
        ctx.eps = eps
        ctx.save_for_backward(x, weight)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        K, D = weight.shape
        rows, cut = x.numel() // (K * D), _cut(D)
        height = cut["BR"]
        shares = max(1, min(MOST_SHARES, rows // (ROUNDS * height)))
        share = triton.cdiv(triton.cdiv(rows, shares), height) * height
        shares = triton.cdiv(rows, share)
        dx = torch.empty_like(x)
        sums = torch.empty(shares, K, 2, D, device=x.device)
        given = (x, weight, grads[0].contiguous(), dx, sums, rows, share, weight.stride(0))
        launch(backward, (shares, K), *given, D=D, EPS=ctx.eps, **cut)
        dw, db = sums.sum(0).unbind(1)
        return dx, dw, db, None, None


def _cut(D: int) -> dict[str, int]:
    wide = triton.next_power_of_2(D)
    return {"DP": wide, "BR": ELEMENTS // wide}
