"""The plan: rules of thumb, and candidates timed on real steps."""

from __future__ import annotations

import copy
import hashlib
import itertools
import json
import math
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from slipstream import runs
from slipstream.base import machine
from slipstream.base.errors import UserError
from slipstream.base.machine import CpuLoad
from slipstream.base.text import format_count, format_ms, format_number, format_speedup
from slipstream.config import Config, Signature, replace_settings
from slipstream.config.model import explain_fitted
from slipstream.config.train import LAYER_WORDS
from slipstream.data.dataset import Dataset
from slipstream.data.windows import Series
from slipstream.engine import capture, pack, recovery
from slipstream.engine.context import RunContext, build_model, seed_generators
from slipstream.engine.lanes import EpochStart, Lane, compute_lrs
from slipstream.engine.pack import GRADIENTS, LaneMode
from slipstream.engine.plan import PackChoice, Plan
from slipstream.engine.single import SingleStep, build_step
from slipstream.kernels import (
    build_library,
    explain_no_half_kernels,
    find_compiler,
    find_library,
    has_cuda_kernels,
)
from slipstream.models import shapes
from slipstream.models.forecaster import OWN_KERNELS
from slipstream.models.rnn import STANDARD
from slipstream.runs import Run

MAX_OWN_HIDDEN = 512
"""Hidden units up to which our own recurrent kernels have been faster than cuDNN's"""
GB = 1e9
HALF_PAYS_HIDDEN = 128
"""Hidden units from which fp16 LSTMs have been faster than tf32 ones, with 200 to 512 sequences a
step; with 64 units and 256 sequences, tf32 was"""
HALF_PAYS = 20_000
"""Hidden units times batch from which fewer hidden units do as well"""
SMALL_ON_ARM = 2048
"""Hidden units times batch up to which oneDNN's LSTM has been faster on Arm"""
REQUESTED = "requested"
TOGETHER = "each computes its share of every batch; gradients are added up once a step"
BUILT = "our own kernels, which were built here before"


def make_plan(
    config: Config,
    *,
    data_bytes: int,
    training: bool = True,
    streamed: bool = False,
    lanes: bool = False,
) -> Plan:
    """Make the plan within what the config allows; `lanes` says that many models share it."""
    engine, model = config.engine, config.model
    if training and model.spec.is_fitted:
        raise UserError(explain_fitted(model.kind), setting="model.kind")
    device = machine.choose_device(engine.device)
    hardware = machine.describe(device)
    recurrent = model.spec.is_recurrent
    precision, precision_reason = _choose_precision(config, device, lanes=lanes)
    capture, capture_reason = False, "only training steps are captured"
    if training:
        capture, capture_reason = _choose_capture(config, device)
    home, home_reason = _choose_home(config, device, data_bytes)
    if streamed:
        home, home_reason = "stream", f"{data_bytes / 1e6:,.1f} MB of series stay on disk"
    onednn, onednn_reason = _choose_onednn(config, hardware["system"], precision)
    processes = engine.data_parallel if training else 1
    threads, threads_reason = _choose_threads(config, processes)
    layers, rnn_reason = _choose_rnn(config, device)
    workers, prefetch = _choose_workers(config, hardware.get("gpu", ""))
    return Plan(
        device=device,
        precision=precision,
        home=home,
        capture=capture,
        # elsewhere every step gets its windows from the host, into the same buffers
        steps_per_graph=engine.steps_per_graph if home == "device" else 1,
        rnn=(layers,) * len(model.sizes) if recurrent else (),
        cudnn_benchmark=engine.cudnn_benchmark,
        compile=engine.compile is True and not recurrent,
        fused=engine.fused is not False,
        set_to_none=engine.set_to_none,
        deterministic=engine.deterministic,
        recompute=engine.recompute,
        threads=threads,
        onednn=onednn,
        workers=workers,
        prefetch=prefetch,
        micro_batch=None,
        reasons={
            "device": str(hardware.get("gpu", hardware["cpu"])),
            "precision": precision_reason,
            "capture": capture_reason,
            "home": home_reason,
            "compile": _explain_compile(config),
            "onednn": onednn_reason,
            "threads": threads_reason,
            "rnn": rnn_reason,
            **({"data_parallel": TOGETHER} if processes > 1 else {}),
        },
        hardware=hardware,
        data_parallel=processes,
    )


def _choose_precision(config: Config, device: torch.device, *, lanes: bool) -> tuple[str, str]:
    requested = config.engine.precision
    if device.type == "cpu":
        if requested in ("tf32", "fp16"):
            why = f'engine.precision is "{requested}", which a CPU does not have'
            raise UserError(f'{why}; use "fp32" or "bf16"')
        return ("fp32", "the CPU's own") if requested == "auto" else (requested, REQUESTED)
    has_tf32 = machine.has_tf32(device)
    if requested == "tf32" and not has_tf32:
        raise UserError('engine.precision is "tf32", which this GPU lacks; use "fp32" or "fp16"')
    if requested != "auto":
        return requested, REQUESTED
    if is_half_faster(config, lanes=lanes):
        return "fp16", "fast for recurrent layers of this size"
    return ("tf32", "this GPU has it") if has_tf32 else ("fp16", "this GPU has no tf32")


def is_half_faster(config: Config, *, lanes: bool = False) -> bool:
    """Guess whether recurrent layers are faster in fp16 than in tf32, before measuring."""
    hidden = max(config.model.sizes)
    large = hidden >= HALF_PAYS_HIDDEN or hidden * _get_batch(config) >= HALF_PAYS
    lanes = lanes or config.train.repeats > 1 or config.data.split.walk_forward is not None
    return config.model.spec.is_recurrent and (large or lanes)  # the lanes' kernels prefer fp16


def _choose_capture(config: Config, device: torch.device) -> tuple[bool, str]:
    requested = config.engine.capture
    if device.type == "cpu":
        if requested is True:
            raise UserError("engine.capture is true, but steps are captured on CUDA only")
        return False, "a CPU runs the step as it is"
    if requested == "auto":
        return True, "the whole step replays as one CUDA graph"
    return requested, REQUESTED


def _choose_home(config: Config, device: torch.device, data_bytes: int) -> tuple[str, str]:
    requested, on_cpu = config.engine.home, device.type == "cpu"
    free_bytes = machine.get_available_memory() if on_cpu else torch.cuda.mem_get_info(device)[0]
    size = f"{data_bytes / 1e6:,.1f} MB of series, {free_bytes / GB:,.0f} GB free"
    if requested == "host" and on_cpu:
        return "device", f"{size}; on a CPU, host and device are one"
    if requested != "auto":
        return requested, f"{REQUESTED}; {size}"
    if config.train.state == "carried":
        return "device", f"{size}; a carried state is computed there"
    if not on_cpu and data_bytes > free_bytes / 2:
        return "host", f"{size}: too much for the device"
    return "device", size


def _explain_compile(config: Config) -> str:
    if config.engine.compile is True and config.model.spec.is_recurrent:
        return "off: torch.compile leaves recurrent layers as they are"
    return "off: takes long to start" if config.engine.compile == "auto" else REQUESTED


def _choose_onednn(config: Config, system: str, precision: str) -> tuple[bool, str]:
    if system.split()[-1] not in ("aarch64", "arm64"):
        return True, "fast here"
    model = config.model
    small = model.spec.onednn_on_arm and max(model.sizes) * _get_batch(config) <= SMALL_ON_ARM
    if small and precision == "fp32":  # there is none in bf16 on Arm
        return True, "fast here"
    return False, "slower than ATen's recurrent layers of this size on Arm"


def _choose_threads(config: Config, processes: int) -> tuple[int, str]:
    if config.engine.threads != "auto":
        return config.engine.threads, REQUESTED
    threads, cores = machine.count_available_cores(), machine.count_visible_cores()
    if processes > 1:
        return max(threads // processes, 1), f"{threads} cores for {processes} processes"
    return threads, "every core" if threads == cores else "the container's quota"


def _choose_rnn(config: Config, device: torch.device) -> tuple[str, str]:
    """Choose what runs recurrent layers, and say why."""
    requested, model = config.engine.rnn, config.model
    if device.type == "cpu":
        return _choose_cpu_layers(config)
    if requested == "auto" and config.train.state == "carried":
        return "cudnn", "cuDNN's layers, which begin with a state"
    if requested == OWN_KERNELS and model.spec.is_recurrent:
        hidden, refusal = max(model.sizes), None
        if not machine.has_tf32(device):
            refusal = explain_no_half_kernels(device, hidden)
        _refuse_own_kernels(hidden, refusal)
    return ("cudnn", "as PyTorch chooses") if requested == "auto" else (requested, REQUESTED)


def _choose_cpu_layers(config: Config) -> tuple[str, str]:
    """Choose our own kernels, if they are requested or have been built here before."""
    requested = config.engine.rnn
    if requested == "cudnn":
        return "torch", "PyTorch's recurrent layers, as a CPU has no cuDNN"
    if not can_use_native_kernels(config) or requested == "torch":
        return "torch", "PyTorch's recurrent layers"
    if requested == "auto":
        is_ready = find_library() is not None
        return (OWN_KERNELS, BUILT) if is_ready else ("torch", "our own kernels are not built")
    if not build_library():
        return "torch", "our own kernels need a C compiler that works"
    return OWN_KERNELS, REQUESTED


def can_use_native_kernels(config: Config) -> bool:
    """Whether our kernels for a CPU do what a config requests: they compute in fp32, and store what
    the backward pass needs."""
    engine = config.engine
    fits = engine.precision in ("auto", "fp32") and not engine.recompute
    return config.model.spec.is_recurrent and fits


def _refuse_own_kernels(hidden: int, refusal: str | None) -> None:
    """Raise an error if our own kernels cannot run this width, or this GPU for this reason."""
    why = f"model.hidden is {hidden}" if hidden > MAX_OWN_HIDDEN else refusal
    if why is not None:
        raise UserError(
            f'engine.rnn is "slipstream", but our own kernels take up to {MAX_OWN_HIDDEN} hidden '
            f'units, on GPUs since Ampere, and up to 128 on Turing ({why}); use "auto"'
        )


def _choose_workers(config: Config, gpu: str) -> tuple[int, int]:
    """Return DataLoader workers and batches to prefetch, by the model, the memory and the GPU."""
    memory, engine = machine.get_total_memory() / GB, config.engine
    size = 0 if memory < 8 else 1 if memory < 16 else 2
    workers, prefetch = ((2, 4, 8)[size], 4) if config.model.spec.flattens else ((0, 2, 4)[size], 2)
    if (hint := machine.find_gpu_hint(gpu)) is not None:
        workers = min(workers, hint.workers)
    workers = min(workers, machine.count_available_cores())
    workers = workers if engine.workers == "auto" else engine.workers
    return workers, prefetch if engine.prefetch == "auto" else engine.prefetch


def _get_batch(config: Config) -> int:
    return 256 if config.train.batch == "auto" else config.train.batch


TRIAL_S = 0.12
NUM_STRETCHES = 3
"""A candidate's time is that of the fastest of so many stretches of steps"""
MAX_STEPS = 100
"""Of one stretch"""
WORTHWHILE_RATIO = 0.97
"""A candidate must take less than this share of the best time"""
OUT_OF_TIME = "not measured (time limit)"
CLEARLY_SLOWER = 1.5
"""A candidate whose steps take so many times the best time is not timed any further"""
HOPELESS = 5.0
"""A candidate whose very first step takes so many times the best time is not timed: that step has
set-up in it, so the limit is higher"""
STOPPED_EARLY = "stopped early: clearly slower"


class StepMeasurement(NamedTuple):
    """The time and the loss of a few steps under a plan."""

    ms: float
    loss: float
    kernels: list[str]
    stopped_early: bool = False
    """Whether it was clearly slower than the best, so that its time is that of few steps"""


def count_windows_per_step(config: Config) -> int:
    """Return the windows of one optimizer step."""
    assert config.train.batch != "auto"
    return config.train.batch * config.train.accumulate


def count_own_windows(context: RunContext) -> int:
    """Return the windows of one optimizer step that this process computes."""
    return -(
        -count_windows_per_step(context.config) // (context.ranks.size if context.ranks else 1)
    )


def count_steps(context: RunContext) -> int:
    """Return the optimizer steps of one epoch."""
    return context.num_steps


def guess_duration_s(context: RunContext, plan: Plan) -> float:
    """Guess very roughly how many seconds training takes, from multiplications and kernel calls."""
    cores = machine.count_available_cores()
    return (
        guess_step_s(context, plan, cores)
        * count_exact_steps(context)
        * context.config.train.max_epochs
    )


def count_exact_steps(context: RunContext) -> float:
    """Return the steps of one epoch, the last one as the share of a whole batch that it is."""
    if context.is_carried:
        return context.num_steps
    return context.dataset.num_windows["train"] / count_windows_per_step(context.config)


def guess_step_s(context: RunContext, plan: Plan, cores: int) -> float:
    """Guess very roughly how many seconds a step takes, on so many cores of a CPU."""
    config = context.config
    return shapes.guess_step_s(
        config.model,
        weights=context.num_parameters,
        context=config.data.context,
        windows=count_own_windows(context) * context.dataset.signature.sequences_per_window,
        cores=0 if plan.device.type == "cuda" else cores,
    )


def measure_ms(
    time_steps: Callable[[int], float], max_steps: int, *, best_ms: float = math.inf
) -> float:
    """Return the milliseconds per step, given a function from a number of steps to seconds.

    It ends as soon as the steps are clearly slower than `best_ms`.
    """
    once_s = time_steps(1)
    if 1e3 * once_s > CLEARLY_SLOWER * best_ms:
        return 1e3 * once_s
    steps = min(int(TRIAL_S / NUM_STRETCHES / max(once_s, 1e-6)), MAX_STEPS, max_steps) or 1
    fastest_ms = math.inf
    for _ in range(NUM_STRETCHES):
        fastest_ms = min(fastest_ms, 1e3 * time_steps(steps) / steps)
        if fastest_ms > CLEARLY_SLOWER * best_ms:
            break
    return fastest_ms


def measure_step(context: RunContext, plan: Plan, *, best_ms: float = math.inf) -> StepMeasurement:
    """Train a copy of the model for a moment, the shorter the slower it is than `best_ms`."""
    trial = replace(context, network=copy.deepcopy(context.model))
    with plan.flags():
        program = build_step(trial, plan)
        try:
            warm_up = capture.EAGER_FIRST + 1 if plan.device.type == "cuda" else 1
            ms = 1e3 * time_first_steps(program, context.config, warm_up) / warm_up
            program.catch_up(min(warm_up, program.batches.num_steps))
            losses = program.buffers.losses[:warm_up].clone()  # the same steps for every candidate
            if ms <= HOPELESS * best_ms:
                ms = measure_ms(
                    lambda steps: time_first_steps(program, context.config, steps),
                    program.batches.num_steps,
                    best_ms=best_ms,
                )
            if program.failures():
                raise RuntimeError("; ".join(program.failures().values()))
            loss, early = float(losses.double().mean()), ms > CLEARLY_SLOWER * best_ms
            return StepMeasurement(ms, loss, program.kernels(), early)
        finally:
            program.close()


def time_steps(
    step: Callable[[], Any],
    count: int,
    device: torch.device,
    finish: Callable[[], Any] = lambda: None,
) -> float:
    """Return the seconds of some steps, the device's work and what they deferred included."""
    machine.synchronize(device)
    started_at = time.perf_counter()
    for _ in range(count):
        step()
    finish()
    machine.synchronize(device)
    return time.perf_counter() - started_at


def time_first_steps(program: SingleStep, config: Config, steps: int) -> float:
    """Return the seconds of an epoch's first steps; the epoch is set up before the clock starts."""
    num_steps = program.batches.num_steps
    program.batches.start_epoch(0)
    program.buffers.begin(compute_lrs(config.train, EpochStart(), num_steps), first=0)
    steps = min(steps, num_steps)
    return time_steps(program.advance, steps, program.plan.device, program.flush)


def try_plan(
    context: RunContext,
    plan: Plan,
    name: str,
    evidence: list[dict[str, Any]],
    *,
    best_ms: float = math.inf,
) -> StepMeasurement | None:
    """Measure a candidate and add it to the evidence; None if it fails."""
    try:
        result = measure_step(context, plan, best_ms=best_ms)
    except Exception as error:
        if not isinstance(error, recovery.MEMORY_ERRORS) and OWN_KERNELS not in plan.rnn:
            raise  # a compiler of kernels may raise anything
        reason, full = recovery.first_line(error), recovery.is_out_of_memory(error)
        evidence.append({"candidate": name, "failed": reason, "out_of_memory": full})
        return None
    finally:
        recovery.free_memory()
    early = {"stopped": STOPPED_EARLY} if result.stopped_early else {}
    evidence.append({"candidate": name, "ms": result.ms} | early)
    return result


COMPILE_S = 8.0
BUILDING_PAYS_S, COMPILING_PAYS_S = 2.0, 1.0
"""Length of a run from which on our own kernels are built, once per machine and shape. In Triton
and C that takes 2 s on 16 cores, 5 s on one, and saves a third or more of the steps' time in this
run and the next; in CUDA C++ less than a second, and half or more of the time"""
LARGE_STEP = 2048
"""Windows of a step from which on our own kernels save most of its time, so that they pay in a run
half as long: of 4096 windows of 48 rows and 32 units, cuDNN took 2.0 ms on an H200, ours 0.26 ms"""
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
    fits = fits and config.engine.rnn == "auto" and precision in ("fp16", "bf16")
    hidden = max(config.model.sizes)
    if not fits or hidden > MAX_OWN_HIDDEN:
        return plan
    is_quick = has_cuda_kernels(plan.device, hidden)
    if not does_building_pay(guessed_s, windows=_get_batch(config), is_quick=is_quick):
        return plan
    if precision == "bf16" and not machine.has_tf32(plan.device):
        return plan
    carried = config.train.state == "carried"
    if explain_no_half_kernels(plan.device, hidden, carried=carried) is not None:
        return plan
    why = "our own kernels, which are faster than cuDNN's at this width"
    layers, reasons = (OWN_KERNELS,) * len(plan.rnn), plan.reasons | {"rnn": why}
    if precision != plan.precision:
        reasons["precision"] = "what our own kernels are made for"
    return replace(plan, rnn=layers, precision=precision, reasons=reasons)


def does_building_pay(guessed_s: float, *, windows: int, is_quick: bool) -> bool:
    """Return whether a run on a GPU with steps of so many windows is long enough to build our own
    kernels; `is_quick` says that those in CUDA C++ do."""
    limit_s = COMPILING_PAYS_S if is_quick else BUILDING_PAYS_S
    return guessed_s >= (limit_s / 2 if windows >= LARGE_STEP else limit_s)


def _prefer_native_kernels(config: Config, plan: Plan, guessed_s: float) -> Plan:
    """Put our kernels for a CPU into the plan, and compile them if that pays."""
    is_open = config.engine.rnn == "auto" and can_use_native_kernels(config)
    if not is_open or OWN_KERNELS in plan.rnn or guessed_s < BUILDING_PAYS_S:
        return plan
    if not build_library():
        reasons = plan.reasons | {"rnn": "our own kernels need a C compiler"}
        return replace(plan, reasons=reasons)
    reasons = plan.reasons | {"rnn": "our own kernels, compiled now"}
    return replace(plan, rnn=(OWN_KERNELS,) * len(plan.rnn), reasons=reasons)


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
    """Seconds before its first step, beyond those of other candidates"""
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
        case ("rnn", _):
            return " and ".join(dict.fromkeys(LAYER_WORDS[layer] for layer in value))
    return str(value)


def list_candidates(config: Config, plan: Plan) -> Iterator[PlanCandidate]:
    """Yield what the config leaves open and makes sense here: likely winners first, and at the end
    what is tried only to know what the rest is worth."""
    engine, recurrent = config.engine, config.model.spec.is_recurrent
    on_gpu = plan.device.type == "cuda"
    if OWN_KERNELS in plan.rnn and engine.rnn == "auto":
        yield PlanCandidate("rnn", get_library_layers(plan), use_library_layers)
    if on_gpu and engine.precision == "auto":
        hint, is_recent = machine.find_gpu_hint(plan.hardware["gpu"]), machine.has_tf32(plan.device)
        half = ["fp16", "bf16"] if hint and hint.half == "fp16" else ["bf16", "fp16"]
        # cuDNN's bf16 recurrence has no persistent kernels; before Ampere, bf16 is emulated
        if recurrent or not is_recent:
            half = ["fp16"]
        for precision in ("fp32", *["tf32"] * is_recent, *half):
            also = get_rnn_override(precision, plan)
            yield from make_candidates("precision", precision, also=also)
    if not on_gpu and engine.threads == "auto":
        cores = max(machine.count_available_cores() // plan.data_parallel, 1)
        for candidate in make_candidates("threads", *sorted({1, max(cores // 2, 1), cores})):
            yield candidate._replace(most_gain=max(candidate.value / plan.threads, 1.0))
    if not on_gpu and (OWN_KERNELS not in plan.rnn or engine.rnn == "auto"):
        torch_layers = get_rnn_override("fp32", plan)
        if recurrent:
            yield from make_candidates("onednn", True, False, also=torch_layers)
        if engine.precision == "auto" and machine.has_fast_bf16():
            yield from make_candidates("precision", "bf16", also=torch_layers)
    asks_cudnn = engine.rnn in ("auto", "cudnn") and config.train.state == "windows"
    if on_gpu and recurrent and asks_cudnn:
        yield from list_cudnn_algorithms(config.model.sizes)
    if engine.fused == "auto":
        yield from make_candidates("fused", False)
    if plan.home in ("stream", "loader") and engine.workers == "auto":
        yield from make_candidates("workers", 0, 2 * plan.workers)
    if on_gpu and not recurrent and engine.compile == "auto":
        yield from make_candidates("compile", True, setup_s=COMPILE_S)
    if on_gpu and engine.capture == "auto":
        yield from make_candidates("capture", False)


def get_rnn_override(precision: str, plan: Plan) -> Mapping[str, Any]:
    """Return the change of layers that a wide precision needs: our own kernels hold no more than
    half as many units in it. On a CPU they compute in fp32 only."""
    if OWN_KERNELS not in plan.rnn or precision in ("fp16", "bf16"):
        return NOTHING
    return {"rnn": use_library_layers(plan)}


def get_library_layers(plan: Plan) -> str:
    """Return what runs recurrent layers without our own kernels: cuDNN, or PyTorch on a CPU."""
    return "cudnn" if plan.device.type == "cuda" else "torch"


def use_library_layers(plan: Plan) -> tuple[str, ...]:
    """Return what runs each recurrent layer without our own kernels."""
    return (get_library_layers(plan),) * len(plan.rnn)


def list_cudnn_algorithms(sizes: Sequence[int]) -> Iterator[PlanCandidate]:
    """Yield cuDNN's standard algorithm: for all layers of one size, or for each layer alone."""
    if len(set(sizes)) == 1:
        yield PlanCandidate("rnn", STANDARD, lambda plan: (STANDARD,) * len(plan.rnn))
        return
    for layer in range(len(sizes)):

        def change(plan: Plan, layer: int = layer) -> tuple[str, ...]:
            now = use_library_layers(plan) if OWN_KERNELS in plan.rnn else plan.rnn
            return (*now[:layer], STANDARD, *now[layer + 1 :])

        yield PlanCandidate("rnn", f"{STANDARD} in layer {layer + 1}", change)


MEASURE_LIMIT_S = 10.0
SHARE_OF_RUN = 0.05
"""Measuring may take this share of the training, and no more than the limit"""
FIRST_TRIAL_S = 0.5
"""The least time that a trial takes, with everything around its steps"""
SAME_LOSS = 0.01
"""How far a candidate's mean loss may be from the first one's"""
START = "rules of thumb"
CACHE = "plans.json"
BUSY = "load"
"""The reason of a plan that was measured while other processes used the cores"""
CHOICES = (
    *("precision", "rnn", "threads", "onednn", "fused", "workers", "compile", "capture"),
    *("ms_per_step", "kernels", "evidence"),
)
"""The fields of a plan that measuring decides"""
BUSY_RATIO = 0.8
"""On a busy machine, times vary: more threads, or PyTorch's layers instead of our kernels, must
take less than this share of the best time"""
MIN_BATCH, MAX_BATCH = 32, 16384
WORTHWHILE_SPEEDUP = 1.1
"""How much faster a larger batch must be, since it takes fewer steps to learn in"""


def choose_plan(context: RunContext, plan: Plan) -> Plan:
    """Return the plan with what measuring decides, from the cache or measured now."""
    config = context.config
    if config.engine.plan == "off":
        return plan
    guessed_s = limit_duration(config, guess_duration_s(context, plan))
    key = compute_key(context, plan)
    rules = prefer_own_kernels(config, plan, guessed_s)
    if config.engine.plan == "cached" and (saved := read_plan(key, rules)):
        return saved
    if SHARE_OF_RUN * guessed_s < FIRST_TRIAL_S:
        reason = "rules of thumb: the steps are too few to measure"
        return replace(rules, reasons=rules.reasons | {"plan": reason})
    started_at = time.perf_counter()
    measured, is_complete = measure_plan(context, rules)
    reason = f"measured in {time.perf_counter() - started_at:.1f} s"
    measured = replace(measured, reasons=measured.reasons | {"plan": reason})
    # another process may have had the memory or the cores, which the next run then has
    was_busy = config.engine.threads == "auto" and BUSY in measured.reasons
    if is_complete and measured.micro_batch is None and not was_busy:
        write_plan(key, measured, rules)
    return measured


def limit_duration(config: Config, seconds: float) -> float:
    """Return how long a training of so many seconds takes within `train.minutes`."""
    minutes = config.train.minutes
    return seconds if minutes is None else min(seconds, 60 * minutes)


def measure_plan(context: RunContext, rules: Plan) -> tuple[Plan, bool]:
    """Return the fastest plan that keeps the losses, and whether every candidate had its time."""
    started_at, usage = time.perf_counter(), machine.read_cpu_usage()
    machine.warm_up(rules.device)
    first = prefer_one_thread(context.config, rules, guess_step_s(context, rules, 1))
    search = PlanSearch(context, first)
    best = search.measure_start(START if first is rules else f"{START}, threads = {first.threads}")
    if rules.device.type == "cpu":
        search.record_load(machine.compute_load(usage, machine.read_cpu_usage()))
    if best is None:
        return replace(search.plan, evidence=search.evidence), False
    all_s = best.ms / 1e3 * count_steps(context) * context.config.train.max_epochs
    search.run_s = limit_duration(context.config, all_s)
    share_s = SHARE_OF_RUN * search.run_s
    deadline = started_at + min(MEASURE_LIMIT_S, share_s)
    for candidate in list_candidates(context.config, search.plan):
        best = search.try_candidate(candidate, best, deadline)
    skipped = any("skipped" in item for item in search.evidence)
    is_complete = share_s >= MEASURE_LIMIT_S or not skipped
    if first.threads != rules.threads and "threads" not in search.reasons:
        return search.leave_threads_to_rules(rules, best), is_complete
    return search.summarize(best), is_complete


@dataclass
class PlanSearch:
    """The fastest plan so far, and what was tried."""

    context: RunContext
    plan: Plan
    evidence: list[dict[str, Any]] = field(default_factory=list)
    reasons: dict[str, str] = field(default_factory=dict)
    reference_loss: float = math.nan
    trial_s: float = TRIAL_S
    """Seconds of the last trial"""
    load: CpuLoad | None = None
    """Of the other processes, where it was measured"""
    run_s: float = math.inf
    """Seconds of training with the first plan"""

    def summarize(self, best: StepMeasurement) -> Plan:
        """Return the fastest plan with its time, its reasons and everything that was tried."""
        return replace(
            self.plan,
            ms_per_step=best.ms,
            kernels=best.kernels,
            reasons=self.plan.reasons | self.reasons,
            evidence=self.evidence,
        )

    def leave_threads_to_rules(self, rules: Plan, best: StepMeasurement) -> Plan:
        """Return the plan where only one thread was timed: it stays on a busy machine only."""
        plan = self.summarize(best)
        reason = f"more were {OUT_OF_TIME}"
        if BUSY in plan.reasons:
            return replace(plan, reasons=plan.reasons | {"threads": reason})
        reason = f"{rules.reasons['threads']}; {OUT_OF_TIME}"
        reasons = plan.reasons | {"threads": reason}
        return replace(plan, threads=rules.threads, ms_per_step=None, reasons=reasons)

    def record_load(self, load: CpuLoad | None) -> None:
        """Record how busy the machine is, for the choice of threads and for the reader."""
        self.load = load
        if load is not None and load.is_busy:
            self.reasons[BUSY] = f"the machine is busy: {load.describe()}"

    def measure_start(self, name: str) -> StepMeasurement | None:
        """Measure the first plan; where it fails, without our kernels, then in smaller passes. None
        if nothing works."""
        result = self._try(name)
        is_free = self.context.config.engine.rnn == "auto"
        if result is None and OWN_KERNELS in self.plan.rnn and is_free:
            failure = self.evidence[-1]["failed"]
            self.reasons["rnn"] = f"as PyTorch chooses: our own kernels failed ({failure})"
            self.plan = replace(self.plan, rnn=use_library_layers(self.plan))
            result = self._try(f"rnn = {get_library_layers(self.plan)}")
        while result is None and self.evidence[-1]["out_of_memory"]:
            batch = self.plan.micro_batch or self.context.config.train.batch
            assert batch != "auto"
            if batch == 1:
                return None
            self.plan = replace(self.plan, micro_batch=-(-batch // 2))
            self.reasons["micro_batch"] = f"{format_count(batch, 'window')} per pass did not fit"
            result = self._try(f"{format_count(self.plan.micro_batch or 0, 'window')} per pass")
        if result is not None:
            self.reference_loss = result.loss
        return result

    def _try(self, name: str) -> StepMeasurement | None:
        return try_plan(self.context, self.plan, name, self.evidence)

    def try_candidate(
        self, candidate: PlanCandidate, best: StepMeasurement, deadline: float
    ) -> StepMeasurement:
        """Take the candidate if it is worth it, and return the best measurement."""
        value = candidate.change(self.plan)
        if value == getattr(self.plan, candidate.setting):
            return best
        started_at, needed_s = time.perf_counter(), max(self.trial_s, TRIAL_S) + candidate.setup_s
        if needed_s > max(deadline - started_at, self.compute_allowance(candidate)):
            self.evidence.append({"candidate": candidate.name, "skipped": OUT_OF_TIME})
            return best
        changed = replace(self.plan, **{candidate.setting: value}, **candidate.also)
        limit_ms = best.ms if changed.device.type == "cpu" else math.inf
        result = try_plan(self.context, changed, candidate.name, self.evidence, best_ms=limit_ms)
        self.trial_s = time.perf_counter() - started_at
        return best if result is None else self.decide(candidate, changed, best, result)

    def decide(
        self,
        candidate: PlanCandidate,
        changed: Plan,
        best: StepMeasurement,
        result: StepMeasurement,
    ) -> StepMeasurement:
        """Take the changed plan if its measurement is worth it, and return the best measurement."""
        before = getattr(self.plan, candidate.setting)
        if candidate.name == "precision = fp32":
            self.reference_loss = result.loss
            if refusal := self._refuse_loss(best.loss):
                self.evidence[0]["refused"] = refusal
                self.reasons["precision"], self.plan = f"{before} gave other losses", changed
                return result
        if refusal := self._refuse_loss(result.loss):
            self.evidence[-1]["refused"] = refusal
        elif result.ms < self._get_worthwhile_ratio(changed) * best.ms:
            slower = describe_value(candidate.setting, before)
            reason = format_speedup(slower, best.ms, result.ms)
            self.reasons |= dict.fromkeys([candidate.setting, *candidate.also], reason)
            self.plan = changed
            return result
        elif candidate.setting == "threads":
            figures = f"{format_ms(best.ms)} a step, {format_number(result.ms, figures=3)} with"
            threads = format_count(changed.threads, "thread")
            self.reasons["threads"] = f"{figures} {threads}"
        return best

    def compute_allowance(self, candidate: PlanCandidate) -> float:
        """Return the seconds that a trial may take whatever the others took: a share of what the
        candidate can save at most, which is nothing on a busy machine."""
        if self.load is not None and self.load.is_busy:
            return 0.0
        saved_s = self.run_s * (1 - 1 / candidate.most_gain)
        return min(2 * SHARE_OF_RUN * saved_s, MEASURE_LIMIT_S)

    def _get_worthwhile_ratio(self, changed: Plan) -> float:
        """Return the share of the best time that a plan must stay below."""
        is_busy = self.load is not None and self.load.is_busy_for(changed.threads)
        leaves_kernels = bool(self.plan.native_kernels) and not changed.native_kernels
        is_unlikely = changed.threads > self.plan.threads or leaves_kernels
        return BUSY_RATIO if is_busy and is_unlikely else WORTHWHILE_RATIO

    def _refuse_loss(self, loss: float) -> str | None:
        """Say how a loss differs from the reference; None if it does not."""
        if math.isclose(loss, self.reference_loss, rel_tol=SAME_LOSS):
            return None
        return f"loss {loss:.4g} instead of {self.reference_loss:.4g}"


def compute_key(context: RunContext, plan: Plan) -> str:
    """Return a hash of everything that a plan's speed depends on."""
    config = context.config
    shape = {
        "model": config.model.model_dump(),
        "data": config.data.model_dump(include={"context", "horizon", "channels"}),
        "train": config.train.model_dump(
            include={"batch", "accumulate", "optimizer", "loss", "quantiles", "clip", "init_from"}
        ),
        "random": [
            config.augment.kinds,
            config.augment.cache,
            config.pretrain.mask if config.masked else None,
        ],
        "engine": config.engine.model_dump(exclude={"plan", "log_every", "monitor"}),
        "signature": context.dataset.signature.model_dump(exclude={"step"}),
        "home": plan.home,
        "hardware": plan.hardware,
        "compiler": plan.device.type == "cpu" and find_compiler() is not None,
    }
    return hashlib.sha256(json.dumps(shape, sort_keys=True).encode()).hexdigest()[:32]


def read_plan(key: str, plan: Plan) -> Plan | None:
    """Return the plan with the choices that were measured before; None if there are none."""
    saved = read_cache(key)
    if not saved:
        return None
    choices = saved["choices"] | {"rnn": tuple(saved["choices"]["rnn"])}
    reasons = plan.reasons | {"plan": "measured before, for the same shapes and hardware"}
    return replace(plan, **choices, reasons=reasons | saved["reasons"])


def write_plan(key: str, plan: Plan, rules: Plan) -> None:
    """Save a measured plan and its reasons, as far as they differ from the rules of thumb."""
    reasons = {
        name: reason
        for name, reason in plan.reasons.items()
        if rules.reasons.get(name) != reason and name != "plan"
    }
    choices = {name: getattr(plan, name) for name in CHOICES}
    write_cache(key, {"choices": choices, "reasons": reasons})


def read_cache(key: str) -> dict[str, Any] | None:
    """Return what was saved under a key; None if nothing was."""
    saved = _read_all().get(key)
    return saved if isinstance(saved, dict) else None


def write_cache(key: str, entry: dict[str, Any]) -> None:
    """Save an entry under a key."""
    path = runs.get_cache_folder() / CACHE
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        runs.write_json(path, _read_all() | {key: entry})
    except OSError:
        pass  # a cache that cannot be written costs the next run a few seconds


def _read_all() -> dict[str, Any]:
    """Return the whole cache; empty if it cannot be read."""
    try:
        saved = json.loads((runs.get_cache_folder() / CACHE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return saved if isinstance(saved, dict) else {}


def set_batch_size(config: Config, batch: int) -> Config:
    """Return the config with this batch size."""
    return config.model_copy(update={"train": config.train.model_copy(update={"batch": batch})})


def find_batch_size(context: RunContext, plan: Plan) -> tuple[int, list[dict[str, Any]]]:
    """Double the batch while it fits and is worth it, then bisect; return it and the evidence.

    Every size is tried with whole steps, the optimizer's state included.
    """
    evidence: list[dict[str, Any]] = []
    limit = min(MAX_BATCH, context.dataset.num_windows["train"])

    def measure_speed(batch: int) -> float:
        """Return windows per millisecond; 0 if the batch does not fit."""
        sized = replace(context, config=set_batch_size(context.config, batch))
        result = try_plan(sized, plan, f"batch = {batch}", evidence)
        return batch / result.ms if result else 0.0

    hint = machine.find_gpu_hint(plan.hardware.get("gpu", ""))
    best, fastest, batch = 0, 0.0, min(hint.batch // 4 if hint else MIN_BATCH, limit)
    while batch <= limit:
        speed = measure_speed(batch)
        if not speed:  # a batch between the last one and this one may fit
            low, high = best, batch
            while high - low > max(low // 4, 1):
                middle = (low + high) // 2
                speed = measure_speed(middle)
                low, high = (middle, high) if speed else (low, middle)
                if speed > WORTHWHILE_SPEEDUP * fastest:
                    best, fastest = middle, speed
            break
        if speed < WORTHWHILE_SPEEDUP * fastest:
            break
        best, fastest, batch = batch, speed, 2 * batch
    if not best:
        remedies = recovery.suggest_remedies(context.config)
        raise UserError(f"out of memory with a single window per pass; try {remedies}")
    return best, evidence


RULE_OF_THUMB = "a rule of thumb"
MAX_LANES = 64
"""Lanes at a time, where that is not measured"""
PACK_TRIAL_S = 1.5
"""Seconds for timing a pack on a GPU, most of them set-up and capture"""
USABLE_SHARE = 0.8
"""Of a GPU's free memory, for lanes"""
COPIES_OF_WEIGHTS = 10
"""Weights, both moments, all three as they were when the epoch began, the best, the gradients"""
KEPT_PER_UNIT = 16
"""Numbers that a layer keeps for the backward pass, or makes in it, of one unit at one step"""
BYTES_PER_ROW = 24
"""Of a window in an epoch's order, on the GPU and on the way to it"""
LANES_PER_STEP = 8
"""Lanes whose step takes about as long as that of one model on a GPU"""


def choose_mode(config: Config, signature: Signature, plan: Plan) -> tuple[LaneMode, str]:
    """Choose the mode by a rule of thumb, and say why; a custom network must pass `vmap`.

    A CPU has faster recurrent layers for one model than for many.
    """
    model = config.model
    if model.is_custom and (refusal := pack.explain_vmap_refusal(model, signature)):
        return "branches", f"each lane for itself: vmap refuses {model.kind} ({refusal})"
    on_cpu = plan.device.type == "cpu" and model.spec.is_recurrent
    return "branches" if on_cpu else "together", RULE_OF_THUMB


def adapt_plan_to_pack(plan: Plan, mode: str, ms: float | None = None) -> Plan:
    """Adapt the plan of one model to a pack of several."""
    plan = replace(plan, steps_per_graph=1, ms_per_step=ms)
    if mode == "branches":
        return plan
    reasons = plan.reasons | {
        "rnn": "lanes train together, by an operation that takes all of them",
        "compile": "off: lanes train together",
    }
    layers = plan.rnn if plan.native_kernels else ()
    kernels = plan.native_kernels
    return replace(plan, rnn=layers, kernels=kernels, compile=False, reasons=reasons)


def limit_measuring(guessed_s: float, num_lanes: int, plan: Plan) -> float:
    """Return the seconds that measuring may take, from those of one model's training; 0 where
    that is too little to measure anything."""
    on_gpu = plan.device.type == "cuda"
    models, trial_s = num_lanes, FIRST_TRIAL_S
    if on_gpu:
        models, trial_s = max(1, num_lanes // LANES_PER_STEP), PACK_TRIAL_S
    limit_s = min(MEASURE_LIMIT_S, SHARE_OF_RUN * guessed_s * models)
    return limit_s if limit_s >= trial_s else 0.0


def recall_or_choose(
    context: RunContext, lanes: Sequence[Lane], plan: Plan, limit_s: float
) -> PackChoice:
    """Choose as `choose_pack_size` does, or as it did for the same job on this machine."""
    key = f"{compute_key(context, plan)} {len(lanes)} lanes"
    is_cached = context.config.engine.plan == "cached"
    if is_cached and (saved := read_cache(key)):
        return PackChoice(saved["mode"], saved["places"], saved["evidence"], "measured before")
    assert context.series is not None
    data, most = (context.dataset.signature, context.series), count_fitting(context, lanes, plan)
    choice = choose_pack_size(lanes, *data, plan, limit_s=limit_s, most=most)
    # another process may have had the memory, which the next run then has
    if not any(entry.get("out_of_memory") for entry in choice.evidence):
        entry = {"mode": choice.mode, "places": choice.num_lanes, "evidence": choice.evidence}
        write_cache(key, entry)
    return choice


def count_fitting(context: RunContext, lanes: Sequence[Lane], plan: Plan) -> int:
    """Estimate how many lanes fit into the GPU's free memory; at least one."""
    if plan.device.type != "cuda":
        return len(lanes)
    free_bytes, _ = torch.cuda.mem_get_info(plan.device)
    needed = max(estimate_bytes(context, lane, plan) for lane in lanes)
    return max(1, int(USABLE_SHARE * free_bytes / needed))


def estimate_bytes(context: RunContext, lane: Lane, plan: Plan) -> float:
    """Estimate the memory of one lane, rather too high: its weights with all that belongs to them,
    the order of its windows, and what the layers keep for the backward pass."""
    model, sampler, signature = lane.config.model, lane.build_sampler(), context.dataset.signature
    tokens = 1 if model.spec.flattens else signature.context // model.patch
    copies = model.num_stacks * (2 if model.bidirectional else 1)
    units = sum(model.sizes) * copies if model.spec.has_hidden else len(signature.inputs)
    item = 2 if plan.precision in ("fp16", "bf16") else 4
    windows = sampler.windows_per_pass * signature.sequences_per_window
    per_window = tokens * (KEPT_PER_UNIT * units + len(signature.inputs)) * item
    rows = sampler.num_steps * sampler.windows_per_step * BYTES_PER_ROW
    return COPIES_OF_WEIGHTS * 4 * context.num_parameters + windows * per_window + rows


def choose_pack_size(
    lanes: Sequence[Lane],
    signature: Signature,
    series: Series,
    plan: Plan,
    *,
    modes: Sequence[LaneMode] = tuple(GRADIENTS),
    limit_s: float = MEASURE_LIMIT_S,
    most: int | None = None,
    time_pack: Callable[..., float] | None = None,
) -> PackChoice:
    """Choose the mode and the number of lanes at a time, up to `most`, that train all of these
    lanes soonest.

    A GPU begins with all of them, which is nearly always right, and halves the number while that
    is worth it; a CPU begins with one and doubles it. Measuring ends where it takes more time than
    its share of the training. `time_pack` is called in place of `measure_pack`.
    """
    time_pack = time_pack or measure_pack
    evidence: list[dict[str, Any]] = []
    best: tuple[float, LaneMode, int] | None = None
    lowest_ms: dict[LaneMode, float] = dict.fromkeys(modes, math.inf)
    most = min(most or len(lanes), len(lanes))
    deadline, trial_s = time.perf_counter() + limit_s, 0.0
    shrinks = plan.device.type == "cuda"
    for num_lanes, mode in itertools.product(_list_sizes(most, shrinks), modes):
        if mode not in lowest_ms:
            continue
        entry: dict[str, Any] = {"mode": mode, "places": num_lanes}
        evidence.append(entry)
        started_at = time.perf_counter()
        if best is not None and started_at + trial_s > deadline:
            entry["skipped"] = OUT_OF_TIME
            break
        try:
            ms = time_pack(lanes, num_lanes, signature, series, plan, mode)
        except recovery.MEMORY_ERRORS as error:
            entry["failed"] = recovery.first_line(error)
            entry["out_of_memory"] = recovery.is_out_of_memory(error)
        if "failed" in entry:  # past the except block, whose traceback would pin the memory
            recovery.free_memory()
            if not (shrinks and entry["out_of_memory"]):
                del lowest_ms[mode]
            continue
        trial_s = time.perf_counter() - started_at if shrinks else 0.0  # on a GPU, most is set-up
        windows = sum(lane.build_sampler().windows_per_step for lane in lanes[:num_lanes])
        entry |= {"ms": ms, "windows_per_s": 1e3 * windows / ms}
        total_ms = -(-len(lanes) // num_lanes) * ms  # packs of that size, one after the other
        if best is None or total_ms < best[0]:
            best = total_ms, mode, num_lanes
            if shrinks:  # beyond its share of the training, measuring costs more than it can save
                share_s = SHARE_OF_RUN * _estimate_run_s(lanes, total_ms)
                deadline = min(deadline, time.perf_counter() + share_s)
        if total_ms > WORTHWHILE_RATIO * lowest_ms[mode]:
            del lowest_ms[mode]
        else:
            lowest_ms[mode] = total_ms
    if best is None:
        raise UserError(f"no lane could be trained: {evidence[0].get('failed')}")
    return PackChoice(best[1], best[2], evidence, "measured")


def _list_sizes(num_lanes: int, shrinks: bool) -> list[int]:
    """List the numbers of lanes to try: powers of two up to all of them, or from all of them."""
    sizes = [*(2**i for i in range((num_lanes - 1).bit_length())), num_lanes]
    return sizes[::-1] if shrinks else sizes


def _estimate_run_s(lanes: Sequence[Lane], step_ms: float) -> float:
    """Estimate the seconds of training from those of a step of all lanes."""
    steps = max(lane.build_sampler().num_steps * lane.config.train.max_epochs for lane in lanes)
    return steps * step_ms / 1e3


def measure_pack(
    lanes: Sequence[Lane],
    num_lanes: int,
    signature: Signature,
    series: Series,
    plan: Plan,
    mode: LaneMode,
) -> float:
    """Return the milliseconds per step of a pack of the first lanes."""
    with plan.flags():
        trial = pack.build_pack(lanes[:num_lanes], signature, series, plan, mode=mode, room=lanes)
        epoch_steps = min(trial.num_steps(lane) for lane in range(num_lanes))

        def time_epoch(steps: int) -> float:
            """Return the seconds of the epoch's first steps; it is set up before."""
            trial.begin({lane: EpochStart() for lane in range(num_lanes)})
            return time_steps(trial.advance, min(steps, epoch_steps), plan.device)

        try:
            time_epoch(capture.EAGER_FIRST + 1 if plan.capture else 1)
            ms = measure_ms(time_epoch, epoch_steps)
            if trial.failures():
                raise RuntimeError("; ".join(trial.failures().values()))
            return ms
        finally:
            trial.close()


NOWHERE = Run(Path(os.devnull))
"""Timed steps log nothing"""


def build_by_rules(config: Config, dataset: Dataset) -> tuple[RunContext, Plan]:
    """Build a new model on its device, and make its plan by rules of thumb."""
    plan = make_plan(config, data_bytes=dataset.data_bytes, streamed=dataset.stream is not None)
    with seed_generators(config.seed, plan.device):
        return build_model(RunContext(NOWHERE, config, dataset, plan)), plan


def resolve_batch_size(config: Config, dataset: Dataset) -> Config:
    """Replace `train.batch = "auto"` by the measured batch size."""
    if config.train.batch != "auto":
        return config
    context, plan = build_by_rules(replace_settings(config, train={"batch": 256}), dataset)
    batch, _ = find_batch_size(context, plan)
    return replace_settings(config, train={"batch": batch})


class TimedWorkload(ABC):
    """Something that takes training steps, which are timed."""

    device: torch.device
    num_prefetched = 0
    """Steps whose batches a loader has ready after a pause"""

    @abstractmethod
    def settings(self) -> AbstractContextManager[None]:
        """Set torch's flags as the steps need them."""

    @abstractmethod
    def step(self) -> None: ...

    def finish(self) -> None:  # noqa: B027 (most have nothing to finish)
        """Finish what the steps have deferred."""

    def time_steps(self, steps: int) -> float:
        """Return the seconds of some steps, the device's work included."""
        return time_steps(self.step, steps, self.device, self.finish)

    def measure_ms_per_step(self, steps: int, *, warm_s: float = 0.0) -> float:
        """Return the milliseconds per step, after using up the batches that a loader prefetched.

        Steps for `warm_s` seconds come before those that count: an idle device lowers its clock.
        """
        with self.settings():
            if self.num_prefetched:
                self.time_steps(1 + self.num_prefetched)
            warm = time.perf_counter() + warm_s
            while time.perf_counter() < warm:
                self.time_steps(1)
            return 1e3 * self.time_steps(steps) / steps


class TrainingWorkload(TimedWorkload):
    """A model in training: its steps go on from epoch to epoch, without validations."""

    def __init__(self, config: Config, dataset: Dataset, *, first: int = 1) -> None:
        """Take the first steps, and those that a capture needs."""
        self.config = config
        context, plan = build_by_rules(config, dataset)
        self.context, self.plan = context, choose_plan(context, plan)
        self.device = self.plan.device
        if self.plan.home in ("loader", "stream"):
            self.num_prefetched = self.plan.workers * self.plan.prefetch
        self.steps_done = 0
        with self.settings():
            self.job = build_step(context, self.plan)
            try:
                self.num_steps = self.job.batches.num_steps
                captured = capture.EAGER_FIRST + 1 if self.plan.capture else 1
                self.time_steps(max(first, captured))
                self.job.catch_up(min(first, self.num_steps))
                self.first_losses: list[float] = self.job.buffers.losses[:first].tolist()
                if failed := "; ".join(self.job.failures().values()):
                    raise RuntimeError(failed)
            except BaseException:
                self.job.close()
                raise

    @property
    def windows_per_step(self) -> int:
        return count_windows_per_step(self.config)

    def settings(self) -> AbstractContextManager[None]:
        return self.plan.flags()

    def step(self) -> None:
        """Take the next step; the first of an epoch starts the epoch."""
        job, place = self.job, self.steps_done % self.num_steps
        if not place:
            epoch = self.steps_done // self.num_steps
            job.flush()
            job.batches.start_epoch(epoch)
            rates = compute_lrs(self.config.train, EpochStart(epoch), self.num_steps)
            job.buffers.begin(rates, first=self.steps_done)
        job.advance()
        if self.config.engine.sync:
            float(job.buffers.losses[place])
        self.steps_done += 1

    def finish(self) -> None:
        self.job.flush()

    def close(self) -> None:
        self.job.close()
