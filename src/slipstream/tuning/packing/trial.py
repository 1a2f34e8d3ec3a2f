"""Trials in training: their lanes and results, and the pool that takes them from a source."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from torch import Tensor

from slipstream.config import Config
from slipstream.engine.lanes.lane import Lane
from slipstream.engine.progress import LaneResult
from slipstream.training.trained_lanes import TrainedLane

NOT_STARTED = "not started: tune.minutes left no time for it"


@dataclass(frozen=True)
class FoldResult:
    """The result of one lane."""

    loss: float
    """The lowest validation loss"""
    best_epoch: float
    epochs: float
    steps: int
    stopped: str


@dataclass(eq=False)
class TrialRun:
    """A trial that trains."""

    number: int
    config: Config
    num_folds: int = 1
    is_final: bool = False
    """The result is already known, so what still trains does not count"""
    stop_reason: str = ""
    """Set once the trial has to stop"""
    started_at: float = field(default_factory=time.perf_counter)
    val_losses: dict[int, dict[int, float]] = field(default_factory=dict)
    """Validation losses by epoch and fold"""
    fold_results: dict[int, FoldResult] = field(default_factory=dict)
    weights: dict[str, Tensor] = field(default_factory=dict)
    """The best weights of the last fold"""
    shapes: dict[str, Any] = field(default_factory=dict)
    """The shape of its pack, by device"""
    keeps_lane: bool = False
    """Whether a run is to be made from its lane"""
    trained: TrainedLane | None = None
    """The lane, once it has ended"""
    num_failures: int = 0
    """Packs that failed with this trial"""

    def copy_untrained(self) -> TrialRun:
        empty: dict[str, Any] = {"val_losses": {}, "fold_results": {}, "weights": {}}
        return replace(self, stop_reason="", trained=None, **empty)

    def record_validation(self, epoch: int, fold: int, loss: float) -> float | None:
        """Return the mean over the folds once every fold has validated this epoch."""
        losses = self.val_losses.setdefault(epoch, {})
        losses[fold] = loss
        return statistics.fmean(losses.values()) if len(losses) == self.num_folds else None

    @property
    def incomplete_epochs(self) -> dict[int, dict[int, float]]:
        """The validation losses of epochs that some folds have not reached yet."""
        return {epoch: row for epoch, row in self.val_losses.items() if len(row) < self.num_folds}

    def finish_fold(self, fold: int, result: LaneResult) -> bool:
        """Record the end of a lane; return whether it was the last one."""
        p = result.progress
        values = (p.best_loss, p.best_epoch, p.epoch, p.step)
        self.fold_results[fold] = FoldResult(*values, result.stop_reason)
        if fold == self.num_folds - 1:
            self.weights = result.weights
        return len(self.fold_results) == self.num_folds

    @property
    def score(self) -> float:
        """The mean of the folds' lowest validation losses; infinite until all folds have ended."""
        if len(self.fold_results) < self.num_folds:
            return math.inf
        return statistics.fmean(result.loss for result in self.fold_results.values())

    def summarize(self) -> dict[str, Any]:
        results = list(self.fold_results.values())
        return {
            "epochs": max((result.epochs for result in results), default=0.0),
            "steps": sum(result.steps for result in results),
            "best_epoch": statistics.fmean([result.best_epoch for result in results] or [0.0]),
            "seconds": time.perf_counter() - self.started_at,
            "stopped": "; ".join(sorted({result.stopped for result in results})),
        }


@dataclass(frozen=True, eq=False)
class TrialLane(Lane):
    """A lane that trains one fold of a trial."""

    trial: TrialRun
    fold: int

    @property
    def owner(self) -> tuple[int, int]:
        """The number of the trial, and the fold."""
        return self.trial.number, self.fold


class TrialSource(Protocol):
    """Proposes trials and receives their results: the search, or the retraining after it."""

    def ask(self) -> TrialRun | None:
        """Return the next trial, or None if there is none at the moment."""

    def reopen(self, number: int) -> TrialRun:
        """Return a trial that was proposed before; `is_final` if its result is known."""

    def report(self, trial: TrialRun, epoch: int, loss: float) -> str:
        """Take the mean validation loss of an epoch; return why the trial has to stop, or ""."""
        return ""

    def finish_fold(self, trial: TrialRun, fold: int) -> None:
        """Take the result of one fold."""
        return

    def finish(self, trial: TrialRun) -> None:
        """Take the result of a trial whose folds have all ended."""

    def fail(self, trial: TrialRun, reason: str) -> None:
        """Record that a trial could not be trained."""

    def is_over(self) -> bool:
        """Whether no further trial may start."""
        return False

    def wants_lane(self, trial: TrialRun, fold: int, loss: float) -> bool:
        """Whether a run may be made from the lane of a fold, whose lowest loss this is."""
        return trial.keeps_lane

    def find_cut(self) -> str:
        """Return why all that trains has to stop at once; empty while it may go on."""
        return ""

    def fill_place(self, fits: Callable[[TrialRun], bool]) -> TrialRun | None:
        """Return a trial that fits into a place which would stay empty; None without one."""
        return None

    def list_extremes(self, config: Config) -> Sequence[Config]:
        """List variants of `config` that later trials of the same pack may need memory for."""
        return ()


class TrialPool:
    """At most `parallel` trials that wait or train, and what is retrained beside them."""

    def __init__(self, source: TrialSource, *, parallel: int) -> None:
        self.source, self.parallel = source, parallel
        self.waiting: list[TrialRun] = []
        self.running: list[TrialRun] = []
        self.is_exhausted = False
        """The source had no trial when it was last asked"""

    def fill(self) -> None:
        """Ask for trials until `parallel` of them wait or train."""
        while trial := self._ask():
            self.waiting.append(trial)

    def _ask(self) -> TrialRun | None:
        if sum(not one.keeps_lane for one in (*self.waiting, *self.running)) >= self.parallel:
            return None
        trial = self.source.ask()
        self.is_exhausted = trial is None
        return trial

    def drop_waiting(self) -> None:
        """Record the waiting trials as not started."""
        for trial in self.waiting:
            self.source.fail(trial, NOT_STARTED)
        self.waiting = []

    def start(self, trials: Sequence[TrialRun]) -> None:
        """Move trials to the running ones."""
        self.waiting = [trial for trial in self.waiting if trial not in trials]
        self.running += trials

    def start_fitting(self, fits: Callable[[TrialRun], bool]) -> TrialRun | None:
        """Start the first waiting trial that fits, or a new one; new ones that do not fit wait.

        What is retrained forms packs of its own, or fills places that would stay empty while no
        trial waits.
        """
        if self.source.is_over():
            return None
        trials = [trial for trial in self.waiting if not trial.keeps_lane]
        trial = next(filter(fits, trials), None)
        while trial is None and (new := self._ask()):
            if not new.keeps_lane and fits(new):
                trial = new
            else:
                self.waiting.append(new)
        if trial is None and not any(not one.keeps_lane for one in self.waiting):
            trial = self.source.fill_place(fits)
        if trial is not None:
            self.start([trial])
        return trial

    def finish(self, trial: TrialRun) -> None:
        """Remove a trial whose folds have all ended, and report it unless its result is known."""
        self.running.remove(trial)
        if not trial.is_final:
            self.source.finish(trial)
        trial.weights, trial.trained = {}, None

    def withdraw(self, trials: Sequence[TrialRun]) -> list[TrialRun]:
        """Remove those of the trials that are running, and return them."""
        withdrawn = [trial for trial in self.running if trial in trials]
        self.running = [trial for trial in self.running if trial not in withdrawn]
        return withdrawn
