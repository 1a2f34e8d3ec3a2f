"""Estimate how long training takes, and time its first steps."""

import copy
import math
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from slipstream import machine
from slipstream.config import Config
from slipstream.engine import capture, recovery
from slipstream.engine.lanes.lane import EpochStart
from slipstream.engine.lanes.schedule import compute_lrs
from slipstream.engine.plan import Plan
from slipstream.engine.single import SingleStep, TrainingTask, build_step
from slipstream.models import OWN_KERNELS
from slipstream.portable import cost

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
"""The same for its very first step, which has to set up what later ones need"""
STOPPED_EARLY = "stopped early: clearly slower"


class StepMeasurement(NamedTuple):
    """What a few steps under a plan showed."""

    ms: float
    loss: float
    kernels: list[str]
    stopped_early: bool = False
    """Whether it was clearly slower than the best, so that its time is that of few steps"""


def count_windows_per_step(config: Config) -> int:
    """Return the windows of one optimizer step."""
    assert config.train.batch != "auto"
    return config.train.batch * config.train.accumulate


def count_own_windows(task: TrainingTask) -> int:
    """Return the windows of one optimizer step that this process computes."""
    return -(-count_windows_per_step(task.config) // (task.ranks.size if task.ranks else 1))


def count_steps(task: TrainingTask) -> int:
    """Return the optimizer steps of one epoch."""
    return task.num_steps


def estimate_duration(task: TrainingTask, plan: Plan) -> dict[str, Any]:
    """Return how long training takes without validations, and whether that was measured."""
    if plan.ms_per_step is None:
        return {"expected_s": guess_duration_s(task, plan), "expected_is": "guessed"}
    expected_s = plan.ms_per_step / 1e3 * count_steps(task) * task.config.train.max_epochs
    return {"expected_s": expected_s, "expected_is": "measured"}


def guess_duration_s(task: TrainingTask, plan: Plan) -> float:
    """Guess very roughly how many seconds training takes, from multiplications and kernel calls."""
    cores = machine.count_available_cores()
    return guess_step_s(task, plan, cores) * count_exact_steps(task) * task.config.train.max_epochs


def count_exact_steps(task: TrainingTask) -> float:
    """Return the steps of one epoch, the last one as the share of a whole batch that it is."""
    if task.is_carried:
        return task.num_steps
    return task.dataset.num_windows["train"] / count_windows_per_step(task.config)


def guess_step_s(task: TrainingTask, plan: Plan, cores: int) -> float:
    """Guess very roughly how many seconds a step takes, on so many cores of a CPU."""
    config = task.config
    return cost.guess_step_s(
        config.model,
        weights=task.num_parameters,
        context=config.data.context,
        windows=count_own_windows(task) * task.dataset.signature.sequences_per_window,
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


def measure_step(task: TrainingTask, plan: Plan, *, best_ms: float = math.inf) -> StepMeasurement:
    """Train a copy of the model for a moment, the shorter the slower it is than `best_ms`."""
    trial = replace(task, model=copy.deepcopy(task.model))
    with plan.flags():
        program = build_step(trial, plan)
        try:
            warm_up = capture.EAGER_FIRST + 1 if plan.device.type == "cuda" else 1
            ms = 1e3 * time_first_steps(program, task.config, warm_up) / warm_up
            program.catch_up(min(warm_up, program.batches.num_steps))
            losses = program.buffers.losses[:warm_up].clone()  # the same steps for every candidate
            if ms <= HOPELESS * best_ms:
                ms = measure_ms(
                    lambda steps: time_first_steps(program, task.config, steps),
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
    task: TrainingTask,
    plan: Plan,
    name: str,
    evidence: list[dict[str, Any]],
    *,
    best_ms: float = math.inf,
) -> StepMeasurement | None:
    """Measure a candidate and add it to the evidence; None if it fails."""
    try:
        result = measure_step(task, plan, best_ms=best_ms)
    except Exception as error:
        if not isinstance(error, recovery.MEMORY_ERRORS) and OWN_KERNELS not in plan.cudnn:
            raise  # a compiler of kernels may raise anything
        reason, full = recovery.first_line(error), recovery.is_out_of_memory(error)
        evidence.append({"candidate": name, "failed": reason, "out_of_memory": full})
        return None
    finally:
        recovery.free_memory()
    early = {"stopped": STOPPED_EARLY} if result.stopped_early else {}
    evidence.append({"candidate": name, "ms": result.ms} | early)
    return result
