"""A run of one model."""

from __future__ import annotations

import math
from typing import Any

from slipstream import runs
from slipstream.autotune.duration import count_steps, estimate_duration
from slipstream.engine import loop, monitor, recovery
from slipstream.engine.plan import Plan
from slipstream.engine.single import TrainingTask
from slipstream.engine.state import FitResult
from slipstream.errors import Interrupted
from slipstream.runs import Run
from slipstream.scoring import summary
from slipstream.training import context
from slipstream.training.context import RunContext, time_phase
from slipstream.training.result import Result


def train_single(begun: RunContext) -> Result:
    """Train, score and write everything."""
    run, seconds = begun.run, begun.seconds
    with context.build_monitor(begun) as watching:
        task, chosen = context.prepare_task(begun)
        with chosen.flags():
            fit, chosen = fit_model(begun, task, chosen, watching)
            with time_phase(seconds, "scoring"):
                run.append("scoring", what="the model")
                sums = summary.score_model(task, chosen)
            with time_phase(seconds, "baselines"):
                run.append("scoring", what="the baselines")
                baselines = summary.score_baselines(task)
            if chosen.device.type == "cuda":
                recovery.free_memory()
    with time_phase(seconds, "scoring"):
        scores, detail = summary.summarize_scores(task, sums, baselines)
    result: dict[str, Any] = {
        **scores,
        **summarize_training(task, fit, chosen),
        "notes": [*task.dataset.notes, *summary.list_missing_baselines(baselines)],
    }
    return context.finish_run(begun, result, detail)


def fit_model(
    begun: RunContext, task: TrainingTask, chosen: Plan, watching: monitor.Monitor
) -> tuple[FitResult, Plan]:
    """Train; the model then has its best weights, which are kept, and the plan is as it ran."""
    run, model, seconds = begun.run, task.model, begun.seconds
    _announce(task, chosen)
    with context.seed_generators(task.config.seed, chosen.device):  # a user's own class may draw
        fit = loop.fit(task, chosen, begun.start.checkpoint, watching)
    context.restore_folder(run, task.config, begun.config)
    seconds["set-up"] += fit.setup_s
    seconds |= {"training": fit.train_s, "validation": fit.validate_s}
    chosen = context.record_plan(run, fit.plan, fit.failures)
    if fit.weights:
        context.save_model(run, fit.weights, task.dataset)
    if fit.signal_number:
        raise _interrupted(run, fit)
    model.load_state_dict(fit.weights)
    model.eval()
    return fit, chosen


def summarize_training(task: TrainingTask, fit: FitResult, chosen: Plan) -> dict[str, Any]:
    """What a summary tells of the training itself."""
    logged = list(runs.read_events(task.run))
    return {
        "steps": fit.progress.step,
        "epochs": fit.progress.epoch,
        "best_epoch": fit.progress.best_epoch,
        "stopped": fit.stop_reason,
        "parameters": _num_parameters(task),
        "windows_per_s": fit.progress.epoch * task.dataset.num_windows["train"] / fit.train_s,
        "plan": chosen.to_dict(),
        **({"init_from": task.init.summary} if task.init else {}),
        "monitor": monitor.summarize(logged),
        "estimate": monitor.compare_with_estimate(
            logged, steps=fit.progress.step, took_s=fit.train_s
        ),
    }


def _num_parameters(task: TrainingTask) -> int:
    return sum(p.numel() for p in task.model.parameters())


def _announce(task: TrainingTask, chosen: Plan) -> None:
    train, dataset = task.config.train, task.dataset
    task.run.append(
        "start",
        run=str(task.run.folder),
        windows=dataset.num_windows,
        series=len(dataset.index.series_names),
        parameters=_num_parameters(task),
        epochs=train.epochs,
        steps_per_epoch=count_steps(task),
        plan=chosen.to_dict(),
        **estimate_duration(task, chosen),
        notes=dataset.notes,
    )


def _interrupted(run: Run, fit: FitResult) -> Interrupted:
    at = fit.progress
    kept = f"the best weights, of epoch {at.best_epoch:g}, are in {run.model}"
    return Interrupted(
        f"stopped at step {at.step}, in epoch {math.ceil(at.epoch)}; "
        + (kept if fit.weights else "there was no validation yet")
        + f"; go on with: slipstream train --resume {run.folder}",
        signal_number=fit.signal_number,
    )
