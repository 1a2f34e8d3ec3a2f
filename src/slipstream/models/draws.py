"""Random numbers without a generator: each follows from a key, a site and its place.

As with dropout, they are the same in eager, captured and resumed steps, for a model by itself and
for a lane of many, and however far the batch is padded.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from slipstream.models.dropout import MIX, SEED, as_int64, mixed

BITS = 23
"""Of a uniform number, so that its half-way steps are exact in fp32"""


def whole(key: Tensor, site: int, rows: int, batch: int) -> Tensor:
    """int64 [rows, batch], any bits; the windows' numbers are the last axis' places."""
    across = torch.arange(batch, device=key.device)
    down = torch.arange(rows, device=key.device)[:, None] << 32
    place = mixed((down + across + key) * MIX)
    return mixed((place + as_int64((site + 1) * SEED)) * MIX)


def uniform(key: Tensor, site: int, rows: int, batch: int) -> Tensor:
    """fp32 [rows, batch], above 0 and below 1."""
    steps = (whole(key, site, rows, batch) >> (63 - BITS)) & (2**BITS - 1)
    found: Tensor = (2 * steps + 1).float() * 0.5 ** (BITS + 1)
    return found


def normal(key: Tensor, site: int, rows: int, batch: int) -> Tensor:
    """fp32 [rows, batch], of mean 0 and deviation 1."""
    found: Tensor = torch.erfinv(2 * uniform(key, site, rows, batch) - 1) * math.sqrt(2.0)
    return found
