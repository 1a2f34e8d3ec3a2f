"""LSTM and GRU layers in Triton: all time steps in one kernel, over lanes and directions.

A program takes BM windows of one lane and one direction and walks through time. The recurrent
weights are read once and stay on chip, as do hidden and cell state.

    x        [K, T, B, D] with FUSE_INPUT: the product with w_ih is made here, which saves writing
             and reading it, where w_ih fits beside the rest; else the product, [K, T, B, W, G, H]
    w_ih     [K, W, G, H, D]    w_hh [K, W, G, H, H]    b_ih, b_hh [K, W, G, H], of any precision;
                                `ih_lane` and so on: elements from one lane's to the next one's
    y        [K, T, B, W, H]    outputs
    factors  [K, T, B, W, H, 4] which `backward` overwrites with the slots' gradients
    carry    [K, T, B, W, H, 2] of an LSTM, [K, T, B, W, H] of a GRU
    h0, c0   [K, W, B, H]       initial states, if any

A step is a chain: product, gates, state, product. Triton moves a tensor from the layout of products
to that of memory accesses through shared memory, with two barriers each time, so the slots are
written and read as one tensor. The backward pass reads its factors ready-made: it has no tanh, and
a few multiplications. Reads are issued a step ahead. Weight gradients are products over all steps
and windows, made afterwards (`weight_gradients`): in the loop, they would not fit into registers.

H is a power of two: `fused` pads it with units that have no weights and stay zero. DP is D rounded
up to one. RESIDENT slots' weights stay on chip; where shared memory is small, the others are read
at every step.
"""

import triton
import triton.language as tl

from slipstream.kernels.rnn.cell import sigmoid, tanh


@triton.jit
def _interleave(a, b, c, d, BM: tl.constexpr, H: tl.constexpr):
    """Return four [BM, H] as one [BM, H * 4]."""
    return tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), [BM, H * 4])


@triton.jit
def _deinterleave(slots, BM: tl.constexpr, H: tl.constexpr):
    """Return one [BM, H * 4] as four [BM, H]."""
    even, odd = tl.split(tl.reshape(slots, [BM, H, 2, 2]))
    a, c = tl.split(even)
    b, d = tl.split(odd)
    return a, b, c, d


@triton.jit
def _split_carry(carried, BM: tl.constexpr, H: tl.constexpr, LSTM: tl.constexpr):
    """Return the values of `carry` for each unit: two in an LSTM, one in a GRU."""
    if LSTM:
        a, b = tl.split(tl.reshape(carried, [BM, H, 2]))
    else:
        a, b = carried, carried
    return a, b


@triton.jit(do_not_specialize=["T", "B", "ih_lane", "hh_lane", "b_ih_lane", "b_hh_lane"])
def forward(
    x,
    w_ih,
    w_hh,
    b_ih,
    b_hh,
    h0,
    c0,
    y,
    final,
    factors,
    carry,
    T,
    B,
    ih_lane,
    hh_lane,
    b_ih_lane,
    b_hh_lane,
    D: tl.constexpr,
    DP: tl.constexpr,
    H: tl.constexpr,
    W: tl.constexpr,
    LSTM: tl.constexpr,
    FUSE_INPUT: tl.constexpr,
    STATES: tl.constexpr,
    LAST: tl.constexpr,
    SAVE: tl.constexpr,
    RESIDENT: tl.constexpr,
    BM: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    FAST: tl.constexpr,
):
    """Run all steps of a layer. With LAST, each direction's last output goes to `final`, [K, B, W,
    H]. SAVE writes the values that `backward` needs."""
    G: tl.constexpr = 4 if LSTM else 3
    X_0: tl.constexpr = 0 if LSTM else 2  # the gate of slot 0, 1 and 2 among those of w_ih
    X_1: tl.constexpr = 1 if LSTM else 0
    X_2: tl.constexpr = 2 if LSTM else 1
    recurrence = tl.program_id(1).to(tl.int64)  # lane and direction
    lane, direction = recurrence // W, recurrence % W
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    units, ins = tl.arange(0, H), tl.arange(0, DP)
    C: tl.constexpr = 2 if LSTM else 1
    slots, pairs = tl.arange(0, 4 * H), tl.arange(0, C * H)
    valid = (rows < B)[:, None]
    kind = y.dtype.element_ty

    recurrent = (
        w_hh + lane * hh_lane + direction * G * H * H + units[None, :] * H + units[:, None]
    )  # [in, out]
    u_0 = tl.load(recurrent).to(kind)  # a GRU's slot 0 has no recurrent weights: slot 1's
    u_1 = u_0
    u_2 = u_0
    u_3 = u_0
    if RESIDENT == 4:
        if LSTM:
            u_1 = tl.load(recurrent + H * H).to(kind)
        u_2 = tl.load(recurrent + (G - 2) * H * H).to(kind)
        u_3 = tl.load(recurrent + (G - 1) * H * H).to(kind)
    zero = tl.zeros([BM, H], dtype=tl.float32)
    ones_x = b_ih + lane * b_ih_lane + direction * G * H + units
    ones_h = b_hh + lane * b_hh_lane + direction * G * H + units
    b_0 = tl.load(ones_x + X_0 * H)
    b_1 = tl.load(ones_x + X_1 * H) + tl.load(ones_h + X_1 * H)
    b_2 = tl.load(ones_x + X_2 * H) + tl.load(ones_h + X_2 * H)
    b_3 = tl.load(ones_h + (G - 1) * H)
    if LSTM:
        b_0 += tl.load(ones_h)
        b_3 += tl.load(ones_x + 3 * H)
    b_0, b_1 = b_0.to(tl.float32)[None, :] + zero, b_1.to(tl.float32)[None, :] + zero
    b_2, b_3 = b_2.to(tl.float32)[None, :] + zero, b_3.to(tl.float32)[None, :] + zero

    first, step = direction * (T - 1), 1 - 2 * direction  # the other direction walks from the end
    row = rows[:, None].to(tl.int64) * W * H + direction * H
    here = row + units[None, :]
    first_step = (lane * T + first) * B * W * H
    y_at = y + first_step + here
    factors_at = factors + 4 * (first_step + row) + slots[None, :]
    carry_at = carry + C * (first_step + row) + pairs[None, :]
    if FUSE_INPUT:
        entering = w_ih + lane * ih_lane + direction * G * H * D  # [in, out]
        entering += units[None, :] * D + ins[:, None]
        known = (ins < D)[:, None]
        v_0 = tl.load(entering + X_0 * H * D, mask=known, other=0.0).to(kind)
        v_1 = tl.load(entering + X_1 * H * D, mask=known, other=0.0).to(kind)
        v_2 = tl.load(entering + X_2 * H * D, mask=known, other=0.0).to(kind)
        v_3 = tl.load(entering + (G - 1) * H * D, mask=known, other=0.0).to(kind)
        x_there = (rows < B)[:, None] & (ins < D)[None, :]
        x_at = x + (lane * T + first) * B * D + rows[:, None].to(tl.int64) * D + ins[None, :]
        x_step = step * B * D
        next_x = tl.load(x_at, mask=x_there, other=0.0)
    else:
        x_at = (
            x
            + G * first_step
            + rows[:, None].to(tl.int64) * W * G * H
            + direction * G * H
            + units[None, :]
        )
        x_step = step * B * W * G * H

    h = zero
    c = zero
    if STATES:
        states = recurrence * B * H + rows[:, None] * H + units[None, :]
        h += tl.load(h0 + states, mask=valid, other=0.0)
        if LSTM:
            c += tl.load(c0 + states, mask=valid, other=0.0)
    operand = h.to(kind)

    for t in tl.range(T, num_stages=STAGES):
        if FUSE_INPUT:
            now = next_x.to(kind)
            x_at += x_step
            next_x = tl.load(x_at, mask=x_there & (t + 1 < T), other=0.0)
            p_0 = tl.dot(now, v_0, b_0, input_precision=PRECISION)
            p_1 = tl.dot(now, v_1, b_1, input_precision=PRECISION)
            p_2 = tl.dot(now, v_2, b_2, input_precision=PRECISION)
            p_3 = b_3
            if LSTM:
                p_3 = tl.dot(now, v_3, b_3, input_precision=PRECISION)
        else:
            p_0 = tl.load(x_at + X_0 * H, mask=valid, other=0.0) + b_0
            p_1 = tl.load(x_at + X_1 * H, mask=valid, other=0.0) + b_1
            p_2 = tl.load(x_at + X_2 * H, mask=valid, other=0.0) + b_2
            p_3 = b_3
            if LSTM:
                p_3 += tl.load(x_at + 3 * H, mask=valid, other=0.0)
            x_at += x_step

        if LSTM:
            p_0 = tl.dot(operand, u_0, p_0, input_precision=PRECISION)
            if RESIDENT < 4:
                u_1 = tl.load(recurrent + H * H).to(kind)
        p_1 = tl.dot(operand, u_1, p_1, input_precision=PRECISION)
        if RESIDENT < 4:
            u_2 = tl.load(recurrent + (G - 2) * H * H).to(kind)
        p_2 = tl.dot(operand, u_2, p_2, input_precision=PRECISION)
        if RESIDENT < 4:
            u_3 = tl.load(recurrent + (G - 1) * H * H).to(kind)
        p_3 = tl.dot(operand, u_3, p_3, input_precision=PRECISION)

        if LSTM:
            i, f = sigmoid(p_0, FAST), sigmoid(p_1, FAST)
            g, o = tanh(p_2, FAST), sigmoid(p_3, FAST)
            a_1 = c * f * (1 - f)
            c = f * c + i * g
            tanh_c = tanh(c, FAST)
            h = o * tanh_c
            a_0 = g * i * (1 - i)
            a_2 = i * (1 - g * g)
            a_3 = h * (1 - o)
            if SAVE:
                a_c = o - h * tanh_c
                pair = tl.reshape(tl.join(a_c.to(kind), f.to(kind)), [BM, 2 * H])
                tl.store(carry_at, pair, mask=valid)
        else:
            r, z = sigmoid(p_1, FAST), sigmoid(p_2, FAST)
            n = tanh(p_0 + r * p_3, FAST)
            a_0 = (1 - z) * (1 - n * n)
            a_2 = (h - n) * z * (1 - z)
            a_3 = a_0 * r
            a_1 = a_3 * (1 - r) * p_3
            h = n + z * (h - n)
            if SAVE:
                tl.store(carry_at, z.to(kind), mask=valid)
        if SAVE:
            factor = _interleave(a_0.to(kind), a_1.to(kind), a_2.to(kind), a_3.to(kind), BM, H)
            tl.store(factors_at, factor, mask=valid)
            factors_at += step * B * W * 4 * H
            carry_at += step * B * W * C * H
        operand = h.to(kind)
        if SAVE or not LAST:
            tl.store(y_at, operand, mask=valid)
            y_at += step * B * W * H

    if LAST:
        tl.store(final + lane * B * W * H + here, operand, mask=valid)


@triton.jit(do_not_specialize=["T", "B", "hh_lane"])
def backward(
    factors,
    carry,
    w_hh,
    dy,
    dh0,
    dc0,
    T,
    B,
    hh_lane,
    H: tl.constexpr,
    W: tl.constexpr,
    LSTM: tl.constexpr,
    STATES: tl.constexpr,
    LAST: tl.constexpr,
    RESIDENT: tl.constexpr,
    BM: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Compute the slots' gradients of all steps from dy [K, T, B, W, H] or, with LAST, from the
    gradient of each direction's last output, [K, B, W, H]."""
    G: tl.constexpr = 4 if LSTM else 3
    recurrence = tl.program_id(1).to(tl.int64)
    lane, direction = recurrence // W, recurrence % W
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    units = tl.arange(0, H)
    C: tl.constexpr = 2 if LSTM else 1
    slots, pairs = tl.arange(0, 4 * H), tl.arange(0, C * H)
    valid = (rows < B)[:, None]
    kind = factors.dtype.element_ty

    recurrent = (
        w_hh + lane * hh_lane + direction * G * H * H + units[:, None] * H + units[None, :]
    )  # [out, in]
    u_0 = tl.load(recurrent).to(kind)  # a GRU's slot 0 has no recurrent weights: slot 1's
    u_1 = u_0
    u_2 = u_0
    u_3 = u_0
    if RESIDENT == 4:
        if LSTM:
            u_1 = tl.load(recurrent + H * H).to(kind)
        u_2 = tl.load(recurrent + (G - 2) * H * H).to(kind)
        u_3 = tl.load(recurrent + (G - 1) * H * H).to(kind)

    first, step = (1 - direction) * (T - 1), 2 * direction - 1  # against the direction of `forward`
    row = rows[:, None].to(tl.int64) * W * H + direction * H
    here = row + units[None, :]
    first_step = (lane * T + first) * B * W * H
    factors_at = factors + 4 * (first_step + row) + slots[None, :]
    carry_at = carry + C * (first_step + row) + pairs[None, :]
    zero = tl.zeros([BM, H], dtype=tl.float32)
    dc = zero
    if LAST:
        dy_at = dy + lane * B * W * H + here
    else:
        dy_at = dy + first_step + here
    dh = tl.load(dy_at, mask=valid, other=0.0).to(tl.float32)

    for t in tl.range(T, num_stages=STAGES):
        factor = tl.load(factors_at, mask=valid, other=0.0)
        carried = tl.load(carry_at, mask=valid, other=0.0)
        a_0, a_1, a_2, a_3 = _deinterleave(factor, BM, H)
        a_c, f = _split_carry(carried, BM, H, LSTM)
        passed_on = zero
        if not LAST:
            dy_at += step * B * W * H
            passed_on += tl.load(dy_at, mask=valid & (t + 1 < T), other=0.0).to(tl.float32)

        if LSTM:
            dc += dh * a_c
            d_0, d_1, d_2, d_3 = dc * a_0, dc * a_1, dc * a_2, dh * a_3
            dc = dc * f
        else:
            d_0, d_1, d_2, d_3 = dh * a_0, dh * a_1, dh * a_2, dh * a_3
            passed_on += dh * f
        d_0, d_1, d_2, d_3 = d_0.to(kind), d_1.to(kind), d_2.to(kind), d_3.to(kind)
        tl.store(factors_at, _interleave(d_0, d_1, d_2, d_3, BM, H), mask=valid)
        factors_at += step * B * W * 4 * H
        carry_at += step * B * W * C * H

        dh = passed_on
        if LSTM:
            dh = tl.dot(d_0, u_0, dh, input_precision=PRECISION)
            if RESIDENT < 4:
                u_1 = tl.load(recurrent + H * H).to(kind)
        dh = tl.dot(d_1, u_1, dh, input_precision=PRECISION)
        if RESIDENT < 4:
            u_2 = tl.load(recurrent + (G - 2) * H * H).to(kind)
        dh = tl.dot(d_2, u_2, dh, input_precision=PRECISION)
        if RESIDENT < 4:
            u_3 = tl.load(recurrent + (G - 1) * H * H).to(kind)
        dh = tl.dot(d_3, u_3, dh, input_precision=PRECISION)

    if STATES:
        states = recurrence * B * H + rows[:, None] * H + units[None, :]
        tl.store(dh0 + states, dh, mask=valid)
        if LSTM:
            tl.store(dc0 + states, dc, mask=valid)
