"""The gradients of a recurrent layer's weights from those of its slots, [K, T, B, W, H, 4], which
the kernels for all time steps leave: sums over steps and windows, in fp32.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from slipstream.kernels.launch import launch
from slipstream.kernels.operands import multiply_in_fp32

SLOTS = 4
ROWS, SLOT_COLUMNS = 64, 128
"""One step of a weight gradient: rows (half as many in fp32), and columns of slots"""
JOINT_COLUMNS, COLUMNS, FEWER_COLUMNS = 64, 256, 128
"""Columns of inputs beside those of h; and alone, where wider blocks read the slots less often, and
where these do not fit into shared memory"""
WARPS, STAGES = 8, 3
PROGRAMS = 264
"""The number of programs of a weight gradient: enough for two on each processor of a large GPU"""


class SlotSums(NamedTuple):
    """Sums of slots' gradients; gates in PyTorch's order."""

    ih: Tensor
    """[K, W, G, H, D]: times inputs"""
    hh: Tensor
    """[K, W, G, H, H]: times the outputs of the step before"""
    bias: Tensor
    """[K, W, 4, H], by slot"""


def round_up(size: int) -> int:
    """Return the next power of two, and at least the smallest size of a product."""
    return max(16, 1 << (size - 1).bit_length())


def order_by_slot(ih: Tensor, gates: int, H: int, dtype: torch.dtype) -> Tensor:
    """Return input weights [K, W, G * units, D] in the order of the slots' gradients,
    [K, W * H * 4, D]; H may be more than the units that there are."""
    K, D = ih.shape[0], ih.shape[3]
    by_gate = ih.unflatten(2, (gates, -1)).to(dtype)
    more = H - by_gate.shape[3]
    by_gate = torch.nn.functional.pad(by_gate, (0, 0, 0, more)) if more else by_gate
    if gates < SLOTS:
        zeros = torch.zeros_like(by_gate[:, :, :1])
        by_gate = torch.cat([by_gate[:, :, 2:], by_gate[:, :, :2], zeros], dim=2)
    by_slot: Tensor = by_gate.transpose(2, 3).reshape(K, -1, D)
    return by_slot


def sum_weight_gradients(
    slots: Tensor,
    x: Tensor,
    y: Tensor,
    h0: Tensor | None,
    *,
    gates: int,
    inputs: int,
    use_triton: bool,
    precision: str = "tf32",
) -> SlotSums:
    """Return the sums of the slots' gradients with x, of which the first `inputs` columns count
    (`[K, T * B, columns]` or `[K, T, B, columns]`), and with y [K, T, B, W, H]."""
    if use_triton:
        found = _sum_by_kernel(slots, x, y, gates=gates, inputs=inputs, precision=precision)
    else:
        found = _sum_by_products(slots, x, y, gates=gates, inputs=inputs)
    if h0 is None:
        return found
    return found._replace(hh=found.hh + _sum_of_initial(slots, h0, gates))


@cache
def choose_columns(device: torch.device) -> int:
    """Return the columns of inputs that a program multiplies by the slots alone on a device."""
    if device.type != "cuda":
        return COLUMNS
    gpu: Any = torch.cuda.get_device_properties(device)
    return fit_columns(gpu.shared_memory_per_block_optin)


def fit_columns(room: int) -> int:
    """Return as many of them as fit into so many bytes of shared memory."""
    needed = STAGES * ROWS * 2 * (SLOT_COLUMNS + COLUMNS)  # of operands in half precision
    return COLUMNS if room >= needed else FEWER_COLUMNS


def _sum_by_kernel(
    slots: Tensor, x: Tensor, y: Tensor, *, gates: int, inputs: int, precision: str
) -> SlotSums:
    """The slots are read once where x is narrow, and once for each block of inputs where it is
    not."""
    from slipstream.kernels.rnn import weight_gradients

    K, T, B, W, H, _ = slots.shape
    D, rows = inputs, T * B
    wide = math.gcd(SLOTS * H, SLOT_COLUMNS)
    height = ROWS * 2 // slots.dtype.itemsize
    columns = SLOTS * H // wide
    parts = max(1, min(PROGRAMS // (K * W * columns), rows // (4 * height)))
    share = -(-rows // (parts * height)) * height
    parts = -(-rows // share)
    shapes = [(K, W, gates, H, D), (K, W, gates, H, H), (K, W, SLOTS, H)]
    sizes = [math.prod(shape) for shape in shapes]
    out = torch.empty(parts, sum(sizes), device=slots.device)

    def add_up(blocks: int, width: int, *, of_h: bool, of_x: bool) -> None:
        out_x, out_h, out_bias = out.split(sizes, dim=1)
        launch(
            weight_gradients.weight_gradients,
            (parts, columns * blocks, K * W),
            *(slots, y, x, out_h, out_x, out_bias, rows, B, share, out.shape[1]),
            H=H,
            HP=round_up(H),
            D=D,
            DP=width,
            ROW=x.shape[-1],
            W=W,
            LSTM=gates == SLOTS,
            OF_H=of_h,
            OF_X=of_x,
            PRECISION=precision,
            BR=height,
            BC=wide,
            num_warps=WARPS,
            num_stages=STAGES,
        )

    if D <= JOINT_COLUMNS:  # with room for a column of ones, but in the widest
        add_up(1, min(round_up(D + 1), JOINT_COLUMNS), of_h=True, of_x=True)
    else:
        width = min(round_up(D), choose_columns(slots.device))
        add_up(1, 16, of_h=True, of_x=False)
        add_up(-(-D // width), width, of_h=False, of_x=True)
    total = out[0] if parts == 1 else out.sum(0)
    return SlotSums(*(t.view(s) for t, s in zip(total.split(sizes), shapes, strict=True)))


def _sum_by_products(slots: Tensor, x: Tensor, y: Tensor, *, gates: int, inputs: int) -> SlotSums:
    K, T, B, W, H, _ = slots.shape
    x = x.reshape(K, T * B, -1)[..., :inputs].to(slots.dtype)
    ones = slots.new_ones(1, T * B, 1).expand(K, -1, -1)
    sums = []
    for direction in range(W):
        d = slots[:, :, :, direction].reshape(K, T * B, H * SLOTS)
        h = y[:, :, :, direction].reshape(K, T * B, H)
        after, before = (d[:, :-B], h[:, B:]) if direction else (d[:, B:], h[:, :-B])
        factors = (d, x), (after, before), (d, ones)
        sums.append([multiply_in_fp32(left.mT, right) for left, right in factors])
    of_x, of_h, of_ones = (
        torch.stack(parts, dim=1).unflatten(2, (H, SLOTS)).transpose(2, 3)
        for parts in zip(*sums, strict=True)
    )
    if gates < SLOTS:  # of a GRU, slot 0 comes from x and slot 3 from h
        of_x, of_h = torch.cat([of_x[:, :, 1:3], of_x[:, :, :1]], dim=2), of_h[:, :, 1:]
    return SlotSums(of_x, of_h, of_ones[..., 0])


def _sum_of_initial(slots: Tensor, h0: Tensor, gates: int) -> Tensor:
    """Return the initial state's part of the gradient of w_hh, from each direction's first step."""
    directions = range(slots.shape[3])
    first = torch.stack([slots[:, -direction, :, direction] for direction in directions], dim=1)
    by_slot = torch.einsum("kwbhs,kwbj->kwshj", first.float(), h0.float())
    return by_slot[:, :, SLOTS - gates :]


def to_weights(found: SlotSums, units: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of w_ih [K, W, G * units, D], w_hh, b_ih and b_hh, without the units
    that were added."""
    ih, hh, bias = found
    gates = ih.shape[2]
    of_x, of_h = bias, bias
    if gates < SLOTS:
        of_x, of_h = bias[:, :, :3].roll(-1, dims=2), bias[:, :, 1:]
    if units < ih.shape[3]:
        ih, hh = ih[:, :, :, :units], hh[:, :, :, :units, :units]
        of_x, of_h = of_x[..., :units], of_h[..., :units]
    return ih.flatten(2, 3), hh.flatten(2, 3), of_x.flatten(2), of_h.flatten(2)
