"""The objects that the public functions give back."""

from __future__ import annotations

import os
import pickle
import re
import shutil

import pandas as pd
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

import slipstream
from slipstream import UserError, events
from slipstream.cli.commands import app
from slipstream.reporting.charts import MODEL, PALETTE, VALIDATION
from tests.conftest import small_config, waves


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    config = small_config(tmp_path_factory.mktemp("runs"), name="small", train={"epochs": 3})
    return slipstream.train(config, waves(), quiet=True)


@pytest.fixture(scope="module")
def classes(tmp_path_factory):
    table = waves(columns=1).to_pandas()
    table["state"] = ["low" if value < 10 else "high" for value in table["a"]]
    data = {"task": "classify", "targets": ["state"], "horizon": 0}
    config = small_config(tmp_path_factory.mktemp("classes"), data=data, train={"repeats": 2})
    return slipstream.train(config, table, quiet=True), table


def test_a_result_prints_in_five_lines(result):
    title, headings, model, baseline, run = repr(result).splitlines()
    assert title == "Result of small: test set, 77 windows"
    assert headings.split() == ["MAE", "RMSE", "R²", "MASE"]
    assert model.split()[0] == "model"
    assert float(model.split()[1]) == pytest.approx(result.metrics["test"]["mae"], rel=1e-3)
    assert baseline.split()[0] == "ridge"  # the best of the baselines
    assert run == f"run: {result.run}"
    assert len(repr(result)) < 400


def test_a_result_has_every_attribute_where_tab_completion_looks(result):
    expected = {"metrics", "baselines", "history", "config", "plan", "run", "summary", "verdict"}
    expected |= {"report_path", "predict", "evaluate", "to_pandas", "open"}
    assert expected <= set(dir(result))


def test_the_history_is_every_validation(result):
    assert [one.epoch for one in result.history] == [1, 2, 3]
    assert all(isinstance(one, events.Epoch) for one in result.history)
    assert pd.DataFrame(result.history)["val_loss"][2] == result.history[2].val_loss


def test_the_config_and_the_plan_are_those_of_the_run(result):
    assert result.config.data.context == 16
    assert result.config.name == "small"
    assert result.plan["device"] == "cpu"


def test_a_table_of_metrics_has_a_row_for_each_predictor_and_set(result):
    table = result.to_pandas()
    assert table.loc[("model", "test"), "mae"] == result.metrics["test"]["mae"]
    assert table.loc[("ridge", "val"), "r2"] == result.baselines["ridge"]["metrics"]["val"]["r2"]


def test_a_notebook_shows_the_table_a_curve_and_the_verdict(result):
    page = result._repr_html_()
    assert "<td>model</td>" in page
    assert "<td>repeat</td>" in page
    for colour in (MODEL, VALIDATION):  # a line and its key in the legend
        assert page.count(f'stroke="{PALETTE[colour]}" stroke-width="2"') == 2
    assert result.verdict.partition(" ")[0] in page


def test_an_earlier_run_opens_as_its_result(result):
    again = slipstream.Result.open(str(result.run))
    assert again.metrics == result.metrics
    assert repr(again) == repr(result)
    assert repr(pickle.loads(pickle.dumps(again))) == repr(result)


def test_a_result_stands_for_its_folder(result):
    table = waves(40)
    assert os.fspath(result) == str(result.run)
    by_path = slipstream.predict(result.run, table)
    assert slipstream.predict(result, table).equals(by_path)
    assert result.predict(table).equals(by_path)
    assert slipstream.evaluate(result, table) == result.evaluate(table)


def test_an_evaluation_is_a_dict_that_prints_as_a_table(result):
    scores = slipstream.evaluate(result, waves(60))
    assert scores["metrics"] is scores.metrics
    title, headings, model, *_ = repr(scores).splitlines()
    assert title == "Evaluation on data: 41 windows; the model"
    assert headings.split()[0] == "MAE"
    assert float(model.split()[1]) == pytest.approx(scores.metrics["mae"], rel=1e-3)
    assert scores.to_pandas().loc["a", "mae"] == scores.detail["per_target"]["a"]["mae"]
    assert "<th>MAE</th>" in scores._repr_html_()


def test_the_report_is_written_when_its_path_is_read(result):
    assert not (result.run / "report.html").exists()
    assert result.report_path.read_text(encoding="utf-8").startswith("<!doctype html>")


def test_a_result_of_classes_prints_their_metrics_and_the_ensemble(classes):
    result, table = classes
    assert "log-loss  balanced accuracy" in repr(result)
    rows = [line.split()[0] for line in repr(result).splitlines()[2:]]
    assert rows[:2] == ["model", "ensemble"]
    scores = result.evaluate(table)
    assert "log-loss" in repr(scores)
    assert set(scores.to_pandas().index) == {"low", "high"}


@pytest.fixture(scope="module")
def from_table(tmp_path_factory):
    config = small_config(tmp_path_factory.mktemp("tables"), train={"epochs": 1})
    return slipstream.train(config, waves(160), quiet=True)


def test_a_run_of_a_table_names_what_to_pass_on_the_command_line(from_table, tmp_path):
    run, out = str(from_table.run), str(tmp_path / "out")
    copy = str(shutil.copytree(from_table.run, tmp_path / "copy"))
    more = ("--set", "train.epochs=3")
    said = {
        ("evaluate", run): "with --data FILE, .* --set data.path=FILE",
        ("evaluate", run, "--stream"): "with --data FILE, .* --set data.path=FILE",
        ("export", run, "--to", "onnx", "--out", out): "with --data FILE",
        ("ensemble", run, copy): r"again: --set data.path=FILE \(in Python data=TABLE\)",
        ("train", "--resume", copy, *more): r"again: --set data.path=FILE \(in Python data=TABLE\)",
        ("train", f"{run}/config.toml"): "data.path is not set; .* --set data.path=FILE",
    }
    for arguments, message in said.items():
        found = CliRunner().invoke(app, list(arguments))
        assert found.exit_code == 2, found.output
        assert re.search(message, found.stderr), (arguments, found.stderr)


def test_a_run_of_a_table_names_the_argument_in_python(from_table, tmp_path):
    copy = shutil.copytree(from_table.run, tmp_path / "copy")
    longer = {"overrides": "train.epochs=3", "quiet": True}
    with pytest.raises(UserError, match=r"passed from Python.*rows to score with data=TABLE"):
        from_table.evaluate()
    with pytest.raises(UserError, match=r"with data=TABLE$"):
        slipstream.export(from_table, out=tmp_path / "out")
    with pytest.raises(UserError, match=r"; pass data=TABLE$"):
        slipstream.train(resume=copy, **longer)
    with pytest.raises(UserError, match=r"; pass data=TABLE$"):
        slipstream.ensemble([from_table, copy])
    assert slipstream.train(None, waves(160), resume=copy, **longer).metrics
    assert slipstream.ensemble([from_table, copy], waves(160), quiet=True).metrics


def test_a_table_that_was_saved_stands_for_the_one_that_was_passed(from_table, tmp_path):
    pq.write_table(waves(160), tmp_path / "table.parquet")
    scores = from_table.evaluate(overrides=f"data.path={tmp_path}/table.parquet")
    assert scores.metrics["mae"] == pytest.approx(from_table.metrics["test"]["mae"], rel=1e-5)
