"""Bring a trained run together with the windows to score."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from slipstream import runs
from slipstream.data.dataset import Dataset
from slipstream.data.splits import SETS
from slipstream.errors import UserError
from slipstream.inference.trained import TrainedRun, load_own_sets, load_trained
from slipstream.scoring.batch import Predictor
from slipstream.scoring.ensemble import FoldPredictor


class LoadedEvaluation(NamedTuple):
    """A trained run and the windows to score; each list has one entry for every fold, or one."""

    trained: TrainedRun
    on: str
    """The set, or "data" """
    which: str
    """The set's name in the data sets"""
    dataset: Dataset
    folds: list[Dataset]
    predictors: list[FoldPredictor]
    members: Sequence[Sequence[Predictor]]
    """Of an ensemble of runs: what each member predicts"""

    def describe(self) -> dict[str, Any]:
        """Return what is scored on what."""
        return {
            "run": str(self.trained.run.folder),
            "on": self.on,
            "model": self.trained.describe(on_folds=bool(self.dataset.folds)),
        }

    def count_windows(self) -> dict[str, int]:
        """Return the numbers of windows that are scored, and that are left out."""
        return {
            "windows": sum(fold.num_windows[self.which] for fold in self.folds),
            "windows_without_target": sum(fold.left_out.get(self.which, 0) for fold in self.folds),
        }


def load_evaluation(
    run: str | Path,
    data: Any,
    *,
    on: str,
    resample: bool,
    joins: Mapping[str, Any] | None,
    **options: Any,
) -> LoadedEvaluation:
    """Load a run and one of its own sets, or new data; `options` are those of `load_trained`."""
    if on not in SETS:
        raise UserError(f'there is no set "{on}"; choose one of {", ".join(SETS)}')
    which = on if data is None else "all"
    trained = load_trained(run, own_data=data is None, targets=True, **options)
    datasets = _load_datasets(trained, data, resample=resample, joins=joins)
    dataset, predictors, members = trained.bind(datasets, [which])
    if len(dataset.folds) > len(predictors):
        raise UserError(
            f"{trained.run.folder}: holds the model of one fold; set tune.retrain to have them "
            "all, or pass data with --data"
        )
    folds = [dataset.select_fold(fold) for fold in dataset.folds] or [dataset]
    count = len(folds)
    return LoadedEvaluation(
        trained,
        on if data is None else "data",
        which,
        dataset,
        folds,
        predictors[-count:],
        members[-count:],
    )


def _load_datasets(
    trained: TrainedRun, data: Any, *, resample: bool, joins: Mapping[str, Any] | None
) -> list[Dataset]:
    """Return each member's own data, or new data."""
    if data is not None:
        options: dict[str, Any] = {"targets": True, "resample": resample, "joins": joins}
        return [one.load_new(data, **options) for one in trained.members]
    if joins:
        raise UserError("joins are for new data; pass the rows to score as well (--data)")
    runs.require_data(
        trained.run,
        trained.first.config,
        data,
        "pass the rows to score with --data FILE, or a file with that whole table, of which the "
        "test set is scored, with --set data.path=FILE",
    )
    return load_own_sets(trained.members)
