"""Decides who searches (this process, several processes or a Ray cluster) and starts them."""

import errno
import functools
import os
import time
from dataclasses import dataclass
from typing import Any, Literal

from slipstream import config as configs
from slipstream import runs
from slipstream import search_space as spaces
from slipstream.clusters.resources import Bundle
from slipstream.config import Config
from slipstream.errors import UserError
from slipstream.runs import Event, Run, studies
from slipstream.text.passwords import mask_url
from slipstream.tuning import sharing
from slipstream.tuning.budget import SearchBudget
from slipstream.tuning.packing.dataset_cache import DatasetCache
from slipstream.tuning.packing.scheduler import PackScheduler
from slipstream.tuning.search import OptunaSearch
from slipstream.tuning.sharing import StudyMembership
from slipstream.tuning.storage import database, journal, shared
from slipstream.tuning.storage.journal import JOURNAL
from slipstream.tuning.study import TimedStudy, make_distributions, open_study
from slipstream.tuning.workers import processes, ray_cluster
from slipstream.tuning.workers.worker import WorkerTask, copy_best_model, get_budget, run_search
from slipstream.workers import assignment

STUDY_NAME = "search"
"""The name of a study in the run folder; in a shared storage it is the name of the config"""


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
    """What each worker gets of a cluster"""

    def get_storage_url(self, run: Run) -> str | None:
        """Return the URL of the storage, or None for the journal of the run folder."""
        if self.storage is not None:
            return self.storage
        return None if self.uses_journal else shared.find_run_storage(run.folder)

    def open_study(self, run: Run) -> TimedStudy:
        """Open the study; repair a damaged journal, refuse a damaged database."""
        name = STUDY_NAME if self.storage is None else self.config.name
        url = self.get_storage_url(run)
        if url is None:
            path, events = run.folder / JOURNAL, runs.read_events(run)
            distributions = make_distributions(spaces.make_space(self.config))
            for problem in journal.repair(path, name, distributions, events):
                run.append("fallback", what="the study was repaired", why=problem)
        elif self.storage is None:
            database.check_integrity(run.folder)  # of a search that began with one
        elif self.earlier_storage is not None and not shared.has_study(self.storage, name):
            raise UserError(
                f'{run.folder}: its study "{name}" is in {self.earlier_storage}, and not in '
                f"{mask_url(self.storage)}; correct --storage, or {studies.ENV_VARIABLE} in the "
                "environment"
            )
        offset = self._get_seed_offset(run)
        return open_study(self.config, run.folder, url, name, seed_offset=offset)

    @property
    def is_alone(self) -> bool:
        """Whether this process runs the trials"""
        return self.num_workers == 1 and self.cluster is None

    def make_search(
        self, run: Run, study: TimedStudy, datasets: DatasetCache, budget: SearchBudget
    ) -> OptunaSearch:
        """Return the search as this process takes part in it."""
        membership = None
        if self.is_alone and self.get_storage_url(run) is not None:
            membership = StudyMembership(study, sharing.read_worker_id(run))
        return OptunaSearch(self.config, study, run, datasets, membership, budget=budget)

    def run(self, search: OptunaSearch, scheduler: PackScheduler, *, resumed: bool) -> Event:
        """Run the search until no trial is left; return the "searched" event."""
        run, study, budget = search.run, search.study, search.budget
        if self.is_alone:
            if resumed:
                study.study.sampler.reseed_rng()  # else it would sample the same trials again
            return run_search(search, scheduler, resumed=resumed)
        started_at = time.perf_counter()
        for index in range(self.num_workers):
            _refresh_heartbeats(run, study, index)
        tasks = self._make_tasks(run, study, scheduler.pool.parallel, budget)
        if self.bundle is not None:
            recover = functools.partial(_refresh_heartbeats, run, study)
            result = ray_cluster.run_workers(run, tasks, self.bundle, recover)
        else:
            envs = assignment.assign_gpus(self.config, self.num_workers)
            result = processes.run_workers(run, tasks, envs)
        copy_best_model(run, study)
        seconds = budget.spent_s + time.perf_counter() - started_at
        result |= {"seconds": seconds, "asked": get_budget(self.config)}
        run.append("searched", **result)
        return result

    def _make_tasks(
        self, run: Run, study: TimedStudy, parallel: int, budget: SearchBudget
    ) -> list[WorkerTask]:
        url = self.get_storage_url(run)
        assert url is not None
        config = self.config
        if self.bundle is None:
            config = assignment.split_cores(config, self.num_workers)
        else:  # workers on a cluster have another environment
            config = self.bundle.limit_threads(config)
            url = shared.add_password(url)
        config_toml = configs.to_toml(config)
        return [
            WorkerTask(
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
    earlier = {} if resumed is None else _find_start_event(resumed)
    if storage is None and resumed is None:
        storage = os.environ.get(studies.ENV_VARIABLE) or None
    elif storage is None and resumed is not None and earlier.get("storage"):
        storage = studies.find_storage(earlier["storage"])
        if storage is None:
            raise UserError(studies.explain_missing(resumed.folder, earlier["storage"]))
    if storage is not None:
        folder = resumed.folder if resumed and not earlier.get("storage") else None
        for name in (JOURNAL, *shared.RUN_FILES) if folder else ():
            if folder and (folder / name).exists():
                raise UserError(
                    f"{folder}: its study is in {name}, not in {mask_url(storage)}; leave out "
                    f"--storage and resume with: slipstream tune --resume {folder}"
                )
        storage = shared.make_absolute(storage)
    on = on or earlier.get("on")
    few = "auto" if on == "ray" else 1
    requested = earlier.get("workers", few) if workers is None else workers
    assignment.check_count(requested)
    bundle = None
    if on == "ray":
        num_workers, bundle = ray_cluster.choose_workers(requested, storage, config)
    else:
        num_workers = assignment.count_workers(requested, config)
    several = num_workers > 1 or on is not None
    if several:
        assignment.check_config(config, data)
    uses_journal = not several
    if resumed is not None and storage is None:
        uses_journal = _resumes_journal(resumed, several=several)
    if storage is not None:
        shared.check_storage(storage)
    return Launcher(config, num_workers, on, storage, earlier.get("storage"), uses_journal, bundle)


def _find_start_event(run: Run) -> Event:
    """Return the last event that describes the workers and the storage; {} if none was written."""
    opening = (event for event in runs.read_events(run) if event["event"] in ("search", "resume"))
    described = [event for event in opening if "workers" in event]
    return described[-1] if described else {}


def check_logged(run: Run) -> None:
    """Raise an OSError if the log lacks the start event, which a resumed search needs."""
    if not _find_start_event(run):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(run.log))


def _resumes_journal(run: Run, *, several: bool) -> bool:
    """Whether a search that is resumed without --storage has its study in a journal."""
    has_journal = (run.folder / JOURNAL).exists()
    if has_journal and several:
        raise UserError(
            f"{run.folder}: its study is in {JOURNAL}, which only one process may write to; start "
            f"a new search, or resume with: slipstream tune --resume {run.folder} --workers 1"
        )
    # a search that was killed before it had a study creates one now
    return has_journal or not (several or shared.has_run_storage(run.folder))
