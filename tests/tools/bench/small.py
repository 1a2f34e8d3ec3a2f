"""A case that takes no time."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from slipstream import config as configs
from slipstream.data import dataset as datasets
from slipstream.tools.bench.cases import Case


def small_case(*, epochs=1, kind="lstm", rows=900, batch=64, **train):
    inputs = ["a", "b", "c"]
    draw = np.random.default_rng(0)
    table = pa.table({name: draw.standard_normal(rows).cumsum() for name in [*inputs, "y"]})
    config = configs.load(
        {
            "name": "small",
            "data": {"inputs": inputs, "targets": ["y"], "context": 26, "horizon": 0},
            "model": {"kind": kind, "hidden": 8, "layers": 1, "dropout": 0.0},
            "train": {"batch": batch, "epochs": epochs} | train,
        }
    )
    return Case("small", config, datasets.load_dataset(config, table))
