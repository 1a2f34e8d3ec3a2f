"""Log the training of lanes.

Reports, resumed runs and users' programs read the lines, also those of earlier runs, so the fields
are fixed.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from slipstream import runs
from slipstream.engine.lanes import DIVERGED, FitResult, LaneResult, compute_lr
from slipstream.engine.monitor import DurationEstimate, Monitor
from slipstream.engine.plan import Plan, ThreadReview
from slipstream.engine.single import SingleProgram
from slipstream.engine.step import StepProgram
from slipstream.events import (
    Epoch,
    Exploit,
    Fallback,
    LaneEnd,
    Log,
    PlanComparison,
    Recovery,
    Step,
    TrainingEnd,
)
from slipstream.runs import Run

Preview = Callable[[StepProgram, int, LaneResult], None]
"""Shows what the lane in a place of a program predicts, to whoever looks at the run"""


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
    """Learning rate after plateau cuts and recoveries, as a share of the schedule's"""
    is_best: bool
    num_steps: int


class LaneEvents:
    """Logs the training of lanes.

    A run of one model (`single`) has lines of its own form, without the number of the lane and
    with its speed, which is compared with the plan's.
    """

    def __init__(
        self,
        run: Run,
        monitor: Monitor | None = None,
        preview: Preview | None = None,
        *,
        single: bool = False,
    ) -> None:
        self.run, self.monitor, self.preview, self.single = run, monitor, preview, single
        self.trained_since = 0.0
        """When training began, had nothing come between its steps"""
        self._estimate: DurationEstimate | None = None
        self._compares = False
        """Whether the speed is still to be compared with the plan's"""
        self._epoch_started = self._logged_at = 0.0

    def begin_epochs(self, num_steps: int, result: LaneResult | None) -> None:
        """Record that epochs begin, this lane's among them."""
        self._epoch_started = self._logged_at = time.perf_counter()
        if self.single and self._estimate is None and result is not None:
            self._estimate = DurationEstimate(self.run, num_steps * result.train.max_epochs)
            self._compares = not result.progress.step

    def record_step(self, program: StepProgram, step: int) -> None:
        """Record that a step was launched."""
        if not self.single:
            return
        self.run.notify(Step(step=step))
        if self._estimate is not None and self._estimate.pending:
            assert isinstance(program, SingleProgram)
            self._estimate.record_step(program.step, step, since=self.trained_since)

    def compare_with_plan(self, program: StepProgram, steps: int) -> None:
        """Compare the speed and the kernels of the first epoch, once it is over or out of time,
        with what the plan promised."""
        if not (self._compares and steps):
            return
        self._compares = False
        plan, kernels = program.plan, program.kernels()
        if plan.ms_per_step is not None:
            seen = 1e3 * (self._logged_at - self._epoch_started) / steps
            self.run.append(
                PlanComparison(
                    promised_ms=plan.ms_per_step,
                    seen_ms=seen,
                    ratio=seen / plan.ms_per_step,
                    kernels=kernels,
                )
            )
        if plan.kernels and kernels and kernels != plan.kernels:
            why = f"{', '.join(kernels)} ran instead of {', '.join(plan.kernels)}"
            self.run.append(Fallback(what="other kernels than planned", why=why))

    def log(self, step: int, logged: Sequence[LoggedLosses]) -> None:
        """Log the losses since the last line; `step` is that of the program."""
        repeated = sum(line.result.progress.repeated for line in logged) or None
        if self.single:
            (line,) = logged
            self.run.append(self._describe_losses(line, repeated))
        else:
            losses = {line.result.number: line.mean for line in logged}
            self.run.append(Log(step=step, losses=losses, repeated=repeated))
        self.log_machine()

    def _describe_losses(self, line: LoggedLosses, repeated: int | None) -> Log:
        """Return the loss of the only model, with its learning rate and speed."""
        progress, train, now = line.result.progress, line.result.train, time.perf_counter()
        lr = compute_lr(train, progress.next_epoch(), progress.done - 1, line.num_steps)
        elapsed_s, self._logged_at = now - self._logged_at, now
        return Log(
            step=progress.step,
            epoch=progress.epoch,
            loss=line.mean,
            lr=progress.rate * lr,
            steps_per_s=len(line.losses) / elapsed_s,
            repeated=repeated,
        )

    def log_machine(self) -> None:
        """Log what the monitor has sampled."""
        if self.monitor is not None:
            self.monitor.log()

    def show_predictions(self, program: StepProgram, place: int, result: LaneResult) -> None:
        """Show what a lane that was validated predicts, if somebody looks at the run."""
        if self.preview is not None:
            self.preview(program, place, result)

    def record_epoch(self, result: LaneResult, validation: Validation) -> None:
        """Log a validation, and the training before it."""
        progress = result.progress
        is_whole = progress.done == validation.num_steps  # else within an epoch, or right after one
        event = Epoch(
            epoch=progress.epochs + 1 if is_whole else progress.epoch,
            step=progress.step,
            train_loss=validation.train_loss,
            val_loss=validation.val_loss,
            best=validation.is_best,
            phase=None if progress.exploit_from is None else "exploit",
        )
        if self.single:
            seconds = time.perf_counter() - self._epoch_started
            event = replace(event, lr=_compute_last_lr(result, validation), seconds=seconds)
        else:
            event = replace(event, lane=result.number, rate=validation.rate)
        self.run.append(event)

    def report_divergence(self, result: LaneResult, remedy: str) -> None:
        """Log that a lane went back to the start of its epoch."""
        step = result.progress.step
        lane = self._find_lane(result)
        self.run.append(Recovery(what=DIVERGED, remedy=remedy, step=step, lane=lane))

    def report_exploit(self, result: LaneResult) -> None:
        """Log that the epochs at a low learning rate begin, from the best weights."""
        progress, train = result.progress, result.train
        self.run.append(
            Exploit(
                epoch=progress.epoch,
                step=progress.step,
                best_epoch=progress.best_epoch,
                best_loss=progress.best_loss,
                epochs=train.exploit_epochs,
                lr=train.exploit_lr,
                lane=self._find_lane(result),
            )
        )

    def _find_lane(self, result: LaneResult) -> int | None:
        """Return the number of a lane; None where it is the only one."""
        return None if self.single else result.number

    def report_shortage(self, limit: int, steps: int, why: str) -> None:
        """Log that memory ran out, and how many lanes train at a time from now on."""
        lanes = "1 lane" if limit == 1 else f"{limit} lanes"
        since = f"step {steps}" if steps else "the start"
        remedy = f"{lanes} at a time, from {since}"
        self.run.append(Recovery(what="out of memory", remedy=remedy, why=why))

    def report_review(self, plan: Plan, review: ThreadReview) -> None:
        """Log the review of the threads, and write the plan that is in force now."""
        self.run.append(review.describe())
        path = self.run.folder / "plan.json"
        if path.exists():
            runs.write_json(path, runs.read_json(path) | plan.to_dict())

    def end_lane(self, result: LaneResult) -> None:
        """Log that a lane has ended; the end of the only one is that of training."""
        if self.single:
            return
        progress = result.progress
        self.run.append(
            LaneEnd(
                lane=result.number,
                stopped=result.stop_reason,
                step=progress.step,
                epoch=progress.epoch,
                best_epoch=progress.best_epoch,
                best_loss=progress.best_loss,
                best_step=progress.best_step,
                repeated=progress.repeated,
            )
        )

    def end(self, result: FitResult) -> None:
        """Log that training has ended."""
        if self.single:
            self.log_machine()
            (lane,) = result.lanes
            progress = lane.progress
            self.run.append(
                TrainingEnd(
                    stopped=lane.stop_reason,
                    step=progress.step,
                    epoch=progress.epoch,
                    best_epoch=progress.best_epoch,
                    best_loss=progress.best_loss,
                    best_step=progress.best_step,
                    repeated=progress.repeated,
                )
            )
            return
        self.run.append(
            TrainingEnd(
                steps=result.steps,
                train_s=result.train_s,
                validate_s=result.validate_s,
                signal_number=result.signal_number,
            )
        )


def _compute_last_lr(result: LaneResult, validation: Validation) -> float:
    """Return the learning rate of the last step before a validation."""
    progress, num_steps = result.progress, validation.num_steps
    epoch, done = progress.epochs, progress.done
    if not done:  # right after an epoch
        epoch, done = epoch - 1, num_steps
    start = progress.describe_epoch(epoch, done)
    return validation.rate * compute_lr(result.train, start, done - 1, num_steps)
