"""Several processes on one study: every trial once, none lost, whoever is killed."""

from __future__ import annotations

import os
import signal

import psutil
import pytest

import slipstream
from slipstream import runs
from slipstream.errors import Interrupted, UserError
from slipstream.runs import Run
from slipstream.tuning import database, processes
from slipstream.tuning import space as spaces
from tests.conftest import close, small_config, waves
from tests.tuning.several import job, one_of_two_is_killed


def test_two_workers_share_a_study_and_one_that_is_killed_goes_on(tmp_path):
    config = job(tmp_path, trials=6, epochs=8, parallel=4)
    seen = []

    def kill_once(event):
        seen.append(event)
        if event["event"] == "epoch" and event["worker"] == 1 and not killed:
            started = [e for e in seen if e["event"] == "worker" and e["worker"] == 1]
            killed.append(started[0]["pid"])
            os.kill(killed[0], signal.SIGKILL)

    killed: list[int] = []
    found = slipstream.tune(config, watch=kill_once, workers=2)
    died = [e for e in seen if e["event"] == "worker" and e["what"] == "died"]
    assert [(e["worker"], e["remedy"]) for e in died] == [(1, "started again")]
    assert "SIGKILL" in died[0]["why"]
    trials = runs.read_json(found.run / "trials.json")
    assert [trial["trial"] for trial in trials] == list(range(6))
    assert found.summary["trials"] == {"finished": 6, "pruned": 0, "failed": 0}
    by = {e["trial"]: e["worker"] for e in runs.events(Run(found.run)) if e["event"] == "trial"}
    assert set(by) == set(range(6))
    assert set(by.values()) == {0, 1}
    space = spaces.of(config)
    for worker in (0, 1):
        number = next(trial for trial, who in by.items() if who == worker)
        alone = spaces.applied(config, space, trials[number]["params"])
        run = slipstream.train(alone.model_copy(update={"out": str(tmp_path / "alone")})).run
        losses = [e["val_loss"] for e in runs.events(Run(run)) if e["event"] == "epoch"]
        close(trials[number]["value"], min(losses))
    assert (found.run / "best" / "model" / "weights.safetensors").exists()
    best = slipstream.config.load(found.run / "best" / "config.toml")
    assert best.train.lr == found.best.train.lr


def test_trials_of_a_killed_worker_are_retried_once(tmp_path):
    config = job(tmp_path, trials=7, epochs=20)
    one_of_two_is_killed(config, database.own_database(tmp_path), tmp_path)


def test_a_signal_stops_all_workers_and_resume_starts_them_again(tmp_path):
    config = job(tmp_path, trials=4, epochs=40, parallel=4)
    pids = set()

    def interrupt(event):
        if event["event"] == "worker":
            pids.add(event["pid"])
        if event["event"] == "epoch":
            os.kill(os.getpid(), signal.SIGTERM)
            watched.clear()

    watched = [interrupt]
    with pytest.raises(Interrupted, match="go on with: slipstream tune --resume") as stopped:
        slipstream.tune(config, watch=lambda e: [w(e) for w in list(watched)], workers=2)
    assert stopped.value.signal_number == signal.SIGTERM
    assert len(pids) == 2
    assert not any(psutil.pid_exists(pid) for pid in pids)
    run = runs.last(config.out)
    seen = []
    found = slipstream.tune(resume=run, watch=seen.append)
    assert {e["worker"] for e in seen if e["event"] == "worker"} == {0, 1}
    trials = runs.read_json(found.run / "trials.json")
    assert [trial["trial"] for trial in trials] == [0, 1, 2, 3]
    assert {trial["epochs"] for trial in trials} == {40.0}
    assert found.summary["trials"]["finished"] == 4


def test_what_several_workers_cannot_do_is_refused_before_a_folder_is_made(tmp_path):
    config = job(tmp_path)
    with pytest.raises(UserError, match=r"give data\.path instead of a table"):
        slipstream.tune(small_config(tmp_path / "runs"), waves(), workers=2)
    with pytest.raises(UserError, match=r"--workers is -1; give a number from 1"):
        slipstream.tune(config, workers=-1)
    with pytest.raises(UserError, match="names one GPU"):
        processes.refuse(small_config(data={"path": "x"}, engine={"device": "cuda:1"}), None)
    assert processes.number_of("auto", config) == 1
    assert not (tmp_path / "runs").exists()


def test_a_journal_stays_with_one_process(tmp_path):
    found = slipstream.tune(job(tmp_path, trials=2))
    with pytest.raises(UserError, match=r"study\.log, which one process writes to"):
        slipstream.tune(resume=found.run, workers=2)


def test_each_worker_is_shown_its_own_gpu(monkeypatch):
    monkeypatch.setattr(
        processes.hardware, "choose_device", lambda _: processes.torch.device("cuda")
    )
    monkeypatch.setattr(processes.torch.cuda, "device_count", lambda: 2)
    config = small_config(engine={"device": "cuda", "threads": "auto"})
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert processes.number_of("auto", config) == 2
    shown = [place["CUDA_VISIBLE_DEVICES"] for place in processes.places(config, 3)]
    assert shown == ["0", "1", "0"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")
    shown = [place["CUDA_VISIBLE_DEVICES"] for place in processes.places(config, 2)]
    assert shown == ["5", "7"]
    assert processes.shared_cores(config, 2) == config
