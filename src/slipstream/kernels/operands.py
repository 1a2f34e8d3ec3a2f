"""What our operations share: lanes under `vmap`, and the number format of their operands."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

BETA1, BETA2, EPSILON = 0.9, 0.999, 1e-8
"""Adam's constants, torch's defaults"""


def is_vmapped(*tensors: Tensor) -> bool:
    return any(torch._C._functorch.is_batchedtensor(tensor) for tensor in tensors)


def call_with_lanes(op: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """Call an operation that has lanes first: within `vmap` for all of them, else for one."""
    if is_vmapped(*tensors):
        return call_under_vmap(op, *tensors)
    # not [0], whose backward pass is a buffer of zeros and a copy
    return op(*(tensor[None] for tensor in tensors)).squeeze(0)


def call_under_vmap(op: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """Call an operation whose arguments and result have lanes first, within `vmap`."""
    apply: Any = _OverLanes.apply
    out: Tensor = apply(op, *tensors)
    return out


class _OverLanes(torch.autograd.Function):
    @staticmethod
    def forward(*_: Any) -> Tensor:
        raise NotImplementedError("only vmap calls this op")

    @staticmethod
    def setup_context(*_: Any) -> None:
        raise NotImplementedError("only vmap calls this op")

    @staticmethod
    def vmap(
        info: Any, in_dims: Sequence[int | None], op: Callable[..., Tensor], *tensors: Tensor
    ) -> tuple[Tensor, int]:
        """Run the operation of all lanes at once; arguments that all lanes share are repeated."""
        with_lanes = [
            tensor.expand(info.batch_size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
            for tensor, dim in zip(tensors, in_dims[1:], strict=True)
        ]
        return op(*with_lanes), 0


def operand_format(x: Tensor) -> tuple[torch.dtype, str]:
    """Return the type of operands of products in the current context, and the precision of products
    of fp32."""
    if torch.is_autocast_enabled(x.device.type):
        return torch.get_autocast_dtype(x.device.type), "tf32"
    tf32 = torch.backends.cuda.matmul.fp32_precision == "tf32"
    return x.dtype, "tf32" if tf32 else "ieee"


def multiply_in_fp32(left: Tensor, right: Tensor) -> Tensor:
    """Return products summed over all steps and windows in fp32: half precision may be too narrow
    for these sums."""
    if left.is_cuda and left.dtype.itemsize == 2:
        return torch.bmm(left, right, out_dtype=torch.float32)
    return torch.bmm(left, right)
