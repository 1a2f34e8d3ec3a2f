"""The request for a run, as the command line, Python, the app and worker processes make it, and the
result.

An argument of `train` is written here once; `slipstream.train` and the command spell it for users.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from slipstream import config as configs
from slipstream import runs
from slipstream.base.errors import UserError
from slipstream.base.phases import PhaseTimer
from slipstream.base.rank import RankPlace
from slipstream.base.run_names import is_run
from slipstream.config import Config
from slipstream.events import Event
from slipstream.models import custom
from slipstream.runs import Run
from slipstream.runs.summary import RunSummary
from slipstream.workers.resources import WorkerCount

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True, kw_only=True)
class RunRequest:
    """The arguments that training and a search share; `slipstream.train` documents them."""

    kinds: ClassVar[tuple[str, ...]]
    """The kinds of runs that `resume` may name"""

    config: Config | str | Path | Mapping[str, Any] | None = field(default=None, kw_only=False)
    data: Any = field(default=None, kw_only=False)
    overrides: tuple[str, ...] = ()
    watch: Callable[[Event], None] | None = None
    """Called with every event as it is logged"""
    resume: str | Path | None = None
    folder: Path | None = None
    """The run folder to create, or to go on with, where it is named"""
    model: type[nn.Module] | None = None
    allow_code: bool = False
    workers: WorkerCount | None = None
    on: Literal["ray"] | None = None
    """The cluster of the workers"""
    timer: PhaseTimer = field(default_factory=PhaseTimer)
    """With the time before the request"""
    started_at: float = field(default_factory=lambda: time.perf_counter())

    @property
    def settings(self) -> tuple[str, ...]:
        """All overrides, with those that stand for other arguments"""
        if self.model is None:
            return self.overrides
        return (*self.overrides, f"model.kind={custom.format_class_path(self.model)}")

    def open_run(self) -> Run:
        """Open the run to resume."""
        assert self.resume is not None
        return runs.open_run(self.resume, self.watch, kinds=self.kinds)

    def load_config(self) -> Config:
        """Load the config, or that of the run to resume, with the overrides."""
        config = self.config
        if config is None:
            config = runs.load_config(self.open_run())
        return configs.load(config, self.settings)

    def permit_classes(self, config: Config | None = None) -> None:
        """Let the config import the network class that it names; that of a run to resume only with
        the user's consent."""
        if self.resume is None:
            custom.allow_classes(config or self.load_config())
            return
        custom.require_permission(
            *(self.open_run().folder, self.config),
            overrides=self.settings,
            allow_code=self.allow_code,
        )


@dataclass(frozen=True, kw_only=True)
class TrainRequest(RunRequest):
    """A training, or a pre-training: of a new run, or of one to resume."""

    kinds: ClassVar[tuple[str, ...]] = ("train", "pretrain")

    force: bool = False
    pretrain: bool = False
    """Pre-train an encoder"""
    place: RankPlace | None = None
    """The rank of this process, where several processes train the model together"""
    may_be_finished: bool = False
    """Whether a finished run, where one is to be resumed, is a result and no mistake"""

    @property
    def settings(self) -> tuple[str, ...]:
        """All overrides, with those that stand for other arguments"""
        is_new = self.pretrain and self.config is not None
        return (*super().settings, *((configs.PRETRAIN_OVERRIDE,) if is_new else ()))

    def find_run(self) -> Self:
        """Return the request to resume the run that is in the folder, if there is one."""
        if self.resume is None and self.folder is not None and is_run(self.folder):
            return replace(self, resume=self.folder, may_be_finished=True)
        if self.config is None and self.resume is None:
            raise UserError("there is neither a config nor a run to resume")
        return self

    def open_run(self) -> Run:
        """Open the run to resume; one of pre-training first, where that is asked for."""
        assert self.resume is not None
        kinds = ("pretrain",) if self.pretrain else self.kinds
        return runs.open_run(self.resume, self.watch, kinds=kinds)

    def count_processes(self) -> int:
        """Return how many processes the config wants; 1 for a run whose config cannot be read, of
        which resuming says what is wrong."""
        try:
            return self.load_config().engine.data_parallel
        except UserError:
            if self.config is not None:
                raise
            return 1

    def for_rank(self, place: RankPlace) -> Self:
        """Return the request of one of several processes."""
        return replace(self, overrides=(*self.overrides, f"engine.data_parallel={place.size}"))


@dataclass(frozen=True)
class FinishedRun:
    """A run that is trained, scored and written; `slipstream.Result` is made from it."""

    run: Path
    summary: RunSummary
    """The object that `slipstream train --json` prints, and metrics.json without `detail`"""
    is_new: bool = True
    """Whether it was finished by this call, not before"""
