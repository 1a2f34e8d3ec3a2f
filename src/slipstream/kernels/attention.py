"""Attention of one model, or under `vmap` of many."""

from torch import Tensor
from torch.nn import functional as F

from slipstream.kernels.availability import should_use_triton
from slipstream.kernels.vmap import call_under_vmap, is_vmapped


def attention(joined: Tensor, heads: int) -> Tensor:
    """Map [T, B, 3 * D], which is q, k and v of all heads, to [T, B, D]; no token is masked.

    Short sequences go through a kernel of our own. Otherwise, under `vmap`, lanes become more
    windows, since PyTorch's kernels have no vmap rule.
    """
    if should_use_triton(joined):
        from slipstream.kernels import short_attention

        if short_attention.is_supported(joined, heads):
            return short_attention.short_attention(joined, heads)
    q, k, v = joined.unflatten(-1, (3, heads, -1)).permute(2, 1, 3, 0, 4)
    if is_vmapped(joined):
        out = call_under_vmap(_of_lanes, q, k, v)
    else:
        out = F.scaled_dot_product_attention(q, k, v)
    return out.permute(2, 0, 1, 3).flatten(2)


def _of_lanes(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    K = len(q)
    q, k, v = (tensor.flatten(0, 1) for tensor in (q, k, v))
    out: Tensor = F.scaled_dot_product_attention(q, k, v).unflatten(0, (K, -1))
    return out
