"""Random numbers without a generator: each follows from a key, a site and its place.

As with dropout, they are the same in eager, captured and resumed steps, for a model by itself and
for a lane of many, and however far the batch is padded.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from slipstream.kernels import by_kernel
from slipstream.models.dropout import MIX, SEED, as_int64, mixed

BITS = 23
"""Of a uniform number, so that its half-way steps are exact in fp32"""


def whole(key: Tensor, site: int, rows: int, batch: int) -> Tensor:
    """int64 [rows, batch], any bits; the windows' numbers are the last axis' places. `key` is one
    int64, or one for each window."""
    if by_kernel(key):
        return _drawn(key, site, rows, batch, torch.int64)
    across = torch.arange(batch, device=key.device)
    down = torch.arange(rows, device=key.device)[:, None] << 32
    place = mixed((down + across + key) * MIX)
    return mixed((place + _of_site(site)) * MIX)


def uniform(key: Tensor, site: int, rows: int, batch: int) -> Tensor:
    """fp32 [rows, batch], above 0 and below 1."""
    if by_kernel(key):
        return _drawn(key, site, rows, batch, torch.float32)
    found: Tensor = _odd(key, site, rows, batch).float() * 0.5 ** (BITS + 1)
    return found


def signed(key: Tensor, site: int, rows: int, batch: int) -> Tensor:
    """fp32 [rows, batch], above -1 and below 1."""
    if by_kernel(key):
        return _drawn(key, site, rows, batch, torch.float32, signed=True)
    found: Tensor = (_odd(key, site, rows, batch) - 2**BITS).float() * 0.5**BITS
    return found


def normal(key: Tensor, site: int, rows: int, batch: int) -> Tensor:
    """fp32 [rows, batch], of mean 0 and deviation 1."""
    found: Tensor = torch.erfinv(signed(key, site, rows, batch)) * math.sqrt(2.0)
    return found


def _odd(key: Tensor, site: int, rows: int, batch: int) -> Tensor:
    steps = (whole(key, site, rows, batch) >> (63 - BITS)) & (2**BITS - 1)
    found: Tensor = 2 * steps + 1
    return found


def _of_site(site: int) -> int:
    return as_int64((site + 1) * SEED)


def _drawn(
    key: Tensor, site: int, rows: int, batch: int, dtype: torch.dtype, *, signed: bool = False
) -> Tensor:
    from slipstream.kernels import hashes

    how = hashes.Hash(_of_site(site), MIX, BITS)
    return hashes.draw(key, how, rows, batch, dtype, signed=signed)
