"""Dropout without a generator: what is dropped follows from a key and the element's place.

So it is the same on every device, in eager, captured and resumed runs, for a single model and
for a lane of many (`vmap`, one key and rate for each), however far batch or width are padded.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.kernels import should_use_triton

# odd numbers of 64 and of 32 bits without structure, as signed integers
SEED, STEP, PASS, MIX = (
    -0x61C8864680B583EB,
    -0x3D4D51C2D82B14B1,
    0x27BB2EE687B0B0FD,
    -0x4B47D0C5A1B2D3E9,
)
UNIT, SITE, LAST = 0x2C1B3C6D, 0x297A2D39, -0x7A143589
DIRECTION = 1 << 20
"""More than a layer's units"""


class Noise(NamedTuple):
    """What a forward pass drops follows from these two scalars."""

    key: Tensor
    """int64; before `at`, the run's seed"""
    rate: Tensor
    """fp32: the share that is dropped"""

    def for_pass(self, step: Tensor, number: int) -> Noise:
        """Return the noise of forward pass `number` of a step, counted over the whole run."""
        of_pass = wrap_int64(number * PASS)
        return Noise(mix_bits(self.key * SEED + step * STEP + of_pass), self.rate)


def dropout(x: Tensor, noise: Noise | None, site: int, *, directions: int = 1) -> Tensor:
    """Drop elements of x, [T, B, D] or [B, D], and scale the rest; rate 0 keeps x as it is.

    Whether an element is dropped depends on key, rate, site, time, window and unit only. D may
    hold the units of several `directions`, each counted by itself.
    """
    if noise is None:
        return x
    if should_use_triton(x):
        from slipstream.kernels import dropout as drops

        hashing = drops.DropoutHash(MIX, UNIT, _hash_site(site), LAST, DIRECTION)
        return drops.apply_dropout(x, noise.key, noise.rate, hashing, directions)
    return dropout_eager(x, noise, site, directions)


def dropout_eager(x: Tensor, noise: Noise, site: int, directions: int) -> Tensor:
    """The same in plain PyTorch, for every device: the definition of the kernel."""
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
    """An odd int32 for each row, [T, B, 1] or [B, 1]."""
    places = torch.arange(x.shape[-2], device=x.device)[:, None]
    if x.dim() == 3:
        places = places + (torch.arange(x.shape[0], device=x.device) << 32)[:, None, None]
    return (mix_bits((places + key) * MIX) >> 32).to(torch.int32) | 1


def _hash_units(x: Tensor, site: int, directions: int) -> Tensor:
    """An odd int32 for each unit at this site, [D]."""
    units = torch.arange(x.shape[-1] // directions, device=x.device, dtype=torch.int32)
    if directions > 1:
        first = torch.arange(
            0, directions * DIRECTION, DIRECTION, device=x.device, dtype=torch.int32
        )
        units = (first[:, None] + units).flatten()
    bits = units * UNIT + _hash_site(site)
    return (bits ^ (bits >> 15)) * LAST | 1


def _hash_site(site: int) -> int:
    return (site + 1) * SITE % 2**31
