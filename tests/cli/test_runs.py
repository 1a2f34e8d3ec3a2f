"""Commands that read a run, or name one to resume."""

from __future__ import annotations

import json
import shutil
import signal

import jinja2
import pytest

import slipstream
from slipstream import runs
from tests.cli.test_cli import SMALL, invoke, sets
from tests.conftest import waves


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A working folder with a table, two configs, and a run of each in runs/."""
    home = tmp_path_factory.mktemp("home")
    waves().to_pandas().to_csv(home / "table.csv", index=False)
    for name in ("heat", "load"):
        (home / f"{name}.toml").write_text('[data]\npath = "table.csv"\n')
        overrides = (*SMALL, "train.epochs=1", f"out={home / 'runs'}")
        slipstream.train(home / f"{name}.toml", overrides=overrides)
    return home


@pytest.fixture
def here(home, monkeypatch):
    monkeypatch.chdir(home)
    return home


@pytest.mark.parametrize("name", ["last", "load", "runs/lo", "runs/last"])
def test_a_run_is_named_by_last_or_the_beginning_of_its_name(here, name):
    (folder,) = here.glob("runs/load-*")
    answer = invoke("evaluate", name, "--json")
    assert answer.exit_code == 0, answer.output
    assert json.loads(answer.stdout)["run"] == str(folder)


def test_the_report_of_the_last_run_is_written_to_its_folder(here):
    (folder,) = here.glob("runs/load-*")
    answer = invoke("report", "last", "--json")
    assert answer.exit_code == 0, answer.output
    assert json.loads(answer.stdout)["run"] == f"runs/{folder.name}"
    assert (folder / "report.html").exists()


def test_an_ambiguous_name_lists_the_runs_it_may_mean(here):
    folder = runs.create_run("load", out=str(here / "runs"), files={"config.toml": ""}).folder
    answer = invoke("evaluate", "load")
    runs.remove(folder)
    assert answer.exit_code == 2
    assert "2 runs in runs" in answer.stderr
    assert f"\n  {folder.name}\n" in answer.stderr


def test_a_run_to_resume_is_named_the_same_way(here):
    (folder,) = here.glob("runs/heat-*")
    for words in (["heat"], ["last", "--out", "runs", "--set", "name=x"]):
        answer = invoke("train", "--resume", *words)
        assert answer.exit_code == 2
        assert "is finished, after" in answer.stderr
    assert str(folder) in invoke("train", "--resume", "heat").stderr
    assert "is a training run, not a search" in invoke("tune", "--resume", "heat").stderr


def test_predict_replaces_a_file_only_with_force(here, tmp_path):
    out = tmp_path / "forecast.csv"
    out.write_text("precious")
    answer = invoke("predict", "last", here / "table.csv", "--out", out)
    assert answer.exit_code == 2
    assert "exists; pass --force to replace it" in answer.stderr
    assert out.read_text() == "precious"
    answer = invoke("predict", "last", here / "table.csv", "--out", out, "--force")
    assert answer.exit_code == 0, answer.output
    assert out.read_text().startswith('"series"')


@pytest.mark.parametrize(("number", "form"), [(signal.SIGINT, []), (signal.SIGTERM, ["--json"])])
def test_an_interrupt_while_the_report_is_drawn_leaves_the_summary(
    here, tmp_path, monkeypatch, number, form
):
    with monkeypatch.context() as patch:
        patch.setattr(jinja2.Environment, "get_template", lambda *_: signal.raise_signal(number))
        answer = invoke(
            *("train", here / "heat.toml", "--out", tmp_path / "runs", *form),
            *sets("train.epochs=1"),
        )
    assert answer.exit_code == 128 + number, answer.output
    (folder,) = tmp_path.glob("runs/*")  # where --out said
    assert f"draw it with: slipstream report {folder}" in answer.stderr
    if form:
        assert json.loads(answer.stdout)["report"] is None
    else:
        assert "ridge" in answer.stdout
        assert f"report: not drawn; draw it with: slipstream report {folder}" in answer.stdout
    assert (folder / "metrics.json").exists()
    assert not (folder / "report.html").exists()


def test_the_summary_and_the_report_of_a_resumed_run_count_from_its_first_start(here, tmp_path):
    (source,) = here.glob("runs/heat-*")
    folder = tmp_path / "runs" / source.name
    shutil.copytree(source, folder)
    before_s = runs.read_metrics(folder)["seconds"]
    words = ("--out", tmp_path / "runs", "--set", "train.epochs=2")
    answer = invoke("train", "--resume", "last", *words)
    assert answer.exit_code == 0, answer.output
    summary = runs.read_metrics(folder)
    assert summary["seconds"] > summary["seconds_before_resume"] >= before_s
    assert "in total" in answer.stdout
    assert "of it before the resume" in answer.stdout
    assert "of it before the resume" in (folder / "report.html").read_text()
