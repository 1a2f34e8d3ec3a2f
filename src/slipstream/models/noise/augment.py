"""Random changes of training windows: pure functions of a batch and a key, on its device.

What happens to a window follows from the key and its place in the batch, so that it is the same
when a run is resumed, and for a single model and a lane of many. The rows of a window and of others
in the same batch are the only inputs.

Shapes: T context rows, B sequences, F inputs, C targets; the last `shared` inputs are the first
targets.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.config import Augment, Signature
from slipstream.config.train import KINDS
from slipstream.models.noise import rng

SITE = 1 << 20
"""First of the augmentations' own draws"""
EACH = 16
"""Draws that each of them has"""


class AugmentedBatch(NamedTuple):
    """Augmented windows, and what they were blended with."""

    inputs: Tensor
    """[T, B, F]"""
    targets: Tensor
    """[B, H, C], the window's own"""
    partner: Tensor | None
    """[B]: the sequence that was blended in"""
    blend: Tensor | None
    """[B]: how much of it; 0 where nothing was"""


class SequenceLayout(NamedTuple):
    """What the columns of a sequence are."""

    shared: int
    """How many of the last inputs are the first targets"""
    fold: int = 1
    """Sequences that one window becomes"""
    jitter: Tensor | None = None
    """[fold, F]: noise of each column, scaled, where it differs between them"""


def make_layout(how: Augment, signature: Signature, device: torch.device) -> SequenceLayout:
    """Make the layout of a signature's sequences; noise of columns lies on the device, since a
    captured step cannot bring it there."""
    fold, jitter = signature.sequences_per_window, None
    if isinstance(how.jitter, tuple):
        others, own = how.jitter[: len(how.jitter) - fold], how.jitter[-fold:]
        rows = [how.jitter] if fold == 1 else [(*others, one) for one in own]
        jitter = torch.tensor(rows, device=device)
    return SequenceLayout(signature.model_shared, fold, jitter)


class WindowDraws(NamedTuple):
    """The random numbers of one kind of augmentation."""

    key: Tensor
    kind: str
    batch: int

    def uniform(self, number: int, rows: int = 1) -> Tensor:
        return rng.draw_uniform(self.key, self._site(number), rows, self.batch)

    def normal(self, number: int, rows: int = 1) -> Tensor:
        return rng.draw_normal(self.key, self._site(number), rows, self.batch)

    def signed(self, number: int) -> Tensor:
        return rng.draw_signed(self.key, self._site(number), 1, self.batch)

    def selects(self, how: Augment) -> Tensor:
        """bool [B]: which windows it changes."""
        mask: Tensor = self.uniform(0)[0] < getattr(how, f"{self.kind}_chance")
        return mask

    def _site(self, number: int) -> int:
        return SITE + EACH * KINDS.index(self.kind) + number


def augment(
    how: Augment,
    key: Tensor,
    inputs: Tensor,
    targets: Tensor,
    *,
    layout: SequenceLayout,
    shares: Tensor,
) -> AugmentedBatch:
    """Apply every kind that is on. Windows of no share [B / fold] are nobody's partner."""
    shared, fold = layout.shared, layout.fold
    batch = inputs.shape[1]
    kinds = {kind: WindowDraws(key, kind, batch) for kind in how.kinds}
    if "warp" in kinds or "slice" in kinds:
        inputs = _resample(how, kinds, inputs)
    if "volatility" in kinds:
        inputs, targets = _volatility(how, kinds["volatility"], inputs, targets, shared)
    if "scaling" in kinds:
        inputs, targets = _scaling(how, kinds["scaling"], inputs, targets, shared)
    if "jitter" in kinds:
        inputs = _jitter(how, kinds["jitter"], inputs, layout.jitter)
    if not blends_windows(how):
        return AugmentedBatch(inputs, targets, None, None)
    return _blend(how, kinds, key, inputs, targets, shares, fold)


def blends_windows(how: Augment) -> bool:
    """Whether windows are blended with others."""
    return how.mixup > 0 or how.cutmix > 0


def _jitter(how: Augment, draws: WindowDraws, inputs: Tensor, by_column: Tensor | None) -> Tensor:
    rows, batch, columns = inputs.shape
    noise = draws.normal(1, rows * columns).view(rows, columns, batch).transpose(1, 2)
    strength: float | Tensor
    if by_column is None:
        assert isinstance(how.jitter, float), "columns are resolved before training"
        strength = how.jitter
    else:
        strength = by_column.repeat(batch // len(by_column), 1)
    return inputs + strength * noise * draws.selects(how)[:, None]


def _scaling(
    how: Augment, draws: WindowDraws, inputs: Tensor, targets: Tensor, shared: int
) -> tuple[Tensor, Tensor]:
    amount = draws.normal(1, inputs.shape[2]).T * draws.selects(how)[:, None]
    factor = 1 + how.scaling * amount  # [B, F]
    return inputs * factor, _change_first(targets, shared, lambda y: y * factor[:, None, -shared:])


def _volatility(
    how: Augment, draws: WindowDraws, inputs: Tensor, targets: Tensor, shared: int
) -> tuple[Tensor, Tensor]:
    factor = torch.exp(how.volatility * draws.normal(1)[0] * draws.selects(how))[:, None]  # [B, 1]
    mean = inputs.mean(dim=0)
    more = factor - 1  # what is added is nothing where the factor is 1
    moved = inputs + (inputs - mean) * more
    own = mean[:, None, -shared:]
    return moved, _change_first(targets, shared, lambda y: y + (y - own) * more[:, None])


def _change_first(targets: Tensor, shared: int, change: Callable[[Tensor], Tensor]) -> Tensor:
    """The targets with the first `shared` of them changed."""
    if not shared:
        return targets
    changed = change(targets[..., :shared])
    if shared == targets.shape[-1]:
        return changed
    return torch.cat([changed, targets[..., shared:]], dim=-1)


def _resample(how: Augment, kinds: dict[str, WindowDraws], inputs: Tensor) -> Tensor:
    """Rows read at other times than their own, on straight lines between the two around."""
    last = len(inputs) - 1
    time = torch.arange(len(inputs), device=inputs.device)[:, None] / max(last, 1)
    changed = torch.zeros_like(inputs[0, :, 0], dtype=torch.bool)
    if "warp" in kinds:
        time = time + _warp(how, kinds["warp"], time)
        changed = changed | kinds["warp"].selects(how)
    if "slice" in kinds:
        draws = kinds["slice"]
        cut = how.slice * draws.uniform(1) * draws.selects(how)
        time = cut + (1 - cut) * time
        changed = changed | draws.selects(how)
    place = (time * last).clamp(0, last)
    below = place.floor().clamp(max=max(last - 1, 0))
    share = (place - below)[..., None]
    index = below.long()[..., None].expand_as(inputs)
    before, after = inputs.gather(0, index), inputs.gather(0, (index + 1).clamp(max=last))
    return torch.where(changed[:, None], before + (after - before) * share, inputs)


def _warp(how: Augment, draws: WindowDraws, time: Tensor) -> Tensor:
    """[T, B]: what is added to times from 0 to 1; its slope is above -1, so none is overtaken."""
    bend = draws.signed(1) * how.warp * draws.selects(how)
    waves = 1 + (draws.uniform(2) < 0.5)  # one bend or two
    return bend * torch.sin(math.pi * waves * time) / (math.pi * waves)


def _blend(
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
    own = torch.ones_like(inputs[0, :, 0])
    if "mixup" in kinds:
        draws = kinds["mixup"]
        share = how.mixup * draws.uniform(1)[0] * draws.selects(how)
        inputs = inputs + (other - inputs) * share[:, None]
        own = own * (1 - share)
    if "cutmix" in kinds:
        draws = kinds["cutmix"]
        count = (how.cutmix * draws.uniform(1)[0] * rows).round().long() * draws.selects(how)
        first = (draws.uniform(2)[0] * (rows - count + 1)).long()
        place = torch.arange(rows, device=inputs.device)[:, None]
        replaced = (place >= first) & (place < first + count)
        inputs = torch.where(replaced[..., None], other, inputs)
        own = own * (1 - count / rows)
    return AugmentedBatch(inputs, targets, partner, 1 - own)


def _partner(key: Tensor, shares: Tensor, fold: int) -> Tensor:
    """Another window for each, of those that count, which come first; the same channel of it."""
    real = (shares > 0).sum().clamp(min=1)
    windows = torch.arange(len(shares), device=shares.device)
    numbers = rng.draw_uniform(key, SITE + EACH * len(KINDS), 1, len(shares))[0]
    ahead = 1 + (numbers * (real - 1)).long()
    partner = (windows + ahead) % real
    channel = torch.arange(fold, device=shares.device)
    return (partner[:, None] * fold + channel).flatten()
