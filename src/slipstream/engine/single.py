"""The step program of a single model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from slipstream.base.errors import Interrupted, ResumableError, UserError
from slipstream.base.text import format_count
from slipstream.config import Config, Train
from slipstream.config.base import hash_seed
from slipstream.data import labels, windows
from slipstream.data.dataset import Dataset
from slipstream.data.series import Ints
from slipstream.data.windows import Series
from slipstream.engine import carried, lanes, objective, optim, recovery, step
from slipstream.engine.batches import (
    AugmentedCopies,
    AugmentedHostSource,
    AugmentedSource,
    BatchShare,
    BatchSource,
    DeviceSource,
    EpochSampler,
    HostSource,
    LoaderSource,
    MicroBatch,
    Program,
    StreamBatching,
    StreamSource,
    TransferOptions,
    prepare_copies,
)
from slipstream.engine.capture import CapturedProgram, CaptureSeconds
from slipstream.engine.carried import CarriedSource, ChunkGrid
from slipstream.engine.lanes import EpochStart, Lane
from slipstream.engine.objective import Objective
from slipstream.engine.optim import LossScale, ParameterUpdate
from slipstream.engine.parallel import Ranks
from slipstream.engine.plan import Plan
from slipstream.engine.step import DrawNoise, EpochBuffers
from slipstream.kernels import precompile, should_use_triton
from slipstream.models.forecaster import OWN_KERNELS, build, has_dropout, set_execution
from slipstream.models.noise import Noise
from slipstream.runs import Run


@dataclass(frozen=True)
class TrainingTask:
    """What is trained, on which data, and the run that records it."""

    config: Config
    model: nn.Module
    dataset: Dataset
    series: Series | None
    """Where the plan's home wants them; None where they are streamed"""
    run: Run
    fingerprint: str = ""
    """Of the data's content"""
    init: Mapping[str, Tensor] = field(default_factory=dict)
    """Weights of a pre-trained encoder that the model starts from"""
    copies: AugmentedCopies | None = None
    """Augmented training windows on disk, in place of the series'"""
    ranks: Ranks | None = None
    """The processes that train the model together, where there are several"""

    @property
    def is_carried(self) -> bool:
        """Whether steps go on with the states of the ones before."""
        return self.config.train.state == "carried"

    @property
    def windows_per_step(self) -> int:
        """Windows of one optimizer step, or pieces of series side by side."""
        train = self.config.train
        assert train.batch != "auto"
        return train.batch * train.accumulate

    def share_batch(self) -> BatchShare | None:
        """Return what this process computes of every batch, where several train together."""
        batch = self.config.train.batch
        assert batch != "auto"
        return BatchShare(self.ranks.rank, self.ranks.size, batch) if self.ranks else None

    @property
    def num_validated(self) -> int:
        """Validation windows of this process"""
        whole = self.dataset.num_windows["val"]
        return whole if self.ranks is None else len(self.select_validation_windows())

    def select_validation_windows(self) -> Tensor:
        """Return the first rows of the validation windows, or of this process's share of them."""
        assert self.dataset.memory is not None
        starts, ranks = self.dataset.memory.starts["val"], self.ranks
        if ranks is None:
            return starts
        share = -(-len(starts) // ranks.size)
        return starts[ranks.rank * share : (ranks.rank + 1) * share]

    @property
    def num_steps(self) -> int:
        """Optimizer steps of one epoch."""
        if self.is_carried:
            return self.training_grid.num_steps
        return -(-self.dataset.num_windows["train"] // self.windows_per_step)

    @cached_property
    def target_rows(self) -> Ints:
        """The rows after which training predicts, where the state is carried on."""
        assert self.dataset.memory is not None
        starts, data = self.dataset.memory.starts["train"].numpy(), self.config.data
        index, signature = self.dataset.index, self.dataset.signature
        return carried.find_target_rows(starts, index, signature, data.stride)

    @cached_property
    def training_grid(self) -> ChunkGrid:
        """The chunks of the training rows, where the state is carried on."""
        context = self.config.data.context
        pieces = carried.find_pieces(self.target_rows, self.dataset.index.segments, context)
        return carried.divide_evenly(pieces, context, self.windows_per_step, self.config.order_seed)

    @property
    def num_parameters(self) -> int:
        return sum(p.numel() for p in self.model.parameters())

    def build_lane(self) -> Lane:
        """The task as the only lane of a program."""
        memory = self.dataset.memory
        starts = {} if memory is None else {name: memory.starts[name] for name in ("train", "val")}
        return Lane(self.config, starts, init=self.init)

    def for_lane(self, lane: Lane) -> TrainingTask:
        """The task with a lane's config and windows, and the same model."""
        memory, dataset = self.dataset.memory, self.dataset
        if memory is not None and lane.starts:
            counts = {name: len(starts) for name, starts in lane.starts.items()}
            dataset = replace(
                dataset,
                memory=replace(memory, starts=memory.starts | lane.starts),
                num_windows=dataset.num_windows | counts,
            )
        copies = self.copies
        if copies is not None and lane.config is not self.config:
            copies = prepare_copies(lane.config, dataset, self.run)
        return replace(self, config=lane.config, dataset=dataset, copies=copies)


@contextmanager
def seed_generators(seed: int, device: torch.device) -> Iterator[None]:
    """Seed torch's generators; the caller's are restored at the end."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(hash_seed(seed))
        yield


def build_task(
    config: Config,
    dataset: Dataset,
    plan: Plan,
    run: Run,
    *,
    fingerprint: str = "",
    init: Mapping[str, Tensor] = MappingProxyType({}),
    ranks: Ranks | None = None,
) -> TrainingTask:
    """Build the model, from `init` as far as it goes; put it and the data where the plan says."""
    config = resolve_settings(config, dataset)
    model = build(config.model, dataset.signature)
    if init:
        model.load_state_dict(init, strict=False)
    series = None if dataset.memory is None else dataset.memory.series
    if series is not None and plan.home == "device":
        series = series.to(plan.device)
    model.to(plan.device)
    copies = prepare_copies(config, dataset, run)
    return TrainingTask(config, model, dataset, series, run, fingerprint, init, copies, ranks)


def resolve_settings(config: Config, dataset: Dataset) -> Config:
    """Replace balanced class weights, and noise by column, by the numbers that they are for this
    data."""
    train, augment, scaler = config.train, config.augment, dataset.scaler
    if train.class_weights != "balanced" and not isinstance(augment.jitter, dict):
        return config
    if train.class_weights == "balanced":
        weights = labels.balance_weights(dataset.count_classes())
        train = train.model_copy(update={"class_weights": weights})
    if isinstance(augment.jitter, dict):
        jitter = tuple(
            augment.jitter.get(name, 0.0) * scaler.deviation[name] / scaler.size[name]
            for name in dataset.signature.inputs
        )
        augment = augment.model_copy(update={"jitter": jitter})
    return config.model_copy(update={"train": train, "augment": augment})


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
        rates = lanes.compute_lrs(self.train, epoch, self.batches.num_steps)
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
    set_execution(model, algorithms=plan.rnn, recompute=plan.recompute, compiled=plan.compile)
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
    if OWN_KERNELS in plan.rnn and series is not None and should_use_triton(series.values):
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


class SingleProgram:
    """The step program of a single model; lanes train in it one after another.

    Where memory runs out, it goes on from the same step with half the windows per pass. It freezes
    and thaws a pre-trained encoder as the config wants it.
    """

    mode = "one at a time"
    num_places = 1

    def __init__(self, task: TrainingTask, plan: Plan) -> None:
        self.task, self.plan = task, plan
        self.best: dict[str, Tensor] = {}
        self._step: SingleStep | None = None
        self._epoch = EpochStart()
        self._requested = 0
        """Steps that were requested of the current step program"""
        self._good: dict[str, Tensor] = {}
        """What `go_back` leads to, by the names of `_collect_state`"""
        self._restored: dict[str, Tensor] = {}
        """Rows that wait for the step to be built"""
        self._is_used = False
        self._captured_s = CaptureSeconds()
        """Of the lanes before"""

    @property
    def step(self) -> SingleStep:
        assert self._step is not None, "no epoch has begun"
        return self._step

    @property
    def losses(self) -> Tensor:
        return self.step.buffers.losses[None]

    def put(self, place: int, lane: Lane) -> None:
        """Give the place to a lane. The first one starts from the task's model as it is, unless it
        has another seed, each later one from weights drawn from its own seed."""
        self.close()
        self._captured_s, self._step = self.capture_s(), None
        is_other = self._is_used or lane.config.seed != self.task.config.seed
        self.task = self.task.for_lane(lane)
        if is_other:
            self._draw_weights(lane)
        self._is_used = True
        self.best, self._good, self._restored = {}, {}, {}

    def _draw_weights(self, lane: Lane) -> None:
        """Have the model begin as it would alone, with torch's generators, which a custom model may
        draw from while it trains."""
        device, model = self.plan.device, self.task.model
        seed = hash_seed(lane.config.seed)
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            torch.manual_seed(seed)
            new = build(lane.config.model, self.task.dataset.signature)
        model.load_state_dict(new.state_dict() | dict(lane.init))
        model.requires_grad_(True)
        torch.manual_seed(seed)

    def num_steps(self, place: int) -> int:
        return self.task.num_steps

    def prepare(self, place: int, epoch: EpochStart) -> bool:
        return False  # batch sources do that in a thread of their own

    def begin(self, epochs: Mapping[int, EpochStart]) -> None:
        (self._epoch,) = epochs.values()
        frozen = optim.is_frozen(self.task.config.train, self._epoch.number)
        if self._step is None:
            self._step, self._requested = self._build_step(frozen), 0
            self._load_rows()
        elif self._step.frozen and not frozen:
            self._thaw()
        self.step.begin(self._epoch)
        if not self._epoch.step or not self._good:
            self._good = {name: t.clone() for name, t in self._collect_state().items()}

    def _thaw(self) -> None:
        """Train the encoder as well; nothing of the step that spared it is left."""
        self.step.close()
        if self.plan.capture:
            recovery.free_memory()
        epoch, before = self._epoch.number + 1, self._epoch.steps_before
        self.task.run.append("thaw", what="the encoder", epoch=epoch, step=before)
        self._rebuild_step(frozen=False)

    def _rebuild_step(self, *, frozen: bool | None = None) -> None:
        """Build the step by the plan as it is now, with the optimizer and the buffers of before."""
        self._step = build_step(self.task, self.plan, like=self.step, frozen=frozen)
        self._requested = 0

    def update_rates(self, epochs: Mapping[int, EpochStart]) -> None:
        (self._epoch,) = epochs.values()
        self.step.update_rates(self._epoch)

    def load_best(self, place: int) -> None:
        for name, tensor in self._model_state().items():
            tensor.copy_(self.best[name])
        if self._step is None:  # it is about to be restored
            names = [name for name in self._restored if name.startswith("live.optimizer.")]
            for name in names:
                del self._restored[name]
        else:  # in place: a captured step reads them where they are
            for tensor in self._optimizer_state().values():
                tensor.zero_()

    def advance(self) -> None:
        self._requested += 1
        self._survive(self.step.advance)
        if self.task.config.engine.sync:
            int(self.step.buffers.cursor)

    @property
    def positions(self) -> Tensor | None:
        return self.step.positions

    def flush(self) -> None:
        self._survive(self.step.flush)

    def _survive(self, action: Program) -> None:
        """Run steps; where one fails, run those that are missing in a way that may work."""
        while True:
            try:
                action()
                return
            except Exception as error:
                recover = self._find_remedy(error)
            # past the except block, whose traceback would pin the failed step's tensors
            missing, position = self._count_missing(), int(self.step.buffers.cursor)
            recover()
            self._requested = missing
            self.step.batches.start_epoch(self._epoch.number, at=position)
            self.step.buffers.begin(at=position)
            action = self._catch_up

    def _count_missing(self) -> int:
        """Count the steps that were requested and not taken: a graph collects several."""
        return self._requested - self.step.num_taken

    def _catch_up(self) -> None:
        for _ in range(self._count_missing()):
            self.step.advance()
        self.step.flush()

    def _find_remedy(self, error: Exception) -> Program:
        """Return what helps against an error of a step; raise one that nothing helps against."""
        if isinstance(error, ResumableError):  # another process is gone
            raise error
        why = recovery.first_line(error)
        if recovery.is_out_of_memory(error):
            return partial(self._halve, why)
        if self._may_leave_own_kernels(error):
            return partial(self._leave_own_kernels, why)
        raise error

    def _build_step(self, frozen: bool) -> SingleStep:
        """Build the step, with cuDNN's layers if our own kernels cannot be built."""
        try:
            return build_step(self.task, self.plan, frozen=frozen)
        except Exception as error:
            if recovery.is_out_of_memory(error) or not self._may_leave_own_kernels(error):
                raise
            why = recovery.first_line(error)
        # past the except block, whose traceback would pin the failed step's tensors
        self._plan_without_own_kernels(why)
        return build_step(self.task, self.plan, frozen=frozen)

    def _may_leave_own_kernels(self, error: Exception) -> bool:
        """Whether an error may be one of our kernels on the GPU, whose compiler raises anything."""
        is_ours = isinstance(error, UserError | Interrupted)
        is_open = OWN_KERNELS in self.plan.rnn and self.task.config.engine.rnn == "auto"
        return self.plan.device.type == "cuda" and is_open and not is_ours

    def _leave_own_kernels(self, why: str) -> None:
        """Build the step with cuDNN's layers."""
        self.step.close()
        self._plan_without_own_kernels(why)
        self._rebuild_step()

    def _plan_without_own_kernels(self, why: str) -> None:
        self.task.run.append("fallback", what="cuDNN instead of our own kernels", why=why)
        reasons = self.plan.reasons | {"rnn": f"our own kernels failed: {why}"}
        self.plan = replace(self.plan, rnn=("cudnn",) * len(self.plan.rnn), reasons=reasons)

    def _halve(self, why: str) -> None:
        """Build the step with half the windows per pass and the effective batch kept."""
        if self.step.micro_batch == 1:
            raise UserError(
                f"out of memory with a single window per pass ({why}); try "
                f"{recovery.suggest_remedies(self.task.config)}"
            )
        batch = -(-self.step.micro_batch // 2)
        self.step.close()
        recovery.free_memory()
        remedy = f"{format_count(batch, 'window')} per pass"
        self.task.run.append("recovery", what="out of memory", remedy=remedy, why=why)
        self.plan = replace(self.plan, micro_batch=batch)
        self._rebuild_step()

    def score(self, places: Sequence[int], should_stop: Callable[[], bool]) -> list[float] | None:
        while True:
            try:
                total = self._validate(should_stop)
                break
            except Exception as error:
                recover = self._find_remedy(error)
            recover()
        if total is None:
            return None
        if (ranks := self.task.ranks) is not None:
            ranks.check_same(self.task.model.parameters())
            total = ranks.sum(total)
        return [total / self.task.dataset.num_windows["val"]]

    def _validate(self, should_stop: Callable[[], bool]) -> float | None:
        """Sum the losses of this process's validation windows; None if it has to stop before."""
        current = self.step
        current.val_batches.start_epoch(0)
        current.val_buffers.begin()
        for _ in range(current.val_batches.num_steps):
            if should_stop():
                return None
            current.validate_batch()
        return float(current.val_buffers.losses.double().sum())

    def weights(self, place: int) -> dict[str, Tensor]:
        return self._model_state()

    def keep_best(self, places: Sequence[int]) -> None:
        if places:
            self.best = {name: t.detach().clone() for name, t in self._model_state().items()}

    def best_weights(self, rows: Mapping[str, Tensor], lane: Lane) -> dict[str, Tensor]:
        return {name: row.to(self.plan.device) for name, row in _strip(rows, "best.").items()}

    def go_back(self, place: int) -> None:
        for name, tensor in self._collect_state().items():
            if name in self._good:
                tensor.copy_(self._good[name])
            else:  # copied before the first step, when the optimizer had no state
                tensor.zero_()

    def leave_low_precision(self) -> bool:
        if self.plan.precision != "fp16":
            return False
        reasons = self.plan.reasons | {"precision": "fp16 gave a loss that was not finite"}
        self.step.close()
        self.plan = replace(self.plan, precision="fp32", reasons=reasons)
        self._rebuild_step()
        return True

    def leave(self, place: int) -> None:
        pass  # the next lane, or `close`, takes the step away

    def _model_state(self) -> dict[str, Tensor]:
        state: dict[str, Tensor] = self.task.model.state_dict()
        return state

    def _collect_state(self) -> dict[str, Tensor]:
        """The tensors that a step changes: those of the model, the optimizer and the scale."""
        tensors = {f"model.{name}": tensor for name, tensor in self._model_state().items()}
        tensors |= self._optimizer_state() | _scale_state(self.step.update.scale)
        tensors |= {f"carried.{i}": state for i, state in enumerate(self.step.buffers.states)}
        return {name: tensor.detach() for name, tensor in tensors.items()}

    def _optimizer_state(self) -> dict[str, Tensor]:
        optimizer, tensors = self.step.optimizer, dict[str, Tensor]()
        for i, param in enumerate(_list_params(optimizer)):
            state = sorted(optimizer.state.get(param, {}).items())
            tensors |= {f"optimizer.{i}.{name}": t for name, t in state if isinstance(t, Tensor)}
        return tensors

    def state(self) -> dict[str, Tensor]:
        groups = {"live": self._collect_state(), "good": self._good, "best": self.best}
        tensors = {
            f"{kind}.{name}": t[None] for kind, ts in groups.items() for name, t in ts.items()
        }
        return tensors | {"losses": self.losses}

    def restore(self, place: int, rows: Mapping[str, Tensor]) -> None:
        try:
            self.task.model.load_state_dict(_strip(rows, "live.model."))
        except RuntimeError as error:
            raise UserError(f"the checkpoint does not fit: {error}") from None
        device = self.plan.device
        self.best = {name: row.to(device, copy=True) for name, row in _strip(rows, "best.").items()}
        self._good = {name: row.to(device) for name, row in _strip(rows, "good.").items()}
        self._restored = dict(rows)

    def _load_rows(self) -> None:
        """Give the optimizer, the loss scale and the losses what `restore` has brought."""
        rows, self._restored = self._restored, {}
        device, current = self.plan.device, self.step
        params = _list_params(current.optimizer)
        for key, value in _strip(rows, "live.optimizer.").items():
            index, name = key.split(".", 1)
            current.optimizer.state[params[int(index)]][name] = value.to(device, copy=True)
        tensors = _scale_state(current.update.scale)
        tensors |= {f"carried.{i}": state for i, state in enumerate(current.buffers.states)}
        for name, tensor in tensors.items():
            if f"live.{name}" in rows:
                tensor.copy_(rows[f"live.{name}"])
        if "losses" in rows:
            losses = rows["losses"][: current.batches.num_steps]  # more with a smaller batch
            current.buffers.losses[: len(losses)].copy_(losses)

    def describe(self) -> dict[str, Any]:
        return {}

    def compact(self, places: Sequence[int]) -> SingleProgram:
        return self

    def kernels(self) -> list[str]:
        return self._step.kernels() if self._step else []

    def failures(self) -> dict[str, str]:
        return self._step.failures() if self._step else {}

    def capture_s(self) -> CaptureSeconds:
        return self._captured_s.add(self._step.capture_s() if self._step else CaptureSeconds())

    def close(self) -> None:
        if self._step is not None:
            self._step.close()


def _strip(rows: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): t for name, t in rows.items() if name.startswith(prefix)}


def _list_params(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def _scale_state(scale: LossScale | None) -> dict[str, Tensor]:
    return {} if scale is None else {"scale": scale.scale, "since_growth": scale.since_growth}
