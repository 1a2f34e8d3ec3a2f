"""`train.state = "carried"`: one regime from the first step to predictions of new data."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from safetensors.torch import load_file

import slipstream
from slipstream import UserError, runs
from tests.conftest import merged, small_config, waves
from tests.logs import read_lines

CARRIED = {"model": {"layers": 2}, "train": {"state": "carried", "batch": 4, "epochs": 3}}


def train(folder, table=None, **sections):
    """Train on a file, so that the run can read its data again."""
    path = folder / "table.parquet"
    pq.write_table(waves(600) if table is None else table, path)
    how = merged(CARRIED, {"data": {"path": str(path)}})
    return slipstream.train(small_config(folder, **merged(how, sections)), quiet=True)


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    return train(tmp_path_factory.mktemp("single"))


def read_signature(result):
    return runs.read_json(result.run / "model" / "signature.json")


def test_it_is_in_the_signature_and_the_state_in_the_checkpoint(result):
    assert read_signature(result)["state"] == "carried"
    last = max((result.run / "checkpoints").iterdir(), key=lambda one: one.stat().st_mtime)
    names = {name for file in last.glob("*.safetensors") for name in load_file(file)}
    assert {"0/live.carried.0", "0/live.carried.1"} <= names


@pytest.mark.parametrize("which", ["val", "test"])
def test_evaluate_gives_the_figures_of_training(result, which):
    scored = slipstream.evaluate(result.run, on=which)
    assert scored["metrics"] == result.summary["metrics"][which]


def test_the_validation_loss_is_that_of_the_deployed_model(result):
    best = min(
        event["val_loss"]
        for event in read_lines(runs.open_run(result.run))
        if event["event"] == "epoch"
    )
    assert result.summary["scaled"]["val"]["mse"] == pytest.approx(best, rel=1e-5)


def test_predictions_of_the_same_rows_are_those_of_the_test_set(result):
    path = result.run.parent / "table.parquet"
    written = pq.read_table(result.run / "predictions.parquet").to_pandas()
    found = slipstream.predict(result.run, path, every=True)
    found = found.to_pandas().set_index(["row", "step"])
    same = found.loc[list(zip(written["row"], written["step"], strict=True))]
    np.testing.assert_allclose(same["a_predicted"], written["a_predicted"], rtol=1e-5)


def test_a_stream_of_rows_gives_the_predictions_of_whole_series(tmp_path):
    data = {"horizon": 0, "inputs": ["b", "c"], "targets": ["a"]}
    result = train(tmp_path, data=data)
    predicted = slipstream.predict(result.run, tmp_path / "table.parquet")
    stream = slipstream.Stream(result.run)
    assert stream.regime == "carried"
    pushed = [stream.push(row) for row in waves(600).to_pylist()]
    found = [pushed[row].point[0, 0] for row in predicted["row"].to_pylist()]
    np.testing.assert_allclose(found, predicted["a_predicted"], rtol=1e-6)


def test_the_same_rows_are_scored_as_with_windows(result, tmp_path):
    other = train(tmp_path, train={"state": "windows", "epochs": 1})
    assert other.summary["windows"] == result.summary["windows"]
    for name, one in other.summary["baselines"].items():
        assert result.summary["baselines"][name] == one
    rows = [
        pq.read_table(one.run / "predictions.parquet", columns=["row", "step", "a"])
        for one in (result, other)
    ]
    assert rows[0].equals(rows[1])


def make_labels():
    table = waves(600)
    labels = np.where(table["a"].to_numpy() > 10, "high", "low")
    return table.append_column("label", pa.array(labels))


JOBS = {
    "repeats": {"train": {"repeats": 2}},
    "folds": {"data": {"split": {"walk_forward": 2}}},
    "classes": {
        "data": {"task": "classify", "targets": ["label"], "inputs": ["b", "c"], "horizon": 0},
        "train": {"class_weights": "balanced"},
    },
    "quantiles": {"train": {"loss": "quantile", "metric": "mae"}},
    "bf16": {"engine": {"precision": "bf16"}, "model": {"dropout": 0.3}},
    "gru, independent channels": {"model": {"kind": "gru"}, "data": {"channels": "independent"}},
    "stride": {"data": {"stride": 5}},
}


@pytest.mark.parametrize("job", JOBS)
def test_it_works_with(job, tmp_path):
    result = train(tmp_path, make_labels() if job == "classes" else None, **JOBS[job])
    scored = slipstream.evaluate(result.run)
    wanted = result.summary["metrics"]["test"]
    if job == "repeats":
        wanted = result.summary["ensemble"]["metrics"]["test"]
        if result.summary["uses"] == "model":
            wanted = result.summary["metrics"]["test"]
    for name, value in scored["metrics"].items():
        if isinstance(value, float):
            assert value == pytest.approx(wanted[name], rel=1e-2 if job == "bf16" else 1e-5)
    if job in ("repeats", "folds"):
        assert result.summary["pack"]["mode"] == "one at a time"


REFUSED = {
    'model.kind = "tcn"': {"model": {"kind": "tcn", "layers": 1}},
    "model.bidirectional = true": {"model": {"bidirectional": True}},
    'model.pool = "mean"': {"model": {"pool": "mean"}},
    "model.patch = 2": {"model": {"patch": 2}},
    'model.normalize = "last"': {"model": {"normalize": "last"}},
    'engine.home = "loader"': {"engine": {"home": "loader"}},
    'engine.home = "stream"': {"engine": {"home": "stream"}},
    'engine.rnn = "slipstream"': {"engine": {"rnn": "slipstream"}},
    "engine.recompute = true": {"engine": {"recompute": True}},
    'train.batch = "auto"': {"train": {"batch": "auto"}},
    "augment.jitter": {"augment": {"jitter": 0.1}},
    "data.split.stratified = true": {
        "data": {
            "split": {"stratified": True, "train": 0.7, "val": 0.1, "test": 0.2},
            "task": "classify",
            "targets": ["label"],
        },
    },
    "pre-training": {"train": {"objective": "masked"}},
}


@pytest.mark.parametrize("setting", REFUSED)
def test_it_is_refused_by_name_with(setting, tmp_path):
    with pytest.raises(UserError) as caught:
        small_config(tmp_path, **merged(CARRIED, REFUSED[setting]))
    assert f'train.state = "carried" does not work with {setting}' in str(caught.value)
    assert 'set train.state = "windows"' in str(caught.value)


def test_a_search_refuses_it(tmp_path):
    with pytest.raises(UserError, match=r'train.state = "carried" is not supported in a search'):
        slipstream.tune(small_config(tmp_path, **CARRIED), waves())
