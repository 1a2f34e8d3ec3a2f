"""Followers against a real MLflow server on SQLite, TensorBoard's own reader, and wandb's files."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import httpx
import pytest
from pyarrow import csv

import slipstream
from slipstream import runs
from slipstream.base.errors import ResumableError
from slipstream.events import Resume
from slipstream.reporting.tracking.follower import follow
from slipstream.runs.watching import EXTRAS
from tests.conftest import HUNG_S, small_config, waves
from tests.logs import read_lines
from tests.reporting.tracking.reading import logged_points, to_single
from tests.reporting.tracking.test_follow import follow_by

pytestmark = pytest.mark.services
PROGRAM = Path(sys.executable).parents[1] / "mlflow" / "bin" / "mlflow"
"""In an environment of its own: a server and its clients share no packages"""
FIGURES = ("test/", "val/", "train/")
AXES = ("step", "logged_at")
"""What a line of wandb has besides values"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    sections = {"train": {"repeats": 2, "epochs": 3}, "engine": {"log_every": 4}}
    config = small_config(tmp_path_factory.mktemp("runs"), **sections)
    return Path(slipstream.train(config, waves(), quiet=True).run)


@pytest.fixture
def run(trained, tmp_path):
    return Path(shutil.copytree(trained, tmp_path / trained.name))


class Server:
    """An MLflow server on SQLite that can be stopped and started again."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.address = f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        command = [PROGRAM, "server", "--host", "127.0.0.1", "--port", str(self.port)]
        store = ["--backend-store-uri", f"sqlite:///{self.folder}/store.db", "--workers", "1"]
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(
                [*command, *store, "--artifacts-destination", str(self.folder / "files")],
                stdout=log,
                stderr=log,
                cwd=self.folder,
                start_new_session=True,
                env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
            )
        wait_for(self.is_up)

    def is_up(self) -> bool:
        assert self.process.poll() is None, "the MLflow server does not start"
        try:
            return httpx.get(f"{self.address}/health").status_code == 200
        except httpx.TransportError:
            return False

    def stop(self) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    if not PROGRAM.exists():
        pytest.skip("no MLflow is here; `make test-services` brings it")
    machine = Server(tmp_path_factory.mktemp("mlflow"))
    machine.start()
    yield machine
    machine.stop()


@pytest.fixture(scope="module")
def server(machine: Server) -> str:
    """The address of an MLflow server."""
    return machine.address


def wait_for(condition: Callable[[], object]) -> None:
    until = time.monotonic() + HUNG_S
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.2)


def read_mlflow(address: str, project: str) -> list[tuple[str, str, int, float]]:
    """Every point of an experiment's curves, with repetitions."""
    from mlflow import MlflowClient

    client = MlflowClient(address)
    experiment = client.get_experiment_by_name(project)
    points = []
    for found in client.search_runs([experiment.experiment_id]):
        part = found.data.tags.get("slipstream.part", "")
        for name in found.data.metrics:
            if not name.startswith(FIGURES):
                history = client.get_metric_history(found.info.run_id, name)
                points += [(part, name, one.step, to_single(one.value)) for one in history]
    return sorted(points)


def test_mlflow_has_every_point_once_and_the_files(run, server):
    follow(run, "mlflow", out=server, project="whole")
    assert read_mlflow(server, "whole") == sorted(logged_points(run))
    assert follow(run, "mlflow", out=server, project="whole")["points"] == 0
    from mlflow import MlflowClient

    client = MlflowClient(server)
    experiment = client.get_experiment_by_name("whole").experiment_id
    found = [
        one for one in client.search_runs([experiment]) if "slipstream.part" not in one.data.tags
    ]
    assert len(found) == 1
    assert found[0].info.status == "FINISHED"
    assert found[0].data.params["model.kind"] == "lstm"
    test = json.loads((run / "metrics.json").read_text())["metrics"]["test"]
    assert found[0].data.metrics["test/mae"] == pytest.approx(test["mae"])
    files = {one.path for one in client.list_artifacts(found[0].info.run_id)}
    assert {"config.toml", "metrics.json", "model", "plots"} <= files


def test_mlflow_has_every_point_once_after_a_kill_and_a_resume(run, server, monkeypatch):
    monkeypatch.setattr("slipstream.runs.log.MAX_BYTES", 400)  # many messages
    from slipstream.reporting.tracking.mlflow import MLflow

    messages = []

    class Halting(MLflow):
        def send(self, points):
            messages.append(points)
            super().send(points)
            if len(messages) == 3:
                raise KeyboardInterrupt  # what was sent is not noted

    lines = (run / "events.jsonl").read_bytes().splitlines(keepends=True)
    with pytest.raises(KeyboardInterrupt):
        follow_by(Halting, run, server, project="killed")
    (run / "events.jsonl").write_bytes(b"".join(lines[:6]))
    runs.Run(run).append(Resume(step=4, spent_s=1.0))
    with (run / "events.jsonl").open("ab") as log:
        log.write(b"".join(lines[6:]))
    follow_by(Halting, run, server, project="killed")
    assert read_mlflow(server, "killed") == sorted(logged_points(run))


def read_tensorboard(board: Path) -> list[tuple[str, str, int, float]]:
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    points = []
    for folder in sorted({file.parent for file in board.rglob("events.out.tfevents.*")}):
        part = "" if folder == board else folder.name
        accumulator = reader.EventAccumulator(str(folder), size_guidance={"scalars": 0})
        accumulator.Reload()
        for name in accumulator.Tags()["scalars"]:
            if not name.startswith(FIGURES):
                scalars = accumulator.Scalars(name)
                points += [(part, name, one.step, one.value) for one in scalars]
    return sorted(points)


def read_wandb(board: Path) -> list[tuple[str, str, int, float]]:
    """Every point of the files of wandb's offline mode."""
    from wandb.proto.wandb_internal_pb2 import Record
    from wandb.sdk.internal.datastore import DataStore

    points = []
    for file in board.rglob("run-*.wandb"):
        store, part = DataStore(), ""
        store.open_for_scan(str(file))
        while (content := store.scan_data()) is not None:
            record = Record.FromString(content)
            if record.run.job_type not in ("", "run"):
                part = record.run.display_name.split(" ")[-1]
            items = {
                item.key or "/".join(item.nested_key): json.loads(item.value_json)
                for item in record.history.item
            }
            points += [
                (part, name, items["step"], to_single(value))
                for name, value in items.items()
                if "logged_at" in items and not name.startswith("_") and name not in AXES
            ]
        store._fp.close()
    return sorted(points)


def test_tensorboard_reads_every_point(run, tmp_path):
    pytest.importorskip("tensorboard")
    follow(run, "tensorboard", out=str(tmp_path / "board"))
    board = tmp_path / "board" / run.name
    assert read_tensorboard(board) == sorted(logged_points(run))
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(board))
    accumulator.Reload()
    assert {"losses", "predictions"} <= set(accumulator.Tags()["images"])


def test_the_files_of_wandb_have_every_point(run, tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    follow(run, "wandb", out=str(tmp_path / "board"), project="cells")
    assert read_wandb(tmp_path / "board") == sorted(logged_points(run))


JOB = """
out = "{folder}/runs"
[data]
path = "{folder}/waves.csv"
time = "time"
context = 16
horizon = 4
[model]
kind = "lstm"
hidden = 8
layers = 1
[train]
batch = 8
epochs = {epochs}
patience = "off"
repeats = {repeats}
[engine]
device = "cpu"
threads = 1
plan = "off"
log_every = 1
checkpoint_minutes = 0.02
[follow]
to = "{to}"
out = "{out}"
project = "killed-{repeats}"
"""


@pytest.mark.parametrize("repeats", [1, 2])
@pytest.mark.parametrize("to", ["tensorboard", "mlflow", "wandb"])
def test_the_points_are_those_of_the_log_after_kills_and_resumes(
    to, repeats, tmp_path, request, monkeypatch
):
    """The run is followed by the process that its config starts, and killed three times."""
    pytest.importorskip(EXTRAS[to])
    out = request.getfixturevalue("server") if to == "mlflow" else f"{tmp_path}/board"
    monkeypatch.setenv("WANDB_MODE", "offline")
    csv.write_csv(waves(300), tmp_path / "waves.csv")
    job = tmp_path / "job.toml"
    fill = {"folder": tmp_path, "out": out, "to": to, "repeats": repeats}
    job.write_text(JOB.format(epochs=400, **fill))
    program = [sys.executable, "-m", "slipstream", "train", "--quiet"]
    command, folder = [*program, str(job)], tmp_path / "runs"
    for _ in range(3):
        process = subprocess.Popen(command)
        wait_for(partial(has_checkpoints, folder, count_checkpoints(folder) + 3))
        time.sleep(random.random())
        process.kill()
        process.wait()
        folder = next(iter(folder.glob("job-*")), folder)
        command = [*program, "--resume", str(folder)]
    subprocess.run([*command, "--set", f"train.epochs={count_epochs(folder) + 3}"], check=True)
    wait_for(lambda: is_followed(folder))
    wanted = sorted(logged_points(folder))
    assert len(wanted) > 100
    if to == "mlflow":
        assert read_mlflow(out, f"killed-{repeats}") == wanted
    elif to == "tensorboard":
        assert read_tensorboard(Path(out) / folder.name) == wanted
    else:
        assert read_wandb(Path(out)) == wanted


def count_checkpoints(folder: Path) -> int:
    logs = [*folder.glob("events.jsonl"), *folder.glob("*/events.jsonl")]
    return sum(log.read_bytes().count(b'{"event": "checkpoint"') for log in logs)


def has_checkpoints(folder: Path, wanted: int) -> bool:
    return count_checkpoints(folder) >= wanted


def count_epochs(folder: Path) -> int:
    epochs = [event["epoch"] for event in read_lines(runs.Run(folder)) if "epoch" in event]
    return int(max(epochs)) + 1


def is_followed(folder: Path) -> bool:
    sent = list(folder.glob("follow/*/sent.json"))
    metrics = json.loads((folder / "metrics.json").read_text())
    return bool(sent) and runs.read_json(sent[0])["finished_at"] == metrics["finished_at"]


def test_a_server_that_is_away_at_the_start_and_later_gets_everything(run, machine, monkeypatch):
    monkeypatch.setattr("slipstream.runs.log.MAX_BYTES", 400)  # many messages
    from slipstream.reporting.tracking.mlflow import MLflow

    monkeypatch.setattr("slipstream.reporting.tracking.follower.MAX_PAUSE_S", 1.0)
    messages, notes = [], []

    starts: list[threading.Timer] = []

    def leave() -> None:
        """Stop the server, and start it again five seconds later."""
        machine.stop()
        starts.append(threading.Timer(5.0, machine.start))
        starts[-1].start()

    class Counting(MLflow):
        def send(self, points):
            if len(messages) == 4 and len(starts) == 1:
                leave()
            super().send(points)
            messages.append(points)  # it has arrived

    leave()
    try:
        follow_by(Counting, run, machine.address, notes.append, project="away")
    finally:
        for start in starts:
            start.join()
    assert read_mlflow(machine.address, "away") == sorted(logged_points(run))
    assert ["answers again" in note for note in notes] == [False, True, False, True]


def test_a_password_is_sent_and_not_shown(run, server, capsys, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "")
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "")
    address = server.replace("://", "://me:s3cret@")
    shown = follow(run, "mlflow", out=address, project="secret")
    assert os.environ["MLFLOW_TRACKING_PASSWORD"] == "s3cret"
    assert "s3cret" not in str(shown) + str(capsys.readouterr())
    for file in run.rglob("*"):
        assert not file.is_file() or b"s3cret" not in file.read_bytes()
    down = address.replace(server.rpartition(":")[2], "9")
    monkeypatch.setattr("slipstream.reporting.tracking.follower.PATIENCE_S", 0.0)
    notes: list[str] = []
    with pytest.raises(ResumableError, match="does not answer") as caught:
        follow(run, "mlflow", out=down, project="secret", warn=notes.append)
    assert "s3cret" not in str(caught.value) + str(notes)


def test_mlflow_gets_a_run_for_each_of_a_hundred_trials(tmp_path, server, monkeypatch):
    import requests

    tune = {"trials": 100, "retrain": 0, "space": {"train.lr": {"low": 1e-4, "high": 1e-2}}}
    study = slipstream.tune(
        small_config(tmp_path, train={"epochs": 1}, tune=tune), waves(200), quiet=True
    )
    request, requests_sent = requests.Session.request, []

    def count(self, method, url, *more, **named):
        requests_sent.append(url)
        return request(self, method, url, *more, **named)

    monkeypatch.setattr(requests.Session, "request", count)
    follow(study.run, "mlflow", out=server, project="hundred")
    num_requests = len(requests_sent)
    points = read_mlflow(server, "hundred")
    assert sorted(set(points)) == points == sorted(logged_points(study.run))
    assert len({part for part, *_ in points if part.startswith("trial")}) == 100
    assert num_requests < 100 * 5 + 20  # to create, two for settings, for points, to end
