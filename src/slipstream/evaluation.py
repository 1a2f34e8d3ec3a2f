"""Score a trained model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from slipstream.config import Config
from slipstream.data.dataset import Dataset
from slipstream.data.splits import SETS
from slipstream.data.windows import Series
from slipstream.engine import recovery
from slipstream.errors import UserError
from slipstream.inference.own_baselines import find_baselines
from slipstream.inference.trained import Member, TrainedRun, load_own_sets, load_trained
from slipstream.portable.mixture import MEMBERS
from slipstream.scoring.batch import Baseline, ChunkLoader, PredictionBatch, Predictor
from slipstream.scoring.ensemble import CoverageCounter, FoldPredictor, compute_coverage
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
    joins: Mapping[str, Any] | None = None,
    overrides: tuple[str, ...] = (),
    allow_code: bool = False,
) -> dict[str, Any]:
    """Score a run's model and its baselines; `slipstream.evaluate` documents the arguments."""
    if on not in SETS:
        raise UserError(f'there is no set "{on}"; choose one of {", ".join(SETS)}')
    which = on if data is None else "all"
    trained = load_trained(
        run,
        overrides=overrides,
        own_data=data is None,
        targets=True,
        ensemble=ensemble,
        allow_code=allow_code,
    )
    datasets = _load_datasets(trained, data, resample=resample, joins=joins)
    dataset, fold_predictors, members = trained.bind(datasets, [which])
    plan, signature = trained.first.plan, dataset.signature
    if len(dataset.folds) > len(fold_predictors):
        raise UserError(
            f"{trained.run.folder}: holds the model of one fold; set tune.retrain to have them "
            "all, or pass data with --data"
        )
    folds = [dataset.select_fold(fold) for fold in dataset.folds] or [dataset]
    predictors = fold_predictors[-len(folds) :]
    coverage = [CoverageCounter(one.half_widths or {}, signature.quantiles) for one in predictors]
    with plan.flags():
        memory = dataset.memory
        series = None if memory is None else memory.series.to(plan.device)
        loaders = [_make_loader(fold, series, trained.first.config) for fold in folds]
        device = torch.device("cpu") if series is None else plan.device
        baselines, notes = find_baselines(trained, folds, loaders, device)
        beside = _list_beside(trained, members[-len(folds) :], baselines)
        sums = [
            _score_fold(_Fold(*one), which)
            for one in zip(folds, loaders, predictors, coverage, beside, strict=True)
        ]
        scores, *others = (merge_sums(many).compute() for many in zip(*sums, strict=True))
    metrics = {name: _get_overall(one) for name, one in zip(beside[-1], others, strict=True)}
    return {
        "run": str(trained.run.folder),
        "on": on if data is None else "data",
        "model": trained.describe(on_folds=bool(dataset.folds)),
        **_get_overall(scores),
        **({"classes": list(signature.classes)} if signature.classes else {}),
        "baselines": {
            name: {"what": one.what, **metrics[name]} if one.predict else None
            for name, one in baselines[-1].items()
        },
        **_summarize_members(trained, metrics),
        "coverage": compute_coverage(coverage) or None,
        "windows": sum(fold.num_windows[which] for fold in folds),
        "windows_without_target": sum(fold.left_out.get(which, 0) for fold in folds),
        "detail": scores,
        "plan": plan.to_dict(),
        "notes": [*dataset.notes, *notes],
    }


def _load_datasets(
    trained: TrainedRun, data: Any, *, resample: bool, joins: Mapping[str, Any] | None
) -> list[Dataset]:
    """Return each member's own data, or new data."""
    if data is not None:
        options: dict[str, Any] = {"targets": True, "resample": resample, "joins": joins}
        return [one.load_new(data, **options) for one in trained.members]
    if joins:
        raise UserError("joins are for new data; pass the rows to score as well (--data)")
    return load_own_sets(trained.members)


class _Fold(NamedTuple):
    """The windows of one fold, or all of them, and what is scored on them."""

    dataset: Dataset
    load_chunks: ChunkLoader
    model: FoldPredictor
    coverage: CoverageCounter
    beside: Mapping[str, Predictor]


def _make_loader(dataset: Dataset, series: Series | None, config: Config) -> ChunkLoader:
    rows = config.engine.buffer_rows
    return lambda which: dataset.iter_chunks(which, series, rows=rows)


def _list_beside(
    trained: TrainedRun,
    members: Sequence[Sequence[Predictor]],
    baselines: Sequence[Mapping[str, Baseline]],
) -> list[dict[str, Predictor]]:
    """Return by fold what is scored beside the model: the baselines, and an ensemble's members."""
    every = []
    for number, fold in enumerate(baselines):
        beside = {name: one.predict for name, one in fold.items() if one.predict}
        if members:
            names = (_name_member(member) for member in trained.members)
            beside |= zip(names, members[number], strict=True)
        every.append(beside)
    return every


def _name_member(member: Member) -> str:
    return f"{MEMBERS}/{member.name}"  # no baseline has a name like this


def _score_fold(fold: _Fold, which: str) -> list[Any]:
    """Return the sums of the model, and of each predictor beside it."""
    predictors = [fold.model.predict, *fold.beside.values()]

    def count_coverage() -> Iterator[list[PredictionBatch]]:
        for row in predict_side_by_side(predictors, fold.load_chunks, which):
            fold.coverage.add(row[0])
            yield row

    return accumulate_side_by_side(count_coverage(), fold.dataset)


def _get_overall(scores: Mapping[str, Any]) -> dict[str, Any]:
    scaled = {"scaled": scores["scaled"]} if "scaled" in scores else {}
    return {"metrics": scores["overall"], **scaled}


def _summarize_members(trained: TrainedRun, metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return the members' own metrics and their weights, which are those for new data."""
    if not trained.mixtures:
        return {}
    weights = trained.mixtures[-1].weights
    return {
        "members": [
            {
                "name": member.name,
                "kind": member.config.model.kind,
                "weight": weight,
                **metrics[_name_member(member)],
            }
            for member, weight in zip(trained.members, weights, strict=True)
        ]
    }
