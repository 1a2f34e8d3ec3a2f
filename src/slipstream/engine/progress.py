"""Where each lane stands, when it ends, and what training gave: the same for one model or many."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from slipstream.config import Train
from slipstream.engine.lanes.lane import EpochStart, Lane
from slipstream.engine.optim import is_frozen
from slipstream.engine.plan import Plan

ALL_EPOCHS, NO_IMPROVEMENT = "all epochs done", "no improvement"
DIVERGED = "the loss is no longer finite"
OUT_OF_TIME, INTERRUPTED = "train.minutes have passed", "interrupted"


@dataclass
class Progress:
    """Where the training of a lane stands."""

    step: int = 0
    epochs: int = 0
    """Whole epochs, validated where that was due"""
    done: int = 0
    """Steps of the current epoch"""
    logged: int = 0
    """Those of them whose losses are in the log"""
    epoch: float = 0.0
    """Epochs done, the last one perhaps in part"""
    best_loss: float = math.inf
    best_epoch: float = 0.0
    best_step: int = 0
    since_best: int = 0
    """Validations without improvement"""
    since_cut: int = 0
    """The same, since the plateau schedule's last cut"""
    rate: float = 1.0
    """What plateaus and recoveries have left of the learning rate"""
    rollbacks: int = 0

    def record_steps(self, count: int, num_steps: int) -> None:
        self.step, self.done = self.step + count, self.done + count
        self.epoch = self.epochs + self.done / num_steps

    def go_back(self) -> None:
        """Return to the epoch's first step."""
        self.step, self.done, self.logged = self.step - self.done, 0, 0
        self.epoch = float(self.epochs)

    def finish_epoch(self) -> None:
        self.epochs, self.done, self.logged = self.epochs + 1, 0, 0

    def record_validation(self, val_loss: float, train: Train) -> bool:
        """Record a validation, with the plateau schedule's cut if one is due; whether it is the
        best so far."""
        if val_loss < self.best_loss - train.min_delta:
            self.best_loss, self.best_epoch, self.best_step = val_loss, self.epoch, self.step
            self.since_best = self.since_cut = 0
            return True
        if is_frozen(train, self.epochs):  # patience begins with the whole model
            return False
        self.since_best += 1
        self.since_cut += 1
        if train.schedule == "plateau" and self.since_cut >= train.plateau_patience:
            self.rate = max(self.rate * train.plateau_factor, train.lr_min / train.lr)
            self.since_cut = 0
        return False

    def is_validation_due(self, train: Train) -> bool:
        """Whether the current epoch ends with a validation."""
        epoch = self.epochs + 1
        return not epoch % train.validate_every or epoch == train.epochs

    def find_stop_reason(self, train: Train) -> str:
        """Why training ends after the epochs that are done; empty if it goes on."""
        if train.patience != "off" and self.since_best >= train.patience:
            return f"{NO_IMPROVEMENT} in {train.patience} validations"
        return ALL_EPOCHS if self.epochs >= train.epochs else ""

    def next_epoch(self) -> EpochStart:
        before = self.step - self.done
        return EpochStart(self.epochs, self.rate, steps_before=before, step=self.done)


def parse_progress(values: Mapping[str, Any]) -> Progress:
    best = values["best_loss"]  # JSON has no infinity
    return Progress(**(dict(values) | {"best_loss": math.inf if best is None else best}))


@dataclass
class LaneResult:
    """What training gave one lane, or has given it so far."""

    number: int
    """In the order in which lanes came in"""
    lane: Lane
    progress: Progress = field(default_factory=Progress)
    weights: dict[str, Tensor] = field(default_factory=dict)
    """Of the best validation, under the model's own names; none where no loss was finite"""
    rows: dict[str, Tensor] = field(default_factory=dict)
    """What training has changed, on the host, where a `LanePolicy` keeps it"""
    stop_reason: str = ""
    """Why it ended; empty while it trains"""
    signal_number: int = 0
    """Of the signal that stopped it, if one did"""

    @property
    def train(self) -> Train:
        return self.lane.config.train

    @property
    def has_best(self) -> bool:
        """Whether a validation loss was finite"""
        return math.isfinite(self.progress.best_loss)


@dataclass(frozen=True)
class FitResult:
    """What training gave."""

    lanes: list[LaneResult]
    """In the order in which they came in"""
    plan: Plan
    """As it ended; recoveries may have changed it"""
    failures: dict[str, str]
    """Programs that could not be captured, and why"""
    limit: int
    """Lanes that were trained at a time in the end"""
    steps: int
    signal_number: int
    """Of the signal that ended it, if one did"""
    setup_s: float
    train_s: float
    validate_s: float
