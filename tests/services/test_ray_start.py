"""The command on clusters of `ray start`, with tokens and without."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from slipstream import config as configs
from slipstream import runs
from slipstream.runs import Run
from tests.conftest import HUNG_S
from tests.logs import read_lines
from tests.services.test_ray import MEMORY, kill_node
from tests.training.shares.test_launcher import configured

pytestmark = [pytest.mark.services, pytest.mark.filterwarnings("default")]
OWN = ("RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
RAY = ("-c", "from ray.scripts.scripts import main; main()")


class Machine:
    """The home folder of a user, who may have a token, and what runs there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.home = folder / "home"
        self.home.mkdir()

    def write_token(self, token: str) -> None:
        """Write the token as `ray get-auth-token --generate` does, and any `ray.init()`."""
        (self.home / ".ray").mkdir(exist_ok=True)
        (self.home / ".ray" / "auth_token").write_text(token)

    def call(self, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *arguments],
            env=self.make_env(**env),
            capture_output=True,
            text=True,
            timeout=2 * HUNG_S,
            check=False,
        )

    def make_env(self, **env: str) -> dict[str, str]:
        theirs = {name: value for name, value in os.environ.items() if name not in OWN}
        return theirs | {"HOME": str(self.home), "RAY_USAGE_STATS_ENABLED": "0"} | env

    def write_startup(self, code: str) -> str:
        """Write what Python runs first with the returned PYTHONPATH."""
        folder = self.folder / "startup"
        folder.mkdir(exist_ok=True)
        (folder / "sitecustomize.py").write_text(code)
        return os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])

    def train(self, **env: str) -> subprocess.CompletedProcess[str]:
        config = configured(self.folder, train={"repeats": 2, "epochs": 2})
        job = self.folder / "job.toml"
        job.write_text(configs.to_toml(config))
        return self.call("-m", "slipstream", "train", str(job), "--on", "ray", **env)

    def read_last(self) -> list[dict]:
        return list(read_lines(Run(runs.find_last(self.folder / "runs"))))

    @contextmanager
    def start_cluster(self) -> Iterator[str]:
        """Run `ray start --head`, on a free port, in a folder of its own; yield its address."""
        port = find_port()
        temporary = tempfile.mkdtemp(prefix="ray-")  # a short path, for the sockets in it
        options = [f"--port={port}", f"--temp-dir={temporary}", "--include-dashboard=false"]
        with ExitStack() as stack:
            stack.callback(shutil.rmtree, temporary, ignore_errors=True)
            stack.enter_context(self.start_node("--head", "--node-ip-address=127.0.0.1", *options))
            yield f"127.0.0.1:{port}"

    @contextmanager
    def start_node(self, *options: str, **env: str) -> Iterator[None]:
        """Run `ray start` until its node has started; stop that in the end."""
        command = [sys.executable, *RAY, "start", *options, "--num-cpus=1", "--num-gpus=0"]
        command += [f"--object-store-memory={MEMORY}", "--block"]
        log = self.folder / f"node-{len(list(self.folder.glob('node-*')))}.txt"
        with log.open("w") as file:
            node = subprocess.Popen(
                command, env=self.make_env(**env), stdout=file, stderr=file, start_new_session=True
            )
        try:
            until = time.monotonic() + HUNG_S
            while "Ray runtime started" not in log.read_text():
                assert node.poll() is None, log.read_text()
                assert time.monotonic() < until, log.read_text()
                time.sleep(0.2)
            yield
        finally:
            kill_node(node)


def find_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@pytest.fixture
def machine(tmp_path) -> Machine:
    pytest.importorskip("ray", reason="no Ray is here; `make test-services` brings it")
    return Machine(tmp_path)


def test_a_cluster_that_asks_for_the_token_of_its_machine_trains_on_both_of_its_nodes(machine):
    machine.write_token("0123456789abcdef0123456789abcdef")  # of an earlier `ray.init()`
    with machine.start_cluster() as address:
        with machine.start_node(f"--address={address}", RAY_AUTH_MODE="token"):
            done = machine.train(RAY_ADDRESS=address)
        assert done.returncode == 0, done.stderr
        started = [e["worker"] for e in machine.read_last() if e.get("what") == "started"]
        assert sorted(started) == [0, 1]
        wrong = machine.train(RAY_ADDRESS=address, RAY_AUTH_TOKEN="f" * 32)
        assert wrong.returncode == 2
        assert f"the Ray cluster at {address} refuses the token in RAY_AUTH_TOKEN" in wrong.stderr
        (machine.home / ".ray" / "auth_token").unlink()
        lost = machine.train(RAY_ADDRESS=address)
        assert lost.returncode == 2
        assert "asks for a token, and this machine has none; set RAY_AUTH_TOKEN" in lost.stderr
        assert "InvalidAuthToken" not in lost.stderr


def test_a_token_that_the_cluster_does_not_ask_for_is_left_out(machine):
    with machine.start_cluster() as address:
        machine.write_token("0123456789abcdef0123456789abcdef")
        done = machine.train(RAY_ADDRESS=address)
        assert done.returncode == 0, done.stderr


def test_a_node_without_slipstream_is_named(machine):
    hidden = machine.write_startup("import sys; sys.modules['slipstream'] = None")
    with (
        machine.start_cluster() as address,
        machine.start_node(f"--address={address}", PYTHONPATH=hidden),
    ):
        refused = machine.train(RAY_ADDRESS=address)
    assert refused.returncode == 2, refused.stderr
    assert "has no Python module slipstream; each node needs" in refused.stderr
    assert "Traceback" not in refused.stderr


def test_another_version_of_ray_and_one_that_is_imported_already(machine):
    machine.write_token("0123456789abcdef0123456789abcdef")
    with machine.start_cluster() as address:
        other = machine.write_startup("import ray; ray.__version__ = '2.1.0'")
        refused = machine.train(RAY_ADDRESS=address, PYTHONPATH=other)
        assert refused.returncode == 2, refused.stderr
        assert "2.1.0" in refused.stderr
        assert "Traceback" not in refused.stderr
        early = machine.write_startup("import ray")  # before it is known whether to use the token
        done = machine.train(RAY_ADDRESS=address, PYTHONPATH=early)
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({"RAY_ADDRESS": "ray://127.0.0.1:10001"}, "expected HOST:PORT of the cluster's head node"),
        ({"RAY_ADDRESS": "http://127.0.0.1:8265"}, "expected HOST:PORT of the cluster's head node"),
        ({"RAY_ADDRESS": "127.0.0.1:1"}, "no Ray cluster answers at RAY_ADDRESS=127.0.0.1:1"),
        ({"RAY_AUTH_MODE": "token"}, "RAY_AUTH_MODE=token, but this machine has no token"),
    ],
)
def test_what_cannot_be_connected_to_is_an_error_that_names_the_variable(machine, env, message):
    refused = machine.train(**env)
    assert refused.returncode == 2
    assert message in refused.stderr
    assert not (machine.folder / "runs").exists()
