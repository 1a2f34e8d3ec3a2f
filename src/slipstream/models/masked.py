"""Masked pre-training of an encoder: it fills in rows that it does not see.

Shapes: T context rows, M of them masked, B windows, F inputs, D the encoder's width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from slipstream.config import Model, Signature
from slipstream.models.layers import SMALLEST_VARIANCE
from slipstream.models.noise.dropout import Noise
from slipstream.models.noise.masks import gather_rows
from slipstream.models.registry import load_network


class MaskedAutoencoder(nn.Module):
    """A learned row in the place of masked ones, the encoder, and a decoder back to rows."""

    def __init__(self, model: Model, signature: Signature) -> None:
        super().__init__()
        self.normalize, self.patch = model.normalize, model.patch
        self.inputs = signature.model_inputs
        self.token = nn.Parameter(torch.randn(self.inputs) * 0.02)
        core = load_network(model)(
            model, context=signature.context, inputs=self.inputs, static=0, outputs=None
        )
        self.core, width = core, core.width
        self.decoder = nn.ModuleDict(
            {
                "hidden": nn.Linear(width, signature.decoder),
                "out": nn.Linear(signature.decoder, self.inputs * self.patch),
            }
        )

    def forward(
        self,
        inputs: Tensor,
        mask: Tensor,
        noise: Noise | None = None,
        places: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return all rows [T, B, F] filled in, or those at places [M, B], and the encoder's tokens
        [T / patch, B, D]."""
        if self.normalize == "none":
            return self._fill(inputs, mask, noise, places)
        centre, spread = _visible_scale(inputs, mask, self.normalize)
        rows, tokens = self._fill((inputs - centre) / spread, mask, noise, places)
        return rows * spread + centre, tokens

    def _fill(
        self, rows: Tensor, mask: Tensor, noise: Noise | None, places: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        tokens: Tensor = self.core(torch.where(mask[..., None], self.token, rows), None, noise)
        if places is None:
            return _to_rows(self._decode(tokens), self.patch), tokens
        filled = self._decode(
            gather_rows(tokens, places // self.patch if self.patch > 1 else places)
        )
        if self.patch > 1:
            of_token = filled.unflatten(-1, (self.patch, -1))
            within = (places % self.patch)[..., None, None].expand(-1, -1, 1, self.inputs)
            filled = of_token.gather(2, within).squeeze(2)
        return filled, tokens

    def _decode(self, tokens: Tensor) -> Tensor:
        hidden = F.gelu(self.decoder["hidden"](tokens))
        filled: Tensor = self.decoder["out"](hidden)
        return filled.float()


def _visible_scale(inputs: Tensor, mask: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """Centre and spread of each window, [1, B, F] each, from the rows that are not masked."""
    one = torch.ones_like(inputs[:1])
    seen = (~mask)[..., None]
    if kind == "last":
        place = torch.arange(len(mask), device=mask.device)[:, None]
        last = (place * seen[..., 0]).amax(dim=0)
        index = last[None, :, None].expand(-1, -1, inputs.shape[-1])
        return inputs.gather(0, index), one
    count = seen.sum(dim=0, keepdim=True)
    centre = (inputs * seen).sum(dim=0, keepdim=True) / count
    variance = ((inputs - centre).square() * seen).sum(dim=0, keepdim=True) / count
    return centre, torch.sqrt(variance + SMALLEST_VARIANCE)


def _to_rows(tokens: Tensor, patch: int) -> Tensor:
    """[T / patch, B, patch * F] to [T, B, F]."""
    if patch == 1:
        return tokens
    length, batch, width = tokens.shape
    rows = tokens.view(length, batch, patch, width // patch).transpose(1, 2)
    return rows.reshape(length * patch, batch, width // patch)
