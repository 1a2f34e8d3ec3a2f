"""Dropout and random numbers without a generator: each follows from a key, a site and its place.

So they are the same on every device, in eager, captured and resumed runs, for a single model and
for a lane of many (`vmap`, one key and rate for each), however far batch or width are padded.
"""

from __future__ import annotations

import math
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
BITS = 23
"""Of a uniform number, so that its half-way steps are exact in fp32"""


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

    def skip(self, sequences: int) -> Noise:
        """Return the noise of a batch without its first sequences: places are added to the key."""
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
        end = directions * DIRECTION
        first = torch.arange(0, end, DIRECTION, device=x.device, dtype=torch.int32)
        units = (first[:, None] + units).flatten()
    bits = units * UNIT + _hash_unit_site(site)
    return (bits ^ (bits >> 15)) * LAST | 1


def _hash_unit_site(site: int) -> int:
    return (site + 1) * SITE % 2**31


def draw_int64(key: Tensor, site: int, rows: int, batch: int) -> Tensor:
    """int64 [rows, batch], any bits; the windows' numbers are the last axis' places. `key` is one
    int64, or one for each window."""
    if should_use_triton(key):
        return _launch(key, site, rows, batch, torch.int64)
    across = torch.arange(batch, device=key.device)
    down = torch.arange(rows, device=key.device)[:, None] << 32
    place = mix_bits((down + across + key) * MIX)
    return mix_bits((place + _hash_site(site)) * MIX)


def draw_uniform(key: Tensor, site: int, rows: int, batch: int) -> Tensor:
    """fp32 [rows, batch], above 0 and below 1."""
    if should_use_triton(key):
        return _launch(key, site, rows, batch, torch.float32)
    return _odd(key, site, rows, batch).float() * 0.5 ** (BITS + 1)


def draw_signed(key: Tensor, site: int, rows: int, batch: int) -> Tensor:
    """fp32 [rows, batch], above -1 and below 1."""
    if should_use_triton(key):
        return _launch(key, site, rows, batch, torch.float32, signed=True)
    numbers: Tensor = (_odd(key, site, rows, batch) - 2**BITS).float() * 0.5**BITS
    return numbers


def draw_normal(key: Tensor, site: int, rows: int, batch: int) -> Tensor:
    """fp32 [rows, batch], of mean 0 and deviation 1."""
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
