"""What a step asks of the model: one function from some windows to the loss of each.

Training alone, captured or not, and every lane of a pack call the same. Shapes: B windows,
T context rows, F inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from slipstream.config import Config, Signature
from slipstream.data.windows import Batch
from slipstream.engine.plan import Plan
from slipstream.models import Noise, masks
from slipstream.objectives import collapse, masked_losses, window_losses

Objective = Callable[[Callable[..., Any], Batch, Tensor, Noise | None], Tensor]
"""From a model, windows, what each counts for (0: padding) and noise to losses [B]. Without noise
nothing is dropped, and masks are always the same: so is validation."""


def of(config: Config, signature: Signature, plan: Plan, *, drops: bool) -> Objective:
    """The one that a run has; `drops` says whether the model gets the noise."""
    find = _filled_in if signature.masked else _predicted
    return partial(find, config=config, fold=signature.fold, plan=plan, drops=drops)


def draws(config: Config) -> bool:
    """Whether it is random by itself, whatever the model drops."""
    return config.masked


def forward(
    model: Callable[..., Tensor],
    inputs: Tensor,
    static: Tensor | None,
    noise: Noise | None = None,
    *,
    plan: Plan,
) -> Tensor:
    """The model's prediction, in fp32, computed in the plan's precision."""
    with in_precision(plan):
        prediction: Tensor = model(inputs, static, noise)
    return prediction.float()


def in_precision(plan: Plan) -> torch.autocast:
    """Within it, products are computed in the plan's precision."""
    enabled = plan.autocast is not None
    return torch.autocast(plan.device.type, dtype=plan.autocast, enabled=enabled)


def _predicted(
    model: Callable[..., Tensor],
    batch: Batch,
    _: Tensor,
    noise: Noise | None,
    *,
    config: Config,
    fold: int,
    plan: Plan,
    drops: bool,
) -> Tensor:
    """How far predictions are from the targets."""
    inputs, static, targets = batch
    prediction = forward(model, inputs, static, noise if drops else None, plan=plan)
    return _by_window(window_losses(prediction, targets, config.train), fold)


def _filled_in(
    model: Callable[..., tuple[Tensor, Tensor]],
    batch: Batch,
    shares: Tensor,
    noise: Noise | None,
    *,
    config: Config,
    fold: int,
    plan: Plan,
    drops: bool,
) -> Tensor:
    """How far masked rows are from what they hide; in training, and how alike all windows are."""
    inputs, how = batch.inputs, config.pretrain
    mask = masks.of_windows(how, inputs, None if noise is None else noise.key)
    with in_precision(plan):
        rows, tokens = model(inputs, mask, noise if drops else None)
    losses = _by_window(masked_losses(rows.float(), inputs, mask, config.train), fold)
    if noise is None or not how.variance:
        return losses
    return losses + how.variance * collapse(tokens.float(), shares.repeat_interleave(fold))


def _by_window(losses: Tensor, fold: int) -> Tensor:
    """Of the sequences that one window becomes, the mean."""
    return losses if fold == 1 else losses.unflatten(0, (-1, fold)).mean(dim=1)
