"""One trial in training: its config, one lane for each fold, and their results."""

from __future__ import annotations

import math
import statistics
import time
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from slipstream.config import Config
from slipstream.engine.lanes.lane import Lane
from slipstream.engine.progress import LaneResult


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

    def copy_untrained(self) -> TrialRun:
        return TrialRun(
            self.number, self.config, self.num_folds, self.is_final, started_at=self.started_at
        )

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
        progress = result.progress
        self.fold_results[fold] = FoldResult(
            progress.best_loss,
            progress.best_epoch,
            progress.epoch,
            progress.step,
            result.stop_reason,
        )
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
            "best_epoch": statistics.fmean(result.best_epoch for result in results)
            if results
            else 0.0,
            "seconds": time.perf_counter() - self.started_at,
            "stopped": "; ".join(sorted({result.stopped for result in results})),
        }


@dataclass(frozen=True, eq=False)
class TrialLane(Lane):
    """A lane that trains one fold of a trial."""

    trial: TrialRun
    fold: int
