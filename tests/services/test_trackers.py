"""Followers against a real MLflow server on SQLite, TensorBoard's own reader, and wandb's files."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

import slipstream
from slipstream import runs
from slipstream.tracking.api import follow
from tests.conftest import HUNG_S, small_config, waves
from tests.tracking.reading import logged_points, to_single

pytestmark = pytest.mark.services
PROGRAM = Path(sys.executable).parents[1] / "mlflow" / "bin" / "mlflow"
"""In an environment of its own: a server and its clients share no packages"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    sections = {"train": {"repeats": 2, "epochs": 3}, "engine": {"log_every": 4}}
    config = small_config(tmp_path_factory.mktemp("runs"), **sections)
    return Path(slipstream.train(config, waves(), quiet=True).run)


@pytest.fixture
def run(trained, tmp_path):
    return Path(shutil.copytree(trained, tmp_path / trained.name))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of an MLflow server on SQLite."""
    if not PROGRAM.exists():
        pytest.skip("no MLflow is here; `make test-services` brings it")
    folder = tmp_path_factory.mktemp("mlflow")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [PROGRAM, "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    store = ["--backend-store-uri", f"sqlite:///{folder}/store.db"]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [*command, *store, "--artifacts-destination", str(folder / "files")],
            stdout=log,
            stderr=log,
            cwd=folder,
            start_new_session=True,
            env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        )
    address = f"http://127.0.0.1:{port}"
    try:
        wait_for_server(address, process)
        yield address
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def wait_for_server(address: str, process: subprocess.Popen[bytes]) -> None:
    until = time.monotonic() + HUNG_S
    while time.monotonic() < until and process.poll() is None:
        try:
            if httpx.get(f"{address}/health").status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.2)
    pytest.fail("the MLflow server does not start")


def read_mlflow(address: str, project: str) -> list[tuple[str, str, int, float]]:
    """Every point of an experiment's curves, with repetitions."""
    from mlflow import MlflowClient

    client = MlflowClient(address)
    experiment = client.get_experiment_by_name(project)
    points = []
    for found in client.search_runs([experiment.experiment_id]):
        part = found.data.tags.get("slipstream.part", "")
        for name in found.data.metrics:
            if not name.startswith(("test/", "val/", "train/")):
                history = client.get_metric_history(found.info.run_id, name)
                points += [(part, name, one.step, to_single(one.value)) for one in history]
    return sorted(points)


def test_mlflow_has_every_point_once_and_the_files(run, server):
    follow(run, "mlflow", out=server, project="whole")
    assert read_mlflow(server, "whole") == sorted(set(logged_points(run)))
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
    monkeypatch.setattr("slipstream.runs.tail.MOST_BYTES", 400)  # many messages
    from slipstream.tracking.mlflow import MLflow

    send, messages = MLflow.send, []

    def halt(self, points):
        messages.append(points)
        send(self, points)
        if len(messages) == 3:
            raise KeyboardInterrupt  # what was sent is not noted

    monkeypatch.setattr(MLflow, "send", halt)
    lines = (run / "events.jsonl").read_bytes().splitlines(keepends=True)
    with pytest.raises(KeyboardInterrupt):
        follow(run, "mlflow", out=server, project="killed")
    (run / "events.jsonl").write_bytes(b"".join(lines[:6]))
    runs.Run(run).append("resume", step=4, spent_s=1.0)
    with (run / "events.jsonl").open("ab") as log:
        log.write(b"".join(lines[6:]))
    follow(run, "mlflow", out=server, project="killed")
    assert read_mlflow(server, "killed") == sorted(set(logged_points(run)))


def test_tensorboard_reads_every_point(run, tmp_path):
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    follow(run, "tensorboard", out=str(tmp_path / "board"))
    board = tmp_path / "board" / run.name
    points = []
    for part in ("", "lane-0", "lane-1"):
        accumulator = reader.EventAccumulator(str(board / part), size_guidance={"scalars": 0})
        accumulator.Reload()
        for name in accumulator.Tags()["scalars"]:
            if not name.startswith(("test/", "val/", "train/")):
                scalars = accumulator.Scalars(name)
                points += [(part, name, one.step, one.value) for one in scalars]
        if not part:
            assert {"losses", "predictions"} <= set(accumulator.Tags()["images"])
    assert sorted(points) == sorted(set(logged_points(run)))


def test_the_files_of_wandb_have_every_point(run, tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    from wandb.proto.wandb_internal_pb2 import Record
    from wandb.sdk.internal.datastore import DataStore

    monkeypatch.setenv("WANDB_MODE", "offline")
    follow(run, "wandb", out=str(tmp_path / "board"), project="cells")
    values = []
    for file in (tmp_path / "board").rglob("run-*.wandb"):
        store = DataStore()
        store.open_for_scan(str(file))
        while (content := store.scan_data()) is not None:
            record = Record.FromString(content)
            for item in record.history.item:
                key = item.key or "/".join(item.nested_key)
                values.append((key, json.loads(item.value_json)))
        store._fp.close()
    sent = [(name, value) for name, value in values if name in ("loss", "train_loss", "val_loss")]
    wanted = [
        one for one in set(logged_points(run)) if one[1] in ("loss", "train_loss", "val_loss")
    ]
    assert sorted((name, to_single(value)) for name, value in sent) == sorted(
        (name, value) for _, name, _, value in wanted
    )
