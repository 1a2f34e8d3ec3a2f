"""Logistic regression on the values and statistics of a window: predictions in PyTorch.

`scoring/baselines.py` fits it, as the baseline logistic; `models/kinds/logistic.py` has the same
without torch. Shapes: T context rows, B windows, F inputs, K static columns, D features, H
predicted rows, Q classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from slipstream.config import Model
from slipstream.models.kinds.logistic import count_features, read_values
from slipstream.models.layers import NO_FUTURE
from slipstream.models.noise import Noise


def compute_statistics(inputs: Tensor, static: Tensor | None, values: int = 0) -> Tensor:
    """Return the statistics of each input, so many `values` of it, each the mean of neighbouring
    rows, and the static columns: [T, B, F] to [B, (7 + values) F + K]."""
    rows = inputs.double()
    time = torch.arange(len(rows), dtype=rows.dtype, device=rows.device)
    time = (time - time.mean())[:, None, None]
    slope = (time * rows).sum(dim=0) / time.square().sum().clamp(min=1.0)
    deviation, mean = torch.std_mean(rows, dim=0, correction=0)
    parts = [mean, deviation, rows[0], rows[-1], rows.amin(dim=0), rows.amax(dim=0), slope]
    if values:
        pooled = torch.nn.functional.adaptive_avg_pool1d(rows.permute(1, 2, 0), values)
        parts.append(pooled.flatten(1))
    return torch.cat(parts if static is None else [*parts, static.double()], dim=1)


@dataclass(frozen=True)
class Logistic:
    """Multinomial logistic regression on standardised features, one for every predicted row."""

    mean: Tensor
    size: Tensor
    weights: Tensor
    """[D + 1, H * Q], the constant last"""
    penalty: float
    values: int = 0
    """Values of each input among the features, beside its statistics"""

    def to_state(self) -> dict[str, Tensor]:
        """Return it as tensors alone."""
        numbers = {"penalty": self.penalty, "values": self.values}
        state = {name: torch.tensor(n, dtype=torch.float64) for name, n in numbers.items()}
        return {"mean": self.mean, "size": self.size, "weights": self.weights} | state

    @classmethod
    def from_state(cls, state: Mapping[str, Tensor]) -> Logistic:
        penalty, values = float(state["penalty"]), int(state.get("values", 0))  # 0.1 has none
        return cls(state["mean"], state["size"], state["weights"], penalty, values)

    def predict(self, features: Tensor) -> Tensor:
        """Return logits: [B, D] to [B, H * Q]."""
        scaled = (features - self.mean) / self.size
        return (scaled @ self.weights[:-1] + self.weights[-1]).float()


class LogisticRegression(nn.Module):
    """A fitted logistic regression as a network: `model.kind = "logistic"`."""

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
        self.values = read_values(model)
        count = count_features(self.values, inputs, static)
        self.register_buffer("mean", torch.zeros(count))
        self.register_buffer("size", torch.zeros(count))
        self.register_buffer("weights", torch.zeros(count + 1, outputs))

    def forward(self, inputs: Tensor, static: Tensor | None, noise: Noise | None = None) -> Tensor:
        with torch.autocast(inputs.device.type, enabled=False):
            features = compute_statistics(inputs, static, self.values)
            weights = (self.mean.double(), self.size.double(), self.weights.double())
            return Logistic(*weights, penalty=0.0, values=self.values).predict(features)
