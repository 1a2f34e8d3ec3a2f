"""A pre-norm Transformer encoder over patches."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from slipstream.config import Model
from slipstream.models.parts import Head, Pool, to_patches


class Transformer(nn.Module):
    def __init__(
        self, model: Model, *, context: int, inputs: int, static: int, outputs: int
    ) -> None:
        super().__init__()
        width, tokens = model.sizes[0], context // model.patch
        self.patch = model.patch
        self.dropout = model.dropout
        self.recompute = False
        self.embed = nn.Linear(inputs * model.patch, width)
        if model.positions == "learned":
            self.positions = nn.Parameter(torch.randn(tokens, 1, width) * 0.02)
        else:
            self.register_buffer("positions", _sinusoids(tokens, width), persistent=False)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width,
                model.heads,
                dim_feedforward=width * model.expansion,
                dropout=model.dropout,
                activation="gelu",
                norm_first=True,
            )
            for _ in model.sizes
        )
        self.norm = nn.LayerNorm(width)
        self.pool = Pool(model.pool, width=width, length=tokens)
        self.head = Head(self.pool.out, static, outputs)

    def forward(self, inputs: Tensor, static: Tensor | None) -> Tensor:
        tokens = self.embed(to_patches(inputs, self.patch)) + self.positions
        tokens = F.dropout(tokens, self.dropout, self.training)
        for layer in self.layers:
            if self.recompute and self.training:
                keep = self.dropout > 0
                tokens = checkpoint(layer, tokens, use_reentrant=False, preserve_rng_state=keep)
            else:
                tokens = layer(tokens)
        out: Tensor = self.head(self.pool(self.norm(tokens)), static)
        return out


def _sinusoids(tokens: int, width: int) -> Tensor:
    """[tokens, 1, width]: sines and cosines of falling frequency."""
    rates = torch.exp(-math.log(10_000.0) * torch.arange(0, width, 2) / width)
    angles = torch.arange(tokens)[:, None] * rates
    table = torch.zeros(tokens, 1, width)
    table[:, 0, 0::2] = torch.sin(angles)
    table[:, 0, 1::2] = torch.cos(angles)[:, : width // 2]
    return table
