"""The training loop."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from types import FrameType
from typing import NamedTuple

from torch import Tensor, nn

from slipstream.config import Engine, Train
from slipstream.engine import optim, pretrained, recovery, state
from slipstream.engine.checkpoint import Checkpoint, CheckpointWriter
from slipstream.engine.monitor import DurationEstimate, Monitor
from slipstream.engine.plan import Plan
from slipstream.engine.recovery import Snapshot
from slipstream.engine.single import SingleStep, TrainingTask, build_step
from slipstream.engine.state import FitResult, Progress
from slipstream.errors import UserError
from slipstream.runs import Run

SHARE_OF_TIME = 0.01
"""What checkpoints after validations may take of it; see `Keeper`."""
DIVERGED = "the loss is no longer finite"


@dataclass
class StopRequest:
    """Set by a signal, seen by the loop after the step in hand."""

    signal_number: int = 0

    @property
    def requested(self) -> bool:
        return self.signal_number != 0


@contextmanager
def catch_signals() -> Iterator[StopRequest]:
    """Turn the first SIGINT or SIGTERM into a request; a second one acts at once."""
    stop = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def request(number: int, _: FrameType | None) -> None:
        stop.signal_number = number
        signal.signal(number, before[number])

    numbers = (int(signal.SIGINT), int(signal.SIGTERM))
    before = {number: signal.getsignal(number) for number in numbers}
    for number in numbers:
        signal.signal(number, request)
    try:
        yield stop
    finally:
        for number in numbers:
            signal.signal(number, before[number])


def fit(
    task: TrainingTask, plan: Plan, saved: Checkpoint | None = None, monitor: Monitor | None = None
) -> FitResult:
    """Train until the epochs, the patience or the time run out; the best weights come back.

    With a saved state it goes on from there, as if it had never stopped. What a monitor samples
    meanwhile is logged.
    """
    with catch_signals() as stop:
        began = time.perf_counter()
        monitor = monitor or Monitor(task.run, plan.device, on=False)
        epochs = 0 if saved is None else state.read_progress(saved).epochs
        frozen = pretrained.is_frozen(task.config.train, epochs)
        # the last one is the one at work; recoveries and a thaw add others
        jobs = [build_step(task, plan, frozen=frozen)]
        result = FitResult(Progress(), plan)
        good = None if saved is None else state.restore_program(saved, task, jobs[-1], result)
        result.setup_s += time.perf_counter() - began
        try:
            background = task.config.engine.async_checkpoints
            with CheckpointWriter(task.run, background=background) as writer:
                _fit(
                    task,
                    jobs,
                    stop,
                    result,
                    CheckpointSchedule(task.config.engine, writer),
                    monitor,
                    good,
                )
        finally:  # workers end with the run, however it ends
            failures = jobs[-1].failures()
            jobs[-1].close()
            if plan.capture:
                recovery.free_memory()
    result.plan, result.failures = jobs[-1].plan, failures
    result.signal_number = stop.signal_number
    task.run.append("trained", stopped=result.stop_reason, **asdict(result.progress))
    if not (result.weights or stop.requested):
        raise UserError(
            f"no validation loss was finite up to step {result.progress.step}; lower train.lr, "
            'set train.clip, or set engine.precision = "fp32"'
        )
    return result


class CheckpointSchedule:
    """Saves the state: as often as asked for, and after validations as far as that costs little."""

    def __init__(self, engine: Engine, writer: CheckpointWriter) -> None:
        self.writer = writer
        self.every_s = 60 * engine.checkpoint_minutes
        self.saved_at, self.cost_s = time.perf_counter(), 0.0
        self.saved: object = None

    def is_due(self, *, validated: bool = False) -> bool:
        busy, since = self.writer.busy, time.perf_counter() - self.saved_at
        enough = self.cost_s / SHARE_OF_TIME if validated else self.every_s
        return since >= min(enough, self.every_s) and not busy

    def save(self, take: Callable[[], Checkpoint], *, at: object, best_step: int = 0) -> None:
        """Write what `take` gives, unless that was done `at` the same point before."""
        began = time.perf_counter()
        if at == self.saved:
            return
        self.writer.collect()  # logs what is on disk before this one notes the log's length
        self.saved, saved = at, take()
        self.writer.save(saved, best_step=best_step)
        self.saved_at = time.perf_counter()
        self.cost_s = self.saved_at - began


def _fit(
    task: TrainingTask,
    jobs: list[SingleStep],
    stop: StopRequest,
    result: FitResult,
    keeper: CheckpointSchedule,
    monitor: Monitor,
    good: Snapshot | None,
) -> None:
    train, engine, run = task.config.train, task.config.engine, task.run
    job, at = jobs[-1], result.progress
    spent = result.train_s + result.validate_s
    deadline = time.perf_counter() + 60 * train.minutes - spent if train.minutes else math.inf
    num_steps, promised = job.batches.num_steps, not at.step
    estimate = DurationEstimate(run, num_steps * train.epochs)
    result.stop_reason = check_patience(at, train)

    def save() -> None:
        assert good is not None
        kept = good
        keeper.save(
            lambda: state.take_checkpoint(task, job, result, kept),
            at=(at.step, at.epochs),
            best_step=at.best_step,
        )

    while at.epochs < train.epochs and not result.stop_reason:
        epoch_began = logged_at = time.perf_counter()
        if job.frozen and not pretrained.is_frozen(train, at.epochs):
            job = jobs[-1] = _thawed(task, job, at)
        if good is None or not at.done:
            good = recovery.take_snapshot(task.model, job.optimizer, job.scale)
        first_step = at.step - at.done
        rates = [at.rate * rate for rate in optim.compute_lrs(train, at.epochs, num_steps)]
        if at.done < num_steps:
            job.batches.start_epoch(at.epochs, at=at.done)
        job.buffers.begin(rates, at=at.done, first=first_step)
        diverged = False
        while at.done < num_steps:
            job = jobs[-1] = _step(task, job, at.epochs, at.done)  # one program, no host sync
            at.step, at.done = at.step + 1, at.done + 1
            run.notify({"event": "step", "step": at.step})
            if engine.sync:
                float(job.buffers.losses[at.done - 1])
            if estimate.pending:
                estimate.record_step(job, at.step, since=epoch_began - result.train_s)
            if at.done % engine.log_every and at.done < num_steps:
                if stop.requested:
                    break
                if keeper.is_due():
                    job.flush()
                    save()
                continue
            job.flush()
            losses = job.buffers.losses[at.logged : at.done].tolist()  # the epoch's only host syncs
            now = time.perf_counter()
            run.append(
                "log",
                step=at.step,
                epoch=at.epochs + at.done / num_steps,
                loss=sum(losses) / len(losses),
                lr=rates[at.done - 1],
                steps_per_s=len(losses) / (now - logged_at),
            )
            monitor.log()
            at.logged, logged_at = at.done, now
            diverged = not all(map(math.isfinite, losses))
            result.stop_reason = "train.minutes have passed" if now > deadline else ""
            if diverged or result.stop_reason or stop.requested:
                break
            if at.done < num_steps and keeper.is_due():
                save()
        job.flush()
        result.train_s += time.perf_counter() - epoch_began
        if diverged:
            at.step, at.done, at.logged = first_step, 0, 0
            good.restore(task.model, job.optimizer, job.scale)
            job = jobs[-1] = _after_divergence(task, job, at, result)
            continue
        at.epoch = at.epochs + at.done / num_steps
        if promised and not stop.requested:
            promised = False
            _compare_with_plan(job, (logged_at - epoch_began) / at.done, run)

        due = not (at.epochs + 1) % train.validate_every or at.epochs + 1 == train.epochs
        complete, told = at.done == num_steps, _epoch_in_hand(job, at, rates, epoch_began)
        cut = bool(result.stop_reason) and not (complete and due)
        if complete and due:
            job, complete = _validated(task, job, stop, result, told)
            jobs[-1] = job
        if complete:
            at.epochs, at.done, at.logged = at.epochs + 1, 0, 0
            result.stop_reason = result.stop_reason or check_patience(at, train)
        if cut and not stop.requested:
            # an unbroken run has no validation here: one with more minutes goes on without it
            save()
            jobs[-1], _ = _validated(task, job, stop, result, told)
        if stop.requested and not result.stop_reason:
            result.stop_reason = "interrupted"
        if not result.stop_reason and keeper.is_due(validated=due):
            save()
    result.stop_reason = result.stop_reason or "all epochs done"
    monitor.log()
    if good is not None:
        save()


def check_patience(at: Progress, train: Train) -> str:
    if train.patience != "off" and at.since_best >= train.patience:
        return f"no improvement in {train.patience} validations"
    return ""


class EpochInHand(NamedTuple):
    """The part of an epoch that a validation event describes."""

    epoch: float
    """Epochs done; the last one in part where the time ran out"""
    train_loss: Tensor
    rate: float
    began: float


def _epoch_in_hand(job: SingleStep, at: Progress, rates: list[float], began: float) -> EpochInHand:
    epoch = at.epochs + 1 if at.done == len(rates) else at.epoch
    loss = job.buffers.losses[: at.done].double().mean()
    return EpochInHand(epoch, loss, rates[at.done - 1], began)


def _validated(
    task: TrainingTask, job: SingleStep, stop: StopRequest, result: FitResult, epoch: EpochInHand
) -> tuple[SingleStep, bool]:
    """Score the validation set and keep the weights if they are the best; False if stopped."""
    began, at = time.perf_counter(), result.progress
    job, val_loss = _validate(task, job, stop)
    if val_loss is None:
        return job, False
    improved = val_loss < at.best_loss - task.config.train.min_delta
    if improved:
        result.weights = _copied(task.model)
    record_validation(at, val_loss, improved, task.config.train)
    result.validate_s += time.perf_counter() - began
    task.run.append(
        "epoch",
        epoch=epoch.epoch,
        step=at.step,
        train_loss=float(epoch.train_loss),
        val_loss=val_loss,
        lr=epoch.rate,
        best=improved,
        seconds=time.perf_counter() - epoch.began,
    )
    return job, True


def _step(task: TrainingTask, job: SingleStep, epoch: int, done: int) -> SingleStep:
    """One step; where memory runs out, the same step again in halves, by a new job."""
    while True:
        try:
            job.advance()
            return job
        except recovery.MEMORY_ERRORS as error:
            if not recovery.is_out_of_memory(error):
                raise
            why = recovery.first_line(error)
        # past the except block, whose traceback would pin the failed step's tensors
        job = _halved(task, job, why)
        job.batches.start_epoch(epoch, at=done)
        job.buffers.begin(at=done)


def _validate(
    task: TrainingTask, job: SingleStep, stop: StopRequest
) -> tuple[SingleStep, float | None]:
    """The validation loss; None if a stop came first."""
    while True:
        try:
            job.val_batches.start_epoch(0)
            job.val_buffers.begin()
            for _ in range(job.val_batches.num_steps):
                if stop.requested:
                    return job, None
                job.validate_batch()
            return job, float(job.val_buffers.losses.double().sum()) / task.dataset.num_windows[
                "val"
            ]
        except recovery.MEMORY_ERRORS as error:
            if not recovery.is_out_of_memory(error):
                raise
            why = recovery.first_line(error)
        job = _halved(task, job, why)


def _halved(task: TrainingTask, job: SingleStep, why: str) -> SingleStep:
    """The job with half the windows per pass and the effective batch kept."""
    if job.micro_batch == 1:
        raise UserError(
            f"out of memory with a single window per pass ({why}); what is left to try: "
            f"{recovery.suggest_remedies(task.config)}"
        )
    batch = -(-job.micro_batch // 2)
    job.close()
    recovery.free_memory()
    task.run.append("recovery", what="out of memory", remedy=f"{batch} windows per pass", why=why)
    return build_step(task, replace(job.plan, micro_batch=batch), like=job)


def _thawed(task: TrainingTask, job: SingleStep, at: Progress) -> SingleStep:
    """The job with the encoder in it, and nothing left of the step that spared it."""
    job.close()
    if job.plan.capture:
        recovery.free_memory()
    task.run.append("thaw", what="the encoder", epoch=at.epochs + 1, step=at.step)
    return build_step(task, job.plan, like=job, frozen=False)


def _after_divergence(
    task: TrainingTask, job: SingleStep, at: Progress, result: FitResult
) -> SingleStep:
    """After a rollback: leave fp16 if that is where it was, else halve the learning rate."""
    if at.rollbacks == recovery.MAX_ROLLBACKS:
        result.stop_reason = DIVERGED
        return job
    at.rollbacks += 1
    if job.plan.precision == "fp16":
        remedy = "fp32 instead of fp16"
        reasons = job.plan.reasons | {"precision": "fp16 gave a loss that was not finite"}
        job.close()
        plan = replace(job.plan, precision="fp32", reasons=reasons)
        job = build_step(task, plan, like=job)
    else:
        at.rate /= 2
        remedy = f"learning rate times {at.rate:g}"
    task.run.append("recovery", what=DIVERGED, remedy=remedy, step=at.step)
    return job


def _compare_with_plan(job: SingleStep, seen_s: float, run: Run) -> None:
    """Hold the first epoch's speed and kernels against what the plan promised."""
    plan, kernels = job.plan, job.kernels()
    if plan.ms_per_step is not None:
        seen = 1e3 * seen_s
        ratio = seen / plan.ms_per_step
        run.append("plan", promised_ms=plan.ms_per_step, seen_ms=seen, ratio=ratio, kernels=kernels)
    if plan.kernels and kernels and kernels != plan.kernels:
        run.append(
            "fallback",
            what="other kernels than planned",
            why=f"{', '.join(kernels)} ran instead of {', '.join(plan.kernels)}",
        )


def record_validation(at: Progress, val_loss: float, improved: bool, train: Train) -> None:
    """Note a validation: the best so far, and the plateau schedule's cut if one is due."""
    if improved:
        at.best_loss, at.best_epoch, at.best_step = val_loss, at.epoch, at.step
        at.since_best = at.since_cut = 0
        return
    if pretrained.is_frozen(train, at.epochs):  # patience begins with the whole model
        return
    at.since_best += 1
    at.since_cut += 1
    if train.schedule == "plateau" and at.since_cut >= train.plateau_patience:
        at.rate = max(at.rate * train.plateau_factor, train.lr_min / train.lr)
        at.since_cut = 0


def _copied(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}
