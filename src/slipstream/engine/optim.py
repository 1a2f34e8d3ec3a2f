"""Optimizers, the fp16 loss scale, and the weight groups of an encoder.

Learning rate and loss scale are device tensors: a captured graph would freeze a Python float.
"""

import inspect
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from slipstream.config import Config, Train

Params = list[nn.Parameter] | list[dict[str, Any]]
FIRST_SCALE = 2.0**16
GROWTH, BACKOFF, GROW_AFTER = 2.0, 0.5, 2000
MAX_REPEATS = 40
"""Steps in a row whose gradients overflow before they count as diverged: the scale that is left
then would lose every gradient"""
CORE, OWN = "core.", ("core.pool.", "core.head.")
"""Prefixes of the core's weights, and of those of them that are not the encoder's"""


@contextmanager
def _skip_compiler_import() -> Iterator[None]:
    """Keep a new optimizer from importing torch's compiler, which takes two seconds.

    The optimizer wants `add_param_group` exempt from compilation; a method that carries the mark
    already is left alone.
    """
    method, mark = inspect.unwrap(torch.optim.Optimizer.add_param_group), "__dynamo_disable"
    if hasattr(method, mark):
        yield
        return
    setattr(method, mark, method)
    try:
        yield
    finally:
        delattr(method, mark)


@_skip_compiler_import()
def build_optimizer(
    train: Train, params: Params, lr: Tensor, *, fused: bool = True
) -> torch.optim.Optimizer:
    """Build the optimizer that `train` names; it reads `lr` at every step."""
    on_cuda = lr.device.type == "cuda"
    common: dict[str, Any] = {"lr": lr, "weight_decay": train.weight_decay}
    # without a fused kernel and off CUDA, only the plain loop over tensors accepts a tensor as lr
    how = common | ({"fused": True} if fused else {"foreach": on_cuda})
    match train.optimizer:
        case "adam":
            return torch.optim.Adam(params, capturable=on_cuda, **how)
        case "adamw":
            return torch.optim.AdamW(params, capturable=on_cuda, **how)
        case "sgd":  # has no capturable variant; only its fused kernel never synchronises
            return torch.optim.SGD(params, momentum=train.momentum, fused=True, **common)
        case "rmsprop":
            return torch.optim.RMSprop(params, capturable=on_cuda, foreach=on_cuda, **common)


def clear_grads(optimizer: torch.optim.Optimizer, *, set_to_none: bool) -> None:
    """Call `optimizer.zero_grad()` without its wrapper, which would load the compiler."""
    inspect.unwrap(torch.optim.Optimizer.zero_grad)(optimizer, set_to_none=set_to_none)


@dataclass(frozen=True)
class LossScale:
    """The fp16 loss scale: it doubles after many finite steps and halves after an overflow, whose
    step is repeated. So the first batch finds the scale that a job can begin with."""

    scale: Tensor
    since_growth: Tensor

    def update(self, overflow: Tensor) -> None:
        torch._amp_update_scale_(
            self.scale, self.since_growth, overflow, GROWTH, BACKOFF, GROW_AFTER
        )


def build_loss_scale(device: torch.device) -> LossScale:
    return LossScale(
        scale=torch.full((), FIRST_SCALE, device=device),
        since_growth=torch.zeros((), dtype=torch.int32, device=device),
    )


@dataclass(frozen=True)
class ParameterUpdate:
    """The optimizer and everything that an update reads besides the gradients."""

    optimizer: torch.optim.Optimizer
    lr: Tensor
    scale: LossScale | None
    clip: float | None
    set_to_none: bool

    def begin(self, rates: Tensor, cursor: Tensor) -> None:
        """Set the learning rate of the step at the cursor, and clear the gradients."""
        torch.index_select(rates, 0, cursor, out=self.lr.view(1))
        for group in self.optimizer.param_groups:
            if group["lr"] is not self.lr:
                torch.mul(self.lr, group["rate"], out=group["lr"])
        clear_grads(self.optimizer, set_to_none=self.set_to_none)

    def apply(self, params: list[nn.Parameter]) -> Tensor | None:
        return apply_gradients(self.optimizer, params, clip=self.clip, scale=self.scale)


def apply_gradients(
    optimizer: torch.optim.Optimizer,
    params: list[nn.Parameter],
    *,
    clip: float | None,
    scale: LossScale | None,
) -> Tensor | None:
    """Unscale, clip and step; if the gradients overflowed, change nothing but the scale.

    Returns whether it was a step, a bool on the device; None without a scale: it always is one.
    Unscaling and clipping are one division, which a fused optimizer does itself. Only fp16 without
    capture and without a fused optimizer synchronises with the host.
    """
    if clip is None and scale is None:
        vars(optimizer).update(grad_scale=None, found_inf=None)
        _step(optimizer)
        return None
    grads = [p.grad for p in params if p.grad is not None]
    norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads)))
    is_finite = overflow = None
    divisor = norm if clip is None else norm / clip
    if scale is None:
        divisor = torch.clamp(divisor, min=1.0)
    else:
        is_finite = (norm - norm) == 0  # inf - inf is nan; half the kernels of isfinite
        overflow = (~is_finite).float()
        divisor = scale.scale if clip is None else torch.maximum(scale.scale, divisor)
    if getattr(optimizer, "_step_supports_amp_scaling", False):
        # as torch's own GradScaler does it; there is no public way
        vars(optimizer).update(grad_scale=divisor, found_inf=overflow)
        _step(optimizer)
    else:
        torch._foreach_div_(grads, divisor)
        _step_unless(optimizer, overflow)
    if scale is not None and overflow is not None:
        scale.update(overflow)
    return is_finite


def _step(optimizer: torch.optim.Optimizer) -> None:
    """Call `optimizer.step()` without its wrappers, which would load the compiler."""
    with torch.no_grad():
        if isinstance(optimizer, torch.optim.Adam) and _is_fused_on_gpu(optimizer):
            for group in optimizer.param_groups:
                _step_in_pieces(optimizer, group)
        else:
            inspect.unwrap(type(optimizer).step)(optimizer)


def _is_fused_on_gpu(optimizer: torch.optim.Optimizer) -> bool:
    params = [param for group in optimizer.param_groups for param in group["params"]]
    is_fused = all(group["fused"] for group in optimizer.param_groups)
    return is_fused and all(param.is_cuda and param.is_contiguous() for param in params)


MIN_PIECE, NUM_PIECES = 4096, 32
"""Weights of a piece at least, and pieces that the optimizer's kernel takes at a time"""


def _step_in_pieces(optimizer: torch.optim.Adam, group: dict[str, Any]) -> None:
    """Take the step of torch's fused Adam or AdamW, with the same bits. Its kernel gives 65,536
    weights to one block, so that 66,000 of them took 40 us of a step on an H200; here each large
    tensor is handed over in pieces."""
    tensors: list[list[Tensor]] = [[] for _ in range(6)]
    optimizer._init_group(group, *tensors)
    params, grads, means, squares, _, counts = tensors
    if not params:
        return
    size = max(sum(param.numel() for param in params) // NUM_PIECES, MIN_PIECE)

    def divide(tensors: list[Tensor]) -> list[Tensor]:
        return [piece for tensor in tensors for piece in tensor.view(-1).split(size)]

    grads = [grad.contiguous() for grad in grads]
    repeated = [
        count
        for count, param in zip(counts, params, strict=True)
        for _ in range(-(-param.numel() // size))
    ]
    torch._foreach_add_(counts, 1)
    step: Any = torch._fused_adamw_ if group["decoupled_weight_decay"] else torch._fused_adam_
    overflow = getattr(optimizer, "found_inf", None)
    step(
        *(divide(parts) for parts in (params, grads, means, squares)),
        [],
        repeated,
        amsgrad=False,
        lr=group["lr"],
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=False,
        grad_scale=getattr(optimizer, "grad_scale", None),
        found_inf=overflow,
    )
    if overflow is not None:
        torch._foreach_sub_(counts, [overflow] * len(counts))


def _step_unless(optimizer: torch.optim.Optimizer, overflow: Tensor | None) -> None:
    """Step unless there is an overflow; a capture cannot branch, so it steps and undoes it."""
    if overflow is None:
        _step(optimizer)
        return
    if not (overflow.is_cuda and torch.cuda.is_current_stream_capturing()):
        if not float(overflow):
            _step(optimizer)
        return
    tensors = [p.data for group in optimizer.param_groups for p in group["params"]]
    tensors += [
        value
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, Tensor)
    ]
    before = [tensor.clone() for tensor in tensors]
    _step(optimizer)
    for tensor, old in zip(tensors, before, strict=True):
        tensor.copy_(torch.where(overflow > 0, old, tensor))


def is_encoder_weight(name: str) -> bool:
    """Whether a weight belongs to the encoder."""
    return name.startswith(CORE) and not name.startswith(OWN)


def is_frozen(train: Train, epoch: int) -> bool:
    return train.init_from is not None and epoch < train.freeze_epochs


def freeze(model: nn.Module, on: bool) -> None:
    """Freeze a model's encoder, or unfreeze it; frozen weights cost no backward pass."""
    for name, weight in model.named_parameters():
        if is_encoder_weight(name):
            weight.requires_grad_(not on)


def compute_lr_factor(name: str, config: Config) -> float:
    """Compute the multiple of `train.lr` that a weight is trained with."""
    train, layers = config.train, len(config.model.sizes)
    if train.init_from is None or not is_encoder_weight(name):
        return 1.0
    within = re.match(r"core\.(?:layers|norms)\.(\d+)\.", name)
    at_the_bottom = name.startswith(("core.embed.", "core.positions"))
    above = layers - 1 - int(within[1]) if within else layers if at_the_bottom else 0
    return float(train.encoder_lr * train.layer_decay**above)


class WeightGroup(NamedTuple):
    """Consecutive weights that are trained alike."""

    lr_factor: float
    starts_frozen: bool
    """Whether the weights are a pre-trained encoder's"""
    items: list[Any]


def group_weights(named: Iterable[tuple[str, Any]], config: Config) -> list[WeightGroup]:
    """Group named items by learning rate; without `init_from` there is one group."""
    groups: list[WeightGroup] = []
    for name, item in named:
        starts_frozen = config.train.init_from is not None and is_encoder_weight(name)
        rate = compute_lr_factor(name, config)
        if not groups or groups[-1][:2] != (rate, starts_frozen):
            groups.append(WeightGroup(rate, starts_frozen, []))
        groups[-1].items.append(item)
    return groups


def make_param_groups(groups: Sequence[WeightGroup], lr: Tensor) -> Params:
    """Build the optimizer's groups, each with its share of the learning rate."""
    if [group.lr_factor for group in groups] == [1.0]:
        return groups[0].items
    return [
        {"params": items, "lr": lr if rate == 1.0 else lr.clone(), "rate": rate}
        for rate, _, items in groups
    ]
