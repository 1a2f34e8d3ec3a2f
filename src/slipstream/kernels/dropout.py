"""Dropout by counter as one kernel; `models.noise.rng` defines what it computes.

The backward pass drops the gradient as the forward pass dropped x, from key and rate alone.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.kernels.launch import launch
from slipstream.kernels.operands import call_with_lanes

ELEMENTS = 1024
"""The number of elements of a program; more where a row is longer"""


class DropoutHash(NamedTuple):
    """The numbers that `models.noise.rng` mixes by, and the site's own."""

    mix: int
    unit: int
    site: int
    last: int
    direction: int


@triton.jit(do_not_specialize=["B", "rows"])
def _drop(
    x,
    out,
    keys,
    rates,
    B,
    rows,
    D: tl.constexpr,
    DIRECTIONS: tl.constexpr,
    MIX: tl.constexpr,
    UNIT: tl.constexpr,
    SITE: tl.constexpr,
    LAST: tl.constexpr,
    DIRECTION: tl.constexpr,
    BR: tl.constexpr,
    DP: tl.constexpr,
):
    """x and out [K, T, B, D]: `rows` of each lane, whose key and rate are [K]. A program takes BR
    rows, and mixes once the bits of a row and once those of a unit."""
    lane = tl.program_id(1)
    row = (tl.program_id(0) * BR + tl.arange(0, BR))[:, None]
    d = tl.arange(0, DP)[None, :]
    counter = (row // B).to(tl.int64) * (1 << 32) + row % B
    bits = (counter + tl.load(keys + lane)) * MIX
    bits = (bits ^ (bits >> 32)) * MIX
    bits = bits ^ (bits >> 29)
    of_row = (bits >> 32).to(tl.int32) | 1
    units = (d // (D // DIRECTIONS)) * DIRECTION + d % (D // DIRECTIONS)
    units = units * UNIT + SITE
    units = ((units ^ (units >> 15)) * LAST) | 1
    mask = of_row * units
    mask = (mask ^ (mask >> 15)) * LAST

    dtype = out.dtype.element_ty
    scale = tl.div_rn(1.0, 1.0 - tl.load(rates + lane)).to(dtype).to(tl.float32)
    rate = 1.0 - 1.0 / scale.to(tl.float64)
    dropped = mask < (rate * 4294967296.0 - 2147483648.0).to(tl.int32)
    where = (lane.to(tl.int64) * rows + row) * D + d
    valid = (row < rows) & (d < D)
    scaled = tl.load(x + where, mask=valid, other=0.0).to(tl.float32) * scale
    tl.store(out + where, tl.where(dropped, 0.0, scaled).to(dtype), mask=valid)


def apply_dropout(
    x: Tensor, key: Tensor, rate: Tensor, hashing: DropoutHash, directions: int
) -> Tensor:
    """Drop elements of x [T, B, D] or [B, D] by one key and rate; under `vmap`, by one of each for
    every lane."""

    apply: Any = _Drop.apply
    return call_with_lanes(lambda *lanes: apply(*lanes, hashing, directions), x, key, rate)


class _Drop(torch.autograd.Function):
    """Lanes come first: x [K, ..., B, D], key and rate [K]."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, key: Tensor, rate: Tensor, hashing: DropoutHash, directions: int
    ) -> Tensor:
        ctx.save_for_backward(key, rate)
        ctx.hashing, ctx.directions = hashing, directions
        return _launch(x, key, rate, hashing, directions)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        key, rate = ctx.saved_tensors
        return _launch(grads[0], key, rate, ctx.hashing, ctx.directions), None, None, None, None


def _launch(x: Tensor, key: Tensor, rate: Tensor, hashing: DropoutHash, directions: int) -> Tensor:
    x = x.contiguous()
    B, D = x.shape[-2:]
    out, rows, wide = torch.empty_like(x), x[0].numel() // D, triton.next_power_of_2(D)
    height = max(1, ELEMENTS // wide)
    args = x, out, key.contiguous(), rate.contiguous(), B, rows, D, directions
    launch(_drop, (triton.cdiv(rows, height), len(x)), *args, *hashing, BR=height, DP=wide)
    return out


def can_launch(device: torch.device) -> bool:
    """Return whether the kernel can be built and run here."""
    x = torch.zeros(1, 1, 1, device=device)
    try:
        _launch(
            x,
            torch.zeros(1, dtype=torch.int64, device=device),
            x[0, 0],
            DropoutHash(1, 1, 1, 1, 1),
            1,
        )
    except Exception:  # a compiler may raise anything
        return False
    return True
