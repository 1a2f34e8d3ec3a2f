"""A run of one model: its training, its figures and its summary."""

from __future__ import annotations

import math
from typing import Any

from slipstream import runs
from slipstream.autotune.timing import count_steps, estimate_duration
from slipstream.engine import monitor, recovery
from slipstream.engine.monitor import Monitor
from slipstream.engine.plan import Plan
from slipstream.engine.progress import FitResult
from slipstream.engine.single import TrainingTask
from slipstream.errors import Interrupted, UserError
from slipstream.runs import Run
from slipstream.scoring import summary
from slipstream.training import context as contexts
from slipstream.training import fitting
from slipstream.training.context import RunContext, time_phase
from slipstream.training.fitting import ONE_AT_A_TIME, LanePlan
from slipstream.training.result import Result


def train_single(context: RunContext) -> Result:
    """Train, score and write everything."""
    run, seconds = context.run, context.seconds
    with contexts.build_monitor(context) as watching:
        task, plan = contexts.prepare_task(context)
        with plan.flags():
            fit, plan = fit_model(context, task, plan, watching)
            with time_phase(seconds, "scoring"):
                run.append("scoring", what="the model")
                sums = summary.score_model(task, plan)
            with time_phase(seconds, "baselines"):
                run.append("scoring", what="the baselines")
                baselines = summary.score_baselines(task)
            if plan.device.type == "cuda":
                recovery.free_memory()
    with time_phase(seconds, "scoring"):
        scores, detail = summary.summarize_scores(task, sums, baselines)
    result: dict[str, Any] = {
        **scores,
        **summarize_training(task, fit, plan),
        **context.summarize_init(),
        "notes": [*task.dataset.notes, *summary.list_missing_baselines(baselines)],
    }
    return contexts.finish_run(context, result, detail)


def fit_model(
    context: RunContext, task: TrainingTask, plan: Plan, watching: Monitor
) -> tuple[FitResult, Plan]:
    """Train, and write the best weights; the model then has them, and the plan is as it ran."""
    run = context.run
    _announce(task, plan)
    lane_plan = LanePlan([task.build_lane()], plan, ONE_AT_A_TIME, 1, "")
    fit, lane_plan = fitting.fit_lanes(context, task, lane_plan, watching)
    (result,) = fit.lanes
    if result.weights:
        contexts.save_model(run, result.weights, task.dataset)
    if fit.signal_number:
        raise _describe_interrupt(run, fit)
    if not result.weights:
        raise UserError(
            f"no validation loss was finite up to step {result.progress.step}; lower train.lr, "
            'set train.clip, or set engine.precision = "fp32"'
        )
    task.model.load_state_dict(result.weights)
    task.model.eval()
    return fit, lane_plan.plan


def summarize_training(task: TrainingTask, fit: FitResult, plan: Plan) -> dict[str, Any]:
    """What a summary says of the training itself."""
    logged = list(runs.read_events(task.run))
    (result,) = fit.lanes
    at = result.progress
    return {
        "steps": at.step,
        "epochs": at.epoch,
        "best_epoch": at.best_epoch,
        "stopped": result.stop_reason,
        "parameters": _count_parameters(task),
        "windows_per_s": at.epoch * task.dataset.num_windows["train"] / fit.train_s,
        "plan": plan.to_dict(),
        "monitor": monitor.summarize(logged),
        "estimate": monitor.compare_with_estimate(logged, steps=at.step, took_s=fit.train_s),
    }


def _count_parameters(task: TrainingTask) -> int:
    return sum(p.numel() for p in task.model.parameters())


def _announce(task: TrainingTask, plan: Plan) -> None:
    train, dataset = task.config.train, task.dataset
    task.run.append(
        "start",
        run=str(task.run.folder),
        windows=dataset.num_windows,
        series=len(dataset.index.series_names),
        parameters=_count_parameters(task),
        epochs=train.epochs,
        steps_per_epoch=count_steps(task),
        plan=plan.to_dict(),
        **estimate_duration(task, plan),
        notes=dataset.notes,
    )


def _describe_interrupt(run: Run, fit: FitResult) -> Interrupted:
    (result,) = fit.lanes
    at = result.progress
    kept = f"the best weights, of epoch {at.best_epoch:g}, are in {run.model}"
    return Interrupted(
        f"stopped at step {at.step}, in epoch {math.ceil(at.epoch)}; "
        + (kept if result.weights else "there was no validation yet")
        + f"; go on with: slipstream train --resume {run.folder}",
        signal_number=fit.signal_number,
    )
