"""Small runs that were trained with `train.state = "carried"`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from slipstream.training import train
from tests.conftest import merged, small_config, waves

CARRIED: dict[str, Any] = {"train": {"state": "carried", "batch": 4, "epochs": 1}}
ESTIMATE: dict[str, Any] = {"data": {"horizon": 0, "inputs": ["a", "b"], "targets": ["c"]}}


def write_table(folder: Path) -> Path:
    """Write two series with a static column; the second has a gap."""
    time = np.concatenate([np.arange(160), np.arange(70), np.arange(75, 165)])
    names = np.repeat(["one", "two"], 160)
    table = waves(320).set_column(0, "time", pa.array(time))
    table = table.append_column("id", pa.array(names))
    table = table.append_column("k", pa.array(np.where(names == "one", 0.5, 1.5)))
    pq.write_table(table, folder / "two.parquet")
    return folder / "two.parquet"


def train_carried(folder: Path, **sections: Any) -> Path:
    """Train on these series, so that the run can read its data again."""
    columns = ["a", "b", "c"]
    path = str(write_table(folder))
    data = {"data": {"path": path, "id": "id", "inputs": columns, "targets": columns}}
    return train(small_config(folder / "runs", **merged(merged(CARRIED, data), sections))).run
