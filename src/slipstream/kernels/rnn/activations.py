"""The curves of gates, for kernels in Triton: sums are fp32, and so is what comes out."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def tanh(x, QUICK: tl.constexpr):
    """QUICK is the GPU's own instruction, with an error of 2^-11: as much as fp16 rounds off."""
    if QUICK:
        return tl.inline_asm_elementwise(
            "tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    return 2 * tl.sigmoid(2 * x) - 1


@triton.jit
def sigmoid(x, QUICK: tl.constexpr):
    """By way of tanh, which takes one instruction where exp and a division take several."""
    if QUICK:
        return 0.5 * tanh(0.5 * x, QUICK) + 0.5
    return tl.sigmoid(x)
