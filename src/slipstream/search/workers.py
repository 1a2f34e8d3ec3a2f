"""The workers of a search.

From top to bottom: what one worker does (`SearchTask`, `run_worker`), its events as events of the
search (`WorkerResults`), and the search that opens the study and starts the workers (`Launcher`).
"""

from __future__ import annotations

import errno
import functools
import os
import shutil
import time
import tomllib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

from optuna.exceptions import StorageInternalError

from slipstream import config as configs
from slipstream import runs
from slipstream.base.errors import Command, Interrupted, Option, ResumableError, UserError
from slipstream.base.signals import catch_signals
from slipstream.base.text import mask_secrets, mask_url
from slipstream.config import Config
from slipstream.config import search_space as spaces
from slipstream.events import (
    Epoch,
    Event,
    Fallback,
    Other,
    PackStart,
    Recovery,
    SearchEnd,
    SearchStart,
    TrialEnd,
    WorkerChange,
    WorkerStart,
)
from slipstream.models import custom
from slipstream.runs import Run, studies
from slipstream.runs.studies import is_journal
from slipstream.search import database, sharing
from slipstream.search import storage as storages
from slipstream.search.budget import ModelCosts, SearchBudget
from slipstream.search.candidates import AutoBudget, AutoPlan, AutoSearch
from slipstream.search.database import HEARTBEAT
from slipstream.search.packs import DatasetCache, PackScheduler
from slipstream.search.sharing import StudyMembership
from slipstream.search.storage import JOURNAL
from slipstream.search.study import TimedStudy, make_distributions, open_study, rank_trials
from slipstream.search.trials import OptunaSearch
from slipstream.workers import ray, resources
from slipstream.workers.child import Send, WorkerTask
from slipstream.workers.launcher import STDERR, LocalWorkers, RestartRules, Workers, run_workers
from slipstream.workers.resources import Bundle, WorkerCount

STUDY_NAME = "search"
"""The name of a study in the run folder; in a shared storage it is the name of the config"""
PAUSE_S = 1.0
"""Between checks whether other workers have released trials"""
GIVEN_UP = f"the others retry its unfinished trials in about {HEARTBEAT[1]} s"


@dataclass(frozen=True)
class SearchTask(WorkerTask):
    """One worker of a search, by its run folder and number: what it is started with."""

    cluster_events: ClassVar = (TrialEnd, PackStart, Epoch, Recovery, Fallback, SearchEnd)
    config_toml: str
    storage_url: str
    study_name: str
    parallel: int
    seed_offset: int = 0
    """Added to the seed of the sampler"""
    spent_s: float = 0.0
    """The time that the search has taken so far"""
    setup_s: float = 0.0
    """Seconds of its start-up and loading"""
    heartbeat: tuple[int, int] = HEARTBEAT

    def run(self, send: Send) -> None:
        run_worker(self, send)

    def mask(self, text: str) -> str:
        return mask_secrets(text, self.storage_url)


def run_search(search: OptunaSearch, scheduler: PackScheduler, *, resumed: bool) -> SearchEnd:
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
    result = add_costs(
        SearchEnd(
            seconds=time.perf_counter() - search.started_at,  # includes earlier parts
            optuna_s=search.study.spent_s,
            packs=scheduler.num_packs,
            limits=get_budget(search.config),
        ),
        search.costs.estimate_model(),
    )
    search.run.append(result)
    return result


def add_costs(event: SearchEnd, costs: ModelCosts | None) -> SearchEnd:
    """Return the event with the costs of a model."""
    if costs is None:
        return event
    return replace(event, model_s=costs.train_s, score_s=costs.score_s)


def get_costs(event: SearchEnd) -> ModelCosts | None:
    """Return the costs of a model that an event states; None where no model had an epoch."""
    return None if event.model_s is None else ModelCosts(event.model_s, event.score_s or 0.0)


def get_budget(config: Config) -> dict[str, Any]:
    """Return the limits of the search, which a resumed search may raise."""
    return {"trials": config.tune.trials, "minutes": config.tune.minutes}


def run_worker(task: SearchTask, watch: Callable[[Event], None] | None) -> None:
    """Run one of several workers from start to end."""
    folder = Path(task.folder)
    folder.mkdir(parents=True, exist_ok=True)
    run = Run(folder, watch)
    config = configs.load(tomllib.loads(task.config_toml))
    custom.allow_classes(config)  # the launching process has checked the permission
    with runs.lock_run(run):
        try:
            options: Any = {"seed_offset": task.seed_offset, "heartbeat": task.heartbeat}
            study = open_study(config, folder, task.storage_url, task.study_name, **options)
            run.append(WorkerStart(worker=task.index))
            membership = StudyMembership(study, sharing.read_worker_id(run))
            if any(membership.owns(trial) for trial in study.get_trials()):
                study.study.sampler.reseed_rng()  # else it would sample the same trials again
            plan = AutoPlan.read(folder.parent.parent)
            datasets, clock = DatasetCache(config), time.perf_counter()
            options = {"setup_s": task.setup_s}
            search: OptunaSearch
            if plan is None:
                budget = SearchBudget.of(config, task.spent_s, clock, **options)
                search = OptunaSearch(config, study, run, datasets, membership, budget=budget)
            else:
                budget = AutoBudget.of(config, task.spent_s, clock, **options)
                search = AutoSearch(config, study, run, datasets, membership, budget=budget)
                search.start_auto(plan)
            scheduler = PackScheduler(run, search.datasets, search, parallel=task.parallel)
            run_search(search, scheduler, resumed=True)
        except StorageInternalError as error:
            raise make_storage_error(task.storage_url, error) from None


def make_storage_error(url: str | None, error: StorageInternalError) -> ResumableError:
    """Explain that the storage stopped answering."""
    reason = mask_secrets(str(error.__cause__ or error).split("\n", 1)[0], url)
    storage = "the study" if url is None else mask_url(url)
    problem = "the database no longer answers"
    if url is not None and is_journal(url):
        problem = "the journal can no longer be read or written"
    return ResumableError(f"{storage}: {problem} ({reason})")


class WorkerResults:
    """Repeats the events of workers as events of the search, and merges their results."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self._results: dict[int, SearchEnd] = {}
        """By worker that has ended: its last event"""
        self._lost: set[str] = set()
        """Logged texts about trials whose worker may have ended"""

    def add(self, worker: int, event: Event) -> None:
        """Log or show an event, with the number of its worker."""
        if isinstance(event, Fallback) and event.why.startswith(sharing.SILENT):
            if event.what in self._lost:
                return  # all workers notice it
            self._lost.add(event.what)
        match event:
            case SearchEnd():
                self._results[worker] = event
            case TrialEnd() | PackStart() | Recovery() | Fallback():
                self.run.append(replace(event, worker=worker))
            case WorkerStart() | Other():
                pass  # of no interest here; an error of the worker is in its outcome
            case _:
                change = {"worker": worker} if hasattr(event, "worker") else {}
                self.run.notify(replace(event, **change))

    def log(self, slot: int, task: WorkerTask, what: str, **values: Any) -> None:
        self.run.append(WorkerChange(worker=task.index, what=what, **values))

    def merge(self, *, seconds: float, limits: dict[str, Any]) -> SearchEnd:
        """Merge the results. Workers run at the same time, so the longest time in Optuna counts."""
        results = self._results.values()
        known = [costs for costs in map(get_costs, results) if costs is not None]
        merged = SearchEnd(
            seconds=seconds,
            optuna_s=max((result.optuna_s or 0.0 for result in results), default=0.0),
            packs=sum(result.packs or 0 for result in results),
            limits=limits,
        )
        return add_costs(merged, max(known, default=None))


def copy_best_model(run: Run, study: TimedStudy) -> None:
    """Copy the model of the best trial from the folder of its worker, if it is on this machine."""
    ranked = rank_trials(study.get_trials())
    owner = sharing.get_owner(ranked[0]) if ranked else None
    for folder in sorted((run.folder / "workers").glob("*")):
        if sharing.read_worker_id(Run(folder)) == owner and (folder / "best").exists():
            with runs.replace_atomically(run.folder / "best") as temporary:
                shutil.copytree(folder / "best", temporary)


def choose_workers(
    requested: WorkerCount, storage: str | None, config: Config
) -> tuple[int, Bundle]:
    """Return the number of workers and what each gets; "auto" is one per GPU or, without GPUs, one
    per machine. Raise a UserError where the cluster cannot have as many."""
    nodes = ray.list_nodes()
    if len(nodes) > 1 and (storage is None or storages.needs_one_machine(storage)):
        raise UserError(
            Option("on", "ray")
            + f": the cluster has {len(nodes)} machines, which need a study that all of them "
            "reach; give "
            + Option("storage", "postgresql://...")
            + " or, on a shared drive, journal:FILE"
        )
    num_workers = resources.count_ray_workers(requested, nodes, config.engine.device)
    return num_workers, resources.choose_bundle(num_workers, nodes, config.engine.device)


def run_search_workers(
    run: Run,
    tasks: Sequence[SearchTask],
    opened: AbstractContextManager[Workers],
    recover: Callable[[int], None],
) -> WorkerResults:
    """Run the workers until no trial is left; return their results.

    `recover` is called with the number of a worker that has died, before it is started again.
    """
    results = WorkerResults(run)
    rules = RestartRules(progress=(TrialEnd,), given_up=GIVEN_UP, recover=recover)
    with opened as workers:
        outcomes = run_workers(workers, tasks, rules, results)
    if all(outcome.kind != "done" for outcome in outcomes.values()):
        raise ResumableError(
            f"every worker died ({outcomes[0].reason}; see {run.folder}/workers/*/{STDERR})"
        )
    return results


@dataclass(frozen=True)
class Launcher:
    """The workers of a search, and the storage of their study."""

    config: Config
    num_workers: int = 1
    cluster: Literal["ray"] | None = None
    storage: str | None = None
    """The URL of the storage that the user named; without one, the study is in the run folder"""
    earlier_storage: str | None = None
    """Where the study of a resumed search was, as its log says: it has to be in `storage`"""
    uses_journal: bool = True
    """The study is in the journal of the run folder, which only one process may write to"""
    bundle: Bundle | None = None
    """The resources of a cluster that each worker gets"""

    def get_storage_url(self, run: Run) -> str | None:
        """Return the URL of the storage, or None for the journal of the run folder."""
        if self.storage is not None:
            return self.storage
        return None if self.uses_journal else storages.find_run_storage(run.folder)

    def open_study(self, run: Run, *, enqueue_given: bool = True) -> TimedStudy:
        """Open the study; repair a damaged journal, refuse a damaged database. A new one begins
        with the given config."""
        name = STUDY_NAME if self.storage is None else self.config.name
        url = self.get_storage_url(run)
        if url is None:
            path, events = run.folder / JOURNAL, runs.read_events(run)
            distributions = make_distributions(spaces.make_space(self.config))
            for problem in storages.repair(path, name, distributions, events):
                run.append(Fallback(what="the study was repaired", why=problem))
        elif self.storage is None:
            database.check_integrity(run.folder)  # of a search that began with one
        elif self.earlier_storage is not None and not storages.has_study(self.storage, name):
            raise UserError(
                f'{run.folder}: its study "{name}" is in {self.earlier_storage}, and not in '
                f"{mask_url(self.storage)}; correct "
                + Option("storage")
                + f", or {studies.ENV_VARIABLE} in the environment"
            )
        offset = self._get_seed_offset(run)
        study = open_study(self.config, run.folder, url, name, seed_offset=offset)
        if enqueue_given:
            study.enqueue_given(self.config)
        return study

    @property
    def is_alone(self) -> bool:
        """Whether this process runs the trials"""
        return self.num_workers == 1 and self.cluster is None

    def make_search(
        self,
        run: Run,
        study: TimedStudy,
        datasets: DatasetCache,
        budget: SearchBudget,
        plan: AutoPlan | None = None,
    ) -> OptunaSearch:
        """Return the search as this process takes part in it; with a plan, that of `auto`."""
        membership = None
        if self.is_alone and self.get_storage_url(run) is not None:
            membership = StudyMembership(study, sharing.read_worker_id(run))
        if plan is None:
            return OptunaSearch(self.config, study, run, datasets, membership, budget=budget)
        search = AutoSearch(self.config, study, run, datasets, membership, budget=budget)
        search.start_auto(plan)
        return search

    def run(self, search: OptunaSearch, scheduler: PackScheduler, *, resumed: bool) -> SearchEnd:
        """Run the search until no trial is left; return the event of its end."""
        run, study, budget = search.run, search.study, search.budget
        if self.is_alone:
            if resumed:
                study.study.sampler.reseed_rng()  # else it would sample the same trials again
            return run_search(search, scheduler, resumed=resumed)
        started_at = time.perf_counter()
        for index in range(self.num_workers):
            _refresh_heartbeats(run, study, index)
        tasks = self._make_tasks(run, study, scheduler.pool.parallel, budget)
        workers: AbstractContextManager[Workers]
        if self.bundle is not None:
            workers = ray.RayWorkers(run, tasks, self.bundle)
        else:
            workers = LocalWorkers(resources.assign_gpus(self.config, self.num_workers))
        recover = functools.partial(_refresh_heartbeats, run, study)
        results = run_search_workers(run, tasks, workers, recover)
        copy_best_model(run, study)
        seconds = budget.spent_s + time.perf_counter() - started_at
        result = results.merge(seconds=seconds, limits=get_budget(self.config))
        run.append(result)
        return result

    def _make_tasks(
        self, run: Run, study: TimedStudy, parallel: int, budget: SearchBudget
    ) -> list[SearchTask]:
        url = self.get_storage_url(run)
        assert url is not None
        config = self.config
        if self.bundle is None:
            config = resources.split_cores(config, self.num_workers)
        else:  # workers on a cluster have another environment
            config = self.bundle.limit_threads(config)
            url = storages.add_password(url)
        config_toml = configs.to_toml(config)
        return [
            SearchTask(
                folder=str(run.folder / "workers" / str(index)),
                index=index,
                config_toml=config_toml,
                storage_url=url,
                study_name=study.study.study_name,
                parallel=parallel,
                seed_offset=self._get_seed_offset(run) + index,
                spent_s=budget.elapsed_s,
                setup_s=budget.setup_s,
            )
            for index in range(self.num_workers)
        ]

    def _get_seed_offset(self, run: Run) -> int:
        """Return a number for the sampler's seed that differs on each machine."""
        return 0 if self.storage is None else int(sharing.read_worker_id(run)[:6], 16)


def _refresh_heartbeats(run: Run, study: TimedStudy, index: int) -> None:
    """Record a heartbeat for the trials of a worker that is about to start again."""
    folder = run.folder / "workers" / str(index)
    with suppress(StorageInternalError):  # the worker itself says that the storage does not answer
        if folder.exists():
            sharing.refresh_heartbeats(study, [sharing.read_worker_id(Run(folder))])


def make_launcher(
    config: Config,
    data: Any,
    resumed: Run | None = None,
    *,
    storage: str | None = None,
    workers: int | Literal["auto"] | None = None,
    on: Literal["ray"] | None = None,
) -> Launcher:
    """Check the requested workers and storage, or take those of the resumed search."""
    earlier = None if resumed is None else _find_start_event(resumed)
    earlier_storage = None if earlier is None else earlier.storage
    if storage is None and resumed is None:
        storage = os.environ.get(studies.ENV_VARIABLE) or None
    elif storage is None and resumed is not None and earlier_storage:
        storage = studies.find_storage(earlier_storage)
        if storage is None:
            raise UserError(studies.explain_missing(resumed.folder, earlier_storage))
    if storage is not None:
        folder = resumed.folder if resumed and not earlier_storage else None
        for name in (JOURNAL, *storages.RUN_FILES) if folder else ():
            if folder and (folder / name).exists():
                raise UserError(
                    f"{folder}: its study is in {name}, not in {mask_url(storage)}; leave out "
                    + Option("storage")
                    + " and"
                    + " resume with: "
                    + Command("tune", resume=folder)
                )
        storage = storages.make_absolute(storage)
    if on is None and earlier is not None and earlier.on == "ray":
        on = "ray"
    requested: WorkerCount = "auto" if on == "ray" else 1
    if workers is not None:
        requested = workers
    elif earlier is not None and earlier.workers is not None:
        requested = earlier.workers
    resources.check_count(requested)
    bundle = None
    if on == "ray":
        num_workers, bundle = choose_workers(requested, storage, config)
    else:
        num_workers = resources.count_workers(requested, config)
    several = num_workers > 1 or on is not None
    if several:
        resources.check_config(config, data)
    uses_journal = not several
    if resumed is not None and storage is None:
        uses_journal = _resumes_journal(resumed, several=several)
    if storage is not None:
        storages.check_storage(storage)
    return Launcher(config, num_workers, on, storage, earlier_storage, uses_journal, bundle)


def _find_start_event(run: Run) -> SearchStart | None:
    """Return the last event that describes the workers and the storage; None if none was
    written."""
    for event in reversed(list(runs.read_events(run))):
        if isinstance(event, SearchStart) and event.workers is not None:
            return event
    return None


def check_logged(run: Run) -> None:
    """Raise an OSError if the log lacks the start event, which a resumed search needs."""
    if _find_start_event(run) is None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(run.log))


def _resumes_journal(run: Run, *, several: bool) -> bool:
    """Whether a search that is resumed without --storage has its study in a journal."""
    has_journal = (run.folder / JOURNAL).exists()
    if has_journal and several:
        raise UserError(
            f"{run.folder}: its study is in {JOURNAL}, which only one process may write to; "
            "start a new search, or resume with: " + Command("tune", resume=run.folder, workers=1)
        )
    # a search that was killed before it had a study creates one now
    return has_journal or not (several or storages.has_run_storage(run.folder))
