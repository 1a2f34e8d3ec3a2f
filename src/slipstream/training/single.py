"""A run of one model, or of an encoder in pre-training: training, scores and summary."""

import math
from typing import Any

from slipstream import runs
from slipstream.base.errors import Interrupted, UserError
from slipstream.base.text import format_epoch
from slipstream.engine import recovery
from slipstream.engine.lanes import FitResult
from slipstream.engine.monitor import Monitor
from slipstream.engine.plan import Plan
from slipstream.engine.planning import count_steps, estimate_duration
from slipstream.engine.single import TrainingTask
from slipstream.models.forecaster import set_execution
from slipstream.runs import Run
from slipstream.scoring import masked, summary
from slipstream.training import context as contexts
from slipstream.training import fitting
from slipstream.training.context import RunContext
from slipstream.training.fitting import ONE_AT_A_TIME, LanePlan
from slipstream.training.result import FinishedRun

EXAMPLES = "reconstructions.parquet"


def train_single(context: RunContext) -> FinishedRun:
    """Train, score and write everything."""
    run, timer = context.run, context.timer
    with contexts.build_monitor(context) as monitor:
        task, plan = contexts.prepare_task(context)
        with plan.flags():
            fit, lane_plan = _fit_model(context, task, plan, monitor)
            with timer.time("scoring"):
                run.append("scoring", what="the model")
                sums, unfiltered = summary.score_model(task, lane_plan.plan)
            with timer.time("baselines"):
                run.append("scoring", what="the baselines")
                load_chunks = summary.make_chunk_loader(task)
                baselines = summary.score_baselines(task.dataset, load_chunks)
                summary.save_scored_baselines(run, [baselines])
            if plan.device.type == "cuda":
                recovery.free_memory()
    with timer.time("scoring"):
        scores, detail = summary.summarize_scores(run, task.config, task.dataset, sums, baselines)
    result: dict[str, Any] = {
        **scores,
        **summary.summarize_filter(task.config, task.dataset, unfiltered),
        **fitting.summarize_training(task, fit, lane_plan, fit.lanes[0]),
        **context.summarize_init(),
        "notes": [*task.dataset.notes, *summary.list_missing_baselines(baselines)],
    }
    return contexts.finish_run(context, result, detail)


def train_encoder(context: RunContext) -> FinishedRun:
    """Pre-train an encoder, score the rows that it fills in, and write everything.

    The test rows, if the split names any, are not read.
    """
    run, dataset = context.run, context.dataset
    with contexts.build_monitor(context) as monitor:
        task, plan = contexts.prepare_task(context)
        config = task.config
        with plan.flags():
            fit, lane_plan = _fit_model(context, task, plan, monitor)
            plan = lane_plan.plan
            with context.timer.time("scoring"):
                run.append("scoring", what="the encoder")
                load_chunks = summary.make_chunk_loader(task)
                mean = masked.compute_training_mean(dataset, load_chunks).to(plan.device)
                filler = masked.MaskFiller(task.model, plan, config.pretrain, mean)
                scored = masked.score_masked_rows(filler, dataset, load_chunks)
            if plan.device.type == "cuda":
                recovery.free_memory()
    with summary.open_table_writer(run.folder / EXAMPLES) as write:
        write(scored.examples)
    metric = summary.get_comparison_metric(config)
    detail = scored.metrics
    scores = {name: summary.group_by_set({"val": one}) for name, one in detail.items()}
    model = scores[masked.MODEL]
    baselines = {name: {"what": what} | scores[name] for name, what in masked.BASELINES.items()}
    result: dict[str, Any] = {
        "run": str(run.folder),
        "name": config.name,
        "objective": config.train.objective,
        **model,
        "windows": dataset.num_windows,
        "windows_without_target": dataset.left_out,
        "baselines": baselines,
        "judged_by": metric,
        **summary.summarize_comparison(scored.comparison, metric),
        "latent": scored.latent,
        **fitting.summarize_training(task, fit, lane_plan, fit.lanes[0]),
        "notes": list(dataset.notes),
    }
    return contexts.finish_run(context, result, detail)


def _fit_model(
    context: RunContext, task: TrainingTask, plan: Plan, monitor: Monitor
) -> tuple[FitResult, LanePlan]:
    """Train, write the best weights and load them into the model; return the plan as it ran."""
    fitting.announce(task, plan, count_steps(task), **estimate_duration(task, plan))
    lane_plan = LanePlan([task.build_lane()], plan, ONE_AT_A_TIME, 1, "")
    fit, lane_plan = fitting.fit_lanes(context, task, lane_plan, monitor)
    (result,) = fit.lanes
    if result.weights:
        contexts.save_model(context.run, result.weights, task.dataset)
    if fit.signal_number:
        raise _describe_interrupt(context.run, fit)
    if not result.weights:
        raise UserError(
            f"no validation loss was finite up to step {result.progress.step}; lower train.lr, "
            'set train.clip, or set engine.precision = "fp32"'
        )
    task.model.load_state_dict(result.weights)
    task.model.eval()
    plan = lane_plan.plan  # a run resumed after its last step has not built the step, which does it
    set_execution(task.model, algorithms=plan.rnn, recompute=plan.recompute, compiled=plan.compile)
    return fit, lane_plan


def _describe_interrupt(run: Run, fit: FitResult) -> Interrupted:
    (result,) = fit.lanes
    at = result.progress
    best = "there was no validation yet"
    if result.weights:
        best = f"the best weights, of epoch {format_epoch(at.best_epoch)}, are in {run.model}"
    return Interrupted(
        f"stopped at step {at.step}, in epoch {math.ceil(at.epoch)}; {best}; resume with: "
        f"{runs.suggest_resume(run.folder)}",
        signal_number=fit.signal_number,
    )
