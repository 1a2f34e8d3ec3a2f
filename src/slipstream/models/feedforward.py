"""MLP and linear models over the flattened window."""

from __future__ import annotations

from torch import Tensor, nn

from slipstream.config import Model
from slipstream.models.parts import Head, flatten_time


class FeedForward(nn.Module):
    """Hidden layers with ReLU and dropout; none at all for the linear model."""

    def __init__(
        self, model: Model, *, context: int, inputs: int, static: int, outputs: int
    ) -> None:
        super().__init__()
        width = context * inputs
        body: list[nn.Module] = []
        for size in model.sizes if model.kind == "mlp" else ():
            body += [nn.Linear(width, size), nn.ReLU(), nn.Dropout(model.dropout)]
            width = size
        self.body = nn.Sequential(*body)
        self.head = Head(width, static, outputs)

    def forward(self, inputs: Tensor, static: Tensor | None) -> Tensor:
        out: Tensor = self.head(self.body(flatten_time(inputs)), static)
        return out
