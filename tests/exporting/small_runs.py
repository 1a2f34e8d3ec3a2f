"""Small trained runs to export, one for each thing that a format has to hold."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet

from slipstream.training import train
from tests.conftest import close, merged, small_config, waves
from tests.labelled import CLASSIFY, states

QUICK: dict[str, Any] = {"train": {"epochs": 1}}
RUNS: dict[str, dict[str, Any]] = {
    "lstm": {"name": "cell", "data": {"horizon": 0, "targets": ["c"]}},
    "tcn": {"model": {"kind": "tcn", "layers": 3}},
    **{
        f"{kind}, patches": {"model": {"kind": kind, "patch": 4, "pool": pool, "normalize": how}}
        for kind, pool, how in (
            ("lstm", "attention", "window"),
            ("gru", "mean", "last"),
            ("transformer", "flatten", "window"),
            ("tcn", "attention", "last"),
        )
    },
    "mlp": {"model": {"kind": "mlp", "normalize": "window"}},
    "nhits": {"model": {"kind": "nhits", "normalize": "last"}, "data": {"horizon": 9}},
    "linear": {"model": {"kind": "linear", "normalize": "last"}},
    "quantiles": {"model": {"kind": "gru", "layers": 2}, "train": {"loss": "quantile"}},
    "repeats": {"train": {"repeats": 2}, "model": {"output_range": [9.5, 31.0]}},
    "channels": {"data": {"channels": "independent"}},
    "known ahead": {
        "data": {"future": ["a"], "static": ["k"], "id": "id"},
        "model": {"kind": "transformer"},
    },
    "own class": {"model": {"kind": "tests.models.nets:Mixer"}},
    "own class that decides": {"model": {"kind": "tests.models.nets:Deciding"}},
    "classes": CLASSIFY | {"train": CLASSIFY["train"] | {"epochs": 1}},
}


@cache
def train_run(folder: Path, name: str) -> Path:
    """Train one of them on a file, so that its data can be read again."""
    path, sections = folder / f"{name}.parquet", RUNS[name]
    if name == "classes":
        table = states(300)
    else:
        table = waves(160)
        if "static" in sections.get("data", {}):
            number = np.repeat([0, 1], 80)
            table = table.append_column("id", pa.array(number))
            table = table.append_column("k", pa.array(0.5 + number))
    pa.parquet.write_table(table, path)
    sections = merged(merged(QUICK, sections), {"data": {"path": str(path)}})
    return train(small_config(folder / "runs", **sections)).run


def compare_predictions(got: pa.Table, wanted: pa.Table) -> None:
    """Numbers may differ by rounding: an export leaves the number of threads to its machine."""
    assert got.schema.equals(wanted.schema)
    for name in wanted.column_names:
        if pa.types.is_floating(wanted.schema.field(name).type):
            close(got[name].to_pylist(), wanted[name].to_pylist())
        else:
            assert got[name].equals(wanted[name])
