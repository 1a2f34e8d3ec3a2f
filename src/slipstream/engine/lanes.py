"""A lane: what it trains, how far it is, its learning rate, and which lane comes next."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from slipstream.base.text import format_count
from slipstream.config import Config, Train
from slipstream.engine.batches import EpochSampler
from slipstream.engine.capture import CaptureSeconds
from slipstream.engine.optim import is_frozen
from slipstream.engine.plan import Plan


@dataclass(frozen=True)
class Lane:
    """One model to train: its config, and the first rows of its windows in train and val."""

    config: Config
    starts: dict[str, Tensor]
    """By set; none where the windows are streamed"""
    init: Mapping[str, Tensor] = field(default_factory=dict, kw_only=True)
    """Weights that it starts from, where they are not drawn: a pre-trained encoder's"""

    def build_sampler(self) -> EpochSampler:
        batch = self.config.train.batch
        assert batch != "auto"
        effective = batch * self.config.train.accumulate
        return EpochSampler(self.starts["train"], effective, batch, self.config.order_seed)


class Pace(NamedTuple):
    """How a schedule goes on where the time ends before the epochs do."""

    step: int
    """The lane's step from which on it holds"""
    position: float
    """Where the schedule stands there, in epochs since its phase began"""
    per_step: float

    def find_position(self, step: int) -> float:
        return max(self.position + (step - self.step) * self.per_step, 0.0)


class EpochStart(NamedTuple):
    """Where an epoch of a lane begins, or goes on."""

    number: int = 0
    rate: float = 1.0
    """The share of the learning rate that plateaus and recoveries have left"""
    steps_before: int = 0
    """The lane's steps before this epoch"""
    step: int = 0
    """Steps of this epoch that are done"""
    exploit_from: int | None = None
    """Epochs before those at a low learning rate, once they have begun"""
    pace: Pace | None = None
    """How the schedule goes on; None while it follows the epochs"""

    def has_schedule_of(self, start: EpochStart) -> bool:
        """Whether another description of the same epoch has the same learning rates."""
        return (self.exploit_from, self.pace) == (start.exploit_from, start.pace)


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
    """Steps of the current epoch whose losses are in the log"""
    epoch: float = 0.0
    """Epochs done, the last one perhaps in part"""
    best_loss: float = math.inf
    best_epoch: float = 0.0
    best_step: int = 0
    since_best: int = 0
    """Validations without improvement"""
    since_cut: int = 0
    """Validations without improvement since the plateau schedule's last cut"""
    rate: float = 1.0
    """The share of the learning rate that plateaus and recoveries have left"""
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
    """The result of training one lane, or its result so far."""

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
    """The result of a training: its lanes, its plan and its times."""

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


ENOUGH = 0.9
"""Share of the remaining steps from which on the time counts as enough for all of them"""


def compute_lrs(train: Train, epoch: EpochStart, num_steps: int) -> list[float]:
    """Compute the learning rate of each step of an epoch, before plateau cuts."""
    return [compute_lr(train, epoch, step, num_steps) for step in range(num_steps)]


def compute_lr(train: Train, epoch: EpochStart, step: int, num_steps: int) -> float:
    """Compute the learning rate of one step of an epoch, before plateau cuts."""
    now = find_position(epoch, step, num_steps)
    one_step = epoch.pace.per_step if epoch.pace else 1 / num_steps
    if epoch.exploit_from is not None:
        return _cosine(train.exploit_lr, train.exploit_lr_min, now / max(train.exploit_epochs, 1))
    if now < train.warmup_epochs:
        return train.lr * min((now + one_step) / train.warmup_epochs, 1.0)
    match train.schedule:
        case "cosine":
            length = max(train.epochs - train.warmup_epochs, one_step)
            return _cosine(train.lr, train.lr_min, (now - train.warmup_epochs) / length)
        case "restarts":
            passed = epoch.number + step / num_steps
            start, length = train.warmup_epochs, float(train.restart_epochs)
            while passed >= start + length:
                start, length = start + length, length * train.restart_growth
            return _cosine(train.lr, train.lr_min, max(passed - start, 0.0) / length)
        case "step":
            return train.lr * float(train.step_factor ** (epoch.number // train.step_epochs))
        case _:
            return train.lr


def _cosine(first: float, last: float, progress: float) -> float:
    return last + (first - last) * (1 + math.cos(math.pi * min(progress, 1.0))) / 2


def find_position(epoch: EpochStart, step: int, num_steps: int) -> float:
    """Return where the schedule stands at a step, in epochs since its phase began."""
    if epoch.pace is not None:
        return epoch.pace.find_position(epoch.steps_before + step)
    return epoch.number - (epoch.exploit_from or 0) + step / num_steps


def follows_time(train: Train, epoch: EpochStart) -> bool:
    """Whether the learning rate depends on the time that is left."""
    depends = train.schedule == "cosine" or train.warmup_epochs > 0
    return train.minutes is not None and (depends or epoch.exploit_from is not None)


def choose_pace(
    train: Train, epoch: EpochStart, num_steps: int, steps_in_time: float
) -> Pace | None:
    """Return how the schedule goes on from `epoch.step`, if so many further steps fit into the
    time; None while all steps of all epochs do.

    It goes on from where it stands, so that the learning rate never jumps, and ends with the time
    or with the epochs, whichever comes first.
    """
    length = train.epochs if epoch.exploit_from is None else train.exploit_epochs
    now = find_position(epoch, epoch.step, num_steps)
    end = length + (epoch.exploit_from or 0)
    steps_left = num_steps * (end - epoch.number) - epoch.step
    if steps_in_time >= ENOUGH * steps_left:
        if epoch.pace is None:
            return None
        steps_in_time = steps_left
    per_step = max(length - now, 0.0) / max(steps_in_time, 1.0)
    return Pace(epoch.steps_before + epoch.step, now, per_step)


NextLane = Callable[[LaneResult], Lane | None]
"""Returns the lane that takes the place of one that has ended, if any"""
StopVerdict = Callable[[Sequence[tuple[LaneResult, float]]], Sequence[str]]
"""From lanes and their new validation losses to the reason why each has to end, "" for none"""


class LanePolicy(NamedTuple):
    """Decisions about lanes that a search makes."""

    next_lane: NextLane | None = None
    judge: StopVerdict | None = None
    stop_now: Callable[[LaneResult], str] | None = None
    """Why a lane in the middle of an epoch has to end, once others have been judged"""
    drop_ended: bool = False
    """Drop a lane once `next_lane` has seen its result"""
    cut: Callable[[], str] = lambda: ""
    """Why all lanes have to end now, in the middle of an epoch too; "" while they may go on"""
    drops_cut: Callable[[LaneResult], bool] = lambda _: False
    """Whether a lane that `cut` ends is dropped, rather than validated"""
    keeps_rows: Callable[[LaneResult], bool] = lambda _: False
    """Whether the result of a lane that has ended is to contain its rows"""


NO_POLICY = LanePolicy()
