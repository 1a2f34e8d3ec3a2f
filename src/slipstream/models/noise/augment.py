"""Training windows, changed at random: pure functions of a batch and a key, on its device.

What happens to a window follows from the key and its place in the batch, so that it comes back when
a run is resumed and is the same for a model alone and for a lane of many. Only windows' own rows
and those of others in the same batch go in.

Shapes: T context rows, B sequences, F inputs, C targets; the last `shared` inputs are the first
targets.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.config import Augment
from slipstream.config.augment import KINDS
from slipstream.models.noise import rng

SITE = 1 << 20
"""First of the augmentations' own draws"""
EACH = 16
"""Draws that each of them has"""


class AugmentedBatch(NamedTuple):
    """Windows after it, and what they were blended with."""

    inputs: Tensor
    """[T, B, F]"""
    targets: Tensor
    """[B, H, C], the window's own"""
    partner: Tensor | None
    """[B]: the sequence that was blended in"""
    blend: Tensor | None
    """[B]: how much of it; 0 where nothing was"""


class WindowDraws(NamedTuple):
    """The draws of one kind."""

    key: Tensor
    kind: str
    batch: int

    def uniform(self, number: int, rows: int = 1) -> Tensor:
        return rng.draw_uniform(self.key, self._site(number), rows, self.batch)

    def normal(self, number: int, rows: int = 1) -> Tensor:
        return rng.draw_normal(self.key, self._site(number), rows, self.batch)

    def signed(self, number: int) -> Tensor:
        return rng.draw_signed(self.key, self._site(number), 1, self.batch)

    def met(self, how: Augment) -> Tensor:
        """bool [B]: which windows meet it."""
        chance: float = getattr(how, f"{self.kind}_chance")
        return self.uniform(0)[0] < chance

    def _site(self, number: int) -> int:
        return SITE + EACH * KINDS.index(self.kind) + number


def augment(
    how: Augment,
    key: Tensor,
    inputs: Tensor,
    targets: Tensor,
    *,
    shared: int,
    shares: Tensor,
    fold: int = 1,
) -> AugmentedBatch:
    """All that is on, one after the other. Windows of no share [B / fold] are nobody's partner."""
    batch = inputs.shape[1]
    kinds = {kind: WindowDraws(key, kind, batch) for kind in how.kinds}
    if "warp" in kinds or "slice" in kinds:
        inputs = _resampled(how, kinds, inputs)
    if "volatility" in kinds:
        inputs, targets = _volatility(how, kinds["volatility"], inputs, targets, shared)
    if "scaling" in kinds:
        inputs, targets = _scaling(how, kinds["scaling"], inputs, targets, shared)
    if "jitter" in kinds:
        inputs = _jitter(how, kinds["jitter"], inputs)
    if not blends_windows(how):
        return AugmentedBatch(inputs, targets, None, None)
    return _mixed(how, kinds, key, inputs, targets, shares, fold)


def blends_windows(how: Augment) -> bool:
    """Whether windows are blended with others."""
    return how.mixup > 0 or how.cutmix > 0


def _jitter(how: Augment, dice: WindowDraws, inputs: Tensor) -> Tensor:
    rows, batch, columns = inputs.shape
    noise = dice.normal(1, rows * columns).view(rows, columns, batch).transpose(1, 2)
    return inputs + how.jitter * noise * dice.met(how)[:, None]


def _scaling(
    how: Augment, dice: WindowDraws, inputs: Tensor, targets: Tensor, shared: int
) -> tuple[Tensor, Tensor]:
    drawn = dice.normal(1, inputs.shape[2]).T * dice.met(how)[:, None]
    factor = 1 + how.scaling * drawn  # [B, F]
    return inputs * factor, _first(targets, shared, lambda y: y * factor[:, None, -shared:])


def _volatility(
    how: Augment, dice: WindowDraws, inputs: Tensor, targets: Tensor, shared: int
) -> tuple[Tensor, Tensor]:
    factor = torch.exp(how.volatility * dice.normal(1)[0] * dice.met(how))[:, None]  # [B, 1]
    mean = inputs.mean(dim=0)
    more = factor - 1  # what is added is nothing where the factor is 1
    moved = inputs + (inputs - mean) * more
    own = mean[:, None, -shared:]
    return moved, _first(targets, shared, lambda y: y + (y - own) * more[:, None])


def _first(targets: Tensor, shared: int, change: Callable[[Tensor], Tensor]) -> Tensor:
    """The targets with the first `shared` of them changed."""
    if not shared:
        return targets
    changed = change(targets[..., :shared])
    if shared == targets.shape[-1]:
        return changed
    return torch.cat([changed, targets[..., shared:]], dim=-1)


def _resampled(how: Augment, kinds: dict[str, WindowDraws], inputs: Tensor) -> Tensor:
    """Rows read at other times than their own, on straight lines between the two around."""
    last = len(inputs) - 1
    time = torch.arange(len(inputs), device=inputs.device)[:, None] / max(last, 1)
    met = torch.zeros_like(inputs[0, :, 0], dtype=torch.bool)
    if "warp" in kinds:
        time = time + _warp(how, kinds["warp"], time)
        met = met | kinds["warp"].met(how)
    if "slice" in kinds:
        dice = kinds["slice"]
        cut = how.slice * dice.uniform(1) * dice.met(how)
        time = cut + (1 - cut) * time
        met = met | dice.met(how)
    place = (time * last).clamp(0, last)
    below = place.floor().clamp(max=max(last - 1, 0))
    share = (place - below)[..., None]
    index = below.long()[..., None].expand_as(inputs)
    before, after = inputs.gather(0, index), inputs.gather(0, (index + 1).clamp(max=last))
    return torch.where(met[:, None], before + (after - before) * share, inputs)


def _warp(how: Augment, dice: WindowDraws, time: Tensor) -> Tensor:
    """[T, B]: what is added to times from 0 to 1; its slope is above -1, so none is overtaken."""
    bend = dice.signed(1) * how.warp * dice.met(how)
    waves = 1 + (dice.uniform(2) < 0.5)  # one bend or two
    return bend * torch.sin(math.pi * waves * time) / (math.pi * waves)


def _mixed(
    how: Augment,
    kinds: dict[str, WindowDraws],
    key: Tensor,
    inputs: Tensor,
    targets: Tensor,
    shares: Tensor,
    fold: int,
) -> AugmentedBatch:
    """Blend another window in, and put rows of it in the place of own ones."""
    rows = len(inputs)
    partner = _partner(key, shares, fold)
    other = inputs.index_select(1, partner)
    kept = torch.ones_like(inputs[0, :, 0])
    if "mixup" in kinds:
        dice = kinds["mixup"]
        share = how.mixup * dice.uniform(1)[0] * dice.met(how)
        inputs = inputs + (other - inputs) * share[:, None]
        kept = kept * (1 - share)
    if "cutmix" in kinds:
        dice = kinds["cutmix"]
        count = (how.cutmix * dice.uniform(1)[0] * rows).round().long() * dice.met(how)
        first = (dice.uniform(2)[0] * (rows - count + 1)).long()
        place = torch.arange(rows, device=inputs.device)[:, None]
        taken = (place >= first) & (place < first + count)
        inputs = torch.where(taken[..., None], other, inputs)
        kept = kept * (1 - count / rows)
    return AugmentedBatch(inputs, targets, partner, 1 - kept)


def _partner(key: Tensor, shares: Tensor, fold: int) -> Tensor:
    """Another window for each, of those that count, which come first; the same channel of it."""
    real = (shares > 0).sum().clamp(min=1)
    windows = torch.arange(len(shares), device=shares.device)
    drawn = rng.draw_uniform(key, SITE + EACH * len(KINDS), 1, len(shares))[0]
    ahead = 1 + (drawn * (real - 1)).long()
    found = (windows + ahead) % real
    channel = torch.arange(fold, device=shares.device)
    return (found[:, None] * fold + channel).flatten()
