"""What is asked of the model, and its loss."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from slipstream.config import Train

SMALLEST = 1e-4
"""Variance whose root still has a gradient"""


def window_losses(prediction: Tensor, target: Tensor, train: Train) -> Tensor:
    """The mean loss of each window, [B], from predictions [B, H, C, Q] and targets [B, H, C]."""
    losses = _losses(prediction, target[..., None], train).flatten(1)
    return losses[:, 0] if losses.shape[1] == 1 else losses.mean(dim=1)


def _losses(prediction: Tensor, target: Tensor, train: Train) -> Tensor:
    """Every single loss, by torch's own kernels where it has one for all of it."""
    if train.loss == "quantile":
        error = prediction - target
        level = _levels(train.quantiles, like=error)
        return torch.maximum(-level * error, (1 - level) * error)
    match train.loss:
        case "mse":
            return F.mse_loss(prediction, target, reduction="none")
        case "mae":
            return F.l1_loss(prediction, target, reduction="none")
        case "huber":
            return F.huber_loss(prediction, target, reduction="none", delta=train.huber_delta)


def point(prediction: Tensor, quantiles: tuple[float, ...]) -> Tensor:
    """The one value to report, [B, H, C]: the quantile nearest to the median."""
    if not quantiles:
        return prediction[..., 0]
    nearest = min(range(len(quantiles)), key=lambda i: abs(quantiles[i] - 0.5))
    return prediction[..., nearest]


def _levels(quantiles: tuple[float, ...], *, like: Tensor) -> Tensor:
    # built by fill kernels: copying a host tensor would not be allowed while a step is captured
    return torch.cat([torch.full((1,), q, device=like.device, dtype=like.dtype) for q in quantiles])


def masked_losses(rows: Tensor, truth: Tensor, mask: Tensor, train: Train) -> Tensor:
    """The mean loss of each window's masked rows, [B], of rows [T, B, F] with the mask [T, B]."""
    losses = _losses(rows, truth, train).mean(dim=2)
    return (losses * mask).sum(dim=0) / mask.sum(dim=0)


def collapse(tokens: Tensor, shares: Tensor) -> Tensor:
    """How little windows differ: the mean of relu(1 - deviation) over tokens [T, B, D] and units.

    Windows of no share are left out.
    """
    counts = (shares > 0).float()
    weights = (counts / counts.sum().clamp(min=1.0))[:, None]
    mean = (tokens * weights).sum(dim=1, keepdim=True)
    variance = ((tokens - mean).square() * weights).sum(dim=1)
    return torch.relu(1 - torch.sqrt(variance + SMALLEST)).mean()
