"""What ways to compute the same thing have in common."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

BETA1, BETA2, EPSILON = 0.9, 0.999, 1e-8
"""Adam's, as torch has them by default"""


class Weights(NamedTuple):
    """One layer's, of K lanes and W directions; the gates' order is PyTorch's."""

    ih: Tensor
    """[K, W, G * H, D]"""
    hh: Tensor
    """[K, W, G * H, H]"""
    b_ih: Tensor
    """[K, W, G * H]"""
    b_hh: Tensor
    """[K, W, G * H]"""
