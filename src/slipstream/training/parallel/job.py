"""What a training was called with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from slipstream import config as configs
from slipstream import runs
from slipstream.base.errors import UserError
from slipstream.base.rank import RankPlace
from slipstream.config import Config
from slipstream.models import custom
from slipstream.runs import Event, Run
from slipstream.training.parallel.launcher import RankTask
from slipstream.workers.resources import WorkerCount


@dataclass(frozen=True)
class TrainingJob:
    """The arguments of `slipstream.train`."""

    config: Config | str | Path | Mapping[str, Any] | None
    data: Any
    overrides: tuple[str, ...]
    watch: Callable[[Event], None] | None
    resume: str | Path | None
    folder: Path | None
    """The run folder to create, where it is named"""
    force: bool = False
    allow_code: bool = False
    workers: WorkerCount | None = None
    """Of the lanes"""
    on: Literal["ray"] | None = None
    """The cluster of the workers"""
    may_be_finished: bool = False
    """Whether a finished run, where one is to be resumed, is a result and no mistake"""

    def open_run(self) -> Run:
        """Open the run to resume."""
        assert self.resume is not None
        return runs.open_run(self.resume, self.watch, kinds=("train", "pretrain"))

    def load_settings(self) -> Config:
        """Load the config, or that of the run to resume, with the overrides."""
        config = self.config
        if config is None:
            config = runs.load_config(self.open_run())
        return configs.load(config, self.overrides)

    def count_processes(self) -> int:
        """Return how many processes the config wants; 1 for a run whose config cannot be read, of
        which resuming says what is wrong."""
        try:
            return self.load_settings().engine.data_parallel
        except UserError:
            if self.config is not None:
                raise
            return 1

    def permit_classes(self, settings: Config | None = None) -> None:
        """Let the config import the network class that it names; that of a run to resume only with
        the user's consent."""
        if self.resume is None:
            custom.allow_classes(settings or self.load_settings())
            return
        custom.require_permission(
            *(self.open_run().folder, self.config),
            overrides=self.overrides,
            allow_code=self.allow_code,
        )

    def for_place(self, place: RankPlace) -> TrainingJob:
        """The job of one of several processes."""
        return replace(self, overrides=(*self.overrides, f"engine.data_parallel={place.size}"))

    def describe_ranks(self, settings: Config) -> RankTask:
        """Return the task of the processes that do this job; each adds its rank and folders."""
        is_new = self.config is not None
        return RankTask(
            index=0,
            size=settings.engine.data_parallel,
            folder="",
            store="",
            config=settings.model_dump_json() if is_new else None,
            overrides=[] if is_new else list(self.overrides),
            resume=None if self.resume is None else str(self.open_run().folder),
            may_be_finished=self.may_be_finished,
            force=self.force,
            new_folder=None if self.folder is None else str(self.folder.absolute()),
        )
