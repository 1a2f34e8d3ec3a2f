"""Recurrent layers: one definition, and five ways to compute it. docs/kernels.md derives them.

    reference     the definition, in plain PyTorch
    fused         all time steps in one Triton kernel; the weights of a layer fit on one processor
    wide          the same for 129 to 512 units, by programs that exchange their outputs each step
    cell, eager   step by step: a product, then one Triton kernel or PyTorch operations
    native.rnn    all time steps in one call of C code, for a CPU (`slipstream.kernels.native`)
    dispatch      chooses

Shapes: K lanes (models), W directions, L = K * W, T steps, B windows, D inputs, H hidden units,
G gates (4 in an LSTM, 3 in a GRU). Four *slots* stand for the gates. In this order, what depends on
x (a GRU's slots 0 to 2) and what depends on h (1 to 3) is adjacent:

    LSTM   i, f, g, o
    GRU    the new gate's part that comes from x, r, z, and its part that comes from h

The forward pass saves *factors*: what the gradient of h (for i, f and g: of c) is multiplied by to
give that of a slot. The backward pass overwrites them with the slots' gradients, so it runs once.
*carry* holds, per unit, what dh adds to dc and the share of dc that is passed on (f) in an LSTM,
and the share of dh that is passed on (z) in a GRU.
"""
