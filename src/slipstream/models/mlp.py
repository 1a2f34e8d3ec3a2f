"""MLP and linear models over the flattened window."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from slipstream.config import Model
from slipstream.models.layers import NO_FUTURE, Head, apply_linear, flatten_time
from slipstream.models.noise import Noise, dropout

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "silu": F.silu,
    "elu": F.elu,
    "leaky_relu": F.leaky_relu,
    "tanh": torch.tanh,
}
"""The activations by name. All of them map zero to zero, so that padding units with zero weights
change nothing in a pack"""


class FeedForward(nn.Module):
    """Hidden layers with their activation and dropout; none at all for the linear model."""

    def __init__(
        self,
        model: Model,
        *,
        context: int,
        inputs: int,
        static: int,
        outputs: int,
        future: tuple[int, int] = NO_FUTURE,
    ) -> None:
        super().__init__()
        width = context * inputs
        self.activation = ACTIVATIONS[model.activation]
        self.body = nn.ModuleDict()
        for depth, size in enumerate(model.sizes if model.spec.has_hidden else ()):
            # by the names of a sequence of linear, activation and dropout, which saved weights have
            self.body[str(3 * depth)] = nn.Linear(width, size)
            width = size
        self.head = Head(width, static, outputs, future if self.body else NO_FUTURE)

    def forward(self, inputs: Tensor, static: Tensor | None, noise: Noise | None = None) -> Tensor:
        hidden = flatten_time(inputs)
        for site, layer in enumerate(self.body.values()):
            hidden = dropout(self.activation(apply_linear(layer, hidden)), noise, site)
        out: Tensor = self.head(hidden, static)
        return out
