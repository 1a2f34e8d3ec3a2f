"""A run that pre-trains an encoder: the same training, judged by the rows that it fills in."""

from __future__ import annotations

from typing import Any

from slipstream.engine import recovery
from slipstream.scoring import masked, summary
from slipstream.scoring.masked import BASELINES, MODEL
from slipstream.training import context, single
from slipstream.training.context import RunContext, time_phase
from slipstream.training.result import Result

EXAMPLES = "reconstructions.parquet"


def train_encoder(begun: RunContext) -> Result:
    """Train, judge and write everything. The test rows, if the split names any, are not read."""
    run, dataset = begun.run, begun.dataset
    with context.build_monitor(begun) as watching:
        task, chosen = context.prepare_task(begun)
        settings = task.config
        with chosen.flags():
            fit, chosen = single.fit_model(begun, task, chosen, watching)
            with time_phase(begun.seconds, "scoring"):
                run.append("scoring", what="the encoder")
                load_chunks = summary.make_chunk_loader(task)
                mean = masked.compute_training_mean(dataset, load_chunks).to(chosen.device)
                filler = masked.MaskFiller(task.model, chosen, settings.pretrain, mean)
                detail, latent, examples = masked.score_masked_rows(filler, dataset, load_chunks)
            if chosen.device.type == "cuda":
                recovery.free_memory()
    with summary.open_table_writer(run.folder / EXAMPLES) as write:
        write(examples)
    metric = summary.get_comparison_metric(settings)
    scores = {name: summary.group_by_set({"val": one}) for name, one in detail.items()}
    baselines = {name: {"what": what} | scores[name] for name, what in BASELINES.items()}
    result: dict[str, Any] = {
        "run": str(run.folder),
        "name": settings.name,
        "objective": settings.train.objective,
        **scores[MODEL],
        "windows": dataset.num_windows,
        "baselines": baselines,
        "judged_by": metric,
        "beaten_by": summary.find_better_baselines(scores[MODEL], baselines, metric, "val"),
        "latent": latent,
        **single.summarize_training(task, fit, chosen),
        "notes": list(dataset.notes),
    }
    return context.finish_run(begun, result, detail)
