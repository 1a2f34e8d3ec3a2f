"""What tests of several workers share: a small search, real processes, one that is killed."""

from __future__ import annotations

import queue
import signal
import time
from pathlib import Path
from typing import Any

import pyarrow.csv
from optuna.trial import FrozenTrial, TrialState

from slipstream import config as configs
from slipstream.config import Config
from slipstream.runs import Run
from slipstream.tuning import sharing
from slipstream.tuning.workers import worker as work
from slipstream.tuning.workers.processes import WorkerEvent, WorkerProcess
from slipstream.tuning.workers.worker import WorkerTask
from tests.conftest import HUNG_S, small_config, waves


def job(folder: Path, *, trials: int = 6, epochs: int = 2, **tune: Any) -> Config:
    """A search over the learning rate, of data in a file."""
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


class Crowd:
    """Workers that nobody starts again."""

    def __init__(self, config: Config, url: str, folder: Path, *, parallel: int) -> None:
        self.board = work.open_timed_study(config, folder, url, "several")
        self.said: queue.Queue[WorkerEvent] = queue.Queue()
        self.url, self.folder, self.parallel = url, folder, parallel
        self.settings = configs.to_toml(config)
        self.workers: list[WorkerProcess] = []

    def start(self) -> WorkerProcess:
        index = len(self.workers)
        task = WorkerTask(
            folder=str(self.folder / f"worker-{index}"),
            index=index,
            config_toml=self.settings,
            storage_url=self.url,
            study_name="several",
            parallel=self.parallel,
            seed_offset=index,
            heartbeat_s=1,
            grace_period_s=8,
        )
        self.workers.append(WorkerProcess(task, {}, self.said))
        return self.workers[-1]

    def wait_for(self, index: int, event: str | None) -> None:
        """Until a worker says so; None is its end."""
        until = time.monotonic() + HUNG_S
        while True:
            said = self.said.get(timeout=max(until - time.monotonic(), 0.1))
            if said.worker == index and (said.event or {}).get("event") == event:
                return
            assert said.worker != index or said.event is not None, "it ended before"

    def end(self) -> None:
        for worker in self.workers:
            worker.kill()

    def owner(self, index: int) -> str:
        return sharing.read_worker_id(Run(self.folder / f"worker-{index}"))


def one_of_two_is_killed(config: Config, url: str, folder: Path) -> None:
    """Its trials are retried once, by the other one, and all are finished."""
    crowd = Crowd(config, url, folder, parallel=3)
    try:
        doomed = crowd.start()
        crowd.start()
        crowd.wait_for(0, "epoch")
        doomed.send_signal(signal.SIGKILL)
        crowd.wait_for(1, None)
        assert crowd.workers[1].process.returncode == 0
    finally:
        crowd.end()
    trials = crowd.board.get_trials()
    counted = sharing.select_counted(trials)
    assert len(counted) == sharing.count_started(trials) == config.tune.trials
    assert {trial.state for trial in counted} == {TrialState.COMPLETE}
    lost = [one for one in trials if one not in counted and not sharing.is_surplus(one)]
    assert lost, "it was killed with trials under way"
    assert {(one.state, sharing.get_owner(one)) for one in lost} == {
        (TrialState.FAIL, crowd.owner(0))
    }
    for one in lost:
        again = retries_of(one, trials)
        assert len(again) == 1
        assert again[0].params == one.params
        assert sharing.get_owner(again[0]) == crowd.owner(1)
    assert sum(map(sharing.is_retry, trials)) == len(lost)


def retries_of(one: FrozenTrial, trials: list[FrozenTrial]) -> list[FrozenTrial]:
    return [t for t in trials if one.number in t.system_attrs.get("retry_history", ())]
