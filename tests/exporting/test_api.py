"""The command and the function `export`: what they write, and what they refuse."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

import slipstream
from slipstream.base.errors import UserError
from slipstream.cli.commands import app
from slipstream.exporting import formats
from slipstream.exporting.api import export_run
from slipstream.training import train
from tests.conftest import slow, small_config, waves


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data")
    pa.csv.write_csv(waves(160), path / "waves.csv")
    return path


@pytest.fixture(scope="module")
def run(folder: Path) -> Path:
    """A trained LSTM, and its data beside it."""
    data = {"path": str(folder / "waves.csv")}
    return train(small_config(folder / "runs", data=data)).run


def invoke(*args: object) -> tuple[int, dict]:
    result = CliRunner().invoke(app, ["export", *map(str, args), "--json"])
    return result.exit_code, json.loads(result.stdout)


def test_the_command_writes_verified_files_with_their_sums(run, tmp_path):
    code, result = invoke(run, "--to", "onnx", "--out", tmp_path / "out")
    assert code == 0
    saved = json.loads((tmp_path / "out" / "export.json").read_text())
    assert saved["parity"] == result["parity"]
    assert result["parity"]["windows"] == slipstream.evaluate(run)["windows"]
    assert result["parity"]["max_rel"] <= 1e-5
    assert {"model.onnx", "step.onnx"} <= {file["name"] for file in saved["files"]}
    for file in saved["files"]:
        content = (tmp_path / "out" / file["name"]).read_bytes()
        assert hashlib.sha256(content).hexdigest() == file["sha256"]
        assert len(content) == file["bytes"]


def test_the_summary_names_files_difference_and_folder(run, tmp_path):
    args = ["export", str(run), "--to", "onnx", "--out", str(tmp_path / "out")]
    text = CliRunner().invoke(app, args).stdout
    assert "model.onnx" in text
    assert "largest difference" in text
    assert "out" in text.splitlines()[-1]


def test_a_folder_with_an_export_is_replaced_only_by_force(run, tmp_path):
    out = tmp_path / "out"
    slipstream.export(run, out=out)
    (out / "more.txt").write_text("x")
    with pytest.raises(UserError, match="holds an export; pass force=True"):
        slipstream.export(run, out=out)
    assert (out / "more.txt").exists()
    slipstream.export(run, out=out, force=True)
    assert not (out / "more.txt").exists()


def test_a_folder_with_other_files_is_never_replaced(run, tmp_path):
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(UserError, match="is not empty, and no export"):
        slipstream.export(run, out=tmp_path, force=True)
    assert (tmp_path / "thesis.tex").exists()


def test_an_unknown_format_is_refused_with_the_nearest_one(run, tmp_path):
    code, result = invoke(run, "--to", "onx", "--out", tmp_path / "out")
    assert code == 2
    assert 'did you mean "onnx"?' in result["error"]
    assert not list(tmp_path.iterdir())


def test_a_damaged_run_is_refused_and_nothing_is_written(run, tmp_path):
    copy = shutil.copytree(run, tmp_path / "copy")
    weights = copy / "model" / "weights.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    code, result = invoke(copy, "--to", "onnx", "--out", tmp_path / "out")
    assert code == 2
    assert "is damaged" in result["error"]
    assert not (tmp_path / "out").exists()


def test_a_run_without_a_model_is_refused(run, tmp_path):
    copy = shutil.copytree(run, tmp_path / "copy")
    shutil.rmtree(copy / "model")
    code, result = invoke(copy, "--to", "onnx", "--out", tmp_path / "out")
    assert code == 2
    assert "was the run finished?" in result["error"]


def test_without_the_runs_data_new_rows_are_verified_on(run, folder, tmp_path):
    moved = tmp_path / "rows.csv"
    pa.csv.write_csv(waves(60), moved)
    (folder / "waves.csv").rename(folder / "gone.csv")
    try:
        with pytest.raises(UserError, match=r"no such file[\s\S]*new rows with the same columns"):
            slipstream.export(run, out=tmp_path / "out")
        assert not (tmp_path / "out").exists()
        result = slipstream.export(run, out=tmp_path / "out", data=moved)
    finally:
        (folder / "gone.csv").rename(folder / "waves.csv")
    assert result["parity"]["on"] == "data"
    assert result["parity"]["windows"] == 60 - 16 + 1


def test_an_export_that_differs_is_a_failure_and_leaves_nothing(run, tmp_path, monkeypatch):
    wrong = formats.ExportFormat("tests.exporting.wrong", "", ("lstm",))
    monkeypatch.setitem(formats.FORMATS, "wrong", wrong)
    with pytest.raises(UserError, match="differ from the model by up to"):
        export_run(run, "wrong", tmp_path / "out")
    assert not list(tmp_path.iterdir())


@pytest.fixture(scope="module")
def streamed(folder: Path) -> Path:
    """A run whose rows stay on disk: in pieces of 30, with a gap, and some targets missing."""
    table = waves(200)
    time = table["time"].to_numpy() + 1000 * (np.arange(200) >= 181)
    target = np.where(np.arange(200) % 50 == 7, np.nan, table["c"].to_numpy())
    table = table.set_column(0, "time", pa.array(time))
    table = table.set_column(3, "c", pa.array(target, from_pandas=True))
    pq.write_table(table, folder / "streamed.parquet", row_group_size=30)
    data = {"path": str(folder / "streamed.parquet"), "inputs": ["a", "b"], "targets": ["c"]}
    engine = {"home": "stream", "workers": 0, "buffer_rows": 30}
    return train(small_config(folder / "runs", data=data, engine=engine)).run


@pytest.mark.parametrize("to", ["onnx", "c", "hub", slow("torch"), slow("triton"), slow("ray")])
def test_a_streamed_run_is_verified_on_every_window(streamed, tmp_path, to):
    code, result = invoke(streamed, "--to", to, "--out", tmp_path / "out")
    assert code == 0, result
    assert result["parity"]["windows"] == slipstream.evaluate(streamed)["windows"]
    if to == "hub":
        card = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
        assert re.search(r"\| `c` \| targets .*\| 4 \|", card)
