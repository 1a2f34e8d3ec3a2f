"""A run of several models, trained as lanes: their figures and the summary."""

from __future__ import annotations

import math
from typing import Any

from slipstream import runs
from slipstream.autotune.timing import guess_duration_s
from slipstream.engine import monitor, recovery
from slipstream.engine.checkpoint import Checkpoint
from slipstream.engine.progress import INTERRUPTED, FitResult, LaneResult
from slipstream.engine.single import TrainingTask
from slipstream.errors import Interrupted
from slipstream.runs import Run
from slipstream.scoring import lane_summary
from slipstream.scoring.summary import count_windows
from slipstream.training import context as contexts
from slipstream.training import fitting
from slipstream.training.context import RunContext, time_phase
from slipstream.training.fitting import LanePlan
from slipstream.training.result import Result


def train_lanes(context: RunContext) -> Result:
    """Train all lanes, score each, keep them, and write everything."""
    run, dataset, seconds = context.run, context.dataset, context.seconds
    checkpoint = context.start.checkpoint
    with contexts.build_monitor(context) as watching:
        task, plan = contexts.prepare_task(context)
        lanes = fitting.build_lanes(task.config, dataset, task.init)
        with time_phase(seconds, "plan"):
            lane_plan = fitting.plan_lanes(task, lanes, plan, checkpoint)
        with lane_plan.plan.flags():
            _announce(task, lane_plan, checkpoint)
            fit, lane_plan = fitting.fit_lanes(context, task, lane_plan, watching)
            plan = lane_plan.plan
            groups = lane_summary.group_by_fold(fit.lanes, dataset, task.config.train.repeats)
            best = lane_summary.find_best_lane(groups[-1].fits)
            if best is not None:
                contexts.save_model(run, best.weights, dataset)
            if fit.signal_number:
                raise _describe_interrupt(run, fit, len(lanes), best)
            lane_summary.refuse_failed(groups)
            with time_phase(seconds, "scoring"):
                run.append("scoring", what=f"{len(lanes)} models")
                scored = lane_summary.score_folds(task, plan, groups)
            with time_phase(seconds, "baselines"):
                run.append("scoring", what="the baselines")
                scored = lane_summary.score_fold_baselines(task, scored)
            if plan.device.type == "cuda":
                recovery.free_memory()
    assert best is not None
    with time_phase(seconds, "scoring"):
        summary, detail = lane_summary.summarize_lanes(task, scored)
    lane_summary.save_folds(task, scored, summary["uses"])
    summary |= _summarize_training(task, fit, lane_plan, best) | context.summarize_init()
    pack = lane_plan.summarize()
    runs.write_json(run.folder / "plan.json", plan.to_dict() | {"pack": pack})
    return contexts.finish_run(context, summary, detail)


def _summarize_training(
    task: TrainingTask, fit: FitResult, lane_plan: LanePlan, best: LaneResult
) -> dict[str, Any]:
    """What a summary says of the training itself."""
    logged = list(runs.read_events(task.run))
    estimate = monitor.compare_with_estimate(logged, steps=fit.steps, took_s=fit.train_s)
    windows = sum(one.progress.epoch * _count_windows(task, one) for one in fit.lanes)
    return {
        "steps": best.progress.step,
        "epochs": best.progress.epoch,
        "best_epoch": best.progress.best_epoch,
        "stopped": best.stop_reason,
        "parameters": _count_parameters(task),
        "windows_per_s": windows / fit.train_s,
        "plan": lane_plan.plan.to_dict(),
        "pack": lane_plan.summarize() | {"steps": fit.steps},
        "monitor": monitor.summarize(logged),
        "estimate": estimate | {"planned_steps": None},
    }


def _count_windows(task: TrainingTask, result: LaneResult) -> int:
    """Training windows of a lane."""
    starts = result.lane.starts
    return len(starts["train"]) if starts else task.dataset.num_windows["train"]


def _count_parameters(task: TrainingTask) -> int:
    return sum(p.numel() for p in task.model.parameters())


def _announce(task: TrainingTask, lane_plan: LanePlan, checkpoint: Checkpoint | None) -> None:
    train, dataset, plan = task.config.train, task.dataset, lane_plan.plan
    assert train.batch != "auto"
    counts = [fold.num_windows["train"] for fold in dataset.folds] or [dataset.num_windows["train"]]
    steps = -(-max(counts) // (train.batch * train.accumulate))
    expected = {
        "expected_s": guess_duration_s(task, plan) * len(lane_plan.lanes),
        "expected_is": "guessed",
    }
    if plan.ms_per_step is not None:
        whole_s = plan.ms_per_step / 1e3 * steps * train.epochs * lane_plan.rounds
        expected = {"expected_s": whole_s, "expected_is": "measured"}
    task.run.append(
        "start",
        run=str(task.run.folder),
        windows=count_windows(dataset),
        series=len(dataset.index.series_names),
        parameters=_count_parameters(task),
        epochs=train.epochs,
        steps_per_epoch=steps,
        rounds=lane_plan.rounds,
        pack={
            **lane_plan.summarize(),
            "folds": len(dataset.folds),
            "repeats": train.repeats,
            "seed": task.config.seed,
            "done": fitting.count_ended(checkpoint.metadata, task.config) if checkpoint else 0,
        },
        plan=plan.to_dict(),
        **expected,
        notes=dataset.notes,
    )


def _describe_interrupt(
    run: Run, fit: FitResult, num_lanes: int, best: LaneResult | None
) -> Interrupted:
    done = sum(one.stop_reason != INTERRUPTED for one in fit.lanes)
    far = max((one.progress.epoch for one in fit.lanes), default=0.0)
    kept = "there was no validation yet of what model/ is to hold"
    if best is not None:
        kept = f"the best weights so far are in {run.model}"
    return Interrupted(
        f"stopped in epoch {math.ceil(far)} with {done} of {num_lanes} lanes done; {kept}; go on "
        f"with: slipstream train --resume {run.folder}",
        signal_number=fit.signal_number,
    )
