"""The activations of gates, for Triton kernels, in fp32."""

import triton
import triton.language as tl


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
