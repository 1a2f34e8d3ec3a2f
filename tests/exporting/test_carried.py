"""Runs with `train.state = "carried"`: which formats hold them, and what is compared."""

from __future__ import annotations

from pathlib import Path

import pytest

import slipstream
from slipstream.base.errors import UserError
from tests.exporting.carried_runs import ESTIMATE, train_carried
from tests.exporting.small_runs import compare_predictions


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_carried(tmp_path_factory.mktemp("carried"), **ESTIMATE)


@pytest.mark.parametrize("to", ["onnx", "hub", "triton", "ray"])
def test_every_window_is_compared_row_by_row(run, to, tmp_path):
    parity = slipstream.export(run, to=to, out=tmp_path / "out")["parity"]
    assert parity["windows"] == parity["windows_of_set"] == slipstream.evaluate(run)["windows"]
    assert parity["others"].keys() == {"model.onnx", "step.onnx"}
    assert 0 < parity["others"]["model.onnx"] <= 1e-5
    assert parity["max_rel"] <= 1e-5


@pytest.mark.parametrize("to", ["onnx", "hub"])
def test_the_folder_predicts_as_the_run_does(run, to, tmp_path):
    slipstream.export(run, to=to, out=tmp_path / "out")
    data = run.parent.parent / "two.parquet"
    compare_predictions(slipstream.predict(tmp_path / "out", data), slipstream.predict(run, data))


def test_a_program_of_windows_is_refused_with_the_reason(run, tmp_path):
    with pytest.raises(UserError, match=r"windows of data\.context rows") as error:
        slipstream.export(run, to="torch", out=tmp_path / "out")
    assert 'train.state = "carried"' in str(error.value)
    assert 'use to="onnx"' in str(error.value)
    assert not list(tmp_path.iterdir())


def test_what_is_known_ahead_and_constants_are_fed_row_by_row(tmp_path):
    data = {"future": ["a"], "static": ["k"], "targets": ["c"]}
    run = train_carried(tmp_path, data=data, train={"repeats": 2})
    parity = slipstream.export(run, out=tmp_path / "out", ensemble=True)["parity"]
    assert parity["windows"] == parity["windows_of_set"]
    assert max(parity["others"].values()) <= 1e-5


def test_independent_channels_are_compared_at_every_row(tmp_path):
    run = train_carried(tmp_path, data={"channels": "independent"})
    parity = slipstream.export(run, out=tmp_path / "out")["parity"]
    assert max(parity["others"].values()) <= 1e-5
