"""What a run does when memory runs out or the loss stops being a number."""

from __future__ import annotations

import gc
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from slipstream.config import Config
from slipstream.engine.optim import LossScale
from slipstream.engine.plan import RECURRENT

MOST_ROLLBACKS = 3


@dataclass(frozen=True)
class Snapshot:
    """Everything a step changes, copied; restored in place, since graphs know the places."""

    copies: dict[str, Tensor]
    """By the names that `changing` gives"""

    def restore(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, scale: LossScale | None
    ) -> None:
        for name, tensor in changing(model, optimizer, scale).items():
            if name in self.copies:
                tensor.copy_(self.copies[name])
            else:  # taken before the first step, when there was no state yet
                tensor.zero_()


def snapshot(
    model: nn.Module, optimizer: torch.optim.Optimizer, scale: LossScale | None
) -> Snapshot:
    found = changing(model, optimizer, scale)
    return Snapshot({name: tensor.clone() for name, tensor in found.items()})


def changing(
    model: nn.Module, optimizer: torch.optim.Optimizer, scale: LossScale | None
) -> dict[str, Tensor]:
    """The tensors that a step changes, by name: those of the model, the optimizer and the scale."""
    found = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    found |= {f"optimizer.{name}": tensor for name, tensor in states(optimizer).items()}
    if scale is not None:
        found |= {"scale": scale.scale, "since_growth": scale.since_growth}
    return {name: tensor.detach() for name, tensor in found.items()}


def states(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimizer's state as `parameter.name`, in an order of its own."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    return {
        f"{i}.{name}": value
        for i, param in enumerate(params)
        for name, value in sorted(optimizer.state.get(param, {}).items())
        if isinstance(value, Tensor)
    }


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
