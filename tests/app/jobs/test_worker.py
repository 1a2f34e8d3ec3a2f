"""Workers: a job runs in a process of its own, is recorded, and can be stopped."""

from __future__ import annotations

import gc
import importlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from slipstream.app import jobs as app_jobs
from slipstream.app.jobs import DeviceLock, JobStore, WakePipe, stop_job, wake_worker


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


@pytest.mark.slow
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
    try:
        code = app_jobs.run_job(store, job, lambda: os.kill(os.getpid(), signal.SIGTERM))
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


CONFIG = (
    '[data]\npath = "simulated:cell"\ntime = "time_s"\nid = "cell"\nhorizon = 0\n'
    'inputs = ["voltage_V"]\ntargets = ["soc_percent"]\ncontext = 20\nstride = 50\n'
    'split = { by = "set", val = ["val"], test = ["test"] }\n[model]\nkind = "gru"\nhidden = 8\n'
    'dropout = 0.2\nlayers = 2\n[train]\nepochs = 2\n[engine]\nthreads = 1\nplan = "off"\n'
)


def submit_training(store, name, *settings):
    config = store.folder / f"{name}.toml"
    config.write_text(CONFIG)
    command = ["train", str(config), "--out", str(store.folder / "runs"), "--json"]
    for one in settings:
        command += ["--set", one]
    job, _ = store.create_folder()
    store.submit(job, command, device="cpu", name=name, extra={"out": str(store.folder / "runs")})
    return job


def wait_until(condition):
    while not condition():
        time.sleep(0.02)


def read_scores(folder):
    metrics = json.loads((folder / "metrics.json").read_text())
    return metrics["metrics"], metrics["steps"], metrics["baselines"]


@pytest.fixture
def warm_worker(store):
    """A warm worker of a folder that this process serves."""
    server_file = app_jobs.announce_server(store.root)
    command = [sys.executable, "-m", "slipstream", "ui-worker", str(store.folder), "cpu", "--warm"]
    process = subprocess.Popen(command)
    wait_until(lambda: app_jobs.has_ready_worker(store.root, "cpu"))
    yield process
    server_file.unlink()  # without a server, a worker ends
    process.wait()


@pytest.mark.slow
def test_trainings_in_one_process_equal_those_of_processes_of_their_own(store, warm_worker):
    """Also the one after a run that was stopped in mid-training."""
    first = submit_training(store, "first")
    stopped = submit_training(store, "long", "train.epochs=100000", "train.patience=off")
    wait_until(lambda: store.read(stopped).run)
    log = store.folder / str(store.read(stopped).run) / "events.jsonl"
    wait_until(lambda: log.exists() and '"epoch"' in log.read_text())
    stop_job(store, stopped)
    second = submit_training(store, "second", "model.hidden=12")
    wait_until_all_ended(store, [first, stopped, second])
    jobs = [store.read(job) for job in (first, stopped, second)]
    assert [job.state for job in jobs] == ["finished", "stopped", "finished"]
    pids = {json.loads((store.jobs / job.id / "claim.json").read_text())["pid"] for job in jobs}
    assert pids == {warm_worker.pid}
    for job in (jobs[0], jobs[2]):
        command = [*job.command]
        command[command.index("--out") + 1] = str(store.folder / "alone")
        output = subprocess.run(
            [sys.executable, "-m", "slipstream", *command], check=True, stdout=subprocess.PIPE
        ).stdout
        alone = read_scores(Path(json.loads(output)["run"]))
        assert read_scores(store.folder / str(job.run)) == alone


@pytest.mark.slow
def test_a_process_that_ran_another_command_is_replaced(store, warm_worker):
    job = submit(store, "runs", "show", "nothing", "--json")
    wait_until_all_ended(store, [job])
    assert warm_worker.wait() != 0
    wait_until(lambda: not DeviceLock(store.root, "cpu", "wait").is_free())  # the successor


def test_a_stop_that_comes_too_late_does_not_touch_the_next_job(store, monkeypatch):
    ended, running = submit(store, "train"), submit(store, "train")
    store.request_stop(ended)
    monkeypatch.setattr(app_jobs, "_current", store.jobs / running)
    app_jobs._stop_current()  # would end this process
    store.request_stop(running)
    handler = signal.signal(signal.SIGTERM, app_jobs._leave)
    try:
        with pytest.raises(SystemExit):
            app_jobs._stop_current()
    finally:
        signal.signal(signal.SIGTERM, handler)


def test_a_worker_gives_up_waiting_when_memory_runs_short(store, monkeypatch):
    app_jobs.announce_server(store.root)
    monkeypatch.setattr(app_jobs, "MIN_FREE_SHARE", 2.0)  # of the memory: more than there is
    use = DeviceLock(store.root, "cpu", "use")
    monkeypatch.setattr(app_jobs, "CHECK_S", 0.01)
    assert app_jobs._wait_for_job(store, "cpu", use, warm=True) is None
    job = submit(store, "--version")  # one that waits is run all the same
    assert app_jobs._wait_for_job(store, "cpu", use, warm=True) == job
    use.release()


def test_a_submitted_job_wakes_a_worker_at_once(store):
    wake_worker(store.root, "cpu")  # nobody waits, which does no harm
    with WakePipe(store.root, "cpu") as pipe:
        submit(store, "--version")
        pipe.wait(600)
        wake_worker(store.root, "cpu")
        pipe.wait(600)


def test_the_modules_that_a_worker_imports_ahead_exist():
    for name in app_jobs.MODULES:  # `warm_up` leaves a failure to the job
        importlib.import_module(name)


def test_a_worker_runs_on_when_what_started_it_is_gone(store):
    """Without a warning of `Popen`, which a test would raise at some later garbage collection."""
    job = submit(store, "--version")
    supervisor = app_jobs.Supervisor(store, warm=False)
    supervisor.start_workers()
    del supervisor
    gc.collect()
    wait_until_all_ended(store, [job])
    assert store.read(job).state == "finished"
