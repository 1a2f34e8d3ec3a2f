"""The objective of a step: one function from some windows to the loss of each.

Training alone, captured or not, and every lane of a pack call the same. Shapes: B windows,
T context rows, F inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from slipstream.config import Config, Signature
from slipstream.data.windows import Batch
from slipstream.engine.plan import Plan
from slipstream.models import Noise
from slipstream.models.noise import augment, masks
from slipstream.models.noise.augment import AugmentedBatch
from slipstream.objectives import (
    compute_collapse_penalty,
    compute_masked_losses,
    compute_window_losses,
    make_validation_settings,
)

Objective = Callable[[Callable[..., Any], Batch, Tensor, Noise | None], Tensor]
"""From a model, windows, what each counts for (0: padding) and noise to losses [B]. Without noise
nothing is dropped, and masks are always the same: so is validation."""


def build_objective(config: Config, signature: Signature, plan: Plan, *, drops: bool) -> Objective:
    """Build the objective of a run; `drops` says whether the model receives the noise."""
    settings = ObjectiveSettings(
        config, signature.sequences_per_window, signature.model_shared, plan, drops
    )
    return partial(_reconstruction_losses if signature.masked else _prediction_losses, settings)


def build_validation_objective(config: Config, signature: Signature, plan: Plan) -> Objective:
    """Build the same objective with `train.metric` as its loss."""
    scored = config.model_copy(update={"train": make_validation_settings(config.train)})
    return build_objective(scored, signature, plan, drops=False)


class ObjectiveSettings(NamedTuple):
    """What an objective needs beside the windows."""

    config: Config
    fold: int
    shared: int
    """The last so many inputs of a sequence are its first targets"""
    plan: Plan
    drops: bool

    def augment(self, batch: Batch, shares: Tensor, noise: Noise | None) -> AugmentedBatch:
        """The windows, augmented in training."""
        inputs, _, targets = batch
        how = self.config.augment.for_step
        if noise is None or not how.kinds:
            return AugmentedBatch(inputs, targets, None, None)
        return augment.augment(
            how,
            noise.key,
            inputs,
            targets,
            shared=self.shared,
            shares=shares,
            fold=self.fold,
        )

    def by_window(self, losses: Tensor) -> Tensor:
        """Of the sequences that one window becomes, the mean."""
        return losses if self.fold == 1 else losses.unflatten(0, (-1, self.fold)).mean(dim=1)


def uses_noise(config: Config) -> bool:
    """Whether it is random by itself, whatever the model drops."""
    return config.masked or bool(config.augment.for_step.kinds)


def forward(
    model: Callable[..., Tensor],
    inputs: Tensor,
    static: Tensor | None,
    noise: Noise | None = None,
    *,
    plan: Plan,
) -> Tensor:
    """The model's prediction, in fp32, computed in the plan's precision."""
    with autocast(plan):
        prediction: Tensor = model(inputs, static, noise)
    return prediction.float()


def autocast(plan: Plan) -> torch.autocast:
    """Within it, products are computed in the plan's precision."""
    enabled = plan.autocast is not None
    return torch.autocast(plan.device.type, dtype=plan.autocast, enabled=enabled)


def _prediction_losses(
    settings: ObjectiveSettings,
    model: Callable[..., Tensor],
    batch: Batch,
    shares: Tensor,
    noise: Noise | None,
) -> Tensor:
    """How far predictions are from the targets; of blended windows, from those of both."""
    train = settings.config.train
    inputs, targets, partner, share = settings.augment(batch, shares, noise)
    dropping = noise if settings.drops else None
    prediction = forward(model, inputs, batch.static, dropping, plan=settings.plan)
    losses = compute_window_losses(prediction, targets, train)
    if partner is not None and share is not None:
        others = compute_window_losses(prediction, targets.index_select(0, partner), train)
        losses = losses + (others - losses) * share
    return settings.by_window(losses)


def _reconstruction_losses(
    settings: ObjectiveSettings,
    model: Callable[..., tuple[Tensor, Tensor]],
    batch: Batch,
    shares: Tensor,
    noise: Noise | None,
) -> Tensor:
    """How far masked rows are from what they hide; in training, and how alike all windows are."""
    how, train = settings.config.pretrain, settings.config.train
    inputs = settings.augment(batch, shares, noise).inputs
    mask = masks.mask_windows(how, inputs, None if noise is None else noise.key)
    places = masks.find_masked_rows(how, mask)
    with autocast(settings.plan):  # the decoder has no more to do than what counts
        rows, tokens = model(inputs, mask, noise if settings.drops else None, places)
    losses = settings.by_window(
        compute_masked_losses(rows.float(), masks.gather_rows(inputs, places), train)
    )
    if noise is None or not how.variance:
        return losses
    return losses + how.variance * compute_collapse_penalty(
        tokens.float(), shares.repeat_interleave(settings.fold)
    )
