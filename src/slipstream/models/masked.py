"""An encoder that learns without labels: it fills in rows that it does not see.

Shapes: T context rows, B windows, F inputs, D the encoder's width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from slipstream.config import Model, Signature
from slipstream.models.dropout import Noise
from slipstream.models.parts import SMALLEST_VARIANCE
from slipstream.models.recurrent import Recurrent
from slipstream.models.transformer import Transformer

ENCODERS: dict[str, type[Recurrent] | type[Transformer]] = {
    "lstm": Recurrent,
    "gru": Recurrent,
    "transformer": Transformer,
}


class Masked(nn.Module):
    """A learned row in the place of masked ones, the encoder, and a decoder back to rows."""

    def __init__(self, model: Model, signature: Signature) -> None:
        super().__init__()
        self.normalize, self.patch = model.normalize, model.patch
        self.inputs = signature.model_inputs
        self.token = nn.Parameter(torch.randn(self.inputs) * 0.02)
        core = ENCODERS[model.kind](
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
        self, inputs: Tensor, mask: Tensor, noise: Noise | None = None
    ) -> tuple[Tensor, Tensor]:
        """All rows [T, B, F] as they are filled in, and the encoder's tokens [T / patch, B, D]."""
        if self.normalize == "none":
            return self._filled(inputs, mask, noise)
        centre, spread = _visible_scale(inputs, mask, self.normalize)
        rows, tokens = self._filled((inputs - centre) / spread, mask, noise)
        return rows * spread + centre, tokens

    def _filled(self, rows: Tensor, mask: Tensor, noise: Noise | None) -> tuple[Tensor, Tensor]:
        tokens: Tensor = self.core(torch.where(mask[..., None], self.token, rows), None, noise)
        hidden = F.gelu(self.decoder["hidden"](tokens))
        return _to_rows(self.decoder["out"](hidden).float(), self.patch), tokens


def _visible_scale(inputs: Tensor, mask: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """What a window is normalized by, [1, B, F] each, from the rows that are not masked."""
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
