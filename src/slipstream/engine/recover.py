"""What a run does when memory runs out or the loss stops being a number."""

from __future__ import annotations

import gc
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from slipstream.config import Config
from slipstream.engine.optim import LossScale
from slipstream.engine.plan import RECURRENT

MOST_ROLLBACKS = 3


@dataclass(frozen=True)
class Snapshot:
    """Everything a step changes, copied; restored in place, since graphs know the places."""

    tensors: list[Tensor]
    copies: list[Tensor]
    generators: list[Tensor]
    optimizer: torch.optim.Optimizer
    num_states: int

    def restore(self) -> None:
        for tensor, copy in zip(self.tensors, self.copies, strict=True):
            tensor.copy_(copy)
        if not self.num_states:  # taken before the first step, when there was no state yet
            for tensor in _state(self.optimizer):
                tensor.zero_()
        set_generators(self.generators)


def snapshot(
    model: nn.Module, optimizer: torch.optim.Optimizer, scale: LossScale | None
) -> Snapshot:
    states = _state(optimizer)
    tensors = [*model.state_dict().values(), *states]
    if scale is not None:
        tensors += [scale.scale, scale.since_growth]
    tensors = [tensor.detach() for tensor in tensors]
    copies = [tensor.clone() for tensor in tensors]
    return Snapshot(tensors, copies, get_generators(), optimizer, len(states))


def _state(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    states: Any = optimizer.state.values()
    return [value for state in states for value in state.values() if isinstance(value, Tensor)]


def get_generators() -> list[Tensor]:
    """The generators that dropout draws from: the CPU's and the current CUDA device's."""
    found = [torch.get_rng_state()]
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        found.append(torch.cuda.get_rng_state())
    return found


def set_generators(states: list[Tensor]) -> None:
    torch.set_rng_state(states[0])
    if len(states) > 1:
        torch.cuda.set_rng_state(states[1])


def is_out_of_memory(error: RuntimeError) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or "not enough memory" in str(error)


def free_memory() -> None:
    """Give back what the failed step held; call it after its exception is gone."""
    gc.collect()
    if torch.cuda.is_available():
        torch._C._cuda_clearCublasWorkspaces()  # they would pin the memory around them
        torch.cuda.empty_cache()


def remedies(config: Config) -> str:
    """What is left at a micro-batch of one window, with what each would save."""
    context, sizes = config.data.context, config.model.sizes
    ladder = []
    if config.model.kind in (*RECURRENT, "transformer") and not config.engine.recompute:
        kept = max(len(sizes), 1)
        ladder.append(
            f"engine.recompute = true (keeps one layer's activations of {kept}, and computes the "
            "rest again)"
        )
    if config.engine.precision in ("auto", "fp32", "tf32"):
        ladder.append('engine.precision = "fp16" or "bf16" (about half of the activations)')
    ladder.append(f"data.context = {max(context // 2, 1)} (half of the activations)")
    ladder.append(
        f"model.hidden = {max(max(sizes) // 2, 1)} (half of the activations, a quarter "
        "of the weights)"
    )
    return "; ".join(ladder)
