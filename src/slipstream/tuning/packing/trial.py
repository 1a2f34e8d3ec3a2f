"""One set of settings on its way through training: one lane for each fold."""

from __future__ import annotations

import math
import statistics
import time
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from slipstream.config import Config
from slipstream.engine.lanes.lane import Lane
from slipstream.engine.lanestate import LaneResult


@dataclass(frozen=True)
class FoldResult:
    """How one lane ended."""

    loss: float
    """The best validation's"""
    best_epoch: float
    epochs: float
    steps: int
    stopped: str


@dataclass(eq=False)
class TrialRun:
    """Settings to be trained and scored."""

    number: int
    config: Config
    num_folds: int = 1
    is_final: bool = False
    """Whether its result stands, so that what is still trained of it does not count"""
    stop_reason: str = ""
    """Why it has to end, once that is decided"""
    started_at: float = field(default_factory=time.perf_counter)
    val_losses: dict[int, dict[int, float]] = field(default_factory=dict)
    """Validation losses, by epoch and fold"""
    fold_results: dict[int, FoldResult] = field(default_factory=dict)
    """By fold"""
    weights: dict[str, Tensor] = field(default_factory=dict)
    """The last fold's best"""

    def copy_untrained(self) -> TrialRun:
        """The same one, untrained."""
        return TrialRun(
            self.number, self.config, self.num_folds, self.is_final, started_at=self.started_at
        )

    def record_validation(self, epoch: int, fold: int, loss: float) -> float | None:
        """A validation; the mean over the folds, once it is known for this epoch."""
        row = self.val_losses.setdefault(epoch, {})
        row[fold] = loss
        return statistics.fmean(row.values()) if len(row) == self.num_folds else None

    @property
    def incomplete_epochs(self) -> dict[int, dict[int, float]]:
        """Epochs that some of the folds have yet to reach."""
        return {epoch: row for epoch, row in self.val_losses.items() if len(row) < self.num_folds}

    def finish_fold(self, fold: int, fit: LaneResult) -> bool:
        """One of its lanes has ended; whether that was the last."""
        at = fit.progress
        self.fold_results[fold] = FoldResult(
            at.best_loss, at.best_epoch, at.epoch, at.step, fit.stop_reason
        )
        if fold == self.num_folds - 1:
            self.weights = fit.weights
        return len(self.fold_results) == self.num_folds

    @property
    def score(self) -> float:
        """The mean of the folds' best validation losses; not finite where one of them is not."""
        if len(self.fold_results) < self.num_folds:
            return math.inf
        return statistics.fmean(one.loss for one in self.fold_results.values())

    def summarize(self) -> dict[str, Any]:
        ends = list(self.fold_results.values())
        return {
            "epochs": max((one.epochs for one in ends), default=0.0),
            "steps": sum(one.steps for one in ends),
            "best_epoch": statistics.fmean(one.best_epoch for one in ends) if ends else 0.0,
            "seconds": time.perf_counter() - self.started_at,
            "stopped": "; ".join(sorted({one.stopped for one in ends})),
        }


@dataclass(frozen=True, eq=False)
class TrialLane(Lane):
    """A lane that knows whose it is."""

    trial: TrialRun
    fold: int
