"""The trials that wait for a pack and those that train, taken from a source on demand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from slipstream.config import Config
from slipstream.tuning.packing.trial import TrialRun


class TrialSource(Protocol):
    """Proposes trials and receives their results: the search, or the retraining after it."""

    def ask(self) -> TrialRun | None:
        """Return the next trial, or None if there is none at the moment."""

    def reopen(self, number: int) -> TrialRun:
        """Return a trial that was proposed before; `is_final` if its result is known."""

    def report(self, trial: TrialRun, epoch: int, loss: float) -> str:
        """Take the mean validation loss of an epoch; return why the trial has to stop, or ""."""

    def finish_fold(self, trial: TrialRun, fold: int) -> None:
        """Take the result of one fold."""

    def finish(self, trial: TrialRun) -> None:
        """Take the result of a trial whose folds have all ended."""

    def fail(self, trial: TrialRun, reason: str) -> None:
        """Record that a trial could not be trained."""

    def list_extremes(self, config: Config) -> Sequence[Config]:
        """List variants of `config` that later trials of the same pack may need memory for."""


class TrialPool:
    """At most `parallel` trials that wait or train."""

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
        if len(self.waiting) + len(self.running) >= self.parallel:
            return None
        trial = self.source.ask()
        self.is_exhausted = trial is None
        return trial

    def start(self, trials: Sequence[TrialRun]) -> None:
        """Move trials to the running ones."""
        self.waiting = [trial for trial in self.waiting if trial not in trials]
        self.running += trials

    def start_fitting(self, fits: Callable[[TrialRun], bool]) -> TrialRun | None:
        """Start the first waiting trial that fits, or a new one; new ones that do not fit wait."""
        trial = next(filter(fits, self.waiting), None)
        while trial is None and (new := self._ask()):
            if fits(new):
                trial = new
            else:
                self.waiting.append(new)
        if trial is not None:
            self.start([trial])
        return trial

    def finish(self, trial: TrialRun) -> None:
        """Remove a trial whose folds have all ended, and report it unless its result is known."""
        self.running.remove(trial)
        if not trial.is_final:
            self.source.finish(trial)
        trial.weights = {}

    def withdraw(self, trials: Sequence[TrialRun]) -> list[TrialRun]:
        """Remove those of the trials that are running, and return them."""
        withdrawn = [trial for trial in self.running if trial in trials]
        self.running = [trial for trial in self.running if trial not in withdrawn]
        return withdrawn
