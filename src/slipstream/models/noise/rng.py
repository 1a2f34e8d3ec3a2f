"""Random numbers without a generator: each follows from a key, a site and its place.

As with dropout, they are the same in eager, captured and resumed steps, for a single model and
for a lane of many, and however far the batch is padded.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from slipstream.kernels import should_use_triton
from slipstream.models.noise.dropout import MIX, SEED, mix_bits, wrap_int64

BITS = 23
"""Of a uniform number, so that its half-way steps are exact in fp32"""


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
    numbers: Tensor = _odd(key, site, rows, batch).float() * 0.5 ** (BITS + 1)
    return numbers


def draw_signed(key: Tensor, site: int, rows: int, batch: int) -> Tensor:
    """fp32 [rows, batch], above -1 and below 1."""
    if should_use_triton(key):
        return _launch(key, site, rows, batch, torch.float32, signed=True)
    numbers: Tensor = (_odd(key, site, rows, batch) - 2**BITS).float() * 0.5**BITS
    return numbers


def draw_normal(key: Tensor, site: int, rows: int, batch: int) -> Tensor:
    """fp32 [rows, batch], of mean 0 and deviation 1."""
    numbers: Tensor = torch.erfinv(draw_signed(key, site, rows, batch)) * math.sqrt(2.0)
    return numbers


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
