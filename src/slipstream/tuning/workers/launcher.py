"""Who searches: this process alone, several of this machine, or a Ray cluster."""

from __future__ import annotations

import errno
import os
import time
from dataclasses import dataclass
from typing import Any, Literal

from slipstream import config as configs
from slipstream import runs
from slipstream.config import Config
from slipstream.errors import UserError
from slipstream.runs import Event, Run
from slipstream.tuning import sharing
from slipstream.tuning import space as spaces
from slipstream.tuning.packing.dataset_cache import DatasetCache
from slipstream.tuning.search import OptunaSearch
from slipstream.tuning.sharing import StudyMembership
from slipstream.tuning.storage import database, journal
from slipstream.tuning.storage import url as address
from slipstream.tuning.storage.url import mask_url
from slipstream.tuning.study import JOURNAL, TimedStudy
from slipstream.tuning.workers import processes, ray_cluster, worker
from slipstream.tuning.workers.worker import WorkerTask

STUDY = "search"
"""The name of a study in the run's own folder; in a shared database it is the config's"""


@dataclass(frozen=True)
class Launcher:
    """The workers of a search, and where their study is."""

    config: Config
    num_workers: int = 1
    cluster: Literal["ray"] | None = None
    storage: str | None = None
    """The database that was named; else the study is in the run's folder"""
    uses_journal: bool = True
    """In a file that only one process may write to"""

    def get_storage_url(self, run: Run) -> str | None:
        if self.storage is not None:
            return self.storage
        return None if self.uses_journal else database.make_run_database_url(run.folder)

    def describe(self) -> dict[str, Any]:
        """For the log: how to go on with the search."""
        storage = None if self.storage is None else mask_url(self.storage)
        return {"workers": self.num_workers, "on": self.cluster, "storage": storage}

    def open_study(self, run: Run) -> TimedStudy:
        name = STUDY if self.storage is None else self.config.name
        offset = self._offset(run)
        if self.get_storage_url(run) is None:
            found = journal.repair(
                run.folder / JOURNAL,
                study=name,
                distributions=spaces.make_distributions(spaces.make_space(self.config)),
                events=runs.read_events(run),
            )
            for what in found:
                run.append("fallback", what="the study was mended", why=what)
        elif self.storage is None:
            database.check_integrity(run.folder)
        return worker.open_timed_study(
            self.config, run.folder, self.get_storage_url(run), name, worker=offset
        )

    def run(
        self,
        run: Run,
        board: TimedStudy,
        shelf: DatasetCache,
        *,
        parallel: int,
        spent_s: float,
        resumed: bool,
    ) -> Event:
        """Until all trials are done; what the log then says of them."""
        if self.num_workers == 1 and self.cluster is None:
            share = (
                None
                if self.get_storage_url(run) is None
                else StudyMembership(board, sharing.read_worker_id(run))
            )
            search = OptunaSearch(self.config, board, run, shelf, spent_s=spent_s, share=share)
            if resumed:
                board.study.sampler.reseed_rng()  # else it would draw the same once more
            return worker.run_search(run, search, parallel=parallel, resumed=resumed)
        began = time.perf_counter()
        ids = [sharing.read_worker_id(Run(folder)) for folder in (run.folder / "workers").glob("*")]
        sharing.refresh_heartbeats(board, ids)
        tasks = self._tasks(run, board, parallel, spent_s)
        if self.cluster == "ray":
            found = ray_cluster.run_workers(run, tasks)
        else:
            found = processes.run_workers(
                run, tasks, processes.assign_gpus(self.config, self.num_workers)
            )
        processes.copy_best_model(run, board)
        seconds = spent_s + time.perf_counter() - began
        found |= {"seconds": seconds, "asked": worker.get_budget(self.config)}
        run.append("searched", **found)
        return found

    def _tasks(
        self, run: Run, board: TimedStudy, parallel: int, spent_s: float
    ) -> list[WorkerTask]:
        url = self.get_storage_url(run)
        assert url is not None
        settings = self.config
        if self.cluster is None:
            settings = processes.split_cores(settings, self.num_workers)
        else:  # whose environment is another
            url = address.add_password(url)
        text = configs.to_toml(settings)
        return [
            WorkerTask(
                folder=str(worker.get_worker_folder(run, index)),
                index=index,
                config_toml=text,
                storage_url=url,
                study_name=board.study.study_name,
                parallel=parallel,
                seed_offset=self._offset(run) + index,
                spent_s=spent_s,
            )
            for index in range(self.num_workers)
        ]

    def _offset(self, run: Run) -> int:
        """To the sampler's seed, so that no other machine draws the same."""
        return 0 if self.storage is None else int(sharing.read_worker_id(run)[:6], 16)


def make_launcher(
    settings: Config,
    data: Any,
    *,
    resumed: Run | None = None,
    storage: str | None = None,
    workers: int | Literal["auto"] | None = None,
    on: Literal["ray"] | None = None,
) -> Launcher:
    """The crew that was asked for, or that a resumed search had; refused before a run begins."""
    began = {} if resumed is None else _beginning(resumed)
    if storage is None and (resumed is None or began.get("storage")):
        storage = os.environ.get(address.ENV_VARIABLE) or None
    if storage is not None:
        _refuse_other_study(resumed, began, storage)
        address.refuse_in_memory(storage)
        storage = address.make_absolute(storage)
    on = on or began.get("on")
    asked = began.get("workers", 1) if workers is None else workers
    if asked != "auto" and asked < 1:
        raise UserError(f"--workers is {asked}; give a number from 1, or auto")
    if on == "ray":
        count = ray_cluster.count_workers(asked, storage)
    else:
        count = processes.count_workers(asked, settings)
    several = count > 1 or on is not None
    if several:
        processes.check_config(settings, data)
    alone = not several
    if resumed is not None and storage is None:
        alone = _keeps_journal(resumed, began, several=several)
    if storage is not None:
        database.open_storage(storage).engine.dispose()
    return Launcher(settings, count, on, storage, alone)


def _beginning(run: Run) -> Event:
    """What the log says of who searches, and where the study is."""
    told = (event for event in runs.read_events(run) if event["event"] in ("search", "resume"))
    return next((event for event in told if "workers" in event), {})


def check_logged(run: Run) -> None:
    """An OSError where the log took nothing: a search could not be resumed as it began."""
    if not _beginning(run):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(run.log))


def _refuse_other_study(resumed: Run | None, began: Event, storage: str) -> None:
    """A UserError where a search that has its study in its folder would begin another elsewhere."""
    if resumed is None or began.get("storage"):
        return
    for name in (JOURNAL, database.DATABASE):
        if (resumed.folder / name).exists():
            raise UserError(
                f"{resumed.folder}: its study is in {name}, not in {mask_url(storage)}; go on "
                "without --storage"
            )


def _keeps_journal(run: Run, began: Event, *, several: bool) -> bool:
    """Whether a search that began without a database named is kept in a journal."""
    if began.get("storage"):
        raise UserError(
            f"{run.folder}: its study is in {began['storage']}; give that again with --storage "
            f"or {address.ENV_VARIABLE}, and the password as then"
        )
    there = (run.folder / JOURNAL).exists()
    if there and several:
        raise UserError(
            f"{run.folder}: its study is in {JOURNAL}, which one process writes to; go on with "
            "--workers 1, or start a new search"
        )
    # one that was killed before it had a study begins it now
    return there or not (several or (run.folder / database.DATABASE).exists())
