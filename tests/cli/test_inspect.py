"""The command `inspect`."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib

import pytest
from typer.testing import CliRunner

import slipstream
from slipstream.cli.commands import app
from tests.tools.test_inspection import make_columns, write_csv


def invoke(*words):
    return CliRunner().invoke(app, ["inspect", *map(str, words)])


@pytest.fixture
def table(tmp_path):
    return write_csv(tmp_path / "load.csv", make_columns())


def test_the_text_shows_columns_remarks_and_a_config(table):
    out = invoke(table)
    assert out.exit_code == 0
    assert "voltage_V  number  V     input" in out.stdout
    assert "every 15 minutes, no gaps" in out.stdout
    assert '[data]\npath = "' in out.stdout


def test_json_has_the_keys_of_the_contract(table):
    result = json.loads(invoke(table, "--json").stdout)
    assert {"files", "columns", "problems", "config"} <= result.keys()
    assert result["config"]["data"]["targets"] == ["load"]
    assert tomllib.loads(result["toml"]) == result["config"]


@pytest.mark.usefixtures("table")
def test_the_written_config_trains_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "jobs").mkdir()
    out = invoke("load.csv", "--write", "jobs/job.toml", "--html", "page.html")
    assert out.exit_code == 0, out.stderr
    assert tomllib.loads((tmp_path / "jobs/job.toml").read_text())["data"]["path"] == "../load.csv"
    page = (tmp_path / "page.html").read_text()
    assert page.count("<svg") == 2
    assert invoke("load.csv", "--write", "jobs/job.toml").exit_code == 2
    small = ("train.epochs=1", "model.kind=linear", "engine.plan=off", f"out={tmp_path / 'runs'}")
    result = slipstream.train("jobs/job.toml", overrides=small, quiet=True)
    assert result.metrics["test"]["mae"] > 0


def test_python_has_the_same_with_a_text_and_a_page(table, tmp_path):
    found = slipstream.inspect(table)
    assert found.config["data"]["time"] == "date"
    assert "voltage_V" in repr(found)
    assert found._repr_html_().startswith("<iframe")
    assert list(found.to_pandas().index) == ["date", "voltage_V", "load"]
    assert slipstream.Config(**tomllib.loads(found.write(tmp_path / "j.toml").read_text()))
    with pytest.raises(slipstream.UserError, match="force=True"):
        found.write(tmp_path / "j.toml")


def test_it_does_not_load_torch(table):
    code = f"import sys, slipstream; slipstream.inspect({table!r}); print('torch' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "False"
