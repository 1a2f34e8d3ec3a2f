"""The training step as one program without a host sync, run eagerly or captured and replayed.

Everything that changes from step to step lives in tensors that keep their place: the tape says
which windows and which learning rate each step takes, and collects its loss. Both variants are
called the same way and give the same numbers.

Shapes: S steps of an epoch, A forward passes per step, B windows per pass.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from slipstream.config import Train
from slipstream.data import windows
from slipstream.data.windows import Series
from slipstream.engine import optim
from slipstream.engine.optim import LossScale
from slipstream.engine.plan import Plan
from slipstream.objectives import window_losses

Program = Callable[[], None]
CHUNK = 1024
"""Windows in one forward pass without gradients."""
EAGER_FIRST = 3
"""Steps that run eagerly before a capture: libraries choose and allocate in them."""


@dataclass(frozen=True)
class Tape:
    """What an epoch's steps read and write."""

    order: Tensor
    """[S, A, B]: first rows of the windows; -1 where the last batch is padded"""
    rates: Tensor
    """[S]: learning rates"""
    losses: Tensor
    """[S]"""
    cursor: Tensor
    """[1]: the next step"""

    def load(self, order: Tensor, rates: list[float] | None = None) -> None:
        """Begin an epoch."""
        padded = torch.full(self.order.shape, -1, dtype=torch.int64)
        padded.view(-1)[: len(order)] = order
        self.order.copy_(padded)
        if rates is not None:
            self.rates.copy_(torch.tensor(rates))
        self.cursor.zero_()


def steps_per_epoch(num_windows: int, *, passes: int, batch: int) -> int:
    """The last step may be a part of one."""
    return -(-num_windows // (passes * batch))


def tape(num_windows: int, *, passes: int, batch: int, device: torch.device) -> Tape:
    steps = steps_per_epoch(num_windows, passes=passes, batch=batch)
    return Tape(
        order=torch.full((steps, passes, batch), -1, dtype=torch.int64, device=device),
        rates=torch.zeros(steps, device=device),
        losses=torch.zeros(steps, device=device),
        cursor=torch.zeros(1, dtype=torch.int64, device=device),
    )


def shuffled(starts: Tensor, *, seed: int, epoch: int) -> Tensor:
    """Every training window once, in an order fixed by seed and epoch."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    return starts[torch.randperm(len(starts), generator=generator)]


def training(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    lr: Tensor,
    series: Series,
    tape: Tape,
    *,
    train: Train,
    plan: Plan,
    scale: LossScale | None,
) -> Program:
    """One step: gather, forward, loss, backward, clip, update."""
    params = [p for p in model.parameters() if p.requires_grad]

    def advance() -> None:
        model.train()
        passes = tape.order.index_select(0, tape.cursor)[0]
        lr.copy_(tape.rates.index_select(0, tape.cursor)[0])
        optimizer.zero_grad(set_to_none=True)
        count = (passes >= 0).sum()
        total = torch.zeros((), device=lr.device)
        for rows in passes.unbind():
            loss = _loss(model, series, rows, train=train, plan=plan) / count
            (loss if scale is None else loss * scale.scale).backward()
            total = total + loss.detach()
        if scale is not None:
            scale.unscale([p.grad for p in params if p.grad is not None])
        if train.clip != "off":
            nn.utils.clip_grad_norm_(params, train.clip, foreach=True)
        if scale is None:
            optimizer.step()
        else:
            optim.step_unless_overflow(optimizer, scale)
        tape.losses.index_copy_(0, tape.cursor, total[None])
        tape.cursor.add_(1)

    return advance


def validation(
    model: nn.Module, series: Series, tape: Tape, *, train: Train, plan: Plan
) -> Program:
    """One batch of the validation set; its summed loss goes onto the tape."""

    @torch.no_grad()
    def advance() -> None:
        model.eval()
        rows = tape.order.index_select(0, tape.cursor)[0, 0]
        loss = _loss(model, series, rows, train=train, plan=plan)
        tape.losses.index_copy_(0, tape.cursor, loss[None])
        tape.cursor.add_(1)

    return advance


def _loss(model: nn.Module, series: Series, rows: Tensor, *, train: Train, plan: Plan) -> Tensor:
    """The windows' summed loss; padding counts nothing."""
    batch = windows.gather(series, rows.clamp(min=0))
    prediction = forward(model, batch.inputs, batch.static, plan=plan)
    losses = window_losses(prediction, batch.targets, train)
    if series.fold > 1:
        losses = losses.unflatten(0, (-1, series.fold)).mean(dim=1)
    return torch.where(rows >= 0, losses, 0.0).sum()


def forward(model: nn.Module, inputs: Tensor, static: Tensor | None, *, plan: Plan) -> Tensor:
    """The model's prediction, in fp32, computed in the plan's precision."""
    enabled = plan.autocast is not None
    with torch.autocast(plan.device.type, dtype=plan.autocast, enabled=enabled):
        prediction: Tensor = model(inputs, static)
    return prediction.float()


class Captured:
    """The same program as a CUDA graph.

    The first calls run eagerly and count as real steps. Where the capture fails, which changes
    nothing that the program computes, it stays eager and `failure` says why.
    """

    def __init__(self, program: Program, device: torch.device) -> None:
        self.failure: str | None = None
        self._program = program
        self._device = device
        self._side = torch.cuda.Stream(device)
        self._eager_left = EAGER_FIRST
        self._graph: torch.cuda.CUDAGraph | None = None

    def __call__(self) -> None:
        if self._graph is None and self._eager_left == 0 and self.failure is None:
            self._record()
        if self._graph is not None:
            self._graph.replay()
            return
        self._eager_left = max(self._eager_left - 1, 0)
        current = torch.cuda.current_stream(self._device)
        self._side.wait_stream(current)
        with torch.cuda.stream(self._side):
            self._program()
        current.wait_stream(self._side)

    def _record(self) -> None:
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                self._program()
        except RuntimeError as error:
            self.failure = str(error).strip().split("\n", 1)[0]
        else:
            self._graph = graph
