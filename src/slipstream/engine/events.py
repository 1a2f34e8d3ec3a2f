"""Log the training: in one form for a single model, in another for lanes.

Reports read both forms, also those of earlier runs, so the fields are fixed.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import NamedTuple

from slipstream import runs
from slipstream.engine.lanes import DIVERGED, FitResult, LaneResult, compute_lr
from slipstream.engine.monitor import DurationEstimate, Monitor
from slipstream.engine.plan import Plan, ThreadReview
from slipstream.engine.single import SingleProgram
from slipstream.engine.step import StepProgram
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
    """Logs the training of lanes."""

    def __init__(
        self, run: Run, monitor: Monitor | None = None, preview: Preview | None = None
    ) -> None:
        self.run, self.monitor, self.preview = run, monitor, preview
        self.trained_since = 0.0
        """When training began, had nothing come between its steps"""

    def begin_epochs(self, num_steps: int, result: LaneResult | None) -> None:
        """Record that epochs begin, this lane's among them."""

    def record_step(self, program: StepProgram, step: int) -> None:
        """Record that a step was launched."""

    def compare_with_plan(self, program: StepProgram, steps: int) -> None:
        """Compare an epoch that is over, or out of time, with the plan."""

    def log(self, step: int, logged: Sequence[LoggedLosses]) -> None:
        losses = {one.result.number: one.mean for one in logged}
        self.run.append("log", step=step, losses=losses, **_count_repeated(logged))
        self.log_machine()

    def log_machine(self) -> None:
        """Log what the monitor has sampled."""
        if self.monitor is not None:
            self.monitor.log()

    def show_predictions(self, program: StepProgram, place: int, result: LaneResult) -> None:
        """Show what a lane that was validated predicts, if somebody looks at the run."""
        if self.preview is not None:
            self.preview(program, place, result)

    def record_epoch(self, result: LaneResult, validation: Validation, **more: float) -> None:
        at = result.progress
        is_whole = at.done == validation.num_steps  # else within an epoch, or right after one
        self.run.append(
            "epoch",
            **(more or {"lane": result.number, "rate": validation.rate}),
            epoch=at.epochs + 1 if is_whole else at.epoch,
            step=at.step,
            train_loss=validation.train_loss,
            val_loss=validation.val_loss,
            best=validation.is_best,
            **({} if at.exploit_from is None else {"phase": "exploit"}),
        )

    def report_divergence(self, result: LaneResult, remedy: str) -> None:
        step = result.progress.step
        self.run.append("recovery", lane=result.number, what=DIVERGED, remedy=remedy, step=step)

    def report_exploit(self, result: LaneResult) -> None:
        """Log that the epochs at a low learning rate begin, from the best weights."""
        self.run.append("exploit", lane=result.number, **self._describe_exploit(result))

    def _describe_exploit(self, result: LaneResult) -> dict[str, float]:
        at, train = result.progress, result.train
        where = {"epoch": at.epoch, "step": at.step}
        best = {"best_epoch": at.best_epoch, "best_loss": at.best_loss}
        return where | best | {"epochs": train.exploit_epochs, "lr": train.exploit_lr}

    def report_shortage(self, limit: int, steps: int, why: str) -> None:
        lanes = "1 lane" if limit == 1 else f"{limit} lanes"
        since = f"step {steps}" if steps else "the start"
        remedy = f"{lanes} at a time, from {since}"
        self.run.append("recovery", what="out of memory", remedy=remedy, why=why)

    def report_review(self, plan: Plan, review: ThreadReview) -> None:
        """Log the review of the threads, and write the plan that is in force now."""
        self.run.append("review", **review.summarize())
        path = self.run.folder / "plan.json"
        if path.exists():
            runs.write_json(path, runs.read_json(path) | plan.to_dict())

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

    def __init__(
        self, run: Run, monitor: Monitor | None = None, preview: Preview | None = None
    ) -> None:
        super().__init__(run, monitor, preview)
        self._estimate: DurationEstimate | None = None
        self._compares = False
        """Whether the speed is still to be compared with the plan's"""
        self._epoch_started = self._logged_at = 0.0

    def begin_epochs(self, num_steps: int, result: LaneResult | None) -> None:
        self._epoch_started = self._logged_at = time.perf_counter()
        if self._estimate is None and result is not None:
            self._estimate = DurationEstimate(self.run, num_steps * result.train.max_epochs)
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
            lr=at.rate * compute_lr(train, at.next_epoch(), at.done - 1, one.num_steps),
            steps_per_s=len(one.losses) / (now - self._logged_at),
            **_count_repeated(logged),
        )
        self._logged_at = now
        self.log_machine()

    def record_epoch(self, result: LaneResult, validation: Validation, **_: float) -> None:
        at, num_steps = result.progress, validation.num_steps
        epoch, done = (at.epochs, at.done) if at.done else (at.epochs - 1, num_steps)
        lr = validation.rate * compute_lr(
            result.train, at.describe_epoch(epoch, done), done - 1, num_steps
        )
        seconds = time.perf_counter() - self._epoch_started
        super().record_epoch(result, validation, lr=lr, seconds=seconds)

    def report_divergence(self, result: LaneResult, remedy: str) -> None:
        self.run.append("recovery", what=DIVERGED, remedy=remedy, step=result.progress.step)

    def report_exploit(self, result: LaneResult) -> None:
        self.run.append("exploit", **self._describe_exploit(result))

    def end_lane(self, result: LaneResult) -> None:
        """The end of the only lane is that of training."""

    def end(self, result: FitResult) -> None:
        self.log_machine()
        for one in result.lanes:
            self.run.append("trained", stopped=one.stop_reason, **asdict(one.progress))


def _count_repeated(logged: Sequence[LoggedLosses]) -> dict[str, int]:
    """Count the steps of these lanes that were repeated so far; empty without any."""
    repeated = sum(one.result.progress.repeated for one in logged)
    return {"repeated": repeated} if repeated else {}
