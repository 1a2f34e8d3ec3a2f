"""Which rows of a window are hidden from an encoder that learns to fill them in.

Every window of a batch has the same number of masked rows, at least one and never all. A mask is a
function of its key and of the window's place in the batch, so that it comes back when a run is
resumed; for validation it is one of the window's own values, so that it is always the same.

Shapes: T context rows, B windows, F inputs.
"""

import torch
from torch import Tensor

from slipstream.config import Pretrain
from slipstream.models.noise import rng
from slipstream.models.noise.rng import MIX, mix_bits

SITE = 1 << 16
"""First of the masks' own draws"""
FIXED = 0x51AB5EED


def count_masked_rows(how: Pretrain, context: int) -> int:
    """Masked rows of every window: the ratio, rounded to rows, or with patches to whole ones."""
    if how.mask == "patch":
        return how.length * _num_patches(how, context)
    return min(max(round(how.ratio * context), 1), context - 1)


def _num_patches(how: Pretrain, context: int) -> int:
    wanted = round(how.ratio * context / how.length)
    return min(max(wanted, 1), context // how.length - 1)


def mask_windows(how: Pretrain, inputs: Tensor, key: Tensor | None) -> Tensor:
    """The masks of some windows [T, B, F]: by a key, or without one those that each always has."""
    context, batch, _ = inputs.shape
    return draw_mask(how, _key_of(inputs) if key is None else key, context, batch)


def draw_mask(how: Pretrain, key: Tensor, context: int, batch: int) -> Tensor:
    """bool [T, B], true where a row is masked; `key` is one int64, or one for each window."""
    count = count_masked_rows(how, context)
    match how.mask:
        case "random":
            return _lowest(rng.draw_int64(key, SITE, context, batch), count)
        case "block":  # one stretch of rows, anywhere within the window
            first = _below(context - count + 1, key, batch)
            row = torch.arange(context, device=first.device)[:, None]
            return (row >= first) & (row < first + count)
        case "patch":
            return _patches(how, key, context, batch)


def find_masked_rows(how: Pretrain, mask: Tensor) -> Tensor:
    """The masked rows of every window in order of time, int64 [M, B]."""
    ordered = mask.to(torch.uint8).sort(dim=0, descending=True, stable=True)
    return ordered.indices[: count_masked_rows(how, len(mask))]


def gather_rows(rows: Tensor, places: Tensor) -> Tensor:
    """Of rows [T, B, F], those at places [M, B]: [M, B, F]."""
    return rows.gather(0, places[..., None].expand(-1, -1, rows.shape[-1]))


def _key_of(inputs: Tensor) -> Tensor:
    """int64 [B]: a key for each window, made of its values' bits and nothing else."""
    bits = inputs.float().contiguous().view(torch.int32).long()
    place = torch.arange(bits.shape[0] * bits.shape[2], device=bits.device)
    place = place.view(bits.shape[0], 1, bits.shape[2])
    total = mix_bits((bits + place * FIXED) * MIX).sum(dim=(0, 2))
    # a draw adds the windows' places, and these must not matter here
    return mix_bits(total) - torch.arange(inputs.shape[1], device=inputs.device)


def _lowest(score: Tensor, count: int) -> Tensor:
    """Along the first axis, the `count` lowest scores, which ties cannot make more or fewer."""
    rows = score.shape[0]
    place = torch.arange(rows, device=score.device)[:, None]
    distinct = (score & ~(2**16 - 1)) | place
    return distinct <= distinct.sort(dim=0).values[count - 1]


def _patches(how: Pretrain, key: Tensor, context: int, batch: int) -> Tensor:
    """Whole patches of a grid that begins anywhere, as far as the window's rest leaves room."""
    patches, rest = divmod(context, how.length)
    chosen = _lowest(rng.draw_int64(key, SITE, patches, batch), _num_patches(how, context))
    row = torch.arange(context, device=chosen.device)[:, None] - _below(rest + 1, key, batch)
    inside = (row >= 0) & (row < patches * how.length)
    patch = torch.div(row, how.length, rounding_mode="floor").clamp(0, patches - 1)
    return chosen.gather(0, patch) & inside


def _below(most: int, key: Tensor, batch: int) -> Tensor:
    """int64 [1, B], from 0 to before `most`."""
    bits = rng.draw_int64(key, SITE + 1, 1, batch) >> 32 & (2**31 - 1)
    return bits * most >> 31
