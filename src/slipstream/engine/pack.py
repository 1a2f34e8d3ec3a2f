"""The step program of a pack: many lanes in one step."""

from __future__ import annotations

import itertools
import math
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from slipstream import config as configs
from slipstream.base import machine
from slipstream.base.errors import UserError
from slipstream.config import Config, Model, Signature
from slipstream.config.base import hash_seed
from slipstream.data import windows
from slipstream.data.windows import Batch, Series
from slipstream.engine import lanes, objective, optim, step
from slipstream.engine.batches import EpochSampler, MicroBatch, Program
from slipstream.engine.capture import HIGH_PRIORITY, CapturedProgram, CaptureSeconds, raise_closed
from slipstream.engine.lanes import EpochStart, Lane
from slipstream.engine.objective import Objective
from slipstream.engine.optim import BACKOFF, GROW_AFTER, GROWTH
from slipstream.engine.plan import Plan
from slipstream.engine.step import NO_ROWS, StepProgram
from slipstream.kernels import precompile, should_use_triton
from slipstream.kernels.operands import BETA1, BETA2, EPSILON
from slipstream.models import padding
from slipstream.models.custom import list_buffers
from slipstream.models.forecaster import build, has_dropout, set_execution
from slipstream.models.noise import Noise

LaneMode = Literal["together", "branches"]
MAX_STREAMS = 16
ALIGNED = 4
"""Every weight begins at a multiple of so many numbers, as vector loads want it"""


class LayoutEntry(NamedTuple):
    """One weight's place among a lane's P numbers."""

    name: str
    shape: tuple[int, ...]
    size: int
    padding: int
    """Unused numbers after it"""


Layout = Sequence[LayoutEntry]


def build_layout(model: nn.Module) -> Layout:
    """Lay out a model's weights; a UserError if the model has buffers."""
    if aside := list_buffers(model):
        raise UserError(
            f"the model keeps more than weights ({', '.join(aside[:3])}), which models trained "
            "together cannot; use nn.LayerNorm or nn.GroupNorm in it, or train one model"
        )
    return [
        LayoutEntry(name, tuple(weight.shape), weight.numel(), -weight.numel() % ALIGNED)
        for name, weight in model.named_parameters()
    ]


def view_weights(weights: Tensor, layout: Layout) -> dict[str, Tensor]:
    """View every weight of lanes [K, P] by name, as parts of one split with one gradient."""
    sizes = [size for entry in layout for size in (entry.size, entry.padding) if size]
    parts = iter(weights.split(sizes, dim=1))
    named = {}
    for entry in layout:
        named[entry.name] = next(parts).view(-1, *entry.shape)
        if entry.padding:
            next(parts)
    return named


class ParameterSlice(NamedTuple):
    """A range of a lane's P numbers that are trained alike."""

    columns: slice
    lr_factor: float
    starts_frozen: bool


def build_slices(layout: Layout, config: Config) -> list[ParameterSlice]:
    """Group a lane's numbers: all of them, or the encoder's layers and the new head."""
    ends = list(itertools.accumulate(entry.size + entry.padding for entry in layout))
    named = ((entry.name, end) for entry, end in zip(layout, ends, strict=True))
    slices, begin = [], 0
    for rate, starts_frozen, items in optim.group_weights(named, config):
        slices.append(ParameterSlice(slice(begin, items[-1]), rate, starts_frozen))
        begin = items[-1]
    return slices


def explain_vmap_refusal(model: Model, signature: Signature) -> str:
    """Return why lanes of such a model cannot train together; empty if they can."""
    with torch.random.fork_rng([]):
        module = build(model, signature).train()
        weights = {name: torch.stack([w, w]).detach() for name, w in module.named_parameters()}
        inputs = torch.zeros(2, signature.context, 2, signature.model_inputs)
        beside = signature.static_width
        static = torch.zeros(2, 2, beside) if beside else None

        def run_lane(weights: dict[str, Tensor], *args: Any) -> Tensor:
            prediction: Tensor = functional_call(module, weights, args)
            return prediction

        try:
            vmap(run_lane, in_dims=(0, 0, None if static is None else 0))(weights, inputs, static)
        except RuntimeError as error:
            return str(error).strip().split("\n", 1)[0][:200]
    return ""


class LaneContext(NamedTuple):
    """The settings and data that all lanes of a pack share."""

    model: Model
    signature: Signature
    config: Config
    """Of one of them"""
    series: Series
    plan: Plan
    passes: int
    drops: bool
    """Whether any of them uses dropout"""

    @property
    def objective(self) -> Objective:
        return objective.build_objective(self.config, self.signature, self.plan, drops=self.drops)

    @property
    def val_objective(self) -> Objective:
        return objective.build_validation_objective(self.config, self.signature, self.plan)

    def build(self) -> nn.Module:
        with torch.random.fork_rng([]):
            return build(self.model, self.signature).to(self.plan.device)


class LaneGradients(Protocol):
    """One step's forward and backward passes, or one of validation."""

    def train(
        self, rows: Tensor, shares: Tensor, noise: Noise | None, now: Tensor, scale: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Losses [K], and gradients [K, P] times scale [K], of windows [K, A, B] in step now [K];
        the noise's keys are the seeds."""

    def validate(self, rows: Tensor, shares: Tensor) -> Tensor:
        """Summed losses [K] of windows [K, C]."""

    def select(self, places: set[int]) -> None:
        """Compute for these lanes only, where that can be chosen from step to step."""

    def close(self) -> None: ...


class BatchedGradients:
    """All lanes through one module under `vmap`."""

    def __init__(self, job: LaneContext, weights: Tensor, layout: Layout) -> None:
        self.job, self.weights, self.layout = job, weights, layout
        self.module = job.build()
        self.objective, self.val_objective = job.objective, job.val_objective
        if job.model.spec.is_recurrent:
            core: Any = self.module.core
            core.use_own_kernels = True

    def train(
        self, rows: Tensor, shares: Tensor, noise: Noise | None, now: Tensor, scale: Tensor
    ) -> tuple[Tensor, Tensor]:
        job, weights = self.job, self.weights.detach().requires_grad_()
        total = grads = None
        for number in range(job.passes):
            here = noise and noise.for_pass(now, number)
            windows_of = rows[:, number], shares[:, number]
            loss = self._losses(self.objective, weights, *windows_of, here)
            (grad,) = torch.autograd.grad((loss * scale).sum(), weights)
            grads = grad if grads is None else grads + grad
            total = loss.detach() if total is None else total + loss.detach()
        assert total is not None
        assert grads is not None
        return total, grads

    def validate(self, rows: Tensor, shares: Tensor) -> Tensor:
        return self._losses(self.val_objective, self.weights, rows, shares, None)

    def select(self, places: set[int]) -> None:
        pass

    def close(self) -> None:
        pass

    def _losses(
        self,
        objective: Objective,
        weights: Tensor,
        rows: Tensor,
        shares: Tensor,
        noise: Noise | None,
    ) -> Tensor:
        batch = windows.gather(self.job.series, rows)
        named = view_weights(weights, self.layout)
        of_noise = None if noise is None else 0
        by_lane = (0, 0, None if batch.static is None else 0, 0, 0, of_noise)

        def compute_lane_losses(weights: dict[str, Tensor], *args: Any) -> Tensor:
            def model(*inputs: Any) -> Any:
                return functional_call(self.module, weights, inputs)

            return objective(model, Batch(*args[:3]), *args[3:])

        losses: Tensor = vmap(compute_lane_losses, in_dims=by_lane)(named, *batch, shares, noise)
        return (losses * shares).sum(dim=1)


class BranchedGradients:
    """Each lane through a module of its own, whose weights are a row of the pack's."""

    def __init__(self, job: LaneContext, weights: Tensor, layout: Layout) -> None:
        self.job, self.layout = job, layout
        self.objective, self.val_objective = job.objective, job.val_objective
        K, P = weights.shape
        self.modules = [self._module(weights[k : k + 1]) for k in range(K)]
        self.places: set[int] = set()
        self.loss, self.grads = weights.new_zeros(K), weights.new_zeros(K, P)
        self.zeros = weights.new_zeros(ALIGNED)
        self.streams: list[torch.cuda.Stream] = []
        self.workers: ThreadPoolExecutor | None = None
        if job.plan.device.type == "cuda":
            # part of a capture, so not those on which other programs run (`get_capture_stream`)
            self.streams = [
                torch.cuda.Stream(weights.device, priority=HIGH_PRIORITY)
                for _ in range(min(K, MAX_STREAMS))
            ]
        elif min(job.plan.threads, K) > 1:
            self.workers = _start_threads(min(job.plan.threads, K))

    def _module(self, row: Tensor) -> nn.Module:
        module, plan = self.job.build(), self.job.plan
        named = view_weights(row, self.layout)
        for name, weight in module.named_parameters():
            weight.data = named[name][0]
        set_execution(module, algorithms=plan.rnn, recompute=plan.recompute, compiled=plan.compile)
        return module

    def train(
        self, rows: Tensor, shares: Tensor, noise: Noise | None, now: Tensor, scale: Tensor
    ) -> tuple[Tensor, Tensor]:
        def run_lane(k: int) -> None:
            module = self.modules[k].train()
            weights = list(module.parameters())
            total = grads = None
            for number in range(self.job.passes):
                here = noise and Noise(noise.key[k], noise.rate[k]).for_pass(now[k], number)
                windows_of = rows[k, number], shares[k, number]
                loss = self._loss(self.objective, module, *windows_of, here)
                parts = torch.autograd.grad(loss * scale[k], weights)
                grads = parts if grads is None else torch._foreach_add(grads, parts)
                total = loss.detach() if total is None else total + loss.detach()
            assert total is not None
            assert grads is not None
            self.loss[k].copy_(total)
            torch.cat(list(self._in_a_row(grads)), out=self.grads[k])

        self._run_lanes(run_lane)
        return self.loss, self.grads

    def validate(self, rows: Tensor, shares: Tensor) -> Tensor:
        @torch.no_grad()
        def run_lane(k: int) -> None:
            module = self.modules[k].eval()
            self.loss[k].copy_(self._loss(self.val_objective, module, rows[k], shares[k], None))

        self._run_lanes(run_lane)
        return self.loss

    def select(self, places: set[int]) -> None:
        self.places = places

    def close(self) -> None:
        if self.workers:
            self.workers.shutdown()

    def _loss(
        self,
        objective: Objective,
        module: nn.Module,
        rows: Tensor,
        shares: Tensor,
        noise: Noise | None,
    ) -> Tensor:
        share = MicroBatch(windows.gather(self.job.series, rows), shares)
        return step.compute_loss(module, share, noise, objective=objective)

    def _in_a_row(self, tensors: Sequence[Tensor]) -> Iterator[Tensor]:
        for tensor, entry in zip(tensors, self.layout, strict=True):
            yield tensor.reshape(-1)
            if entry.padding:
                yield self.zeros[: entry.padding]

    def _run_lanes(self, work: Callable[[int], None]) -> None:
        """On CUDA every lane, in parallel streams; else those served, in the plan's threads."""
        if self.streams:
            main = torch.cuda.current_stream(self.loss.device)
            for stream in self.streams:
                stream.wait_stream(main)
            with warnings.catch_warnings():
                # a user's own RNN: its weights lie in the pack's rows, and cuDNN copies them
                warnings.filterwarnings("ignore", message="RNN module weights are not part")
                for k in range(len(self.modules)):  # a capture may be replayed for any of them
                    with torch.cuda.stream(self.streams[k % len(self.streams)]):
                        work(k)
            for stream in self.streams:
                main.wait_stream(stream)
        elif self.workers:
            list(self.workers.map(work, sorted(self.places)))
        else:
            for k in sorted(self.places):
                work(k)


def _start_threads(count: int) -> ThreadPoolExecutor:
    """Threads whose operations use no other threads."""
    before, ready = torch.get_num_threads(), threading.Barrier(count + 1)
    pool = ThreadPoolExecutor(count)

    def alone() -> None:
        torch.set_num_threads(1)
        torch.get_num_threads()  # a thread takes over the number set last when it first asks
        ready.wait()

    for _ in range(count):
        pool.submit(alone)
    ready.wait()
    torch.set_num_threads(before)
    return pool


GRADIENTS: dict[LaneMode, Callable[[LaneContext, Tensor, Layout], LaneGradients]] = {
    "together": BatchedGradients,
    "branches": BranchedGradients,
}


ADAM = ("adam", "adamw")
"""Optimizers that are one kernel on CUDA, whose update allocates nothing large"""
ALPHA = 0.99
"""torch's default for rmsprop"""


def compute_divisor(
    grads: Tensor, clip: Tensor, scale: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Compute what each lane's gradients are divided by to unscale and clip them (no clip: inf),
    and where they overflowed."""
    norm = torch.linalg.vector_norm(grads, dim=1)
    if scale is None:
        return torch.clamp(norm / clip, min=1.0), None
    return torch.maximum(scale, norm / clip), (norm - norm).isnan()


class LaneTensors(NamedTuple):
    """The tensors of all lanes that an update reads and changes, each [K, P]."""

    weights: Tensor
    grads: Tensor
    first: Tensor
    """Means of gradients, or momentum"""
    second: Tensor
    """Means of their squares"""


class UpdateSettings(NamedTuple):
    """The settings of each lane that an update reads, each [K]."""

    lr: Tensor
    decay: Tensor
    momentum: Tensor
    step_count: Tensor
    """Steps so far, this one included"""
    divisor: Tensor
    moves: Tensor
    """Whether the lane changes at all"""


class LaneDecisions(NamedTuple):
    """What a step does to each lane, each [K]."""

    lr: Tensor
    divisor: Tensor
    moves: Tensor
    thawed: Tensor
    """Whether its encoder changes too"""
    step_count: Tensor
    """Steps so far, this one included"""
    encoder_count: Tensor | None


def prepare_update(
    optimizer: str, tensors: LaneTensors, settings: UpdateSettings
) -> Callable[[], None]:
    """Prepare the update of weights and moments, in place, of the lanes that move; the others stay.

    All memory is allocated here. The returned function changes the tensors and allocates nothing,
    so that an update happens whole or not at all.
    """
    weights, grads, first, second = tensors
    if weights.is_cuda and optimizer in ADAM:
        from slipstream.kernels import adam  # Triton is installed where CUDA is

        rate, decay, _, count, divisor, moves = settings
        how = {"lr": rate, "decay": decay, "count": count, "divisor": divisor, "moves": moves}
        return partial(adam.adam_step, *tensors, **how, decoupled=optimizer == "adamw")
    # by `masked_fill`: a product would let through what is no number, and `torch.where` copies a
    # Python number to the device, which no capture allows
    still = ~settings.moves[:, None]
    lr, decay, momentum = (
        values[:, None].masked_fill(still, 0.0)
        for values in (settings.lr, settings.decay, settings.momentum)
    )
    grads = grads / settings.divisor[:, None]
    if optimizer != "adamw":
        grads = torch.addcmul(grads, decay, weights)
    grads = grads.masked_fill(still, 0.0)
    match optimizer:
        case "sgd":
            momentum = momentum.masked_fill(still, 1.0)

            def update() -> None:
                first.mul_(momentum).add_(grads)
                weights.addcmul_(lr, first, value=-1)
        case "rmsprop":
            keep, step, root = _fill(lr, ALPHA, still, 1.0), lr * grads, torch.empty_like(grads)

            def update() -> None:
                # zeros in lanes that stay
                second.mul_(keep).addcmul_(grads, grads, value=1 - ALPHA)
                torch.sqrt(second, out=root).add_(EPSILON)
                weights.addcdiv_(step, root, value=-1)
        case _:
            decays = 1 - lr * decay if optimizer == "adamw" else torch.ones_like(lr)
            blend, keep = _fill(lr, 1 - BETA1, still, 0.0), _fill(lr, BETA2, still, 1.0)
            step_count = settings.step_count.double()[:, None]
            first_bias, second_bias = (
                -torch.expm1(step_count * math.log(beta)) for beta in (BETA1, BETA2)
            )
            size = (lr / first_bias).float().masked_fill(still, 0.0)
            spread = second_bias.sqrt().float().masked_fill(still, 1.0)
            step, root = grads - first, torch.empty_like(grads)

            def update() -> None:
                if optimizer == "adamw":
                    weights.mul_(decays)
                first.addcmul_(step, blend)
                second.mul_(keep).addcmul_(grads, grads, value=1 - BETA2)
                torch.sqrt(second, out=root).div_(spread).add_(EPSILON)
                torch.mul(size, first, out=step)
                weights.addcdiv_(step, root, value=-1)

    return update


def _fill(like: Tensor, value: float, still: Tensor, still_value: float) -> Tensor:
    """A value [K, 1] for the lanes that move, and another for those that stay."""
    return torch.full_like(like, value).masked_fill(still, still_value)


def update_loss_scale(
    scale: Tensor, since_growth: Tensor, overflow: Tensor, active: Tensor
) -> None:
    """Update fp16 loss scales [K] after a step: an overflow halves, many finite steps double."""
    step_count = since_growth + 1
    grow = (step_count == GROW_AFTER) & ~overflow
    factor = 1 + overflow * (BACKOFF - 1) + grow * (GROWTH - 1)
    since_growth.copy_(
        torch.where(active, step_count.masked_fill(grow | overflow, 0), since_growth)
    )
    scale.mul_(factor.masked_fill(~active, 1.0))


MAY_DIFFER = {
    *("name", "out", "seed", "data.split", "model.hidden", "model.dropout"),
    *("train.optimizer", "train.lr", "train.momentum", "train.weight_decay", "train.schedule"),
    *("train.warmup_epochs", "train.lr_min", "train.step_epochs", "train.step_factor"),
    *("train.plateau_patience", "train.plateau_factor", "train.restart_epochs"),
    *("train.restart_growth", "train.batch", "train.epochs", "train.clip", "train.patience"),
    *("train.min_delta", "train.validate_every", "train.minutes", "train.exploit_epochs"),
    *("train.exploit_lr", "train.exploit_lr_min"),
}
"""Settings in which lanes of one pack may differ"""


class PackCapacity(NamedTuple):
    """The largest lane that a place of a pack can hold."""

    config: Config
    """Of one lane: what all of them share"""
    model: Model
    """The widest"""
    steps: int
    passes: int
    batch: int
    val_steps: int
    chunk: int
    optimizers: tuple[str, ...]
    drops: bool


def check_compatible(lanes: Sequence[Lane]) -> None:
    """Raise a UserError that names the settings which keep lanes from sharing a program."""
    first = lanes[0].config
    if first.train.batch == "auto":
        raise UserError('train.batch is "auto"; lanes of a pack need a number')
    for lane in lanes[1:]:
        differences = configs.list_differences(first, lane.config)
        unlike = [name for name in differences if name not in MAY_DIFFER]
        wider = first.model.sizes != lane.config.model.sizes
        if wider and not first.model.spec.can_pad:
            kind = first.model.kind
            unlike.append(f"model.hidden (of {kind if first.model.is_custom else f'a {kind}'})")
        if wider and first.model.layer_norm:
            unlike.append("model.hidden (with model.layer_norm)")
        if wider and first.masked and first.pretrain.variance:
            unlike.append("model.hidden (with pretrain.variance)")
        if unlike:
            raise UserError(
                f"models trained together cannot differ in {', '.join(unlike)}; train them in "
                "packs of their own"
            )


def compute_capacity(lanes: Sequence[Lane], *, places: int) -> PackCapacity:
    """The smallest capacity that holds each of these lanes."""
    check_compatible(lanes)
    samplers = [lane.build_sampler() for lane in lanes]
    batch = max(sampler.windows_per_pass for sampler in samplers)
    most = max(len(lane.starts["val"]) for lane in lanes)
    chunk = min(max(batch, step.EVAL_BATCH // places), most)
    return PackCapacity(
        config=lanes[0].config,
        model=padding.find_widest([lane.config.model for lane in lanes]),
        steps=max(sampler.num_steps for sampler in samplers),
        passes=lanes[0].config.train.accumulate,
        batch=batch,
        val_steps=-(-most // chunk),
        chunk=chunk,
        optimizers=tuple(sorted({lane.config.train.optimizer for lane in lanes})),
        drops=any(has_dropout(lane.config.model) for lane in lanes),
    )


def check_capacity(lane: Lane, capacity: PackCapacity) -> None:
    """Raise a UserError that says what of a lane the pack cannot hold."""
    check_compatible([Lane(capacity.config, lane.starts), lane])
    needed = compute_capacity([lane], places=1)
    fits = {
        "model.hidden": padding.find_widest([capacity.model, needed.model]).sizes
        == capacity.model.sizes,
        "train.batch": needed.batch <= capacity.batch,
        "training windows": needed.steps <= capacity.steps,
        "validation windows": len(lane.starts["val"]) <= capacity.val_steps * capacity.chunk,
        "train.optimizer": lane.config.train.optimizer in capacity.optimizers,
        "model.dropout": capacity.drops or not needed.drops,
    }
    tight = [name for name, fit in fits.items() if not fit]
    if tight:
        raise UserError(
            f"the pack has no room for a lane's {', '.join(tight)}; build it with such a lane "
            "among those that it has room for"
        )


MAX_THREADS = 4
MAX_PINNED_BYTES = 1 << 28
"""Of all lanes' next epochs in memory that a GPU reads without a copy"""


class EpochLayout(NamedTuple):
    """An epoch in the pack's shapes, on the host."""

    epoch: EpochStart
    rows: Tensor
    """[S, A, B]"""
    shares: Tensor
    """[S, A, B]"""
    rates: Tensor
    """[S], in float64, before cuts"""


class EpochPreparer:
    """Lays out the next epoch of each place."""

    def __init__(self, capacity: PackCapacity, num_places: int, device: torch.device) -> None:
        self._capacity = capacity
        self._shape = (capacity.steps, capacity.passes, capacity.batch)
        size = 12 * num_places * capacity.steps * capacity.passes * capacity.batch
        self._pins = device.type == "cuda" and size <= MAX_PINNED_BYTES
        self._pool: ThreadPoolExecutor | None = None
        if device.type == "cuda":
            cores = machine.count_available_cores()
            self._pool = ThreadPoolExecutor(max(1, min(MAX_THREADS, cores // 2)))
        self._ahead: dict[int, tuple[int, EpochLayout | Future[EpochLayout]]] = {}
        """By place: the epoch's number, and its layout"""

    def prepare(self, place: int, lane: Lane, epoch: EpochStart) -> bool:
        """Lay out an epoch, or begin to; return whether that took the caller's time."""
        if place in self._ahead and self._ahead[place][0] == epoch.number:
            return False
        if self._pool is None:
            self._ahead[place] = epoch.number, self._lay_out(lane, epoch)
            return True
        self._ahead[place] = epoch.number, self._pool.submit(self._lay_out, lane, epoch)
        return False

    def take(self, place: int, lane: Lane, epoch: EpochStart) -> EpochLayout:
        """Return the layout of an epoch; what it has of the schedule may have changed since."""
        self.prepare(place, lane, epoch)
        _, ahead = self._ahead.pop(place)
        layout = ahead.result() if isinstance(ahead, Future) else ahead
        if epoch.has_schedule_of(layout.epoch):
            return layout
        return layout._replace(epoch=epoch, rates=self.compute_rates(lane, epoch))

    def drop(self, place: int) -> None:
        """Forget what was prepared for a place."""
        self._ahead.pop(place, None)

    def compute_rates(self, lane: Lane, epoch: EpochStart) -> Tensor:
        """Return the learning rates of an epoch, [S] in float64."""
        num_steps = lane.build_sampler().num_steps
        lrs = lanes.compute_lrs(lane.config.train, epoch, num_steps)
        rates = torch.zeros(self._capacity.steps, dtype=torch.float64)
        rates[: len(lrs)] = torch.tensor(lrs, dtype=torch.float64)
        return rates

    def close(self) -> None:
        self._ahead.clear()
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)

    def _lay_out(self, lane: Lane, epoch: EpochStart) -> EpochLayout:
        sampled = lane.build_sampler().sample_epoch(epoch.number)
        rows, shares = (_widen(part, self._shape) for part in sampled)
        if self._pins:
            rows, shares = rows.pin_memory(), shares.pin_memory()
        return EpochLayout(epoch, rows, shares, self.compute_rates(lane, epoch))


def _widen(part: Tensor, shape: tuple[int, int, int]) -> Tensor:
    """Pad steps, passes and windows with zeros."""
    if part.shape == shape:
        return part
    whole = np.zeros(shape, dtype=part.numpy().dtype)
    steps, passes, batch = part.shape
    whole[:steps, :passes, :batch] = part.numpy()
    return torch.from_numpy(whole)


VECTORS = ("best", "live.weights", "live.first", "live.second")
"""Rows in the layout of the weights"""
EPOCH_ROWS = ("good.", "losses")
"""Rows that are needed only until the current epoch ends"""


def build_lane_layout(model: Model, signature: Signature) -> Layout:
    """Lay out the weights of such a model."""
    with torch.random.fork_rng([]):
        return build_layout(build(model, signature))


def read_weights(
    row: Tensor, layout: Layout, lane: Lane, model: Model, signature: Signature
) -> dict[str, Tensor]:
    """Return a lane's own weights by name, from its row in a pack of `model`'s width."""
    views = view_weights(row[None], layout)
    padded = {name: view[0].detach() for name, view in views.items()}
    tokens = signature.context // model.patch
    return padding.unpad_weights(padded, lane.config.model, model, tokens)


def narrow_rows(
    rows: Mapping[str, Tensor], layout: Layout, lane: Lane, model: Model, signature: Signature
) -> dict[str, Tensor]:
    """Return the rows of a lane that has ended as they are in a pack of its own width."""
    own_rows = {name: row for name, row in rows.items() if not name.startswith(EPOCH_ROWS)}
    if lane.config.model.sizes == model.sizes:
        return own_rows
    own_layout = build_lane_layout(lane.config.model, signature)
    for name in VECTORS:
        weights = read_weights(own_rows[name], layout, lane, model, signature)
        parts = [part for entry in own_layout for part in _pad(weights[entry.name], entry.padding)]
        own_rows[name] = torch.cat(parts)
    return own_rows


def _pad(weight: Tensor, padding: int) -> tuple[Tensor, Tensor]:
    return weight.flatten(), weight.new_zeros(padding)


def build_pack(
    lanes: Sequence[Lane],
    signature: Signature,
    series: Series,
    plan: Plan,
    *,
    mode: LaneMode = "together",
    room: Sequence[Lane] = (),
) -> Pack:
    """Build a pack of these lanes, on the device that holds the series; `room` are further ones
    that may take a place later."""
    capacity = compute_capacity([*lanes, *room], places=len(lanes))
    pack = Pack(len(lanes), capacity, signature, series, plan, mode)
    for place, lane in enumerate(lanes):
        pack.put(place, lane)
    return pack


class Pack(StepProgram):
    """The step program of many lanes: their tensors, and the steps over all of them.

    A step allocates all that it needs before it changes the lanes, so one that fails for lack of
    memory leaves them as they were.
    """

    mode: LaneMode

    def __init__(
        self,
        num_places: int,
        capacity: PackCapacity,
        signature: Signature,
        series: Series,
        plan: Plan,
        mode: LaneMode,
    ) -> None:
        assert series.values.device.type == plan.device.type, "windows are gathered on the device"
        self.capacity, self.signature, self.series = capacity, signature, series
        self.plan, self.mode = plan, mode
        self.lanes: list[Lane | None] = [None] * num_places
        self._running: set[int] = set()
        self._used: set[int] = set()
        """Places that have had a lane, whose rows are not zeros"""
        self._epochs = EpochPreparer(capacity, num_places, plan.device)
        passes, drops = capacity.passes, capacity.drops
        job = LaneContext(capacity.model, signature, capacity.config, series, plan, passes, drops)
        self._layout = build_layout(job.build())
        self._parts = build_slices(self._layout, capacity.config)
        self._allocate(num_places)
        self._settles_at_once = should_use_triton(series.values) and {*capacity.optimizers} <= {
            *ADAM
        }
        self._passes = GRADIENTS[mode](job, self.live["weights"], self._layout)
        if mode == "together" and should_use_triton(series.values):
            with precompile():  # no lane is active yet, so this changes only losses
                self._advance()
                self._check()
            for name in ("losses", "val_losses"):
                self.buffers[name].zero_()
        self.advance: Program = self._advance
        self.validate_batch: Program = self._check
        if plan.capture:
            self.advance = CapturedProgram(self._advance, plan.device)
            self.validate_batch = CapturedProgram(self._check, plan.device)

    def _allocate(self, K: int) -> None:
        capacity, device = self.capacity, self.plan.device
        P = sum(entry.size + entry.padding for entry in self._layout)

        def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(K, *shape, dtype=dtype, device=device)

        def moving() -> dict[str, Tensor]:
            tensors = {name: zeros(P) for name in ("weights", "first", "second")}
            tensors["count"] = zeros()
            if len(self._parts) > 1:
                tensors["encoder_count"] = zeros()
            if self.plan.precision == "fp16":
                tensors |= {"scale": zeros(), "since_growth": zeros(dtype=torch.int32)}
            return tensors

        self.live, self.good, self.best = moving(), moving(), zeros(P)
        self.settings = {
            **{name: zeros() for name in ("dropout", "decay", "clip", "momentum")},
            **{name: zeros(dtype=torch.int64) for name in ("seed", "optimizer")},
        }
        self.buffers = {
            "rows": zeros(capacity.steps, capacity.passes, capacity.batch, dtype=torch.int64),
            "shares": zeros(capacity.steps, capacity.passes, capacity.batch),
            "rates": zeros(capacity.steps),
            "losses": zeros(capacity.steps),
            "cursor": zeros(dtype=torch.int64),
            "before": zeros(dtype=torch.int64),
            "active": zeros(dtype=torch.bool),
            "frozen": zeros(dtype=torch.bool),
            "val_rows": zeros(capacity.val_steps, capacity.chunk, dtype=torch.int64),
            "val_shares": zeros(capacity.val_steps, capacity.chunk),
            "val_losses": zeros(capacity.val_steps),
        }
        self._val_cursor = torch.zeros(1, dtype=torch.int64, device=device)
        self._ones = torch.ones(K, device=device)

    @property
    def num_places(self) -> int:
        return len(self.lanes)

    @property
    def losses(self) -> Tensor:
        return self.buffers["losses"]

    @property
    def positions(self) -> Tensor | None:
        return self.buffers["cursor"] if "scale" in self.live else None

    def state(self) -> dict[str, Tensor]:
        rows = {"live": self.live, "good": self.good}
        tensors = {f"{kind}.{name}": t for kind, ts in rows.items() for name, t in ts.items()}
        return tensors | {"best": self.best, "losses": self.buffers["losses"]}

    def tensors(self) -> dict[str, Tensor]:
        """Return everything that a lane consists of, by name."""
        return {**self.state(), **self.settings, **self.buffers}

    def put(self, place: int, lane: Lane, rows: Mapping[str, Tensor] = NO_ROWS) -> None:
        check_capacity(lane, self.capacity)
        if place in self._used:
            self.leave(place)
            for tensor in self.tensors().values():
                tensor[place].zero_()
        self._used.add(place)
        self.lanes[place] = lane
        train, model = lane.config.train, lane.config.model
        device = self.plan.device
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            torch.manual_seed(hash_seed(lane.config.seed))
            alone = dict(build(model, self.signature).named_parameters()) | dict(lane.init)
        padded = padding.pad_weights(alone, model, self.capacity.model, self._tokens)
        views = view_weights(self.live["weights"], self._layout)
        with torch.no_grad():
            for name, weight in padded.items():
                views[name][place] = weight
        if "scale" in self.live:
            self.live["scale"][place] = optim.FIRST_SCALE
        values = {
            "seed": lane.config.seed,
            "dropout": model.dropout,
            "decay": train.weight_decay,
            "clip": math.inf if train.clip == "off" else train.clip,
            "momentum": train.momentum,
            "optimizer": self.capacity.optimizers.index(train.optimizer),
        }
        for name, value in values.items():
            self.settings[name][place] = value
        chunk = self.capacity.chunk
        starts, shares = EpochSampler(lane.starts["val"], chunk, chunk, None).sample_epoch(0)
        self.buffers["val_rows"][place, : len(starts)] = starts[:, 0].to(device)
        self.buffers["val_shares"][place, : len(starts)] = shares[:, 0].to(device)
        for name, tensor in self.state().items():
            if name in rows:
                tensor[place].copy_(rows[name])

    @property
    def _tokens(self) -> int:
        return self.signature.context // self.capacity.model.patch

    def num_steps(self, place: int) -> int:
        return self._lane(place).build_sampler().num_steps

    def _lane(self, place: int) -> Lane:
        lane = self.lanes[place]
        assert lane is not None
        return lane

    def prepare(self, place: int, epoch: EpochStart) -> bool:
        return self._epochs.prepare(place, self._lane(place), epoch)

    def begin(self, epochs: Mapping[int, EpochStart]) -> None:
        places, device = list(epochs), self.plan.device
        tapes = [self._epochs.take(place, self._lane(place), epochs[place]) for place in places]
        rates = [epochs[k].rate * tape.rates for k, tape in zip(places, tapes, strict=True)]
        values = {
            "rows": torch.stack([tape.rows.to(device, non_blocking=True) for tape in tapes]),
            "shares": torch.stack([tape.shares.to(device, non_blocking=True) for tape in tapes]),
            "rates": torch.stack(rates).float(),
            "cursor": torch.tensor([epochs[place].step for place in places]),
            "before": torch.tensor([epochs[place].steps_before for place in places]),
            "active": torch.ones(len(places), dtype=torch.bool),
            "frozen": torch.tensor(
                [optim.is_frozen(self._lane(k).config.train, epochs[k].number) for k in places]
            ),
        }
        index = self._to_index(places)
        for name, value in values.items():
            self.buffers[name].index_copy_(0, index, value.to(device))
        _copy(self.live, self.good, self._to_index([k for k in places if not epochs[k].step]))
        self._running |= set(places)
        self._passes.select(self._running)

    def update_rates(self, epochs: Mapping[int, EpochStart]) -> None:
        rates = [
            epoch.rate * self._epochs.compute_rates(self._lane(place), epoch)
            for place, epoch in epochs.items()
        ]
        device = self.plan.device
        index = step.send(torch.tensor(list(epochs)), device)
        self.buffers["rates"].index_copy_(0, index, step.send(torch.stack(rates).float(), device))

    def load_best(self, place: int) -> None:
        self.live["weights"][place].copy_(self.best[place])
        for name in ("first", "second", "count", "encoder_count"):
            if name in self.live:
                self.live[name][place].zero_()

    def _to_index(self, places: Sequence[int]) -> Tensor:
        return torch.tensor(places, dtype=torch.int64, device=self.plan.device)

    def freeze(self, place: int) -> None:
        """Stop a lane at once; it keeps its rows."""
        self.buffers["active"][place] = False
        self.buffers["cursor"][place] = 0
        self._running -= {place}
        self._passes.select(self._running)

    def leave(self, place: int) -> None:
        self.freeze(place)
        self._epochs.drop(place)
        self.lanes[place] = None

    def go_back(self, place: int) -> None:
        _copy(self.good, self.live, self._to_index([place]))

    def keep_best(self, places: Sequence[int]) -> None:
        _copy({"": self.live["weights"]}, {"": self.best}, self._to_index(places))

    def weights(self, place: int, *, best: bool = False) -> dict[str, Tensor]:
        """Return a lane's weights by the model's own names."""
        rows = self.best if best else self.live["weights"]
        return self.best_weights({"best": rows[place]}, self._lane(place))

    def best_weights(self, rows: Mapping[str, Tensor], lane: Lane) -> dict[str, Tensor]:
        row, model = rows["best"].to(self.plan.device), self.capacity.model
        return read_weights(row, self._layout, lane, model, self.signature)

    def narrow_rows(self, rows: Mapping[str, Tensor], lane: Lane) -> dict[str, Tensor]:
        """Return the rows of a lane that has ended as they are in a pack of its own width."""
        return narrow_rows(rows, self._layout, lane, self.capacity.model, self.signature)

    def describe(self) -> dict[str, Any]:
        return describe_capacity(self.capacity)

    def compact(self, places: Sequence[int]) -> Pack:
        data = self.signature, self.series
        smaller = Pack(len(places), self.capacity, *data, self.plan, self.mode)
        index, tensors = self._to_index(places), self.tensors()
        for name, tensor in smaller.tensors().items():
            tensor.copy_(tensors[name].index_select(0, index))
        smaller.lanes = [self.lanes[place] for place in places]
        smaller._used = set(range(len(places)))
        smaller._running = {new for new, old in enumerate(places) if old in self._running}
        smaller._passes.select(smaller._running)
        self.close()
        return smaller

    def kernels(self) -> list[str]:
        if isinstance(self.advance, CapturedProgram):
            return self.advance.kernels()
        return self.plan.native_kernels

    def score(
        self, places: Sequence[int], should_stop: Callable[[], bool] = lambda: False
    ) -> list[float] | None:
        counts = [len(self._lane(place).starts["val"]) for place in places]
        self._val_cursor.zero_()
        self._passes.select(set(places))
        for _ in range(-(-max(counts) // self.capacity.chunk)):
            if stopped := should_stop():
                break
            self.validate_batch()
        self._passes.select(self._running)
        sums = [] if stopped else self.buffers["val_losses"].double().sum(dim=1).tolist()
        self.buffers["val_losses"].zero_()
        return None if stopped else [sums[k] / n for k, n in zip(places, counts, strict=True)]

    def failures(self) -> dict[str, str]:
        named = {"training step": self.advance, "validation step": self.validate_batch}
        captured = {
            k: program for k, program in named.items() if isinstance(program, CapturedProgram)
        }
        return {name: program.failure for name, program in captured.items() if program.failure}

    def capture_s(self) -> CaptureSeconds:
        steps = self.advance, self.validate_batch
        spent = (
            program.setup_s if isinstance(program, CapturedProgram) else 0.0 for program in steps
        )
        return CaptureSeconds(*spent)

    def close(self) -> None:
        """Release threads, graphs and programs: bound methods would keep the pack alive."""
        for program in (self.advance, self.validate_batch):
            if isinstance(program, CapturedProgram):
                program.close()
        if not self.plan.capture:
            self.advance = self.validate_batch = raise_closed
        self._passes.close()
        self._epochs.close()

    def _advance(self) -> None:
        """Run a step of every active lane: gather, forward, loss, backward, clip, update."""
        live, tape, settings = self.live, self.buffers, self.settings
        cursor, scale = tape["cursor"], live.get("scale")
        has_noise = self.capacity.drops or objective.uses_noise(self.capacity.config)
        noise = Noise(settings["seed"], settings["dropout"]) if has_noise else None
        loss, grads = self._passes.train(
            take_step(tape["rows"], cursor),
            take_step(tape["shares"], cursor),
            noise,
            tape["before"] + cursor if has_noise else cursor,  # else nothing reads it
            self._ones if scale is None else scale,
        )
        for part in self._parts:
            if part.starts_frozen:
                grads[:, part.columns].masked_fill_(tape["frozen"][:, None], 0.0)
        if self._settles_at_once:
            from slipstream.kernels import lane_step  # Triton is installed where CUDA is

            encoder_count = live.get("encoder_count")
            settled = lane_step.settle(
                grads,
                loss,
                clip=settings["clip"],
                active=tape["active"],
                frozen=tape["frozen"],
                rates=tape["rates"],
                losses=tape["losses"],
                cursor=cursor,
                count=live["count"],
                encoder_count=encoder_count,
                scale=scale,
                since_growth=live.get("since_growth"),
                growth=(GROWTH, BACKOFF, GROW_AFTER),
            )
            decisions = LaneDecisions(*settled, live["count"], encoder_count)
            for update in self._prepare_updates(grads, decisions):
                update()
            return
        divisor, overflow = compute_divisor(grads, settings["clip"], scale)
        moves = tape["active"] if overflow is None else tape["active"] & ~overflow
        thawed, encoder_count = moves, live.get("encoder_count")
        if encoder_count is not None:
            thawed = moves & ~tape["frozen"]
            encoder_count = encoder_count + thawed
        lr = tape["rates"].gather(1, cursor[:, None])[:, 0]
        decisions = LaneDecisions(lr, divisor, moves, thawed, live["count"] + moves, encoder_count)
        updates = self._prepare_updates(grads, decisions)
        # from here on nothing large is allocated: the lanes change, or stay as they are
        live["count"].copy_(decisions.step_count)
        if encoder_count is not None:
            live["encoder_count"].copy_(encoder_count)
        for update in updates:
            update()
        if scale is not None and overflow is not None:
            update_loss_scale(scale, live["since_growth"], overflow, tape["active"])
        tape["losses"].scatter_(1, cursor[:, None], loss[:, None])
        cursor.add_(moves)  # the next step repeats what overflowed

    def _prepare_updates(self, grads: Tensor, decisions: LaneDecisions) -> list[Program]:
        """Prepare the updates of each slice of weights by each optimizer."""
        live, settings, optimizers = self.live, self.settings, self.capacity.optimizers
        lr, divisor, moves, thawed, step_count, encoder_count = decisions
        updates: list[Program] = []
        for part in self._parts:
            moving, count = moves, step_count
            if part.starts_frozen:
                assert encoder_count is not None
                moving, count = thawed, encoder_count
            whole = live["weights"], grads, live["first"], live["second"]
            tensors = LaneTensors(*(rows[:, part.columns] for rows in whole))
            rate = lr if part.lr_factor == 1.0 else lr * part.lr_factor
            fixed = rate, settings["decay"], settings["momentum"], count, divisor
            for code, optimizer in enumerate(optimizers):
                updated = moving
                if len(optimizers) > 1:
                    updated = moving & (settings["optimizer"] == code)
                update_settings = UpdateSettings(*fixed, updated)
                updates.append(prepare_update(optimizer, tensors, update_settings))
        return updates

    @torch.no_grad()
    def _check(self) -> None:
        """Run a validation batch of every lane; the summed losses go into the buffers."""
        rows = self.buffers["val_rows"].index_select(1, self._val_cursor)[:, 0]
        shares = self.buffers["val_shares"].index_select(1, self._val_cursor)[:, 0]
        loss = self._passes.validate(rows, shares)
        self.buffers["val_losses"].index_copy_(1, self._val_cursor, loss[:, None])
        self._val_cursor.add_(1)


def take_step(tape: Tensor, cursor: Tensor) -> Tensor:
    """Return [K, A, B] of an epoch's tape [K, S, A, B]: of each lane its next step."""
    by_step = tape.flatten(2)
    index = cursor[:, None, None].expand(-1, 1, by_step.shape[2])
    return by_step.gather(1, index).view(-1, *tape.shape[2:])


def describe_capacity(capacity: PackCapacity) -> dict[str, Any]:
    """Return what a checkpoint contains of a pack."""
    values = capacity._asdict()
    values |= {name: values[name].model_dump_json() for name in ("config", "model")}
    return {"capacity": values}


def parse_capacity(metadata: Mapping[str, Any]) -> PackCapacity:
    """Read the capacity of a checkpoint's pack."""
    values = metadata["capacity"]
    parsed = {
        "config": Config.model_validate_json(values["config"]),
        "model": Model.model_validate_json(values["model"]),
        "optimizers": tuple(values["optimizers"]),
    }
    return PackCapacity(**(values | parsed))


def _copy(source: Mapping[str, Tensor], to: Mapping[str, Tensor], index: Tensor) -> None:
    """Copy some rows of every tensor."""
    for name, tensor in source.items():
        to[name].index_copy_(0, index, tensor.index_select(0, index))
