"""What is asked of the model, and its loss."""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.config import Train


def window_losses(prediction: Tensor, target: Tensor, train: Train) -> Tensor:
    """The mean loss of each window, [B], from predictions [B, H, C, Q] and targets [B, H, C]."""
    error = prediction - target[..., None]
    match train.loss:
        case "mse":
            losses = error.square()
        case "mae":
            losses = error.abs()
        case "huber":
            size, delta = error.abs(), train.huber_delta
            losses = torch.where(size < delta, 0.5 * error.square(), delta * (size - 0.5 * delta))
        case "quantile":
            level = _levels(train.quantiles, like=error)
            losses = torch.maximum(-level * error, (1 - level) * error)
    return losses.mean(dim=(1, 2, 3))


def point(prediction: Tensor, quantiles: tuple[float, ...]) -> Tensor:
    """The one value to report, [B, H, C]: the quantile nearest to the median."""
    if not quantiles:
        return prediction[..., 0]
    nearest = min(range(len(quantiles)), key=lambda i: abs(quantiles[i] - 0.5))
    return prediction[..., nearest]


def _levels(quantiles: tuple[float, ...], *, like: Tensor) -> Tensor:
    # built by fill kernels: copying a host tensor would not be allowed while a step is captured
    return torch.cat([torch.full((1,), q, device=like.device, dtype=like.dtype) for q in quantiles])
