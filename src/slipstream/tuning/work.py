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
from slipstream.engine.loop import stoppable
from slipstream.errors import Interrupted, Resumable
from slipstream.models import consent
from slipstream.runs import Event, Run
from slipstream.tuning import database, shared
from slipstream.tuning import space as spaces
from slipstream.tuning.address import mask_url, scrub
from slipstream.tuning.packs import Trainer
from slipstream.tuning.search import Search
from slipstream.tuning.shared import Share
from slipstream.tuning.shelf import Shelf
from slipstream.tuning.study import Board, open_study, storage_of

PAUSE_S = 1.0
"""Between looks at what the others are doing"""
REFUSED, RESUMABLE = 2, 75
"""Exit codes of a worker that met a user's mistake, or something outside that it did not survive"""


@dataclass(frozen=True)
class Task:
    """What one of several workers is told; plain values, since it goes to another process."""

    folder: str
    """The worker's own"""
    index: int
    settings: str
    """The config, as TOML"""
    url: str
    study: str
    parallel: int
    offset: int = 0
    """To the sampler's seed"""
    spent_s: float = 0.0
    """What earlier parts of the search took"""
    beat_s: int = database.BEAT_S
    grace_s: int = database.GRACE_S


def folder_of(run: Run, index: int) -> Path:
    return run.folder / "workers" / str(index)


def open_board(
    settings: Config, folder: Path, url: str | None, study: str, *, worker: int = 0, **beats: int
) -> Board:
    """The study of a search, in `url` or in the run's folder."""
    space = spaces.of(settings)
    storage = storage_of(folder, url, **beats)
    found = open_study(
        study, storage, settings.tune, space, epochs=settings.train.epochs, worker=worker
    )
    return Board(found, space)


def search_on(run: Run, search: Search, *, parallel: int, resumed: bool) -> Event:
    """Train trials until there are none left, here or in the hands of other workers; what the log
    then says of the search, even where nothing can be written to it."""
    trainer = Trainer(run, search.shelf, search, parallel=parallel)
    share = search.share
    with share.alive(search.under_way) if share else nullcontext():
        if resumed:
            search.pick_up()
        trainer.train()
        while share is not None and not search.late and share.others_busy():
            _pause()
            trainer.train()
    found = {
        "seconds": time.perf_counter() - search.began,  # earlier parts included
        "optuna_s": search.board.spent_s,
        "packs": trainer.packs,
        "asked": asked(search.base),
    }
    run.append("searched", **found)
    return found


def asked(settings: Config) -> dict[str, Any]:
    """How much was to be searched; a search can be resumed with more."""
    return {"trials": settings.tune.trials, "minutes": settings.tune.minutes}


def _pause() -> None:
    with stoppable() as stop:
        time.sleep(PAUSE_S)
    if stop.requested:
        raise Interrupted("stopped", signal_number=stop.signal_number)


def carry_out(task: Task, watch: Callable[[Event], None] | None) -> None:
    """One worker's whole life."""
    folder = Path(task.folder)
    folder.mkdir(parents=True, exist_ok=True)
    run = Run(folder, watch)
    settings = configs.load(tomllib.loads(task.settings))
    consent.allow(settings)  # who started this worker has asked
    with runs.locked(run):
        try:
            board = open_board(
                settings,
                folder,
                task.url,
                task.study,
                worker=task.offset,
                beat_s=task.beat_s,
                grace_s=task.grace_s,
            )
            run.append("begun", worker=task.index)
            share = Share(board, shared.identity(run))
            if any(share.owns(trial) for trial in board.trials()):
                board.study.sampler.reseed_rng()  # else it would draw the same once more
            shelf = Shelf(settings)
            search = Search(settings, board, run, shelf, spent_s=task.spent_s, share=share)
            search_on(run, search, parallel=task.parallel, resumed=True)
        except StorageInternalError as error:
            raise unanswered(task.url, error) from None


def unanswered(url: str | None, error: StorageInternalError) -> Resumable:
    """The database was there and is no longer."""
    why = scrub(str(error.__cause__ or error).split("\n", 1)[0], url)
    where = "the study" if url is None else mask_url(url)
    return Resumable(f"{where}: the database no longer answers ({why})")


def totals(parts: Mapping[int, Event]) -> dict[str, Any]:
    """What several workers' "searched" events say together; their times overlap, so the longest
    share of Optuna counts."""
    return {
        "optuna_s": max((part["optuna_s"] for part in parts.values()), default=0.0),
        "packs": sum(part["packs"] for part in parts.values()),
    }
