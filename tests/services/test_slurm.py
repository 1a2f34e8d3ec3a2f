"""The examples for SLURM on a real cluster of one node."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from slipstream import runs
from tests.conftest import close, waves
from tests.logs import read_lines
from tests.services.slurm import PROGRAMS, Slurm, start_slurm, wait_until

pytestmark = pytest.mark.services
EXAMPLES = Path(__file__).parents[2] / "examples" / "slurm"
CONFIG = """
name = "job"
[data]
path = "table.csv"
context = 8
horizon = 2
time = "time"
[model]
kind = "mlp"
hidden = 8
[train]
epochs = {epochs}
patience = "off"
repeats = {repeats}
[engine]
device = "cpu"
threads = 1
plan = "off"
log_every = 5
[tune]
trials = 8
parallel = 2
retrain = 1
retrain_seeds = 2
space = {{ "train.lr" = {{ low = 1e-3, high = 3e-2, log = true }} }}
"""


@pytest.fixture(scope="module")
def slurm():
    path = f"{os.environ['PATH']}:/usr/sbin"
    missing = [name for name in PROGRAMS if shutil.which(name, path=path) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)}: not installed; on Debian, `make install-slurm` does it")
    with start_slurm() as cluster:
        yield cluster


@pytest.fixture
def here(tmp_path):
    """A folder with a table, from which jobs are submitted."""
    waves().to_pandas().to_csv(tmp_path / "table.csv", index=False)
    return tmp_path


def write_config(here, epochs=3, repeats=1):
    (here / "job.toml").write_text(CONFIG.format(epochs=epochs, repeats=repeats))


def submit(slurm: Slurm, here: Path, *words: object) -> str:
    command = ("sbatch", "--parsable", "--cpus-per-task=2", EXAMPLES / "job.sbatch", *words)
    return slurm.call(*command, cwd=here)


def wait_for_event(folder, kind, count=1):
    def look():
        log = folder / "events.jsonl"
        return log.exists() and log.read_text().count(f'"event": "{kind}"') >= count

    wait_until(look, f"{folder}: {kind}")


def read_weights(folder):
    return (folder / "model" / "weights.safetensors").read_bytes()


def read_log(here, job):
    return (here / f"slipstream-{job}.log").read_text()


def test_a_job_that_is_warned_preempted_and_killed_ends_as_an_unbroken_one(slurm, here):
    write_config(here, epochs=400)
    whole = submit(slurm, here, "train", "job.toml", "--folder", "whole")
    slurm.wait(whole, "COMPLETED")
    job = submit(slurm, here, "train", "job.toml", "--folder", "broken")
    folder = here / "broken"
    wait_for_event(folder, "epoch", 3)
    slurm.call("scancel", "--signal=USR1", job)  # as --signal does before the time limit
    assert slurm.wait(job, "PENDING")["Restarts"] == "1"
    assert "Exited with exit code 75" in read_log(here, job)

    slurm.wait(job, "RUNNING")
    wait_for_event(folder, "resume")
    wait_for_event(folder, "epoch", 20)
    high = slurm.call(
        *("sbatch", "--parsable", "--partition=high", "--cpus-per-task=8", "--output=/dev/null"),
        *("--wrap", "sleep 1"),
    )
    slurm.wait(high, "COMPLETED")  # it needed all cores
    assert slurm.wait(job, "PENDING")["Restarts"] == "2"
    assert "DUE TO PREEMPTION" in read_log(here, job)

    slurm.wait(job, "RUNNING")
    wait_for_event(folder, "resume", 2)
    wait_for_event(folder, "epoch", 40)
    slurm.call("scontrol", "requeue", job)  # as after the failure of a node
    ended = slurm.wait(job, "COMPLETED")
    assert (ended["Restarts"], ended["ExitCode"]) == ("3", "0:0")
    assert read_weights(folder) == read_weights(here / "whole")
    metrics = [runs.read_metrics(one)["metrics"] for one in (folder, here / "whole")]
    assert metrics[0] == metrics[1]


def test_a_job_that_its_user_cancels_stays_cancelled_and_can_be_submitted_again(slurm, here):
    write_config(here, epochs=100_000)
    job = submit(slurm, here, "train", "job.toml", "--folder", "run")
    wait_for_event(here / "run", "epoch", 2)
    slurm.call("scancel", job)
    ended = slurm.wait(job, "CANCELLED")
    assert ended["Restarts"] == "0"
    assert "stopped at step" in read_log(here, job)
    again = submit(
        *(slurm, here, "train", "job.toml", "--folder", "run", "--set"), "train.minutes=0.001"
    )
    slurm.wait(again, "COMPLETED")
    assert runs.read_metrics(here / "run")["seconds_before_resume"] > 0


def test_a_mistake_is_not_repeated(slurm, here):
    write_config(here)
    job = submit(slurm, here, "train", "job.toml", "--folder", "run", "--set", "train.lr=-1")
    ended = slurm.wait(job, "FAILED")
    assert (ended["Restarts"], ended["ExitCode"]) == ("0", "2:0")
    assert "train.lr is -1" in read_log(here, job)


def test_an_array_searches_together_and_a_last_job_retrains(slurm, here):
    write_config(here)
    words = ("job.toml", here / "search", 2, "--cpus-per-task=2")
    answer = slurm.call("sh", EXAMPLES / "search.sh", *words, cwd=here)
    last = answer.split()[-1]
    ended = slurm.wait(last, "COMPLETED", "CANCELLED", "FAILED")
    logs = "".join(path.read_text() for path in here.glob("*.log"))
    assert ended["JobState"] == "COMPLETED", logs
    summary = runs.read_metrics(here / "search" / "result")
    assert summary["trials"]["finished"] + summary["trials"]["pruned"] == 8
    assert summary["comparison"]
    done = []
    for number in (0, 1):
        folder = here / "search" / f"worker-{number}"
        events = read_lines(runs.Run(folder))
        done += [event["trial"] for event in events if event["event"] == "trial"]
        assert not (folder / "retrained").exists()
    assert len(done) == len(set(done)) == 8


def test_an_array_trains_shares_of_a_run_and_a_last_job_joins_them(slurm, here):
    write_config(here, epochs=30, repeats=4)
    whole = submit(slurm, here, "train", "job.toml", "--folder", "whole")
    words = ("job.toml", here / "run", 2, "--cpus-per-task=2")
    last = slurm.call("sh", EXAMPLES / "folds.sh", *words, cwd=here).split()[-1]
    ended = slurm.wait(last, "COMPLETED", "CANCELLED", "FAILED")
    logs = "".join(path.read_text() for path in here.glob("*.log"))
    assert ended["JobState"] == "COMPLETED", logs
    slurm.wait(whole, "COMPLETED")
    joined, one = (runs.read_metrics(here / name) for name in ("run", "whole"))
    assert joined["workers"] == 2
    for mine, theirs in zip(joined["lanes"], one["lanes"], strict=True):
        close(mine["metrics"]["test"]["mae"], theirs["metrics"]["test"]["mae"], rel=1e-4)
