"""What training writes to a run's log: in one form for a single model, in another for lanes.

Reports and terminals of earlier runs read both, so their fields stay as they are.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import NamedTuple

from slipstream.engine.monitor import DurationEstimate, Monitor
from slipstream.engine.optim import compute_lr
from slipstream.engine.progress import DIVERGED, FitResult, LaneResult
from slipstream.engine.single import SingleProgram
from slipstream.engine.step import StepProgram
from slipstream.runs import Run


class LoggedLosses(NamedTuple):
    """A lane's losses since the last line of the log."""

    result: LaneResult
    losses: list[float]
    num_steps: int
    """Of its epochs"""

    @property
    def mean(self) -> float:
        return sum(self.losses) / len(self.losses)


class Validation(NamedTuple):
    """A validation of a lane, and the training before it."""

    val_loss: float
    train_loss: float
    rate: float
    """What plateaus and recoveries had left of the learning rate"""
    is_best: bool
    num_steps: int


class LaneEvents:
    """Logs the training of lanes."""

    def __init__(self, run: Run, monitor: Monitor | None = None) -> None:
        self.run, self.monitor = run, monitor
        self.trained_since = 0.0
        """When training began, had nothing come between its steps"""

    def begin_epochs(self, num_steps: int, result: LaneResult | None) -> None:
        """Epochs begin, among them this lane's."""

    def record_step(self, program: StepProgram, step: int) -> None:
        """A step was given to the device."""

    def compare_with_plan(self, program: StepProgram, steps: int) -> None:
        """So many steps of an epoch are done, and it is over or out of time."""

    def log(self, step: int, logged: Sequence[LoggedLosses]) -> None:
        self.run.append("log", step=step, losses={one.result.number: one.mean for one in logged})
        self.log_machine()

    def log_machine(self) -> None:
        """Write down what the monitor has sampled."""
        if self.monitor is not None:
            self.monitor.log()

    def record_epoch(self, result: LaneResult, validation: Validation) -> None:
        self.run.append(
            "epoch",
            lane=result.number,
            epoch=_count_epochs(result, validation),
            step=result.progress.step,
            train_loss=validation.train_loss,
            val_loss=validation.val_loss,
            rate=validation.rate,
            best=validation.is_best,
        )

    def report_divergence(self, result: LaneResult, remedy: str) -> None:
        step = result.progress.step
        self.run.append("recovery", lane=result.number, what=DIVERGED, remedy=remedy, step=step)

    def report_shortage(self, limit: int, steps: int, why: str) -> None:
        lanes = "1 lane" if limit == 1 else f"{limit} lanes"
        since = f"step {steps}" if steps else "the start"
        remedy = f"{lanes} at a time, from {since}"
        self.run.append("recovery", what="out of memory", remedy=remedy, why=why)

    def end_lane(self, result: LaneResult) -> None:
        reason = result.stop_reason
        self.run.append("lane", lane=result.number, stopped=reason, **asdict(result.progress))

    def end(self, result: FitResult) -> None:
        self.run.append(
            "trained",
            steps=result.steps,
            train_s=result.train_s,
            validate_s=result.validate_s,
            failures=result.failures,
            signal_number=result.signal_number,
        )


class SingleEvents(LaneEvents):
    """Logs the training of one model, with its speed compared with what was expected."""

    def __init__(self, run: Run, monitor: Monitor | None = None) -> None:
        super().__init__(run, monitor)
        self._estimate: DurationEstimate | None = None
        self._compares = False
        """Whether the speed is still to be compared with the plan's"""
        self._epoch_started = self._logged_at = 0.0

    def begin_epochs(self, num_steps: int, result: LaneResult | None) -> None:
        self._epoch_started = self._logged_at = time.perf_counter()
        if self._estimate is None and result is not None:
            self._estimate = DurationEstimate(self.run, num_steps * result.train.epochs)
            self._compares = not result.progress.step

    def record_step(self, program: StepProgram, step: int) -> None:
        self.run.notify({"event": "step", "step": step})
        if self._estimate is not None and self._estimate.pending:
            assert isinstance(program, SingleProgram)
            self._estimate.record_step(program.step, step, since=self.trained_since)

    def compare_with_plan(self, program: StepProgram, steps: int) -> None:
        """Compare the first epoch's speed and kernels with what the plan promised."""
        if not (self._compares and steps):
            return
        self._compares = False
        plan, kernels = program.plan, program.kernels()
        if plan.ms_per_step is not None:
            seen = 1e3 * (self._logged_at - self._epoch_started) / steps
            self.run.append(
                "plan",
                promised_ms=plan.ms_per_step,
                seen_ms=seen,
                ratio=seen / plan.ms_per_step,
                kernels=kernels,
            )
        if plan.kernels and kernels and kernels != plan.kernels:
            self.run.append(
                "fallback",
                what="other kernels than planned",
                why=f"{', '.join(kernels)} ran instead of {', '.join(plan.kernels)}",
            )

    def log(self, step: int, logged: Sequence[LoggedLosses]) -> None:
        (one,) = logged
        at, train = one.result.progress, one.result.train
        now = time.perf_counter()
        self.run.append(
            "log",
            step=at.step,
            epoch=at.epoch,
            loss=one.mean,
            lr=at.rate * compute_lr(train, at.epochs, at.done - 1, one.num_steps),
            steps_per_s=len(one.losses) / (now - self._logged_at),
        )
        self._logged_at = now
        self.log_machine()

    def record_epoch(self, result: LaneResult, validation: Validation) -> None:
        at, train = result.progress, result.train
        epoch, done = (at.epochs, at.done) if at.done else (at.epochs - 1, validation.num_steps)
        self.run.append(
            "epoch",
            epoch=_count_epochs(result, validation),
            step=at.step,
            train_loss=validation.train_loss,
            val_loss=validation.val_loss,
            lr=validation.rate * compute_lr(train, epoch, done - 1, validation.num_steps),
            best=validation.is_best,
            seconds=time.perf_counter() - self._epoch_started,
        )

    def report_divergence(self, result: LaneResult, remedy: str) -> None:
        self.run.append("recovery", what=DIVERGED, remedy=remedy, step=result.progress.step)

    def end_lane(self, result: LaneResult) -> None:
        """The end of the only lane is that of training."""

    def end(self, result: FitResult) -> None:
        self.log_machine()
        for one in result.lanes:
            self.run.append("trained", stopped=one.stop_reason, **asdict(one.progress))


def _count_epochs(result: LaneResult, validation: Validation) -> float:
    """Epochs at a validation: at an epoch's end, in its midst, or after one that had none."""
    at = result.progress
    return at.epochs + 1 if at.done == validation.num_steps else at.epoch
