"""Random numbers by counter as one kernel; `models.noise.rng` defines what it computes."""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.kernels.operands import call_with_lanes

BLOCK = 512


class CounterHash(NamedTuple):
    """The numbers that `models.noise.rng` mixes by, and how many bits a fraction has."""

    site: int
    mix: int
    bits: int


@triton.jit(do_not_specialize=["size", "batch", "site"])
def _draw(
    keys,
    out,
    size,
    batch,
    site,
    key_lane,
    key_window,
    MIX: tl.constexpr,
    BITS: tl.constexpr,
    SIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write `size` random numbers [rows, batch] of each lane: any bits where out is int64, else
    from 0 to 1 or, SIGNED, from -1 to 1."""
    lane = tl.program_id(1).to(tl.int64)
    element = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row, window = element // batch, element % batch
    key = tl.load(keys + lane * key_lane + window * key_window, mask=element < size, other=0)
    number = (row.to(tl.int64) * (1 << 32) + window + key) * MIX
    number = (number ^ (number >> 32)) * MIX
    number = (number ^ (number >> 29)) + site
    number *= MIX
    number = (number ^ (number >> 32)) * MIX
    number = number ^ (number >> 29)
    if out.dtype.element_ty != tl.int64:
        odd = 2 * ((number >> (63 - BITS)) & ((1 << BITS) - 1)) + 1
        if SIGNED:
            odd -= 1 << BITS
            number = odd.to(tl.float32) * (1.0 / (1 << BITS))
        else:
            number = odd.to(tl.float32) * (1.0 / (2 << BITS))
    tl.store(out + lane * size + element, number, mask=element < size)


def draw_numbers(
    key: Tensor,
    hashing: CounterHash,
    rows: int,
    batch: int,
    dtype: torch.dtype,
    *,
    signed: bool = False,
) -> Tensor:
    """Return random numbers [rows, batch] by one key or one for each window; under `vmap`, by the
    keys of every lane."""

    def fill(keys: Tensor) -> Tensor:
        K, size = len(keys), rows * batch
        out = torch.empty(K, rows, batch, dtype=dtype, device=keys.device)
        strides = keys.stride(0), keys.stride(1) if keys.dim() > 1 else 0
        args = (keys, out, size, batch, hashing.site, *strides, hashing.mix, hashing.bits, signed)
        # while precompiling too: the numbers may become addresses
        _draw[(triton.cdiv(size, BLOCK), K)](*args, BLOCK=BLOCK)
        return out

    return call_with_lanes(fill, key)
