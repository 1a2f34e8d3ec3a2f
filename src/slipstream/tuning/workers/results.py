"""Collects the events and results of several workers in the run of the search."""

from __future__ import annotations

import shutil
from typing import Any

from slipstream import runs
from slipstream.runs import Event, Run
from slipstream.tuning import sharing
from slipstream.tuning.study import TimedStudy, find_best

LOGGED = ("trial", "pack", "recovery", "fallback")
"""Events of workers that the log of the search repeats"""
INTERNAL = ("searched", "begun", "refused")
GIVEN_UP = "its trials are left to the others"


class WorkerResults:
    """Repeats the events of workers as events of the search, and merges their results."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self._results: dict[int, Event] = {}
        """The "searched" event of each worker that has ended"""

    def add(self, worker: int, event: Event) -> None:
        """Log or show an event, with the number of its worker."""
        if event["event"] == "searched":
            self._results[worker] = event
        if event["event"] in INTERNAL:
            return
        if event["event"] in LOGGED:
            values = {key: value for key, value in event.items() if key not in ("event", "at_s")}
            self.run.append(event["event"], **values, worker=worker)
        else:
            self.run.notify(event | {"worker": worker})

    def log(self, worker: int, what: str, **values: Any) -> None:
        """Log that a worker started or died."""
        self.run.append("worker", worker=worker, what=what, **values)

    def merge(self) -> dict[str, Any]:
        """Merge the results. Workers run at the same time, so the longest time in Optuna counts."""
        results = self._results.values()
        return {
            "optuna_s": max((result["optuna_s"] for result in results), default=0.0),
            "packs": sum(result["packs"] for result in results),
        }


def copy_best_model(run: Run, study: TimedStudy) -> None:
    """Copy the model of the best trial from the folder of its worker, if it is on this machine."""
    best = find_best(study.get_trials())
    owner = None if best is None else sharing.get_owner(best)
    for folder in sorted((run.folder / "workers").glob("*")):
        if sharing.read_worker_id(Run(folder)) == owner and (folder / "best").exists():
            with runs.replace_atomically(run.folder / "best") as temporary:
                shutil.copytree(folder / "best", temporary)
