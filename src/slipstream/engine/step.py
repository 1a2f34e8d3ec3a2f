"""The training step as one program without a host sync, run eagerly or captured and replayed.

Everything that changes from step to step lives in tensors that keep their place: the home knows
the step's windows, the tape its learning rate, and takes its loss. Both variants are called the
same way and give the same numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from slipstream.config import Train
from slipstream.engine import optim
from slipstream.engine.homes import Home, Program, Share
from slipstream.engine.optim import LossScale
from slipstream.engine.plan import Plan
from slipstream.objectives import window_losses

CHUNK = 1024
"""Windows in one forward pass without gradients."""
EAGER_FIRST = 3
"""Steps that run eagerly before a capture: libraries choose and allocate in them."""


@dataclass(frozen=True)
class Tape:
    """What an epoch's steps read and write, beside their windows."""

    rates: Tensor
    """[steps]: learning rates"""
    losses: Tensor
    """[steps]"""
    cursor: Tensor
    """[1]: the next step"""

    def begin(self, rates: list[float] | None = None, *, at: int = 0) -> None:
        if rates is not None:
            self.rates.copy_(torch.tensor(rates))
        self.cursor.fill_(at)


def tape(num_steps: int, device: torch.device) -> Tape:
    return Tape(
        rates=torch.zeros(num_steps, device=device),
        losses=torch.zeros(num_steps, device=device),
        cursor=torch.zeros(1, dtype=torch.int64, device=device),
    )


def training(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    lr: Tensor,
    home: Home,
    tape: Tape,
    *,
    train: Train,
    plan: Plan,
    fold: int,
    scale: LossScale | None,
) -> Program:
    """One step: gather, forward, loss, backward, clip, update."""
    params = [p for p in model.parameters() if p.requires_grad]
    clip = None if train.clip == "off" else train.clip
    unscaled = torch.ones((), device=lr.device)

    def advance() -> None:
        model.train()
        torch.index_select(tape.rates, 0, tape.cursor, out=lr.view(1))
        optimizer.zero_grad(set_to_none=plan.set_to_none)
        total: Tensor | None = None
        for share in home.take(tape.cursor):
            loss = _loss(model, share, train=train, plan=plan, fold=fold)
            loss.backward(unscaled if scale is None else scale.scale)
            total = loss.detach() if total is None else total + loss.detach()
        assert total is not None
        optim.update(optimizer, params, clip=clip, scale=scale)
        tape.losses.index_copy_(0, tape.cursor, total[None])
        tape.cursor.add_(1)

    return advance


def validation(
    model: nn.Module, home: Home, tape: Tape, *, train: Train, plan: Plan, fold: int
) -> Program:
    """One batch of the validation set; its summed loss goes onto the tape."""

    @torch.no_grad()
    def advance() -> None:
        model.eval()
        (share,) = home.take(tape.cursor)
        loss = _loss(model, share, train=train, plan=plan, fold=fold)
        tape.losses.index_copy_(0, tape.cursor, loss[None])
        tape.cursor.add_(1)

    return advance


def _loss(model: nn.Module, share: Share, *, train: Train, plan: Plan, fold: int) -> Tensor:
    """The windows' weighted loss; padding weighs nothing."""
    inputs, static, targets = share.batch
    losses = window_losses(forward(model, inputs, static, plan=plan), targets, train)
    if fold > 1:
        losses = losses.unflatten(0, (-1, fold)).mean(dim=1)
    return (losses * share.weights).sum()


def forward(model: nn.Module, inputs: Tensor, static: Tensor | None, *, plan: Plan) -> Tensor:
    """The model's prediction, in fp32, computed in the plan's precision."""
    enabled = plan.autocast is not None
    with torch.autocast(plan.device.type, dtype=plan.autocast, enabled=enabled):
        prediction: Tensor = model(inputs, static)
    return prediction.float()


class Captured:
    """The same program as a CUDA graph.

    The first calls run eagerly and count as real steps. Where the capture fails, which changes
    nothing that the program computes, it stays eager and `failure` says why. With several steps in
    one graph, calls are collected until there are enough; `flush` runs those that wait.
    """

    def __init__(self, program: Program, device: torch.device, *, steps: int = 1) -> None:
        self.failure: str | None = None
        self._program = program
        self._device = device
        self._side = torch.cuda.Stream(device)
        self._eager_left = EAGER_FIRST
        self._steps = steps
        self._waiting = 0
        self._one: torch.cuda.CUDAGraph | None = None
        self._many: torch.cuda.CUDAGraph | None = None

    def __call__(self) -> None:
        if self._eager_left or self.failure:
            self._eager_left = max(self._eager_left - 1, 0)
            self._run_eagerly()
        elif self._steps == 1:
            self._replay_one()
        else:
            self._waiting += 1
            if self._waiting == self._steps:
                self._many = self._many or self._record(self._steps)
                if self._many is not None:
                    self._many.replay()
                    self._waiting = 0
                self.flush()

    def flush(self) -> None:
        """Run the calls that wait for company."""
        while self._waiting:
            self._waiting -= 1
            self._replay_one()

    def _replay_one(self) -> None:
        self._one = self._one or self._record(1)
        if self._one is None:
            self._run_eagerly()
        else:
            self._one.replay()

    def _run_eagerly(self) -> None:
        current = torch.cuda.current_stream(self._device)
        self._side.wait_stream(current)
        with torch.cuda.stream(self._side):
            self._program()
        current.wait_stream(self._side)

    def _record(self, steps: int) -> torch.cuda.CUDAGraph | None:
        if self.failure:
            return None
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                for _ in range(steps):
                    self._program()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            self.failure = str(error).strip().split("\n", 1)[0]
            return None
        return graph
