"""Attention of one model, or under `vmap` of many."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from slipstream.kernels.vmapped import is_vmapped, over_lanes


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Every token sees every other: [B, heads, T, D] to the same. Under `vmap`, lanes are windows
    among others; torch's own kernels have no rule for it."""
    if is_vmapped(q, k, v):
        return over_lanes(_of_lanes, q, k, v)
    return F.scaled_dot_product_attention(q, k, v)


def _of_lanes(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    K = len(q)
    q, k, v = (tensor.flatten(0, 1) for tensor in (q, k, v))
    out: Tensor = F.scaled_dot_product_attention(q, k, v).unflatten(0, (K, -1))
    return out
