"""List the alternatives to a plan that make sense for a job and are worth timing."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple

from slipstream import machine
from slipstream.autotune.rules import MAX_OWN_HIDDEN, can_use_native_kernels
from slipstream.config import Config
from slipstream.engine.plan import Plan
from slipstream.kernels import build_library, is_triton_usable
from slipstream.models import OWN_KERNELS
from slipstream.text import format_count

COMPILE_S = 8.0
BUILDING_PAYS_S = 2.0
"""Length of a run from which on our own kernels are built: that takes 2 s on 16 cores, 5 s on one,
once per machine and shape, and saves a third or more of the steps' time in this run and the next"""
LONG_STEP_S = 1.0
"""Guess of a step on one thread from which on that is not the first thing to time"""
NOTHING: Mapping[str, Any] = MappingProxyType({})


def prefer_own_kernels(config: Config, plan: Plan, guessed_s: float) -> Plan:
    """Put our own recurrent kernels into the plan if they are likely to be fastest.

    In a short run, building them would take longer than they save.
    """
    if plan.device.type == "cpu":
        return _prefer_native_kernels(config, plan, guessed_s)
    precision = plan.precision if config.engine.precision != "auto" else "fp16"
    fits = plan.device.type == "cuda" and config.model.spec.is_recurrent
    fits = fits and config.train.state == "windows"  # they begin with zeros
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


def _prefer_native_kernels(config: Config, plan: Plan, guessed_s: float) -> Plan:
    """Put our kernels for a CPU into the plan, and compile them if that pays."""
    is_open = config.engine.cudnn == "auto" and can_use_native_kernels(config)
    if not is_open or OWN_KERNELS in plan.cudnn or guessed_s < BUILDING_PAYS_S:
        return plan
    if not build_library():
        reasons = plan.reasons | {"cudnn": "our own kernels need a C compiler"}
        return replace(plan, reasons=reasons)
    reasons = plan.reasons | {"cudnn": "our own kernels, compiled now"}
    return replace(plan, cudnn=(OWN_KERNELS,) * len(plan.cudnn), reasons=reasons)


def prefer_one_thread(config: Config, plan: Plan, guessed_step_s: float) -> Plan:
    """Put one thread into the plan that is timed first, where the number is open.

    One thread does not wait for others: on a busy machine its step is the cheapest to time, and
    more threads are stopped as soon as they are clearly slower. `guessed_step_s` is for one thread.
    """
    is_open = plan.device.type == "cpu" and config.engine.threads == "auto" and plan.threads > 1
    if not is_open or guessed_step_s > LONG_STEP_S:
        return plan
    return replace(plan, threads=1)


class PlanCandidate(NamedTuple):
    """A plan with one setting changed."""

    setting: str
    value: Any
    change: Callable[[Plan], Any]
    """From the best plan so far to the setting's value"""
    setup_s: float = 0.0
    """What it takes before its first step, beyond what others take"""
    also: Mapping[str, Any] = NOTHING
    """Other settings that change with it"""
    most_gain: float = 1.0
    """How many times as fast it can be at most, where that is known: it may take time for that"""

    @property
    def name(self) -> str:
        return f"{self.setting} = {self.value}"


def make_candidates(
    setting: str, *values: Any, setup_s: float = 0.0, also: Mapping[str, Any] = NOTHING
) -> Iterator[PlanCandidate]:
    """Yield a candidate for each value of a setting."""
    for value in values:

        def change(_: Plan, value: Any = value) -> Any:
            return value

        yield PlanCandidate(setting, value, change, setup_s, also)


def describe_value(setting: str, value: Any) -> str:
    """Name the value of a setting in a sentence."""
    match setting, value:
        case ("threads", _):
            return format_count(value, "thread")
        case ("workers", _):
            return format_count(value, "worker")
        case ("onednn", _):
            return "oneDNN's layers" if value else "torch's own layers"
        case ("fused", _):
            return "the fused optimizer" if value else "the optimizer without fusion"
        case ("compile", _):
            return "the compiled model" if value else "the model as it is"
        case ("capture", _):
            return "the captured step" if value else "the eager step"
        case ("cudnn", _):
            names = ["our own kernels" if one == OWN_KERNELS else f"cuDNN {one}" for one in value]
            return " and ".join(dict.fromkeys(names))
    return str(value)


def list_candidates(config: Config, plan: Plan) -> Iterator[PlanCandidate]:
    """Yield what the config leaves open and makes sense here: likely winners first, and at the end
    what is tried only to know what the rest is worth."""
    engine, recurrent = config.engine, config.model.spec.is_recurrent
    on_gpu = plan.device.type == "cuda"
    if OWN_KERNELS in plan.cudnn and engine.cudnn == "auto":
        name = "persistent" if on_gpu else "PyTorch's layers"
        yield PlanCandidate("cudnn", name, use_persistent_cudnn)
    if on_gpu and engine.precision == "auto":
        hint, is_recent = machine.find_gpu_hint(plan.hardware["gpu"]), machine.has_tf32(plan.device)
        half = ["fp16", "bf16"] if hint and hint.half == "fp16" else ["bf16", "fp16"]
        # cuDNN's bf16 recurrence has no persistent kernels; before Ampere, bf16 is emulated
        if recurrent or not is_recent:
            half = ["fp16"]
        for precision in ("fp32", *["tf32"] * is_recent, *half):
            also = get_cudnn_override(precision, plan)
            yield from make_candidates("precision", precision, also=also)
    if not on_gpu and engine.threads == "auto":
        cores = max(machine.count_available_cores() // plan.data_parallel, 1)
        for one in make_candidates("threads", *sorted({1, max(cores // 2, 1), cores})):
            yield one._replace(most_gain=max(one.value / plan.threads, 1.0))
    if not on_gpu and (OWN_KERNELS not in plan.cudnn or engine.cudnn == "auto"):
        torch_layers = get_cudnn_override("fp32", plan)
        if recurrent:
            yield from make_candidates("onednn", True, False, also=torch_layers)
        if engine.precision == "auto" and machine.has_fast_bf16():
            yield from make_candidates("precision", "bf16", also=torch_layers)
    if on_gpu and recurrent and engine.cudnn == "auto" and config.train.state == "windows":
        yield from list_cudnn_algorithms(config.model.sizes)
    if engine.fused == "auto":
        yield from make_candidates("fused", False)
    if plan.home in ("stream", "loader") and engine.workers == "auto":
        yield from make_candidates("workers", 0, 2 * plan.workers)
    if on_gpu and not recurrent and engine.compile == "auto":
        yield from make_candidates("compile", True, setup_s=COMPILE_S)
    if on_gpu and engine.capture == "auto":
        yield from make_candidates("capture", False)


def get_cudnn_override(precision: str, plan: Plan) -> Mapping[str, Any]:
    """Return the change to cuDNN that a wide precision needs: our own kernels hold no more than
    half as many units in it. On a CPU they compute in fp32 only."""
    if OWN_KERNELS not in plan.cudnn or precision in ("fp16", "bf16"):
        return NOTHING
    return {"cudnn": use_persistent_cudnn(plan)}


def use_persistent_cudnn(plan: Plan) -> tuple[str, ...]:
    """Return the algorithm that PyTorch chooses, for every layer."""
    return ("persistent",) * len(plan.cudnn)


def list_cudnn_algorithms(sizes: Sequence[int]) -> Iterator[PlanCandidate]:
    """Yield cuDNN's standard algorithm: for all layers of one size, or for each layer alone."""
    if len(set(sizes)) == 1:
        yield PlanCandidate("cudnn", "standard", lambda plan: ("standard",) * len(plan.cudnn))
        return
    for layer in range(len(sizes)):

        def change(plan: Plan, layer: int = layer) -> tuple[str, ...]:
            now = use_persistent_cudnn(plan) if OWN_KERNELS in plan.cudnn else plan.cudnn
            return (*now[:layer], "standard", *now[layer + 1 :])

        yield PlanCandidate("cudnn", f"standard in layer {layer + 1}", change)
