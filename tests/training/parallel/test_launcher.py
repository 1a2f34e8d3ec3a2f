"""One model over two processes: the run that one process writes, whoever is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pyarrow.csv
import pytest
from safetensors.torch import load_file

import slipstream
from slipstream import UserError, runs, training
from slipstream.base.errors import Interrupted, ResumableError
from slipstream.base.rank import RankPlace
from slipstream.training import parallel
from tests.conftest import HUNG_S, close, small_config, waves
from tests.logs import Line, as_lines, read_lines
from tests.training.parallel import nets

EPOCHS = 6
OFTEN = 0.0002
"""Minutes between two checkpoints: some are within epochs"""


@pytest.fixture
def data(tmp_path) -> Path:
    path = tmp_path / "waves.csv"
    pyarrow.csv.write_csv(waves(600), path)
    return path


def configure(data: Path, out: Path, *, processes: int = 2, **sections):
    train = {"epochs": EPOCHS, "batch": 30} | sections.pop("train", {})
    engine = {"data_parallel": processes, "checkpoint_minutes": OFTEN}
    model = sections.pop("model", {"hidden": 8, "layers": 2, "dropout": 0.2})
    sections = {"train": train, "engine": engine, "model": model} | sections
    return small_config(out, **sections | {"data": {"path": str(data)}})


def read_curve(run: Path) -> list[tuple[float, float, float]]:
    events = read_lines(runs.Run(run))
    return [(e["epoch"], e["train_loss"], e["val_loss"]) for e in events if e["event"] == "epoch"]


def check_same(run: Path, other: Path) -> None:
    """The same model to the bit, by the same way."""
    assert read_curve(run) == read_curve(other)
    weights = "model/weights.safetensors"
    assert (run / weights).read_bytes() == (other / weights).read_bytes()
    assert runs.read_metrics(run)["detail"] == runs.read_metrics(other)["detail"]


def find_processes(parent: int) -> list[psutil.Process]:
    """The processes that train, the first rank first."""
    children = psutil.Process(parent).children(recursive=True)
    alive = [child for child in children if child.status() != psutil.STATUS_ZOMBIE]
    own = [child for child in alive if "slipstream" in " ".join(child.cmdline())]
    return sorted(own, key=lambda one: one.create_time())


class Killer:
    """Sends a signal to one of the processes after the second validation."""

    def __init__(self, number: int, rank: int | None) -> None:
        self.number, self.rank, self.sent = number, rank, False
        self.events: list[Line] = []

    def __call__(self, event: Line) -> None:
        self.events.append(event)
        if event["event"] == "epoch" and event["epoch"] == 2 and not self.sent:
            self.sent = True
            me = os.getpid()
            os.kill(me if self.rank is None else find_processes(me)[self.rank].pid, self.number)


@pytest.mark.slow
def test_two_processes_write_the_run_that_one_writes_and_survive_a_kill(tmp_path, data):
    one = slipstream.train(configure(data, tmp_path / "one", processes=1))
    two = slipstream.train(configure(data, tmp_path / "two"))
    close([e for p in read_curve(two.run) for e in p], [e for p in read_curve(one.run) for e in p])
    first, second = (load_file(run / "model" / "weights.safetensors") for run in (one.run, two.run))
    for name in first:
        close(second[name], first[name], rel=1e-4)
    assert two.metrics["test"]["rmse"] == pytest.approx(one.metrics["test"]["rmse"], rel=1e-4)
    assert two.summary["plan"]["data_parallel"] == 2
    for rank in range(2):
        killer = Killer(signal.SIGKILL, rank)
        killed = training.train(
            configure(data, tmp_path / f"killed-{rank}"), watch=as_lines(killer)
        )
        check_same(killed.run, two.run)
        (why,) = [e["what"] for e in read_lines(runs.Run(killed.run)) if _is_restart(e)]
        assert why == f"process {rank + 1} of 2 ended by SIGKILL"
        assert [path.name for path in (tmp_path / f"killed-{rank}").iterdir()] == [killed.run.name]


def _is_restart(event: Line) -> bool:
    return event["event"] == "recovery" and event["what"].startswith("process")


@pytest.mark.slow
def test_a_run_that_is_stopped_goes_on_with_another_number_of_processes(tmp_path, data):
    config = configure(data, tmp_path)
    with pytest.raises(Interrupted, match="resume with: slipstream train --resume") as stopped:
        training.train(config, watch=as_lines(Killer(signal.SIGTERM, None)))
    assert stopped.value.signal_number == signal.SIGTERM
    (folder,) = tmp_path.glob("run-*")
    whole = slipstream.train(configure(data, tmp_path / "whole", processes=1))
    resumed = slipstream.train(resume=folder, overrides="engine.data_parallel=1")
    curves = read_curve(resumed.run), read_curve(whole.run)
    close(*([one for point in curve for one in point] for curve in curves))
    logged = [e for e in read_lines(runs.Run(folder)) if e["event"] == "resume"]
    assert logged[-1]["differs"] == "1 process instead of 2"


@pytest.mark.slow
def test_processes_that_die_again_and_again_are_given_up(tmp_path, data):
    config = configure(data, tmp_path, model={"kind": f"{nets.__name__}:Dying"})
    told = r"process 2 of 2 ended by SIGKILL, 3 times without a new checkpoint; resume with: "
    with pytest.raises(ResumableError, match=told):
        slipstream.train(config)


@pytest.mark.slow
def test_the_traceback_of_a_process_that_fails_is_in_the_run_folder(tmp_path, data):
    config = configure(data, tmp_path, model={"kind": f"{nets.__name__}:Failing"})
    with pytest.raises(RuntimeError, match=r"process 2 of 2 ended with code 1: .*a mistake in the"):
        slipstream.train(config)
    written = runs.find_last(config.out) / "ranks" / "1-stderr.txt"
    assert "in end\n" in written.read_text()


def run_torchrun(config, folder: Path, *options: str) -> list[str]:
    path = folder / "job.toml"
    path.write_text(runs.format_config(config))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", *options, "-m", "slipstream", "train", str(path)]
    return [*command, "--json", "--quiet"]


@pytest.mark.slow
def test_torchrun_trains_and_restarts_what_we_train(tmp_path, data):
    unbroken = slipstream.train(configure(data, tmp_path / "launched"))
    config = configure(data, tmp_path / "torchrun", processes=1)
    command = run_torchrun(config, tmp_path, "--max-restarts", "2", "--monitor-interval", "0.1")
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    until = time.monotonic() + HUNG_S
    while time.monotonic() < until and not process.poll():
        logs = list((tmp_path / "torchrun").glob("*/events.jsonl"))
        if logs and '"epoch": 2' in logs[0].read_text():
            break
        time.sleep(0.02)
    find_processes(process.pid)[-1].kill()
    printed, _ = process.communicate(timeout=HUNG_S)
    assert process.returncode == 0
    (run,) = (tmp_path / "torchrun").glob("run-*")
    error, summary = printed.splitlines()  # of the first process, which was told of the death
    assert json.loads(error)["error"].endswith(f"resume with: slipstream train --resume {run}")
    assert json.loads(summary)["run"] == str(run)
    check_same(run, unbroken.run)
    logged = [e["what"] for e in read_lines(runs.Run(run)) if e["event"] == "recovery"]
    assert logged == ["torchrun has started the processes again"]


def test_a_table_is_refused(tmp_path):
    config = small_config(tmp_path, engine={"data_parallel": 2})
    with pytest.raises(UserError, match=r"each process reads the data itself; set data\.path"):
        slipstream.train(config, waves())
    assert not list(tmp_path.iterdir())


def test_another_number_than_torchruns_is_refused():
    with pytest.raises(UserError, match=r"data_parallel is 3, and torchrun has started 2 proc"):
        parallel.check_size(3, RankPlace(0, 2, 0))


@pytest.mark.parametrize("command", ["train", "tune"])
def test_several_models_under_torchrun_are_refused(tmp_path, monkeypatch, command):
    torchrun = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in torchrun.items():
        monkeypatch.setenv(name, value)
    config = small_config(tmp_path, train={"repeats": 2})
    with pytest.raises(UserError, match=r"start it without torchrun, with workers"):
        getattr(slipstream, command)(config, waves(), quiet=True)
    assert not list(tmp_path.iterdir())


def test_more_processes_than_gpus_are_refused(monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    with pytest.raises(UserError, match=r"2 processes .* torch sees 1; lower engine.data_parallel"):
        parallel.check_gpus(2)


def test_layers_that_mix_windows_are_refused():
    model = nets.Normed(4, 3, 0, 2)
    with pytest.raises(UserError, match=r"does not work with BatchNorm1d \(layers.0\)"):
        parallel.check_model(model)


def test_a_restarted_torchrun_finds_its_run(tmp_path):
    config = small_config(tmp_path)
    named, unnamed = RankPlace(0, 2, 0, run_id="job"), RankPlace(0, 2, 0, run_id="none-1")
    restarted = RankPlace(0, 2, 0, run_id="none-1", restarts=1)
    folder = runs.create_run("a", out=str(tmp_path)).folder
    assert parallel.find_marked_run(named, config) is None
    parallel.mark_run(folder, named)
    assert parallel.find_marked_run(named, config) == folder
    assert parallel.find_marked_run(restarted, config) is None
    parallel.mark_run(folder, unnamed)
    assert parallel.find_marked_run(unnamed, config) is None
    assert parallel.find_marked_run(restarted, config) == folder
    (folder / "metrics.json").write_text("{}")
    parallel.mark_run(folder, named)
    assert parallel.find_marked_run(named, config) is None
