"""A linear layer of one model, or under `vmap` of many.

For lanes, PyTorch runs a product, an addition and a cast of every operand; in the backward pass it
sums rows for the biases by a kernel that is slow where rows are many and columns few, and casts
each gradient. Here the bias is added by the product, the sums are products as well, and their
results are fp32.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from slipstream.kernels.precision import multiply_in_fp32, operand_format
from slipstream.kernels.vmap import call_under_vmap, is_vmapped


def linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """x [..., D], weight [N, D] and bias [N] to [..., N]; under `vmap`, each lane by its own."""
    if x.is_cuda and x.dim() > 1 and is_vmapped(x, weight, bias):
        apply: Any = _Linear.apply
        return call_under_vmap(apply, x, weight, bias)
    return F.linear(x, weight, bias)


class _Linear(torch.autograd.Function):
    """Lanes come first: x [K, ..., D], weight [K, N, D], bias [K, N]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        dtype, _ = operand_format(x)
        rows, across = x.to(dtype).flatten(1, -2), weight.to(dtype)
        out = torch.baddbmm(bias.to(dtype)[:, None], rows, across.mT)
        ctx.like = x.dtype, x.shape, weight.dtype, bias.dtype
        ctx.save_for_backward(rows, across)
        return out.view(*x.shape[:-1], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor, Tensor]:
        rows, across = ctx.saved_tensors
        dtype, shape, weight_dtype, bias_dtype = ctx.like
        grad = grad.flatten(1, -2)
        dx = None
        if ctx.needs_input_grad[0]:
            dx = torch.bmm(grad, across).view(shape).to(dtype)
        ones_row = grad.new_ones(1, 1, grad.shape[1]).expand(len(grad), -1, -1)
        d_weight, d_bias = multiply_in_fp32(grad.mT, rows), multiply_in_fp32(ones_row, grad)[:, 0]
        return dx, d_weight.to(weight_dtype), d_bias.to(bias_dtype)
