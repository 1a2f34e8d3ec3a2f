"""What every worker does: ask for trials and train them, until the study has no more."""

from __future__ import annotations

import time
import tomllib
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from optuna.exceptions import StorageInternalError

from slipstream import config as configs
from slipstream import runs
from slipstream.config import Config
from slipstream.engine.loop import catch_signals
from slipstream.errors import Interrupted, ResumableError
from slipstream.models import permission
from slipstream.runs import Event, Run
from slipstream.tuning import sharing
from slipstream.tuning import space as spaces
from slipstream.tuning.packing.dataset_cache import DatasetCache
from slipstream.tuning.packing.scheduler import PackScheduler
from slipstream.tuning.search import OptunaSearch
from slipstream.tuning.sharing import StudyMembership
from slipstream.tuning.storage import database
from slipstream.tuning.storage.url import mask_secrets, mask_url
from slipstream.tuning.study import TimedStudy, make_storage, open_study

PAUSE_S = 1.0
"""Between looks at what the others are doing"""
EXIT_USER_ERROR, EXIT_RESUMABLE = 2, 75
"""Exit codes of a worker that met a user's mistake, or something outside that it did not survive"""


@dataclass(frozen=True)
class WorkerTask:
    """What one of several workers is told; plain values, since it goes to another process."""

    folder: str
    """The worker's own"""
    index: int
    config_toml: str
    """The config, as TOML"""
    storage_url: str
    study_name: str
    parallel: int
    seed_offset: int = 0
    """To the sampler's seed"""
    spent_s: float = 0.0
    """What earlier parts of the search took"""
    heartbeat_s: int = database.HEARTBEAT_S
    grace_period_s: int = database.GRACE_PERIOD_S


def get_worker_folder(run: Run, index: int) -> Path:
    return run.folder / "workers" / str(index)


def open_timed_study(
    settings: Config, folder: Path, url: str | None, study: str, *, worker: int = 0, **beats: int
) -> TimedStudy:
    """The study of a search, in `url` or in the run's folder."""
    space = spaces.make_space(settings)
    storage = make_storage(folder, url, **beats)
    found = open_study(
        study, storage, settings.tune, space, epochs=settings.train.epochs, worker=worker
    )
    return TimedStudy(found, space)


def run_search(run: Run, search: OptunaSearch, *, parallel: int, resumed: bool) -> Event:
    """Train trials until there are none left, here or in the hands of other workers; what the log
    then says of the search, even where nothing can be written to it."""
    scheduler = PackScheduler(run, search.datasets, search, parallel=parallel)
    share = search.membership
    with share.send_heartbeats(search.running) if share else nullcontext():
        if resumed:
            search.resume_interrupted()
        scheduler.train()
        while share is not None and not search.is_out_of_time and share.others_are_busy():
            _pause()
            scheduler.train()
    found = {
        "seconds": time.perf_counter() - search.started_at,  # earlier parts included
        "optuna_s": search.study.spent_s,
        "packs": scheduler.num_packs,
        "asked": get_budget(search.config),
    }
    run.append("searched", **found)
    return found


def get_budget(settings: Config) -> dict[str, Any]:
    """How much was to be searched; a search can be resumed with more."""
    return {"trials": settings.tune.trials, "minutes": settings.tune.minutes}


def _pause() -> None:
    with catch_signals() as stop:
        time.sleep(PAUSE_S)
    if stop.requested:
        raise Interrupted("stopped", signal_number=stop.signal_number)


def run_worker(task: WorkerTask, watch: Callable[[Event], None] | None) -> None:
    """One worker's whole life."""
    folder = Path(task.folder)
    folder.mkdir(parents=True, exist_ok=True)
    run = Run(folder, watch)
    settings = configs.load(tomllib.loads(task.config_toml))
    permission.allow_classes(settings)  # who started this worker has asked
    with runs.lock_run(run):
        try:
            board = open_timed_study(
                settings,
                folder,
                task.storage_url,
                task.study_name,
                worker=task.seed_offset,
                beat_s=task.heartbeat_s,
                grace_s=task.grace_period_s,
            )
            run.append("begun", worker=task.index)
            share = StudyMembership(board, sharing.read_worker_id(run))
            if any(share.owns(trial) for trial in board.get_trials()):
                board.study.sampler.reseed_rng()  # else it would draw the same once more
            shelf = DatasetCache(settings)
            search = OptunaSearch(settings, board, run, shelf, spent_s=task.spent_s, share=share)
            run_search(run, search, parallel=task.parallel, resumed=True)
        except StorageInternalError as error:
            raise make_storage_error(task.storage_url, error) from None


def make_storage_error(url: str | None, error: StorageInternalError) -> ResumableError:
    """The database was there and is no longer."""
    why = mask_secrets(str(error.__cause__ or error).split("\n", 1)[0], url)
    where = "the study" if url is None else mask_url(url)
    return ResumableError(f"{where}: the database no longer answers ({why})")


def merge_results(parts: Mapping[int, Event]) -> dict[str, Any]:
    """What several workers' "searched" events say together; their times overlap, so the longest
    share of Optuna counts."""
    return {
        "optuna_s": max((part["optuna_s"] for part in parts.values()), default=0.0),
        "packs": sum(part["packs"] for part in parts.values()),
    }
