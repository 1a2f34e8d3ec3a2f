"""An exported application on a real Ray Serve, of this machine alone."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pyarrow as pa
import pyarrow.parquet
import pytest

import slipstream
from tests.conftest import HUNG_S, small_config, waves
from tests.server.servers import JSON, start_server

pytestmark = pytest.mark.services


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ray")
    pa.parquet.write_table(waves(160), folder / "waves.parquet")
    data = {"path": str(folder / "waves.parquet")}
    run = slipstream.train(small_config(folder / "runs", data=data), quiet=True).run
    slipstream.export(run, to="ray", out=folder / "out")
    return folder / "out"


@contextmanager
def start_ray(folder: Path) -> Iterator[httpx.Client]:
    """Run `serve run serve.yaml` in a folder, at a free port."""
    program = Path(sys.executable).with_name("serve")
    if not program.exists():
        pytest.skip("no Ray Serve is here; `make test-services` brings it")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    text = (folder / "serve.yaml").read_text()
    (folder / "serve.yaml").write_text(text.replace("port: 8000", f"port: {port}"))
    source = Path(slipstream.__file__).parents[1]
    environment = os.environ | {"PYTHONPATH": str(source), "RAY_USAGE_STATS_ENABLED": "0"}
    with (folder / "log.txt").open("w") as log:
        process = subprocess.Popen(
            [program, "run", "serve.yaml"], cwd=folder, stdout=log, stderr=log, env=environment
        )
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=HUNG_S) as client:
            while not is_ready(client):
                assert process.poll() is None, (folder / "log.txt").read_text()
                time.sleep(0.5)
            yield client
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(HUNG_S)


def is_ready(client: httpx.Client) -> bool:
    try:
        return client.get("/health").status_code == 200
    except httpx.TransportError:
        return False


def test_ray_answers_as_our_own_server_does(exported, tmp_path):
    rows = waves(40).to_pylist()
    bad = [{**row, "a": None} for row in rows]
    with start_server(exported) as server:
        wanted = [server.predict(body) for body in (rows, bad)]
    with start_ray(shutil.copytree(exported, tmp_path / "out")) as client:
        got = [client.post("/predict", json=body, headers=JSON) for body in (rows, bad)]
    assert [one.status_code for one in got] == [one.status_code for one in wanted] == [200, 422]
    assert got[0].json()["predictions"] == wanted[0].json()["predictions"]
    assert got[1].json() == wanted[1].json()
