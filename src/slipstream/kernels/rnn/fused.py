"""Runs the Triton kernels of `recurrence` forward and backward. Shapes as in the package."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from slipstream.kernels.launch import launch
from slipstream.kernels.rnn import fused_kernels, weight_gradients
from slipstream.kernels.rnn.weights import LayerWeights, pad_units, unpad_units

SLOTS = 4
MOST_INSIDE = 64
"""Inputs up to which the product with them may be made inside the kernel"""
ROWS, COLUMNS = 64, 128
"""Of one step of a weight gradient; half as many rows in fp32"""
PROGRAMS = 264
"""Of a weight gradient: enough for two on each processor of a large GPU"""


class FusedTile(NamedTuple):
    """How a kernel is cut."""

    windows: int
    """Of one program"""
    warps: int
    stages: int = 1
    """Steps whose reads are under way"""
    held: int = SLOTS
    """Slots whose recurrent weights stay on chip: all 4, or 1"""


class FusedOptions(NamedTuple):
    """How a layer is run."""

    kind: str
    last: bool
    """Only each direction's last output"""
    dtype: torch.dtype
    """Of operands and outputs; sums and cells are fp32"""
    precision: str
    """Of products between fp32 operands: "ieee" or "tf32" """
    inside: bool
    """The product with x is made inside the kernel"""
    forward: FusedTile
    backward: FusedTile
    quick: bool = True
    """tanh by the GPU's own instruction"""


def run_layer(
    way: FusedOptions,
    x: Tensor,
    weights: LayerWeights,
    h0: Tensor | None = None,
    c0: Tensor | None = None,
) -> Tensor:
    """x [K, T, B, D] to [K, T, B, W * H], or with `way.last` to [K, B, W * H].

    Units are padded to what the kernels compute anyway, so that every row of memory begins where
    wide reads and writes can; units without weights change nothing.
    """
    H = weights.hh.shape[3]
    more = _padded(H) - H
    if more:
        weights = pad_units(weights, more)
        h0, c0 = (None if s is None else F.pad(s, (0, more)) for s in (h0, c0))
    out: Tensor = _Layer.apply(way, x, *weights, h0, c0)  # type: ignore[no-untyped-call]
    return unpad_units(out, H, more) if more else out


def choose_options(
    kind: str, last: bool, x: Tensor, weights: LayerWeights, dtype: torch.dtype, precision: str
) -> FusedOptions | None:
    """How to run a layer on the GPU that holds it; None where these kernels do not fit."""
    card = torch.cuda.get_device_properties(x.device)
    programs = -(-x.shape[2] // 16) * x.shape[0] * weights.hh.shape[1]
    cut = fit_tiles(
        weights.hh.shape[3],
        x.shape[3],
        dtype.itemsize,
        room=card.shared_memory_per_block_optin if card.major >= 8 else 0,  # type: ignore[attr-defined]
        many=programs > card.multi_processor_count,
    )
    half = dtype.itemsize == 2
    return None if cut is None else FusedOptions(kind, last, dtype, precision, *cut, quick=half)


def fit_tiles(
    H: int, D: int, size: int, *, room: int, many: bool
) -> tuple[bool, FusedTile, FusedTile] | None:
    """Whether w_ih fits on chip too, and the tiles of forward and backward, within `room` bytes of
    shared memory: those that were fastest on an H200, with as few bytes as need be.

    `many` programs are more than the card runs at once.
    """
    HP, DP = _padded(H), _padded(D)
    if HP > 128:
        return None
    warps = {16: 2, 32: 4, 64: 4, 128: 8}[HP]
    first = [FusedTile(32, 16)] if many and HP == 128 and size == 2 else []
    forwards = [
        (inside, tile)
        for held in ((SLOTS, 1) if size == 2 else (SLOTS,))
        for inside in (True, False)
        for tile in [*first, *(FusedTile(16, warps, stages, held) for stages in (3, 2, 1))]
        if tile.held == held
        and (tile.stages == 1 if inside or held == 1 else tile.windows == 16)
        and (not inside or DP <= MOST_INSIDE)
    ]
    backwards = [FusedTile(16, warps, 3), FusedTile(16, warps, 2), FusedTile(16, warps)]
    backwards += [FusedTile(16, warps, 1, 1)] if size == 2 else []
    for inside, forward in forwards:
        if forward_bytes(forward, HP, DP if inside else 0, size) <= room:
            break
    else:
        return None
    for backward in backwards:
        if backward_bytes(backward, HP, size) <= room:
            return inside, forward, backward
    return None


def forward_bytes(tile: FusedTile, HP: int, DP: int, size: int) -> int:
    """Shared memory of `forward` at most: weights, those of DP inputs, what moves between layouts,
    and the products with x that are under way."""
    moving = (4 + 4 * (tile.stages - 1)) * tile.windows
    return size * HP * ((SLOTS if tile.held == SLOTS else 2) * HP + SLOTS * DP + moving)


def backward_bytes(tile: FusedTile, HP: int, size: int) -> int:
    """Shared memory of `backward` at most."""
    moving = (8 + 7 * (tile.stages - 1)) * tile.windows
    return size * HP * ((SLOTS if tile.held == SLOTS else 2) * HP + moving)


class _Layer(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        way: FusedOptions,
        x: Tensor,
        ih: Tensor,
        hh: Tensor,
        b_ih: Tensor,
        b_hh: Tensor,
        h0: Tensor | None,
        c0: Tensor | None,
    ) -> Tensor:
        K, T, B, D = x.shape
        W, H = hh.shape[1], hh.shape[3]
        lstm, inside, states = way.kind == "lstm", way.inside, h0 is not None
        keep = any(ctx.needs_input_grad)
        x, ih, hh, b_ih, b_hh = x.contiguous(), *map(_packed, (ih, hh, b_ih, b_hh))
        if way.forward.held < SLOTS:
            hh = hh.to(way.dtype)
        if h0 is not None:
            h0 = h0.contiguous()
            c0 = (torch.zeros_like(h0) if c0 is None else c0).contiguous()

        def empty(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=way.dtype, device=x.device)

        y = empty(K, T, B, W, H) if keep or not way.last else empty(0)
        final = empty(K, B, W, H) if way.last else y
        factors = empty(K, T, B, W, H, SLOTS) if keep else y
        carry = empty(K, T, B, W, H, 2 if lstm else 1) if keep else y
        source = x
        if not inside:
            x = x.to(way.dtype)
            source = x.view(K, T * B, D) @ ih.to(way.dtype).flatten(1, 2).mT
        tile = way.forward
        launch(
            fused_kernels.forward,
            (-(-B // tile.windows), K * W),
            source,
            ih,
            hh,
            b_ih,
            b_hh,
            b_hh if h0 is None else h0,
            b_hh if c0 is None else c0,
            y,
            final,
            factors,
            carry,
            T,
            B,
            ih.stride(0),
            hh.stride(0),
            b_ih.stride(0),
            b_hh.stride(0),
            D=D if inside else 1,
            DP=_padded(D) if inside else 16,
            H=H,
            W=W,
            LSTM=lstm,
            INSIDE=inside,
            STATES=states,
            LAST=way.last,
            KEEP=keep,
            HELD=tile.held,
            BM=tile.windows,
            STAGES=tile.stages,
            PRECISION=way.precision,
            QUICK=way.quick,
            num_warps=tile.warps,
        )
        ctx.way = way
        ctx.save_for_backward(x, ih, hh, b_ih, h0, y, factors, carry)
        return final.flatten(-2)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, ih, hh, b_ih, h0, y, slots, carry = ctx.saved_tensors
        way: FusedOptions | None = ctx.way
        if way is None:
            raise RuntimeError("the way back overwrites what it reads and runs once")
        ctx.way = None
        K, T, B = x.shape[:3]
        W, H = hh.shape[1], hh.shape[3]
        tile = way.backward
        dh0 = dc0 = slots
        if h0 is not None:
            dh0, dc0 = torch.empty(2, K, W, B, H, device=x.device).unbind()
        launch(
            fused_kernels.backward,
            (-(-B // tile.windows), K * W),
            slots,
            carry,
            hh,
            dy.to(way.dtype).contiguous(),
            dh0,
            dc0,
            T,
            B,
            hh.stride(0),
            H=H,
            W=W,
            LSTM=way.kind == "lstm",
            STATES=h0 is not None,
            LAST=way.last,
            HELD=tile.held,
            BM=tile.windows,
            STAGES=tile.stages,
            PRECISION=way.precision,
            num_warps=tile.warps,
        )
        dx = None
        if ctx.needs_input_grad[1]:
            dx = slots.view(K, T * B, -1) @ _interleaved(ih, way)
            dx = dx.view(x.shape)
        d_ih, d_hh, total = _weight_gradients(way, slots, x, y, h0)
        if way.kind == "lstm":
            d_b_ih = d_b_hh = total.reshape(b_ih.shape)
        else:
            d_b_ih = total[:, :, :3].roll(-1, dims=2).view(b_ih.shape)
            d_b_hh = total[:, :, 1:].reshape(b_ih.shape)
        return (
            None,
            dx,
            d_ih.reshape(ih.shape),
            d_hh.reshape(hh.shape),
            d_b_ih,
            d_b_hh,
            dh0 if ctx.needs_input_grad[6] else None,
            dc0 if ctx.needs_input_grad[7] else None,
        )


def _packed(weight: Tensor) -> Tensor:
    """A weight whose lanes may lie apart, but each in one piece."""
    return weight if weight[0].is_contiguous() else weight.contiguous()


def _padded(size: int) -> int:
    """The next power of two, and at least what a product takes."""
    return max(16, 1 << (size - 1).bit_length())


def _interleaved(ih: Tensor, way: FusedOptions) -> Tensor:
    """Input weights [K, W, G * H, D] in the order of the slots' gradients, [K, W * H * 4, D]."""
    K, D = ih.shape[0], ih.shape[3]
    gates = ih.unflatten(2, (4 if way.kind == "lstm" else 3, -1)).to(way.dtype)
    if way.kind == "gru":
        nothing = torch.zeros_like(gates[:, :, :1])
        gates = torch.cat([gates[:, :, 2:], gates[:, :, :2], nothing], dim=2)
    found: Tensor = gates.transpose(2, 3).reshape(K, -1, D)
    return found


def _weight_gradients(
    way: FusedOptions, slots: Tensor, x: Tensor, y: Tensor, h0: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of w_ih [K, W, G, H, D] and w_hh [K, W, G, H, H], and the slots' sums [K, W, 4, H].

    The slots are read once where x is narrow, and once for each block of inputs where it is not.
    """
    K, T, B, W, H, _ = slots.shape
    D, gates, rows = x.shape[-1], 4 if way.kind == "lstm" else 3, T * B
    narrow = D < COLUMNS // 2  # with room for a column of ones
    wide, height = min(SLOTS * H, COLUMNS), ROWS * 2 // way.dtype.itemsize
    columns = SLOTS * H // wide
    parts = max(1, min(PROGRAMS // (K * W * columns), rows // (4 * height)))
    share = -(-rows // (parts * height)) * height
    parts = -(-rows // share)
    shapes = [(K, W, gates, H, D), (K, W, gates, H, H), (K, W, SLOTS, H)]
    sizes = [math.prod(shape) for shape in shapes]
    out = torch.empty(parts, sum(sizes), device=slots.device)

    def add_up(blocks: int, width: int, *, h: bool, x_too: bool) -> None:
        of_x, of_h, of_slots = out.split(sizes, dim=1)
        launch(
            weight_gradients.weight_gradients,
            (parts, columns * blocks, K * W),
            slots,
            y,
            x,
            of_h,
            of_x,
            of_slots,
            rows,
            B,
            share,
            out.shape[1],
            H=H,
            D=D,
            DP=width,
            W=W,
            LSTM=way.kind == "lstm",
            OF_H=h,
            OF_X=x_too,
            PRECISION=way.precision,
            BR=height,
            BC=wide,
            num_warps=8,
            num_stages=3,
        )

    if narrow:
        add_up(1, _padded(D + 1), h=True, x_too=True)
    else:
        add_up(1, 16, h=True, x_too=False)
        add_up(-(-D // COLUMNS), COLUMNS, h=False, x_too=True)
    total = out[0] if parts == 1 else out.sum(0)
    of_x, of_h, of_slots = (t.view(s) for t, s in zip(total.split(sizes), shapes, strict=True))
    if h0 is not None:
        of_h = of_h + _of_initial(slots, h0, gates)
    return of_x, of_h, of_slots


def _of_initial(slots: Tensor, h0: Tensor, gates: int) -> Tensor:
    """The initial state's part of the gradient of w_hh, from each direction's first step."""
    first = torch.stack([slots[:, -way, :, way] for way in range(slots.shape[3])], dim=1)
    of_slots = torch.einsum("kwbhs,kwbj->kwshj", first.float(), h0.float())
    return of_slots if gates == SLOTS else of_slots[:, :, 1:]
