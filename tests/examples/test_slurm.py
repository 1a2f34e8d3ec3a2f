"""The SLURM examples under bash, with stand-ins for SLURM's own commands."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from slipstream import runs
from tests.conftest import HUNG_S, waves

EXAMPLES = Path(__file__).parents[2] / "examples" / "slurm"
CONFIG = """
[data]
path = "table.csv"
context = 8
horizon = 2
time = "time"
[model]
kind = "mlp"
hidden = 8
[train]
epochs = 150
patience = "off"
[engine]
device = "cpu"
threads = 1
plan = "off"
log_every = 5
"""


class Cluster:
    """Stand-ins for srun, scontrol and sbatch that record their calls."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.calls = folder, folder / "calls"
        self.calls.touch()
        (folder / "bin").mkdir()
        self.add("srun", 'exec "$@"')
        self.add("slipstream", f'exec {sys.executable} -m slipstream "$@"')
        self.set_state("RUNNING")

    def add(self, name: str, body: str) -> None:
        program = self.folder / "bin" / name
        program.write_text(f"#!/bin/sh\n{body}\n")
        program.chmod(0o755)

    def set_state(self, state: str) -> None:
        """Set the state of the job, as SLURM knows it."""
        record = f'echo "scontrol $*" >> {self.calls}'
        show = f'case "$1" in show) echo "   JobState={state} Reason=None";; *) {record};; esac'
        self.add("scontrol", show)

    def start(self, *words: str, **variables: str) -> subprocess.Popen[str]:
        """Start the batch script as SLURM would; it and what it runs have a group of their own."""
        path = f"{self.folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
        source = str(Path(runs.__file__).parents[2])
        slurm = {"SLURM_JOB_ID": "7", "SLURM_CPUS_PER_TASK": "1", "SLURM_CLUSTER_NAME": "lab"}
        return subprocess.Popen(
            ["bash", str(EXAMPLES / "job.sbatch"), *words],
            cwd=self.folder,
            env=os.environ | {"PATH": path, "PYTHONPATH": source} | slurm | variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def run(self, *words: str, **variables: str) -> tuple[int, str]:
        process = self.start(*words, **variables)
        output, _ = process.communicate(timeout=HUNG_S)
        return process.returncode, output

    def list_calls(self) -> list[str]:
        return self.calls.read_text().splitlines()


@pytest.fixture
def cluster(tmp_path):
    return Cluster(tmp_path)


@pytest.mark.parametrize(
    ("code", "state", "restarts", "requeues"),
    [
        (0, "RUNNING", "0", False),
        (1, "RUNNING", "0", False),
        (2, "RUNNING", "0", False),
        (75, "RUNNING", "0", True),
        (143, "RUNNING", "3", True),  # SIGTERM to slipstream alone
        (138, "RUNNING", "0", True),  # SIGUSR1 before Python has begun
        (143, "COMPLETING", "0", False),  # scancel, or preemption, after which SLURM requeues it
        (75, "RUNNING", "50", False),
    ],
)
def test_the_script_requeues_what_is_to_be_continued(cluster, code, state, restarts, requeues):
    cluster.add("srun", f"exit {code}")
    cluster.set_state(state)
    assert cluster.run("train", SLURM_RESTART_COUNT=restarts)[0] == code
    assert cluster.list_calls() == (["scontrol requeue 7"] if requeues else [])


def test_the_script_passes_words_the_number_of_the_task_and_the_cores(cluster):
    cluster.add("srun", 'printf "%s|" "$@" $SRUN_CPUS_PER_TASK')
    words = ("tune", "my job.toml", "--folder", "w-%a")
    code, output = cluster.run(*words, SLURM_ARRAY_TASK_ID="3", SLURM_CPUS_PER_TASK="6")
    assert (code, output) == (0, "slipstream|tune|my job.toml|--folder|w-3|6|")


def test_staged_data_are_read_from_a_copy_that_goes_with_the_job(cluster):
    (cluster.folder / "rows").mkdir()
    (cluster.folder / "rows" / "a.csv").write_text("1")
    scratch = cluster.folder / "scratch"
    cluster.add("srun", 'for last; do :; done; echo "$last"; cat "${last#data.path=}"/*; exit 75')
    code, output = cluster.run("train", STAGE="rows", SLURM_TMPDIR=str(scratch))
    assert code == 75
    assert output.split() == [f"data.path={scratch}/slipstream-7/rows", "1"]
    assert list(scratch.iterdir()) == []
    assert cluster.list_calls() == ["scontrol requeue 7"]


@pytest.mark.parametrize("name", ["search.sh", "folds.sh"])
def test_an_array_is_followed_by_a_job_that_depends_on_it(cluster, name):
    cluster.add("sbatch", f'echo "$@ in $SLIPSTREAM_STORAGE" >> {cluster.calls}; echo 42')
    environment = os.environ | {"PATH": f"{cluster.folder / 'bin'}:{os.environ['PATH']}"}
    environment.pop("SLIPSTREAM_STORAGE", None)
    words = ["job.toml", str(cluster.folder / "out"), "8", "--gpus=1"]
    subprocess.run(["sh", EXAMPLES / name, *words], check=True, env=environment)
    array, last = cluster.list_calls()
    assert "--parsable --array=" in array
    assert last.startswith("--dependency=afterok:42 --kill-on-invalid-dep=yes --gpus=1")
    assert all(f"{EXAMPLES}/job.sbatch" in call for call in (array, last))
    if name == "search.sh":
        assert f"--folder {cluster.folder}/out/worker-%a --set tune.retrain=0 in journal:" in array
    else:
        assert "--array=1-8" in array
        assert f"--folder {cluster.folder}/out --share %a/8 in" in array
        assert f"--folder {cluster.folder}/out in" in last


def wait_for_log(folder: Path, kind: str, count: int = 1) -> None:
    until = time.monotonic() + HUNG_S
    while (folder / "events.jsonl").exists() is False or (
        (folder / "events.jsonl").read_text().count(f'"event": "{kind}"') < count
    ):
        assert time.monotonic() < until
        time.sleep(0.05)


def find_child(process: subprocess.Popen[str]) -> int:
    import psutil

    return next(
        child.pid
        for child in psutil.Process(process.pid).children(recursive=True)
        if "slipstream" in child.cmdline()
    )


@pytest.mark.slow
def test_a_run_that_gets_every_signal_ends_as_an_unbroken_one(cluster):
    waves().to_pandas().to_csv(cluster.folder / "table.csv", index=False)
    (cluster.folder / "job.toml").write_text(CONFIG)
    assert cluster.run("train", "job.toml", "--folder", "whole")[0] == 0
    folder = cluster.folder / "broken"

    def start(restarts: int, epochs: int) -> subprocess.Popen[str]:
        words = ("train", "job.toml", "--folder", "broken")
        process = cluster.start(*words, SLURM_RESTART_COUNT=str(restarts))
        wait_for_log(folder, "epoch", epochs)
        return process

    process = start(0, 2)  # the early warning goes to slipstream alone
    os.kill(find_child(process), signal.SIGUSR1)
    process.communicate(timeout=HUNG_S)
    assert process.returncode == 75
    assert cluster.list_calls() == ["scontrol requeue 7"]

    process = start(1, 5)  # suspended, continued, preempted: every process gets SIGTERM, twice
    os.killpg(process.pid, signal.SIGSTOP)
    time.sleep(0.5)
    os.killpg(process.pid, signal.SIGCONT)
    wait_for_log(folder, "epoch", 7)
    cluster.set_state("COMPLETING")
    os.killpg(process.pid, signal.SIGTERM)
    os.killpg(process.pid, signal.SIGTERM)
    output, _ = process.communicate(timeout=HUNG_S)
    assert process.returncode == 143
    assert "stopped at step" in output
    assert len(cluster.list_calls()) == 1  # SLURM itself requeues it

    process = start(2, 10)  # KillWait has passed
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate(timeout=HUNG_S)
    cluster.set_state("RUNNING")
    words = ("train", "job.toml", "--folder", "broken")
    assert cluster.run(*words, SLURM_RESTART_COUNT="3")[0] == 0
    models = [
        (cluster.folder / name / "model" / "weights.safetensors").read_bytes()
        for name in ("whole", "broken")
    ]
    assert models[0] == models[1]
    again = cluster.run(*words, SLURM_RESTART_COUNT="4")
    assert again[0] == 0
    assert "was finished before" in again[1]
