"""The folder for the Hugging Face Hub: it is a run, and its card says what was measured."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import safetensors.numpy
import yaml

import slipstream
from slipstream import UserError
from tests.exporting.small_runs import compare_predictions, train_run


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def run(folder: Path) -> Path:
    return train_run(folder, "repeats")


@pytest.fixture(scope="module")
def exported(folder: Path, run: Path) -> Path:
    slipstream.export(run, to="hub", out=folder / "hub", license="apache-2.0", ensemble=True)
    return folder / "hub"


def read_card(exported: Path) -> tuple[dict, str]:
    _, head, body = (exported / "README.md").read_text().split("---\n", 2)
    return yaml.safe_load(head), body


def test_the_folder_predicts_as_the_run_does(exported, run, folder):
    data = folder / "repeats.parquet"
    wanted = slipstream.predict(run, data, ensemble=True)
    compare_predictions(slipstream.predict(exported, data), wanted)


def test_the_card_states_the_test_figures_and_the_licence(exported, run):
    head, body = read_card(exported)
    assert head["license"] == "apache-2.0"
    assert head["pipeline_tag"] == "time-series-forecasting"
    summary = json.loads((run / "metrics.json").read_text())
    (result,) = head["model-index"][0]["results"]
    measured = {one["type"]: one["value"] for one in result["metrics"]}
    assert measured["mae"] == summary["ensemble"]["metrics"]["test"]["mae"]
    for word in ("repeat", "ridge", "2 seeds", "inside the 80 % interval", "range in training"):
        assert word in body


def test_the_code_in_the_card_runs(exported, monkeypatch, capsys):
    _, body = read_card(exported)
    monkeypatch.chdir(exported)
    (code,) = re.findall(r"```python\n(.*?)```", body, re.DOTALL)
    exec(compile(code, "card", "exec"), {})
    assert capsys.readouterr().out == "(1, 4, 3)\n"


def test_the_weights_of_all_networks_and_their_columns_are_there(exported):
    weights = safetensors.numpy.load_file(exported / "model.safetensors")
    assert {name.partition("/")[0] for name in weights} == {"0", "1"}
    content = json.loads((exported / "config.json").read_text())
    assert content["model_type"] == "lstm"
    assert content["members"][0]["signature"]["inputs"] == ["a", "b", "c"]
    assert set(content["members"][0]["scaler"]["shift"]) == {"a", "b", "c"}


def test_no_file_names_a_folder_of_this_machine(exported, folder):
    for path in exported.rglob("*"):
        if path.is_file():
            assert str(folder).encode() not in path.read_bytes(), path.name


def test_without_a_licence_the_card_has_none(folder, tmp_path):
    slipstream.export(train_run(folder, "classes"), to="hub", out=tmp_path / "out")
    head, body = read_card(tmp_path / "out")
    assert "license" not in head
    assert head["pipeline_tag"] == "tabular-classification"
    assert "classifies windows of 8 rows as one of calm, fast, wild" in body


def test_a_licence_for_another_format_is_refused(run, tmp_path):
    with pytest.raises(UserError, match="is for"):
        slipstream.export(run, to="onnx", out=tmp_path / "out", license="mit")
    assert not list(tmp_path.iterdir())
