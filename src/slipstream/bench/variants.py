"""The variants that are compared with peers: our presets, a plain loop, and Lightning."""

from __future__ import annotations

from collections.abc import Iterator

from slipstream.bench.frameworks import lightning_loop
from slipstream.bench.frameworks.settings import PeerSettings

AUTO, CLASSIC, BASELINE = (f"Slipstream, {preset}" for preset in ("auto", "classic", "baseline"))
"""Slipstream by itself, and with its presets for the usual advice and the naive loop"""
PLAIN = "plain loop"
AT_BEST = "Lightning at its best"
USUAL = "Lightning as people run it"


def list_peers(*, on_gpu: bool) -> Iterator[PeerSettings]:
    """Yield the settings of the other frameworks."""
    precisions = ("tf32", "fp16", "bf16") if on_gpu else ("fp32",)
    counts = (0, 4, 8) if on_gpu else (0, 2)
    usual = "fp16" if on_gpu else "fp32"
    for workers in counts[:2]:
        yield PeerSettings(f"{PLAIN}, {usual}, {workers} workers", "plain", usual, workers)
    if not lightning_loop.has_lightning():
        return
    yield PeerSettings(f"{USUAL}, {usual}", "lightning", usual, counts[1], habits=True)
    for precision in precisions:
        for workers in counts:
            name = f"{AT_BEST}, {precision}, {workers} workers"
            yield PeerSettings(name, "lightning", precision, workers)
