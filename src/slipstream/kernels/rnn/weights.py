"""What ways to compute the same thing have in common."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor
from torch.nn import functional as F

BETA1, BETA2, EPSILON = 0.9, 0.999, 1e-8
"""Adam's, as torch has them by default"""


class LayerWeights(NamedTuple):
    """One layer's, of K lanes and W directions; the gates' order is PyTorch's."""

    ih: Tensor
    """[K, W, G * H, D]"""
    hh: Tensor
    """[K, W, G * H, H]"""
    b_ih: Tensor
    """[K, W, G * H]"""
    b_hh: Tensor
    """[K, W, G * H]"""


def pad_units(weights: LayerWeights, more: int) -> LayerWeights:
    """A layer with more units, all of zeros: they stay zero and change nothing."""
    H = weights.hh.shape[3]

    def wider(weight: Tensor) -> Tensor:
        by_gate = weight.unflatten(2, (-1, H))
        dims = by_gate.dim() - 4
        found: Tensor = F.pad(by_gate, (0, 0) * dims + (0, more)).flatten(2, 3)
        return found

    wide = LayerWeights(*map(wider, weights))
    return wide._replace(hh=F.pad(wide.hh, (0, more)))


def unpad_units(out: Tensor, H: int, more: int) -> Tensor:
    """Outputs [..., W * (H + more)] less those of the units that `widened` put in."""
    by_way: Tensor = out.unflatten(-1, (-1, H + more))
    return by_way[..., :H].flatten(-2)
