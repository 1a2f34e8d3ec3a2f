"""Layer normalization as one kernel each way, of one model or of many lanes.

PyTorch's own reads tall inputs slowly for the weights' gradients, wants fp32 where half precision
comes in and goes out, and is a dozen operations under `vmap`. The backward pass reads the rows
anyway and computes mean and deviation again, so that only the input is saved.

    x, out, dy, dx  [K, R, D]      rows of each lane; DP is D as a power of two
    weight, bias    [K, D]         fp32; lanes may lie apart
    sums            [P, K, 2, D]   gradients of weight and bias, by share of the rows
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.kernels.launch import launch
from slipstream.kernels.operands import call_with_lanes

ELEMENTS = 2048
"""The number of elements that a program has on chip at a time; wider rows are left to torch"""
MAX_SHARES, ROUNDS = 256, 4
"""The largest number of parts of the rows in the backward pass, and the minimum rounds of each. How
rows are divided must not depend on the number of lanes, or it would show in a lane's weights."""


@triton.jit
def _normalize_rows(x, lane, row, rows, D: tl.constexpr, DP: tl.constexpr, EPS: tl.constexpr):
    """Return rows normalized, the inverse of their deviation, their offsets, and a mask of existing
    elements."""
    column = tl.arange(0, DP)
    valid = (row < rows)[:, None] & (column < D)[None, :]
    offset = (lane * rows + row)[:, None] * D + column[None, :]
    value = tl.load(x + offset, mask=valid, other=0.0).to(tl.float32)
    value = tl.where(valid, value - (tl.sum(value, 1) / D)[:, None], 0.0)
    over = 1.0 / tl.sqrt(tl.sum(value * value, 1) / D + EPS)
    return value * over[:, None], over, offset, valid


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
    normal, _, offset, valid = _normalize_rows(x, lane, row, rows, D, DP, EPS)
    column = tl.arange(0, DP)
    w = tl.load(weight + lane * weight_lane + column, mask=column < D, other=0.0)
    b = tl.load(bias + lane * bias_lane + column, mask=column < D, other=0.0)
    result = normal * w[None, :] + b[None, :]
    tl.store(out + offset, result.to(out.dtype.element_ty), mask=valid)


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
    """Write dx of one part of the rows, and this part's gradients of weight and bias."""
    part, lane = tl.program_id(0), tl.program_id(1).to(tl.int64)
    column = tl.arange(0, DP)
    w = tl.load(weight + lane * weight_lane + column, mask=column < D, other=0.0)
    dw = tl.zeros([BR, DP], dtype=tl.float32)
    db = tl.zeros([BR, DP], dtype=tl.float32)
    for start in range(part * share, tl.minimum((part + 1) * share, rows), BR):
        row = start + tl.arange(0, BR)
        normal, over, offset, valid = _normalize_rows(x, lane, row, rows, D, DP, EPS)
        incoming = tl.load(dy + offset, mask=valid, other=0.0).to(tl.float32)
        dw += incoming * normal
        db += incoming
        incoming *= w[None, :]
        along = tl.sum(incoming * normal, 1) / D
        level = tl.sum(incoming, 1) / D
        result = (incoming - level[:, None] - normal * along[:, None]) * over[:, None]
        tl.store(dx + offset, result.to(dx.dtype.element_ty), mask=valid)
    sums_at = sums + (part.to(tl.int64) * tl.num_programs(1) + lane) * (2 * D) + column
    tl.store(sums_at, tl.sum(dw, 0), mask=column < D)
    tl.store(sums_at + D, tl.sum(db, 0), mask=column < D)


def is_supported(x: Tensor) -> bool:
    return x.shape[-1] <= ELEMENTS and x.dtype.itemsize <= 4


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """Return x [..., D] normalized, in the type `dtype`; under `vmap`, each lane by its own weight
    and bias."""

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
        rows, tile = x.numel() // (K * D), _tile_of(D)
        out = torch.empty(x.shape, dtype=dtype, device=x.device)
        lanes = weight.stride(0), bias.stride(0)
        grid = (triton.cdiv(rows, tile["BR"]), K)
        launch(forward, grid, x, weight, bias, out, rows, *lanes, D=D, EPS=eps, **tile)
        ctx.eps = eps
        ctx.save_for_backward(x, weight)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        K, D = weight.shape
        rows, tile = x.numel() // (K * D), _tile_of(D)
        height = tile["BR"]
        shares = max(1, min(MAX_SHARES, rows // (ROUNDS * height)))
        share = triton.cdiv(triton.cdiv(rows, shares), height) * height
        shares = triton.cdiv(rows, share)
        dx = torch.empty_like(x)
        sums = torch.empty(shares, K, 2, D, device=x.device)
        args = (x, weight, grads[0].contiguous(), dx, sums, rows, share, weight.stride(0))
        launch(backward, (shares, K), *args, D=D, EPS=ctx.eps, **tile)
        dw, db = sums.sum(0).unbind(1)
        return dx, dw, db, None, None


def _tile_of(D: int) -> dict[str, int]:
    wide = triton.next_power_of_2(D)
    return {"DP": wide, "BR": ELEMENTS // wide}
