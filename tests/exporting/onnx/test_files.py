"""Runs of every sort as ONNX files: verified by the export, and run here as a user would."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pyarrow as pa
import pyarrow.parquet
import pytest

import slipstream
from slipstream.base.errors import UserError
from slipstream.training import train
from tests.conftest import close, slow, small_config, waves
from tests.exporting.small_runs import train_run

NEW = waves(40, seed=5)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs")
    pa.parquet.write_table(waves(160), path / "waves.parquet")
    return path


def train_small(folder: Path, **sections: Any) -> Path:
    sections["data"] = {"path": str(folder / "waves.parquet"), **sections.get("data", {})}
    sections["train"] = {"epochs": 1, **sections.get("train", {})}
    return train(small_config(folder / "runs", **sections)).run


def run_file(path: Path, **inputs: Any) -> dict[str, Any]:
    session = onnxruntime.InferenceSession(path)
    names = [one.name for one in session.get_outputs()]
    return dict(zip(names, session.run(names, inputs), strict=True))


@pytest.mark.parametrize(
    "name", ["known ahead", "classes", *map(slow, ("lstm", "quantiles", "channels"))]
)
def test_every_kind_of_run_is_exported_and_verified(name, folder, tmp_path):
    result = slipstream.export(train_run(folder, name), out=tmp_path / "out")
    assert result["parity"]["max_rel"] <= 1e-5
    shapes = {
        one.name: one.shape
        for one in onnxruntime.InferenceSession(tmp_path / "out" / "model.onnx").get_outputs()
    }
    assert shapes == {k: v["shape"] for k, v in result["interface"]["outputs"].items()}


def test_repeats_are_one_graph_that_gives_what_predict_gives(folder, tmp_path):
    run = train_run(folder, "repeats")
    slipstream.export(run, out=tmp_path / "out", ensemble=True)
    table = slipstream.predict(run, NEW, ensemble=True)
    rows = np.stack([NEW[name].to_numpy()[-16:] for name in "abc"], axis=1)[None]
    outputs = run_file(tmp_path / "out" / "model.onnx", rows=rows.astype(np.float32))
    for place, name in enumerate("abc"):
        close(outputs["prediction"][0, :, place], table[f"{name}_predicted"].to_pylist())
        close(outputs["lower"][0, :, place, 0], table[f"{name}_lo80"].to_pylist())
        close(outputs["upper"][0, :, place, 1], table[f"{name}_hi95"].to_pylist())


@pytest.fixture(scope="module")
def ensemble(folder: Path) -> Path:
    """Members that differ in context, inputs, channels, targets' order and quantiles."""
    quantiles = {"loss": "quantile", "quantiles": [0.1, 0.5, 0.9], "repeats": 2, "epochs": 2}
    targets = {"targets": ["a", "b"]}
    channels = {"channels": "independent", "inputs": ["b", "a"], "context": 20}
    members = [
        train_small(folder, data=targets, model={"kind": "gru", "output_range": [9.0, 21.5]}),
        train_small(folder, data=targets | channels, model={"kind": "mlp"}),
        train_small(folder, data=targets | {"inputs": ["c"], "context": 12}, train=quantiles),
    ]
    return slipstream.ensemble(members, out=folder / "runs", quiet=True).run


@pytest.mark.parametrize("mean", [True, slow(False)])
def test_an_ensemble_of_runs_is_one_graph_with_its_intervals(ensemble, mean, tmp_path):
    result = slipstream.export(ensemble, out=tmp_path / "out", ensemble=mean)
    assert result["interface"]["inputs"]["rows"]["shape"] == ["batch", 20, 3]
    assert result["interface"]["outputs"]["lower"]["levels"] == ["80", "95"]
    assert result["parity"]["max_rel"] <= 1e-5
    table = slipstream.predict(ensemble, NEW, ensemble=mean)
    columns = result["interface"]["inputs"]["rows"]["columns"]
    rows = np.stack([NEW[name].to_numpy()[-20:] for name in columns], axis=1)[None]
    outputs = run_file(tmp_path / "out" / "model.onnx", rows=rows.astype(np.float32))
    for place, name in enumerate(result["interface"]["outputs"]["prediction"]["columns"]):
        close(outputs["prediction"][0, :, place], table[f"{name}_predicted"].to_pylist())
        close(outputs["upper"][0, :, place, 0], table[f"{name}_hi80"].to_pylist())


def test_members_that_prepare_their_rows_differently_are_refused(folder, tmp_path):
    step = {"step": "formula", "name": "b", "value": "b * 2"}
    members = [
        train_small(folder, data={"targets": ["a"]}),
        train_small(folder, data={"targets": ["a"], "prepare": [step]}),
    ]
    joint = slipstream.ensemble(members, out=folder / "runs", quiet=True).run
    with pytest.raises(UserError, match=r"its data.prepare differs from that of"):
        slipstream.export(joint, out=tmp_path / "out")


def test_of_folds_the_last_is_exported(folder, tmp_path):
    run = train_small(folder, data={"split": {"walk_forward": 2}}, model={"kind": "linear"})
    result = slipstream.export(run, out=tmp_path / "out")
    assert result["model"] == "the model of the last fold"
    assert "lower" in result["interface"]["outputs"]


def test_a_carried_state_is_compared_over_whole_series(folder, tmp_path):
    settings = {"state": "carried", "batch": 4}
    run = train_small(folder, data={"horizon": 0, "targets": ["c"]}, train=settings)
    result = slipstream.export(run, out=tmp_path / "out")
    assert result["parity"]["max_rel"] <= 1e-5
    assert result["interface"]["state"] == "carried"
    table = slipstream.predict(run, NEW)
    rows = np.stack([NEW[name].to_numpy() for name in "ab"], axis=1)[None].astype(np.float32)
    outputs = run_file(tmp_path / "out" / "model.onnx", rows=rows)
    close(outputs["prediction"][0, 0], table["c_predicted"].to_pylist()[-1:])


@pytest.mark.parametrize("to", ["onnx", "c"])
def test_long_sinusoidal_positions_are_those_of_the_model(to, folder, tmp_path):
    model = {"kind": "transformer", "hidden": 64, "positions": "sinusoidal"}
    data = {"context": 100, "horizon": 1, "split": {"train": 0.7, "val": 0.1, "test": 0.2}}
    run = train_small(folder, data=data, model=model)
    assert slipstream.export(run, to=to, out=tmp_path / "out")["parity"]["max_rel"] <= 2e-6


def test_steps_before_and_the_filter_after_are_named_everywhere(folder, tmp_path):
    step = {"step": "formula", "name": "d", "value": "lag(a, 1) - a"}
    smooth = {"filter": {"kind": "ema", "rows": 5}}
    data = {"prepare": [step], "horizon": 0, "targets": ["b"]}
    run = train_small(folder, data=data, model={"kind": "tcn"}, predict=smooth)
    result = slipstream.export(run, out=tmp_path / "out")
    assert result["before"] == ["data.prepare, step 1 (formula)"]
    assert result["after"] == ["predict.filter (kind = ema, rows = 5)"]
    for name in ("model.onnx", "step.onnx"):
        session = onnxruntime.InferenceSession(tmp_path / "out" / name)
        about = session.get_modelmeta().custom_metadata_map
        assert json.loads(about["prepare_before"]) == result["before"]
        assert json.loads(about["filter_after"]) == result["after"]


def test_a_pretrained_encoder_is_refused(folder, tmp_path):
    config = small_config(
        folder / "runs",
        data={"path": str(folder / "waves.parquet")},
        train={"epochs": 1},
        pretrain={"decoder": 8},
    )
    encoder = slipstream.pretrain(config, quiet=True)
    with pytest.raises(UserError, match="holds a pre-trained encoder, which predicts nothing"):
        slipstream.export(encoder.run, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()
