"""Tables that stay on disk: the same windows as in memory, or a refusal by name."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from slipstream.base.errors import UserError
from slipstream.data import dataset as datasets
from tests.conftest import small_config
from tests.data.prepare.chain.tables import MINUTE, START, make_bars

BOUNDED = [
    {"step": "unit", "columns": ["volume"], "factor": 0.5, "unit": "k"},
    {"step": "formula", "name": "change", "value": "log(close / lag(close, 1))"},
    {"step": "formula", "name": "z", "value": "zscore(change, 6)"},
    {"step": "filter", "kind": "median", "columns": ["volume"], "rows": 5, "into": "calm"},
    {"step": "clip", "columns": ["calm"], "high": 70.0},
    {"step": "calendar", "features": ["hour"]},
]


def load(path, steps, *, home, **data):
    base = {"path": str(path), "time": "time", "id": "name", "context": 8, "horizon": 2}
    sections = {"data": base | {"prepare": steps} | data, "engine": {"home": home}}
    return datasets.load_dataset(small_config(**sections))


@pytest.fixture(scope="module")
def bars(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bars")
    pq.write_table(
        make_bars(300, names=("A", "B", "C")), folder / "bars.parquet", row_group_size=70
    )
    times = pa.array(START + 60 * MINUTE * np.arange(-4, 80)).cast(pa.timestamp("us"))
    hourly = pa.table({"time": times, "trend": np.sin(np.arange(84.0))})
    pq.write_table(hourly, folder / "hourly.parquet")
    return folder / "bars.parquet"


def collect(dataset, which):
    """Every window of a set, in order: its inputs and its targets."""
    parts = []
    for chunk in dataset.iter_chunks(which, None, rows=64):
        reach = torch.arange(dataset.signature.lead + dataset.signature.steps_out)
        parts.append(chunk.series.values[chunk.starts[:, None] + reach])
    return torch.cat(parts)


@pytest.mark.parametrize("labelled", [True, False])
def test_a_stream_has_the_windows_that_memory_has(bars, labelled, monkeypatch):
    monkeypatch.setattr("slipstream.data.prepare.chain.SCAN_ROWS", 128)
    join = {"step": "join", "path": str(bars.parent / "hourly.parquet"), "period": "1h"}
    steps, data = [*BOUNDED, join], {"targets": ["close"]}
    if labelled:
        label = {"step": "label", "column": "close", "rows": 5, "up": 0.004, "name": "move"}
        steps, data = [*steps, label], {"task": "classify", "targets": ["move"], "horizon": 0}
    whole, stream = (load(bars, steps, home=home, **data) for home in ("host", "stream"))
    assert stream.stream is not None
    assert whole.num_windows == stream.num_windows
    assert whole.left_out == stream.left_out
    for name, shift in whole.scaler.shift.items():
        assert shift == pytest.approx(stream.scaler.shift[name], rel=1e-12, abs=1e-12)
    for which in ("train", "val", "test"):
        one, two = collect(whole, which), collect(stream, which)
        torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-6)


REFUSED = {
    "resample": {"step": "resample", "every": "30min"},
    "pad": {"step": "pad"},
    "ema": {"step": "filter", "kind": "ema", "columns": ["close"], "rows": 5},
    "cumsum": {"step": "formula", "name": "sum", "value": "cumsum(volume)"},
    "outliers": {"step": "outliers", "columns": ["volume"]},
    "ahead": {"step": "formula", "name": "next", "value": "lag(close, -1)", "lookahead": True},
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_stream_refuses_other_steps_by_name(bars, name):
    step = REFUSED[name]
    with pytest.raises(UserError, match=rf'step 2 \({step["step"]}\).* engine.home = "stream"'):
        load(bars, [BOUNDED[0], step], home="stream", targets=["close"])
