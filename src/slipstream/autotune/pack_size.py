"""Choose how many lanes to train at a time, and in which mode, by timing a few steps of each."""

import itertools
import math
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from slipstream.autotune import measure, timing
from slipstream.autotune.measure import FIRST_TRIAL_S, MEASURE_LIMIT_S, SHARE_OF_RUN
from slipstream.autotune.timing import OUT_OF_TIME, WORTHWHILE_RATIO
from slipstream.config import Config, Signature
from slipstream.data.windows import Series
from slipstream.engine import capture, recovery
from slipstream.engine.lanes import gradients, pack
from slipstream.engine.lanes.gradients import GRADIENTS, LaneMode
from slipstream.engine.lanes.lane import EpochStart, Lane
from slipstream.engine.plan import Plan
from slipstream.engine.single import TrainingTask
from slipstream.errors import UserError

RULE_OF_THUMB = "a rule of thumb"
MAX_LANES = 64
"""Lanes at a time, where that is not measured"""
PACK_TRIAL_S = 1.5
"""What timing a pack takes on a GPU, most of it set-up and capture"""
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
    if model.is_custom and (refusal := gradients.explain_vmap_refusal(model, signature)):
        return "branches", f"each lane for itself: vmap refuses {model.kind} ({refusal})"
    on_cpu = plan.device.type == "cpu" and model.spec.is_recurrent
    return "branches" if on_cpu else "together", RULE_OF_THUMB


def adapt_plan_to_pack(plan: Plan, mode: LaneMode, ms: float | None = None) -> Plan:
    """Adapt the plan of one model to a pack of several."""
    plan = replace(plan, steps_per_graph=1, ms_per_step=ms)
    if mode == "branches":
        return plan
    reasons = plan.reasons | {
        "cudnn": "lanes train together, by an operation that takes all of them",
        "compile": "off: lanes train together",
    }
    own = plan.cudnn if plan.native_kernels else ()
    kernels = plan.native_kernels
    return replace(plan, cudnn=own, kernels=kernels, compile=False, reasons=reasons)


def limit_measuring(guessed_s: float, num_lanes: int, plan: Plan) -> float:
    """Return the seconds that measuring may take, from those of one model's training; 0 where
    that is too little to measure anything."""
    on_gpu = plan.device.type == "cuda"
    models, trial_s = num_lanes, FIRST_TRIAL_S
    if on_gpu:
        models, trial_s = max(1, num_lanes // LANES_PER_STEP), PACK_TRIAL_S
    limit_s = min(MEASURE_LIMIT_S, SHARE_OF_RUN * guessed_s * models)
    return limit_s if limit_s >= trial_s else 0.0


class PackChoice(NamedTuple):
    """How to train lanes together."""

    mode: LaneMode
    num_lanes: int
    evidence: list[dict[str, Any]]
    """Every candidate: its time and windows a second of all its lanes, or why it has none"""
    reason: str = "measured"


def recall_or_choose(
    task: TrainingTask, lanes: Sequence[Lane], plan: Plan, limit_s: float
) -> PackChoice:
    """Choose as `choose_pack_size` does, or as it did for the same job on this machine."""
    key = f"{measure.compute_key(task, plan)} {len(lanes)} lanes"
    is_cached = task.config.engine.plan == "cached"
    if is_cached and (saved := measure.read_cache(key)):
        return PackChoice(saved["mode"], saved["places"], saved["evidence"], "measured before")
    assert task.series is not None
    data, most = (task.dataset.signature, task.series), count_fitting(task, lanes, plan)
    choice = choose_pack_size(lanes, *data, plan, limit_s=limit_s, most=most)
    # another process may have had the memory, which the next run then has
    if not any(entry.get("out_of_memory") for entry in choice.evidence):
        entry = {"mode": choice.mode, "places": choice.num_lanes, "evidence": choice.evidence}
        measure.write_cache(key, entry)
    return choice


def count_fitting(task: TrainingTask, lanes: Sequence[Lane], plan: Plan) -> int:
    """Estimate how many lanes fit into the GPU's free memory; at least one."""
    if plan.device.type != "cuda":
        return len(lanes)
    free_bytes, _ = torch.cuda.mem_get_info(plan.device)
    needed = max(estimate_bytes(task, lane, plan) for lane in lanes)
    return max(1, int(USABLE_SHARE * free_bytes / needed))


def estimate_bytes(task: TrainingTask, lane: Lane, plan: Plan) -> float:
    """Estimate the memory of one lane, rather too high: its weights with all that belongs to them,
    the order of its windows, and what the layers keep for the backward pass."""
    model, sampler, signature = lane.config.model, lane.build_sampler(), task.dataset.signature
    tokens = 1 if model.spec.flattens else signature.context // model.patch
    directions = 2 if model.bidirectional else 1
    units = sum(model.sizes) * directions if model.spec.has_hidden else len(signature.inputs)
    item = 2 if plan.precision in ("fp16", "bf16") else 4
    windows = sampler.windows_per_pass * signature.sequences_per_window
    per_window = tokens * (KEPT_PER_UNIT * units + len(signature.inputs)) * item
    rows = sampler.num_steps * sampler.windows_per_step * BYTES_PER_ROW
    return COPIES_OF_WEIGHTS * 4 * task.num_parameters + windows * per_window + rows


def choose_pack_size(
    lanes: Sequence[Lane],
    signature: Signature,
    series: Series,
    plan: Plan,
    *,
    modes: Sequence[LaneMode] = tuple(GRADIENTS),
    limit_s: float = MEASURE_LIMIT_S,
    most: int | None = None,
) -> PackChoice:
    """Choose the mode and the number of lanes at a time, up to `most`, that train all of these
    lanes soonest.

    A GPU begins with all of them, which is nearly always right, and halves the number while that
    is worth it; a CPU begins with one and doubles it. Measuring ends where it takes more time than
    its share of the training.
    """
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
            ms = _measure_pack(lanes, num_lanes, signature, series, plan, mode)
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
    return PackChoice(best[1], best[2], evidence)


def _list_sizes(num_lanes: int, shrinks: bool) -> list[int]:
    """List the numbers of lanes to try: powers of two up to all of them, or from all of them."""
    sizes = [*(2**i for i in range((num_lanes - 1).bit_length())), num_lanes]
    return sizes[::-1] if shrinks else sizes


def _estimate_run_s(lanes: Sequence[Lane], step_ms: float) -> float:
    """Estimate the seconds of training from those of a step of all lanes."""
    steps = max(lane.build_sampler().num_steps * lane.config.train.max_epochs for lane in lanes)
    return steps * step_ms / 1e3


def _measure_pack(
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

        def time_steps(steps: int) -> float:
            """Return the seconds of the epoch's first steps; it is set up before."""
            trial.begin({lane: EpochStart() for lane in range(num_lanes)})
            return timing.time_steps(trial.advance, min(steps, epoch_steps), plan.device)

        try:
            time_steps(capture.EAGER_FIRST + 1 if plan.capture else 1)
            ms = timing.measure_ms(time_steps, epoch_steps)
            if trial.failures():
                raise RuntimeError("; ".join(trial.failures().values()))
            return ms
        finally:
            trial.close()
