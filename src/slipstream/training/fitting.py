"""Train the lanes of a run: one model, or the repeats and folds of a walk-forward split."""

import json
import operator
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from torch import Tensor

from slipstream import runs
from slipstream.base.errors import UserError
from slipstream.base.signals import catch_signals
from slipstream.base.text import format_count
from slipstream.config import Config
from slipstream.data.dataset import Dataset
from slipstream.engine import loop, planning
from slipstream.engine import state as ended
from slipstream.engine import state as states
from slipstream.engine.checkpoint import Checkpoint
from slipstream.engine.events import LaneEvents, SingleEvents
from slipstream.engine.lanes import FitResult, Lane, LaneResult, parse_progress
from slipstream.engine.monitor import Monitor, compare_with_estimate, summarize
from slipstream.engine.pack import LaneMode, Pack, compute_capacity, parse_capacity
from slipstream.engine.plan import Plan
from slipstream.engine.planning import guess_duration_s
from slipstream.engine.single import SingleProgram, TrainingTask, seed_generators
from slipstream.models.custom import list_buffers
from slipstream.models.losses import make_validation_settings
from slipstream.scoring.summary import count_windows
from slipstream.training import context as contexts
from slipstream.training.context import FIT_PHASES, RunContext
from slipstream.training.preview import build_preview

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
    folds = [{name: fold[name] for name in ("train", "val") if name in fold} for fold in folds]
    return [Lane(one, starts, init=init) for starts in folds for one in configs]


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
    workers: dict[str, Any] = field(default_factory=dict)
    """How many there were and what each trained, where there were several"""

    def summarize(self) -> dict[str, Any]:
        return {
            "lanes": len(self.lanes),
            "places": self.places,
            "mode": self.mode,
            "why": self.reason,
            "evidence": self.evidence,
            **self.workers,
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
                    f"the run began with several models at a time, which does not work with "
                    f"{obstacle}; leave that as it was, or start a new run"
                )
            plan = planning.adapt_plan_to_pack(plan, mode, None)
        reason = checkpoint.metadata.get("why", "as it began")
        return LanePlan(lanes, plan, mode, places, reason)
    if obstacle:
        return LanePlan(lanes, plan, ONE_AT_A_TIME, 1, f"one after another: {obstacle}")
    config, signature = task.config, task.dataset.signature
    limit_s = planning.limit_measuring(guess_duration_s(task, plan), len(lanes), plan)
    mode, reason = planning.choose_mode(config, signature, plan)
    places = min(len(lanes), planning.MAX_LANES, planning.count_fitting(task, lanes, plan))
    if config.train.minutes is not None:
        reason, places = "all at a time, since train.minutes is for all of them", len(lanes)
    elif config.engine.plan != "off" and limit_s:
        choice = planning.recall_or_choose(task, lanes, plan, limit_s)
        ms = next(
            one["ms"]
            for one in choice.evidence
            if "ms" in one and (one["mode"], one["places"]) == (choice.mode, choice.num_lanes)
        )
        plan = planning.adapt_plan_to_pack(plan, choice.mode, ms)
        return LanePlan(lanes, plan, choice.mode, choice.num_lanes, choice.reason, choice.evidence)
    return LanePlan(lanes, planning.adapt_plan_to_pack(plan, mode, None), mode, places, reason)


def _find_obstacle(task: TrainingTask, plan: Plan) -> str:
    """What keeps several models from training at a time; empty where nothing does."""
    extra = list_buffers(task.model)
    if task.dataset.stream is not None or plan.home != "device":
        return f"series that are not on the device ({plan.home}: {plan.reasons['home']})"
    if task.copies is not None:
        return "augmented windows that are read from disk (augment.cache)"
    if task.config.train.state == "carried":
        return 'train.state = "carried", which keeps the state of each piece from step to step'
    if task.config.engine.sync:
        return "engine.sync, which waits for every step"
    if plan.micro_batch:
        return f"a batch that fits into memory {format_count(plan.micro_batch, 'window')} at a time"
    if extra:
        return f"a model that keeps more than weights ({', '.join(extra[:3])})"
    return ""


def announce(task: TrainingTask, plan: Plan, num_steps: int, **more: Any) -> None:
    """Log what is about to be trained, with `num_steps` in an epoch."""
    dataset = task.dataset
    several = trains_lanes(task.config)
    task.run.append(
        "start",
        run=str(task.run.folder),
        windows=count_windows(dataset) if several else dataset.num_windows,
        series=len(dataset.index.series_names),
        parameters=task.num_parameters,
        epochs=task.config.train.max_epochs,
        steps_per_epoch=num_steps,
        plan=plan.to_dict(),
        scale=_describe_scale(task),
        **more,
        notes=dataset.notes,
        files=dataset.summarize_files(),
    )


def _describe_scale(task: TrainingTask) -> dict[str, Any] | None:
    """Return how losses become errors in the unit of the target; None unless it is one number."""
    signature, train = task.dataset.signature, task.config.train
    if signature.masked or signature.classes or len(signature.targets) > 1:
        return None
    (target,) = signature.targets
    losses = {"train": train.loss, "val": make_validation_settings(train).loss}
    return {"target": target, "size": task.dataset.scaler.size[target]} | losses


def fit_lanes(
    context: RunContext, task: TrainingTask, lane_plan: LanePlan, monitor: Monitor
) -> tuple[FitResult, LanePlan]:
    """Train to the end, or until a signal; the plan comes back as it ran."""
    checkpoint, config, run = context.start.checkpoint, task.config, context.run
    make_events = LaneEvents if trains_lanes(config) else SingleEvents
    events = make_events(run, monitor, build_preview(task))
    signature, result = task.dataset.signature, None
    if checkpoint is not None:
        result = ended.read_results(checkpoint, lane_plan.lanes, signature, lane_plan.plan)
    if result is None:
        if task.ranks is not None:
            task.ranks.share_text(_describe_training(task, lane_plan.plan, checkpoint))
        result = train_lanes(task, lane_plan, checkpoint, events)
    else:
        events.end(result)
    count_seconds(context, result)
    contexts.restore_folder(run, config, context.config)
    plan = contexts.record_plan(run, result.plan, result.failures)
    if result.limit < lane_plan.places:
        lane_plan = replace(lane_plan, places=result.limit, reason="more did not fit into memory")
    return result, replace(lane_plan, plan=plan)


def _describe_training(task: TrainingTask, plan: Plan, checkpoint: Checkpoint | None) -> str:
    """Return what other processes need to train the same model, as JSON."""
    message = {
        "run": str(task.run.folder),
        "config": task.config.model_dump_json(),
        "plan": plan.to_dict(),
        "data": task.fingerprint,
        "step": None if checkpoint is None else checkpoint.step,
    }
    return json.dumps(message)


def train_lanes(
    task: TrainingTask, lane_plan: LanePlan, checkpoint: Checkpoint | None, events: LaneEvents
) -> FitResult:
    """Train lanes to their end, or until a signal, with the other processes where there are any."""
    config, lanes = task.config, lane_plan.lanes
    build = partial(_build_program, task, lane_plan, checkpoint)
    extra: dict[str, Any] = {"data": task.fingerprint}
    if trains_lanes(config):
        extra["pack"] = lane_plan.summarize()
    # a custom model may draw while it trains, and windows of other ranks have draws of their own
    seed = config.seed ^ (task.ranks.rank if task.ranks else 0) << 40
    with (
        seed_generators(seed, lane_plan.plan.device),
        catch_signals() as stop,
    ):
        if checkpoint is None:
            state = states.start(lanes, build, events, num_places=lane_plan.places)
        else:
            state = states.restore(checkpoint, lanes, build, events, same_configs=False)
        return loop.fit(state, stop, extra_state=lambda: extra, ranks=task.ranks)


def count_seconds(context: RunContext, result: FitResult) -> None:
    """Count the time of training, set-up and validation; a checkpoint's is in the result too."""
    timer, checkpoint = context.timer, context.start.checkpoint
    fitted = dict(zip(FIT_PHASES, (result.setup_s, result.train_s, result.validate_s), strict=True))
    timer.seconds |= fitted | {"set-up": timer.seconds["set-up"] + result.setup_s}
    before = checkpoint.metadata["seconds"] if checkpoint else (0.0, 0.0, 0.0)
    setup_s, _, validate_s = map(operator.sub, fitted.values(), before)
    timer.end("training")  # with checkpoints, and what else comes between its steps
    captures = result.capture_s
    timer.move(
        {
            "set-up": setup_s + captures.training + captures.validation,
            "validation": validate_s - captures.validation,
        },
        source="training",
    )


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


def list_ended(metadata: Mapping[str, Any], config: Config) -> list[int]:
    """List a checkpoint's lanes that have ended and have no more to do by the config."""
    return [
        entry["number"]
        for entry in metadata["lanes"]
        if entry["stopped"]
        and not states.can_go_on(entry["stopped"], parse_progress(entry["progress"]), config.train)
    ]


def count_ended(metadata: Mapping[str, Any], config: Config) -> int:
    """Count those lanes."""
    return len(list_ended(metadata, config))


def summarize_training(
    task: TrainingTask, fit: FitResult, lane_plan: LanePlan, best: LaneResult
) -> dict[str, Any]:
    """Summarize the training itself; `best` is the lane whose model the run deploys."""
    logged, several = list(runs.read_events(task.run)), trains_lanes(task.config)
    at, whole = best.progress, task.dataset.num_windows["train"]
    counts = [len(one.lane.starts["train"]) if one.lane.starts else whole for one in fit.lanes]
    epochs = [one.progress.epoch for one in fit.lanes]
    estimate = compare_with_estimate(logged, steps=fit.steps, took_s=fit.train_s)
    return {
        "steps": at.step,
        "repeated_steps": sum(one.progress.repeated for one in fit.lanes),
        "epochs": at.epoch,
        "best_epoch": at.best_epoch,
        "stopped": best.stop_reason,
        "parameters": task.num_parameters,
        "windows_per_s": sum(map(operator.mul, epochs, counts)) / fit.train_s,
        "plan": lane_plan.plan.to_dict(),
        **({"pack": lane_plan.summarize() | {"steps": fit.steps}} if several else {}),
        "monitor": summarize(logged),
        "estimate": estimate | ({"planned_steps": None} if several else {}),
    }
