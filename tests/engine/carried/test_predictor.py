from __future__ import annotations

import pyarrow as pa
import pytest
import torch

from slipstream.data import windows
from slipstream.data.scaler import scale_limits
from slipstream.engine.planning import make_plan
from slipstream.models.forecaster import build
from slipstream.scoring import predict as score
from tests.conftest import close, slow, small_config, small_dataset, waves

SHAPES = {
    "lstm": {"model": {"layers": 2}},
    "gru, layer norm": {"model": {"kind": "gru", "layers": 2, "layer_norm": True}},
    "estimates": {"data": {"horizon": 0, "targets": ["a"], "inputs": ["b", "c"]}},
    "quantiles": {"train": {"loss": "quantile", "state": "carried"}},
    "known ahead": {"data": {"future": ["b"]}},
    "static": {"data": {"id": "name", "static": ["kind"]}},
    "limited": {"model": {"output_range": [9.9, 10.1]}, "data": {"targets": ["a"]}},
}


def make_table():
    """Two series, the first of which has a gap."""
    table = waves(400)
    time = table["time"].to_numpy().copy()
    time[60:] += 50
    table = table.set_column(0, "time", pa.array(time))
    names = pa.array(["x"] * 200 + ["y"] * 200)
    kinds = pa.array([1.0] * 200 + [2.0] * 200)
    return table.append_column("name", names).append_column("kind", kinds)


def predict_naively(model, dataset, start):
    """Read a series from its last gap before the window's end, row by row."""
    signature, series = dataset.signature, dataset.memory.series
    last = start + signature.context - 1
    begin = max(row for row in dataset.index.breaks if row <= last)
    count = signature.sequences_per_window
    states = model.make_states(count, torch.device("cpu"))
    for row in range(begin, last + 1):
        batch = windows.gather_rows(series, torch.tensor([[row]]))
        features, states = model.encode_rows(batch.inputs, states)
    return model.decode_rows(features.flatten(0, 1), batch.static)


@pytest.mark.parametrize("channels", ["together", slow("independent")])
@pytest.mark.parametrize("shape", SHAPES)
def test_windows_are_predicted_from_all_rows_since_the_last_gap(shape, channels):
    data = {"id": "name", "ignore": ["kind"], "channels": channels}
    sections = {"data": {}, "train": {"state": "carried"}} | SHAPES[shape]
    if "static" in sections["data"]:
        del data["ignore"]
    if shape == "estimates" and channels == "independent":
        pytest.skip("there is one target, and it is no input")
    config = small_config(**sections | {"data": data | sections["data"]})
    dataset = small_dataset(config, make_table())
    model = build(config.model, dataset.signature).eval()
    plan = make_plan(config, data_bytes=0)
    predict = score.make_predictor(model, plan, dataset.signature, dataset.scaler)
    starts = dataset.memory.starts["test"][::17]
    with torch.inference_mode():
        found = predict(dataset.memory.series, starts)
        wanted = torch.cat([predict_naively(model, dataset, int(start)) for start in starts])
    if shape == "limited":
        limits = scale_limits(dataset.signature, dataset.scaler)
        wanted = wanted.clamp(*map(torch.from_numpy, limits))
    if shape == "quantiles":  # which may cross in a network
        wanted = wanted.sort(dim=-1).values
    close(found, wanted)


def test_a_model_of_one_layer_reads_on_as_it_reads_a_window():
    """From zeros, the rows of a window leave what the model predicts of the window."""
    for kind in ("lstm", "gru"):
        config = small_config(model={"kind": kind, "layers": 2})
        dataset = small_dataset(config)
        model = build(config.model, dataset.signature).eval()
        series, starts = dataset.memory.series, dataset.memory.starts["val"][:5]
        inputs, static = windows.gather_inputs(series, starts)
        features, _ = model.encode_rows(inputs, model.make_states(5, torch.device("cpu")))
        close(model.decode_rows(features[-1], static).detach(), model(inputs, static).detach())
