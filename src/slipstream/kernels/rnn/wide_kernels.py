"""LSTM and GRU layers in Triton, all time steps in one kernel, by programs that share the units.

Weights of more than 128 units do not fit on one processor. So several programs take N units each,
keep the weights of those on chip, and walk through time side by side, for BM windows of one lane
and one direction. After every step each of them writes its share of what all of them need next (h,
or in the backward pass the slots' gradients), counts itself in, and waits until all have.

    x         [K, T, B, W, G, H] the products with x
    hh        [L, G, H, H]
    bias      [L, 4, H]          of each slot
    y         [L, T, B, H]       outputs, which the next step reads
    out       [K, T, B, W, H]    IN_TIME_ORDER, for two directions: outputs again, in order of time
    slots     [L, T, B, 4, H]    factors
    grads     [L, T, B, 4, H]    the slots' gradients; may be the memory of `slots`, as `slots` may
                                 be that of x where they lie alike
    carry     [L, T, B, 2, H]    of an LSTM, [L, T, B, 1, H] of a GRU
    counters  [L, tiles]         zeros

Programs that wait for others must all run at once; `wide` makes sure of it. Slots of one unit are
written and read as one tensor, for the reason that `fused_kernels` gives. What other programs have
written is read past the L1 cache (".cg"), which does not notice it.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import triton
import triton.language as tl

from slipstream.kernels.rnn.cell import sigmoid, tanh


@triton.jit
def _concat(a, b, BM: tl.constexpr, N: tl.constexpr):
    """Return two [BM, N] as one [BM, 2 * N], one after the other."""
    return tl.reshape(tl.permute(tl.join(a, b), [0, 2, 1]), [BM, 2 * N])


@triton.jit
def _split_halves(halves, BM: tl.constexpr, N: tl.constexpr):
    """Return one [BM, 2 * N] as two [BM, N]."""
    return tl.split(tl.permute(tl.reshape(halves, [BM, 2, N]), [0, 2, 1]))


@triton.jit
def _split_quarters(slots, BM: tl.constexpr, N: tl.constexpr):
    """Return one [BM, 4 * N] as four [BM, N]."""
    a, b = _split_halves(slots, BM, 2 * N)
    return _split_halves(a, BM, N) + _split_halves(b, BM, N)


@triton.jit
def _slot_columns(part, SLOTS: tl.constexpr, N: tl.constexpr, H: tl.constexpr):
    """Return the columns of a program's slots in a row of [SLOTS, H], and a mask of the existing
    ones."""
    slot = tl.arange(0, SLOTS * N)
    unit = part * N + slot % N
    return (slot // N * H + unit)[None, :], (unit < H)[None, :]


@triton.jit
def _locate(counters, W: tl.constexpr):
    """Return the program's part, tile, recurrence (lane and direction), lane, direction, and the
    counter that the programs of a tile share."""
    part, tile, recurrence = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    return (
        part,
        tile,
        recurrence,
        recurrence // W,
        recurrence % W,
        counters + recurrence * tl.num_programs(1) + tile,
    )


@triton.jit
def _load_weights(pointer, known, H: tl.constexpr, LSTM: tl.constexpr):
    """Return the weights of four slots; a GRU's first slot has none, and gets those of the
    second."""
    u_0 = tl.load(pointer, mask=known, other=0.0)
    u_1 = u_0
    if LSTM:
        pointer += H * H
        u_1 = tl.load(pointer, mask=known, other=0.0)
    u_2 = tl.load(pointer + H * H, mask=known, other=0.0)
    u_3 = tl.load(pointer + 2 * H * H, mask=known, other=0.0)
    return u_0, u_1, u_2, u_3


@triton.jit
def _wait_for(counter, count):
    """Wait until `count` programs have counted themselves in. Their earlier writes can then be
    read."""
    while tl.atomic_add(counter, 0, sem="acquire", scope="gpu") < count:
        pass


@triton.jit
def _count_in(counter):
    """Count this program in, after all of its threads have written the values that the others wait
    for."""
    tl.debug_barrier()
    tl.atomic_add(counter, 1, sem="release", scope="gpu")


@triton.jit(do_not_specialize=["T", "B"])
def split_forward(
    x,
    hh,
    bias,
    y,
    out,
    slots,
    carry,
    counters,
    T,
    B,
    H: tl.constexpr,
    HP: tl.constexpr,
    N: tl.constexpr,
    W: tl.constexpr,
    LSTM: tl.constexpr,
    IN_TIME_ORDER: tl.constexpr,
    SAVE: tl.constexpr,
    FAST: tl.constexpr,
    BM: tl.constexpr,
):
    """Run all steps of a layer. SAVE writes the values that the backward pass needs."""
    G: tl.constexpr = 4 if LSTM else 3
    C: tl.constexpr = 2 if LSTM else 1
    part, tile, recurrence, lane, direction, counter = _locate(counters, W)
    parts = tl.num_programs(0)
    rows = tile * BM + tl.arange(0, BM)
    units, ins = part * N + tl.arange(0, N), tl.arange(0, HP)
    four, known_4 = _slot_columns(part, 4, N, H)
    pair, known_pair = _slot_columns(part, C, N, H)
    here = (rows < B)[:, None]
    valid, all_units = here & (units < H)[None, :], here & (ins < H)[None, :]
    valid_4, valid_pair = here & known_4, here & known_pair
    valid_x = valid_4
    if not LSTM:
        valid_x &= four < G * H
    kind = y.dtype.element_ty

    known = (ins < H)[:, None] & (units < H)[None, :]
    weights = hh + recurrence * G * H * H + units[None, :] * H + ins[:, None]  # [in, out]
    u_0, u_1, u_2, u_3 = _load_weights(weights, known, H, LSTM)
    zero = tl.zeros([BM, N], dtype=tl.float32)
    bias_at = bias + recurrence * 4 * H + units
    b_0 = tl.load(bias_at, mask=units < H, other=0.0)[None, :] + zero
    b_1 = tl.load(bias_at + H, mask=units < H, other=0.0)[None, :] + zero
    b_2 = tl.load(bias_at + 2 * H, mask=units < H, other=0.0)[None, :] + zero
    b_3 = tl.load(bias_at + 3 * H, mask=units < H, other=0.0)[None, :] + zero

    start, step = direction * (T - 1), 1 - 2 * direction  # the other direction walks from the end
    row = rows[:, None].to(tl.int64)
    in_time = ((lane * T + start) * B + row) * W + direction
    x_at = x + in_time * (G * H) + four
    out_at = out + in_time * H + units[None, :]
    in_order = recurrence * T * B + row
    y_at = y + in_order * H + units[None, :]
    before_at = y + (in_order - B) * H + ins[None, :]
    slots_at = slots + in_order * (4 * H) + four
    carry_at = carry + in_order * (C * H) + pair
    state = zero  # LSTM c, GRU h
    next_x = tl.load(x_at, mask=valid_x, other=0.0)

    for t in tl.range(T, num_stages=1):
        p_0, p_1, p_2, p_3 = _split_quarters(next_x, BM, N)
        x_at += step * B * W * G * H
        next_x = tl.load(x_at, mask=valid_x & (t + 1 < T), other=0.0)
        p_0 += b_0
        p_1 += b_1
        p_2 += b_2
        p_3 += b_3
        _wait_for(counter, parts * t)
        before = tl.load(before_at, mask=all_units & (t > 0), other=0.0, cache_modifier=".cg")
        if LSTM:
            p_0 = tl.dot(before, u_0, p_0)
        p_1 = tl.dot(before, u_1, p_1)
        p_2 = tl.dot(before, u_2, p_2)
        p_3 = tl.dot(before, u_3, p_3)

        if LSTM:
            i, f = sigmoid(p_0, FAST), sigmoid(p_1, FAST)
            g, o = tanh(p_2, FAST), sigmoid(p_3, FAST)
            a_1 = state * f * (1 - f)
            state = f * state + i * g
            tanh_c = tanh(state, FAST)
            h = o * tanh_c
            tl.store(y_at, h.to(kind), mask=valid)
            _count_in(counter)
            a_0 = g * i * (1 - i)
            a_2 = i * (1 - g * g)
            a_3 = h * (1 - o)
            carried = _concat((o - h * tanh_c).to(kind), f.to(kind), BM, N)
        else:
            r, z = sigmoid(p_1, FAST), sigmoid(p_2, FAST)
            n = tanh(p_0 + r * p_3, FAST)
            a_2 = (state - n) * z * (1 - z)
            h = n + z * (state - n)
            state = h
            tl.store(y_at, h.to(kind), mask=valid)
            _count_in(counter)
            a_0 = (1 - z) * (1 - n * n)
            a_3 = a_0 * r
            a_1 = a_3 * (1 - r) * p_3
            carried = z.to(kind)
        if IN_TIME_ORDER:
            tl.store(out_at, h.to(kind), mask=valid)
            out_at += step * B * W * H
        if SAVE:
            first = _concat(a_0.to(kind), a_1.to(kind), BM, N)
            second = _concat(a_2.to(kind), a_3.to(kind), BM, N)
            tl.store(slots_at, _concat(first, second, BM, 2 * N), mask=valid_4)
            tl.store(carry_at, carried, mask=valid_pair)
            slots_at += B * 4 * H
            carry_at += B * C * H
        y_at += B * H
        before_at += B * H


@triton.jit(do_not_specialize=["T", "B"])
def split_backward(
    dy,
    hh,
    slots,
    grads,
    carry,
    counters,
    T,
    B,
    dy_lane,
    dy_time,
    dy_row,
    H: tl.constexpr,
    HP: tl.constexpr,
    N: tl.constexpr,
    W: tl.constexpr,
    LSTM: tl.constexpr,
    LAST: tl.constexpr,
    BM: tl.constexpr,
):
    """Compute the slots' gradients of all steps. With LAST, dy is the gradient of the last step's
    output; `dy_lane`, `dy_time` and `dy_row` are dy's strides in elements."""
    G: tl.constexpr = 4 if LSTM else 3
    C: tl.constexpr = 2 if LSTM else 1
    part, tile, recurrence, lane, direction, counter = _locate(counters, W)
    parts = tl.num_programs(0)
    rows = tile * BM + tl.arange(0, BM)
    units, ins = part * N + tl.arange(0, N), tl.arange(0, HP)
    four, known_4 = _slot_columns(part, 4, N, H)
    pair, known_pair = _slot_columns(part, C, N, H)
    here = (rows < B)[:, None]
    valid, all_units = here & (units < H)[None, :], here & (ins < H)[None, :]
    valid_4, valid_pair = here & known_4, here & known_pair
    kind = grads.dtype.element_ty

    known = (ins < H)[:, None] & (units < H)[None, :]
    weights = hh + recurrence * G * H * H + ins[:, None] * H + units[None, :]  # [out, in]
    u_0, u_1, u_2, u_3 = _load_weights(weights, known, H, LSTM)

    row = rows[:, None].to(tl.int64)
    in_order = (recurrence * T + T - 1) * B + row
    slots_at = slots + in_order * (4 * H) + four
    grads_at = grads + in_order * (4 * H) + four
    after_at = grads + (in_order + B) * (4 * H) + ins[None, :]
    carry_at = carry + in_order * (C * H) + pair
    dy_at = dy + lane * dy_lane + row * dy_row + direction * H + units[None, :]
    if not LAST:
        dy_at += (1 - direction) * (T - 1) * dy_time
    state = tl.zeros([BM, N], dtype=tl.float32)  # LSTM dc; GRU what of dh goes on
    factors = tl.load(slots_at, mask=valid_4, other=0.0)
    carried = tl.load(carry_at, mask=valid_pair, other=0.0)
    incoming = tl.load(dy_at, mask=valid, other=0.0)

    for n in tl.range(T, num_stages=1):
        a_0, a_1, a_2, a_3 = _split_quarters(factors, BM, N)
        if LSTM:
            a_c, passed_on = _split_halves(carried, BM, N)
        else:
            passed_on = carried
        dh = incoming.to(tl.float32)
        more = n + 1 < T
        slots_at -= B * 4 * H
        carry_at -= B * C * H
        factors = tl.load(slots_at, mask=valid_4 & more, other=0.0)
        carried = tl.load(carry_at, mask=valid_pair & more, other=0.0)
        if LAST:
            incoming = tl.zeros([BM, N], dtype=dy.dtype.element_ty)
        else:
            dy_at -= (1 - 2 * direction) * dy_time
            incoming = tl.load(dy_at, mask=valid & more, other=0.0)
        _wait_for(counter, parts * n)
        read = all_units & (n > 0)
        if LSTM:
            d_0 = tl.load(after_at, mask=read, other=0.0, cache_modifier=".cg")
        d_1 = tl.load(after_at + H, mask=read, other=0.0, cache_modifier=".cg")
        d_2 = tl.load(after_at + 2 * H, mask=read, other=0.0, cache_modifier=".cg")
        d_3 = tl.load(after_at + 3 * H, mask=read, other=0.0, cache_modifier=".cg")
        if LSTM:
            dh = tl.dot(d_0, u_0, dh)
        dh = tl.dot(d_1, u_1, dh)
        dh = tl.dot(d_2, u_2, dh)
        dh = tl.dot(d_3, u_3, dh)

        if LSTM:
            state += dh * a_c
            g_0, g_1, g_2, g_3 = state * a_0, state * a_1, state * a_2, dh * a_3
        else:
            dh += state
            g_0, g_1, g_2, g_3 = dh * a_0, dh * a_1, dh * a_2, dh * a_3
        first = _concat(g_0.to(kind), g_1.to(kind), BM, N)
        second = _concat(g_2.to(kind), g_3.to(kind), BM, N)
        tl.store(grads_at, _concat(first, second, BM, 2 * N), mask=valid_4)
        _count_in(counter)
        if LSTM:
            state *= passed_on
        else:
            state = dh * passed_on
        grads_at -= B * 4 * H
        after_at -= B * 4 * H
