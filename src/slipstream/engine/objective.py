"""The objective of a step: one function from windows to the loss of each.

A single model, captured or not, and every lane of a pack call the same function.
Shapes: B windows.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from slipstream.config import Config, Signature
from slipstream.data.windows import Batch
from slipstream.engine.plan import Plan
from slipstream.models import noise as noises
from slipstream.models.losses import (
    compute_collapse_penalty,
    compute_masked_losses,
    compute_window_losses,
    make_validation_settings,
)
from slipstream.models.noise import AugmentedBatch, Noise, SequenceLayout

Objective = Callable[[Callable[..., Any], Batch, Tensor, Noise | None], Tensor]
"""From a model, windows, their weights (0: padding) and noise to losses [B]. Without noise, as in
validation, nothing is dropped and masks are always the same"""


def build_objective(config: Config, signature: Signature, plan: Plan, *, drops: bool) -> Objective:
    """Build the objective of a run; `drops` says whether the model receives the noise."""
    layout = noises.make_layout(config.augment, signature, plan.device)
    rows, columns = signature.future_shape
    settings = ObjectiveSettings(config, layout, plan, drops, rows * columns)
    return partial(_reconstruction_losses if signature.masked else _prediction_losses, settings)


def build_validation_objective(config: Config, signature: Signature, plan: Plan) -> Objective:
    """Build the same objective with `train.metric` as its loss."""
    scored = config.model_copy(update={"train": make_validation_settings(config.train)})
    return build_objective(scored, signature, plan, drops=False)


class ObjectiveSettings(NamedTuple):
    """The settings that an objective needs besides the windows."""

    config: Config
    layout: SequenceLayout
    plan: Plan
    drops: bool
    ahead: int
    """How many of the last static numbers are known rows of the horizon"""

    def augment(self, batch: Batch, shares: Tensor, noise: Noise | None) -> AugmentedBatch:
        """Augment the windows, in training only."""
        inputs, _, targets = batch
        how = self.config.augment.for_step
        if noise is None or not how.kinds:
            return AugmentedBatch(inputs, targets, None, None)
        return noises.augment(how, noise.key, inputs, targets, layout=self.layout, shares=shares)

    @property
    def fold(self) -> int:
        return self.layout.fold

    def by_window(self, losses: Tensor) -> Tensor:
        """Average over the sequences that one window becomes."""
        return losses if self.fold == 1 else losses.unflatten(0, (-1, self.fold)).mean(dim=1)


def uses_noise(config: Config) -> bool:
    """Whether the objective itself is random, by masks or augmentation."""
    return config.masked or bool(config.augment.for_step.kinds)


def forward(
    model: Callable[..., Tensor],
    inputs: Tensor,
    static: Tensor | None,
    noise: Noise | None = None,
    *,
    plan: Plan,
) -> Tensor:
    """Compute the model's prediction in the plan's precision; it is returned in fp32."""
    with autocast(plan):
        prediction: Tensor = model(inputs, static, noise)
    return prediction.float()


def autocast(plan: Plan) -> torch.autocast:
    """Return the context in which products are computed in the plan's precision."""
    enabled = plan.autocast is not None
    return torch.autocast(plan.device.type, dtype=plan.autocast, enabled=enabled)


def _prediction_losses(
    settings: ObjectiveSettings,
    model: Callable[..., Tensor],
    batch: Batch,
    shares: Tensor,
    noise: Noise | None,
) -> Tensor:
    """Compare predictions with the targets; those of blended windows with the targets of both, from
    rows ahead that are blended alike."""
    train = settings.config.train
    inputs, targets, partner, share = settings.augment(batch, shares, noise)
    dropping = noise if settings.drops else None
    static = batch.static
    if settings.ahead and partner is not None and share is not None and static is not None:
        fixed, ahead = static.split([static.shape[-1] - settings.ahead, settings.ahead], dim=-1)
        ahead = ahead + (ahead.index_select(0, partner) - ahead) * share[:, None]
        static = torch.cat([fixed, ahead], dim=-1)
    prediction = forward(model, inputs, static, dropping, plan=settings.plan)
    losses = compute_window_losses(prediction, targets, train)
    if partner is not None and share is not None:
        partner_losses = compute_window_losses(prediction, targets.index_select(0, partner), train)
        losses = losses + (partner_losses - losses) * share
    return settings.by_window(losses)


def _reconstruction_losses(
    settings: ObjectiveSettings,
    model: Callable[..., tuple[Tensor, Tensor]],
    batch: Batch,
    shares: Tensor,
    noise: Noise | None,
) -> Tensor:
    """Compare filled-in rows with the masked ones; in training, also penalise collapse."""
    how, train = settings.config.pretrain, settings.config.train
    inputs = settings.augment(batch, shares, noise).inputs
    mask = noises.mask_windows(how, inputs, None if noise is None else noise.key)
    places = noises.find_masked_rows(how, mask)
    with autocast(settings.plan):  # the decoder computes only the rows that count
        rows, tokens = model(inputs, mask, noise if settings.drops else None, places)
    losses = settings.by_window(
        compute_masked_losses(rows.float(), noises.gather_rows(inputs, places), train)
    )
    if noise is None or not how.variance:
        return losses
    return losses + how.variance * compute_collapse_penalty(
        tokens.float(), shares.repeat_interleave(settings.fold)
    )
