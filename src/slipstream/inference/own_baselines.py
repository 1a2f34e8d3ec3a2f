"""The baselines of a trained run: as training saved them, or fitted again to the run's own data."""

from collections.abc import Sequence

import torch

from slipstream.data.dataset import Dataset
from slipstream.errors import UserError
from slipstream.inference.trained import TrainedRun, load_own_sets
from slipstream.scoring.baseline_files import load_baselines
from slipstream.scoring.baselines import fit_baselines
from slipstream.scoring.batch import Baseline, ChunkLoader


def find_baselines(
    trained: TrainedRun,
    folds: Sequence[Dataset],
    loaders: Sequence[ChunkLoader],
    device: torch.device,
) -> tuple[list[dict[str, Baseline]], list[str]]:
    """Return the baselines for each of these folds, and notes on those that there are not.

    Runs that were stopped, and those of version 0.1, have not saved any. They are fitted to the
    folds themselves where these are the run's own, else to the run's data if they can be read.
    """
    saved = load_baselines(trained.run, folds[-1].signature, device)
    if saved is not None:
        return saved[-len(folds) :], []
    if "train" in folds[-1].num_windows:
        pairs = zip(folds, loaders, strict=True)
        return [fit_baselines(fold, load) for fold, load in pairs], []
    try:
        (own,) = load_own_sets([trained.first])
    except UserError as error:
        return [{}], [f"no baselines: the run has saved none, and its data are needed ({error})"]
    last = own.select_fold(own.folds[-1]) if own.folds else own
    series = None if last.memory is None else last.memory.series.to(device)
    rows = trained.first.config.engine.buffer_rows
    return [fit_baselines(last, lambda which: last.iter_chunks(which, series, rows=rows))], []
