"""The weights of a recurrent layer, layers with more units, and how `stepwise` runs a layer."""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

ONE_BACKWARD = "the backward pass overwrites what it reads and runs once"
"""The message about a second backward pass"""


class LayerWeights(NamedTuple):
    """The weights of K lanes and W directions; the gates are in PyTorch's order."""

    ih: Tensor
    """[K, W, G * H, D]"""
    hh: Tensor
    """[K, W, G * H, H]"""
    b_ih: Tensor
    """[K, W, G * H]"""
    b_hh: Tensor
    """[K, W, G * H]"""


class StepwiseOptions(NamedTuple):
    """How a layer runs."""

    kind: str
    last: bool
    """Return each direction's last output only"""
    dtype: torch.dtype
    """The type of products' operands and outputs; states are fp32"""
    use_triton: bool = False
    """Whether a step runs one of our kernels after its product"""
    fast_tanh: bool = False
    """tanh by the GPU's own instruction"""
    tile: Any = None
    """The division of the layer into programs of `wide`, where that is used"""

    @property
    def is_lstm(self) -> bool:
        return self.kind == "lstm"


def pad_units(weights: LayerWeights, more: int) -> LayerWeights:
    """Return weights with additional units of zero weights, whose outputs stay zero and change
    nothing."""
    H = weights.hh.shape[3]

    def pad(weight: Tensor) -> Tensor:
        by_gate = weight.unflatten(2, (-1, H))
        after = (0, 0) * (by_gate.dim() - 4)
        padded: Tensor = F.pad(by_gate, (*after, 0, more)).flatten(2, 3)
        return padded

    padded = LayerWeights(*map(pad, weights))
    return padded._replace(hh=F.pad(padded.hh, (0, more)))


def unpad_units(out: Tensor, H: int, more: int) -> Tensor:
    """Return outputs [..., W * (H + more)] without the units that `pad_units` added."""
    by_direction: Tensor = out.unflatten(-1, (-1, H + more))
    return by_direction[..., :H].flatten(-2)
