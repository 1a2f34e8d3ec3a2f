"""Trains the lanes of a run: one model, or repeats from other seeds and folds of a walk."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from torch import Tensor

from slipstream.autotune import measure, pack_size
from slipstream.autotune.timing import guess_duration_s
from slipstream.config import Config
from slipstream.data.dataset import Dataset
from slipstream.engine import loop
from slipstream.engine import state as states
from slipstream.engine.checkpoint import Checkpoint
from slipstream.engine.events import LaneEvents, SingleEvents
from slipstream.engine.lanes.capacity import compute_capacity
from slipstream.engine.lanes.gradients import LaneMode
from slipstream.engine.lanes.lane import Lane
from slipstream.engine.lanes.pack import Pack, parse_capacity
from slipstream.engine.monitor import Monitor
from slipstream.engine.plan import Plan
from slipstream.engine.progress import FitResult, parse_progress
from slipstream.engine.single import SingleProgram, TrainingTask, seed_generators
from slipstream.errors import UserError
from slipstream.models.custom import list_buffers
from slipstream.training import context as contexts
from slipstream.training.context import RunContext

ONE_AT_A_TIME = SingleProgram.mode


def trains_lanes(config: Config) -> bool:
    """Whether a run trains several models, or folds, and reports each of them."""
    walks = config.data.split.walk_forward is not None
    return not config.masked and (config.train.repeats > 1 or walks)


def build_lanes(config: Config, dataset: Dataset, init: Mapping[str, Tensor]) -> list[Lane]:
    """Every fold's repeats, the earliest fold first, all from the same encoder weights if any."""
    memory = dataset.memory
    folds = [fold.starts for fold in dataset.folds] or [memory.starts if memory else {}]
    seeds = range(config.seed, config.seed + config.train.repeats)
    configs = [config.model_copy(update={"seed": seed}) for seed in seeds]
    return [
        Lane(
            one,
            {name: starts[name] for name in ("train", "val") if name in starts},
            init=init,
        )
        for starts in folds
        for one in configs
    ]


@dataclass(frozen=True)
class LanePlan:
    """How the lanes of a run are trained."""

    lanes: list[Lane]
    plan: Plan
    mode: str
    """As one program ("together"), side by side ("branches"), or "one at a time\""""
    places: int
    reason: str
    evidence: list[dict[str, Any]] = field(default_factory=list)

    @property
    def rounds(self) -> int:
        """How many lanes have the same place, one after the other"""
        return -(-len(self.lanes) // self.places)

    def summarize(self) -> dict[str, Any]:
        return {
            "lanes": len(self.lanes),
            "places": self.places,
            "mode": self.mode,
            "why": self.reason,
            "evidence": self.evidence,
        }


def plan_lanes(
    task: TrainingTask, lanes: list[Lane], plan: Plan, checkpoint: Checkpoint | None
) -> LanePlan:
    """Choose how lanes are trained, and how many at a time, from measuring where that pays."""
    obstacle = _find_obstacle(task, plan)
    if checkpoint is not None:
        mode, places = checkpoint.metadata["mode"], checkpoint.metadata["limit"]
        if mode != ONE_AT_A_TIME:
            if obstacle:
                raise UserError(
                    f"the run began with several models at a time, which does not go with "
                    f"{obstacle}; leave that as it was, or start a new run"
                )
            plan = pack_size.adapt_plan_to_pack(plan, mode, None)
        return LanePlan(lanes, plan, mode, places, "as it began")
    if obstacle:
        return LanePlan(lanes, plan, ONE_AT_A_TIME, 1, f"one after another: {obstacle}")
    config, signature = task.config, task.dataset.signature
    limit_s = min(measure.MEASURE_LIMIT_S, _share_s(task, plan, len(lanes)))
    mode, reason = pack_size.choose_mode(config, signature, plan)
    places = min(len(lanes), pack_size.MAX_LANES)
    if config.train.minutes is not None:
        reason, places = "all at a time, since train.minutes is for all of them", len(lanes)
    elif config.engine.plan != "off" and limit_s >= measure.FIRST_TRIAL_S:
        assert task.series is not None
        choice = pack_size.choose_pack_size(lanes, signature, task.series, plan, limit_s=limit_s)
        ms = next(
            one["ms"]
            for one in choice.evidence
            if "ms" in one and (one["mode"], one["places"]) == (choice.mode, choice.num_lanes)
        )
        plan = pack_size.adapt_plan_to_pack(plan, choice.mode, ms)
        return LanePlan(lanes, plan, choice.mode, choice.num_lanes, "measured", choice.evidence)
    return LanePlan(lanes, pack_size.adapt_plan_to_pack(plan, mode, None), mode, places, reason)


def _find_obstacle(task: TrainingTask, plan: Plan) -> str:
    """What keeps several models from training at a time; empty where nothing does."""
    extra = list_buffers(task.model)
    if task.dataset.stream is not None or plan.home != "device":
        return f"series that are not on the device ({plan.home}: {plan.reasons['home']})"
    if task.copies is not None:
        return "augmented windows that are read from disk (augment.cache)"
    if task.config.engine.sync:
        return "engine.sync, which waits for every step"
    if plan.micro_batch:
        return f"a batch that fits into memory {plan.micro_batch} windows at a time"
    if extra:
        return f"a model that keeps more than weights ({', '.join(extra[:3])})"
    return ""


def _share_s(task: TrainingTask, plan: Plan, count: int) -> float:
    return measure.SHARE_OF_RUN * guess_duration_s(task, plan) * count


def fit_lanes(
    context: RunContext, task: TrainingTask, lane_plan: LanePlan, monitor: Monitor
) -> tuple[FitResult, LanePlan]:
    """Train to the end, or until a signal; the plan comes back as it ran."""
    checkpoint, config, run = context.start.checkpoint, task.config, context.run
    events = (LaneEvents if trains_lanes(config) else SingleEvents)(run, monitor)
    build = partial(_build_program, task, lane_plan, checkpoint)
    extra: dict[str, Any] = {"data": task.fingerprint}
    if trains_lanes(config):
        extra["pack"] = lane_plan.summarize()
    # a custom model may draw while it trains
    with seed_generators(config.seed, lane_plan.plan.device), loop.catch_signals() as stop:
        if checkpoint is None:
            state = states.start(lane_plan.lanes, build, events, num_places=lane_plan.places)
        else:
            lanes = lane_plan.lanes
            state = states.restore(checkpoint, lanes, build, events, same_configs=False)
        result = loop.fit(state, stop, extra_state=lambda: extra)
    contexts.restore_folder(run, config, context.config)
    context.seconds["set-up"] += result.setup_s
    context.seconds.update(training=result.train_s, validation=result.validate_s)
    plan = contexts.record_plan(run, result.plan, result.failures)
    if result.limit < lane_plan.places:
        lane_plan = replace(lane_plan, places=result.limit, reason="more did not fit into memory")
    return result, replace(lane_plan, plan=plan)


def _build_program(
    task: TrainingTask, lane_plan: LanePlan, checkpoint: Checkpoint | None, num_places: int
) -> SingleProgram | Pack:
    plan, signature = lane_plan.plan, task.dataset.signature
    if lane_plan.mode == ONE_AT_A_TIME:
        return SingleProgram(task, plan)
    if checkpoint is None:
        capacity = compute_capacity(lane_plan.lanes, places=lane_plan.places)
    else:
        capacity = parse_capacity(checkpoint.metadata)
        capacity = capacity._replace(config=lane_plan.lanes[0].config)  # it may be another by now
    assert task.series is not None
    mode: LaneMode = "branches" if lane_plan.mode == "branches" else "together"
    return Pack(num_places, capacity, signature, task.series, plan, mode)


def count_ended(metadata: Mapping[str, Any], config: Config | None = None) -> int:
    """Count a checkpoint's lanes that have ended, and have not more to do by the config."""
    return sum(
        bool(entry["stopped"])
        and not (
            config
            and states.can_go_on(entry["stopped"], parse_progress(entry["progress"]), config.train)
        )
        for entry in metadata["lanes"]
    )
