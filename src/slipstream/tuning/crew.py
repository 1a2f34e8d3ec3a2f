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
from slipstream.tuning import address, database, journal, on_ray, processes, shared, work
from slipstream.tuning import space as spaces
from slipstream.tuning.address import mask_url
from slipstream.tuning.search import Search
from slipstream.tuning.shared import Share
from slipstream.tuning.shelf import Shelf
from slipstream.tuning.study import JOURNAL, Board
from slipstream.tuning.work import Task

STUDY = "search"
"""The name of a study in the run's own folder; in a shared database it is the config's"""


@dataclass(frozen=True)
class Crew:
    """The workers of a search, and where their study is."""

    settings: Config
    count: int = 1
    on: Literal["ray"] | None = None
    storage: str | None = None
    """The database that was named; else the study is in the run's folder"""
    journal: bool = True
    """In a file that only one process may write to"""

    def url(self, run: Run) -> str | None:
        if self.storage is not None:
            return self.storage
        return None if self.journal else database.own_database(run.folder)

    def told(self) -> dict[str, Any]:
        """For the log: how to go on with the search."""
        storage = None if self.storage is None else mask_url(self.storage)
        return {"workers": self.count, "on": self.on, "storage": storage}

    def board(self, run: Run) -> Board:
        name = STUDY if self.storage is None else self.settings.name
        offset = self._offset(run)
        if self.url(run) is None:
            found = journal.mend(
                run.folder / JOURNAL,
                study=name,
                distributions=spaces.distributions(spaces.of(self.settings)),
                events=runs.events(run),
            )
            for what in found:
                run.append("fallback", what="the study was mended", why=what)
        elif self.storage is None:
            database.refuse_damaged(run.folder)
        return work.open_board(self.settings, run.folder, self.url(run), name, worker=offset)

    def search(
        self, run: Run, board: Board, shelf: Shelf, *, parallel: int, spent_s: float, resumed: bool
    ) -> Event:
        """Until all trials are done; what the log then says of them."""
        if self.count == 1 and self.on is None:
            share = None if self.url(run) is None else Share(board, shared.identity(run))
            search = Search(self.settings, board, run, shelf, spent_s=spent_s, share=share)
            if resumed:
                board.study.sampler.reseed_rng()  # else it would draw the same once more
            return work.search_on(run, search, parallel=parallel, resumed=resumed)
        began = time.perf_counter()
        ids = [shared.identity(Run(folder)) for folder in (run.folder / "workers").glob("*")]
        shared.keep_alive(board, ids)
        tasks = self._tasks(run, board, parallel, spent_s)
        if self.on == "ray":
            found = on_ray.search(run, tasks)
        else:
            found = processes.search(run, tasks, processes.places(self.settings, self.count))
        processes.bring_best(run, board)
        seconds = spent_s + time.perf_counter() - began
        found |= {"seconds": seconds, "asked": work.asked(self.settings)}
        run.append("searched", **found)
        return found

    def _tasks(self, run: Run, board: Board, parallel: int, spent_s: float) -> list[Task]:
        url = self.url(run)
        assert url is not None
        settings = self.settings
        if self.on is None:
            settings = processes.shared_cores(settings, self.count)
        else:  # whose environment is another
            url = address.with_password(url)
        text = configs.to_toml(settings)
        return [
            Task(
                folder=str(work.folder_of(run, index)),
                index=index,
                settings=text,
                url=url,
                study=board.study.study_name,
                parallel=parallel,
                offset=self._offset(run) + index,
                spent_s=spent_s,
            )
            for index in range(self.count)
        ]

    def _offset(self, run: Run) -> int:
        """To the sampler's seed, so that no other machine draws the same."""
        return 0 if self.storage is None else int(shared.identity(run)[:6], 16)


def of(
    settings: Config,
    data: Any,
    *,
    resumed: Run | None = None,
    storage: str | None = None,
    workers: int | Literal["auto"] | None = None,
    on: Literal["ray"] | None = None,
) -> Crew:
    """The crew that was asked for, or that a resumed search had; refused before a run begins."""
    began = {} if resumed is None else _beginning(resumed)
    if storage is None and (resumed is None or began.get("storage")):
        storage = os.environ.get(address.VARIABLE) or None
    if storage is not None:
        _refuse_other_study(resumed, began, storage)
        address.refuse_memory(storage)
        storage = address.make_absolute(storage)
    on = on or began.get("on")
    asked = began.get("workers", 1) if workers is None else workers
    if asked != "auto" and asked < 1:
        raise UserError(f"--workers is {asked}; give a number from 1, or auto")
    if on == "ray":
        count = on_ray.number_of(asked, storage)
    else:
        count = processes.number_of(asked, settings)
    several = count > 1 or on is not None
    if several:
        processes.refuse(settings, data)
    alone = not several
    if resumed is not None and storage is None:
        alone = _keeps_journal(resumed, began, several=several)
    if storage is not None:
        database.open_storage(storage).engine.dispose()
    return Crew(settings, count, on, storage, alone)


def _beginning(run: Run) -> Event:
    """What the log says of who searches, and where the study is."""
    told = (event for event in runs.events(run) if event["event"] in ("search", "resume"))
    return next((event for event in told if "workers" in event), {})


def refuse_unlogged(run: Run) -> None:
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
            f"or {address.VARIABLE}, and the password as then"
        )
    there = (run.folder / JOURNAL).exists()
    if there and several:
        raise UserError(
            f"{run.folder}: its study is in {JOURNAL}, which one process writes to; go on with "
            "--workers 1, or start a new search"
        )
    # one that was killed before it had a study begins it now
    return there or not (several or (run.folder / database.DATABASE).exists())
