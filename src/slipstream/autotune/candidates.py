"""What a plan leaves open: the alternatives that make sense for a job and are worth timing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple

from slipstream import machine
from slipstream.autotune.rules import MAX_OWN_HIDDEN
from slipstream.config import Config
from slipstream.engine.plan import Plan
from slipstream.kernels import is_triton_usable
from slipstream.models import OWN_KERNELS

COMPILE_S = 8.0
BUILDING_PAYS_S = 15.0
"""Of a run: kernels of our own take 2 s to build on 16 cores, 5 one after another, once on a
machine, and save a third or more of the steps' time, which is guessed high"""
NOTHING: Mapping[str, Any] = MappingProxyType({})


def prefer_own_kernels(config: Config, plan: Plan, guessed_s: float) -> Plan:
    """The plan with our own recurrent kernels where these are taken to be fastest: not in a run so
    short that building them would take longer than they save."""
    precision = plan.precision if config.engine.precision != "auto" else "fp16"
    fits = plan.device.type == "cuda" and config.model.spec.is_recurrent
    fits = fits and config.engine.cudnn == "auto" and precision in ("fp16", "bf16")
    if not (fits and max(config.model.sizes) <= MAX_OWN_HIDDEN and machine.has_tf32(plan.device)):
        return plan
    if guessed_s < BUILDING_PAYS_S or not is_triton_usable(plan.device):
        return plan
    why = "our own kernels, which are faster than cuDNN's at this width"
    own, reasons = (OWN_KERNELS,) * len(plan.cudnn), plan.reasons | {"cudnn": why}
    if precision != plan.precision:
        reasons["precision"] = "what our own kernels are made for"
    return replace(plan, cudnn=own, precision=precision, reasons=reasons)


class PlanCandidate(NamedTuple):
    """One setting changed."""

    setting: str
    value: Any
    change: Callable[[Plan], Any]
    """The setting's value, given the plan so far"""
    takes_s: float = 0.0
    """What it needs before its first step, beyond what others need"""
    also: Mapping[str, Any] = NOTHING
    """Other settings that go with it"""

    @property
    def name(self) -> str:
        return f"{self.setting} = {self.value}"


def make_candidates(
    setting: str, *values: Any, takes_s: float = 0.0, also: Mapping[str, Any] = NOTHING
) -> Iterator[PlanCandidate]:
    for value in values:

        def change(_: Plan, value: Any = value) -> Any:
            return value

        yield PlanCandidate(setting, value, change, takes_s, also)


def list_candidates(config: Config, plan: Plan) -> Iterator[PlanCandidate]:
    """What the config leaves open and makes sense here: likely winners first, and at the end what
    is tried to know what the rest is worth."""
    engine, recurrent = config.engine, config.model.spec.is_recurrent
    on_gpu = plan.device.type == "cuda"
    if OWN_KERNELS in plan.cudnn and engine.cudnn == "auto":
        yield PlanCandidate("cudnn", "persistent", use_persistent_cudnn)
    if on_gpu and engine.precision == "auto":
        known = machine.find_gpu_hint(plan.hardware["gpu"])
        half = ["fp16", "bf16"] if known and known.half == "fp16" else ["bf16", "fp16"]
        if recurrent:  # cuDNN's bf16 recurrence has no persistent kernels
            half = ["fp16"]
        if machine.has_tf32(plan.device):
            half = ["tf32", *half]
        for precision in ("fp32", *half):
            yield from make_candidates(
                "precision", precision, also=get_cudnn_override(precision, plan)
            )
    if not on_gpu and engine.threads == "auto":
        cores = machine.count_available_cores()
        yield from make_candidates("threads", *sorted({1, max(cores // 2, 1), cores}))
    if not on_gpu and recurrent:
        yield from make_candidates("onednn", True, False)
    if not on_gpu and engine.precision == "auto" and machine.has_fast_bf16():
        yield from make_candidates("precision", "bf16")
    if on_gpu and recurrent and engine.cudnn == "auto":
        yield from list_cudnn_algorithms(config.model.sizes)
    if engine.fused == "auto":
        yield from make_candidates("fused", False)
    if plan.home in ("stream", "loader") and engine.workers == "auto":
        yield from make_candidates("workers", 0, 2 * plan.workers)
    if on_gpu and not recurrent and engine.compile == "auto":
        yield from make_candidates("compile", True, takes_s=COMPILE_S)
    if on_gpu and engine.capture == "auto":
        yield from make_candidates("capture", False)


def get_cudnn_override(precision: str, plan: Plan) -> Mapping[str, Any]:
    """Wide precisions are cuDNN's: our own kernels hold no more than half as many units in them."""
    if OWN_KERNELS not in plan.cudnn or precision in ("fp16", "bf16"):
        return NOTHING
    return {"cudnn": use_persistent_cudnn(plan)}


def use_persistent_cudnn(plan: Plan) -> tuple[str, ...]:
    """Its layers, by what PyTorch chooses."""
    return ("persistent",) * len(plan.cudnn)


def list_cudnn_algorithms(sizes: Sequence[int]) -> Iterator[PlanCandidate]:
    """cuDNN's standard algorithm, for all layers of one size or for each layer by itself."""
    if len(set(sizes)) == 1:
        yield PlanCandidate("cudnn", "standard", lambda plan: ("standard",) * len(plan.cudnn))
        return
    for layer in range(len(sizes)):

        def change(plan: Plan, layer: int = layer) -> tuple[str, ...]:
            now = use_persistent_cudnn(plan) if OWN_KERNELS in plan.cudnn else plan.cudnn
            return (*now[:layer], "standard", *now[layer + 1 :])

        yield PlanCandidate("cudnn", f"standard in layer {layer + 1}", change)
