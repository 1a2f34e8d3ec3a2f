"""What the ways to run a recurrent layer pass to each other."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


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
