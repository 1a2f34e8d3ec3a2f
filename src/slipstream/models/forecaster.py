"""The network that a config and a signature describe: one that predicts, or an encoder in masked
pre-training, which fills in rows that it does not see.

Shapes: T context rows, M of them masked, B windows, F inputs, D the encoder's width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from slipstream.config import Model, Signature
from slipstream.kernels import find_library
from slipstream.models.layers import load_network
from slipstream.models.noise import Noise, gather_rows
from slipstream.models.numpy_layers import SMALLEST_VARIANCE

OWN_KERNELS = "slipstream"
"""The name of our own kernels for recurrent layers, which run instead of cuDNN's or PyTorch's"""


def build(model: Model, signature: Signature) -> WindowPredictor | MaskedAutoencoder:
    """Build a network that predicts, or an encoder to pre-train."""
    return (
        MaskedAutoencoder(model, signature)
        if signature.masked
        else WindowPredictor(model, signature)
    )


def has_dropout(model: Model) -> bool:
    """Whether dropout changes anything in this model."""
    spec = model.spec  # of a custom one, Slipstream drops nothing
    between_layers = len(model.sizes) > 1 or not spec.is_recurrent
    return model.dropout > 0 and spec.has_hidden and between_layers


def set_execution(
    model: nn.Module, *, algorithms: tuple[str, ...], recompute: bool, compiled: bool
) -> None:
    """Make a model run as the plan says; weights and their names stay the same."""
    core: Any = model.core
    core.recompute = recompute
    if algorithms:
        core.algorithms = algorithms
        on_cuda = next(model.parameters()).is_cuda
        usable = on_cuda or find_library() is not None
        core.use_own_kernels = algorithms[0] == OWN_KERNELS and usable
    if compiled and core._compiled_call_impl is None:
        core.compile()


class WindowPredictor(nn.Module):
    """A network between the normalization of each window and its inverse."""

    def __init__(self, model: Model, signature: Signature) -> None:
        super().__init__()
        self.normalize = model.normalize
        self.steps, self.quantiles = signature.steps_out, signature.outputs
        self.targets, self.shared = signature.model_targets, signature.model_shared
        self.future = len(signature.future)
        steps = {"steps": self.steps} if model.spec.takes_steps else {}
        self.core = load_network(model)(
            model,
            context=signature.context,
            inputs=signature.model_inputs,
            static=signature.static_width,
            outputs=self.steps * self.targets * self.quantiles,
            future=signature.future_shape,
            **steps,
        )

    def forward(
        self, inputs: Tensor, static: Tensor | None = None, noise: Noise | None = None
    ) -> Tensor:
        """Return the predictions; without noise, nothing is dropped."""
        centre = spread = None
        if self.normalize != "none":
            centre = _leave_out(inputs[-1], self.future, 0.0)
            inputs = inputs - centre
        if centre is not None and self.normalize == "window":
            # The mean of what is left, not of the rows: in float32 the mean of nearly constant
            # rows is off by their last digit, which the division by next to nothing multiplies.
            variance, mean = torch.var_mean(inputs, dim=0, correction=0)
            spread = _leave_out(torch.sqrt(variance + SMALLEST_VARIANCE), self.future, 1.0)
            mean = _leave_out(mean, self.future, 0.0)
            inputs, centre = (inputs - mean) / spread, centre + mean
        out: Tensor = self.core(inputs, static, noise).float()
        out = out.view(-1, self.steps, self.targets, self.quantiles)
        if centre is None or not self.shared:
            return out
        return self._restore(out, centre, spread)

    def encode_rows(
        self, inputs: Tensor, states: Sequence[Tensor], noise: Noise | None = None
    ) -> tuple[Tensor, list[Tensor]]:
        """Return the features of each row, [T, B, D], continuing from these states, and the states
        after the last row; for a recurrent or convolutional network whose tokens are rows."""
        core: Any = self.core
        tokens, after = core.encode_rows(inputs, states, noise)
        return tokens, after

    def decode_rows(self, features: Tensor, static: Tensor | None) -> Tensor:
        """Predict from the features of rows, [N, D]; static is [N, K]."""
        head: Any = self.core.head
        with torch.autocast(features.device.type, enabled=False):
            out: Tensor = head(features.float(), static)
        return out.view(-1, self.steps, self.targets, self.quantiles)

    def make_states(self, batch: int, device: torch.device) -> list[Tensor]:
        """Return the states before the first row of a series, one per layer."""
        core: Any = self.core
        states: list[Tensor] = core.make_states(batch, device)
        return states

    def _restore(self, out: Tensor, centre: Tensor, spread: Tensor | None) -> Tensor:
        """Undo the normalization of the targets that are inputs too."""
        restored = out[:, :, : self.shared]
        if spread is not None:
            restored = restored * spread[:, None, -self.shared :, None]
        restored = restored + centre[:, None, -self.shared :, None]
        if self.shared == self.targets:
            return restored
        return torch.cat([restored, out[:, :, self.shared :]], dim=2)


class MaskedAutoencoder(nn.Module):
    """An encoder with a learned row instead of the masked ones, and a decoder back to rows."""

    def __init__(self, model: Model, signature: Signature) -> None:
        super().__init__()
        self.normalize, self.patch = model.normalize, model.patch
        self.inputs, self.future = signature.model_inputs, len(signature.future)
        self.token = nn.Parameter(torch.randn(self.inputs) * 0.02)
        core = load_network(model)(
            model, context=signature.context, inputs=self.inputs, static=0, outputs=None
        )
        self.core, width = core, core.width
        hidden = nn.Linear(width, signature.decoder)
        out = nn.Linear(signature.decoder, self.inputs * self.patch)
        self.decoder = nn.ModuleDict({"hidden": hidden, "out": out})

    def forward(
        self,
        inputs: Tensor,
        mask: Tensor,
        noise: Noise | None = None,
        positions: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return all rows [T, B, F] filled in, or the rows at positions [M, B], and the encoder's
        tokens [T / patch, B, D]."""
        if self.normalize == "none":
            return self._fill(inputs, mask, noise, positions)
        centre = _leave_out(_last_visible(inputs, mask), self.future, 0.0)
        inputs = inputs - centre
        if self.normalize == "last":
            rows, tokens = self._fill(inputs, mask, noise, positions)
            return rows + centre, tokens
        mean, spread = _visible_scale(inputs, mask)  # of what is left, as in WindowPredictor
        mean = _leave_out(mean, self.future, 0.0)
        spread = _leave_out(spread, self.future, 1.0)
        rows, tokens = self._fill((inputs - mean) / spread, mask, noise, positions)
        return rows * spread + (centre + mean), tokens

    def _fill(
        self, rows: Tensor, mask: Tensor, noise: Noise | None, positions: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        tokens: Tensor = self.core(torch.where(mask[..., None], self.token, rows), None, noise)
        if positions is None:
            return _to_rows(self._decode(tokens), self.patch), tokens
        token_positions = positions // self.patch if self.patch > 1 else positions
        filled = self._decode(gather_rows(tokens, token_positions))
        if self.patch > 1:
            of_token = filled.unflatten(-1, (self.patch, -1))
            within = (positions % self.patch)[..., None, None].expand(-1, -1, 1, self.inputs)
            filled = of_token.gather(2, within).squeeze(2)
        return filled, tokens

    def _decode(self, tokens: Tensor) -> Tensor:
        filled: Tensor = self.decoder["out"](F.gelu(self.decoder["hidden"](tokens)))
        return filled.float()


def _leave_out(by_column: Tensor, count: int, value: float) -> Tensor:
    """Return a normalization tensor with a neutral `value` for the first columns, which are known
    ahead: an hour or a holiday has an absolute meaning."""
    return F.pad(by_column[..., count:], (count, 0), value=value) if count else by_column


def _last_visible(inputs: Tensor, mask: Tensor) -> Tensor:
    """Return each window's last row that is not masked, [1, B, F]."""
    position = torch.arange(len(mask), device=mask.device)[:, None]
    last = (position * ~mask).amax(dim=0)
    return inputs.gather(0, last[None, :, None].expand(-1, -1, inputs.shape[-1]))


def _visible_scale(inputs: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean and the spread of each window, [1, B, F] each, from the rows that are not
    masked."""
    seen = (~mask)[..., None]
    count = seen.sum(dim=0, keepdim=True)
    centre = (inputs * seen).sum(dim=0, keepdim=True) / count
    variance = ((inputs - centre).square() * seen).sum(dim=0, keepdim=True) / count
    return centre, torch.sqrt(variance + SMALLEST_VARIANCE)


def _to_rows(tokens: Tensor, patch: int) -> Tensor:
    """Return the rows [T, B, F] of tokens [T / patch, B, patch * F]."""
    if patch == 1:
        return tokens
    length, batch, width = tokens.shape
    rows = tokens.view(length, batch, patch, width // patch).transpose(1, 2)
    return rows.reshape(length * patch, batch, width // patch)
