"""Every way to deploy a run has the regime that its evaluation advises."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pytest

import slipstream
from slipstream.base.errors import UserError
from slipstream.exporting.c.files import run_selftest
from slipstream.inference.portable import load_portable
from slipstream.inference.stream import (
    STREAM_FILE,
    choose_default_regime,
    read_measurement,
)
from slipstream.server.api import build_graph
from slipstream.server.model import ServedModel
from slipstream.training import train
from tests.conftest import small_config, waves
from tests.exporting.c.programs import needs_compiler

TCN = {"kind": "tcn", "layers": 2, "kernel_size": 2}
"""Reads the last 7 rows, fewer than the context: a carried state predicts the same"""


def train_run(folder: Path, *, data: dict[str, Any] | None = None, **sections: object) -> Path:
    path = folder / "waves.csv"
    pa.csv.write_csv(waves(400), path)
    plain = {"path": str(path), "inputs": ["a", "b"], "targets": ["c"], "horizon": 0, "context": 8}
    return train(small_config(folder / "runs", data=plain | (data or {}), **sections)).run


@pytest.fixture(scope="module")
def lstm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nobody has measured on a stream."""
    return train_run(tmp_path_factory.mktemp("lstm"), train={"epochs": 1})


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of which `evaluate` advises the carried state."""
    run = train_run(tmp_path_factory.mktemp("tcn"), model=TCN, train={"epochs": 1})
    assert slipstream.evaluate(run, stream=True).deploy == "carried"
    return run


def serve_streams(run: Path, regime: str = "auto") -> str:
    portable = load_portable(run)
    model = ServedModel(portable, build_graph(portable), regime)
    assert (model.stream is not None) == (model.regime.name == "carried")
    return model.regime.name


def test_a_run_that_was_trained_on_windows_is_deployed_with_windows(lstm):
    assert slipstream.Stream(lstm).regime == "window"
    assert serve_streams(lstm) == "window"
    assert "has not been measured" in choose_default_regime(load_portable(lstm)).reason


def test_everything_follows_an_evaluation_that_advises_the_carried_state(measured):
    record = json.loads((measured / STREAM_FILE).read_text())
    assert record["use"] == "carried"
    assert record["on"] == "test"
    assert record["carried"] == pytest.approx(record["window"], rel=1e-5)
    assert slipstream.Stream(measured).regime == "carried"
    assert serve_streams(measured) == "carried"


def test_an_explicit_choice_wins(measured, lstm):
    assert slipstream.Stream(measured, regime="window").regime == "window"
    assert serve_streams(measured, "window") == "window"
    assert slipstream.Stream(lstm, regime="carried").regime == "carried"


@needs_compiler
def test_the_step_of_c_code_has_the_regime_and_the_header_says_why(measured, lstm, tmp_path):
    result = slipstream.export(measured, to="c", out=tmp_path / "tcn")
    assert result["state"] == "carried"
    assert result["deploy"]["regime"] == "carried"
    header = " ".join((tmp_path / "tcn" / "slip.h").read_text().replace(" *", " ").split())
    record = json.loads((measured / STREAM_FILE).read_text())
    errors = f"MAE {record['window']:.4g} with windows and {record['carried']:.4g} with a carried"
    assert "Use slip_step, which carries the network's state from row to row: evaluate" in header
    assert errors in header
    result = slipstream.export(lstm, to="c", out=tmp_path / "lstm")
    assert (result["state"], result["deploy"]["use"]) == ("windows", "slip_step")
    chosen = slipstream.export(lstm, to="c", out=tmp_path / "chosen", state="carried")
    assert chosen["state"] == "carried"
    assert chosen["deploy"]["reason"].startswith("as requested; the default would be windows")


def test_an_onnx_export_names_the_graph_to_use_and_is_deployed_alike(measured, lstm, tmp_path):
    result = slipstream.export(measured, to="onnx", out=tmp_path / "tcn")
    assert result["deploy"]["use"] == "step.onnx"
    assert slipstream.Stream(tmp_path / "tcn").regime == "carried"
    assert serve_streams(tmp_path / "tcn") == "carried"
    assert slipstream.export(lstm, out=tmp_path / "lstm")["deploy"]["use"] == "model.onnx"


def test_the_measurement_of_other_weights_or_of_other_networks_does_not_count(measured, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(measured, run)
    record = json.loads((run / STREAM_FILE).read_text())
    for change in ({"weights": "0" * 64}, {"networks": 2}):
        (run / STREAM_FILE).write_text(json.dumps(record | change))
        assert read_measurement(load_portable(run)) is None
        assert slipstream.Stream(run).regime == "window"
    (run / STREAM_FILE).write_text('{"use": "carried"}')
    with pytest.raises(UserError, match=r"stream\.json: is damaged; remove it, or measure again"):
        slipstream.Stream(run)


@pytest.mark.parametrize(("folds", "repeats"), [(True, 1), (False, 2), (True, 2)])
def test_repeats_and_folds_are_deployed_as_they_were_measured(folds, repeats, tmp_path):
    split = {"split": {"walk_forward": 2}} if folds else {}
    run = train_run(tmp_path, data=split, model=TCN, train={"epochs": 1, "repeats": repeats})
    assert slipstream.evaluate(run, stream=True).deploy == "carried"
    assert slipstream.Stream(run).regime == "carried"


def test_the_training_set_does_not_decide(lstm, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(lstm, run)
    scores = slipstream.evaluate(run, stream=True, on="train")
    assert scores["recorded"] is None
    assert any("not recorded" in note for note in scores["notes"])
    assert not (run / STREAM_FILE).exists()


def test_new_data_decide(lstm, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(lstm, run)
    scores = slipstream.evaluate(run, waves(300, seed=3), stream=True)
    assert scores["recorded"] == str(run / STREAM_FILE)
    assert slipstream.Stream(run).regime == scores.deploy
    assert "of new data" in choose_default_regime(load_portable(run)).reason


STEPS = [
    {"step": "filter", "kind": "ema", "columns": ["a"], "rows": 4, "into": ["slow"]},
    {"step": "formula", "name": "power", "value": "b * lag(a, 1)"},
]
PREPARED = {"inputs": ["a", "slow", "power"], "prepare": STEPS}
SUM = [{"step": "formula", "name": "sum", "value": "cumsum(b) / 100"}]
CASES = {
    "plain": {},
    "prepared and filtered": {
        "data": PREPARED,
        "predict": {"filter": {"kind": "moving_average", "rows": 3}},
    },
    "a formula over all rows": {"data": {"inputs": ["a", "sum"], "prepare": SUM}},
    "padded": {"data": {"prepare": [{"step": "pad", "rows": 4}]}},
    "quantiles": {"train": {"loss": "quantile", "epochs": 1}},
    "forecast": {"data": {"horizon": 3, "targets": ["a", "c"], "inputs": ["a", "b", "c"]}},
}


@needs_compiler
@pytest.mark.parametrize("state", ["windows", "carried"])
@pytest.mark.parametrize("case", CASES)
def test_the_self_test_finds_a_fault_in_the_recommended_function(case, state, tmp_path):
    path = tmp_path / "waves.csv"
    pa.csv.write_csv(waves(200), path)
    sections = dict(CASES[case])
    plain = {"path": str(path), "inputs": ["a", "b"], "targets": ["c"], "horizon": 0, "context": 8}
    sections["data"] = plain | sections.get("data", {})
    sections["train"] = {"epochs": 1} | sections.get("train", {})
    run = train(small_config(tmp_path / "runs", **sections)).run
    out = tmp_path / "out"
    result = slipstream.export(run, to="c", out=out, state=state)
    assert re.search(r"windows? and \d+ rows, .* ok$", result["selftest"])
    source = (out / "slip.c").read_text()
    call = re.search(r"return slip_step_state\(&own_state, row.*\);", source)
    assert call is not None
    # every row but the last ones of the self-test is as before
    faulty = "static int n; int r = " + call[0].removeprefix("return ")
    faulty += " if (++n > 30) { out[0] += 0.1f; } return r;"
    (out / "slip.c").write_text(source.replace(call[0], faulty))
    with pytest.raises(UserError, match="self-test of the C code fails"):
        run_selftest(out, ["slip.c"])
