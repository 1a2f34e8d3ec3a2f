"""Workers: a job runs in a process of its own, is recorded, and can be stopped."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from slipstream.webapp.jobs import worker
from slipstream.webapp.jobs.presence import DeviceLock
from slipstream.webapp.jobs.store import JobStore


@pytest.fixture
def store(tmp_path):
    return JobStore(tmp_path.resolve())


def submit(store, *command):
    job, _ = store.create_folder()
    store.submit(job, command, device="cpu", name="job", extra={"out": str(store.folder)})
    return job


def run_worker(store):
    command = [sys.executable, "-m", "slipstream", "ui-worker", str(store.folder), "cpu"]
    return subprocess.run(command, check=False, stdout=subprocess.PIPE)


def wait_until_all_ended(store, jobs):
    while any(store.read(job).state in ("queued", "running") for job in jobs):
        time.sleep(0.05)


def test_a_worker_runs_the_queue_to_its_end(store):
    jobs = [submit(store, "--version"), submit(store, "runs", "show", "nothing", "--json")]
    run_worker(store)
    wait_until_all_ended(store, jobs)  # the first worker starts a second one
    first, second = (store.read(job) for job in jobs)
    assert first.state == "finished"
    assert (store.jobs / first.id / "output.json").read_text().startswith("0.")
    assert second.state == "failed"
    assert "nothing" in second.error


def test_a_worker_without_a_job_ends(store):
    assert run_worker(store).returncode == 0


def test_a_worker_leaves_the_queue_to_another_that_waits(store):
    job = submit(store, "--version")
    lock = DeviceLock(store.root, "cpu", "wait")
    assert lock.acquire()
    assert run_worker(store).returncode == 0
    assert store.read(job).state == "queued"
    lock.release()


def test_a_signal_before_training_stops_the_job(store, monkeypatch):
    """SIGTERM ends a command that has not set a handler of its own with the code of a stop."""
    job = submit(store, "train")
    store.take_next("cpu")
    streams = [os.dup(number) for number in (1, 2)]
    handler = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(sys, "argv", ["slipstream"])
    monkeypatch.chdir(store.folder)
    monkeypatch.setattr(worker, "set_process_start", lambda _: None)
    try:
        code = worker.run_job(store, job, lambda: os.kill(os.getpid(), signal.SIGTERM))
    finally:
        signal.signal(signal.SIGTERM, handler)
        for number, stream in zip((1, 2), streams, strict=True):
            os.dup2(stream, number)
            os.close(stream)
    assert code == 143
    assert store.read(job).state == "stopped"


@pytest.mark.slow
def test_a_job_finds_its_run_and_counts_its_time_from_the_click(store):
    config = store.folder / "job.toml"
    config.write_text(
        '[data]\npath = "simulated:cell"\ntime = "time_s"\nid = "cell"\nhorizon = 0\n'
        'inputs = ["voltage_V"]\ntargets = ["soc_percent"]\ncontext = 20\nstride = 50\n'
        'split = { by = "set", val = ["val"], test = ["test"] }\n[model]\nkind = "linear"\n'
        "[train]\nepochs = 1\n"
    )
    job = submit(store, "train", str(config), "--out", str(store.folder), "--json")
    run_worker(store)
    wait_until_all_ended(store, [job])
    ended = store.read(job)
    assert ended.state == "finished", ended.error
    metrics = json.loads((store.folder / str(ended.run) / "metrics.json").read_text())
    assert metrics["time"]["startup_s"] <= ended.ended_at - ended.started_at
