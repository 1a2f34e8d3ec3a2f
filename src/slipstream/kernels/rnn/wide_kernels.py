"""LSTM and GRU layers in Triton, all time steps in one kernel, by programs that share the units.

Weights of more than 128 units do not fit on one processor. So several programs take N units each,
keep the weights of those on chip, and walk through time side by side, for BM windows of one lane
and one direction. After every step each of them writes its share of what all of them need next (h,
or on the way back the slots' gradients), counts itself in, and waits until all have.

    x         [K, T, B, W, G, H] the products with x
    hh        [L, G, H, H]
    bias      [L, 4, H]          of each slot
    y         [L, T, B, H]       outputs, which the next step reads
    out       [K, T, B, W, H]    with SPREAD, for both directions: outputs again, in order of time
    slots     [L, T, B, 4, H]    what the gradient of h (for i, f and g: of c) is multiplied by to
                                 give that of a slot
    grads     [L, T, B, 4, H]    the slots' gradients; may be the memory of `slots`, as `slots` may
                                 be that of x where they lie alike
    carry     [L, T, B, 2, H]    LSTM: what dh adds to dc, and what of dc goes on (f)
              [L, T, B, 1, H]    GRU: what of dh goes on (z)
    counters  [L, tiles]         zeros

Programs that wait for others must all run at once, which is for `split` to see to.

Slots of one unit are written and read side by side, as one tensor, for the reason that `recurrence`
gives. What others have written is read past the nearest cache (".cg"), which does not hear of it.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from slipstream.kernels.rnn.activations import sigmoid, tanh


@triton.jit
def _beside(a, b, BM: tl.constexpr, N: tl.constexpr):
    """Two [BM, N] as one [BM, 2 * N], one after the other."""
    return tl.reshape(tl.permute(tl.join(a, b), [0, 2, 1]), [BM, 2 * N])


@triton.jit
def _halves(both, BM: tl.constexpr, N: tl.constexpr):
    """One [BM, 2 * N] as two [BM, N]."""
    return tl.split(tl.permute(tl.reshape(both, [BM, 2, N]), [0, 2, 1]))


@triton.jit
def _quarters(slots, BM: tl.constexpr, N: tl.constexpr):
    """One [BM, 4 * N] as four [BM, N]."""
    a, b = _halves(slots, BM, 2 * N)
    return _halves(a, BM, N) + _halves(b, BM, N)


@triton.jit
def _columns(part, SLOTS: tl.constexpr, N: tl.constexpr, H: tl.constexpr):
    """Where some slots of a program's units lie in a row of [SLOTS, H], and which there are."""
    each = tl.arange(0, SLOTS * N)
    unit = part * N + each % N
    return (each // N * H + unit)[None, :], (unit < H)[None, :]


@triton.jit
def _here(counters, W: tl.constexpr):
    """The program's part, tile, lane with direction, and the counter of all that share a tile."""
    part, tile, who = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    return part, tile, who, who // W, who % W, counters + who * tl.num_programs(1) + tile


@triton.jit
def _weights(at, known, H: tl.constexpr, LSTM: tl.constexpr):
    """Of four slots; a GRU's first has none, and the second's stand there."""
    u_0 = tl.load(at, mask=known, other=0.0)
    u_1 = u_0
    if LSTM:
        at += H * H
        u_1 = tl.load(at, mask=known, other=0.0)
    u_2 = tl.load(at + H * H, mask=known, other=0.0)
    u_3 = tl.load(at + 2 * H * H, mask=known, other=0.0)
    return u_0, u_1, u_2, u_3


@triton.jit
def _all_there(counter, count):
    """Wait until so many have counted themselves in. What they had written before can be read."""
    while tl.atomic_add(counter, 0, sem="acquire", scope="gpu") < count:
        pass


@triton.jit
def _count_in(counter):
    """All threads of this program have written what the others wait for."""
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
    SPREAD: tl.constexpr,
    KEEP: tl.constexpr,
    QUICK: tl.constexpr,
    BM: tl.constexpr,
):
    """KEEP writes what the way back needs."""
    G: tl.constexpr = 4 if LSTM else 3
    C: tl.constexpr = 2 if LSTM else 1
    part, tile, who, lane, way, counter = _here(counters, W)
    parts = tl.num_programs(0)
    rows = tile * BM + tl.arange(0, BM)
    units, ins = part * N + tl.arange(0, N), tl.arange(0, HP)
    four, known_4 = _columns(part, 4, N, H)
    pair, known_pair = _columns(part, C, N, H)
    here = (rows < B)[:, None]
    there, all_units = here & (units < H)[None, :], here & (ins < H)[None, :]
    there_4, there_pair = here & known_4, here & known_pair
    there_x = there_4
    if not LSTM:
        there_x &= four < G * H
    kind = y.dtype.element_ty

    known = (ins < H)[:, None] & (units < H)[None, :]
    weights = hh + who * G * H * H + units[None, :] * H + ins[:, None]  # [in, out]
    u_0, u_1, u_2, u_3 = _weights(weights, known, H, LSTM)
    zero = tl.zeros([BM, N], dtype=tl.float32)
    bias_at = bias + who * 4 * H + units
    b_0 = tl.load(bias_at, mask=units < H, other=0.0)[None, :] + zero
    b_1 = tl.load(bias_at + H, mask=units < H, other=0.0)[None, :] + zero
    b_2 = tl.load(bias_at + 2 * H, mask=units < H, other=0.0)[None, :] + zero
    b_3 = tl.load(bias_at + 3 * H, mask=units < H, other=0.0)[None, :] + zero

    start, step = way * (T - 1), 1 - 2 * way  # the other direction walks from the end
    row = rows[:, None].to(tl.int64)
    in_time = ((lane * T + start) * B + row) * W + way
    x_at = x + in_time * (G * H) + four
    out_at = out + in_time * H + units[None, :]
    in_order = who * T * B + row
    y_at = y + in_order * H + units[None, :]
    before_at = y + (in_order - B) * H + ins[None, :]
    slots_at = slots + in_order * (4 * H) + four
    carry_at = carry + in_order * (C * H) + pair
    state = zero  # LSTM c, GRU h
    coming = tl.load(x_at, mask=there_x, other=0.0)

    for t in tl.range(T, num_stages=1):
        p_0, p_1, p_2, p_3 = _quarters(coming, BM, N)
        x_at += step * B * W * G * H
        coming = tl.load(x_at, mask=there_x & (t + 1 < T), other=0.0)
        p_0 += b_0
        p_1 += b_1
        p_2 += b_2
        p_3 += b_3
        _all_there(counter, parts * t)
        before = tl.load(before_at, mask=all_units & (t > 0), other=0.0, cache_modifier=".cg")
        if LSTM:
            p_0 = tl.dot(before, u_0, p_0)
        p_1 = tl.dot(before, u_1, p_1)
        p_2 = tl.dot(before, u_2, p_2)
        p_3 = tl.dot(before, u_3, p_3)

        if LSTM:
            i, f = sigmoid(p_0, QUICK), sigmoid(p_1, QUICK)
            g, o = tanh(p_2, QUICK), sigmoid(p_3, QUICK)
            a_1 = state * f * (1 - f)
            state = f * state + i * g
            tanh_c = tanh(state, QUICK)
            h = o * tanh_c
            tl.store(y_at, h.to(kind), mask=there)
            _count_in(counter)
            a_0 = g * i * (1 - i)
            a_2 = i * (1 - g * g)
            a_3 = h * (1 - o)
            kept = _beside((o - h * tanh_c).to(kind), f.to(kind), BM, N)
        else:
            r, z = sigmoid(p_1, QUICK), sigmoid(p_2, QUICK)
            n = tanh(p_0 + r * p_3, QUICK)
            a_2 = (state - n) * z * (1 - z)
            h = n + z * (state - n)
            state = h
            tl.store(y_at, h.to(kind), mask=there)
            _count_in(counter)
            a_0 = (1 - z) * (1 - n * n)
            a_3 = a_0 * r
            a_1 = a_3 * (1 - r) * p_3
            kept = z.to(kind)
        if SPREAD:
            tl.store(out_at, h.to(kind), mask=there)
            out_at += step * B * W * H
        if KEEP:
            first = _beside(a_0.to(kind), a_1.to(kind), BM, N)
            second = _beside(a_2.to(kind), a_3.to(kind), BM, N)
            tl.store(slots_at, _beside(first, second, BM, 2 * N), mask=there_4)
            tl.store(carry_at, kept, mask=there_pair)
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
    """With LAST, dy is that of the last step's output; `dy_lane` and so on are elements from one
    lane's, step's and window's to the next one's."""
    G: tl.constexpr = 4 if LSTM else 3
    C: tl.constexpr = 2 if LSTM else 1
    part, tile, who, lane, way, counter = _here(counters, W)
    parts = tl.num_programs(0)
    rows = tile * BM + tl.arange(0, BM)
    units, ins = part * N + tl.arange(0, N), tl.arange(0, HP)
    four, known_4 = _columns(part, 4, N, H)
    pair, known_pair = _columns(part, C, N, H)
    here = (rows < B)[:, None]
    there, all_units = here & (units < H)[None, :], here & (ins < H)[None, :]
    there_4, there_pair = here & known_4, here & known_pair
    kind = grads.dtype.element_ty

    known = (ins < H)[:, None] & (units < H)[None, :]
    weights = hh + who * G * H * H + ins[:, None] * H + units[None, :]  # [out, in]
    u_0, u_1, u_2, u_3 = _weights(weights, known, H, LSTM)

    row = rows[:, None].to(tl.int64)
    in_order = (who * T + T - 1) * B + row
    slots_at = slots + in_order * (4 * H) + four
    grads_at = grads + in_order * (4 * H) + four
    after_at = grads + (in_order + B) * (4 * H) + ins[None, :]
    carry_at = carry + in_order * (C * H) + pair
    dy_at = dy + lane * dy_lane + row * dy_row + way * H + units[None, :]
    if not LAST:
        dy_at += (1 - way) * (T - 1) * dy_time
    state = tl.zeros([BM, N], dtype=tl.float32)  # LSTM dc; GRU what of dh goes on
    factors = tl.load(slots_at, mask=there_4, other=0.0)
    kept = tl.load(carry_at, mask=there_pair, other=0.0)
    arriving = tl.load(dy_at, mask=there, other=0.0)

    for n in tl.range(T, num_stages=1):
        a_0, a_1, a_2, a_3 = _quarters(factors, BM, N)
        if LSTM:
            a_c, goes_on = _halves(kept, BM, N)
        else:
            goes_on = kept
        dh = arriving.to(tl.float32)
        more = n + 1 < T
        slots_at -= B * 4 * H
        carry_at -= B * C * H
        factors = tl.load(slots_at, mask=there_4 & more, other=0.0)
        kept = tl.load(carry_at, mask=there_pair & more, other=0.0)
        if LAST:
            arriving = tl.zeros([BM, N], dtype=dy.dtype.element_ty)
        else:
            dy_at -= (1 - 2 * way) * dy_time
            arriving = tl.load(dy_at, mask=there & more, other=0.0)
        _all_there(counter, parts * n)
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
        first = _beside(g_0.to(kind), g_1.to(kind), BM, N)
        second = _beside(g_2.to(kind), g_3.to(kind), BM, N)
        tl.store(grads_at, _beside(first, second, BM, 2 * N), mask=there_4)
        _count_in(counter)
        if LSTM:
            state *= goes_on
        else:
            state = dh * goes_on
        grads_at -= B * 4 * H
        after_at -= B * 4 * H
