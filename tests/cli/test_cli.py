from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pyarrow.parquet
import pytest
import torch
from typer.testing import CliRunner

from slipstream import __version__
from slipstream.cli.commands import app
from tests.conftest import HUNG_S, slow, waves

SMALL = [
    "train.epochs=2",
    "train.batch=64",
    "model.kind=mlp",
    "model.hidden=8",
    "data.context=8",
    "data.horizon=2",
    "data.time=time",
    "engine.device=cpu",
    "engine.threads=1",
    "engine.plan=off",
]


def invoke(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def sets(*more):
    return [word for setting in (*SMALL, *more) for word in ("--set", setting)]


@pytest.fixture
def job(tmp_path):
    """A config and its table in a folder of their own."""
    waves().to_pandas().to_csv(tmp_path / "table.csv", index=False)
    config = tmp_path / "job.toml"
    config.write_text(f'out = "{tmp_path}/runs"\n[data]\npath = "table.csv"\n')
    return config


def test_json_is_one_object_and_nothing_else(job):
    found = invoke("train", job, "--json", *sets())
    assert found.exit_code == 0, found.output
    summary = json.loads(found.stdout)
    assert found.stdout.count("\n") == 1
    assert summary["metrics"]["test"]["mae"] > 0
    assert summary["report"].endswith("report.html")
    assert "validation" in found.stderr


def test_a_person_gets_a_table_a_verdict_and_the_reports_path(job):
    found = invoke("train", job, *sets())
    assert found.exit_code == 0, found.output
    for part in (
        "model",
        "ridge",
        "repeat",
        "MAE",
        "test set",
        "report.html",
        "windows per second",
    ):
        assert part in found.stdout
    for part in ("estimated", "(rule of thumb); training took", "CPU cores busy"):
        assert part in found.stdout
    assert "for 10 steps (rule of thumb)" in found.stderr
    assert "\x1b" not in found.output


def test_quiet_is_quiet(job):
    found = invoke("train", job, "--quiet", *sets())
    assert found.exit_code == 0
    assert found.output == ""


def test_the_other_verbs_follow_a_run(job, tmp_path):
    run = json.loads(invoke("train", job, "--json", *sets()).stdout)["run"]
    found = invoke("evaluate", run, "--json")
    assert json.loads(found.stdout)["windows"] == 79
    assert "MAE" in invoke("evaluate", run, "--on", "val").stdout
    assert "data: 391 windows" in invoke("evaluate", run, "--data", tmp_path / "table.csv").stdout
    for name in ("ahead.csv", "ahead.parquet", "ahead.arrow"):
        out = tmp_path / name
        found = invoke("predict", run, tmp_path / "table.csv", "--out", out)
        assert found.exit_code == 0, found.output
        assert "2 rows written" in found.stdout
        assert out.exists()
    header = "series,row,time,step,a_predicted,b_predicted,c_predicted"
    assert (tmp_path / "ahead.csv").read_text().splitlines()[0].replace('"', "") == header
    assert pyarrow.parquet.read_table(tmp_path / "ahead.parquet").num_rows == 2
    found = invoke("predict", run, tmp_path / "table.csv", "--out", tmp_path / "x.xlsx")
    assert found.exit_code == 2
    assert "as .csv, .parquet or .arrow" in found.stderr
    assert "report.html" in json.loads(invoke("report", run, "--json").stdout)["report"]


def test_last_is_the_newest_run_where_it_was_told_to_be(job, tmp_path):
    run = json.loads(invoke("train", job, "--json", *sets()).stdout)["run"]
    here = f"out={tmp_path / 'runs'}"
    done = invoke("train", "--resume", "last", "--set", here)
    assert done.exit_code == 2
    assert f"{run}: is finished, after 2 epochs" in done.stderr
    longer = invoke("train", job, "--resume", "last", "--json", *sets("train.epochs=3"))
    assert longer.exit_code == 0, longer.output
    found = json.loads(longer.stdout)
    assert (found["run"], found["epochs"]) == (run, 3)
    other = invoke("tune", job, "--resume", "last", *sets("train.lr=0.5"))
    assert other.exit_code == 2
    assert f"{run}: cannot resume with changed settings" in other.stderr
    assert "holds no run to resume" in invoke("tune", "--resume", "last", "--set", "out=x").stderr


def test_a_wrong_setting_exits_with_2_and_writes_nothing(job, tmp_path):
    before = sorted(tmp_path.rglob("*"))
    found = invoke("train", job, "--json", *sets("train.lr=-1"))
    assert found.exit_code == 2
    assert "train.lr is -1" in found.stderr
    assert "train.lr is -1" in json.loads(found.stdout)["error"]
    assert "Traceback" not in found.output
    assert sorted(tmp_path.rglob("*")) == before


def test_what_cannot_be_pretrained_is_told_with_its_option(job, tmp_path):
    found = invoke("pretrain", job, *sets("model.kind=lstm", "pretrain.length=6"))
    assert found.exit_code == 2
    assert "--set: data.context = 8 is less than the 12 rows" in found.stderr
    assert not (tmp_path / "runs").exists()


def test_a_fault_of_ours_exits_with_1(job, monkeypatch):
    def broken(*_, **__):
        raise ZeroDivisionError("oops")

    monkeypatch.setattr(torch, "manual_seed", broken)  # nothing of ours expects it to fail
    found = invoke("train", job, "--json", *sets())
    assert found.exit_code == 1
    assert "Traceback" in found.stderr
    assert "ZeroDivisionError: oops" in json.loads(found.stdout)["error"]


def test_version_and_help():
    assert invoke("--version").stdout.strip() == __version__
    found = invoke("train", "--help")
    assert found.exit_code == 0
    for option in ("--set", "--json", "--quiet"):
        assert option in found.stdout
    assert invoke().exit_code == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGUSR1, 75)]
)
def test_an_interrupt_saves_and_exits_with_its_code(job, number, code, tmp_path):
    command = [sys.executable, "-m", "slipstream", "train", str(job)]
    command += sets("train.epochs=100000", "train.patience=off", "engine.log_every=5")
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while not any(
        '"event": "epoch"' in path.read_text() for path in tmp_path.glob("runs/*/events.jsonl")
    ):
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.1)
    process.send_signal(number)
    _, told = process.communicate(timeout=HUNG_S)
    assert process.returncode == code, told
    assert "stopped at step" in told
    assert "Traceback" not in told
    run = next(tmp_path.glob("runs/*"))
    assert list(run.glob("checkpoints/step-*/lanes.safetensors"))
    assert invoke("evaluate", run).exit_code == 0


@pytest.mark.parametrize(
    "words",
    [["train"], *map(slow, (["evaluate"], ["profile"], ["bench", "ladder"], ["tune"], ["doctor"]))],
    ids=" ".join,
)
def test_an_interrupt_acts_where_the_parent_ignores_it(job, tmp_path, words):
    if words == ["evaluate"]:
        assert invoke("train", job, *sets()).exit_code == 0
        words = ["evaluate", str(next(tmp_path.glob("runs/*")))]
    elif words != ["doctor"]:
        words = [*words, str(job), *sets("train.epochs=100000", "train.patience=off")]
    process = subprocess.Popen(
        [sys.executable, "-m", "slipstream", *words],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
    )
    while process.poll() is None:  # the first ones come before Python runs, and are ignored
        process.send_signal(signal.SIGINT)
        time.sleep(0.05)
    message = process.communicate()[1]
    assert process.returncode == 130, message
    assert "Traceback" not in message


@pytest.mark.slow
def test_a_terminal_gets_a_bar_that_goes_away(job):
    pty = pytest.importorskip("pty")
    command = [sys.executable, "-m", "slipstream", "train", str(job), *sets("train.epochs=60")]
    controller, terminal = pty.openpty()
    environment = os.environ | {"TERM": "xterm-256color", "COLUMNS": "120"}
    environment.pop("NO_COLOR", None)
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=terminal, env=environment, text=True
    )
    os.close(terminal)
    seen = b""
    while True:
        try:
            part = os.read(controller, 65536)
        except OSError:  # the other end is closed
            break
        if not part:
            break
        seen += part
    assert process.wait(timeout=HUNG_S) == 0
    assert "steps/s" in seen.decode()
    assert "loss" in seen.decode()
    assert seen.rstrip().endswith(b"...\x1b[0m") or b"writing the report" in seen
    process.stdout.close()
    os.close(controller)


@pytest.mark.slow
def test_bench_measures_compares_and_leaves_its_files(job, tmp_path):
    given = (job, *sets(), "--minutes", "0.05")
    for name in ("old", "new"):
        found = invoke("bench", "ladder", *given, "--out", tmp_path / name, "--json")
        assert found.exit_code == 0, found.output
        assert json.loads(found.stdout)["rows"][0]["way"] == "naive loop"
        assert "measuring job" in found.stderr
    assert (tmp_path / "old" / "ladder.svg").exists()
    found = invoke("bench", "compare", tmp_path / "old", tmp_path / "new", "--out", tmp_path / "c")
    assert found.exit_code == 0, found.output
    assert "figures moved beyond their spread" in found.stdout
    assert "old, ms per step" in found.stdout


@pytest.mark.slow
def test_bench_parity_tells_its_verdict(job, tmp_path):
    found = invoke("bench", "parity", job, *sets(), "--out", tmp_path / "parity")
    assert found.exit_code == 0, found.output
    assert "no loss shown" in found.stdout
    assert (tmp_path / "parity" / "parity.svg").exists()


def test_bench_refuses_what_it_does_not_know(tmp_path):
    found = invoke("bench", "ladder", "--cases", "A,X")
    assert found.exit_code == 2
    assert "there is no case X" in found.stderr
    found = invoke("bench", "compare", tmp_path, tmp_path)
    assert found.exit_code == 2
    assert "results.json: is missing" in found.stderr


@pytest.mark.slow
def test_profile_says_what_holds_a_step_back(job, tmp_path):
    found = invoke("profile", job, *sets(), "--steps", "3", "--out", tmp_path / "profiles")
    assert found.exit_code == 0, found.output
    for part in ("A step takes", "times its floor", "costliest operations", "timeline"):
        assert part in found.stdout
    assert "recording 3 steps" in found.stderr


@pytest.mark.slow
def test_pretraining_and_training_from_it(job):
    lstm = ("model.kind=lstm", "data.context=16", "train.epochs=1", "train.batch=32")
    found = invoke("pretrain", job, "--json", *sets(*lstm))
    assert found.exit_code == 0, found.output
    summary = json.loads(found.stdout)
    assert summary["objective"] == "masked"
    assert summary["metrics"]["val"]["mae"] > 0
    assert set(summary["baselines"]) == {"mean", "repeat", "interpolate"}
    shown = invoke("pretrain", job, *sets(*lstm))
    assert "masked rows of the validation set" in shown.stdout
    assert "latent: mean standard deviation" in shown.stdout
    encoder = f"train.init_from={summary['run']}"
    settings = [text for text in SMALL if not text.startswith(("model.", "data.context"))]
    given = [word for text in (*settings, encoder) for word in ("--set", text)]
    tuned = invoke("train", job, "--json", *given)
    assert tuned.exit_code == 0, tuned.output
    assert json.loads(tuned.stdout)["init_from"]["from"] == summary["run"]
    refused = invoke("train", job, *given, "--set", "model.hidden=5")
    assert refused.exit_code == 2
    assert "model.hidden is [5, 5], there [8, 8]" in refused.stderr
    assert invoke("pretrain", "--encoder", summary["run"]).exit_code == 2
    assert invoke("evaluate", summary["run"]).exit_code == 2
