"""Several processes on one study: every trial once, none lost, whoever is killed."""

from __future__ import annotations

import os
import signal
import tomllib

import psutil
import pytest

import slipstream
from slipstream import config as configs
from slipstream import runs
from slipstream.base.errors import Interrupted, UserError
from slipstream.config import search_space as spaces
from slipstream.runs import Run
from slipstream.search import api, database
from slipstream.search.budget import SearchBudget
from slipstream.search.workers import Launcher
from tests.conftest import close, small_config, waves
from tests.logs import Line, as_lines, read_lines
from tests.search.searches import check_that_trials_of_a_killed_worker_are_retried, make_config

TRIALS, EPOCHS = 8, 100
"""So many that a worker which starts seconds after the other still finds some"""


class Violent:
    """Watches a search, and sends a signal at the first epoch that it hears of."""

    def __init__(self, number: int, *, to_worker: int | None = None) -> None:
        self.number, self.to_worker, self.sent = number, to_worker, False
        self.pids: dict[int, int] = {}
        self.died: list[Line] = []

    def __call__(self, event: Line) -> None:
        if event["event"] == "worker":
            if event["what"] == "started":
                self.pids[event["worker"]] = event["pid"]
            self.died += [event] if event["what"] == "died" else []
        if self.sent or event["event"] != "epoch":
            return
        if self.to_worker in (None, event["worker"]):
            self.sent = True
            os.kill(self.pids.get(self.to_worker, os.getpid()), self.number)


@pytest.mark.slow
def test_two_workers_find_every_trial_once(tmp_path):
    found = slipstream.tune(make_config(tmp_path, trials=4), workers=2)
    trials = runs.read_json(found.run / "trials.json")
    assert [trial["trial"] for trial in trials] == list(range(4))
    assert found.summary["trials"] == {"finished": 4, "pruned": 0, "failed": 0}
    assert (found.run / "best" / "model" / "weights.safetensors").exists()


@pytest.mark.slow
def test_two_workers_are_stopped_resumed_and_killed_and_find_every_trial_once(tmp_path):
    config = make_config(tmp_path, trials=TRIALS, epochs=EPOCHS, parallel=4)
    stopping = Violent(signal.SIGTERM)
    with pytest.raises(Interrupted, match="resume with: slipstream tune --resume") as stopped:
        api.tune(config, watch=as_lines(stopping), workers=2)
    assert stopped.value.signal_number == signal.SIGTERM
    assert set(stopping.pids) == {0, 1}
    assert not any(psutil.pid_exists(pid) for pid in stopping.pids.values())

    killing = Violent(signal.SIGKILL, to_worker=1)
    found = api.tune(resume=runs.find_last(config.out), watch=as_lines(killing))
    assert [(e["worker"], e["remedy"]) for e in killing.died] == [(1, "started again")]
    assert "SIGKILL" in killing.died[0]["why"]
    trials = runs.read_json(found.run / "trials.json")
    assert [trial["trial"] for trial in trials] == list(range(TRIALS))
    assert {trial["epochs"] for trial in trials} == {float(EPOCHS)}
    assert found.summary["trials"] == {"finished": TRIALS, "pruned": 0, "failed": 0}
    by = {e["trial"]: e["worker"] for e in read_lines(Run(found.run)) if e["event"] == "trial"}
    assert set(by) == set(range(TRIALS))
    assert set(by.values()) == {0, 1}
    for worker in (0, 1):
        number = next(trial for trial, who in by.items() if who == worker)
        alone = spaces.apply_params(config, spaces.make_space(config), trials[number]["params"])
        run = slipstream.train(alone.model_copy(update={"out": str(tmp_path / "alone")})).run
        losses = [e["val_loss"] for e in read_lines(Run(run)) if e["event"] == "epoch"]
        close(trials[number]["value"], min(losses))
    assert (found.run / "best" / "model" / "weights.safetensors").exists()
    assert configs.load(found.run / "best" / "config.toml").train.lr == found.best.train.lr


@pytest.mark.slow
def test_trials_of_a_killed_worker_are_retried_once(tmp_path):
    config = make_config(tmp_path, trials=7, epochs=20)
    check_that_trials_of_a_killed_worker_are_retried(
        config, database.make_run_database_url(tmp_path), tmp_path
    )


def test_what_several_workers_cannot_do_is_refused_before_a_folder_is_made(tmp_path):
    config = make_config(tmp_path)
    with pytest.raises(UserError, match=r"set data\.path instead of passing a table"):
        slipstream.tune(small_config(tmp_path / "runs"), waves(), workers=2)
    with pytest.raises(UserError, match=r"workers is -1; give a number from 1"):
        slipstream.tune(config, workers=-1)
    assert not (tmp_path / "runs").exists()


def test_a_journal_stays_with_one_process(tmp_path):
    found = slipstream.tune(make_config(tmp_path, trials=2))
    with pytest.raises(UserError, match=r"study\.log, which only one process may write to"):
        slipstream.tune(resume=found.run, workers=2)


def test_relative_paths_are_found_by_workers_and_from_another_folder(tmp_path, monkeypatch):
    """Of everything that a config names, however it was given."""
    settings = configs.to_toml(make_config(tmp_path, trials=2))
    (tmp_path / "job.toml").write_text(settings)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "data").mkdir()
    (tmp_path / "waves.csv").rename(tmp_path / "data" / "waves.csv")
    monkeypatch.chdir(tmp_path / "data")
    config = configs.load(tmp_path / "job.toml", ["data.path=waves.csv"])
    run = runs.create_run("a", out=str(tmp_path / "runs"))
    url = database.make_run_database_url(run.folder)
    launcher = Launcher(config, num_workers=2, storage=url)
    budget = SearchBudget(config.tune, 1)
    for task in launcher._make_tasks(run, launcher.open_study(run), 1, budget):
        sent = configs.load(tomllib.loads(task.config_toml))
        assert sent.data.path == str(tmp_path / "data" / "waves.csv")
    found = slipstream.tune(tmp_path / "job.toml", overrides=("data.path=waves.csv",))
    monkeypatch.chdir(tmp_path / "elsewhere")
    more = slipstream.tune(resume=found.run, overrides=("tune.trials=3",))
    assert more.summary["trials"]["finished"] == 3
    assert configs.load(found.run / "best.toml").data.path == str(tmp_path / "data" / "waves.csv")


def test_a_run_goes_on_from_another_folder(tmp_path, monkeypatch):
    settings = make_config(tmp_path).model_dump(exclude={"tune"})
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    settings["data"]["path"] = "waves.csv"
    result = slipstream.train(settings)
    monkeypatch.chdir(tmp_path / "elsewhere")
    again = slipstream.train(resume=result.run, overrides=("train.epochs=3",))
    assert again.summary["epochs"] == 3
    assert slipstream.evaluate(result.run)["metrics"]
