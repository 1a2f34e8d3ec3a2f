"""How many lanes to train at a time, and in which way: chosen by timing a few steps of each."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from slipstream import machine
from slipstream.autotune.measure import MEASURE_LIMIT_S, NUM_STRETCHES, TRIAL_S, WORTHWHILE_RATIO
from slipstream.config import Config, Signature
from slipstream.data.windows import Series
from slipstream.engine import capture, recovery
from slipstream.engine.lanes import gradients, pack
from slipstream.engine.lanes.gradients import GRADIENTS, LaneMode
from slipstream.engine.lanes.lane import EpochStart, Lane
from slipstream.engine.lanes.pack import Pack
from slipstream.engine.plan import Plan
from slipstream.errors import UserError

RULE_OF_THUMB = "a rule of thumb"
MAX_LANES = 64
"""Lanes at a time, where that is not measured"""


def choose_default_mode(settings: Config, plan: Plan) -> LaneMode:
    """The mode, unmeasured: a CPU has faster recurrent layers for one model than for many."""
    on_cpu = plan.device.type == "cpu" and settings.model.spec.is_recurrent
    return "branches" if on_cpu else "together"


def choose_mode(settings: Config, signature: Signature, plan: Plan) -> tuple[LaneMode, str]:
    """The mode by that rule, and why; a class of the user's own must go through `vmap` for it."""
    if settings.model.is_custom and (
        refusal := gradients.explain_vmap_refusal(settings.model, signature)
    ):
        return "branches", f"each lane for itself: vmap refuses {settings.model.kind} ({refusal})"
    return choose_default_mode(settings, plan), RULE_OF_THUMB


def adapt_plan_to_pack(plan: Plan, mode: LaneMode, ms: float | None = None) -> Plan:
    """The plan of one model, as a pack of several takes it."""
    plan = replace(plan, steps_per_graph=1, ms_per_step=ms)
    if mode == "branches":
        return plan
    reasons = plan.reasons | {
        "cudnn": "lanes train together, by an operation that takes all of them",
        "compile": "off: lanes train together",
    }
    return replace(plan, cudnn=(), kernels=[], compile=False, reasons=reasons)


class PackChoice(NamedTuple):
    mode: LaneMode
    num_lanes: int
    evidence: list[dict[str, Any]]
    """Every candidate: its time and windows a second of all its lanes, or why it has none"""


def choose_pack_size(
    lanes: Sequence[Lane],
    signature: Signature,
    series: Series,
    plan: Plan,
    *,
    modes: Sequence[LaneMode] = tuple(GRADIENTS),
    limit_s: float = MEASURE_LIMIT_S,
) -> PackChoice:
    """The way to have all of these lanes trained soonest.

    In each mode the places are doubled for as long as that fits into memory and pays.
    """
    evidence: list[dict[str, Any]] = []
    best: tuple[float, LaneMode, int] | None = None
    speed: dict[LaneMode, float] = dict.fromkeys(modes, 0.0)
    deadline = time.perf_counter() + limit_s
    for places, mode in itertools.product(_doubled(len(lanes)), modes):
        if mode not in speed:
            continue
        told: dict[str, Any] = {"mode": mode, "places": places}
        evidence.append(told)
        if best is not None and time.perf_counter() > deadline:
            told["skipped"] = "no time left to measure"
            break
        try:
            ms = _step_ms(lanes, places, signature, series, plan, mode)
        except recovery.MEMORY_ERRORS as error:
            told["failed"] = recovery.first_line(error)
            told["out_of_memory"] = recovery.is_out_of_memory(error)
        if "failed" in told:  # past the except block, whose traceback would pin the memory
            recovery.free_memory()
            del speed[mode]
            continue
        windows = sum(lane.batch_order().windows_per_step for lane in lanes[:places])
        told |= {"ms": ms, "windows_per_s": 1e3 * windows / ms}
        whole = -(-len(lanes) // places) * ms  # packs of that size, one after the other
        if best is None or whole < best[0]:
            best = whole, mode, places
        if places / ms * WORTHWHILE_RATIO < speed[mode]:
            del speed[mode]
        else:
            speed[mode] = places / ms
    if best is None:
        raise UserError(f"no lane could be trained: {evidence[0].get('failed')}")
    return PackChoice(best[1], best[2], evidence)


def _doubled(most: int) -> list[int]:
    sizes = [1]
    while sizes[-1] < most:
        sizes.append(min(2 * sizes[-1], most))
    return sizes


def _step_ms(
    lanes: Sequence[Lane],
    places: int,
    signature: Signature,
    series: Series,
    plan: Plan,
    mode: LaneMode,
) -> float:
    """Milliseconds per step of a pack of the first lanes."""
    with plan.flags():
        trial = pack.build_pack(lanes[:places], signature, series, plan, mode=mode, room=lanes)
        try:
            _steps_s(trial, capture.EAGER_FIRST + 1 if plan.capture else 1)
            once = _steps_s(trial, 1)
            steps = max(1, min(100, int(TRIAL_S / NUM_STRETCHES / max(once, 1e-6))))
            taken = min(steps, _most(trial))
            spent = min(_steps_s(trial, taken) for _ in range(NUM_STRETCHES))
            if trial.failures():
                raise RuntimeError("; ".join(trial.failures().values()))
            return 1e3 * spent / taken
        finally:
            trial.close()


def _most(trial: Pack) -> int:
    """Steps until the first lane's epoch ends."""
    return min(trial.num_steps(place) for place in range(len(trial.lanes)))


def _steps_s(trial: Pack, steps: int) -> float:
    """Seconds for steps of the first epoch, which is laid out before the clock starts."""
    trial.begin({place: EpochStart() for place in range(len(trial.lanes))})
    machine.synchronize(trial.plan.device)
    began = time.perf_counter()
    for _ in range(min(steps, _most(trial))):
        trial.advance()
    machine.synchronize(trial.plan.device)
    return time.perf_counter() - began
