"""The training loop."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from types import FrameType

import torch
from torch import Tensor, nn

from slipstream.config import Config, Train
from slipstream.data.dataset import Dataset
from slipstream.data.windows import Series
from slipstream.engine import checkpoint, optim, step
from slipstream.engine.plan import Plan
from slipstream.engine.step import Program, Tape
from slipstream.errors import UserError
from slipstream.runs import Run

CHECKPOINT_EVERY_S = 60.0
DIVERGED = "the loss is no longer finite"


@dataclass
class Progress:
    """Where training stands."""

    step: int = 0
    epoch: float = 0.0
    """Epochs done, the last one perhaps in part"""
    best_loss: float = math.inf
    best_epoch: float = 0.0
    best_step: int = 0
    since_best: int = 0
    """Validations without improvement"""
    plateau: float = 1.0
    """What the plateau schedule has left of the learning rate"""
    since_cut: int = 0


@dataclass
class Fit:
    """What training gave."""

    progress: Progress
    weights: dict[str, Tensor] = field(default_factory=dict)
    """Of the best validation"""
    stopped: str = ""
    """Why it ended"""
    signal_number: int = 0
    """Of the signal that ended it, if one did"""
    failures: dict[str, str] = field(default_factory=dict)
    """Programs that could not be captured, and why"""
    setup_s: float = 0.0
    train_s: float = 0.0
    validate_s: float = 0.0


@dataclass
class Stop:
    """Set by a signal, seen by the loop after the step in hand."""

    signal_number: int = 0

    @property
    def requested(self) -> bool:
        return self.signal_number != 0


@contextmanager
def stoppable() -> Iterator[Stop]:
    """Turn the first SIGINT or SIGTERM into a request; a second one acts at once."""
    stop = Stop()
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


@dataclass(frozen=True)
class Job:
    """The programs of one run, and the tensors that they share with the loop."""

    advance: Program
    check: Program
    tape: Tape
    val_tape: Tape
    optimizer: torch.optim.Optimizer

    def failures(self) -> dict[str, str]:
        programs = {"training step": self.advance, "validation step": self.check}
        return {
            name: program.failure
            for name, program in programs.items()
            if isinstance(program, step.Captured) and program.failure
        }


def set_up(
    config: Config, model: nn.Module, series: Series, starts: dict[str, Tensor], plan: Plan
) -> Job:
    train, device = config.train, plan.device
    lr = torch.tensor(train.lr, device=device)
    optimizer = optim.build(train, [p for p in model.parameters() if p.requires_grad], lr)
    scale = optim.loss_scale(device) if plan.precision == "fp16" else None
    tape = step.tape(
        len(starts["train"]), passes=train.accumulate, batch=train.batch, device=device
    )
    val_batch = min(step.CHUNK, len(starts["val"]))
    val_tape = step.tape(len(starts["val"]), passes=1, batch=val_batch, device=device)
    val_tape.load(starts["val"])
    advance = step.training(model, optimizer, lr, series, tape, train=train, plan=plan, scale=scale)
    check = step.validation(model, series, val_tape, train=train, plan=plan)
    if plan.capture:
        advance, check = step.Captured(advance, device), step.Captured(check, device)
    return Job(advance, check, tape, val_tape, optimizer)


def fit(
    config: Config, model: nn.Module, series: Series, dataset: Dataset, plan: Plan, run: Run
) -> Fit:
    """Train until the epochs, the patience or the time run out; the best weights come back."""
    with stoppable() as stop:
        result = _fit(config, model, series, dataset, plan, run, stop)
    result.signal_number = stop.signal_number
    run.append("trained", stopped=result.stopped, **asdict(result.progress))
    if not (result.weights or stop.requested):
        raise UserError(
            f"no validation loss was finite up to step {result.progress.step}; lower train.lr, "
            'set train.clip, or set engine.precision = "fp32"'
        )
    return result


def _fit(
    config: Config,
    model: nn.Module,
    series: Series,
    dataset: Dataset,
    plan: Plan,
    run: Run,
    stop: Stop,
) -> Fit:
    train, starts = config.train, dataset.starts
    began = saved_at = time.perf_counter()
    job = set_up(config, model, series, starts, plan)
    tape, val_tape = job.tape, job.val_tape
    at = Progress()
    result = Fit(at, setup_s=time.perf_counter() - began)
    deadline = began + 60 * train.minutes if train.minutes else math.inf
    num_steps = len(tape.losses)
    for epoch in range(train.epochs):
        epoch_began = logged_at = time.perf_counter()
        rates = [at.plateau * rate for rate in optim.rates(train, epoch, num_steps)]
        tape.load(step.shuffled(starts["train"], seed=config.seed, epoch=epoch), rates)
        logged = 0
        for done in range(1, num_steps + 1):
            job.advance()  # one program, no host sync
            at.step += 1
            run.show({"event": "step", "step": at.step})
            if done % config.engine.log_every and done < num_steps and not stop.requested:
                continue
            losses = tape.losses[logged:done].tolist()  # the only host sync within an epoch
            now = time.perf_counter()
            run.append(
                "log",
                step=at.step,
                epoch=epoch + done / num_steps,
                loss=sum(losses) / len(losses),
                lr=rates[done - 1],
                steps_per_s=len(losses) / (now - logged_at),
            )
            logged, logged_at = done, now
            result.stopped = _reason_to_stop(stop, losses[-1], now > deadline)
            if result.stopped:
                break
        at.epoch = epoch + done / num_steps
        result.train_s += time.perf_counter() - epoch_began
        if stop.requested or result.stopped == DIVERGED:
            break
        last = result.stopped or epoch + 1 == train.epochs
        if (epoch + 1) % train.validate_every and not last:
            continue

        validation_began = time.perf_counter()
        val_tape.cursor.zero_()
        for _ in range(len(val_tape.losses)):
            job.check()
        val_loss = float(val_tape.losses.double().sum()) / len(starts["val"])
        improved = val_loss < at.best_loss - train.min_delta
        if improved:
            result.weights = _copied(model)
        _judge(at, val_loss, improved, train)
        result.validate_s += time.perf_counter() - validation_began
        run.append(
            "epoch",
            epoch=epoch + 1,
            step=at.step,
            train_loss=float(tape.losses[:done].double().mean()),
            val_loss=val_loss,
            lr=rates[done - 1],
            best=improved,
            seconds=time.perf_counter() - epoch_began,
        )
        if train.patience != "off" and at.since_best >= train.patience:
            result.stopped = f"no improvement in {train.patience} validations"
        if result.stopped:
            break
        if time.perf_counter() - saved_at > CHECKPOINT_EVERY_S:
            _save(run, model, job.optimizer, result)
            saved_at = time.perf_counter()
    result.stopped = result.stopped or "all epochs done"
    result.failures = job.failures()
    _save(run, model, job.optimizer, result)
    return result


def _reason_to_stop(stop: Stop, loss: float, out_of_time: bool) -> str:
    if stop.requested:
        return "interrupted"
    if not math.isfinite(loss):
        return DIVERGED
    return "train.minutes have passed" if out_of_time else ""


def _judge(at: Progress, val_loss: float, improved: bool, train: Train) -> None:
    """Note a validation: the best so far, and the plateau schedule's cut if one is due."""
    if improved:
        at.best_loss, at.best_epoch, at.best_step = val_loss, at.epoch, at.step
        at.since_best = at.since_cut = 0
        return
    at.since_best += 1
    at.since_cut += 1
    if train.schedule == "plateau" and at.since_cut >= train.plateau_patience:
        at.plateau = max(at.plateau * train.plateau_factor, train.lr_min / train.lr)
        at.since_cut = 0


def _copied(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def _save(run: Run, model: nn.Module, optimizer: torch.optim.Optimizer, result: Fit) -> None:
    """Write the newest state, and the best weights if they are older; drop the rest."""
    at = result.progress
    state, kept = asdict(at), {at.step}
    checkpoint.save(
        run, step=at.step, weights=model.state_dict(), optimizer=optimizer, progress=state
    )
    if result.weights and at.best_step != at.step:
        kept.add(at.best_step)
        checkpoint.save(run, step=at.best_step, weights=result.weights, progress=state)
    checkpoint.keep_only(run, kept)
    run.append("checkpoint", step=at.step, best_step=at.best_step)
