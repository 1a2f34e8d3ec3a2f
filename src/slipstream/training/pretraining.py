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
                pieces = summary.make_chunk_loader(task)
                mean = masked.compute_training_mean(dataset, pieces).to(chosen.device)
                fill = masked.MaskFiller(task.model, chosen, settings.pretrain, mean)
                judged, examples = masked.score_masked_rows(fill, dataset, pieces)
            if chosen.device.type == "cuda":
                recovery.free_memory()
    with summary.open_table_writer(run.folder / EXAMPLES) as write:
        write(examples)
    found, judged_by = judged["figures"], summary.get_comparison_metric(settings)
    beside = {name: {"what": what} | _of_set(found[name]) for name, what in BASELINES.items()}
    figures: dict[str, Any] = {
        "run": str(run.folder),
        "name": settings.name,
        "objective": settings.train.objective,
        **_of_set(found[MODEL]),
        "windows": dataset.num_windows,
        "baselines": beside,
        "judged_by": judged_by,
        "beaten_by": [
            name
            for name, one in beside.items()
            if one["scaled"]["val"][judged_by] < found[MODEL]["scaled"][judged_by]
        ],
        "latent": judged["latent"],
        **single.summarize_training(task, fit, chosen),
        "notes": list(dataset.notes),
    }
    return context.finish_run(begun, figures, found)


def _of_set(found: dict[str, Any]) -> dict[str, Any]:
    """As other runs tell theirs, of the validation set's masked rows."""
    return {"metrics": {"val": found["overall"]}, "scaled": {"val": found["scaled"]}}
