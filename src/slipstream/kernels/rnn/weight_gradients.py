"""The weight gradients of a recurrent layer in Triton: sums over all steps and windows, from what
`fused_kernels.backward` left. Shapes and slots as there.
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["rows", "B", "share"])
def weight_gradients(
    slots,
    y,
    x,
    out_h,
    out_x,
    out_bias,
    rows,
    B,
    share,
    apart,
    H: tl.constexpr,
    HP: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    ROW: tl.constexpr,
    W: tl.constexpr,
    LSTM: tl.constexpr,
    OF_H: tl.constexpr,
    OF_X: tl.constexpr,
    PRECISION: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
):
    """Sums, over a share of all rows (steps and windows), of slots times outputs of the step before
    (OF_H), and times inputs (OF_X: DP of them, the block that the program's number names).

    A column of ones beside the inputs, or where they leave no room a product of its own, sums the
    slots themselves, for the biases. No division by
    what is known only at run time: ptxas calls a function for it, which overwrites the descriptors
    that the loop's products read their operands by (seen on an H200; a test looks for calls).

    slots [K, rows, W, H, 4], y [K, rows, W, H], x [K, rows, ROW] of which the first D columns
    count; for each share, `apart` elements from one to the next: out_h [K, W, G, H, H],
    out_x [K, W, G, H, D], out_bias [K, W, 4, H]. HP is H rounded up to a power of two.
    """
    G: tl.constexpr = 4 if LSTM else 3
    blocks: tl.constexpr = 1 if OF_H else (D + DP - 1) // DP
    ROOM: tl.constexpr = DP > D or not OF_X
    part = tl.program_id(0).to(tl.int64)
    recurrence = tl.program_id(2).to(tl.int64)
    lane, direction = recurrence // W, recurrence % W
    columns = tl.program_id(1) // blocks * BC + tl.arange(0, BC)
    units = tl.arange(0, HP)
    ins = tl.program_id(1) % blocks * DP + tl.arange(0, DP)
    kind = slots.dtype.element_ty
    before = B - 2 * B * direction  # the forward direction's step before is B rows up
    slots_at = slots + (lane * rows * W + direction) * 4 * H + columns[None, :]
    y_at = y + (lane * rows * W + direction) * H + units[None, :]
    x_at = x + lane * rows * ROW + ins[None, :]
    total_h = tl.zeros([BC, HP], dtype=tl.float32)
    total_x = tl.zeros([BC, DP], dtype=tl.float32)
    total_1 = tl.zeros([BC, 16], dtype=tl.float32)
    end = tl.minimum((part + 1) * share, rows)
    for start in range(part * share, end, BR):
        row = start + tl.arange(0, BR)
        within = row < end
        d = tl.load(
            slots_at + row[:, None] * (W * 4 * H),
            mask=within[:, None],
            other=0.0,
        )
        if OF_H:
            source = row - before
            known = (within & (source >= 0) & (source < rows))[:, None]
            if HP > H:
                known = known & (units < H)[None, :]
            h = tl.load(y_at + source[:, None] * (W * H), mask=known, other=0.0)
            total_h = tl.dot(tl.trans(d), h, total_h, input_precision=PRECISION)
        if OF_X:
            valid_x = within[:, None] & (ins < D)[None, :]
            seen = tl.load(x_at + row[:, None] * ROW, mask=valid_x, other=0.0).to(kind)
        else:
            seen = tl.zeros([BR, DP], dtype=kind)
        if OF_H and ROOM:
            seen = tl.where((ins == DP - 1)[None, :], 1.0, seen).to(kind)
        if OF_H and not ROOM:
            ones = tl.full([BR, 16], 1.0, dtype=kind)
            total_1 = tl.dot(tl.trans(d), ones, total_1, input_precision=PRECISION)
        total_x = tl.dot(tl.trans(d), seen, total_x, input_precision=PRECISION)

    unit, slot = columns // 4, columns % 4
    if OF_H:
        gate = slot if LSTM else slot - 1
        out_at = (
            out_h
            + part * apart
            + ((recurrence * G + gate) * H + unit)[:, None] * H
            + units[None, :]
        )
        if LSTM and HP == H:
            tl.store(out_at, total_h)
        else:  # of a GRU, slot 0, which comes from x, has no part in it
            tl.store(out_at, total_h, mask=((slot > 0) | LSTM)[:, None] & (units < H)[None, :])
        bias_at = out_bias + part * apart + ((recurrence * 4 + slot) * H + unit)[:, None]
        if ROOM:
            tl.store(bias_at + ins[None, :] * 0, total_x, mask=(ins == DP - 1)[None, :])
        else:
            first = tl.arange(0, 16)[None, :]
            tl.store(bias_at + first * 0, total_1, mask=first == 0)
    if OF_X:
        gate_x = slot if LSTM else tl.where(slot == 0, 2, slot - 1)
        out_at = (
            out_x
            + part * apart
            + ((recurrence * G + gate_x) * H + unit)[:, None] * D
            + ins[None, :]
        )
        tl.store(out_at, total_x, mask=(slot < G)[:, None] & (ins < D)[None, :])
