"""A temporal convolutional network: residual blocks of dilated causal convolutions.

Each block doubles the dilation, so that the last row has seen `1 + 2 * (kernel_size - 1) * (2 **
layers - 1)` tokens. After Bai, Kolter and Koltun (2018), without weight normalization.
"""

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from slipstream.config import Model
from slipstream.kernels import causal_conv
from slipstream.models.layers import (
    NO_FUTURE,
    SequenceNetwork,
    apply_linear,
    call_layer,
    to_patches,
)
from slipstream.models.noise import Noise, dropout


class TCN(SequenceNetwork):
    """A linear embedding of each token, then residual blocks, all of one width."""

    def __init__(
        self,
        model: Model,
        *,
        context: int,
        inputs: int,
        static: int,
        outputs: int | None,
        future: tuple[int, int] = NO_FUTURE,
    ) -> None:
        super().__init__()
        self.patch = model.patch
        self.width = model.sizes[0]
        self.embed = nn.Linear(inputs * model.patch, self.width)
        self.layers = nn.ModuleList(
            ResidualBlock(self.width, model.kernel_size, dilation=2**depth)
            for depth in range(len(model.sizes))
        )
        self.add_head(model, context, static, outputs, future)

    def encode(self, inputs: Tensor, noise: Noise | None = None) -> Tensor:
        tokens = apply_linear(self.embed, to_patches(inputs, self.patch))
        recompute = self.recompute and self.training
        for depth, block in enumerate(self.layers):
            tokens = call_layer(block, tokens, noise, 2 * depth, recompute=recompute)
        return tokens

    def make_states(self, batch: int, device: torch.device) -> list[Tensor]:
        """Return zeros for the rows that each convolution has seen before the first, [P, B, D]."""
        return [
            torch.zeros(_count_past(conv), batch, self.width, device=device)
            for conv in self._list_convolutions()
        ]

    def encode_rows(
        self, inputs: Tensor, states: Sequence[Tensor], _: Noise | None = None
    ) -> tuple[Tensor, list[Tensor]]:
        """Return the tokens of rows, continuing from these states, and the states after them."""
        tokens, after = apply_linear(self.embed, inputs), []
        hidden = tokens
        for number, (conv, past) in enumerate(zip(self._list_convolutions(), states, strict=True)):
            rows = torch.cat([past.to(hidden.dtype), hidden])
            after.append(rows[len(rows) - len(past) :].float())
            hidden = F.relu(_convolve(conv, rows)[len(past) :])
            if number % 2:  # a block ends
                hidden = tokens = F.relu(tokens + hidden)
        return tokens, after

    def _list_convolutions(self) -> list[nn.Conv1d]:
        blocks = (cast(ResidualBlock, block) for block in self.layers)
        return [conv for block in blocks for conv in (block.conv1, block.conv2)]


class ResidualBlock(nn.Module):
    """Two causal convolutions, each with ReLU and dropout, added to the block's input."""

    def __init__(self, width: int, kernel_size: int, *, dilation: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv1d(width, width, kernel_size, dilation=dilation)
        self.conv2 = nn.Conv1d(width, width, kernel_size, dilation=dilation)

    def forward(self, tokens: Tensor, noise: Noise | None, site: int) -> Tensor:
        """Return the block's outputs; sites from `site` on are reserved for its dropout."""
        hidden = dropout(F.relu(_convolve(self.conv1, tokens)), noise, site)
        hidden = dropout(F.relu(_convolve(self.conv2, hidden)), noise, site + 1)
        return F.relu(tokens + hidden)


def _count_past(conv: nn.Conv1d) -> int:
    """Return how many rows before its own a convolution reads."""
    return (conv.kernel_size[0] - 1) * conv.dilation[0]


def _convolve(conv: Any, tokens: Tensor) -> Tensor:
    return causal_conv(tokens, conv.weight, conv.bias, dilation=conv.dilation[0])
