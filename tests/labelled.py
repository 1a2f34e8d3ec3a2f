"""Small tables with labels, for tests of what classifies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from slipstream.config import Config
from tests.conftest import merged, small_config

NAMES = ("calm", "fast", "wild")


def states(rows: int = 1200, *, seed: int = 0, stay: int = 15) -> pa.Table:
    """A wave that is slow, fast or large for `stay` rows at a time, and which of them it is."""
    draw = np.random.default_rng(seed)
    turns = [draw.permutation(3) for _ in range(-(-rows // (3 * stay)))]
    number = np.repeat(np.concatenate(turns), stay)[:rows]
    time = np.arange(rows)
    wave = np.array([0.5, 0.5, 3.0])[number] * np.sin(time * np.array([0.4, 1.6, 0.4])[number])
    return pa.table(
        {
            "time": time,
            "a": wave + 0.1 * draw.standard_normal(rows),
            "b": draw.standard_normal(rows),
            "state": np.array(NAMES)[number],
        }
    )


CLASSIFY: dict[str, Any] = {
    "data": {"task": "classify", "targets": ["state"], "context": 8, "horizon": 0},
    "model": {"kind": "mlp", "hidden": 24},
    "train": {"batch": 64, "epochs": 8, "lr": 0.01, "loss": "cross_entropy"},
}


def class_config(out: Path | str = "runs", **sections: Any) -> Config:
    return small_config(out, **merged(CLASSIFY, sections))
