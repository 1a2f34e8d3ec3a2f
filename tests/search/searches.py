"""Helpers for tests of several workers: a small search, and worker processes that can be killed."""

from __future__ import annotations

import queue
import signal
import time
from pathlib import Path
from typing import Any

import optuna
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
from optuna.trial import FrozenTrial, TrialState

import slipstream
from slipstream import config as configs
from slipstream.config import Config
from slipstream.events.parsing import name_event
from slipstream.runs import Run
from slipstream.search import api, sharing
from slipstream.search.storage import NOTES
from slipstream.search.study import open_study
from slipstream.search.summary import FinishedSearch
from slipstream.search.workers import SearchTask
from slipstream.workers.launcher import Message, Outcome, WorkerProcess
from tests.conftest import HUNG_S, small_config, waves
from tests.logs import Line, as_lines


def make_config(folder: Path, *, trials: int = 6, epochs: int = 2, **tune: Any) -> Config:
    """Return the config of a search over the learning rate, with the data in a file."""
    path = folder / "waves.csv"
    if not path.exists():
        pyarrow.csv.write_csv(waves(), path)
    space = {"train.lr": {"low": 1e-3, "high": 1e-2, "log": True}}
    return small_config(
        folder / "runs",
        name="several",
        data={"path": str(path)},
        train={"epochs": epochs, "patience": "off"},
        tune={
            "trials": trials,
            "retrain": 0,
            "sampler": "random",
            "pruner": "none",
            "space": space,
            **tune,
        },
    )


SPACE = {
    "train.lr": {"low": 1e-3, "high": 3e-2, "log": True},
    "model.hidden": [4, 8],
    "train.batch": [16, 32],
}


def make_settings(folder: Path, table: Any = None, **sections: Any) -> dict[str, Any]:
    """Return the settings of a search that takes a second or two."""
    path = folder / "waves.parquet"
    if not path.exists():
        pq.write_table(table if table is not None else waves(400), path)
    settings: dict[str, Any] = {
        "name": "s",
        "out": str(folder / "runs"),
        "data": {"path": str(path), "context": 8, "horizon": 2},
        "model": {"hidden": 8, "layers": 1, "dropout": 0.0},
        "train": {"epochs": 3, "batch": 32, "lr": 0.01},
        "engine": {"device": "cpu", "monitor": False, "plan": "off", "threads": 1},
        "tune": {"trials": 6, "retrain": 0, "pruner": "none", "space": SPACE},
    }
    for section, values in sections.items():
        settings[section] = settings[section] | values
    return settings


def make_trial(
    number: int, state: TrialState, value: float | None = None, **notes: Any
) -> FrozenTrial:
    """Return a trial that has ended, with what is noted about it."""
    trial = optuna.trial.create_trial(
        state=state, value=value, user_attrs={NOTES: notes}, intermediate_values={0: 9.0}
    )
    trial.number = number
    return trial


def run_search(settings: Any, **how: Any) -> tuple[FinishedSearch, list[Line]]:
    """Return the study, and the events of the search."""
    events: list[Line] = []
    return api.tune(settings, watch=as_lines(events.append), **how), events


def get_trials(study: FinishedSearch) -> list[FrozenTrial]:
    return study.study.get_trials(deepcopy=False)


def check_same_results(study: FinishedSearch, whole: FinishedSearch) -> None:
    """Compare an interrupted search with an uninterrupted one."""
    assert len(get_trials(study)) == len(get_trials(whole))
    for one, other in zip(get_trials(study), get_trials(whole), strict=True):
        assert one.params == other.params
        assert one.state == other.state
        assert one.value == pytest.approx(other.value, rel=1e-6)
        assert one.intermediate_values.keys() == other.intermediate_values.keys()
    assert study.summary["best"] == whole.summary["best"] | {
        "value": pytest.approx(whole.summary["best"]["value"], rel=1e-6)
    }


class WorkerGroup:
    """Worker processes that are not restarted."""

    def __init__(self, config: Config, url: str, folder: Path, *, parallel: int) -> None:
        self.study = open_study(config, folder, url, "several")
        self.events: queue.Queue[tuple[int, Message]] = queue.Queue()
        self.url, self.folder, self.parallel = url, folder, parallel
        self.config_toml = configs.to_toml(config)
        self.workers: list[WorkerProcess] = []

    def start(self) -> WorkerProcess:
        index = len(self.workers)
        task = SearchTask(
            folder=str(self.folder / f"worker-{index}"),
            index=index,
            config_toml=self.config_toml,
            storage_url=self.url,
            study_name="several",
            parallel=self.parallel,
            seed_offset=index,
            heartbeat=(1, 8),
        )
        self.workers.append(WorkerProcess(task, {}, self.events))
        return self.workers[-1]

    def wait_for(self, index: int, event: str | None) -> None:
        """Wait for an event of a worker; None is the end of its process."""
        until = time.monotonic() + HUNG_S
        while True:
            worker, received = self.events.get(timeout=max(until - time.monotonic(), 0.1))
            if worker != index:
                continue
            name = name_event(received) if isinstance(received, slipstream.events.Event) else None
            has_ended = isinstance(received, Outcome)
            if has_ended if event is None else name == event:
                return
            assert not has_ended, "the worker ended before"

    def kill(self) -> None:
        for worker in self.workers:
            worker.kill()

    def read_id(self, index: int) -> str:
        return sharing.read_worker_id(Run(self.folder / f"worker-{index}"))


def check_that_trials_of_a_killed_worker_are_retried(
    config: Config, url: str, folder: Path
) -> None:
    """Kill one of two workers; the other one retries its trials once, and all finish."""
    group = WorkerGroup(config, url, folder, parallel=3)
    try:
        killed = group.start()
        group.start()
        group.wait_for(0, "epoch")
        killed.send_signal(signal.SIGKILL)
        group.wait_for(1, None)
        assert group.workers[1].process.returncode == 0
    finally:
        group.kill()
    trials = group.study.get_trials()
    counted = sharing.select_counted(trials)
    assert len(counted) == sharing.count_started(trials) == config.tune.trials
    assert {trial.state for trial in counted} == {TrialState.COMPLETE}
    lost = [one for one in trials if one not in counted and not sharing.is_surplus(one)]
    assert lost, "the worker was killed while trials ran"
    assert {(one.state, sharing.get_owner(one)) for one in lost} == {
        (TrialState.FAIL, group.read_id(0))
    }
    for one in lost:
        retries = list_retries(one, trials)
        assert len(retries) == 1
        assert retries[0].params == one.params
        assert sharing.get_owner(retries[0]) == group.read_id(1)
    assert sum(map(sharing.is_retry, trials)) == len(lost)


def list_retries(one: FrozenTrial, trials: list[FrozenTrial]) -> list[FrozenTrial]:
    return [t for t in trials if one.number in t.system_attrs.get("retry_history", ())]
