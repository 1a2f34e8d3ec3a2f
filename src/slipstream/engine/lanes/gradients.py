"""Losses and gradients of all lanes of a pack: together under `vmap`, or each as a branch.

Both have one signature. `together` makes one kernel of what K small ones would do; branches run
beside each other, in threads or streams, and take any module. Shapes as in `lanes.pack`.
"""

import itertools
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from slipstream.config import Config, Model, Signature
from slipstream.data import windows
from slipstream.data.windows import Batch, Series
from slipstream.engine import objective, optim, step
from slipstream.engine.batches.source import MicroBatch
from slipstream.engine.capture import HIGH_PRIORITY
from slipstream.engine.objective import Objective
from slipstream.engine.plan import Plan
from slipstream.errors import UserError
from slipstream.models import Noise, build, set_execution
from slipstream.models.custom import list_buffers

LaneMode = Literal["together", "branches"]
MOST_STREAMS = 16
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

        def one(weights: dict[str, Tensor], *args: Any) -> Tensor:
            prediction: Tensor = functional_call(module, weights, args)
            return prediction

        try:
            vmap(one, in_dims=(0, 0, None if static is None else 0))(weights, inputs, static)
        except RuntimeError as error:
            return str(error).strip().split("\n", 1)[0][:200]
    return ""


class LaneContext(NamedTuple):
    """What the lanes share."""

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

        def one(weights: dict[str, Tensor], *args: Any) -> Tensor:
            def model(*inputs: Any) -> Any:
                return functional_call(self.module, weights, inputs)

            return objective(model, Batch(*args[:3]), *args[3:])

        losses: Tensor = vmap(one, in_dims=by_lane)(named, *batch, shares, noise)
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
                for _ in range(min(K, MOST_STREAMS))
            ]
        elif min(job.plan.threads, K) > 1:
            self.workers = _start_threads(min(job.plan.threads, K))

    def _module(self, row: Tensor) -> nn.Module:
        module, plan = self.job.build(), self.job.plan
        named = view_weights(row, self.layout)
        for name, weight in module.named_parameters():
            weight.data = named[name][0]
        set_execution(
            module, algorithms=plan.cudnn, recompute=plan.recompute, compiled=plan.compile
        )
        return module

    def train(
        self, rows: Tensor, shares: Tensor, noise: Noise | None, now: Tensor, scale: Tensor
    ) -> tuple[Tensor, Tensor]:
        def one(k: int) -> None:
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

        self._each(one)
        return self.loss, self.grads

    def validate(self, rows: Tensor, shares: Tensor) -> Tensor:
        @torch.no_grad()
        def one(k: int) -> None:
            module = self.modules[k].eval()
            self.loss[k].copy_(self._loss(self.val_objective, module, rows[k], shares[k], None))

        self._each(one)
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

    def _each(self, work: Callable[[int], None]) -> None:
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
