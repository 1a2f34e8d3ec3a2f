"""Score a trained model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from slipstream import runs
from slipstream.autotune.rules import make_plan
from slipstream.config import Config
from slipstream.data import new_data
from slipstream.data.dataset import Dataset
from slipstream.data.splits import SETS
from slipstream.data.windows import Series
from slipstream.engine import recovery
from slipstream.errors import UserError
from slipstream.inference.overrides import load_changed_config
from slipstream.inference.own_baselines import find_baselines
from slipstream.inference.own_data import load_own_data
from slipstream.models import permission
from slipstream.scoring.batch import Baseline, ChunkLoader, PredictionBatch
from slipstream.scoring.ensemble import (
    CoverageCounter,
    FoldPredictor,
    compute_coverage,
    load_predictors,
)
from slipstream.scoring.predict import accumulate_side_by_side, predict_side_by_side
from slipstream.scoring.summary import merge_sums


@recovery.explain_out_of_memory()
def evaluate(
    run: str | Path,
    data: Any = None,
    *,
    on: str = "test",
    resample: bool = False,
    ensemble: bool | None = None,
    overrides: tuple[str, ...] = (),
    allow_code: bool = False,
) -> dict[str, Any]:
    """Score a run's model and its baselines; `slipstream.evaluate` documents the arguments."""
    if on not in SETS:
        raise UserError(f'there is no set "{on}"; choose one of {", ".join(SETS)}')
    model_run, owner = runs.find_model_run(runs.open_run(run))
    config = load_changed_config(model_run, overrides, own_data=data is None, targets=True)
    plan = make_plan(config, data_bytes=0, training=False)
    permission.require_permission(model_run.folder, overrides=overrides, allow_code=allow_code)
    trained = load_predictors(model_run, config, plan, ensemble=ensemble)
    signature, scaler = trained.signature, trained.scaler
    if data is None:
        dataset, which = load_own_data(model_run, config, signature, scaler), on
    else:
        dataset = new_data.load_new_data(
            config, signature, scaler, data, targets=True, resample=resample
        )
        which = "all"
    if len(dataset.folds) > len(trained.folds):
        raise UserError(
            f"{model_run.folder}: holds the model of one fold; set tune.retrain to have them all, "
            "or pass data with --data"
        )
    folds = [dataset.select_fold(fold) for fold in dataset.folds] or [dataset]
    predictors = trained.folds if dataset.folds else trained.folds[-1:]
    coverage = [CoverageCounter(one.half_widths or {}, signature.quantiles) for one in predictors]
    with plan.flags():
        memory = dataset.memory
        series = None if memory is None else memory.series.to(plan.device)
        loaders = [_make_loader(fold, series, config) for fold in folds]
        device = torch.device("cpu") if series is None else plan.device
        baselines, notes = find_baselines(model_run, config, trained, folds, loaders, device)
        sums = [
            _score_fold(_Fold(*one), which)
            for one in zip(folds, loaders, predictors, coverage, baselines, strict=True)
        ]
        scores = merge_sums([fold[0] for fold in sums]).compute()
    model = trained.describe_on_new_data()
    if dataset.folds:
        model = f"{trained.description}, fold by fold"
    return {
        "run": str(model_run.folder),
        "on": on if data is None else "data",
        "model": f"{owner}: {model}" if owner else model,
        "metrics": scores["overall"],
        **({"scaled": scores["scaled"]} if "scaled" in scores else {}),
        **({"classes": list(signature.classes)} if signature.classes else {}),
        "baselines": _summarize_baselines(baselines[-1], [fold[1:] for fold in sums]),
        "coverage": compute_coverage(coverage) or None,
        "windows": sum(fold.num_windows[which] for fold in folds),
        "windows_without_target": sum(fold.left_out.get(which, 0) for fold in folds),
        "detail": scores,
        "plan": plan.to_dict(),
        "notes": [*dataset.notes, *notes],
    }


class _Fold(NamedTuple):
    """The windows of one fold, or all of them, and what is scored on them."""

    dataset: Dataset
    load_chunks: ChunkLoader
    model: FoldPredictor
    coverage: CoverageCounter
    baselines: Mapping[str, Baseline]


def _make_loader(dataset: Dataset, series: Series | None, config: Config) -> ChunkLoader:
    rows = config.engine.buffer_rows
    return lambda which: dataset.iter_chunks(which, series, rows=rows)


def _score_fold(fold: _Fold, which: str) -> list[Any]:
    """Return the sums of the model, and of each baseline that predicts something."""
    predictors = [one.predict for one in fold.baselines.values() if one.predict]
    every = predict_side_by_side([fold.model.predict, *predictors], fold.load_chunks, which)

    def count_coverage() -> Iterator[list[PredictionBatch]]:
        for row in every:
            fold.coverage.add(row[0])
            yield row

    return accumulate_side_by_side(count_coverage(), fold.dataset)


def _summarize_baselines(
    baselines: Mapping[str, Baseline], sums: Sequence[Sequence[Any]]
) -> dict[str, Any]:
    """Return the overall metrics of each baseline over all folds; None where it has none."""
    by_baseline = (merge_sums(many).compute() for many in zip(*sums, strict=True))
    result: dict[str, Any] = {}
    for name, baseline in baselines.items():
        result[name] = None
        if baseline.predict:
            scores = next(by_baseline)
            scaled = {"scaled": scores["scaled"]} if "scaled" in scores else {}
            result[name] = {"what": baseline.what, "metrics": scores["overall"], **scaled}
    return result
