"""What one run trains with: the data's home, the optimizer, the step and the validation, set up."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from slipstream.config import Config
from slipstream.data import labelled, windows
from slipstream.data.dataset import Dataset
from slipstream.data.windows import Series
from slipstream.engine import copies, encoder, homes, objective, optim, step
from slipstream.engine.capture import Captured
from slipstream.engine.copies import Copies
from slipstream.engine.encoder import Match
from slipstream.engine.homes import Draw, Home, Program, Share
from slipstream.engine.objective import Objective
from slipstream.engine.optim import LossScale
from slipstream.engine.plan import Plan
from slipstream.engine.step import Tape
from slipstream.engine.streaming import Streamed
from slipstream.kernels import by_kernel, rehearsal
from slipstream.models import OWN, Noise, drops, use
from slipstream.runs import Run

TRAINING = "training step"


@dataclass(frozen=True)
class Task:
    """What is trained, on what, and where it is told."""

    config: Config
    model: nn.Module
    dataset: Dataset
    series: Series | None
    """Where the plan's home wants them; None where they are streamed"""
    run: Run
    fingerprint: str = ""
    """Of the data's content"""
    init: Match | None = None
    """A pre-trained encoder that the model starts from"""
    copies: Copies | None = None
    """Augmented training windows on disk, in place of the series'"""


def weighed(config: Config, dataset: Dataset) -> Config:
    """The config with balanced class weights as the numbers that they are for this data."""
    if config.train.class_weights != "balanced":
        return config
    weights = labelled.balanced(dataset.class_counts())
    train = config.train.model_copy(update={"class_weights": weights})
    return config.model_copy(update={"train": train})


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
    frozen: bool = False
    """Whether the encoder that training started from stays as it is"""

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
        optim.clear_grads(self.optimizer, set_to_none=True)


def set_up(task: Task, plan: Plan, *, like: Job | None = None, frozen: bool | None = None) -> Job:
    """Everything that training needs. `like` hands on an earlier job's optimizer and tape.

    `frozen` says whether an encoder that training starts from stays as it is; by default it is as
    before.
    """
    config, model, dataset = task.config, task.model, task.dataset
    train, device = config.train, plan.device
    assert train.batch != "auto"
    batch = plan.micro_batch or train.batch
    use(model, algorithms=plan.cudnn, recompute=plan.recompute, compiled=plan.compile)
    if like is None:
        lr = torch.tensor(train.lr, device=device)
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        parts = [(part.rate, part.items) for part in encoder.parts(named, config)]
        optimizer = optim.build(train, optim.with_rates(parts, lr), lr, fused=plan.fused)
    else:
        lr, optimizer = like.lr, like.optimizer
    if frozen is None:
        frozen = like is not None and like.frozen
    if train.init_from is not None:
        encoder.freeze(model, frozen)
    scale = None
    if plan.precision == "fp16":
        scale = (like and like.scale) or optim.loss_scale(device)

    effective = train.batch * train.accumulate
    home = _home(task, plan, "train", effective, batch, config.order_seed)
    chunk = min(step.CHUNK if batch == train.batch else batch, dataset.count["val"])
    val_home = _home(task, plan, "val", chunk, chunk, None)
    tape = like.tape if like else step.tape(home.num_steps, device)
    val_tape = step.tape(val_home.num_steps, device)
    asked = objective.of(config, dataset.signature, plan, drops=drops(config.model))
    noise = _noise(config, device)
    advance = step.training(
        model,
        optimizer,
        lr,
        home,
        tape,
        objective=asked,
        train=train,
        plan=plan,
        scale=scale,
        noise=noise,
    )
    judged = objective.in_validation(config, dataset.signature, plan)
    check = step.validation(model, val_home, val_tape, objective=judged)
    if OWN in plan.cudnn and task.series is not None and by_kernel(task.series.values):
        _rehearse(model, task.series, (asked, batch), (judged, chunk), noise)
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
        frozen=frozen,
    )


def _rehearse(
    model: nn.Module,
    series: Series,
    training: tuple[Objective, int],
    validation: tuple[Objective, int],
    noise: Noise | None,
) -> None:
    """Have all kernels of both passes built at once, for so many windows each."""

    def windows_of(count: int) -> Share:
        rows = torch.zeros(count, dtype=torch.int64, device=series.values.device)
        return Share(windows.gather(series, rows), rows.float())

    with rehearsal():
        model.train()
        step.loss(model, windows_of(training[1]), noise, objective=training[0]).backward()
        model.zero_grad()
        model.eval()
        with torch.no_grad():
            step.loss(model, windows_of(validation[1]), None, objective=validation[0])


def _noise(config: Config, device: torch.device) -> Noise | None:
    if not (drops(config.model) or objective.draws(config)):
        return None
    key = torch.full((), config.seed, dtype=torch.int64, device=device)
    return Noise(key, torch.full((), config.model.dropout, device=device))


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
            # however small the passes become: the order stays when memory runs out in mid-epoch
            read=effective // task.config.train.accumulate if which == "train" else None,
        )
    assert memory is not None
    assert task.series is not None
    if which == "train" and task.copies is not None:
        drawn = task.copies.draw(effective, batch, seed)
        if plan.device.type == "cpu":
            return copies.OnCpu(task.copies, drawn)
        return copies.ToCuda(task.copies, drawn, plan.device, engine)
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
