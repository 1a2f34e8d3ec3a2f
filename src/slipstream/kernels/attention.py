"""Attention of one model, or under `vmap` of many."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Every token sees every other: [B, heads, T, D] to the same. Under `vmap`, lanes are windows
    among others; torch's own kernels have no rule for it."""
    if any(torch._C._functorch.is_batchedtensor(tensor) for tensor in (q, k, v)):
        apply: Any = _UnderVmap.apply
        out: Tensor = apply(q, k, v)
        return out
    return F.scaled_dot_product_attention(q, k, v)


class _UnderVmap(torch.autograd.Function):
    @staticmethod
    def forward(*_: Any) -> Tensor:
        raise NotImplementedError("only vmap calls this op")

    @staticmethod
    def setup_context(*_: Any) -> None:
        raise NotImplementedError("only vmap calls this op")

    @staticmethod
    def vmap(info: Any, in_dims: Sequence[int], *tensors: Tensor) -> tuple[Tensor, int]:
        q, k, v = (
            tensor.movedim(dim, 0).flatten(0, 1)
            for tensor, dim in zip(tensors, in_dims, strict=True)
        )
        out = F.scaled_dot_product_attention(q, k, v)
        return out.unflatten(0, (info.batch_size, -1)), 0
