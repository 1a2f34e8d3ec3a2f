"""Recurrent layers of up to 128 units in half precision, by the kernels of `rnn.cu`: which of their
variants runs, and autograd. Shapes and slots as in `kernels.rnn`.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from slipstream.kernels.cuda import program as programs
from slipstream.kernels.launch import is_triton_usable, launch_program, load_programs
from slipstream.kernels.rnn import gradients
from slipstream.kernels.rnn.weights import ONE_BACKWARD, LayerWeights, unpad_units

SOURCE = Path(__file__).with_name("rnn.cu")
KERNELS = ("pack_layer", "rnn_forward", "rnn_backward")
SLOTS = 4
MAX_UNITS = 128
UNITS = 16
"""Units of a warp"""
COLUMNS, ONES = 16, 2
"""Inputs that one matrix instruction takes, and columns of ones that carry the biases"""
MAX_BLOCKS = {16: 4, 32: 4, 48: 4, 64: 4, 80: 2, 96: 2, 112: 1, 128: 1}
"""By units: blocks of so many inputs whose weights stay in registers beside the recurrent ones"""
AHEAD, LEAST_AHEAD = 4, 2
"""Steps by which memory is read ahead; the second number where shared memory is small"""
TURING, AMPERE, HOPPER = 75, 80, 90
WINDOWS = (4, 8, 16)
"""The windows of a block that there are"""
FORWARD_COSTS = {4: 0.47, 8: 0.68, 16: 1.22}
BACKWARD_COSTS = {4: 0.53, 8: 0.79, 16: 2.0}
"""Microseconds of a step by the windows of a block: 128 units on an H200"""
LAUNCH_COST = 8.0
"""Microseconds of a launch beside its steps: it reads the weights, and waits for the last block"""
PACK_THREADS, MAX_PACK_BLOCKS = 256, 2048
_X_TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}


class GpuLimits(NamedTuple):
    """What the variants depend on."""

    architecture: int
    processors: int
    room: int
    """Bytes of shared memory that a block may take"""


@cache
def get_limits(device: torch.device) -> GpuLimits:
    gpu: Any = torch.cuda.get_device_properties(device)
    return GpuLimits(
        programs.get_architecture(device),
        gpu.multi_processor_count,
        gpu.shared_memory_per_block_optin,
    )


@dataclass(frozen=True)
class LayerShape:
    """What a variant of the kernels is compiled for."""

    kind: str
    units: int
    """A multiple of 16"""
    directions: int
    inputs: int
    last: bool
    """Return each direction's last output only"""
    states: bool
    """It starts from states that are given"""
    dtype: torch.dtype

    @property
    def is_lstm(self) -> bool:
        return self.kind == "lstm"

    @property
    def gates(self) -> int:
        return 4 if self.is_lstm else 3

    @property
    def threads(self) -> int:
        return 2 * self.units

    @property
    def blocks(self) -> int:
        """Blocks of inputs that the kernel multiplies itself; 0 where it reads their products"""
        needed = -(-self.inputs // COLUMNS)
        return needed if needed <= MAX_BLOCKS[self.units] else 0

    @property
    def has_ones(self) -> bool:
        """Whether two columns of ones fit beside the inputs"""
        return self.inputs + ONES <= COLUMNS * self.blocks

    def list_macros(self, kernel: str, *, save: bool) -> dict[str, int]:
        return {
            "KERNEL": KERNELS.index(kernel) + 1,
            "GRU": int(not self.is_lstm),
            "H": self.units,
            "W": self.directions,
            "KX": self.blocks,
            "ONES": int(self.has_ones),
            "BF16": int(self.dtype == torch.bfloat16),
            "SAVE": int(save),
        }


class Tile(NamedTuple):
    """How the blocks of a launch work."""

    windows: int
    """Of a block"""
    ahead: int
    bulk: bool
    shared: int
    """Bytes of shared memory"""

    def list_macros(self, shape: LayerShape) -> dict[str, int]:
        return {
            "NW": self.windows,
            "AHEAD": self.ahead,
            "BULK": int(self.bulk),
            "LAST": int(shape.last),
            "STATES": int(shape.states),
        }


class Launch(NamedTuple):
    """A launch of a kernel for some of the windows."""

    tile: Tile
    begin: int
    """Its first window"""
    blocks: int
    """Of each recurrence"""


def count_forward_bytes(shape: LayerShape, windows: int, ahead: int) -> int:
    """Return the bytes of shared memory of `rnn_forward`."""
    groups, per_thread, rows, pad, loads = _divide_block(windows)
    blocks = -(-shape.units // 32)
    row = 32 * loads * -(-2 * blocks // loads) + pad
    stages = 0 if shape.blocks else ahead * per_thread * shape.threads * 16
    return 2 * groups * rows * row + stages


def count_backward_bytes(shape: LayerShape, windows: int, ahead: int, *, bulk: bool) -> int:
    """Return the bytes of shared memory of `rnn_backward`."""
    H = shape.units
    groups, per_thread, rows, pad, _ = _divide_block(windows)
    exchange = 0 if H % 32 else groups * shape.threads * 16
    if bulk:
        apart = 32 if windows == 4 else 16
        stage = windows * (8 * H + apart + 2 * (2 * H + apart))
        return 2 * groups * rows * (8 * H + pad) + exchange + 128 + ahead * stage
    return 2 * groups * rows * (8 * H + pad) + exchange + ahead * per_thread * shape.threads * 24


def _divide_block(windows: int) -> tuple[int, int, int, int, int]:
    """Return the groups of 8 columns, the windows of a thread, the rows of a group and the bytes
    between them, and the instructions that a read serves, as rnn.cu has them."""
    groups = -(-windows // 8)
    return (groups, 1, 4, 32, 4) if windows == 4 else (groups, 2 * groups, 8, 128, 2)


@lru_cache
def choose_launches(
    shape: LayerShape,
    recurrences: int,
    num_windows: int,
    num_steps: int,
    gpu: GpuLimits,
    *,
    is_backward: bool,
) -> tuple[Launch, ...]:
    """Return the launches of a pass that are the fastest by the number of blocks which run one
    after the other on each processor: one, or where its last round would leave most processors
    idle, one of all other rounds and one with another tile. () where none fits."""
    costs = BACKWARD_COSTS if is_backward else FORWARD_COSTS
    at_once = gpu.processors * max(1, MAX_UNITS // shape.units)
    tiles = [_fit_tile(shape, windows, gpu, is_backward=is_backward) for windows in WINDOWS]
    fitting = [tile for tile in tiles if tile is not None]

    def count_rounds(blocks: int) -> int:
        return -(-blocks * recurrences // at_once)

    def compute_cost(launches: tuple[Launch, ...]) -> float:
        step = sum(count_rounds(blocks) * costs[tile.windows] for tile, _, blocks in launches)
        return step * num_steps + LAUNCH_COST * len(launches)

    choices: list[tuple[Launch, ...]] = []
    for tile in fitting:
        blocks = -(-num_windows // tile.windows)
        choices.append((Launch(tile, 0, blocks),))
        fewer = (count_rounds(blocks) - 1) * at_once // recurrences
        begin = fewer * tile.windows
        for other in fitting if fewer else ():
            more = -(-(num_windows - begin) // other.windows)
            choices.append((Launch(tile, 0, fewer), Launch(other, begin, more)))
    return min(choices, key=compute_cost, default=())


def _fit_tile(shape: LayerShape, windows: int, gpu: GpuLimits, *, is_backward: bool) -> Tile | None:
    if not is_backward and windows > 8 and shape.blocks > 1:
        return None  # too many registers
    bulk = is_backward and gpu.architecture >= HOPPER and windows > 4
    for ahead in (AHEAD, AHEAD - 1, LEAST_AHEAD):
        if is_backward:
            shared = count_backward_bytes(shape, windows, ahead, bulk=bulk)
        else:
            shared = count_forward_bytes(shape, windows, ahead)
        if shared <= gpu.room:
            return Tile(windows, ahead, bulk, shared)
    return None


class LayerOptions(NamedTuple):
    """How a layer runs."""

    shape: LayerShape
    forward: tuple[Launch, ...]
    backward: tuple[Launch, ...]

    def find_packing(self, x: Tensor, *, save: bool) -> Any:
        """Return the program that has `pack_layer`."""
        macros = self.shape.list_macros("pack_layer", save=save)
        return programs.get_program(SOURCE, macros | {"X_TYPE": _X_TYPES[_get_x_type(x)]}, x.device)

    def find_pass(self, kernel: str, tile: Tile, device: torch.device, *, save: bool) -> Any:
        """Return the program that has `rnn_forward` or `rnn_backward` for a tile."""
        macros = self.shape.list_macros(kernel, save=save) | tile.list_macros(self.shape)
        return programs.get_program(SOURCE, macros, device)

    def run_pass(
        self, kernel: str, recurrences: int, device: torch.device, *arguments: Any, save: bool
    ) -> None:
        """Run `rnn_forward` or `rnn_backward` for all windows."""
        for tile, begin, blocks in self.forward if kernel == "rnn_forward" else self.backward:
            program = self.find_pass(kernel, tile, device, save=save)
            grid, threads = (blocks, recurrences), self.shape.threads
            launch_program(program, kernel, grid, threads, tile.shared, *arguments, begin)


def choose_options(
    kind: str, last: bool, x: Tensor, weights: LayerWeights, dtype: torch.dtype, *, states: bool
) -> LayerOptions | None:
    """Return the options for a layer on the GPU that holds it, x [K, T, B, D]; None where these
    kernels do not fit."""
    K, T, B, D = x.shape
    W, H = weights.hh.shape[1], weights.hh.shape[3]
    gpu = get_limits(x.device)
    if explain_unusable(x.device) is not None:
        return None
    if (
        H > MAX_UNITS
        or dtype.itemsize != 2
        or (dtype == torch.bfloat16 and gpu.architecture < AMPERE)
    ):
        return None
    units = -(-H // UNITS) * UNITS
    shape = LayerShape(kind, units, W, D, last, states, dtype)
    forward = choose_launches(shape, K * W, B, T, gpu, is_backward=False)
    backward = choose_launches(shape, K * W, B, T, gpu, is_backward=True)
    return LayerOptions(shape, forward, backward) if forward and backward else None


_failures: dict[torch.device, str] = {}
"""By GPU: why these kernels do not run on it"""


def explain_unusable(device: torch.device) -> str | None:
    """Say why these kernels cannot run on a GPU; None where they can, as far as is known."""
    if device in _failures:
        return _failures[device]
    if programs.find_compiler() is None:
        return "NVRTC, which comes with PyTorch's CUDA wheels, was not found"
    if programs.find_driver() is None:
        return "the driver's library was not found"
    if get_limits(device).architecture < TURING:
        return "the GPU is older than Turing"
    return None


def prepare(options: LayerOptions, x: Tensor, *, save: bool) -> bool:
    """Compile and load what a layer of x needs, or while precompiling request it; return whether
    that worked."""
    passes = [("rnn_forward", launch.tile) for launch in options.forward]
    passes += [("rnn_backward", launch.tile) for launch in options.backward if save]
    try:
        load_programs(
            [
                options.find_packing(x, save=save),
                *(options.find_pass(*which, x.device, save=save) for which in passes),
            ]
        )
    except programs.CudaProgramError as error:
        _failures[x.device] = str(error)
        return False
    return True


def _get_x_type(x: Tensor) -> torch.dtype:
    return x.dtype if x.dtype in _X_TYPES else torch.float32


def run_layer(
    options: LayerOptions,
    x: Tensor,
    weights: LayerWeights,
    h0: Tensor | None = None,
    c0: Tensor | None = None,
) -> Tensor:
    """Map x [K, T, B, D] to [K, T, B, W * H], or where the shape says `last` to [K, B, W * H] in
    fp32; states are [K, W, B, H]."""
    out, _, _ = _run(options, x, weights, h0, c0)
    return out


def continue_layer(
    options: LayerOptions, x: Tensor, weights: LayerWeights, h0: Tensor, c0: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Map x and the states before it to the outputs and the states after it, in fp32."""
    return _run(options, x, weights, h0, c0)


def _run(
    options: LayerOptions, x: Tensor, weights: LayerWeights, h0: Tensor | None, c0: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    H, units = weights.hh.shape[3], options.shape.units
    x = x.to(_get_x_type(x))
    floats = (weight.float() for weight in weights)
    if h0 is not None:
        c0 = torch.zeros_like(h0) if c0 is None and options.shape.is_lstm else c0
        h0, c0 = (_pad_state(state, units - H) for state in (h0, c0))
    out, after_h, after_c = _CudaLayer.apply(options, x, *floats, h0, c0)  # type: ignore[no-untyped-call]
    if units > H:
        out = unpad_units(out, H, units - H)
    return out, after_h[..., :H], after_c[..., :H] if options.shape.is_lstm else None


def _pad_state(state: Tensor | None, more: int) -> Tensor | None:
    if state is None:
        return None
    return torch.nn.functional.pad(state.float(), (0, more)).contiguous()


class _Weights(ctypes.Structure):
    """`Weights` in rnn.cu."""

    tensors: LayerWeights
    """Whose memory it points to"""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("ih", "hh", "b_ih", "b_hh")),
        *((f"{name}_lane", ctypes.c_longlong) for name in ("ih", "hh", "b_ih", "b_hh")),
        ("units", ctypes.c_int),
        ("inputs", ctypes.c_int),
    )


class PackedLayer(NamedTuple):
    """What `pack_layer` makes of the weights and of x."""

    forward_u: Tensor
    forward_v: Tensor | None
    bias: Tensor | None
    by_slot: Tensor | None
    """[K, W * H * 4, D]"""
    backward_u: Tensor | None
    x: Tensor
    """[K, T * B, columns]"""


def pack_layer(
    options: LayerOptions, x: Tensor, weights: LayerWeights, *, save: bool, with_dx: bool
) -> PackedLayer:
    """Return the weights in the order in which threads read them, and x as the kernels read it;
    `with_dx` where the gradient of x is wanted."""
    shape, (K, T, B, D) = options.shape, x.shape
    W, H, size, blocks = shape.directions, shape.units, shape.dtype, shape.blocks
    warps, tiles, columns = shape.units // UNITS, shape.gates, COLUMNS * shape.blocks

    def allocate(*sizes: int, dtype: torch.dtype = size) -> Tensor:
        return torch.empty(sizes, dtype=dtype, device=x.device)

    forward_u = allocate(K * W, warps, 2 * -(-H // 32), tiles, 32, 8)
    forward_v = allocate(K * W, warps, blocks, SLOTS, 32, 8) if blocks else None
    bias = None if shape.has_ones else allocate(K * W, H, SLOTS, dtype=torch.float32)
    by_slot = allocate(K, W * H * SLOTS, D) if with_dx or not blocks else None
    backward_u = allocate(K * W, warps, H // 4, 32, 8) if save else None
    is_packed = bool(blocks) and not (x.dtype == size and columns == D)
    rows = allocate(K, T * B, columns) if is_packed else x.to(size).reshape(K, T * B, D)
    lanes = [weight.stride(0) for weight in weights]
    described = _Weights(*(weight.data_ptr() for weight in weights), *lanes, weights.hh.shape[3], D)
    described.tensors = weights
    results = (forward_u, forward_v, bias, by_slot, backward_u, rows if is_packed else None)
    items = sum(
        result.numel() // per_item
        for result, per_item in zip(results, (8, 8, 1, 1, 8, COLUMNS), strict=True)
        if result is not None
    )
    blocks = min(-(-items // PACK_THREADS), MAX_PACK_BLOCKS)
    chosen = options.find_packing(x, save=save)
    num_rows = ctypes.c_longlong(K * T * B)
    arguments = described, x, *results, K, num_rows
    launch_program(chosen, "pack_layer", (blocks, 1), PACK_THREADS, 0, *arguments)
    return PackedLayer(forward_u, forward_v, bias, by_slot, backward_u, rows)


class _CudaLayer(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        options: LayerOptions,
        x: Tensor,
        ih: Tensor,
        hh: Tensor,
        b_ih: Tensor,
        b_hh: Tensor,
        h0: Tensor | None,
        c0: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        shape = options.shape
        (K, T, B, _), W, H = x.shape, shape.directions, shape.units
        save = any(ctx.needs_input_grad)
        x = x.contiguous()
        weights = LayerWeights(*map(_pack_lanes, (ih, hh, b_ih, b_hh)))
        packed = pack_layer(options, x, weights, save=save, with_dx=ctx.needs_input_grad[1])
        source = packed.x
        if not shape.blocks:
            assert packed.by_slot is not None
            source = torch.bmm(source, packed.by_slot.mT)

        def allocate(*sizes: int, dtype: torch.dtype = shape.dtype) -> Tensor:
            return torch.empty(sizes, dtype=dtype, device=x.device)

        y = allocate(K, T, B, W, H) if save or not shape.last else None
        slots = allocate(K, T, B, W, H, SLOTS) if save else None
        cells = allocate(K, T, B, W, H) if save and shape.is_lstm else None
        last = allocate(K, B, W, H, dtype=torch.float32) if shape.last else None
        states = K, W, B, H if shape.states else 0
        after_h, after_c = allocate(2, *states, dtype=torch.float32).unbind()
        inputs = source, packed.forward_u, packed.forward_v, packed.bias, h0, c0
        results = y, slots, cells, last, after_h, after_c
        options.run_pass("rnn_forward", K * W, x.device, *inputs, *results, T, B, save=save)
        ctx.options = options
        ctx.save_for_backward(packed.x, packed.by_slot, packed.backward_u, h0, c0, y, slots, cells)
        ctx.sizes = x.shape, hh.shape, x.dtype
        ctx.mark_non_differentiable(after_h, after_c)
        out = last if last is not None else y
        assert out is not None
        return out.flatten(-2), after_h, after_c

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        options: LayerOptions | None = ctx.options
        if options is None:
            raise RuntimeError(ONE_BACKWARD)
        ctx.options = None
        rows, by_slot, backward_u, h0, c0, y, slots, cells = ctx.saved_tensors
        shape = options.shape
        x_shape, hh_shape, x_dtype = ctx.sizes
        K, T, B, D = x_shape
        W, H = shape.directions, shape.units
        dy = dy.to(torch.float32 if shape.last else shape.dtype).contiguous()
        dh0 = dc0 = None
        if shape.states:
            dh0, dc0 = torch.empty(2, K, W, B, H, device=dy.device).unbind()
        inputs = slots, y if cells is None else cells, backward_u, dy, h0, c0
        options.run_pass("rnn_backward", K * W, dy.device, *inputs, dh0, dc0, T, B, save=True)
        dx = None
        if ctx.needs_input_grad[1]:
            dx = (slots.view(K, T * B, -1) @ by_slot).view(x_shape).to(x_dtype)
        use_triton = slots.is_cuda and get_limits(slots.device).architecture >= AMPERE
        use_triton = use_triton and is_triton_usable(slots.device)
        found = gradients.sum_weight_gradients(
            slots, rows, y, h0, gates=shape.gates, inputs=D, use_triton=use_triton
        )
        weights = gradients.to_weights(found, hh_shape[3])
        return None, dx, *weights, dh0, dc0 if shape.is_lstm else None


def _pack_lanes(weight: Tensor) -> Tensor:
    """Return a weight whose lanes are each contiguous, though they may lie apart."""
    return weight if weight[0].is_contiguous() else weight.contiguous()
