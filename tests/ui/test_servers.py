"""Two servers on one folder, and the worker that waits."""

from __future__ import annotations

import time

import httpx
import psutil
import pytest

from slipstream.app.jobs import DeviceLock, JobStore, find_default_device
from tests.ui.conftest import App

pytestmark = pytest.mark.ui
SETTINGS = {
    "data.path": "load.csv",
    "data.time": "time",
    "data.context": "24",
    "data.horizon": "2",
    "model.kind": "linear",
    "train.epochs": "1",
}


def start_jobs(app, count):
    with httpx.Client(follow_redirects=True) as client:
        client.get(app.url).raise_for_status()
        answers = [
            client.post(f"{app.root}/api/start", json={"settings": SETTINGS}) for _ in range(count)
        ]
    return [answer.json()["job"] for answer in answers]


def test_two_servers_run_each_job_once(app, folder):
    other = App(folder)
    jobs = [*start_jobs(app, 2), *start_jobs(other, 2)]
    other.kill()  # the jobs of a killed server are run by the other one
    store = JobStore(folder)
    while any(store.read(job).state in ("queued", "running") for job in jobs):
        time.sleep(0.1)
    assert [store.read(job).state for job in jobs] == ["finished"] * 4
    assert len({store.read(job).run for job in jobs}) == 4
    assert len(list((folder / "runs").glob("run-*"))) == 4


def test_the_job_runs_in_the_process_that_waited(app, folder):
    store = JobStore(folder)
    lock = DeviceLock(store.root, find_default_device(), "wait")
    while lock.is_free():
        time.sleep(0.05)
    clicked = time.time()
    (job,) = start_jobs(app, 1)
    while store.read(job).state in ("queued", "running"):
        time.sleep(0.02)
    holder = store.read(job)
    assert holder.state == "finished"
    claim = (store.jobs / job / "claim.json").read_text()
    assert float(claim.partition('"since": ')[2].partition(",")[0]) < clicked


def test_no_process_waits_where_it_is_turned_off(folder):
    app = App(folder, "--no-warm-worker")
    try:
        (job,) = start_jobs(app, 1)
        store = JobStore(folder)
        while store.read(job).state in ("queued", "running"):
            time.sleep(0.05)
        assert store.read(job).state == "finished"
        assert DeviceLock(store.root, find_default_device(), "wait").is_free()
    finally:
        app.end()


def test_the_server_is_small(app):
    assert psutil.Process(app.process.pid).memory_info().rss < 80e6
