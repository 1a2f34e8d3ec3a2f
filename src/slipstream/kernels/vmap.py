"""The vmap rule of our operations: the operation of all lanes at once."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


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
