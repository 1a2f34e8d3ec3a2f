"""Workers on a real Ray, whose nodes are processes of this machine."""

from __future__ import annotations

import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread

import pytest

import slipstream
from slipstream import config as configs
from slipstream import runs, training
from slipstream.base.errors import Interrupted, UserError
from slipstream.config import Config
from slipstream.runs import Run
from slipstream.search import api, sharing
from slipstream.workers import ray as connection
from tests.conftest import HUNG_S, close
from tests.logs import as_lines, read_lines
from tests.search.searches import make_config
from tests.training.shares.test_launcher import configured, lane_events

pytestmark = [pytest.mark.services, pytest.mark.filterwarnings("default")]
MEMORY = 80_000_000
"""Of the object store of a node, in bytes"""
ROOT = Path(__file__).parents[2]
OFTEN = {"engine.checkpoint_minutes": 1e-9, "engine.async_checkpoints": False}
"""A checkpoint after every epoch"""


class Hold:
    """Has every model wait after its first epochs, of 9 steps each, until it is released."""

    def __init__(self, file: Path, passes: int) -> None:
        self.file, self.passes = file, passes
        file.touch()

    def apply(self, config: Config) -> Config:
        options = {"hold": str(self.file), "after": self.passes}
        model = {"model.kind": "tests.training.parallel.nets:Held", "model.options": options}
        return configs.replace_settings(config, {**model, **OFTEN})

    def release(self) -> None:
        self.file.unlink(missing_ok=True)

    @contextmanager
    def release_after(self, has_happened: Callable[[], bool], act: Callable[[], None]):
        """Act and release the models once something has happened, or the block has ended."""
        ended = Event()

        def watch() -> None:
            while not ended.wait(0.1):
                if has_happened():
                    act()
                    break
            self.release()

        thread = Thread(target=watch)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()


@pytest.fixture(scope="module")
def cluster():
    """A cluster of one node with two CPUs; tests add more."""
    ray = pytest.importorskip("ray", reason="no Ray is here; `make test-services` brings it")
    utils = pytest.importorskip("ray.cluster_utils")
    options = {"num_cpus": 2, "num_gpus": 0, "object_store_memory": MEMORY}
    with pytest.MonkeyPatch.context() as patch:  # workers import networks of the tests
        patch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), *sys.path]))
        yield from start_cluster(ray, utils, options)


def start_cluster(ray, utils, options):
    one = utils.Cluster(initialize_head=True, head_node_args=options)
    ray.init(address=one.address, log_to_driver=False)
    yield one
    ray.shutdown()
    one.shutdown()


def check_same(folder: Path, wanted: Path) -> None:
    """Compare a run of workers on Ray with one of a single process: lanes, scores and log."""
    one, other = (runs.read_json(path / "metrics.json") for path in (folder, wanted))
    assert [lane["steps"] for lane in one["lanes"]] == [lane["steps"] for lane in other["lanes"]]
    for mine, theirs in zip((one, *one["lanes"]), (other, *other["lanes"]), strict=True):
        close(*(list(run["metrics"]["test"].values()) for run in (mine, theirs)), rel=1e-4)
    mine, theirs = lane_events(folder), lane_events(wanted)
    assert mine.keys() == theirs.keys()
    close(*([x for key in sorted(mine) for x in run[key]] for run in (mine, theirs)), rel=1e-4)


@contextmanager
def start_node(address: str, hidden: Path | None = None) -> Iterator[subprocess.Popen[bytes]]:
    """Start a node with two CPUs; instead of the `hidden` folder, it sees an empty one."""
    program = "from ray.scripts.scripts import main; main()"
    command = [sys.executable, "-c", program, "start", f"--address={address}", "--num-cpus=2"]
    command += ["--num-gpus=0", f"--object-store-memory={MEMORY}", "--block"]
    if hidden is not None:
        hidden.mkdir(parents=True, exist_ok=True)
        mount = f"mount -t tmpfs none '{hidden}'"
        if subprocess.run(["unshare", "-m", "sh", "-c", mount], check=False).returncode:
            pytest.skip("this user may not mount, so a node cannot have a file system of its own")
        command = ["unshare", "-m", "sh", "-c", f'{mount} && exec "$@"', "sh", *command]
    before = len(connection.list_nodes())
    node = subprocess.Popen(command, stdout=subprocess.DEVNULL, start_new_session=True)
    try:
        wait_until(lambda: len(connection.list_nodes()) > before)
        yield node
    finally:
        kill_node(node)
        wait_until(lambda: len(connection.list_nodes()) <= before)


def kill_node(node: subprocess.Popen[bytes]) -> None:
    """Kill a node with all of its processes, as if its machine had lost power."""
    if node.poll() is None:
        import psutil

        for process in [*psutil.Process(node.pid).children(recursive=True), node]:
            process.kill()
        node.wait()


def wait_until(condition) -> None:
    until = time.monotonic() + HUNG_S
    while not condition():
        assert time.monotonic() < until, "it did not happen"
        time.sleep(0.2)


@pytest.mark.usefixtures("cluster")
def test_workers_on_ray_find_every_trial_once_even_if_one_is_killed(tmp_path):
    hold = Hold(tmp_path / "hold", passes=15)
    config = hold.apply(make_config(tmp_path, trials=6, epochs=20, parallel=4))
    killed: list[int] = []
    busy = set()

    def kill_once(event):
        if event["event"] != "epoch":
            return
        busy.add(event["worker"])
        if not killed:
            lock = tmp_path / "runs" / run_name() / "workers" / str(event["worker"]) / "lock.json"
            killed.append(runs.read_json(lock)["pid"])
            os.kill(killed[0], signal.SIGKILL)
        if len(busy) == 2:
            hold.release()

    def run_name():
        return runs.find_last(config.out).name

    found = api.tune(config, watch=as_lines(kill_once), workers=2, on="ray")
    assert killed
    assert found.summary["trials"] == {"finished": 6, "pruned": 0, "failed": 0}
    trials = runs.read_json(found.run / "trials.json")
    assert [trial["trial"] for trial in trials] == list(range(6))
    by = {e["trial"]: e["worker"] for e in read_lines(Run(found.run)) if e["event"] == "trial"}
    assert set(by) == set(range(6))
    assert set(by.values()) == {0, 1}


@pytest.mark.usefixtures("cluster")
def test_a_signal_stops_the_workers_on_ray_and_resume_goes_on(tmp_path):
    hold = Hold(tmp_path / "hold", passes=15)
    config = hold.apply(make_config(tmp_path, trials=4, epochs=40, parallel=4))
    sent: list[str] = []

    def stop_once(event):
        if event["event"] == "epoch" and not sent:
            sent.append("SIGTERM")
            signal.raise_signal(signal.SIGTERM)
            hold.release()

    with pytest.raises(Interrupted, match="resume with: slipstream tune --resume"):
        api.tune(config, watch=as_lines(stop_once), workers=2, on="ray")
    folder = runs.find_last(config.out)
    assert list(folder.glob("workers/*/packs/*/checkpoints/step-*"))
    assert not list(folder.glob("workers/*/lock.json"))
    found = slipstream.tune(resume=folder)
    trials = runs.read_json(found.run / "trials.json")
    assert [trial["trial"] for trial in trials] == [0, 1, 2, 3]
    assert {trial["epochs"] for trial in trials} == {40.0}


@pytest.mark.usefixtures("cluster")
def test_more_workers_than_the_cluster_can_have_are_refused_before_a_run_exists(tmp_path):
    config = make_config(tmp_path)
    with pytest.raises(UserError, match=r"--workers 3: .* has 2 CPUs .* so 1 is missing"):
        api.tune(config, workers=3, on="ray")
    assert not (tmp_path / "runs").exists()


def test_a_worker_on_a_lost_node_continues_elsewhere_from_the_files_that_were_fetched(
    tmp_path, cluster, postgres
):
    hold = Hold(tmp_path / "hold", passes=60)
    config = hold.apply(make_config(tmp_path, trials=2, epochs=20, parallel=2))
    events = []

    def has_fetched():
        files = Path(config.out).glob(f"*/workers/{get_hidden_worker()}/packs/*/checkpoints/step-*")
        return any(files)

    def get_hidden_worker():
        return next((e["worker"] for e in events if e.get("shared") is False), None)

    with (
        start_node(cluster.address, tmp_path / "runs") as lost,
        start_node(cluster.address),
        hold.release_after(has_fetched, lambda: kill_node(lost)),
    ):
        found = api.tune(
            config, watch=as_lines(events.append), workers=2, on="ray", storage=postgres
        )
        assert lost.poll() is not None
    assert found.summary["trials"] == {"finished": 2, "pruned": 0, "failed": 0}
    assert not any(map(sharing.is_retry, found.study.get_trials()))  # so none was lost
    what = [e for e in read_lines(Run(found.run)) if e["event"] == "worker"]
    died = [e for e in what if e["what"] == "died"]
    assert [(e["worker"], e["remedy"]) for e in died] == [(get_hidden_worker(), "started again")]
    second = [e for e in events if e.get("worker") == get_hidden_worker() and "pid" in e][1]
    later = [e for e in events[events.index(second) :] if e["event"] == "epoch"]
    assert next(e["epoch"] for e in later if e["worker"] == get_hidden_worker()) > 1
    assert (found.run / "best").exists()


def test_shares_on_ray_end_as_lanes_of_one_process_although_a_node_is_lost(tmp_path, cluster):
    hold = Hold(tmp_path / "hold", passes=60)
    config = hold.apply(configured(tmp_path, train={"repeats": 4, "epochs": 20}))
    hold.release()
    one = training.train(config)
    hold.file.touch()
    events = []

    def has_fetched():
        shares = runs.find_last(config.out) / "workers"
        hidden = [str(e["worker"]) for e in events if e.get("shared") is False]
        return bool(hidden) and any((shares / hidden[0]).glob("checkpoints/step-*"))

    with (
        start_node(cluster.address, tmp_path / "runs") as lost,
        hold.release_after(has_fetched, lambda: kill_node(lost)),
    ):
        spread = training.train(config, watch=as_lines(events.append), workers=2, on="ray")
        assert lost.poll() is not None
    check_same(spread.run, one.run)
    assert [e["remedy"] for e in events if e.get("what") == "died"] == ["started again"]


@pytest.mark.usefixtures("cluster")
def test_a_signal_stops_the_shares_on_ray_and_resume_continues_there(tmp_path):
    hold = Hold(tmp_path / "hold", passes=15)
    config = hold.apply(configured(tmp_path, train={"repeats": 2, "epochs": 60}))
    hold.release()
    one = training.train(config)
    hold.file.touch()
    sent: list[str] = []

    def stop_once(event):
        if event["event"] == "epoch" and not sent:
            sent.append("SIGINT")
            signal.raise_signal(signal.SIGINT)
            hold.release()

    with pytest.raises(Interrupted, match="resume with: slipstream train --resume"):
        training.train(config, watch=as_lines(stop_once), workers=2, on="ray")
    folder = runs.find_last(config.out)
    assert list(folder.glob("workers/*/checkpoints/step-*"))
    assert not list(folder.glob("workers/*/lock.json"))
    events = []
    found = training.train(resume=folder, watch=as_lines(events.append))
    assert {e["node"] for e in events if e["event"] == "worker"} == {platform.node()}
    check_same(found.run, one.run)


def test_data_that_a_node_lacks_is_an_error_with_the_node_and_the_path(tmp_path, cluster):
    folder = tmp_path / "here"
    folder.mkdir()
    config = configured(folder, train={"repeats": 2})
    with start_node(cluster.address, folder), pytest.raises(UserError) as error:
        training.train(config, workers=2, on="ray")
    assert f"on node {platform.node()}: {folder / 'waves.csv'}" in str(error.value)
    assert "put them under the same path on all of them" in str(error.value)
