"""The step program of a single model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from slipstream.base.errors import Interrupted, ResumableError, UserError
from slipstream.base.text import format_count
from slipstream.config import Train
from slipstream.config.base import hash_seed
from slipstream.data import windows
from slipstream.data.windows import Series
from slipstream.engine import carried, lanes, objective, optim, recovery, step
from slipstream.engine.batches import (
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
)
from slipstream.engine.capture import CapturedProgram, CaptureSeconds
from slipstream.engine.carried import CarriedSource, ChunkGrid
from slipstream.engine.context import RunContext
from slipstream.engine.lanes import EpochStart, Lane
from slipstream.engine.objective import Objective
from slipstream.engine.optim import LossScale, ParameterUpdate
from slipstream.engine.plan import ONE_AT_A_TIME, Plan
from slipstream.engine.step import NO_ROWS, DrawNoise, EpochBuffers, StepProgram
from slipstream.events import EncoderThawed, Fallback, Recovery
from slipstream.kernels import precompile, should_use_triton
from slipstream.models.forecaster import OWN_KERNELS, build, has_dropout, set_execution
from slipstream.models.noise import Noise

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
    """The captured ones among the training and validation programs, without their batch sources"""
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
            self.batches.start_epoch(epoch.number, step=epoch.step)
        rates = self._compute_rates(epoch)
        self.buffers.begin(rates, step=epoch.step, first=epoch.steps_before)

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
    context: RunContext, plan: Plan, *, like: SingleStep | None = None, frozen: bool | None = None
) -> SingleStep:
    """Build all that training needs. `like` hands on an earlier step's optimizer and buffers.

    `frozen` says whether an encoder that training starts from stays as it is; by default it is as
    before.
    """
    config, model, signature = context.config, context.model, context.dataset.signature
    train, device = config.train, plan.device
    assert train.batch != "auto"
    share = context.share_batch()
    most = share.width if share else train.batch
    batch = min(plan.micro_batch or most, most)
    set_execution(model, algorithms=plan.rnn, recompute=plan.recompute, compiled=plan.compile)
    update = _build_update(context, plan, like)
    frozen = (like is not None and like.frozen) if frozen is None else frozen
    if train.init_from is not None:
        optim.freeze(model, frozen)
    chunk = step.EVAL_BATCH if batch == most else batch
    chunk = max(min(chunk, context.num_validated), 1)
    states: Sequence[Tensor] = like.buffers.states if like else ()
    if context.is_carried:
        states = states or _make_states(context, context.training_grid)
        batches, val_batches = _build_carried_sources(context, states, batch)
    else:
        batches = _build_source(context, plan, "train", context.windows_per_step, batch)
        val_batches = _build_source(context, plan, "val", chunk, chunk)
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
        ranks=context.ranks,
    )
    validation = objective.build_validation_objective(config, signature, plan)
    check = step.build_validation_step(model, val_batches, val_buffers, objective=validation)
    series = context.series
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


def _build_update(context: RunContext, plan: Plan, like: SingleStep | None) -> ParameterUpdate:
    """The optimizer over all weights, or an earlier step's, with the plan's loss scale."""
    train, device = context.config.train, plan.device
    if like is None:
        lr = torch.tensor(train.lr, device=device)
        named = [(name, p) for name, p in context.model.named_parameters() if p.requires_grad]
        params = optim.make_param_groups(optim.group_weights(named, context.config), lr)
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


def _make_states(context: RunContext, grid: ChunkGrid) -> list[Tensor]:
    model: Any = context.model
    assert context.series is not None
    sequences = grid.num_streams * context.series.sequences_per_window
    states: list[Tensor] = model.make_states(sequences, context.series.values.device)
    return states


def _build_carried_sources(
    context: RunContext, states: Sequence[Tensor], batch: int
) -> tuple[BatchSource, BatchSource]:
    """The chunks of the training rows, so many pieces per pass, and those of whole series up to
    their last validation row."""
    memory, series, length = context.dataset.memory, context.series, context.config.data.context
    assert memory is not None
    assert series is not None
    grid = context.training_grid
    shares = grid.weigh(context.target_rows, mean=True)
    training = CarriedSource(series, grid, shares, states, batch)
    rows = np.sort(memory.starts["val"].numpy()) + length - 1
    pieces = carried.find_whole_pieces(rows, context.dataset.index.segments)
    whole = carried.lay_out_whole(pieces, max(length, carried.MIN_ROWS))
    weights = whole.weigh(rows, mean=False)
    return training, CarriedSource(
        series, whole, weights, _make_states(context, whole), whole.num_streams
    )


def _build_source(
    context: RunContext, plan: Plan, subset: str, effective: int, batch: int
) -> BatchSource:
    """The batches of one set of windows, from the plan's home; only training shuffles them."""
    memory, stream = context.dataset.memory, context.dataset.stream
    seed = context.config.order_seed if subset == "train" else None
    options = TransferOptions(plan.device, context.config.engine, plan.workers, plan.prefetch)
    if stream is not None:
        # however small the passes become: the order stays when memory runs out in mid-epoch
        read = effective // context.config.train.accumulate if subset == "train" else None
        return StreamSource(stream, subset, StreamBatching(effective, batch, seed, read), options)
    assert memory is not None
    assert context.series is not None
    share = context.share_batch() if subset == "train" else None
    if subset == "train" and context.copies is not None:
        sampler = context.copies.build_sampler(effective, batch, seed)._replace(share=share)
        if plan.device.type == "cpu":
            return AugmentedSource(context.copies, sampler)
        return AugmentedHostSource(context.copies, sampler, options)
    starts = memory.starts["train"] if subset == "train" else context.select_validation_windows()
    sampler = EpochSampler(starts, effective, batch, seed, share)
    match plan.home:
        case "device":
            return DeviceSource(context.series, sampler)
        case "host":
            return HostSource(context.series, sampler, options)
        case _:
            return LoaderSource(context.series, sampler, options)


class SingleProgram(StepProgram):
    """The step program of a single model; lanes train in it one after another.

    Where memory runs out, it goes on from the same step with half the windows per pass. It freezes
    and thaws a pre-trained encoder as the config wants it.
    """

    mode = ONE_AT_A_TIME
    num_places = 1

    def __init__(self, context: RunContext, plan: Plan) -> None:
        self.context, self.plan = context, plan
        self.best: dict[str, Tensor] = {}
        self._step: SingleStep | None = None
        self._epoch = EpochStart()
        self._requested = 0
        """Steps that were requested of the current step program"""
        self._good: dict[str, Tensor] = {}
        """The state that `go_back` restores, by the names of `_collect_state`"""
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

    def put(self, place: int, lane: Lane, rows: Mapping[str, Tensor] = NO_ROWS) -> None:
        """Give the place to a lane. The first one starts from the run's model as it is, unless it
        has another seed, each later one from weights drawn from its own seed."""
        self.close()
        self._captured_s, self._step = self.capture_s(), None
        is_other = self._is_used or lane.config.seed != self.context.config.seed
        self.context = self.context.for_lane(lane)
        if is_other:
            self._draw_weights(lane)
        self._is_used = True
        self.best, self._good, self._restored = {}, {}, {}
        if rows:
            self._restore(rows)

    def _draw_weights(self, lane: Lane) -> None:
        """Have the model begin as it would alone, with torch's generators, which a custom model may
        draw from while it trains."""
        device, model = self.plan.device, self.context.model
        seed = hash_seed(lane.config.seed)
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            torch.manual_seed(seed)
            new = build(lane.config.model, self.context.dataset.signature)
        model.load_state_dict(new.state_dict() | dict(lane.init))
        model.requires_grad_(True)
        torch.manual_seed(seed)

    def num_steps(self, place: int) -> int:
        return self.context.num_steps

    def begin(self, epochs: Mapping[int, EpochStart]) -> None:
        (self._epoch,) = epochs.values()
        frozen = optim.is_frozen(self.context.config.train, self._epoch.number)
        if self._step is None:
            self._step, self._requested = self._build_step(frozen), 0
            self._load_rows()
        elif self._step.frozen and not frozen:
            self._unfreeze_encoder()
        self.step.begin(self._epoch)
        if not self._epoch.step or not self._good:
            self._good = {name: t.clone() for name, t in self._collect_state().items()}

    def _unfreeze_encoder(self) -> None:
        """Rebuild the step so that it trains the encoder as well."""
        self.step.close()
        if self.plan.capture:
            recovery.free_memory()
        epoch, before = self._epoch.number + 1, self._epoch.steps_before
        self.context.run.append(EncoderThawed(what="the encoder", epoch=epoch, step=before))
        self._rebuild_step(frozen=False)

    def _rebuild_step(self, *, frozen: bool | None = None) -> None:
        """Build the step by the plan as it is now, with the optimizer and the buffers of before."""
        self._step = build_step(self.context, self.plan, like=self.step, frozen=frozen)
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
        self._run_with_recovery(self.step.advance)
        if self.context.config.engine.sync:
            int(self.step.buffers.cursor)

    @property
    def positions(self) -> Tensor | None:
        return self.step.positions

    def flush(self) -> None:
        self._run_with_recovery(self.step.flush)

    def _run_with_recovery(self, action: Program) -> None:
        """Run steps; where one fails, apply the remedy for its error and run the missing steps."""
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
            self.step.batches.start_epoch(self._epoch.number, step=position)
            self.step.buffers.begin(step=position)
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
            return build_step(self.context, self.plan, frozen=frozen)
        except Exception as error:
            if recovery.is_out_of_memory(error) or not self._may_leave_own_kernels(error):
                raise
            why = recovery.first_line(error)
        # past the except block, whose traceback would pin the failed step's tensors
        self._plan_without_own_kernels(why)
        return build_step(self.context, self.plan, frozen=frozen)

    def _may_leave_own_kernels(self, error: Exception) -> bool:
        """Whether an error may be one of our kernels on the GPU, whose compiler raises anything."""
        is_ours = isinstance(error, UserError | Interrupted)
        is_open = OWN_KERNELS in self.plan.rnn and self.context.config.engine.rnn == "auto"
        return self.plan.device.type == "cuda" and is_open and not is_ours

    def _leave_own_kernels(self, why: str) -> None:
        """Build the step with cuDNN's layers."""
        self.step.close()
        self._plan_without_own_kernels(why)
        self._rebuild_step()

    def _plan_without_own_kernels(self, why: str) -> None:
        self.context.run.append(Fallback(what="cuDNN instead of our own kernels", why=why))
        reasons = self.plan.reasons | {"rnn": f"our own kernels failed: {why}"}
        self.plan = replace(self.plan, rnn=("cudnn",) * len(self.plan.rnn), reasons=reasons)

    def _halve(self, why: str) -> None:
        """Build the step with half the windows per pass and the effective batch kept."""
        if self.step.micro_batch == 1:
            raise UserError(
                f"out of memory with a single window per pass ({why}); try "
                f"{recovery.suggest_remedies(self.context.config)}"
            )
        batch = -(-self.step.micro_batch // 2)
        self.step.close()
        recovery.free_memory()
        remedy = f"{format_count(batch, 'window')} per pass"
        self.context.run.append(Recovery(what="out of memory", remedy=remedy, why=why))
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
        if (ranks := self.context.ranks) is not None:
            ranks.check_same(self.context.model.parameters())
            total = ranks.sum(total)
        return [total / self.context.dataset.num_windows["val"]]

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

    def _model_state(self) -> dict[str, Tensor]:
        state: dict[str, Tensor] = self.context.model.state_dict()
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

    def _restore(self, rows: Mapping[str, Tensor]) -> None:
        """Put the model back to where its rows were read; the rest waits for the step."""
        try:
            self.context.model.load_state_dict(_strip(rows, "live.model."))
        except RuntimeError as error:
            raise UserError(f"the checkpoint does not fit: {error}") from None
        device = self.plan.device
        self.best = {name: row.to(device, copy=True) for name, row in _strip(rows, "best.").items()}
        self._good = {name: row.to(device) for name, row in _strip(rows, "good.").items()}
        self._restored = dict(rows)

    def _load_rows(self) -> None:
        """Give the optimizer, the loss scale and the losses what `put` has brought."""
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
