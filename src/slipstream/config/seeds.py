"""Seeds as random generators take them."""

from __future__ import annotations

import hashlib

GENERATOR_BITS = 32
"""Torch's CPU generator takes 64 bits and starts from the lower 32 of them."""


def hash_seed(seed: int) -> int:
    """Return a seed that the generators tell apart: itself where it has 32 bits, else a hash."""
    if seed < 2**GENERATOR_BITS:
        return seed
    digest = hashlib.sha256(str(seed).encode()).digest()
    return int.from_bytes(digest[: GENERATOR_BITS // 8], "little")
