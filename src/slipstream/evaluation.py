"""Score a trained model."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from slipstream import config as configs
from slipstream import runs
from slipstream.config import Config
from slipstream.data import dataset as datasets
from slipstream.data import given
from slipstream.data.dataset import Dataset
from slipstream.data.scaling import Scaler
from slipstream.data.splits import SETS
from slipstream.engine import checkpoint, plan, score
from slipstream.errors import UserError


def evaluate(
    run: str | Path,
    data: Any = None,
    *,
    on: str = "test",
    resample: bool = False,
    overrides: tuple[str, ...] = (),
) -> dict[str, Any]:
    """Metrics of a run's model: on one of its own sets, or on every window of new data.

    `data` is a path or a table. `on` is "train", "val" or "test" and goes with the run's own data.
    """
    if on not in SETS:
        raise UserError(f'there is no set "{on}"; choose one of {", ".join(SETS)}')
    found = runs.find(run)
    config = configs.load(found.folder / "config.toml", overrides)
    chosen = plan.make(config, data_bytes=0, training=False)
    model, signature, scaler = checkpoint.load_model(found, config, chosen.device)
    if data is None:
        dataset, which = _own_data(config, scaler), on
    else:
        dataset = given.load(config, signature, scaler, data, targets=True, resample=resample)
        which = "all"
    with chosen.flags():
        model.eval()
        memory = dataset.memory
        series = None if memory is None else memory.series.to(chosen.device)
        pieces = dataset.pieces(which, series, rows=config.engine.buffer_rows)
        chunks = score.chunks(score.of_model(model, chosen), pieces)
        scores = score.tally(chunks, dataset, signature.quantiles)
    return {
        "run": str(found.folder),
        "on": on if data is None else "data",
        "metrics": scores["overall"],
        "scaled": scores["scaled"],
        "windows": dataset.count[which],
        "detail": scores,
        "plan": chosen.to_dict(),
        "notes": list(dataset.notes),
    }


def _own_data(config: Config, scaler: Scaler) -> Dataset:
    """The run's data, if it still is what the model was trained on."""
    dataset = datasets.load(config)
    for name, shift in scaler.shift.items():
        now = dataset.scaler.shift.get(name, math.nan), dataset.scaler.size.get(name, math.nan)
        was = shift, scaler.size[name]
        if not all(
            math.isclose(a, b, rel_tol=1e-6, abs_tol=1e-9) for a, b in zip(now, was, strict=True)
        ):
            raise UserError(
                f'the data of this run have changed since training: column "{name}" now has '
                f"centre {now[0]:g} and size {now[1]:g}, then {was[0]:g} and {was[1]:g}; to score "
                "the model on them as new data, pass them with --data"
            )
    return dataset
