"""What one run trains with: the data's home, the optimizer, the step and the validation, set up."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from slipstream.config import Config
from slipstream.data import windows
from slipstream.data.dataset import Dataset
from slipstream.data.labels import selection
from slipstream.data.windows import Series
from slipstream.engine import objective, optim, pretrained, step
from slipstream.engine.batches.augmented import (
    AugmentedCopies,
    AugmentedHostSource,
    AugmentedSource,
)
from slipstream.engine.batches.device import DeviceSource
from slipstream.engine.batches.host import HostSource, TransferOptions
from slipstream.engine.batches.loader import LoaderSource
from slipstream.engine.batches.source import BatchSource, EpochSampler, MicroBatch, Program
from slipstream.engine.batches.stream import StreamBatching, StreamSource
from slipstream.engine.capture import CapturedProgram
from slipstream.engine.objective import Objective
from slipstream.engine.optim import LossScale
from slipstream.engine.plan import Plan
from slipstream.engine.pretrained import EncoderMatch
from slipstream.engine.step import EpochBuffers
from slipstream.kernels import precompile, should_use_triton
from slipstream.models import OWN_KERNELS, Noise, has_dropout, set_execution
from slipstream.runs import Run

TRAINING = "training step"


@dataclass(frozen=True)
class TrainingTask:
    """What is trained, on what, and where it is told."""

    config: Config
    model: nn.Module
    dataset: Dataset
    series: Series | None
    """Where the plan's home wants them; None where they are streamed"""
    run: Run
    fingerprint: str = ""
    """Of the data's content"""
    init: EncoderMatch | None = None
    """A pre-trained encoder that the model starts from"""
    copies: AugmentedCopies | None = None
    """Augmented training windows on disk, in place of the series'"""


def resolve_class_weights(config: Config, dataset: Dataset) -> Config:
    """The config with balanced class weights as the numbers that they are for this data."""
    if config.train.class_weights != "balanced":
        return config
    weights = selection.balance_weights(dataset.count_classes())
    train = config.train.model_copy(update={"class_weights": weights})
    return config.model_copy(update={"train": train})


@dataclass(frozen=True)
class SingleStep:
    """The programs of one run, and what they share with the loop."""

    advance: Program
    validate_batch: Program
    captured: dict[str, CapturedProgram]
    """Those of the two that are CUDA graphs, before their homes feed them"""
    batches: BatchSource
    val_batches: BatchSource
    buffers: EpochBuffers
    val_buffers: EpochBuffers
    optimizer: torch.optim.Optimizer
    lr: Tensor
    scale: LossScale | None
    plan: Plan
    micro_batch: int
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
        self.batches.close()
        self.val_batches.close()
        for program in self.captured.values():
            program.close()
        optim.clear_grads(self.optimizer, set_to_none=True)


def build_step(
    task: TrainingTask, plan: Plan, *, like: SingleStep | None = None, frozen: bool | None = None
) -> SingleStep:
    """Everything that training needs. `like` hands on an earlier job's optimizer and tape.

    `frozen` says whether an encoder that training starts from stays as it is; by default it is as
    before.
    """
    config, model, dataset = task.config, task.model, task.dataset
    train, device = config.train, plan.device
    assert train.batch != "auto"
    batch = plan.micro_batch or train.batch
    set_execution(model, algorithms=plan.cudnn, recompute=plan.recompute, compiled=plan.compile)
    if like is None:
        lr = torch.tensor(train.lr, device=device)
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        parts = [(part.lr_factor, part.items) for part in pretrained.group_weights(named, config)]
        optimizer = optim.build_optimizer(
            train, optim.make_param_groups(parts, lr), lr, fused=plan.fused
        )
    else:
        lr, optimizer = like.lr, like.optimizer
    if frozen is None:
        frozen = like is not None and like.frozen
    if train.init_from is not None:
        pretrained.freeze(model, frozen)
    scale = None
    if plan.precision == "fp16":
        scale = (like and like.scale) or optim.build_loss_scale(device)

    effective = train.batch * train.accumulate
    home = _home(task, plan, "train", effective, batch, config.order_seed)
    chunk = min(step.EVAL_BATCH if batch == train.batch else batch, dataset.num_windows["val"])
    val_home = _home(task, plan, "val", chunk, chunk, None)
    tape = like.buffers if like else step.build_buffers(home.num_steps, device)
    val_tape = step.build_buffers(val_home.num_steps, device)
    asked = objective.build_objective(
        config, dataset.signature, plan, drops=has_dropout(config.model)
    )
    noise = _noise(config, device)
    advance = step.build_training_step(
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
    judged = objective.build_validation_objective(config, dataset.signature, plan)
    check = step.build_validation_step(model, val_home, val_tape, objective=judged)
    if (
        OWN_KERNELS in plan.cudnn
        and task.series is not None
        and should_use_triton(task.series.values)
    ):
        _rehearse(model, task.series, (asked, batch), (judged, chunk), noise)
    captured: dict[str, CapturedProgram] = {}
    if plan.capture:
        advance = captured[TRAINING] = CapturedProgram(advance, device, steps=plan.steps_per_graph)
        check = captured["validation step"] = CapturedProgram(check, device)
    return SingleStep(
        advance=home.wrap_program(advance),
        validate_batch=val_home.wrap_program(check),
        captured=captured,
        batches=home,
        val_batches=val_home,
        buffers=tape,
        val_buffers=val_tape,
        optimizer=optimizer,
        lr=lr,
        scale=scale,
        plan=plan,
        micro_batch=batch,
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

    def windows_of(count: int) -> MicroBatch:
        rows = torch.zeros(count, dtype=torch.int64, device=series.values.device)
        return MicroBatch(windows.gather(series, rows), rows.float())

    with precompile():
        model.train()
        step.compute_loss(model, windows_of(training[1]), noise, objective=training[0]).backward()
        model.zero_grad()
        model.eval()
        with torch.no_grad():
            step.compute_loss(model, windows_of(validation[1]), None, objective=validation[0])


def _noise(config: Config, device: torch.device) -> Noise | None:
    if not (has_dropout(config.model) or objective.uses_noise(config)):
        return None
    key = torch.full((), config.seed, dtype=torch.int64, device=device)
    return Noise(key, torch.full((), config.model.dropout, device=device))


def _home(
    task: TrainingTask, plan: Plan, which: str, effective: int, batch: int, seed: int | None
) -> BatchSource:
    """The plan's home for one set of windows."""
    memory, stream = task.dataset.memory, task.dataset.stream
    options = TransferOptions(plan.device, task.config.engine, plan.workers, plan.prefetch)
    if stream is not None:
        # however small the passes become: the order stays when memory runs out in mid-epoch
        read = effective // task.config.train.accumulate if which == "train" else None
        return StreamSource(stream, which, StreamBatching(effective, batch, seed, read), options)
    assert memory is not None
    assert task.series is not None
    if which == "train" and task.copies is not None:
        sampler = task.copies.build_sampler(effective, batch, seed)
        if plan.device.type == "cpu":
            return AugmentedSource(task.copies, sampler)
        return AugmentedHostSource(task.copies, sampler, options)
    sampler = EpochSampler(memory.starts[which], effective, batch, seed)
    match plan.home:
        case "device":
            return DeviceSource(task.series, sampler)
        case "host":
            return HostSource(task.series, sampler, options)
        case _:
            return LoaderSource(task.series, sampler, options)
