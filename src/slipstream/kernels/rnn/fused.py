"""Launch the kernels of `fused_kernels`, forward and backward. Shapes as in the package."""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from slipstream.kernels.launch import launch
from slipstream.kernels.rnn import fused_kernels
from slipstream.kernels.rnn.gradients import (
    SLOTS,
    order_by_slot,
    round_up,
    sum_weight_gradients,
    to_weights,
)
from slipstream.kernels.rnn.weights import ONE_BACKWARD, LayerWeights, pad_units, unpad_units

MAX_FUSED_INPUTS = 64
"""The largest number of inputs for which the kernel can compute the product with them itself"""


class FusedTile(NamedTuple):
    """How the work of a kernel is divided."""

    windows: int
    """The windows of one program"""
    warps: int
    stages: int = 1
    """Steps whose reads are in flight"""
    resident: int = SLOTS
    """Slots whose recurrent weights stay on chip: all 4, or 1"""


class FusedOptions(NamedTuple):
    """How a layer runs."""

    kind: str
    last: bool
    """Return each direction's last output only"""
    dtype: torch.dtype
    """The type of operands and outputs; sums and cells are fp32"""
    precision: str
    """The precision of products between fp32 operands: `"ieee"` or `"tf32"`"""
    fuse_input: bool
    """The kernel makes the product with x"""
    forward: FusedTile
    backward: FusedTile
    fast_tanh: bool = True
    """tanh by the GPU's own instruction"""

    @property
    def is_lstm(self) -> bool:
        return self.kind == "lstm"

    @property
    def gates(self) -> int:
        return 4 if self.is_lstm else 3


def run_layer(
    options: FusedOptions,
    x: Tensor,
    weights: LayerWeights,
    h0: Tensor | None = None,
    c0: Tensor | None = None,
) -> Tensor:
    """Map x [K, T, B, D] to [K, T, B, W * H], or with `options.last` to [K, B, W * H].

    Units are padded to the power of two that the kernels compute anyway, so that every row of
    memory begins where wide reads and writes can; units without weights change nothing.
    """
    H = weights.hh.shape[3]
    more = round_up(H) - H
    if more:
        weights = pad_units(weights, more)
        h0, c0 = (None if s is None else F.pad(s, (0, more)) for s in (h0, c0))
    out: Tensor = _FusedLayer.apply(options, x, *weights, h0, c0)  # type: ignore[no-untyped-call]
    return unpad_units(out, H, more) if more else out


def choose_options(
    kind: str, last: bool, x: Tensor, weights: LayerWeights, dtype: torch.dtype, precision: str
) -> FusedOptions | None:
    """Return the options for a layer on the GPU that holds it; None where these kernels do not
    fit."""
    gpu = torch.cuda.get_device_properties(x.device)
    programs = -(-x.shape[2] // 16) * x.shape[0] * weights.hh.shape[1]
    tiles = fit_tiles(
        weights.hh.shape[3],
        x.shape[3],
        dtype.itemsize,
        room=gpu.shared_memory_per_block_optin if gpu.major >= 8 else 0,  # type: ignore[attr-defined]
        many=programs > gpu.multi_processor_count,
    )
    if tiles is None:
        return None
    return FusedOptions(kind, last, dtype, precision, *tiles, fast_tanh=dtype.itemsize == 2)


def fit_tiles(
    H: int, D: int, size: int, *, room: int, many: bool
) -> tuple[bool, FusedTile, FusedTile] | None:
    """Return whether w_ih fits on chip too, and the tiles of forward and backward, within `room`
    bytes of shared memory: those that were fastest on an H200, with as few bytes as necessary.
    `many` programs are more than the GPU runs at once.

    `many` programs are more than the GPU runs at once.
    """
    HP, DP = round_up(H), round_up(D)
    if HP > 128:
        return None
    warps = {16: 2, 32: 4, 64: 4, 128: 8}[HP]
    first = [FusedTile(32, 16)] if many and HP == 128 and size == 2 else []
    forwards = [
        (fuse_input, tile)
        for resident in ((SLOTS, 1) if size == 2 else (SLOTS,))
        for fuse_input in (True, False)
        for tile in [*first, *(FusedTile(16, warps, stages, resident) for stages in (3, 2, 1))]
        if tile.resident == resident
        and (tile.stages == 1 if fuse_input or resident == 1 else tile.windows == 16)
        and (not fuse_input or DP <= MAX_FUSED_INPUTS)
    ]
    backwards = [FusedTile(16, warps, 3), FusedTile(16, warps, 2), FusedTile(16, warps)]
    backwards += [FusedTile(16, warps, 1, 1)] if size == 2 else []
    for fuse_input, forward in forwards:
        if forward_bytes(forward, HP, DP if fuse_input else 0, size) <= room:
            break
    else:
        return None
    for backward in backwards:
        if backward_bytes(backward, HP, size) <= room:
            return fuse_input, forward, backward
    return None


def forward_bytes(tile: FusedTile, HP: int, DP: int, size: int) -> int:
    """Return an upper bound of the shared memory of `forward`: weights, those of DP inputs, tensors
    that move between layouts, and the products with x that are in flight."""
    moving = (4 + 4 * (tile.stages - 1)) * tile.windows
    return size * HP * ((SLOTS if tile.resident == SLOTS else 2) * HP + SLOTS * DP + moving)


def backward_bytes(tile: FusedTile, HP: int, size: int) -> int:
    """Return an upper bound of the shared memory of `backward`."""
    moving = (8 + 7 * (tile.stages - 1)) * tile.windows
    return size * HP * ((SLOTS if tile.resident == SLOTS else 2) * HP + moving)


class _FusedLayer(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        options: FusedOptions,
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
        lstm, fuse_input, tile = options.is_lstm, options.fuse_input, options.forward
        save = any(ctx.needs_input_grad)
        x, ih, hh, b_ih, b_hh = x.contiguous(), *map(_pack_lanes, (ih, hh, b_ih, b_hh))
        if tile.resident < SLOTS:
            hh = hh.to(options.dtype)
        if h0 is not None:
            h0 = h0.contiguous()
            c0 = (torch.zeros_like(h0) if c0 is None else c0).contiguous()

        def empty(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=options.dtype, device=x.device)

        y = empty(K, T, B, W, H) if save or not options.last else empty(0)
        final = empty(K, B, W, H) if options.last else y
        factors = empty(K, T, B, W, H, SLOTS) if save else y
        carry = empty(K, T, B, W, H, 2 if lstm else 1) if save else y
        source = x
        if not fuse_input:
            x = x.to(options.dtype)
            source = x.view(K, T * B, D) @ ih.to(options.dtype).flatten(1, 2).mT
        states = b_hh if h0 is None else h0, b_hh if c0 is None else c0
        launch(
            fused_kernels.forward,
            (-(-B // tile.windows), K * W),
            *(source, ih, hh, b_ih, b_hh, *states, y, final, factors, carry, T, B),
            *(weight.stride(0) for weight in (ih, hh, b_ih, b_hh)),
            D=D if fuse_input else 1,
            DP=round_up(D) if fuse_input else 16,
            H=H,
            W=W,
            LSTM=lstm,
            FUSE_INPUT=fuse_input,
            STATES=h0 is not None,
            LAST=options.last,
            SAVE=save,
            PRECISION=options.precision,
            FAST=options.fast_tanh,
            **_constants_of(tile),
        )
        ctx.options = options
        ctx.save_for_backward(x, ih, hh, h0, y, factors, carry)
        return final.flatten(-2)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, ih, hh, h0, y, slots, carry = ctx.saved_tensors
        options: FusedOptions | None = ctx.options
        if options is None:
            raise RuntimeError(ONE_BACKWARD)
        ctx.options = None
        K, T, B = x.shape[:3]
        W, H = hh.shape[1], hh.shape[3]
        tile = options.backward
        dh0 = dc0 = slots
        if h0 is not None:
            dh0, dc0 = torch.empty(2, K, W, B, H, device=x.device).unbind()
        launch(
            fused_kernels.backward,
            (-(-B // tile.windows), K * W),
            *(slots, carry, hh, dy.to(options.dtype).contiguous(), dh0, dc0, T, B, hh.stride(0)),
            H=H,
            W=W,
            LSTM=options.is_lstm,
            STATES=h0 is not None,
            LAST=options.last,
            PRECISION=options.precision,
            **_constants_of(tile),
        )
        dx = None
        if ctx.needs_input_grad[1]:
            dx = slots.view(K, T * B, -1) @ order_by_slot(ih, options.gates, H, options.dtype)
            dx = dx.view(x.shape)
        sizes = {"gates": options.gates, "inputs": x.shape[3]}
        found = sum_weight_gradients(
            slots, x, y, h0, use_triton=True, precision=options.precision, **sizes
        )
        return (
            *(None, dx, *to_weights(found, H)),
            dh0 if ctx.needs_input_grad[6] else None,
            dc0 if ctx.needs_input_grad[7] else None,
        )


def _constants_of(tile: FusedTile) -> dict[str, int]:
    constants = {"RESIDENT": tile.resident, "BM": tile.windows, "STAGES": tile.stages}
    return constants | {"num_warps": tile.warps}


def _pack_lanes(weight: Tensor) -> Tensor:
    """Return a weight whose lanes are each contiguous, though they may lie apart."""
    return weight if weight[0].is_contiguous() else weight.contiguous()
