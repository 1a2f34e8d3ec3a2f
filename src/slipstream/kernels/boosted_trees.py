"""The sums of the leaves that windows reach in boosted trees, as one kernel; `native/trees.c` has
the same for a CPU and says how.

Shapes: B windows, D features, M trees, S splits and L leaves of a tree, K sums.
"""

from collections.abc import Mapping

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.kernels.launch import launch

MAX_LEAVES = 31
"""The leaves of a tree are the bits of a positive number"""
BLOCK, WARPS = 256, 4


@triton.jit(do_not_specialize=["B"])
def _add_leaves(
    by_feature,
    feature,
    threshold,
    masks,
    value,
    level,
    offsets,
    outputs,
    B,
    S: tl.constexpr,
    L: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Add the trees of one sum, in their order, for a block of windows."""
    window = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    number = tl.program_id(1)
    valid = window < B
    total = tl.zeros([BLOCK], dtype=tl.float64) + tl.load(level + number)
    for tree in range(tl.load(offsets + number), tl.load(offsets + number + 1)):
        left = tl.full([BLOCK], -1, dtype=tl.int32) & tl.load(masks + tree * (1 + 2 * S))
        for split in tl.static_range(S):
            row = tl.load(feature + tree * S + split).to(tl.int64)
            x = tl.load(by_feature + row * B + window, mask=valid, other=0.0)
            on_left = tl.load(masks + tree * (1 + 2 * S) + 1 + 2 * split)
            on_right = tl.load(masks + tree * (1 + 2 * S) + 2 + 2 * split)
            left &= tl.where(x <= tl.load(threshold + tree * S + split), on_left, on_right)
        lowest = (left & -left).to(tl.float32)  # a power of two, whose exponent is its place
        leaf = (lowest.to(tl.int32, bitcast=True) >> 23) - 127
        total += tl.load(value + tree * L + leaf, mask=valid, other=0.0).to(tl.float64)
    tl.store(outputs + number.to(tl.int64) * B + window, total, mask=valid)


def add_leaves(features: Tensor, trees: Mapping[str, Tensor], level: Tensor) -> Tensor:
    """Return the constants [K] and the leaves' values, added up tree by tree: [B, D] to [B, K]
    float64."""
    B, K = len(features), len(level)
    outputs = torch.empty(K, B, dtype=torch.float64, device=features.device)
    by_output = trees["output"].argsort(stable=True)
    ordered = {
        name: values.index_select(0, by_output)
        for name, values in trees.items()
        if name not in ("level", "output")
    }
    counts = torch.arange(K + 1, device=features.device)
    offsets = torch.searchsorted(trees["output"].index_select(0, by_output), counts)
    (_, S), L = ordered["feature"].shape, ordered["value"].shape[1]
    assert L <= MAX_LEAVES
    if B:
        launch(
            _add_leaves,
            (triton.cdiv(B, BLOCK), K),
            *(features.T.contiguous(), ordered["feature"], ordered["threshold"].float()),
            *(make_masks(ordered), ordered["value"].float(), level.double(), offsets.int()),
            *(outputs, B),
            S=S,
            L=L,
            BLOCK=BLOCK,
            num_warps=WARPS,
        )
    return outputs.T


def make_masks(trees: Mapping[str, Tensor]) -> Tensor:
    """Return the leaves of each tree as the bits of a number, and those that each of its splits
    leaves on the left and on the right: [M, 1 + 2 S]."""
    path = trees["path"]
    bits = 1 << torch.arange(path.shape[2], dtype=torch.int32, device=path.device)

    def join(flags: Tensor) -> Tensor:
        return (flags * bits).sum(dim=-1, dtype=torch.int32)

    sides = torch.stack([~join(path < 0), ~join(path > 0)], dim=2).flatten(1)
    return torch.cat([join(trees["lefts"] >= 0)[:, None], sides], dim=1).contiguous()
