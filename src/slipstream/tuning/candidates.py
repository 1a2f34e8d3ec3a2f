"""One set of settings on its way through training: one lane for each fold."""

from __future__ import annotations

import math
import statistics
import time
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from slipstream.config import Config
from slipstream.engine.lane import Lane
from slipstream.engine.lanestate import LaneFit


@dataclass(frozen=True)
class Outcome:
    """How one lane ended."""

    loss: float
    """The best validation's"""
    best_epoch: float
    epochs: float
    steps: int
    stopped: str


@dataclass(eq=False)
class Candidate:
    """Settings to be trained and scored."""

    number: int
    config: Config
    folds: int = 1
    settled: bool = False
    """Whether its result stands, so that what is still trained of it does not count"""
    verdict: str = ""
    """Why it has to end, once that is decided"""
    began: float = field(default_factory=time.perf_counter)
    seen: dict[int, dict[int, float]] = field(default_factory=dict)
    """Validation losses, by epoch and fold"""
    outcomes: dict[int, Outcome] = field(default_factory=dict)
    """By fold"""
    weights: dict[str, Tensor] = field(default_factory=dict)
    """The last fold's best"""

    def anew(self) -> Candidate:
        """The same one, untrained."""
        return Candidate(self.number, self.config, self.folds, self.settled, began=self.began)

    def note(self, epoch: int, fold: int, loss: float) -> float | None:
        """A validation; the mean over the folds, once it is known for this epoch."""
        row = self.seen.setdefault(epoch, {})
        row[fold] = loss
        return statistics.fmean(row.values()) if len(row) == self.folds else None

    @property
    def half_seen(self) -> dict[int, dict[int, float]]:
        """Epochs that some of the folds have yet to reach."""
        return {epoch: row for epoch, row in self.seen.items() if len(row) < self.folds}

    def end(self, fold: int, fit: LaneFit) -> bool:
        """One of its lanes has ended; whether that was the last."""
        at = fit.progress
        self.outcomes[fold] = Outcome(at.best_loss, at.best_epoch, at.epoch, at.step, fit.stopped)
        if fold == self.folds - 1:
            self.weights = fit.weights
        return len(self.outcomes) == self.folds

    @property
    def score(self) -> float:
        """The mean of the folds' best validation losses; not finite where one of them is not."""
        if len(self.outcomes) < self.folds:
            return math.inf
        return statistics.fmean(one.loss for one in self.outcomes.values())

    def told(self) -> dict[str, Any]:
        ends = list(self.outcomes.values())
        return {
            "epochs": max((one.epochs for one in ends), default=0.0),
            "steps": sum(one.steps for one in ends),
            "best_epoch": statistics.fmean(one.best_epoch for one in ends) if ends else 0.0,
            "seconds": time.perf_counter() - self.began,
            "stopped": "; ".join(sorted({one.stopped for one in ends})),
        }


@dataclass(frozen=True, eq=False)
class TrialLane(Lane):
    """A lane that knows whose it is."""

    candidate: Candidate
    fold: int
