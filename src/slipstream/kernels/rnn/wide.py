"""Recurrent layers of 129 to 512 units on a GPU, by programs that share their units
(`wide_kernels`), where all of these run at once. `stepwise` says what goes in and out.

A cooperative launch makes sure that they do, and `fit_tile` divides a layer into no more programs
than the GPU has room for. Beyond that, products of many windows by cuBLAS are faster anyway.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from slipstream.kernels.launch import launch
from slipstream.kernels.rnn import wide_kernels
from slipstream.kernels.rnn.cell import allocate_outputs
from slipstream.kernels.rnn.eager import select_last
from slipstream.kernels.rnn.weights import LayerWeights, StepwiseOptions


class WideTile(NamedTuple):
    """The units and windows of one program."""

    units: int
    windows: int
    warps: int


TILES = (WideTile(32, 16, 4), WideTile(64, 32, 8))
"""The tiles to try in order: the first that fits is the fastest on an H200"""
MAX_UNITS = 512
RESERVED = 1024
"""Bytes of shared memory that every program uses besides its own"""


class GpuLimits(NamedTuple):
    """The limits of a GPU on programs that run at once."""

    processors: int
    room: int
    """Bytes of shared memory that one program may take"""
    shared: int
    """Bytes that all programs of a processor may take together"""


def choose_tile(x: Tensor, weights: LayerWeights, dtype: torch.dtype) -> WideTile | None:
    """Return the tile of a layer for the GPU that holds it, x [K, T, B, D]; None where it does not
    fit."""
    gpu: Any = torch.cuda.get_device_properties(x.device)
    if gpu.major < 8:
        return None
    limits = GpuLimits(
        gpu.multi_processor_count,
        gpu.shared_memory_per_block_optin,
        gpu.shared_memory_per_multiprocessor,
    )
    K, W, _, H = weights.hh.shape
    return fit_tile(K * W, x.shape[2], H, dtype.itemsize, limits)


def fit_tile(L: int, B: int, H: int, size: int, gpu: GpuLimits) -> WideTile | None:
    """Return the tile of a layer with operands of `size` bytes; None where not all programs run at
    once."""
    if H > MAX_UNITS or size != 2:
        return None
    for tile in TILES:
        needed = shared_bytes(tile, H, size)
        programs = -(-H // tile.units) * -(-B // tile.windows) * L
        at_once = gpu.processors * (gpu.shared // (needed + RESERVED))
        if needed <= gpu.room and programs <= at_once:
            return tile
    return None


def shared_bytes(tile: WideTile, H: int, size: int) -> int:
    """Return an upper bound of the shared memory, which the backward pass reaches: weights, and a
    step's gradients."""
    width: int = triton.next_power_of_2(H)
    return size * width * 4 * (tile.units + tile.windows)


def forward(
    products: Tensor, hh: Tensor, bias: Tensor, options: StepwiseOptions, *, save: bool
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Return the output, y, and what `backward` needs, which may use the memory of `products`."""
    _, T, B, W, _ = products.shape
    L, _, H = hh.shape
    y, out, slots, carry = allocate_outputs(products, H, options, save=save)
    grid, counters, constants = _divide(options.tile, L, B, H, hh)
    launch(
        wide_kernels.split_forward,
        grid,
        *(products, hh, bias, y, out, slots, carry, counters, T, B),
        W=W,
        LSTM=options.is_lstm,
        IN_TIME_ORDER=W == 2 and not options.last,
        SAVE=save,
        FAST=options.fast_tanh,
        **constants,
    )
    return (select_last(y, W) if options.last else out), y, [slots, carry] if save else []


def backward(
    dy: Tensor, hh: Tensor, saved: Sequence[Tensor], options: StepwiseOptions, *, T: int, W: int
) -> Tensor:
    """Return the slots' gradients, written over what `forward` saved."""
    slots, carry = saved
    L, _, B, _ = slots.shape
    dy = dy if dy.stride(-1) == 1 else dy.contiguous()
    grid, counters, constants = _divide(options.tile, L, B, hh.shape[2], hh)
    strides = dy.stride(0), 0 if options.last else dy.stride(1), dy.stride(-2)
    launch(
        wide_kernels.split_backward,
        grid,
        *(dy, hh, slots, slots, carry, counters, T, B, *strides),
        W=W,
        LSTM=options.is_lstm,
        LAST=options.last,
        **constants,
    )
    return slots


def _divide(
    tile: WideTile, L: int, B: int, H: int, like: Tensor
) -> tuple[tuple[int, int, int], Tensor, dict[str, Any]]:
    """Return the grid of programs, their counters, and the constants of a kernel that follow from
    the tile."""
    tiles = -(-B // tile.windows)
    counters = torch.zeros(L, tiles, dtype=torch.int32, device=like.device)
    constants = {"H": H, "HP": triton.next_power_of_2(H), "N": tile.units, "BM": tile.windows}
    constants |= {"num_warps": tile.warps, "launch_cooperative_grid": True}
    return (-(-H // tile.units), tiles, L), counters, constants
