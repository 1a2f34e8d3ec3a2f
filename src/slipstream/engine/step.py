"""The training step as one program without a host sync, to be run as it is or captured.

Everything that changes from step to step lives in tensors that keep their place: the home knows
the step's windows, the tape its learning rate, and takes its loss.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from slipstream.config import Train
from slipstream.engine import optim
from slipstream.engine.batches.source import BatchSource, MicroBatch, Program
from slipstream.engine.objective import Objective
from slipstream.engine.optim import LossScale
from slipstream.engine.plan import Plan
from slipstream.models import Noise

EVAL_BATCH = 1024
"""Windows in one forward pass without gradients."""


@dataclass(frozen=True)
class EpochBuffers:
    """What an epoch's steps read and write, beside their windows."""

    rates: Tensor
    """[steps]: learning rates"""
    losses: Tensor
    """[steps]"""
    cursor: Tensor
    """[1]: the next step"""
    first_step: Tensor
    """[1]: steps of the run before the epoch's first"""

    def begin(
        self, rates: list[float] | None = None, *, at: int = 0, first: int | None = None
    ) -> None:
        if rates is not None:
            self.rates.copy_(torch.tensor(rates))
        if first is not None:
            self.first_step.fill_(first)
        self.cursor.fill_(at)


def build_buffers(num_steps: int, device: torch.device) -> EpochBuffers:
    return EpochBuffers(
        rates=torch.zeros(num_steps, device=device),
        losses=torch.zeros(num_steps, device=device),
        cursor=torch.zeros(1, dtype=torch.int64, device=device),
        first_step=torch.zeros(1, dtype=torch.int64, device=device),
    )


def build_training_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    lr: Tensor,
    home: BatchSource,
    tape: EpochBuffers,
    *,
    objective: Objective,
    train: Train,
    plan: Plan,
    scale: LossScale | None,
    noise: Noise | None,
) -> Program:
    """One step: gather, forward, loss, backward, clip, update. The noise's key is the seed."""
    params = [p for p in model.parameters() if p.requires_grad]
    clip = None if train.clip == "off" else train.clip

    def advance() -> None:
        model.train()
        torch.index_select(tape.rates, 0, tape.cursor, out=lr.view(1))
        optim.apply_lr(optimizer, lr)
        optim.clear_grads(optimizer, set_to_none=plan.set_to_none)
        total: Tensor | None = None
        for number, share in enumerate(home.get_micro_batches(tape.cursor)):
            here = noise and noise.for_pass((tape.first_step + tape.cursor)[0], number)
            found = compute_loss(model, share, here, objective=objective)
            # not backward(scale): a gradient that is handed in has torch load a second of modules
            (found if scale is None else found * scale.scale).backward()
            total = found.detach() if total is None else total + found.detach()
        assert total is not None
        optim.apply_gradients(optimizer, params, clip=clip, scale=scale)
        tape.losses.index_copy_(0, tape.cursor, total[None])
        tape.cursor.add_(1)

    return advance


def build_validation_step(
    model: nn.Module, home: BatchSource, tape: EpochBuffers, *, objective: Objective
) -> Program:
    """One batch of the validation set; its summed loss goes onto the tape."""

    @torch.no_grad()
    def advance() -> None:
        model.eval()
        (share,) = home.get_micro_batches(tape.cursor)
        found = compute_loss(model, share, None, objective=objective)
        tape.losses.index_copy_(0, tape.cursor, found[None])
        tape.cursor.add_(1)

    return advance


def compute_loss(
    model: nn.Module, share: MicroBatch, noise: Noise | None, *, objective: Objective
) -> Tensor:
    """The windows' weighted loss; padding weighs nothing."""
    losses = objective(model, share.batch, share.weights, noise)
    return (losses * share.weights).sum()
