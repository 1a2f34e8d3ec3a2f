"""Random convolutions with a linear classifier: predictions in PyTorch.

Kernels with random weights, bias, dilation and padding each give two features of a window: the
largest response, and the share of positive ones. `scoring/convolutions.py` fits the classifier, as
the baseline rocket; `models/kinds/convolutions.py` has the same without torch. Shapes: T context
rows, B windows, F inputs, N kernels, G of them in a group, L taps, D = 2 N features, H predicted
rows, Q classes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from slipstream.config import Model
from slipstream.models.kinds.convolutions import MAX_CHANNELS, MAX_LENGTH, read_groups
from slipstream.models.layers import NO_FUTURE
from slipstream.models.noise import Noise

BLOCK_NUMBERS = 1 << 22
"""Responses that are held at once"""


@dataclass(frozen=True)
class Convolutions:
    """Random kernels, and a linear classifier on their features."""

    kernels: Tensor
    """[N, MAX_CHANNELS, 11]: weights, with zeros after the last tap of shorter kernels"""
    groups: Tensor
    """[groups, 4]: kernels, length, dilation and padding of each group; a group's kernels are next
    to each other"""
    channels: Tensor
    """[groups, MAX_CHANNELS]: the inputs that a group reads"""
    bias: Tensor
    """[N]"""
    mean: Tensor
    """[D]"""
    size: Tensor
    """[D]"""
    weights: Tensor
    """[D + 1, H * Q] float64: the constant last; logits, the temperature included"""

    def to_state(self) -> dict[str, Tensor]:
        """Return it as tensors alone."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}

    @classmethod
    def from_state(cls, state: Mapping[str, Tensor]) -> Convolutions:
        return cls(**{name: state[name] for name in cls.__dataclass_fields__})

    def to(self, device: torch.device) -> Convolutions:
        """Return it with all tensors on a device."""
        return Convolutions(**{name: values.to(device) for name, values in self.to_state().items()})

    def compute(self, inputs: Tensor) -> Tensor:
        """Return the features of windows, [T, B, F] to [B, D], in the precision of the kernels."""
        series = inputs.permute(1, 2, 0).to(self.kernels.dtype)
        groups = self.groups.tolist()
        size = max(BLOCK_NUMBERS // (len(inputs) * max(count for count, *_ in groups)), 1)
        return torch.cat([self.compute_part(part, groups) for part in series.split(size)])

    def compute_part(self, series: Tensor, groups: Sequence[Sequence[int]]) -> Tensor:
        """Return the features of a few windows [B, F, T]."""
        largest, positive, first = [], [], 0
        for group, channels in zip(groups, self.channels, strict=True):
            count, length, dilation, padding = group
            chosen = slice(first, first + count)
            first += count
            rows = torch.nn.functional.pad(series.index_select(1, channels), (padding, padding))
            # as one product: a CPU's dilated convolutions take ten times as long
            taps = torch.arange(length, device=rows.device) * dilation
            first_rows = torch.arange(rows.shape[2] - (length - 1) * dilation, device=rows.device)
            patches = rows[:, :, first_rows[:, None] + taps].permute(0, 2, 1, 3).flatten(2)
            kernels = self.kernels[chosen, : len(channels), :length].flatten(1)
            responses = torch.nn.functional.linear(patches, kernels, self.bias[chosen])
            largest.append(responses.amax(dim=1))
            positive.append((responses > 0).to(responses).mean(dim=1))
        return torch.cat([*largest, *positive], dim=1)

    def predict(self, inputs: Tensor) -> Tensor:
        """Return logits, [T, B, F] to [B, H * Q]."""
        return self.classify(self.compute(inputs))

    def classify(self, features: Tensor) -> Tensor:
        """Return logits, [B, D] to [B, H * Q]."""
        scaled, weights = ((features - self.mean) / self.size).double(), self.weights.double()
        return (scaled @ weights[:-1] + weights[-1]).float()


class RandomConvolutions(nn.Module):
    """Fitted convolutions as a network: `model.kind = "rocket"`.

    A share of positive responses jumps where a response passes zero. In double precision, other
    forms of the network find the same sign.
    """

    kernels: Tensor
    channels: Tensor
    bias: Tensor
    mean: Tensor
    size: Tensor
    weights: Tensor

    def __init__(
        self,
        model: Model,
        *,
        context: int,
        inputs: int,
        static: int,
        outputs: int,
        steps: int,
        future: tuple[int, int] = NO_FUTURE,
    ) -> None:
        super().__init__()
        self.groups = read_groups(model)
        count = sum(group.kernels for group in self.groups)
        channels = min(inputs, MAX_CHANNELS)
        self.register_buffer("kernels", torch.zeros(count, channels, MAX_LENGTH))
        self.register_buffer("channels", torch.zeros(len(self.groups), channels, dtype=torch.int64))
        self.register_buffer("bias", torch.zeros(count))
        self.register_buffer("mean", torch.zeros(2 * count))
        self.register_buffer("size", torch.zeros(2 * count))
        self.register_buffer("weights", torch.zeros(2 * count + 1, outputs))

    def forward(self, inputs: Tensor, static: Tensor | None, noise: Noise | None = None) -> Tensor:
        with torch.autocast(inputs.device.type, enabled=False):
            convolutions = Convolutions(
                kernels=self.kernels.double(),
                groups=torch.zeros(0),  # known already
                channels=self.channels,
                bias=self.bias.double(),
                mean=self.mean.double(),
                size=self.size.double(),
                weights=self.weights,
            )
            series = inputs.permute(1, 2, 0).double()
            return convolutions.classify(convolutions.compute_part(series, self.groups))
