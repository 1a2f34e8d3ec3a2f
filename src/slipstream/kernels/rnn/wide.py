"""Recurrent layers of 129 to 512 units on a GPU, by programs that share their units (`portions`),
where all of these run at once. `stepwise` says what goes in and out; `pointwise` does the same step
by step.

A cooperative launch makes sure that they do, and `tile_of` asks for no more of them than the card
has room for. Beyond that, products of many windows by cuBLAS are faster anyway.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from slipstream.kernels.launch import launch
from slipstream.kernels.rnn import wide_kernels
from slipstream.kernels.rnn.cell import allocate_outputs
from slipstream.kernels.rnn.eager import select_last
from slipstream.kernels.rnn.weights import LayerWeights


class WideTile(NamedTuple):
    """What one program takes."""

    units: int
    windows: int
    warps: int


TILES = (WideTile(32, 16, 4), WideTile(64, 32, 8))
"""The first that fits is the fastest, on an H200"""
MOST_UNITS = 512
RESERVED = 1024
"""Bytes of shared memory that every program takes besides its own"""


class GpuLimits(NamedTuple):
    processors: int
    room: int
    """Bytes of shared memory that one program may take"""
    shared: int
    """Bytes that all programs of a processor may take together"""


def choose_tile(x: Tensor, weights: LayerWeights, dtype: torch.dtype) -> WideTile | None:
    """How to cut a layer on the GPU that holds it, x [K, T, B, D]."""
    found: Any = torch.cuda.get_device_properties(x.device)
    if found.major < 8:
        return None
    card = GpuLimits(
        found.multi_processor_count,
        found.shared_memory_per_block_optin,
        found.shared_memory_per_multiprocessor,
    )
    K, W, _, H = weights.hh.shape
    return fit_tile(K * W, x.shape[2], H, dtype.itemsize, card)


def fit_tile(L: int, B: int, H: int, size: int, card: GpuLimits) -> WideTile | None:
    """How to cut a layer of operands of `size` bytes; None where not all programs run at once."""
    if H > MOST_UNITS or size != 2:
        return None
    for tile in TILES:
        taken = shared_bytes(tile, H, size)
        programs = -(-H // tile.units) * -(-B // tile.windows) * L
        at_once = card.processors * (card.shared // (taken + RESERVED))
        if taken <= card.room and programs <= at_once:
            return tile
    return None


def shared_bytes(tile: WideTile, H: int, size: int) -> int:
    """Shared memory at most, which is what the way back takes: weights, and a step's gradients."""
    width: int = triton.next_power_of_2(H)
    return size * width * 4 * (tile.units + tile.windows)


def forward(
    tile: WideTile,
    products: Tensor,
    hh: Tensor,
    bias: Tensor,
    *,
    lstm: bool,
    last: bool,
    keep: bool,
    quick: bool,
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """The output, y, and what `backward` needs; the memory of `products` may be part of it."""
    _, T, B, W, _ = products.shape
    L, _, H = hh.shape
    spread = W == 2 and not last
    y, out, slots, carry = allocate_outputs(products, H, lstm=lstm, spread=spread, keep=keep)
    grid, counters, how = _cut(tile, L, B, H, hh)
    how |= {"W": W, "LSTM": lstm, "SPREAD": spread, "KEEP": keep, "QUICK": quick}
    given = products, hh, bias, y, out, slots, carry, counters, T, B
    launch(wide_kernels.split_forward, grid, *given, **how)
    return (select_last(y, W) if last else out), y, [slots, carry] if keep else []


def backward(
    tile: WideTile,
    dy: Tensor,
    hh: Tensor,
    kept: Sequence[Tensor],
    *,
    T: int,
    W: int,
    lstm: bool,
    last: bool,
) -> Tensor:
    """The slots' gradients, written over what `forward` kept."""
    slots, carry = kept
    L, _, B, _ = slots.shape
    dy = dy if dy.stride(-1) == 1 else dy.contiguous()
    grid, counters, how = _cut(tile, L, B, hh.shape[2], hh)
    strides = dy.stride(0), 0 if last else dy.stride(1), dy.stride(-2)
    how |= {"W": W, "LSTM": lstm, "LAST": last}
    given = dy, hh, slots, slots, carry, counters, T, B, *strides
    launch(wide_kernels.split_backward, grid, *given, **how)
    return slots


def _cut(
    tile: WideTile, L: int, B: int, H: int, like: Tensor
) -> tuple[tuple[int, int, int], Tensor, dict[str, Any]]:
    """The programs, their counters, and what kernels are told of the tile."""
    tiles = -(-B // tile.windows)
    counters = torch.zeros(L, tiles, dtype=torch.int32, device=like.device)
    how = {"H": H, "HP": triton.next_power_of_2(H), "N": tile.units, "BM": tile.windows}
    how |= {"num_warps": tile.warps, "launch_cooperative_grid": True}
    return (-(-H // tile.units), tiles, L), counters, how
