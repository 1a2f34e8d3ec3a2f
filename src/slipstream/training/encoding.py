"""A run that pre-trains an encoder: the same training, judged by the rows that it fills in."""

from __future__ import annotations

from typing import Any

from slipstream.engine import filling, recover
from slipstream.engine.filling import BASELINES, MODEL
from slipstream.training import alone, scoring, setup
from slipstream.training.setup import Begun, Result, timed

EXAMPLES = "reconstructions.parquet"


def pretrain(begun: Begun) -> Result:
    """Train, judge and write everything. The test rows, if the split names any, are not read."""
    run, dataset = begun.run, begun.dataset
    with setup.watched(begun) as watching:
        task, chosen = setup.prepared(begun)
        settings = task.config
        with chosen.flags():
            fit, chosen = alone.fitted(begun, task, chosen, watching)
            with timed(begun.seconds, "scoring"):
                run.append("scoring", what="the encoder")
                pieces = scoring.pieces(task)
                mean = filling.training_mean(dataset, pieces).to(chosen.device)
                fill = filling.Filler(task.model, chosen, settings.pretrain, mean)
                judged, examples = filling.judge(fill, dataset, pieces)
            if chosen.device.type == "cuda":
                recover.free_memory()
    with scoring.writing(run.folder / EXAMPLES) as write:
        write(examples)
    found, judged_by = judged["figures"], scoring.judged_by(settings)
    beside = {name: {"what": what} | _of_set(found[name]) for name, what in BASELINES.items()}
    figures: dict[str, Any] = {
        "run": str(run.folder),
        "name": settings.name,
        "objective": settings.train.objective,
        **_of_set(found[MODEL]),
        "windows": dataset.count,
        "baselines": beside,
        "judged_by": judged_by,
        "beaten_by": [
            name
            for name, one in beside.items()
            if one["scaled"]["val"][judged_by] < found[MODEL]["scaled"][judged_by]
        ],
        "latent": judged["latent"],
        **alone.how_it_went(task, fit, chosen),
        "notes": list(dataset.notes),
    }
    return setup.ended(begun, figures, found)


def _of_set(found: dict[str, Any]) -> dict[str, Any]:
    """As other runs tell theirs, of the validation set's masked rows."""
    return {"metrics": {"val": found["overall"]}, "scaled": {"val": found["scaled"]}}
