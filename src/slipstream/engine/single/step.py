"""The step of a single model with its batches and its optimizer.

The torch optimizer updates the weights, cuDNN, oneDNN or our own kernels compute the layers, and on
CUDA one graph may hold several steps.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from slipstream.config import Train
from slipstream.data import windows
from slipstream.data.windows import Series
from slipstream.engine import objective, optim, step
from slipstream.engine.batches.augmented import AugmentedHostSource, AugmentedSource
from slipstream.engine.batches.host import HostSource, LoaderSource, TransferOptions
from slipstream.engine.batches.source import (
    BatchShare,
    BatchSource,
    DeviceSource,
    EpochSampler,
    MicroBatch,
    Program,
)
from slipstream.engine.batches.stream import StreamBatching, StreamSource
from slipstream.engine.capture import CapturedProgram, CaptureSeconds
from slipstream.engine.carried import batches as carried
from slipstream.engine.carried.batches import CarriedSource, ChunkGrid
from slipstream.engine.lanes import schedule
from slipstream.engine.lanes.lane import EpochStart
from slipstream.engine.objective import Objective
from slipstream.engine.optim import ParameterUpdate
from slipstream.engine.plan import Plan
from slipstream.engine.single.task import TrainingTask
from slipstream.engine.step import DrawNoise, EpochBuffers
from slipstream.kernels import precompile, should_use_triton
from slipstream.models import OWN_KERNELS, Noise, has_dropout, set_execution

TRAINING, VALIDATION = "training step", "validation step"


class EagerProgram:
    """A program that counts its runs, as a captured one does."""

    def __init__(self, program: Program) -> None:
        self._program, self.num_runs = program, 0

    def __call__(self) -> None:
        self._program()
        self.num_runs += 1


@dataclass(frozen=True)
class SingleStep:
    """The training and the validation step of one model, and what they share with the loop."""

    advance: Program
    validate_batch: Program
    program: EagerProgram | CapturedProgram
    """The training step without what brings its batches"""
    captured: dict[str, CapturedProgram]
    """Those of the two that are CUDA graphs, without what brings their batches"""
    batches: BatchSource
    val_batches: BatchSource
    buffers: EpochBuffers
    val_buffers: EpochBuffers
    update: ParameterUpdate
    plan: Plan
    train: Train
    micro_batch: int
    """Windows of one forward pass"""
    frozen: bool = False
    """Whether the encoder that training started from stays as it is"""

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        return self.update.optimizer

    def begin(self, epoch: EpochStart) -> None:
        """Start an epoch, or go on within it."""
        if epoch.step < self.batches.num_steps:
            self.batches.start_epoch(epoch.number, at=epoch.step)
        rates = self._compute_rates(epoch)
        self.buffers.begin(rates, at=epoch.step, first=epoch.steps_before)

    def update_rates(self, epoch: EpochStart) -> None:
        """Have the steps that are still to be launched follow another pace."""
        self.buffers.update_rates(self._compute_rates(epoch))

    def _compute_rates(self, epoch: EpochStart) -> list[float]:
        rates = schedule.compute_lrs(self.train, epoch, self.batches.num_steps)
        return [epoch.rate * rate for rate in rates]

    @property
    def num_taken(self) -> int:
        """Steps that were taken since this was built, also those that are repeated later"""
        return self.program.num_runs

    @property
    def positions(self) -> Tensor | None:
        return None if self.update.scale is None else self.buffers.cursor

    def catch_up(self, position: int) -> None:
        """Repeat what overflowed until so many steps of the epoch are done, or give up."""
        for _ in range(optim.MAX_REPEATS):
            if self.positions is None or int(self.positions) >= position:
                return
            self.advance()
            self.flush()

    def failures(self) -> dict[str, str]:
        return {name: p.failure for name, p in self.captured.items() if p.failure}

    def capture_s(self) -> CaptureSeconds:
        spent = {name: program.setup_s for name, program in self.captured.items()}
        return CaptureSeconds(spent.get(TRAINING, 0.0), spent.get(VALIDATION, 0.0))

    def kernels(self) -> list[str]:
        """The decisive ones of the training step, where it was captured, and ours on a CPU."""
        program = self.captured.get(TRAINING)
        return program.kernels() if program else self.plan.native_kernels

    def flush(self) -> None:
        for program in self.captured.values():
            program.flush()

    def close(self) -> None:
        """Release workers, graphs and gradients."""
        self.batches.close()
        self.val_batches.close()
        for program in self.captured.values():
            program.close()
        optim.clear_grads(self.optimizer, set_to_none=True)


def build_step(
    task: TrainingTask, plan: Plan, *, like: SingleStep | None = None, frozen: bool | None = None
) -> SingleStep:
    """Build all that training needs. `like` hands on an earlier step's optimizer and buffers.

    `frozen` says whether an encoder that training starts from stays as it is; by default it is as
    before.
    """
    config, model, signature = task.config, task.model, task.dataset.signature
    train, device = config.train, plan.device
    assert train.batch != "auto"
    share = task.share_batch()
    most = share.width if share else train.batch
    batch = min(plan.micro_batch or most, most)
    set_execution(model, algorithms=plan.cudnn, recompute=plan.recompute, compiled=plan.compile)
    update = _build_update(task, plan, like)
    frozen = (like is not None and like.frozen) if frozen is None else frozen
    if train.init_from is not None:
        optim.freeze(model, frozen)
    chunk = step.EVAL_BATCH if batch == most else batch
    chunk = max(min(chunk, task.num_validated), 1)
    states: Sequence[Tensor] = like.buffers.states if like else ()
    if task.is_carried:
        states = states or _make_states(task, task.training_grid)
        batches, val_batches = _build_carried_sources(task, states, batch)
    else:
        batches = _build_source(task, plan, "train", task.windows_per_step, batch)
        val_batches = _build_source(task, plan, "val", chunk, chunk)
    buffers = like.buffers if like else step.build_buffers(batches.num_steps, device, states)
    val_buffers = step.build_buffers(val_batches.num_steps, device)
    drops, noise, draw_noise = has_dropout(config.model), None, None
    if drops or objective.uses_noise(config):
        key = torch.full((), config.seed, dtype=torch.int64, device=device)
        noise = Noise(key, torch.full((), config.model.dropout, device=device))
        draw_noise = _make_draw(noise, share, batch, signature.sequences_per_window)
    training = objective.build_objective(config, signature, plan, drops=drops)
    advance = step.build_training_step(
        *(model, batches, buffers, update),
        objective=training,
        noise=draw_noise,
        ranks=task.ranks,
    )
    validation = objective.build_validation_objective(config, signature, plan)
    check = step.build_validation_step(model, val_batches, val_buffers, objective=validation)
    series = task.series
    if OWN_KERNELS in plan.cudnn and series is not None and should_use_triton(series.values):
        _precompile(model, series, (training, batch), (validation, chunk), noise)
    captured: dict[str, CapturedProgram] = {}
    program: EagerProgram | CapturedProgram = EagerProgram(advance)
    if plan.capture:
        program = captured[TRAINING] = CapturedProgram(advance, device, steps=plan.steps_per_graph)
        check = captured[VALIDATION] = CapturedProgram(check, device)
    cursor = None if update.scale is None else buffers.cursor
    programs = batches.wrap_program(program, cursor), val_batches.wrap_program(check), program
    sources, tapes = (batches, val_batches), (buffers, val_buffers)
    return SingleStep(*programs, captured, *sources, *tapes, update, plan, train, batch, frozen)


def _make_draw(noise: Noise, share: BatchShare | None, batch: int, fold: int) -> DrawNoise:
    """Return what draws the noise of a pass; a share of a batch draws what the whole one does at
    its place."""
    if share is None:
        return noise.for_pass

    def draw(number_of_step: Tensor, number: int) -> Noise:
        whole, first = share.locate(number, batch)
        return noise.for_pass(number_of_step, whole).skip(first * fold)

    return draw


def _build_update(task: TrainingTask, plan: Plan, like: SingleStep | None) -> ParameterUpdate:
    """The optimizer over all weights, or an earlier step's, with the plan's loss scale."""
    train, device = task.config.train, plan.device
    if like is None:
        lr = torch.tensor(train.lr, device=device)
        named = [(name, p) for name, p in task.model.named_parameters() if p.requires_grad]
        params = optim.make_param_groups(optim.group_weights(named, task.config), lr)
        optimizer = optim.build_optimizer(train, params, lr, fused=plan.fused)
    else:
        lr, optimizer = like.update.lr, like.optimizer
    scale = None
    if plan.precision == "fp16":
        scale = (like and like.update.scale) or optim.build_loss_scale(device)
    clip = None if train.clip == "off" else train.clip
    return ParameterUpdate(optimizer, lr, scale, clip, plan.set_to_none)


def _precompile(
    model: nn.Module,
    series: Series,
    training: tuple[Objective, int],
    validation: tuple[Objective, int],
    noise: Noise | None,
) -> None:
    """Have all kernels of both passes built at once, for so many windows each."""

    def gather(count: int) -> MicroBatch:
        rows = torch.zeros(count, dtype=torch.int64, device=series.values.device)
        return MicroBatch(windows.gather(series, rows), rows.float())

    with precompile():
        model.train()
        step.compute_loss(model, gather(training[1]), noise, objective=training[0]).backward()
        model.zero_grad()
        model.eval()
        with torch.no_grad():
            step.compute_loss(model, gather(validation[1]), None, objective=validation[0])


def _make_states(task: TrainingTask, grid: ChunkGrid) -> list[Tensor]:
    model: Any = task.model
    assert task.series is not None
    sequences = grid.num_streams * task.series.sequences_per_window
    states: list[Tensor] = model.make_states(sequences, task.series.values.device)
    return states


def _build_carried_sources(
    task: TrainingTask, states: Sequence[Tensor], batch: int
) -> tuple[BatchSource, BatchSource]:
    """The chunks of the training rows, so many pieces per pass, and those of whole series up to
    their last validation row."""
    memory, series, context = task.dataset.memory, task.series, task.config.data.context
    assert memory is not None
    assert series is not None
    grid = task.training_grid
    shares = grid.weigh(task.target_rows, mean=True)
    training = CarriedSource(series, grid, shares, states, batch)
    rows = np.sort(memory.starts["val"].numpy()) + context - 1
    pieces = carried.find_whole_pieces(rows, task.dataset.index.segments)
    whole = carried.lay_out_whole(pieces, max(context, carried.MIN_ROWS))
    weights = whole.weigh(rows, mean=False)
    return training, CarriedSource(
        series, whole, weights, _make_states(task, whole), whole.num_streams
    )


def _build_source(
    task: TrainingTask, plan: Plan, which: str, effective: int, batch: int
) -> BatchSource:
    """The batches of one set of windows, from the plan's home; only training shuffles them."""
    memory, stream = task.dataset.memory, task.dataset.stream
    seed = task.config.order_seed if which == "train" else None
    options = TransferOptions(plan.device, task.config.engine, plan.workers, plan.prefetch)
    if stream is not None:
        # however small the passes become: the order stays when memory runs out in mid-epoch
        read = effective // task.config.train.accumulate if which == "train" else None
        return StreamSource(stream, which, StreamBatching(effective, batch, seed, read), options)
    assert memory is not None
    assert task.series is not None
    share = task.share_batch() if which == "train" else None
    if which == "train" and task.copies is not None:
        sampler = task.copies.build_sampler(effective, batch, seed)._replace(share=share)
        if plan.device.type == "cpu":
            return AugmentedSource(task.copies, sampler)
        return AugmentedHostSource(task.copies, sampler, options)
    starts = memory.starts["train"] if which == "train" else task.select_validation_windows()
    sampler = EpochSampler(starts, effective, batch, seed, share)
    match plan.home:
        case "device":
            return DeviceSource(task.series, sampler)
        case "host":
            return HostSource(task.series, sampler, options)
        case _:
            return LoaderSource(task.series, sampler, options)
