"""A run of several models, trained as lanes: training, scores and summary."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from slipstream import runs
from slipstream.base.errors import Interrupted
from slipstream.engine import recovery
from slipstream.engine.checkpoint import Checkpoint
from slipstream.engine.lanes import INTERRUPTED, FitResult, LaneResult
from slipstream.engine.monitor import Monitor
from slipstream.engine.planning import guess_duration_s
from slipstream.engine.single import TrainingTask
from slipstream.runs import Run
from slipstream.scoring import summary as lane_summary
from slipstream.scoring.summary import FoldSums
from slipstream.training import context as contexts
from slipstream.training import fitting
from slipstream.training.context import RunContext
from slipstream.training.fitting import LanePlan
from slipstream.training.result import FinishedRun


class TrainedPack(NamedTuple):
    """Lanes whose training has ended, or was interrupted."""

    task: TrainingTask
    lane_plan: LanePlan
    """As it ran"""
    fit: FitResult


def train_lanes(context: RunContext) -> FinishedRun:
    """Train all lanes, score each, keep them, and write everything."""
    with contexts.build_monitor(context) as monitor:
        pack = fit_selected(context, monitor)
        scored = score_lanes(context, pack)
    return finish_lanes(context, pack, scored)


def fit_selected(
    context: RunContext, monitor: Monitor, numbers: Sequence[int] | None = None
) -> TrainedPack:
    """Train some lanes of a run, by their numbers; without them, all."""
    checkpoint = context.start.checkpoint
    task, plan = contexts.prepare_task(context)
    lanes = fitting.build_lanes(task.config, context.dataset, task.init)
    if numbers is not None:
        lanes = [lanes[number] for number in numbers]
    with context.timer.time("plan"):
        lane_plan = fitting.plan_lanes(task, lanes, plan, checkpoint)
    with lane_plan.plan.flags():
        _announce(task, lane_plan, checkpoint)
        fit, lane_plan = fitting.fit_lanes(context, task, lane_plan, monitor)
    return TrainedPack(task, lane_plan, fit)


def score_lanes(context: RunContext, pack: TrainedPack) -> list[FoldSums]:
    """Save the best model, then score every lane and the baselines."""
    run, dataset, timer, task = context.run, context.dataset, context.timer, pack.task
    fit, plan = pack.fit, pack.lane_plan.plan
    num_lanes = len(pack.lane_plan.lanes)
    groups = lane_summary.group_by_fold(fit.lanes, dataset, task.config.train.repeats)
    best = lane_summary.find_best_lane(groups[-1].fits)
    if best is not None:
        contexts.save_model(run, best.weights, dataset)
    if fit.signal_number:
        raise describe_interrupt(run, fit, num_lanes, best)
    lane_summary.refuse_failed(groups)
    with plan.flags():
        with timer.time("scoring"):
            scored = lane_summary.score_folds(task, plan, groups)
        with timer.time("baselines"):
            scored = lane_summary.score_fold_baselines(task, scored, context.baselines)
        if plan.device.type == "cuda":
            recovery.free_memory()
    return scored


def finish_lanes(
    context: RunContext, pack: TrainedPack, scored: list[FoldSums], **more: Any
) -> FinishedRun:
    """Write everything, with `more` in the summary."""
    task, lane_plan, fit = pack
    best = lane_summary.find_best_lane(scored[-1].group.fits)
    assert best is not None
    with context.timer.time("scoring"):
        summary, detail = lane_summary.summarize_lanes(task, scored)
    lane_summary.save_folds(task, scored, summary["uses"])
    summary |= fitting.summarize_training(task, fit, lane_plan, best) | context.summarize_init()
    facts = lane_plan.plan.to_dict() | {"pack": lane_plan.summarize()}
    runs.write_json(context.run.folder / "plan.json", facts)
    return contexts.finish_run(context, summary | more, detail)


def _announce(task: TrainingTask, lane_plan: LanePlan, checkpoint: Checkpoint | None) -> None:
    train, dataset, plan = task.config.train, task.dataset, lane_plan.plan
    assert train.batch != "auto"
    counts = [fold.num_windows["train"] for fold in dataset.folds] or [dataset.num_windows["train"]]
    steps = -(-max(counts) // (train.batch * train.accumulate))
    if task.is_carried:
        steps = task.num_steps  # of the last fold
    rounds, kind = -(-len(lane_plan.lanes) // lane_plan.places), "guessed"
    expected_s = guess_duration_s(task, plan) * len(lane_plan.lanes)
    if plan.ms_per_step is not None:
        expected_s, kind = plan.ms_per_step / 1e3 * steps * train.max_epochs * rounds, "measured"
    pack = {
        **lane_plan.summarize(),
        "folds": len(dataset.folds),
        "repeats": train.repeats,
        "seed": task.config.seed,
        "done": fitting.count_ended(checkpoint.metadata, task.config) if checkpoint else 0,
    }
    expected = {"expected_s": expected_s, "expected_is": kind}
    fitting.announce(task, plan, steps, rounds=rounds, pack=pack, **expected)


def describe_interrupt(
    run: Run, fit: FitResult, num_lanes: int, best: LaneResult | None
) -> Interrupted:
    """Return the error of a run that a signal has stopped."""
    done = sum(one.stop_reason != INTERRUPTED for one in fit.lanes)
    far = max((one.progress.epoch for one in fit.lanes), default=0.0)
    where = "there was no validation yet of what model/ is to hold"
    if best is not None:
        where = f"the best weights so far are in {run.model}"
    return Interrupted(
        f"stopped in epoch {math.ceil(far)} with {done} of {num_lanes} lanes done; {where}",
        signal_number=fit.signal_number,
        fix="resume with: " + runs.suggest_resume(run.folder),
    )
