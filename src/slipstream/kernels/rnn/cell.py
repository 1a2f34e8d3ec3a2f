"""The steps of a recurrent layer on a GPU: each is one batched product by cuBLAS, and one kernel
for all that is not a product. `stepwise` says what goes in and out; `eager` is the same in PyTorch.

A kernel takes BLOCK of the B * H units of one lane and one direction, at step t of the direction's
own order. `x`, `out` and `dy` lie in the order of time; they are read and written where they are.

    product  [L, B, G * H]      of h and w_hh; backward [L, B, H], of the slots' gradients and w_hh
    x        [K, T, B, W, G, H] the products with x
    bias     [L, 4, H]          of each slot
    state    [L, B, H]          fp32: LSTM c, GRU h; backward dc, and the passed-on part of dh
    y        [L, T, B, H]       outputs, which the next step's product reads
    out      [K, T, B, W, H]    IN_TIME_ORDER, for two directions: outputs again, in order of time
    slots    [L, T, B, 4, H]    factors, which `backward` overwrites with the slots' gradients
    carry    [L, T, B, 2, H]    of an LSTM, [L, T, B, 1, H] of a GRU

`slots` may be the memory of `x`, where they lie alike: every place is read before it is written. A
kernel reads all that it needs before it writes: no read may overtake a write that could be to the
same place, and each would wait for memory by itself.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.kernels.launch import launch
from slipstream.kernels.rnn.eager import select_last
from slipstream.kernels.rnn.weights import StepwiseOptions

BLOCK, WARPS = 512, 4
"""Units of a program: four to a thread, and about as many programs as a large GPU has processors
for 256 windows of 256 units"""


@triton.jit
def tanh(x, FAST: tl.constexpr):
    """FAST is the GPU's own instruction, with an error of 2^-11: as much as fp16 rounds off."""
    if FAST:
        return tl.inline_asm_elementwise(
            "tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    return 2 * tl.sigmoid(2 * x) - 1


@triton.jit
def sigmoid(x, FAST: tl.constexpr):
    """FAST goes through tanh, which takes one instruction where exp and a division take several."""
    if FAST:
        return 0.5 * tanh(0.5 * x, FAST) + 0.5
    return tl.sigmoid(x)


@triton.jit
def _locate(B, H: tl.constexpr, BLOCK: tl.constexpr):
    """Return the number of the program's recurrence (lane and direction), its units among B * H,
    and a mask of the existing ones. The former is int64, since offsets of a whole recurrence are
    large; offsets within it are int32."""
    element = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    return tl.program_id(1).to(tl.int64), element, element < B * H


@triton.jit
def _time_of(direction, t, T):
    """Return the position in time of a direction's step t; the second direction starts at the
    end."""
    return t + direction * (T - 1 - 2 * t)


@triton.jit
def _read(pointer, valid):
    return tl.load(pointer, mask=valid, other=0.0).to(tl.float32)


@triton.jit
def _write(pointer, value, valid):
    tl.store(pointer, value.to(pointer.dtype.element_ty), mask=valid)


@triton.jit(do_not_specialize=["t", "T", "B"])
def lstm_forward(
    product,
    x,
    bias,
    state,
    y,
    out,
    slots,
    carry,
    t,
    T,
    B,
    H: tl.constexpr,
    W: tl.constexpr,
    IN_TIME_ORDER: tl.constexpr,
    SAVE: tl.constexpr,
    FAST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute one step of an LSTM. At the first step the states are zero, and there is no product
    yet. SAVE writes the values that the backward pass needs."""
    recurrence, element, valid = _locate(B, H, BLOCK)
    lane, direction = recurrence // W, recurrence % W
    row, unit = element // H, element % H
    step_row = (lane * T + _time_of(direction, t, T)) * B * W + direction
    x_at = x + step_row * (4 * H) + row * (W * 4 * H) + unit
    bias_at = bias + recurrence * (4 * H) + unit
    p_0 = _read(x_at, valid) + _read(bias_at, valid)
    p_1 = _read(x_at + H, valid) + _read(bias_at + H, valid)
    p_2 = _read(x_at + 2 * H, valid) + _read(bias_at + 2 * H, valid)
    p_3 = _read(x_at + 3 * H, valid) + _read(bias_at + 3 * H, valid)
    state_at = state + recurrence * B * H + element
    product_at = product + recurrence * B * (4 * H) + row * (4 * H) + unit
    before = valid & (t > 0)
    p_0 += _read(product_at, before)
    p_1 += _read(product_at + H, before)
    p_2 += _read(product_at + 2 * H, before)
    p_3 += _read(product_at + 3 * H, before)
    c = _read(state_at, before)

    i, f = sigmoid(p_0, FAST), sigmoid(p_1, FAST)
    g, o = tanh(p_2, FAST), sigmoid(p_3, FAST)
    new = f * c + i * g
    tanh_c = tanh(new, FAST)
    h = o * tanh_c
    step = (recurrence * T + t) * B
    _write(state_at, new, valid)
    _write(y + step * H + element, h, valid)
    if IN_TIME_ORDER:
        _write(out + step_row * H + row * (W * H) + unit, h, valid)
    if SAVE:
        slots_at = slots + step * (4 * H) + row * (4 * H) + unit
        _write(slots_at, g * i * (1 - i), valid)
        _write(slots_at + H, c * f * (1 - f), valid)
        _write(slots_at + 2 * H, i * (1 - g * g), valid)
        _write(slots_at + 3 * H, h * (1 - o), valid)
        carry_at = carry + step * (2 * H) + row * (2 * H) + unit
        _write(carry_at, o - h * tanh_c, valid)
        _write(carry_at + H, f, valid)


@triton.jit(do_not_specialize=["t", "T", "B"])
def gru_forward(
    product,
    x,
    bias,
    state,
    y,
    out,
    slots,
    carry,
    t,
    T,
    B,
    H: tl.constexpr,
    W: tl.constexpr,
    IN_TIME_ORDER: tl.constexpr,
    SAVE: tl.constexpr,
    FAST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute one step of a GRU, as `lstm_forward` does for an LSTM."""
    recurrence, element, valid = _locate(B, H, BLOCK)
    lane, direction = recurrence // W, recurrence % W
    row, unit = element // H, element % H
    step_row = (lane * T + _time_of(direction, t, T)) * B * W + direction
    x_at = x + step_row * (3 * H) + row * (W * 3 * H) + unit
    bias_at = bias + recurrence * (4 * H) + unit
    from_x = _read(x_at, valid) + _read(bias_at, valid)
    p_r = _read(x_at + H, valid) + _read(bias_at + H, valid)
    p_z = _read(x_at + 2 * H, valid) + _read(bias_at + 2 * H, valid)
    from_h = _read(bias_at + 3 * H, valid)
    state_at = state + recurrence * B * H + element
    product_at = product + recurrence * B * (3 * H) + row * (3 * H) + unit
    before = valid & (t > 0)
    p_r += _read(product_at, before)
    p_z += _read(product_at + H, before)
    from_h += _read(product_at + 2 * H, before)
    h = _read(state_at, before)

    r, z = sigmoid(p_r, FAST), sigmoid(p_z, FAST)
    n = tanh(from_x + r * from_h, FAST)
    new = n + z * (h - n)
    step = (recurrence * T + t) * B
    _write(state_at, new, valid)
    _write(y + step * H + element, new, valid)
    if IN_TIME_ORDER:
        _write(out + step_row * H + row * (W * H) + unit, new, valid)
    if SAVE:
        of_x = (1 - z) * (1 - n * n)
        slots_at = slots + step * (4 * H) + row * (4 * H) + unit
        _write(slots_at, of_x, valid)
        _write(slots_at + H, of_x * r * (1 - r) * from_h, valid)
        _write(slots_at + 2 * H, (h - n) * z * (1 - z), valid)
        _write(slots_at + 3 * H, of_x * r, valid)
        _write(carry + step * H + element, z, valid)


@triton.jit
def _read_dh(
    product,
    dy,
    t,
    T,
    B,
    dy_lane,
    dy_time,
    dy_row,
    H: tl.constexpr,
    W: tl.constexpr,
    LAST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Return the gradient of a step's h, in fp32: from the step after it and from its output."""
    recurrence, element, valid = _locate(B, H, BLOCK)
    lane, direction = recurrence // W, recurrence % W
    row, unit = (element // H).to(tl.int64), element % H  # rows of dy may lie far apart
    after = t + 1 < T
    has_output = valid
    if LAST:
        has_output = valid & (t + 1 == T)
    dy_at = dy + lane * dy_lane + _time_of(direction, t, T) * dy_time
    dy_at += direction * H + row * dy_row + unit
    return _read(product + recurrence * B * H + element, valid & after) + _read(dy_at, has_output)


@triton.jit(do_not_specialize=["t", "T", "B"])
def lstm_backward(
    product,
    dy,
    slots,
    carry,
    state,
    t,
    T,
    B,
    dy_lane,
    dy_time,
    dy_row,
    H: tl.constexpr,
    W: tl.constexpr,
    LAST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute the gradients of one LSTM step. With LAST, dy is the gradient of the last step's
    output; `dy_lane`, `dy_time` and `dy_row` are dy's strides in elements."""
    recurrence, element, valid = _locate(B, H, BLOCK)
    row, unit = element // H, element % H
    dh = _read_dh(product, dy, t, T, B, dy_lane, dy_time, dy_row, H, W, LAST, BLOCK)
    step = (recurrence * T + t) * B
    state_at = state + recurrence * B * H + element
    slots_at = slots + step * (4 * H) + row * (4 * H) + unit
    carry_at = carry + step * (2 * H) + row * (2 * H) + unit
    a_0, a_1 = _read(slots_at, valid), _read(slots_at + H, valid)
    a_2, a_3 = _read(slots_at + 2 * H, valid), _read(slots_at + 3 * H, valid)
    a_c, f = _read(carry_at, valid), _read(carry_at + H, valid)
    dc = dh * a_c
    dc += _read(state_at, valid & (t + 1 < T))
    _write(slots_at, dc * a_0, valid)
    _write(slots_at + H, dc * a_1, valid)
    _write(slots_at + 2 * H, dc * a_2, valid)
    _write(slots_at + 3 * H, dh * a_3, valid)
    _write(state_at, dc * f, valid)


@triton.jit(do_not_specialize=["t", "T", "B"])
def gru_backward(
    product,
    dy,
    slots,
    carry,
    state,
    t,
    T,
    B,
    dy_lane,
    dy_time,
    dy_row,
    H: tl.constexpr,
    W: tl.constexpr,
    LAST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute the gradients of one GRU step, as `lstm_backward` does for an LSTM."""
    recurrence, element, valid = _locate(B, H, BLOCK)
    row, unit = element // H, element % H
    dh = _read_dh(product, dy, t, T, B, dy_lane, dy_time, dy_row, H, W, LAST, BLOCK)
    step = (recurrence * T + t) * B
    state_at = state + recurrence * B * H + element
    slots_at = slots + step * (4 * H) + row * (4 * H) + unit
    a_0, a_1 = _read(slots_at, valid), _read(slots_at + H, valid)
    a_2, a_3 = _read(slots_at + 2 * H, valid), _read(slots_at + 3 * H, valid)
    z = _read(carry + step * H + element, valid)
    dh += _read(state_at, valid & (t + 1 < T))
    _write(slots_at, dh * a_0, valid)
    _write(slots_at + H, dh * a_1, valid)
    _write(slots_at + 2 * H, dh * a_2, valid)
    _write(slots_at + 3 * H, dh * a_3, valid)
    _write(state_at, dh * z, valid)


def allocate_outputs(
    products: Tensor, H: int, options: StepwiseOptions, *, save: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Allocate `y`, `out`, `slots` and `carry`; `y` stands in for tensors that are not needed."""
    K, T, B, W, size = products.shape
    y = products.new_empty(K * W, T, B, H)
    out = products.new_empty(K, T, B, W * H) if W == 2 and not options.last else y
    slots = carry = y
    if save:
        alike = options.is_lstm and W == 1
        slots = products.view(K, T, B, size) if alike else y.new_empty(K * W, T, B, 4 * H)
        carry = y.new_empty(K * W, T, B, 2 * H if options.is_lstm else H)
    return y, out, slots, carry


def forward(
    products: Tensor, hh: Tensor, bias: Tensor, options: StepwiseOptions, *, save: bool
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Return the output, y, and what `backward` needs, which may use the memory of `products`."""
    _, T, B, W, size = products.shape
    L, _, H = hh.shape
    y, out, slots, carry = allocate_outputs(products, H, options, save=save)
    state = bias.new_empty(L, B, H)
    product = products.new_empty(L, B, size)
    kernel, across = lstm_forward if options.is_lstm else gru_forward, hh.mT
    for t in range(T):
        if t:
            torch.bmm(y[:, t - 1], across, out=product)
        launch(
            kernel,
            (triton.cdiv(B * H, BLOCK), L),
            *(product, products, bias, state, y, out, slots, carry, t, T, B),
            H=H,
            W=W,
            IN_TIME_ORDER=W == 2 and not options.last,
            SAVE=save,
            FAST=options.fast_tanh,
            BLOCK=BLOCK,
            num_warps=WARPS,
        )
    return (select_last(y, W) if options.last else out), y, [slots, carry] if save else []


def backward(
    dy: Tensor, hh: Tensor, saved: Sequence[Tensor], options: StepwiseOptions, *, T: int, W: int
) -> Tensor:
    """Return the slots' gradients, written over what `forward` saved."""
    slots, carry = saved
    L, _, B, _ = slots.shape
    H = hh.shape[2]
    dy = dy if dy.stride(-1) == 1 else dy.contiguous()
    state = torch.empty(L, B, H, dtype=torch.float32, device=dy.device)
    product = slots.new_empty(L, B, H)
    of_h = slots if options.is_lstm else slots[..., H:]
    kernel = lstm_backward if options.is_lstm else gru_backward
    strides = dy.stride(0), 0 if options.last else dy.stride(1), dy.stride(-2)
    for t in reversed(range(T)):
        if t + 1 < T:
            torch.bmm(of_h[:, t + 1], hh, out=product)
        launch(
            kernel,
            (triton.cdiv(B * H, BLOCK), L),
            *(product, dy, slots, carry, state, t, T, B, *strides),
            H=H,
            W=W,
            LAST=options.last,
            BLOCK=BLOCK,
            num_warps=WARPS,
        )
    return slots
