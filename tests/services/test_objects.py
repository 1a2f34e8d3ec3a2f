"""Data and copies of runs on servers of this machine: S3 (moto), and an emulator of Google's."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
import pytest
from pyarrow import fs

import slipstream
from slipstream import UserError
from slipstream import config as configs
from slipstream.base import storage
from slipstream.base.errors import ResumableError
from slipstream.base.storage import parse_path
from slipstream.data.dataset import load_dataset
from slipstream.data.files import read_files
from slipstream.reporting.copies import copy_run
from slipstream.training import train
from tests.conftest import HUNG_S, small_config, waves
from tests.logs import as_lines

pytestmark = pytest.mark.services
PROGRAMS = Path(sys.executable).parents[1] / "moto" / "bin"
"""In an environment of their own: they need other versions of packages than the client"""
KEYS = {"AWS_ACCESS_KEY_ID": "testing", "AWS_SECRET_ACCESS_KEY": "testing"}


@contextmanager
def start(name: str, folder: Path, *options: str, **environment: str) -> Iterator[Any]:
    """A server on a free port: the port and its process."""
    if not (PROGRAMS / name).exists():
        pytest.skip(f"no {name} is here; `make test-services` brings it")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [PROGRAMS / name, *(option.format(port=port) for option in options)],
            stdout=log,
            stderr=log,
            start_new_session=True,
            env=clean | environment,
        )
    try:
        wait_for_server(port, process)
        yield port, process
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def wait_for_server(port: int, process: subprocess.Popen[bytes]) -> None:
    until = time.monotonic() + HUNG_S
    while time.monotonic() < until and process.poll() is None:
        try:
            httpx.get(f"http://127.0.0.1:{port}/moto-api/")
            return
        except httpx.TransportError:
            time.sleep(0.2)
    pytest.fail("the server does not start")


@contextmanager
def start_server(folder: Path, **environment: str) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """An S3 server with an empty bucket: its address and its process."""
    options = ("-H", "127.0.0.1", "-p", "{port}")
    with start("moto_server", folder, *options, **environment) as (port, process):
        client = fs.S3FileSystem(
            access_key="testing",
            secret_key="testing",
            scheme="http",
            endpoint_override=f"127.0.0.1:{port}",
            allow_bucket_creation=True,
        )
        client.create_dir("bucket")
        yield f"127.0.0.1:{port}", process


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with start_server(tmp_path_factory.mktemp("moto")) as (address, _):
        yield address


@pytest.fixture
def server(address, monkeypatch):
    connect_to(address, monkeypatch)
    return address


def connect_to(address, monkeypatch):
    """Let this process and those it starts use a server."""
    settings = {"AWS_ENDPOINT_URL": f"http://{address}", "AWS_REGION": "us-east-1"}
    for name, value in (KEYS | settings).items():
        monkeypatch.setenv(name, value)
    storage._connect.cache_clear()


def put(key: str, content: bytes) -> str:
    """Store an object; return its URL."""
    path = parse_path(f"s3://bucket/{key}")
    with path.connect().open_output_stream(path.key) as sink:
        sink.write(content)
    return str(path)


@pytest.fixture
def files(tmp_path):
    """One table as CSV and as Parquet."""
    pa.csv.write_csv(waves(), tmp_path / "t.csv")
    pa.parquet.write_table(waves(), tmp_path / "t.parquet", row_group_size=50)
    return tmp_path


def run_command(*words: object, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "slipstream", *map(str, words)]
    settings = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)} | environment
    return subprocess.run(command, capture_output=True, text=True, env=settings, timeout=HUNG_S)


@pytest.mark.usefixtures("server")
def test_csv_parquet_and_folders_are_read_as_local_ones(files):
    for name in ("t.csv", "t.parquet"):
        url = put(f"read/{name}", (files / name).read_bytes())
        local, remote = (
            load_dataset(configs.load(small_config(), [f"data.path={path}"]))
            for path in (files / name, url)
        )
        assert remote.compute_fingerprint() == local.compute_fingerprint()
    for name in ("b/x.csv", "a.csv", "c.csv", ".hidden.csv", "notes.md"):
        put(f"folder/{name}", b"t,a\n1,2\n")
    names = [table.name for table in read_files(["s3://bucket/folder"])]
    assert names == ["a.csv", "b/x.csv", "c.csv"]
    assert [table.name for table in read_files(["s3://bucket/folder/?.csv"])] == ["a.csv", "c.csv"]


@pytest.mark.parametrize("home", ["auto", "stream"])
@pytest.mark.usefixtures("server")
def test_training_from_a_bucket_gives_the_metrics_of_the_local_file(files, tmp_path, home):
    url = put(f"{home}/t.parquet", (files / "t.parquet").read_bytes())
    metrics = []
    for path in (files / "t.parquet", url):
        engine = {"home": home, "workers": 1} if home == "stream" else {}
        config = small_config(tmp_path / "runs", data={"path": str(path)}, engine=engine)
        metrics.append(slipstream.train(config, quiet=True).metrics)
    assert metrics[0] == metrics[1]


@pytest.mark.usefixtures("server")
def test_a_run_resumes_from_a_bucket_and_notices_changed_data(files, tmp_path):
    url = put("resume/t.csv", (files / "t.csv").read_bytes())
    config = small_config(tmp_path / "runs", data={"path": url})
    run = slipstream.train(config, quiet=True).run
    resumed = slipstream.train(resume=run, overrides={"train.epochs": 3}, quiet=True)
    assert resumed.metrics
    pa.csv.write_csv(waves(seed=1), files / "t.csv")
    put("resume/t.csv", (files / "t.csv").read_bytes())
    with pytest.raises(UserError, match="data"):
        slipstream.train(resume=run, overrides={"train.epochs": 4}, quiet=True)


@pytest.mark.usefixtures("server")
def test_a_run_is_copied_there_and_back_and_evaluated(files, tmp_path):
    config = small_config(tmp_path / "runs", data={"path": str(files / "t.csv")})
    result = slipstream.train(config, quiet=True)
    sent = copy_run(result.run, "s3://bucket/runs")
    assert sent["copied_files"] == sent["files"]
    assert copy_run(result.run, "s3://bucket/runs")["copied_files"] == 0
    back = copy_run(sent["to"], tmp_path / "back")
    again = slipstream.evaluate(back["to"])
    assert dict(again.metrics) == dict(slipstream.evaluate(result.run).metrics)
    shown = run_command("copy", sent["to"], tmp_path / "back", "--json")
    assert json.loads(shown.stdout)["copied_files"] == 0


@pytest.mark.usefixtures("server")
def test_large_objects_come_in_several_requests(tmp_path):
    content = os.urandom(3 * storage.BLOCK_BYTES + 5)
    put("large/t.bin", content)
    parse_path("s3://bucket/large/t.bin").download(tmp_path / "t.bin")
    assert (tmp_path / "t.bin").read_bytes() == content


@pytest.mark.usefixtures("server")
def test_missing_keys_and_buckets_are_named(tmp_path):
    put("missing/table.csv", b"t,a\n1,2\n")
    job = tmp_path / "job.toml"
    job.write_text('[data]\npath = "s3://bucket/missing/tabel.csv"\n')
    shown = run_command("train", job, "--out", tmp_path / "runs")
    assert shown.returncode == 2
    assert "s3://bucket/missing/tabel.csv: there is no such file or folder" in shown.stderr
    assert 'did you mean "table.csv"?' in shown.stderr
    shown = run_command("inspect", "s3://no-bucket/t.csv")
    assert shown.returncode == 2
    assert "s3://no-bucket/t.csv: there is no such" in shown.stderr
    shown = run_command("copy", "s3://no-bucket/runs/x", tmp_path / "runs")
    assert (shown.returncode, "there is no" in shown.stderr) == (2, True)
    assert not (tmp_path / "runs").exists()


def test_wrong_credentials_are_denied_with_the_fix(tmp_path, monkeypatch):
    with start_server(tmp_path, INITIAL_NO_AUTH_ACTION_COUNT="3") as (address, _):
        connect_to(address, monkeypatch)
        shown = run_command("inspect", "s3://bucket/t.csv")
        assert shown.returncode == 2
        assert "s3://bucket/t.csv: access is denied" in shown.stderr
        assert "AWS_ACCESS_KEY_ID" in shown.stderr


def test_a_server_that_is_not_there_is_an_error_after_a_bounded_time(tmp_path):
    address = {"AWS_ENDPOINT_URL": "http://127.0.0.1:9", "AWS_REGION": "us-east-1"}
    shown = run_command("inspect", "s3://bucket/t.csv", **KEYS, **address)
    assert shown.returncode == 2
    assert "s3://bucket/t.csv: cannot be reached" in shown.stderr
    assert "AWS_ENDPOINT_URL" in shown.stderr
    assert not list(tmp_path.iterdir())


def test_training_from_a_server_that_dies_ends_as_resumable(files, tmp_path, monkeypatch):
    engine = {"home": "stream", "log_every": 1}
    sections = {"data": {"path": "s3://bucket/t.parquet"}, "engine": engine}
    config = small_config(tmp_path / "runs", **sections)
    with start_server(tmp_path) as (address, process):
        connect_to(address, monkeypatch)
        put("t.parquet", (files / "t.parquet").read_bytes())

        def kill(event):
            if event["event"] == "epoch":
                process.kill()

        with pytest.raises(ResumableError, match=r"^s3://bucket/t.parquet: cannot be .*--resume"):
            train(config, watch=as_lines(kill))
    (run,) = (tmp_path / "runs").iterdir()
    with start_server(tmp_path) as (address, _):
        connect_to(address, monkeypatch)
        put("t.parquet", (files / "t.parquet").read_bytes())
        assert train(resume=run).summary["metrics"]


def test_a_server_that_dies_in_the_middle_is_an_error_and_the_copy_is_repeated(
    server, files, tmp_path, monkeypatch
):
    config = small_config(tmp_path / "runs", data={"path": str(files / "t.csv")})
    result = slipstream.train(config, quiet=True)
    (tmp_path / "moto").mkdir()
    with start_server(tmp_path / "moto") as (address, process):
        connect_to(address, monkeypatch)
        url = put("t.parquet", (files / "t.parquet").read_bytes())
        (table,) = read_files([url])
        assert len(table.read_column("a")) == 400

        def kill(done, total):
            if done > total // 2:
                process.kill()

        with pytest.raises(UserError, match=r"^s3://bucket/.*: cannot be reached"):
            copy_run(result.run, "s3://bucket/runs", show=kill)
        with pytest.raises(UserError, match=r"^s3://bucket/t.parquet: cannot be reached"):
            table.read_column("b")
    connect_to(server, monkeypatch)
    assert copy_run(result.run, "s3://bucket/again")["copied_files"]


def test_googles_storage_gives_the_same_data_and_takes_copies(files, tmp_path, monkeypatch):
    options = ("start", "--host=127.0.0.1", "--port={port}", "--in-memory")
    with start("gcp-storage-emulator", tmp_path, *options, "--default-bucket=bucket") as (port, _):
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://127.0.0.1:{port}")
        storage._connect.cache_clear()
        for name in ("t.csv", "t.parquet"):
            path = parse_path(f"gs://bucket/data/{name}")
            with path.connect().open_output_stream(path.key) as sink:
                sink.write((files / name).read_bytes())
        prints = {
            load_dataset(configs.load(small_config(), [f"data.path={path}"])).compute_fingerprint()
            for path in (files / "t.csv", "gs://bucket/data/t.csv", "gs://bucket/data/t.parquet")
        }
        assert len(prints) == 1
        assert len(list(read_files(["gs://bucket/data"]))) == 2
        config = small_config(tmp_path / "runs", data={"path": "gs://bucket/data/t.csv"})
        result = slipstream.train(config, quiet=True)
        sent = copy_run(result.run, "gs://bucket/runs")
        assert copy_run(result.run, "gs://bucket/runs")["copied_files"] == 0
        back = copy_run(sent["to"], tmp_path / "back")
        assert dict(slipstream.evaluate(back["to"]).metrics) == dict(
            slipstream.evaluate(result.run).metrics
        )
