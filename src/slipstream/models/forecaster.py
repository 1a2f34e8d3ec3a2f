"""The network that a config and a signature describe."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from slipstream.config import Model, Signature
from slipstream.models.layers import SMALLEST_VARIANCE
from slipstream.models.masked import MaskedAutoencoder
from slipstream.models.noise.dropout import Noise
from slipstream.models.registry import load_network

OWN_KERNELS = "off"
"""In the place of a cuDNN algorithm: our own kernels"""


def build(model: Model, signature: Signature) -> Forecaster | MaskedAutoencoder:
    """Build a network that predicts, or an encoder to pre-train."""
    return MaskedAutoencoder(model, signature) if signature.masked else Forecaster(model, signature)


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
        core.use_own_kernels = algorithms[0] == OWN_KERNELS and next(model.parameters()).is_cuda
    if compiled and core._compiled_call_impl is None:
        core.compile()


class Forecaster(nn.Module):
    """A network between the normalization of each window and its inverse."""

    def __init__(self, model: Model, signature: Signature) -> None:
        super().__init__()
        self.normalize = model.normalize
        self.steps = signature.steps_out
        self.targets = signature.model_targets
        self.shared = signature.model_shared
        self.quantiles = signature.outputs
        self.core = load_network(model)(
            model,
            context=signature.context,
            inputs=signature.model_inputs,
            static=len(signature.static),
            outputs=self.steps * self.targets * self.quantiles,
        )

    def forward(self, inputs: Tensor, static: Tensor | None, noise: Noise | None = None) -> Tensor:
        """Predict; without noise, nothing is dropped."""
        centre = spread = None
        if self.normalize == "last":
            centre = inputs[-1]
            inputs = inputs - centre
        elif self.normalize == "window":
            variance, centre = torch.var_mean(inputs, dim=0, correction=0)
            spread = torch.sqrt(variance + SMALLEST_VARIANCE)
            inputs = (inputs - centre) / spread
        out: Tensor = self.core(inputs, static, noise).float()
        out = out.view(-1, self.steps, self.targets, self.quantiles)
        if centre is None or not self.shared:
            return out
        return self._restore(out, centre, spread)

    def _restore(self, out: Tensor, centre: Tensor, spread: Tensor | None) -> Tensor:
        """Undo the normalization of the targets that are inputs too."""
        restored = out[:, :, : self.shared]
        if spread is not None:
            restored = restored * spread[:, None, -self.shared :, None]
        restored = restored + centre[:, None, -self.shared :, None]
        if self.shared == self.targets:
            return restored
        return torch.cat([restored, out[:, :, self.shared :]], dim=2)
