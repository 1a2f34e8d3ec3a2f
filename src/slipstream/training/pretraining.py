"""A run that pre-trains an encoder: the same training, judged by the rows that it fills in."""

from __future__ import annotations

from typing import Any

from slipstream.engine import recovery
from slipstream.scoring import masked, summary
from slipstream.scoring.masked import BASELINES, MODEL
from slipstream.training import context as contexts
from slipstream.training import single
from slipstream.training.context import RunContext, time_phase
from slipstream.training.result import Result

EXAMPLES = "reconstructions.parquet"


def train_encoder(context: RunContext) -> Result:
    """Train, judge and write everything. The test rows, if the split names any, are not read."""
    run, dataset = context.run, context.dataset
    with contexts.build_monitor(context) as watching:
        task, plan = contexts.prepare_task(context)
        config = task.config
        with plan.flags():
            fit, plan = single.fit_model(context, task, plan, watching)
            with time_phase(context.seconds, "scoring"):
                run.append("scoring", what="the encoder")
                load_chunks = summary.make_chunk_loader(task)
                mean = masked.compute_training_mean(dataset, load_chunks).to(plan.device)
                filler = masked.MaskFiller(task.model, plan, config.pretrain, mean)
                detail, latent, examples = masked.score_masked_rows(filler, dataset, load_chunks)
            if plan.device.type == "cuda":
                recovery.free_memory()
    with summary.open_table_writer(run.folder / EXAMPLES) as write:
        write(examples)
    metric = summary.get_comparison_metric(config)
    scores = {name: summary.group_by_set({"val": one}) for name, one in detail.items()}
    baselines = {name: {"what": what} | scores[name] for name, what in BASELINES.items()}
    result: dict[str, Any] = {
        "run": str(run.folder),
        "name": config.name,
        "objective": config.train.objective,
        **scores[MODEL],
        "windows": dataset.num_windows,
        "baselines": baselines,
        "judged_by": metric,
        "beaten_by": summary.find_better_baselines(scores[MODEL], baselines, metric, "val"),
        "latent": latent,
        **single.summarize_training(task, fit, plan),
        "notes": list(dataset.notes),
    }
    return contexts.finish_run(context, result, detail)
