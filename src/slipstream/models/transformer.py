"""A pre-norm Transformer encoder over patches."""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from slipstream.config import Model
from slipstream.kernels import attention, linear
from slipstream.models.layers import (
    NO_FUTURE,
    SequenceNetwork,
    apply_linear,
    apply_norm,
    call_layer,
    to_patches,
)
from slipstream.models.noise import Noise, dropout


class Transformer(SequenceNetwork):
    """Dropout on the embeddings, after attention, and inside and after the feed-forward part; none
    on attention's own weights."""

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
        width, tokens = model.sizes[0], context // model.patch
        self.patch = model.patch
        self.embed = nn.Linear(inputs * model.patch, width)
        if model.positions == "learned":
            self.positions = nn.Parameter(torch.randn(tokens, 1, width) * 0.02)
        else:
            self.register_buffer("positions", _sinusoids(tokens, width), persistent=False)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, model.heads, dim_feedforward=width * model.expansion)
            for _ in model.sizes
        )
        self.norm = nn.LayerNorm(width)
        self.width = width
        self.add_head(model, context, static, outputs, future)

    def encode(self, inputs: Tensor, noise: Noise | None = None) -> Tensor:
        tokens = apply_linear(self.embed, to_patches(inputs, self.patch)) + self.positions
        tokens = dropout(tokens, noise, 0)
        recompute = self.recompute and self.training
        for depth, layer in enumerate(self.layers):
            tokens = call_layer(run_layer, layer, tokens, noise, 1 + 3 * depth, recompute=recompute)
        return apply_norm(self.norm, tokens, tokens.dtype)


def run_layer(layer: Any, tokens: Tensor, noise: Noise | None, site: int) -> Tensor:
    """Return the result of `nn.TransformerEncoderLayer` with norms first, from its weights; sites
    from `site` on are reserved for its dropout."""
    attended = _attend(layer.self_attn, _normalize(layer.norm1, tokens))
    tokens = tokens + dropout(attended, noise, site)
    inner = F.gelu(apply_linear(layer.linear1, _normalize(layer.norm2, tokens)))
    inner = dropout(inner, noise, site + 1)
    return tokens + dropout(apply_linear(layer.linear2, inner), noise, site + 2)


def _normalize(norm: nn.LayerNorm, tokens: Tensor) -> Tensor:
    """Return x normalized, in the type of a product's operands."""
    kind = tokens.device.type
    half = torch.is_autocast_enabled(kind)
    return apply_norm(norm, tokens, torch.get_autocast_dtype(kind) if half else tokens.dtype)


def _attend(module: Any, tokens: Tensor) -> Tensor:
    """Return the multi-head attention of a sequence [T, B, D] to itself."""
    joined = linear(tokens, module.in_proj_weight, module.in_proj_bias)
    return apply_linear(module.out_proj, attention(joined, module.num_heads))


def _sinusoids(tokens: int, width: int) -> Tensor:
    """Return sines and cosines of falling frequency, [tokens, 1, width]."""
    rates = torch.exp(-math.log(10_000.0) * torch.arange(0, width, 2) / width)
    angles = torch.arange(tokens)[:, None] * rates
    table = torch.zeros(tokens, 1, width)
    table[:, 0, 0::2] = torch.sin(angles)
    table[:, 0, 1::2] = torch.cos(angles)[:, : width // 2]
    return table
