"""The objective of a step: one function from windows to the loss of each.

A single model, captured or not, and every lane of a pack call the same function.
Shapes: B windows.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

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
from slipstream.models.numpy_layers import SMALLEST_VARIANCE

Objective = Callable[[Callable[..., Any], Batch, Tensor, Noise | None], Tensor]
"""From a model, windows, their weights (0: padding) and noise to losses [B]. Without noise, as in
validation, nothing is dropped and masks are always the same"""


def build_objective(config: Config, signature: Signature, plan: Plan, *, drops: bool) -> Objective:
    """Build the objective of a run; `drops` says whether the model receives the noise."""
    layout = noises.make_layout(config.augment, signature, plan.device)
    rows, columns = signature.future_shape
    by_window = config.data.scale_by == "window"
    shared = signature.model_shared
    settings = ObjectiveSettings(config, layout, plan, drops, rows * columns, by_window, shared)
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
    by_window: bool
    """Whether losses are relative to the spread of each window (`data.scale_by`)"""
    shared: int
    """How many of a sequence's first targets are its last inputs"""

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

    def average(self, losses: Tensor) -> Tensor:
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
    others = None if partner is None else targets.index_select(0, partner)
    if settings.by_window and settings.shared:
        size = _measure_windows(inputs, targets, settings.shared)
        prediction, targets = prediction / size[..., None], targets / size
        others = None if others is None else others / size
    losses = compute_window_losses(prediction, targets, train)
    if others is not None and share is not None:
        partner_losses = compute_window_losses(prediction, others, train)
        losses = losses + (partner_losses - losses) * share
    return settings.average(losses)


def _measure_windows(inputs: Tensor, targets: Tensor, shared: int) -> Tensor:
    """Return the spread of each window's context and target rows, [B, 1, C]; 1 for targets that are
    no inputs. With the target rows, the error that a change after a constant context makes is about
    one, however small the context's own spread."""
    rows = torch.cat([inputs[..., -shared:], targets[..., :shared].transpose(0, 1)])
    rows = rows - inputs[-1:, ..., -shared:]  # in float32, the variance of a high level is rounding
    size = torch.sqrt(torch.var(rows, dim=0, correction=0) + SMALLEST_VARIANCE)
    others = targets.shape[-1] - shared
    return F.pad(size, (0, others), value=1.0)[:, None] if others else size[:, None]


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
    rows, truth = rows.float(), noises.gather_rows(inputs, places)
    if settings.by_window:
        size = torch.sqrt(torch.var(inputs, dim=0, correction=0) + SMALLEST_VARIANCE)
        rows, truth = rows / size, truth / size
    losses = settings.average(compute_masked_losses(rows, truth, train))
    if noise is None or not how.variance:
        return losses
    return losses + how.variance * compute_collapse_penalty(
        tokens.float(), shares.repeat_interleave(settings.fold)
    )
