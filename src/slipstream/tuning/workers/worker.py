"""What one worker does: ask the study for trials and train them until there are none left. The
launching process collects the events and results of several workers in the run of the search."""

import shutil
import time
import tomllib
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from optuna.exceptions import StorageInternalError

from slipstream import config as configs
from slipstream import runs
from slipstream.config import Config
from slipstream.errors import Interrupted, ResumableError
from slipstream.errors.stop_signals import catch_signals
from slipstream.models import permission
from slipstream.runs import Event, Run
from slipstream.runs.studies import is_journal
from slipstream.text.passwords import mask_secrets, mask_url
from slipstream.tuning import sharing
from slipstream.tuning.budget import ModelCosts, SearchBudget
from slipstream.tuning.packing.dataset_cache import DatasetCache
from slipstream.tuning.packing.scheduler import PackScheduler
from slipstream.tuning.search import OptunaSearch
from slipstream.tuning.sharing import StudyMembership
from slipstream.tuning.storage.database import HEARTBEAT
from slipstream.tuning.study import TimedStudy, open_study, rank_trials
from slipstream.workers.child import REFUSED, STOPPED

PAUSE_S = 1.0
"""Between checks whether other workers have released trials"""
LOGGED = ("trial", "pack", "recovery", "fallback")
"""Events of workers that the log of the search repeats"""
COSTS = ("model_s", "score_s")
"""What a "searched" event says of one model: the seconds to train it, and to predict with it"""
INTERNAL = ("begun", REFUSED, STOPPED)
GIVEN_UP = f"the others retry its unfinished trials in about {HEARTBEAT[1]} s"


@dataclass(frozen=True)
class WorkerTask:
    """What a worker process is started with; plain values, since they travel as JSON."""

    folder: str
    """The worker's own run folder"""
    index: int
    config_toml: str
    storage_url: str
    study_name: str
    parallel: int
    seed_offset: int = 0
    """Added to the seed of the sampler"""
    spent_s: float = 0.0
    """The time that the search has taken so far"""
    setup_s: float = 0.0
    """What its start-up and loading took"""
    heartbeat: tuple[int, int] = HEARTBEAT


def run_search(search: OptunaSearch, scheduler: PackScheduler, *, resumed: bool) -> Event:
    """Train trials until neither this worker nor another one has any left.

    Returns the "searched" event, even if it could not be written to the log. The scheduler may
    have packs left, of what is retrained after the search.
    """
    membership = search.membership
    with membership.send_heartbeats(search.running) if membership else nullcontext():
        if resumed:
            search.resume_interrupted()
        scheduler.train(search.is_finished)
        while membership and not search.is_over() and membership.others_are_busy():
            with catch_signals() as stop:
                time.sleep(PAUSE_S)
            if stop.requested:
                raise Interrupted("stopped", signal_number=stop.signal_number)
            scheduler.train()
    result = {
        "seconds": time.perf_counter() - search.started_at,  # includes earlier parts
        "optuna_s": search.study.spent_s,
        "packs": scheduler.num_packs,
        **describe_costs(search.costs.estimate_model()),
        "asked": get_budget(search.config),
    }
    search.run.append("searched", **result)
    return result


def describe_costs(costs: ModelCosts | None) -> dict[str, float | None]:
    """Return the costs of a model as a "searched" event has them."""
    return dict(zip(COSTS, costs or (None, None), strict=True))


def parse_costs(event: Event) -> ModelCosts | None:
    """Return the costs of a "searched" event; None where no model had an epoch."""
    train_s, score_s = (event.get(name) for name in COSTS)
    return None if train_s is None else ModelCosts(train_s, score_s or 0.0)


def get_budget(config: Config) -> dict[str, Any]:
    """Return the limits of the search, which a resumed search may raise."""
    return {"trials": config.tune.trials, "minutes": config.tune.minutes}


def run_worker(task: WorkerTask, watch: Callable[[Event], None] | None) -> None:
    """Run one of several workers from start to end."""
    folder = Path(task.folder)
    folder.mkdir(parents=True, exist_ok=True)
    run = Run(folder, watch)
    config = configs.load(tomllib.loads(task.config_toml))
    permission.allow_classes(config)  # the launching process has checked the permission
    with runs.lock_run(run):
        try:
            options: Any = {"seed_offset": task.seed_offset, "heartbeat": task.heartbeat}
            study = open_study(config, folder, task.storage_url, task.study_name, **options)
            run.append("begun", worker=task.index)
            membership = StudyMembership(study, sharing.read_worker_id(run))
            if any(membership.owns(trial) for trial in study.get_trials()):
                study.study.sampler.reseed_rng()  # else it would sample the same trials again
            budget = SearchBudget.of(
                config, task.spent_s, time.perf_counter(), setup_s=task.setup_s
            )
            search = OptunaSearch(
                config, study, run, DatasetCache(config), membership, budget=budget
            )
            scheduler = PackScheduler(run, search.datasets, search, parallel=task.parallel)
            run_search(search, scheduler, resumed=True)
        except StorageInternalError as error:
            raise make_storage_error(task.storage_url, error) from None


def make_storage_error(url: str | None, error: StorageInternalError) -> ResumableError:
    """Explain that the storage stopped answering."""
    reason = mask_secrets(str(error.__cause__ or error).split("\n", 1)[0], url)
    storage = "the study" if url is None else mask_url(url)
    what = "the database no longer answers"
    if url is not None and is_journal(url):
        what = "the journal can no longer be read or written"
    return ResumableError(f"{storage}: {what} ({reason})")


class WorkerResults:
    """Repeats the events of workers as events of the search, and merges their results."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self._results: dict[int, Event] = {}
        """The "searched" event of each worker that has ended"""
        self._lost: set[str] = set()
        """What was logged of trials whose worker may have ended"""

    def add(self, worker: int, event: Event) -> None:
        """Log or show an event, with the number of its worker."""
        kind = event["event"]
        if kind == "fallback" and event["why"].startswith(sharing.SILENT):
            if event["what"] in self._lost:
                return  # all workers notice it
            self._lost.add(event["what"])
        if kind == "searched":
            self._results[worker] = event
        elif kind in LOGGED:
            values = {key: value for key, value in event.items() if key not in ("event", "at_s")}
            self.run.append(kind, **values, worker=worker)
        elif kind not in INTERNAL:
            self.run.notify(event | {"worker": worker})

    def log(self, worker: int, what: str, **values: Any) -> None:
        """Log that a worker started or died."""
        self.run.append("worker", worker=worker, what=what, **values)

    def merge(self) -> dict[str, Any]:
        """Merge the results. Workers run at the same time, so the longest time in Optuna counts."""
        results = self._results.values()
        known = [costs for costs in map(parse_costs, results) if costs is not None]
        return {
            "optuna_s": max((result["optuna_s"] for result in results), default=0.0),
            "packs": sum(result["packs"] for result in results),
            **describe_costs(max(known, default=None)),
        }


def copy_best_model(run: Run, study: TimedStudy) -> None:
    """Copy the model of the best trial from the folder of its worker, if it is on this machine."""
    ranked = rank_trials(study.get_trials())
    owner = sharing.get_owner(ranked[0]) if ranked else None
    for folder in sorted((run.folder / "workers").glob("*")):
        if sharing.read_worker_id(Run(folder)) == owner and (folder / "best").exists():
            with runs.replace_atomically(run.folder / "best") as temporary:
                shutil.copytree(folder / "best", temporary)
