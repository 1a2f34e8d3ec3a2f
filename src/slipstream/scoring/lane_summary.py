"""The figures of lanes: of each, of the best, of all as an ensemble, and over folds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import pyarrow as pa

from slipstream.data import prediction_columns
from slipstream.data.dataset import Dataset
from slipstream.data.folds import Fold
from slipstream.data.splits import SETS
from slipstream.engine.lanestate import LaneResult
from slipstream.engine.plan import Plan
from slipstream.engine.single import TrainingTask
from slipstream.errors import DivergedError, UserError
from slipstream.scoring import ensemble, predict
from slipstream.scoring import summary as scoring
from slipstream.scoring.batch import PredictionBatch
from slipstream.scoring.ensemble import (
    ENSEMBLE,
    MODEL,
    AbsoluteErrors,
    CoverageCounter,
    FoldRecord,
    HalfWidths,
)
from slipstream.scoring.summary import BaselineSums


class FoldLanes(NamedTuple):
    """The lanes of one fold; of a run without folds, all of them."""

    number: int
    """Of the fold, from 1"""
    fold: Fold | None
    fits: list[LaneResult]

    @property
    def fits_with_model(self) -> list[LaneResult]:
        """Those that have a model"""
        return [fit for fit in self.fits if fit.weights]

    def narrow_task(self, task: TrainingTask) -> TrainingTask:
        """The same task with this fold's windows."""
        return (
            task
            if self.fold is None
            else replace(task, dataset=task.dataset.select_fold(self.fold))
        )


def group_by_fold(fits: Sequence[LaneResult], dataset: Dataset, repeats: int) -> list[FoldLanes]:
    """By fold. A lane that never began is in none."""
    folds: list[Fold | None] = [*dataset.folds] or [None]
    groups = [FoldLanes(number, fold, []) for number, fold in enumerate(folds, start=1)]
    for fit in fits:
        groups[fit.number // repeats].fits.append(fit)
    return groups


def find_best_lane(fits: Sequence[LaneResult]) -> LaneResult | None:
    """The one with the lowest validation loss."""
    sound = [fit for fit in fits if fit.weights]
    return min(sound, key=lambda fit: fit.progress.best_loss, default=None)


def refuse_failed(groups: Sequence[FoldLanes]) -> None:
    for group in groups:
        if not group.fits:
            raise UserError(
                f"train.minutes had passed before a model of fold {group.number} began; raise it"
            )
        if not group.fits_with_model:
            where = f" of fold {group.number}" if group.fold else ""
            raise DivergedError(
                f"no validation loss{where} was finite, from any seed; lower train.lr, set "
                'train.clip, or set engine.precision = "fp32"'
            )


def count_windows(dataset: Dataset) -> dict[str, int]:
    """Windows by set, of all folds together."""
    counts = [fold.num_windows for fold in dataset.folds] or [dataset.num_windows]
    return {name: sum(count[name] for count in counts) for name in SETS}


@dataclass(frozen=True)
class FoldSums:
    """The sums over one group's windows."""

    best: int
    """Which of its lanes is the model"""
    lanes: dict[str, list[Any]]
    """val and test: of each lane that has a model"""
    model: dict[str, Any]
    """Every set"""
    ensemble: dict[str, Any]
    """val and test; empty where there is one lane"""
    reach: dict[str, HalfWidths]
    covered: dict[str, CoverageCounter]
    baselines: BaselineSums


def score_folds(task: TrainingTask, chosen: Plan, groups: Sequence[FoldLanes]) -> list[FoldSums]:
    """Every group's sums; the models' test predictions are written on the way."""
    with scoring.open_table_writer(task.run.folder / "predictions.parquet") as write:
        return [_score(group.narrow_task(task), chosen, group, write) for group in groups]


def _score(
    task: TrainingTask, chosen: Plan, group: FoldLanes, write: Callable[[pa.Table], None]
) -> FoldSums:
    dataset, fits = task.dataset, group.fits_with_model
    signature, pieces = dataset.signature, scoring.make_chunk_loader(task, with_time=True)
    predictors = [ensemble.build_predictor(f.weights, task.config, signature, chosen) for f in fits]
    model = min(range(len(fits)), key=lambda i: fits[i].progress.best_loss)
    who = {MODEL: model} | ({ENSEMBLE: len(fits)} if len(fits) > 1 else {})
    # a class has no interval: its probability says how sure it is
    who_errs = {} if signature.classes else who
    errors = {name: AbsoluteErrors(dataset.num_windows["val"], signature) for name in who_errs}

    def validated() -> Iterator[list[PredictionBatch]]:
        for beside in ensemble.predict_side_by_side(predictors, pieces, "val", signature):
            for name, index in who_errs.items():
                errors[name].add(beside[index])
            yield beside

    val = predict.accumulate_sums(validated(), dataset, signature.quantiles)
    reach = {name: errors[name].reach() if name in errors else {} for name in who}
    covered = {name: CoverageCounter(reach[name], signature.quantiles) for name in who}

    def tested() -> Iterator[list[PredictionBatch]]:
        for beside in ensemble.predict_side_by_side(predictors, pieces, "test", signature):
            for name, index in who_errs.items():
                covered[name].add(beside[index])
            table = predict.build_table(beside[model], dataset, reach[MODEL])
            if group.fold is not None:
                numbers = pa.array([group.number] * table.num_rows, pa.int32())
                table = table.add_column(1, prediction_columns.FOLD, numbers)
            write(table)
            yield beside

    test = predict.accumulate_sums(tested(), dataset, signature.quantiles)
    trained = ([chunk] for chunk in predict.predict_batches(predictors[model], pieces("train")))
    (train,) = predict.accumulate_sums(trained, dataset, signature.quantiles)
    return FoldSums(
        best=model,
        lanes={"val": val[: len(fits)], "test": test[: len(fits)]},
        model={"train": train, "val": val[model], "test": test[model]},
        ensemble={"val": val[-1], "test": test[-1]} if ENSEMBLE in who else {},
        reach=reach,
        covered=covered,
        baselines={},
    )


def score_fold_baselines(
    task: TrainingTask, groups: Sequence[FoldLanes], scored: Sequence[FoldSums]
) -> list[FoldSums]:
    """Each group's baselines beside it, fitted on its own training windows."""
    return [
        replace(one, baselines=scoring.score_baselines(group.narrow_task(task)))
        for group, one in zip(groups, scored, strict=True)
    ]


def save_folds(
    task: TrainingTask, groups: Sequence[FoldLanes], scored: Sequence[FoldSums], uses: str
) -> None:
    """Write lanes/."""
    kept = [
        FoldRecord(
            label=group.fold.label if group.fold else None,
            weights=[fit.weights for fit in group.fits_with_model],
            best=one.best,
            reach=one.reach,
        )
        for group, one in zip(groups, scored, strict=True)
    ]
    dataset = task.dataset
    ensemble.save_lanes(task.run, kept, dataset.scaler, dataset.signature.targets, uses)


def summarize_lanes(
    task: TrainingTask, groups: Sequence[FoldLanes], scored: Sequence[FoldSums]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """What was found, of all groups together, and the details."""
    dataset, settings = task.dataset, task.config
    kind = scoring.get_comparison_metric(settings)
    merged = predict.get_task_metrics(dataset).merged
    model = {name: merged([one.model[name] for one in scored]) for name in SETS}
    detail = {name: predict.compute_metrics(sums, dataset) for name, sums in model.items()}
    mine = scoring.group_by_set(detail)
    pooled = _pooled_baselines(dataset, scored)
    beside = {name: scoring.summarize_baseline(*one, dataset) for name, one in pooled.items()}
    ensembles = _pooled_ensemble(dataset, scored)
    together = _told_of_ensemble(dataset, scored, ensembles) if ensembles else None
    better = together is not None and (
        scoring.get_error(together, "val", kind) < scoring.get_error(mine, "val", kind)
    )
    tested = {name: sums["test"] for name, (_, sums) in pooled.items() if sums}
    if ensembles:
        tested[ENSEMBLE] = ensembles["test"]
    more, in_detail = predict.get_task_metrics(dataset).certainty(model["test"], tested, dataset)
    detail["test"] |= in_detail
    found: dict[str, Any] = {
        "run": str(task.run.folder),
        "name": settings.name,
        **mine,
        "windows": count_windows(dataset),
        "baselines": beside,
        "judged_by": kind,
        "beaten_by": scoring.find_better_baselines(mine, beside, kind),
        **more,
        "lanes": [
            told
            for group, one in zip(groups, scored, strict=True)
            for told in _lanes(dataset, group, one)
        ],
        **_spreads(task, groups, scored),
        "folds": [
            _fold(dataset, group, one)
            for group, one in zip(groups, scored, strict=True)
            if group.fold
        ]
        or None,
        "ensemble": together,
        "uses": ENSEMBLE if better else MODEL,
        "coverage": ensemble.compute_coverage([one.covered[MODEL] for one in scored]),
        "notes": [*dataset.notes, *_notes(groups, scored)],
    }
    return found, detail


def _overall(sums: dict[str, Any], dataset: Dataset) -> dict[str, Any]:
    return scoring.group_by_set(
        {which: predict.compute_metrics(one, dataset) for which, one in sums.items()}
    )


def _pooled_baselines(dataset: Dataset, scored: Sequence[FoldSums]) -> BaselineSums:
    """Of all groups together."""
    merged = predict.get_task_metrics(dataset).merged
    return {
        name: (
            baseline,
            {which: merged([one.baselines[name][1][which] for one in scored]) for which in sums},
        )
        for name, (baseline, sums) in scored[-1].baselines.items()
    }


def _pooled_ensemble(dataset: Dataset, scored: Sequence[FoldSums]) -> dict[str, Any]:
    """Of all groups together; nothing where one of them has none."""
    if not all(one.ensemble for one in scored):
        return {}
    merged = predict.get_task_metrics(dataset).merged
    return {which: merged([one.ensemble[which] for one in scored]) for which in ("val", "test")}


def _told_of_ensemble(
    dataset: Dataset, scored: Sequence[FoldSums], pooled: dict[str, Any]
) -> dict[str, Any]:
    covered = ensemble.compute_coverage([one.covered[ENSEMBLE] for one in scored])
    return _overall(pooled, dataset) | {"coverage": covered}


def _lanes(dataset: Dataset, group: FoldLanes, one: FoldSums) -> Iterator[dict[str, Any]]:
    sound = group.fits_with_model
    for fit in group.fits:
        told: dict[str, Any] = {
            "lane": fit.number,
            "seed": fit.lane.config.seed,
            "fold": group.number if group.fold else None,
            "label": group.fold.label if group.fold else None,
            "best": fit is sound[one.best],
            "val_loss": fit.progress.best_loss,
            "best_epoch": fit.progress.best_epoch,
            "epochs": fit.progress.epoch,
            "steps": fit.progress.step,
            "stopped": fit.stop_reason,
            "metrics": None,
        }
        if not dataset.signature.classes:
            told["scaled"] = None
        if fit.weights:
            sums = {which: tallies[sound.index(fit)] for which, tallies in one.lanes.items()}
            told |= _overall(sums, dataset)
        yield told


def _fold(dataset: Dataset, group: FoldLanes, one: FoldSums) -> dict[str, Any]:
    assert group.fold is not None
    return {
        "fold": group.number,
        "label": group.fold.label,
        "windows": group.fold.num_windows,
        **_overall(one.model, dataset),
        "ensemble": _overall(one.ensemble, dataset) if one.ensemble else None,
        "coverage": ensemble.compute_coverage([one.covered[MODEL]]),
        "baselines": {
            name: _overall(sums, dataset) if sums else None
            for name, (_, sums) in one.baselines.items()
        },
    }


def _spreads(
    task: TrainingTask, groups: Sequence[FoldLanes], scored: Sequence[FoldSums]
) -> dict[str, dict[str, dict[str, float]] | None]:
    """How each test metric, and each in standardised units where there are such, varies over the
    repeats; each repeat is scored on all folds together."""
    repeats = []
    for seed in range(task.config.seed, task.config.seed + task.config.train.repeats):
        mine = [
            one.lanes["test"][place]
            for group, one in zip(groups, scored, strict=True)
            for place, fit in enumerate(group.fits_with_model)
            if fit.lane.config.seed == seed
        ]
        if len(mine) == len(groups):
            merged = predict.get_task_metrics(task.dataset).merged(mine)
            repeats.append(predict.compute_metrics(merged, task.dataset))
    sections = {"spread": "overall"}
    if not task.dataset.signature.classes:
        sections |= {"scaled_spread": "scaled"}
    return {
        key: {name: _over([one[section][name] for one in repeats]) for name in repeats[0][section]}
        if len(repeats) > 1
        else None
        for key, section in sections.items()
    }


def _over(values: list[float]) -> dict[str, float]:
    """Nothing is known where one of them means nothing, as R² of a constant truth does."""
    if any(math.isnan(value) for value in values):
        return dict.fromkeys(("mean", "sd", "min", "max"), math.nan) | {"n": len(values)}
    return {
        "mean": statistics.fmean(values),
        "sd": statistics.stdev(values),
        "min": min(values),
        "max": max(values),
        "n": len(values),
    }


def _notes(groups: Sequence[FoldLanes], scored: Sequence[FoldSums]) -> Iterator[str]:
    for name, (baseline, sums) in scored[-1].baselines.items():
        if not sums:
            yield f"no {name} baseline: {baseline.what}"
    for group in groups:
        for fit in group.fits:
            if not fit.weights:
                where = f" of fold {group.number}" if group.fold else ""
                yield f"seed {fit.lane.config.seed}{where} has no model: {fit.stop_reason}"
