"""The training loop."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from types import FrameType

import torch
from torch import Tensor, nn

from slipstream.config import Config, Train
from slipstream.data.dataset import Dataset
from slipstream.data.windows import Series
from slipstream.engine import checkpoint, homes, optim, recover, step
from slipstream.engine.capture import Captured
from slipstream.engine.homes import Draw, Home, Program
from slipstream.engine.optim import LossScale
from slipstream.engine.plan import Plan
from slipstream.engine.step import Tape
from slipstream.engine.streaming import Streamed
from slipstream.errors import UserError
from slipstream.models import use
from slipstream.runs import Run

CHECKPOINT_EVERY_S = 60.0
DIVERGED = "the loss is no longer finite"
TRAINING = "training step"


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
    since_cut: int = 0
    """The same, since the plateau schedule's last cut"""
    rate: float = 1.0
    """What plateaus and recoveries have left of the learning rate"""
    rollbacks: int = 0


@dataclass
class Fit:
    """What training gave."""

    progress: Progress
    plan: Plan
    """As it ended; recoveries may have changed it"""
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
class Task:
    """What is trained, on what, and where it is told."""

    config: Config
    model: nn.Module
    dataset: Dataset
    series: Series | None
    """Where the plan's home wants them; None where they are streamed"""
    run: Run


@dataclass(frozen=True)
class Job:
    """The programs of one run, and what they share with the loop."""

    advance: Program
    check: Program
    captured: dict[str, Captured]
    """Those of the two that are CUDA graphs, before their homes feed them"""
    home: Home
    val_home: Home
    tape: Tape
    val_tape: Tape
    optimizer: torch.optim.Optimizer
    lr: Tensor
    scale: LossScale | None
    plan: Plan
    batch: int
    """Windows of one forward pass"""

    def failures(self) -> dict[str, str]:
        return {name: p.failure for name, p in self.captured.items() if p.failure}

    def kernels(self) -> list[str]:
        """The decisive ones of the training step, where it was captured."""
        program = self.captured.get(TRAINING)
        return program.kernels() if program else []

    def flush(self) -> None:
        for program in self.captured.values():
            program.flush()

    def close(self) -> None:
        """Let go of workers, graphs and gradients."""
        self.home.close()
        self.val_home.close()
        for program in self.captured.values():
            program.close()
        self.optimizer.zero_grad(set_to_none=True)


def set_up(task: Task, plan: Plan, *, like: Job | None = None) -> Job:
    """Everything that training needs. `like` hands on an earlier job's optimizer and tape."""
    config, model, dataset = task.config, task.model, task.dataset
    train, device = config.train, plan.device
    assert train.batch != "auto"
    batch = plan.micro_batch or train.batch
    use(model, algorithms=plan.cudnn, recompute=plan.recompute, compiled=plan.compile)
    if like is None:
        lr = torch.tensor(train.lr, device=device)
        params = [p for p in model.parameters() if p.requires_grad]
        optimizer = optim.build(train, params, lr, fused=plan.fused)
    else:
        lr, optimizer = like.lr, like.optimizer
    scale = None
    if plan.precision == "fp16":
        scale = (like and like.scale) or optim.loss_scale(device)

    effective = train.batch * train.accumulate
    home = _home(task, plan, "train", effective, batch, config.seed)
    chunk = min(step.CHUNK if batch == train.batch else batch, dataset.count["val"])
    val_home = _home(task, plan, "val", chunk, chunk, None)
    tape = like.tape if like else step.tape(home.num_steps, device)
    val_tape = step.tape(val_home.num_steps, device)
    fold = dataset.signature.fold
    advance = step.training(
        model, optimizer, lr, home, tape, train=train, plan=plan, fold=fold, scale=scale
    )
    check = step.validation(model, val_home, val_tape, train=train, plan=plan, fold=fold)
    captured: dict[str, Captured] = {}
    if plan.capture:
        advance = captured[TRAINING] = Captured(advance, device, steps=plan.steps_per_graph)
        check = captured["validation step"] = Captured(check, device)
    return Job(
        advance=home.feed(advance),
        check=val_home.feed(check),
        captured=captured,
        home=home,
        val_home=val_home,
        tape=tape,
        val_tape=val_tape,
        optimizer=optimizer,
        lr=lr,
        scale=scale,
        plan=plan,
        batch=batch,
    )


def _home(task: Task, plan: Plan, which: str, effective: int, batch: int, seed: int | None) -> Home:
    """The plan's home for one set of windows."""
    engine, memory, stream = task.config.engine, task.dataset.memory, task.dataset.stream
    if stream is not None:
        return Streamed(
            stream,
            which,
            effective,
            batch,
            seed,
            plan.device,
            engine,
            workers=plan.workers,
            prefetch=plan.prefetch,
        )
    assert memory is not None
    assert task.series is not None
    draw = Draw(memory.starts[which], effective, batch, seed)
    match plan.home:
        case "device":
            return homes.OnDevice(task.series, draw)
        case "host":
            return homes.OnHost(task.series, draw, plan.device, engine)
        case _:
            return homes.ThroughLoader(
                task.series,
                draw,
                plan.device,
                engine,
                workers=plan.workers,
                prefetch=plan.prefetch,
            )


def fit(task: Task, plan: Plan) -> Fit:
    """Train until the epochs, the patience or the time run out; the best weights come back."""
    with stoppable() as stop:
        began = time.perf_counter()
        jobs = [set_up(task, plan)]  # the last one is the one at work; recoveries add others
        result = Fit(Progress(), plan, setup_s=time.perf_counter() - began)
        background = task.config.engine.async_checkpoints
        try:
            with checkpoint.Writer(task.run, background=background) as writer:
                _fit(task, jobs, stop, result, writer)
        finally:  # workers end with the run, however it ends
            failures = jobs[-1].failures()
            jobs[-1].close()
            if plan.capture:
                recover.free_memory()
    result.plan, result.failures = jobs[-1].plan, failures
    result.signal_number = stop.signal_number
    task.run.append("trained", stopped=result.stopped, **asdict(result.progress))
    if not (result.weights or stop.requested):
        raise UserError(
            f"no validation loss was finite up to step {result.progress.step}; lower train.lr, "
            'set train.clip, or set engine.precision = "fp32"'
        )
    return result


def _fit(task: Task, jobs: list[Job], stop: Stop, result: Fit, writer: checkpoint.Writer) -> None:
    train, engine, run = task.config.train, task.config.engine, task.run
    job, at = jobs[-1], result.progress
    began = saved_at = time.perf_counter()
    deadline = began + 60 * train.minutes if train.minutes else math.inf
    num_steps, epoch = job.home.num_steps, 0
    while epoch < train.epochs and not result.stopped:
        epoch_began = logged_at = time.perf_counter()
        good, first_step = recover.snapshot(task.model, job.optimizer, job.scale), at.step
        rates = [at.rate * rate for rate in optim.rates(train, epoch, num_steps)]
        job.home.begin(epoch)
        job.tape.begin(rates)
        diverged, logged = False, 0
        for done in range(1, num_steps + 1):
            job = jobs[-1] = _step(task, job, epoch, done - 1)  # one program, no host sync
            at.step += 1
            run.show({"event": "step", "step": at.step})
            if engine.sync:
                float(job.tape.losses[done - 1])
            if done % engine.log_every and done < num_steps and not stop.requested:
                continue
            job.flush()
            losses = job.tape.losses[logged:done].tolist()  # the only host sync within an epoch
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
            diverged = not all(map(math.isfinite, losses))
            result.stopped = _reason_to_stop(stop, now > deadline)
            if diverged or result.stopped:
                break
        result.train_s += time.perf_counter() - epoch_began
        if stop.requested:
            at.epoch = epoch + done / num_steps
            break
        if diverged:
            at.step = first_step
            good.restore()
            job = jobs[-1] = _after_divergence(task, job, at, result)
            continue
        at.epoch = epoch + done / num_steps
        epoch += 1
        if epoch == 1:
            _compare_with_plan(job, (logged_at - epoch_began) / done, run)
        if epoch % train.validate_every and not (result.stopped or epoch == train.epochs):
            continue

        validation_began = time.perf_counter()
        job, val_loss = _validate(task, job)
        jobs[-1] = job
        improved = val_loss < at.best_loss - train.min_delta
        if improved:
            result.weights = _copied(task.model)
        _judge(at, val_loss, improved, train)
        result.validate_s += time.perf_counter() - validation_began
        run.append(
            "epoch",
            epoch=epoch,
            step=at.step,
            train_loss=float(job.tape.losses[:done].double().mean()),
            val_loss=val_loss,
            lr=rates[done - 1],
            best=improved,
            seconds=time.perf_counter() - epoch_began,
        )
        if train.patience != "off" and at.since_best >= train.patience and not result.stopped:
            result.stopped = f"no improvement in {train.patience} validations"
        if time.perf_counter() - saved_at > CHECKPOINT_EVERY_S and not result.stopped:
            _save(writer, task.model, job.optimizer, result)
            saved_at = time.perf_counter()
    result.stopped = result.stopped or "all epochs done"
    _save(writer, task.model, job.optimizer, result)


def _step(task: Task, job: Job, epoch: int, done: int) -> Job:
    """One step; where memory runs out, the same step again in halves, by a new job."""
    while True:
        generators = recover.get_generators()
        try:
            job.advance()
            return job
        except RuntimeError as error:
            if not recover.is_out_of_memory(error):
                raise
            why = str(error).split("\n", 1)[0]
        # past the except block, whose traceback would pin the failed step's tensors
        job = _halved(task, job, why)
        recover.set_generators(generators)
        job.home.begin(epoch, at=done)
        job.tape.begin(at=done)


def _validate(task: Task, job: Job) -> tuple[Job, float]:
    while True:
        try:
            job.val_home.begin(0)
            job.val_tape.begin()
            for _ in range(job.val_home.num_steps):
                job.check()
            return job, float(job.val_tape.losses.double().sum()) / task.dataset.count["val"]
        except RuntimeError as error:
            if not recover.is_out_of_memory(error):
                raise
            why = str(error).split("\n", 1)[0]
        job = _halved(task, job, why)


def _halved(task: Task, job: Job, why: str) -> Job:
    """The job with half the windows per pass and the effective batch kept."""
    if job.batch == 1:
        raise UserError(
            f"out of memory with a single window per pass ({why}); what is left to try: "
            f"{recover.remedies(task.config)}"
        )
    batch = -(-job.batch // 2)
    job.close()
    recover.free_memory()
    task.run.append("recovery", what="out of memory", remedy=f"{batch} windows per pass", why=why)
    return set_up(task, replace(job.plan, micro_batch=batch), like=job)


def _after_divergence(task: Task, job: Job, at: Progress, result: Fit) -> Job:
    """After a rollback: leave fp16 if that is where it was, else halve the learning rate."""
    if at.rollbacks == recover.MOST_ROLLBACKS:
        result.stopped = DIVERGED
        return job
    at.rollbacks += 1
    if job.plan.precision == "fp16":
        remedy = "fp32 instead of fp16"
        reasons = job.plan.reasons | {"precision": "fp16 gave a loss that was not finite"}
        job.close()
        plan = replace(job.plan, precision="fp32", reasons=reasons)
        job = set_up(task, plan, like=job)
    else:
        at.rate /= 2
        remedy = f"learning rate times {at.rate:g}"
    task.run.append("recovery", what=DIVERGED, remedy=remedy, step=at.step)
    return job


def _reason_to_stop(stop: Stop, out_of_time: bool) -> str:
    if stop.requested:
        return "interrupted"
    return "train.minutes have passed" if out_of_time else ""


def _compare_with_plan(job: Job, seen_s: float, run: Run) -> None:
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


def _judge(at: Progress, val_loss: float, improved: bool, train: Train) -> None:
    """Note a validation: the best so far, and the plateau schedule's cut if one is due."""
    if improved:
        at.best_loss, at.best_epoch, at.best_step = val_loss, at.epoch, at.step
        at.since_best = at.since_cut = 0
        return
    at.since_best += 1
    at.since_cut += 1
    if train.schedule == "plateau" and at.since_cut >= train.plateau_patience:
        at.rate = max(at.rate * train.plateau_factor, train.lr_min / train.lr)
        at.since_cut = 0


def _copied(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def _save(
    writer: checkpoint.Writer, model: nn.Module, optimizer: torch.optim.Optimizer, result: Fit
) -> None:
    """Write the newest state, and the best weights if they are older; drop the rest."""
    at = result.progress
    writer.save(step=at.step, weights=model.state_dict(), optimizer=optimizer, progress=asdict(at))
    if result.weights and at.best_step != at.step:
        writer.save(step=at.best_step, weights=result.weights, progress=asdict(at))
    writer.keep_only({at.step, at.best_step})
    writer.run.append("checkpoint", step=at.step, best_step=at.best_step)
