"""Losses of predictions and of masked rows, and the point prediction that is reported.

Shapes: B windows, H predicted rows, C targets, Q quantiles or classes.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from slipstream.base.statistics import find_median, select_median
from slipstream.config import CLASS_LOSSES, Config, Train, format_setting

MIN_VARIANCE = 1e-4
"""Added to a variance, so that its square root has a finite gradient at zero"""


def compute_window_losses(prediction: Tensor, target: Tensor, train: Train) -> Tensor:
    """Return the mean loss of each window, [B], from predictions [B, H, C, Q] and targets."""
    if train.loss in CLASS_LOSSES:
        losses = _compute_class_losses(prediction, target, train).flatten(1)
    else:
        if train.loss != "quantile" and prediction.shape[-1] > 1:
            prediction = select_point(prediction, train.quantiles)[..., None]
        losses = _compute_losses(prediction, target[..., None], train).flatten(1)
    return losses[:, 0] if losses.shape[1] == 1 else losses.mean(dim=1)


def _compute_losses(prediction: Tensor, target: Tensor, train: Train) -> Tensor:
    """Return the loss of every value, by one of torch's kernels where there is one."""
    if train.loss == "quantile":
        error = prediction - target
        level = _make_constants(train.quantiles, like=error)
        return torch.maximum(-level * error, (1 - level) * error)
    match train.loss:
        case "mse":
            return F.mse_loss(prediction, target, reduction="none")
        case "mae":
            return F.l1_loss(prediction, target, reduction="none")
        case "huber":
            return F.huber_loss(prediction, target, reduction="none", delta=train.huber_delta)
    raise AssertionError(train.loss)


def _compute_class_losses(logits: Tensor, target: Tensor, train: Train) -> Tensor:
    """Return the losses of class numbers [B, H, C].

    A window that only pads a batch may have no label; its weight is 0.
    """
    log_probs = torch.log_softmax(logits, dim=-1)
    numbers = torch.arange(logits.shape[-1], device=logits.device)
    is_label = target[..., None] == numbers  # a sum over it repeats its bits, a gather may not
    of_label = (log_probs * is_label).sum(dim=-1)
    losses = -of_label
    if train.label_smoothing:
        losses = losses.lerp(-log_probs.mean(dim=-1), train.label_smoothing)
    if train.loss == "focal":
        # at 0 the power's slope may be infinite
        losses = losses * (1 - of_label.exp()).clamp(min=1e-6) ** train.focal_gamma
    assert train.class_weights != "balanced", "numbers by now, from the training windows"
    if train.class_weights != "none":
        losses = losses * (_make_constants(train.class_weights, like=logits) * is_label).sum(dim=-1)
    return losses


def average_predictions(
    predictions: Sequence[Tensor], *, classes: bool, weights: Sequence[float] | None = None
) -> Tensor:
    """Return the mean of several models' predictions; for classes, the logarithm of their mean
    probabilities.

    The weights add up to one; without any, all count the same.
    """
    if classes:
        logs = torch.stack([torch.log_softmax(logits, dim=-1) for logits in predictions])
        if weights is None:
            return logs.logsumexp(dim=0) - math.log(len(predictions))
        shares = logs.new_tensor(weights).log().view(-1, *[1] * predictions[0].ndim)
        return (logs + shares).logsumexp(dim=0)
    total = predictions[0] if weights is None else predictions[0] * weights[0]
    for number, prediction in enumerate(predictions[1:], start=1):
        total = total + (prediction if weights is None else prediction * weights[number])
    return total / len(predictions) if weights is None else total


def make_validation_settings(train: Train) -> Train:
    """Return the settings with `train.metric` as the loss."""
    return train if train.metric == "loss" else train.model_copy(update={"loss": train.metric})


def select_point(prediction: Tensor, quantiles: tuple[float, ...]) -> Tensor:
    """Return the value to report, [B, H, C]: the median."""
    point: Tensor = select_median(prediction, quantiles)
    return point


def explain_point(config: Config) -> list[str]:
    """Explain the point prediction where `train.quantiles` does not contain the median."""
    levels = config.train.quantiles
    if config.train.loss != "quantile" or 0.5 in levels:
        return []
    low, high, share = find_median(levels)
    source = f"that of {levels[low]:g}, the nearest"
    if share:
        between = "the mean of" if abs(share - 0.5) < 1e-9 else "interpolated between"
        source = f"{between} those of {levels[low]:g} and {levels[high]:g}"
    return [
        f"train.quantiles = {format_setting(config, 'train.quantiles')} has no 0.5: the point "
        f"prediction, which mae, rmse and the baselines are about, is {source}"
    ]


def _make_constants(values: tuple[float, ...], *, like: Tensor) -> Tensor:
    # by fill kernels: a host tensor cannot be copied while a step is captured
    return torch.cat([torch.full((1,), v, device=like.device, dtype=like.dtype) for v in values])


def compute_masked_losses(rows: Tensor, truth: Tensor, train: Train) -> Tensor:
    """Return the mean loss of each window's masked rows: [M, B, F] to [B]."""
    return _compute_losses(rows, truth, train).mean(dim=(0, 2))


def compute_collapse_penalty(tokens: Tensor, shares: Tensor) -> Tensor:
    """Return a penalty on windows that differ little: the mean of relu(1 - deviation) over tokens
    [T, B, D].

    Windows whose share is 0 are left out.
    """
    counts = (shares > 0).float()
    weights = (counts / counts.sum().clamp(min=1.0))[:, None]
    mean = (tokens * weights).sum(dim=1, keepdim=True)
    variance = ((tokens - mean).square() * weights).sum(dim=1)
    return torch.relu(1 - torch.sqrt(variance + MIN_VARIANCE)).mean()
