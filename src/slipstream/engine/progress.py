"""Where each lane stands, when it ends, and what training gave: the same for one model or many."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from slipstream.config import Train
from slipstream.engine.capture import CaptureSeconds
from slipstream.engine.lanes.lane import EpochStart, Lane, Pace
from slipstream.engine.optim import is_frozen
from slipstream.engine.plan import Plan
from slipstream.text import format_count

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
    repeated: int = 0
    """Steps that were repeated, since their fp16 gradients overflowed"""
    exploit_from: int | None = None
    """Epochs before those at a low learning rate, once they have begun"""
    pace: Pace | None = None
    """How the schedule goes on; None while it follows the epochs"""

    def record_steps(self, count: int, num_steps: int, *, repeated: int = 0) -> None:
        self.step, self.done = self.step + count, self.done + count
        self.repeated += repeated
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
        is_plateau = train.schedule == "plateau" and self.exploit_from is None
        if is_plateau and self.since_cut >= train.plateau_patience:
            self.rate = max(self.rate * train.plateau_factor, train.lr_min / train.lr)
            self.since_cut = 0
        return False

    def is_validation_due(self, train: Train) -> bool:
        """Whether the current epoch ends with a validation."""
        epoch = self.epochs + 1
        return not epoch % train.validate_every or epoch == self._find_last_epoch(train)

    def _find_last_epoch(self, train: Train) -> int:
        """The epoch with which the current phase ends at the latest."""
        if self.exploit_from is None:
            return train.epochs
        return self.exploit_from + train.exploit_epochs

    def find_stop_reason(self, train: Train) -> str:
        """Why training ends after the epochs that are done; empty if it goes on."""
        is_over = self.epochs >= self._find_last_epoch(train)
        if self.exploit_from is not None:
            then = f"then {format_count(self.epochs - self.exploit_from, 'epoch')} at a low rate"
            return f"{NO_IMPROVEMENT}, {then}" if is_over else ""
        if self._is_out_of_patience(train):
            reason = f"{NO_IMPROVEMENT} in {train.patience} validations"
            return "" if self.is_exploit_due(train) else reason
        return ALL_EPOCHS if is_over else ""

    def _is_out_of_patience(self, train: Train) -> bool:
        return train.patience != "off" and self.since_best >= train.patience

    def is_exploit_due(self, train: Train) -> bool:
        """Whether the epochs at a low learning rate begin now."""
        is_first = self.exploit_from is None and not self.done
        has_best = math.isfinite(self.best_loss)
        wanted = train.exploit_epochs > 0 and self._is_out_of_patience(train)
        return wanted and is_first and has_best

    def begin_exploit(self) -> None:
        """Begin the epochs at a low learning rate; cuts and recoveries of before do not count."""
        self.exploit_from, self.pace, self.rate = self.epochs, None, 1.0

    def change_time(self, before: Train, now: Train) -> None:
        """Have the schedule follow another time: of one twice as long, half as much has passed."""
        if self.pace is None or now.minutes is None or before.minutes is None:
            self.pace = None
            return
        position = self.pace.find_position(self.step) * before.minutes / now.minutes
        by_epochs = self.epoch - (self.exploit_from or 0)
        self.pace = Pace(self.step, max(position, by_epochs), 0.0)

    def next_epoch(self) -> EpochStart:
        return self.describe_epoch(self.epochs, self.done)

    def describe_epoch(self, number: int, done: int) -> EpochStart:
        """The current epoch, or the one that has just ended, with so many of its steps done."""
        before = self.step - done
        return EpochStart(number, self.rate, before, done, self.exploit_from, self.pace)


def parse_progress(values: Mapping[str, Any]) -> Progress:
    best, pace = values["best_loss"], values.get("pace")
    parsed = {
        "best_loss": math.inf if best is None else best,  # JSON has no infinity
        "pace": None if pace is None else Pace(*pace),
    }
    return Progress(**(dict(values) | parsed))


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
    capture_s: CaptureSeconds = field(default_factory=CaptureSeconds)
    """The part of these that is set-up, since the start or the last resume"""
