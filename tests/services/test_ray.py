"""Workers on a real Ray, of this machine alone."""

from __future__ import annotations

import os
import signal

import pytest

import slipstream
from slipstream import runs, tuning
from slipstream.errors import Interrupted
from slipstream.runs import Run
from tests.tuning.searches import make_config

pytestmark = [pytest.mark.services, pytest.mark.filterwarnings("default")]


@pytest.fixture(scope="module")
def cluster():
    ray = pytest.importorskip("ray", reason="no Ray is here; `make test-services` brings it")
    ray.init(num_cpus=2, num_gpus=0, include_dashboard=False, log_to_driver=False)
    yield ray
    ray.shutdown()


@pytest.mark.usefixtures("cluster")
def test_workers_on_ray_find_every_trial_once_even_if_one_is_killed(tmp_path):
    config = make_config(tmp_path, trials=6, epochs=20, parallel=4)
    killed: list[int] = []

    def kill_once(event):
        if event["event"] == "epoch" and not killed:
            lock = tmp_path / "runs" / run_name() / "workers" / str(event["worker"]) / "lock.json"
            killed.append(runs.read_json(lock)["pid"])
            os.kill(killed[0], signal.SIGKILL)

    def run_name():
        return runs.find_last(config.out).name

    found = tuning.tune(config, watch=kill_once, workers=2, on="ray")
    assert killed
    assert found.summary["trials"] == {"finished": 6, "pruned": 0, "failed": 0}
    trials = runs.read_json(found.run / "trials.json")
    assert [trial["trial"] for trial in trials] == list(range(6))
    by = {
        e["trial"]: e["worker"] for e in runs.read_events(Run(found.run)) if e["event"] == "trial"
    }
    assert set(by) == set(range(6))
    assert set(by.values()) == {0, 1}


@pytest.mark.usefixtures("cluster")
def test_a_signal_stops_the_workers_on_ray_and_resume_goes_on(tmp_path):
    config = make_config(tmp_path, trials=4, epochs=40, parallel=4)
    sent: list[str] = []

    def stop_once(event):
        if event["event"] == "epoch" and not sent:
            sent.append("SIGTERM")
            signal.raise_signal(signal.SIGTERM)

    with pytest.raises(Interrupted, match="resume with: slipstream tune --resume"):
        tuning.tune(config, watch=stop_once, workers=2, on="ray")
    folder = runs.find_last(config.out)
    assert list(folder.glob("workers/*/packs/*/checkpoints/step-*"))
    assert not list(folder.glob("workers/*/lock.json"))
    found = slipstream.tune(resume=folder)
    trials = runs.read_json(found.run / "trials.json")
    assert [trial["trial"] for trial in trials] == [0, 1, 2, 3]
    assert {trial["epochs"] for trial in trials} == {40.0}
