"""Random numbers that are a function of seed and step: dropout, masks and augmentation."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.config import Augment, Pretrain, Signature
from slipstream.config.train import KINDS
from slipstream.kernels import should_use_triton

# odd numbers of 64 and of 32 bits without structure, as signed integers
SEED, STEP, PASS, MIX = (
    -0x61C8864680B583EB,
    -0x3D4D51C2D82B14B1,
    0x27BB2EE687B0B0FD,
    -0x4B47D0C5A1B2D3E9,
)
UNIT, SITE_FACTOR, LAST = 0x2C1B3C6D, 0x297A2D39, -0x7A143589
DIRECTION = 1 << 20
"""The offset of the second direction's unit numbers: more than any layer's units"""
BITS = 23
"""The bits of a uniform number: few enough that its half-way steps are exact in fp32"""


class Noise(NamedTuple):
    """The two scalars that determine what a forward pass drops."""

    key: Tensor
    """int64; before `at`, the run's seed"""
    rate: Tensor
    """fp32: the fraction that is dropped"""

    def for_pass(self, step: Tensor, number: int) -> Noise:
        """Return the noise of forward pass `number` of a step, counted over the whole run."""
        of_pass = wrap_int64(number * PASS)
        return Noise(mix_bits(self.key * SEED + step * STEP + of_pass), self.rate)

    def skip(self, sequences: int) -> Noise:
        """Return the noise of a batch without its first sequences: their number is added to the
        key."""
        return Noise(self.key + sequences, self.rate)


def dropout(x: Tensor, noise: Noise | None, site: int, *, directions: int = 1) -> Tensor:
    """Drop elements of x, [T, B, D] or [B, D], and scale the rest; rate 0 keeps x as it is.

    Whether an element is dropped depends on key, rate, site, time, window and unit only. D may
    hold the units of several `directions`, each counted by itself.
    """
    if noise is None:
        return x
    if should_use_triton(x):
        from slipstream.kernels import dropout as drops

        hashing = drops.DropoutHash(MIX, UNIT, _hash_unit_site(site), LAST, DIRECTION)
        return drops.apply_dropout(x, noise.key, noise.rate, hashing, directions)
    return dropout_eager(x, noise, site, directions)


def dropout_eager(x: Tensor, noise: Noise, site: int, directions: int) -> Tensor:
    """Drop elements as `dropout` does, in plain PyTorch on any device; this defines the kernel's
    result."""
    bits = _hash_rows(noise.key, x) * _hash_units(x, site, directions)
    bits = (bits ^ (bits >> 15)) * LAST
    scale = (1 / (1 - noise.rate)).to(x.dtype)
    rate = 1 - 1 / scale.double()  # as the rounded scale has it, so that the mean stays what it was
    return (x * scale).masked_fill(bits < (rate * 2**32 - 2**31).to(torch.int32), 0.0)


def wrap_int64(number: int) -> int:
    """Wrap an integer around as an int64 does."""
    return (number + 2**63) % 2**64 - 2**63


def mix_bits(number: Tensor) -> Tensor:
    number = (number ^ (number >> 32)) * MIX
    return number ^ (number >> 29)


def _hash_rows(key: Tensor, x: Tensor) -> Tensor:
    """Return an odd int32 for each row, [T, B, 1] or [B, 1]."""
    counters = torch.arange(x.shape[-2], device=x.device)[:, None]
    if x.dim() == 3:
        counters = counters + (torch.arange(x.shape[0], device=x.device) << 32)[:, None, None]
    return (mix_bits((counters + key) * MIX) >> 32).to(torch.int32) | 1


def _hash_units(x: Tensor, site: int, directions: int) -> Tensor:
    """Return an odd int32 for each unit at this site, [D]."""
    units = torch.arange(x.shape[-1] // directions, device=x.device, dtype=torch.int32)
    if directions > 1:
        end = directions * DIRECTION
        first = torch.arange(0, end, DIRECTION, device=x.device, dtype=torch.int32)
        units = (first[:, None] + units).flatten()
    bits = units * UNIT + _hash_unit_site(site)
    return (bits ^ (bits >> 15)) * LAST | 1


def _hash_unit_site(site: int) -> int:
    return (site + 1) * SITE_FACTOR % 2**31


def draw_int64(key: Tensor, site: int, rows: int, batch: int) -> Tensor:
    """Return random int64 [rows, batch]; a window's number is its position along the last axis.
    `key` is one int64, or one for each window."""
    if should_use_triton(key):
        return _launch(key, site, rows, batch, torch.int64)
    across = torch.arange(batch, device=key.device)
    down = torch.arange(rows, device=key.device)[:, None] << 32
    counter = mix_bits((down + across + key) * MIX)
    return mix_bits((counter + _hash_site(site)) * MIX)


def draw_uniform(key: Tensor, site: int, rows: int, batch: int) -> Tensor:
    """Return random fp32 [rows, batch], above 0 and below 1."""
    if should_use_triton(key):
        return _launch(key, site, rows, batch, torch.float32)
    return _odd(key, site, rows, batch).float() * 0.5 ** (BITS + 1)


def draw_signed(key: Tensor, site: int, rows: int, batch: int) -> Tensor:
    """Return random fp32 [rows, batch], above -1 and below 1."""
    if should_use_triton(key):
        return _launch(key, site, rows, batch, torch.float32, signed=True)
    numbers: Tensor = (_odd(key, site, rows, batch) - 2**BITS).float() * 0.5**BITS
    return numbers


def draw_normal(key: Tensor, site: int, rows: int, batch: int) -> Tensor:
    """Return random fp32 [rows, batch], with mean 0 and deviation 1."""
    return torch.erfinv(draw_signed(key, site, rows, batch)) * math.sqrt(2.0)


def _odd(key: Tensor, site: int, rows: int, batch: int) -> Tensor:
    steps = (draw_int64(key, site, rows, batch) >> (63 - BITS)) & (2**BITS - 1)
    numbers: Tensor = 2 * steps + 1
    return numbers


def _hash_site(site: int) -> int:
    return wrap_int64((site + 1) * SEED)


def _launch(
    key: Tensor, site: int, rows: int, batch: int, dtype: torch.dtype, *, signed: bool = False
) -> Tensor:
    from slipstream.kernels import counter_rng

    how = counter_rng.CounterHash(_hash_site(site), MIX, BITS)
    return counter_rng.draw_numbers(key, how, rows, batch, dtype, signed=signed)


AUGMENT_SITE = 1 << 20
"""The first site of the augmentations' draws; dropout's sites lie below"""
EACH = 16
"""The number of sites of each kind of augmentation"""


class AugmentedBatch(NamedTuple):
    """Augmented windows, and the windows that were blended in."""

    inputs: Tensor
    """[T, B, F]"""
    targets: Tensor
    """[B, H, C], the window's own"""
    partner: Tensor | None
    """[B]: the sequence that was blended in"""
    blend: Tensor | None
    """[B]: the fraction of the blended sequence; 0 where nothing was blended in"""


class SequenceLayout(NamedTuple):
    """The roles of a sequence's columns."""

    shared: int
    """The number of last inputs that are the first targets"""
    fold: int = 1
    """The number of sequences per window"""
    jitter: Tensor | None = None
    """[fold, F]: the scaled noise of each column, where columns differ in it"""


def make_layout(how: Augment, signature: Signature, device: torch.device) -> SequenceLayout:
    """Make the layout of a signature's sequences; noise of columns lies on the device, since a
    captured step cannot bring it there."""
    fold, jitter = signature.sequences_per_window, None
    if isinstance(how.jitter, tuple):
        shared, channel_noise = how.jitter[: len(how.jitter) - fold], how.jitter[-fold:]
        rows = [how.jitter] if fold == 1 else [(*shared, channel) for channel in channel_noise]
        jitter = torch.tensor(rows, device=device)
    return SequenceLayout(signature.model_shared, fold, jitter)


class WindowDraws(NamedTuple):
    """The random numbers of one kind of augmentation."""

    key: Tensor
    kind: str
    batch: int

    def uniform(self, number: int, rows: int = 1) -> Tensor:
        return draw_uniform(self.key, self._site(number), rows, self.batch)

    def normal(self, number: int, rows: int = 1) -> Tensor:
        return draw_normal(self.key, self._site(number), rows, self.batch)

    def signed(self, number: int) -> Tensor:
        return draw_signed(self.key, self._site(number), 1, self.batch)

    def selects(self, how: Augment) -> Tensor:
        """Return bool [B]: the windows that this augmentation changes."""
        mask: Tensor = self.uniform(0)[0] < getattr(how, f"{self.kind}_chance")
        return mask

    def _site(self, number: int) -> int:
        return AUGMENT_SITE + EACH * KINDS.index(self.kind) + number


def augment(
    how: Augment,
    key: Tensor,
    inputs: Tensor,
    targets: Tensor,
    *,
    layout: SequenceLayout,
    shares: Tensor,
) -> AugmentedBatch:
    """Apply every kind of augmentation that is on. Windows whose share [B / fold] is 0 are not
    blended into others."""
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
    """Return whether windows are blended with others."""
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
    center = mean[:, None, -shared:]
    return moved, _change_first(targets, shared, lambda y: y + (y - center) * more[:, None])


def _change_first(targets: Tensor, shared: int, change: Callable[[Tensor], Tensor]) -> Tensor:
    """Return the targets with the first `shared` columns changed."""
    if not shared:
        return targets
    changed = change(targets[..., :shared])
    if shared == targets.shape[-1]:
        return changed
    return torch.cat([changed, targets[..., shared:]], dim=-1)


def _resample(how: Augment, kinds: dict[str, WindowDraws], inputs: Tensor) -> Tensor:
    """Return rows at other times, by linear interpolation between neighbours."""
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
    position = (time * last).clamp(0, last)
    below = position.floor().clamp(max=max(last - 1, 0))
    share = (position - below)[..., None]
    index = below.long()[..., None].expand_as(inputs)
    before, after = inputs.gather(0, index), inputs.gather(0, (index + 1).clamp(max=last))
    return torch.where(changed[:, None], before + (after - before) * share, inputs)


def _warp(how: Augment, draws: WindowDraws, time: Tensor) -> Tensor:
    """Return the shift of times from 0 to 1, [T, B]; its slope is above -1, so that no time
    overtakes another."""
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
    """Blend in another window, and replace a block of rows by its rows."""
    rows = len(inputs)
    partner = _partner(key, shares, fold)
    partner_rows = inputs.index_select(1, partner)
    kept = torch.ones_like(inputs[0, :, 0])
    if "mixup" in kinds:
        draws = kinds["mixup"]
        share = how.mixup * draws.uniform(1)[0] * draws.selects(how)
        inputs = inputs + (partner_rows - inputs) * share[:, None]
        kept = kept * (1 - share)
    if "cutmix" in kinds:
        draws = kinds["cutmix"]
        count = (how.cutmix * draws.uniform(1)[0] * rows).round().long() * draws.selects(how)
        first = (draws.uniform(2)[0] * (rows - count + 1)).long()
        row = torch.arange(rows, device=inputs.device)[:, None]
        replaced = (row >= first) & (row < first + count)
        inputs = torch.where(replaced[..., None], partner_rows, inputs)
        kept = kept * (1 - count / rows)
    return AugmentedBatch(inputs, targets, partner, 1 - kept)


def _partner(key: Tensor, shares: Tensor, fold: int) -> Tensor:
    """Return a partner for each sequence: the same channel of another window among those that
    count, which come first."""
    real = (shares > 0).sum().clamp(min=1)
    windows = torch.arange(len(shares), device=shares.device)
    numbers = draw_uniform(key, AUGMENT_SITE + EACH * len(KINDS), 1, len(shares))[0]
    ahead = 1 + (numbers * (real - 1)).long()
    partner = (windows + ahead) % real
    channel = torch.arange(fold, device=shares.device)
    return (partner[:, None] * fold + channel).flatten()


MASK_SITE = 1 << 16
"""The first site of the masks' draws"""
FIXED = 0x51AB5EED


def count_masked_rows(how: Pretrain, context: int) -> int:
    """Return the number of masked rows per window: the ratio, rounded to rows or to whole
    patches."""
    if how.mask == "patch":
        return how.length * _num_patches(how, context)
    return min(max(round(how.ratio * context), 1), context - 1)


def _num_patches(how: Pretrain, context: int) -> int:
    wanted = round(how.ratio * context / how.length)
    return min(max(wanted, 1), context // how.length - 1)


def mask_windows(how: Pretrain, inputs: Tensor, key: Tensor | None) -> Tensor:
    """Return the masks of windows [T, B, F]: drawn by a key, or without one the fixed mask of each
    window."""
    context, batch, _ = inputs.shape
    return draw_mask(how, _key_of(inputs) if key is None else key, context, batch)


def draw_mask(how: Pretrain, key: Tensor, context: int, batch: int) -> Tensor:
    """Return bool [T, B], true where a row is masked; `key` is one int64, or one for each
    window."""
    count = count_masked_rows(how, context)
    match how.mask:
        case "random":
            return _lowest(draw_int64(key, MASK_SITE, context, batch), count)
        case "block":  # one stretch of rows, anywhere within the window
            first = _below(context - count + 1, key, batch)
            row = torch.arange(context, device=first.device)[:, None]
            return (row >= first) & (row < first + count)
        case "patch":
            return _patches(how, key, context, batch)


def find_masked_rows(how: Pretrain, mask: Tensor) -> Tensor:
    """Return the masked rows of every window in order of time, int64 [M, B]."""
    ordered = mask.to(torch.uint8).sort(dim=0, descending=True, stable=True)
    return ordered.indices[: count_masked_rows(how, len(mask))]


def gather_rows(rows: Tensor, positions: Tensor) -> Tensor:
    """Return the rows at positions [M, B] of rows [T, B, F]: [M, B, F]."""
    return rows.gather(0, positions[..., None].expand(-1, -1, rows.shape[-1]))


def _key_of(inputs: Tensor) -> Tensor:
    """Return a key for each window, int64 [B], computed from the bits of its values only."""
    bits = inputs.float().contiguous().view(torch.int32).long()
    element = torch.arange(bits.shape[0] * bits.shape[2], device=bits.device)
    element = element.view(bits.shape[0], 1, bits.shape[2])
    total = mix_bits((bits + element * FIXED) * MIX).sum(dim=(0, 2))
    # a draw adds the positions of the windows, and these must not matter here
    return mix_bits(total) - torch.arange(inputs.shape[1], device=inputs.device)


def _lowest(score: Tensor, count: int) -> Tensor:
    """Mark the `count` lowest scores along the first axis; ties do not change their number."""
    rows = score.shape[0]
    row = torch.arange(rows, device=score.device)[:, None]
    distinct = (score & ~(2**16 - 1)) | row
    return distinct <= distinct.sort(dim=0).values[count - 1]


def _patches(how: Pretrain, key: Tensor, context: int, batch: int) -> Tensor:
    """Return a mask of whole patches, on a grid with a random offset within the rows that the
    patches leave over."""
    patches, spare = divmod(context, how.length)
    chosen = _lowest(draw_int64(key, MASK_SITE, patches, batch), _num_patches(how, context))
    row = torch.arange(context, device=chosen.device)[:, None] - _below(spare + 1, key, batch)
    inside = (row >= 0) & (row < patches * how.length)
    patch = torch.div(row, how.length, rounding_mode="floor").clamp(0, patches - 1)
    return chosen.gather(0, patch) & inside


def _below(most: int, key: Tensor, batch: int) -> Tensor:
    """Return random int64 [1, B], from 0 to below `most`."""
    bits = draw_int64(key, MASK_SITE + 1, 1, batch) >> 32 & (2**31 - 1)
    return bits * most >> 31
