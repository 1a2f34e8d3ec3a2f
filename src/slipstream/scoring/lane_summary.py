"""Score the lanes of a run: each lane, the best, their ensemble, over all folds; summarize them."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import pyarrow as pa

from slipstream import stats
from slipstream.data import prediction_columns
from slipstream.data.dataset import Dataset
from slipstream.data.folds import Fold
from slipstream.data.splits import SETS
from slipstream.engine.plan import Plan
from slipstream.engine.progress import LaneResult
from slipstream.engine.single import TrainingTask
from slipstream.errors import DivergedError, UserError
from slipstream.portable.lanes import ENSEMBLE, MODEL
from slipstream.scoring import ensemble, summary
from slipstream.scoring.baselines import FoldWork, fit_baselines
from slipstream.scoring.batch import HalfWidths, PredictionBatch
from slipstream.scoring.ensemble import CoverageCounter, FoldRecord
from slipstream.scoring.filtering import make_window_filter
from slipstream.scoring.predict import (
    accumulate_side_by_side,
    build_table,
    get_task_metrics,
    predict_batches,
)
from slipstream.scoring.summary import BaselineSums, SetSums, merge_sums, summarize_sums
from slipstream.text import format_count


class FoldLanes(NamedTuple):
    """The lanes of one fold; of a run without folds, all of them."""

    number: int
    """Of the fold, from 1"""
    fold: Fold | None
    fits: list[LaneResult]

    @property
    def fits_with_model(self) -> list[LaneResult]:
        return [fit for fit in self.fits if fit.weights]

    @property
    def label(self) -> str | None:
        return self.fold.label if self.fold else None

    @property
    def where(self) -> str:
        return f" of fold {self.number}" if self.fold else ""

    def narrow_task(self, task: TrainingTask) -> TrainingTask:
        """Return the same task with this fold's windows."""
        fold = self.fold
        return task if fold is None else replace(task, dataset=task.dataset.select_fold(fold))


def group_by_fold(fits: Sequence[LaneResult], dataset: Dataset, repeats: int) -> list[FoldLanes]:
    """Group lanes by fold. A lane that never began is in none."""
    folds: list[Fold | None] = [*dataset.folds] or [None]
    groups = [FoldLanes(number, fold, []) for number, fold in enumerate(folds, start=1)]
    for fit in fits:
        groups[fit.number // repeats].fits.append(fit)
    return groups


def find_best_lane(fits: Sequence[LaneResult]) -> LaneResult | None:
    """Return the lane with the lowest validation loss."""
    with_model = [fit for fit in fits if fit.weights]
    return min(with_model, key=lambda fit: fit.progress.best_loss, default=None)


def refuse_failed(groups: Sequence[FoldLanes]) -> None:
    """Raise an error if a fold has no model."""
    for group in groups:
        if not group.fits:
            raise UserError(
                f"train.minutes had passed before a model of fold {group.number} began; raise it"
            )
        if not group.fits_with_model:
            raise DivergedError(
                f"no validation loss{group.where} was finite, from any seed; lower train.lr, set "
                'train.clip, or set engine.precision = "fp32"'
            )


@dataclass(frozen=True)
class FoldSums:
    """The sums over one fold's windows."""

    group: FoldLanes
    best: int
    """The lane that is the model, among those that have one"""
    lanes: dict[str, list[Any]]
    """val and test: of each lane that has a model"""
    model: SetSums
    """Every set"""
    ensemble: SetSums
    """val and test; empty with a single lane"""
    half_widths: dict[str, HalfWidths]
    coverage: dict[str, CoverageCounter]
    baselines: BaselineSums
    unfiltered: dict[str, SetSums]
    """Of the model, and the ensemble: without `predict.filter`, where there is one"""


def score_folds(task: TrainingTask, plan: Plan, groups: Sequence[FoldLanes]) -> list[FoldSums]:
    """Return every fold's sums, and write the models' predictions for the test sets."""
    scored = []
    with summary.open_table_writer(task.run.folder / summary.PREDICTIONS) as write:
        for group in groups:
            what = format_count(len(group.fits_with_model), "model")
            task.run.append("scoring", what=f"{what}{_name_fold(group, groups)}")
            scored.append(_score_fold(group.narrow_task(task), plan, group, write))
    return scored


def _name_fold(group: FoldLanes, groups: Sequence[FoldLanes]) -> str:
    return f" of fold {group.number} of {len(groups)}" if len(groups) > 1 else ""


def _score_fold(
    task: TrainingTask, plan: Plan, group: FoldLanes, write: Callable[[pa.Table], None]
) -> FoldSums:
    dataset, fits = task.dataset, group.fits_with_model
    load_chunks = summary.make_chunk_loader(task, with_time=True)
    predictors = [ensemble.build_predictor(fit.weights, task.config, dataset, plan) for fit in fits]
    best = min(range(len(fits)), key=lambda i: fits[i].progress.best_loss)
    positions = {MODEL: best} | ({ENSEMBLE: len(fits)} if len(fits) > 1 else {})

    def write_row(row: list[PredictionBatch], half_widths: dict[str, HalfWidths]) -> None:
        table = build_table(row[best], dataset, half_widths[MODEL])
        if group.fold is not None:
            numbers = pa.array([group.number] * table.num_rows, pa.int32())
            table = table.add_column(1, prediction_columns.FOLD, numbers)
        write(table)

    window_filter = make_window_filter(task.config, dataset)
    mixing = ensemble.Mixing(filter=window_filter)
    scores = ensemble.score_with_mean(
        predictors, dataset, load_chunks, positions, write_row, mixing
    )
    val, test, unfiltered = scores.val, scores.test, scores.unfiltered
    rows: Iterable[list[PredictionBatch]]
    rows = ([one] for one in predict_batches(predictors[best], load_chunks("train")))
    if window_filter:
        rows = summary.join_unfiltered(rows, window_filter, [0])
    train, *raw = accumulate_side_by_side(rows, dataset)
    if raw:
        unfiltered[MODEL] = {"train": raw[0], **unfiltered[MODEL]}
    return FoldSums(
        group=group,
        best=best,
        lanes={"val": val[: len(fits)], "test": test[: len(fits)]},
        model={"train": train, "val": val[best], "test": test[best]},
        ensemble={"val": val[-1], "test": test[-1]} if ENSEMBLE in positions else {},
        half_widths=scores.half_widths,
        coverage=scores.coverage,
        baselines={},
        unfiltered=unfiltered,
    )


def score_fold_baselines(
    task: TrainingTask, folds: Sequence[FoldSums], scored: list[BaselineSums]
) -> list[FoldSums]:
    """Add the baselines of each fold, fitted on its own training windows, and save them.

    `scored` has them already where another run on the same data did this; else it has them then.
    """
    work = FoldWork(task.dataset) if task.dataset.folds else None
    groups = [fold.group for fold in folds]
    for fold in folds[len(scored) :]:
        task.run.append("scoring", what=f"the baselines{_name_fold(fold.group, groups)}")
        narrow = fold.group.narrow_task(task)
        load_chunks = summary.make_chunk_loader(narrow)
        fitted = fit_baselines(narrow.dataset, load_chunks, work)
        scored.append(summary.score_baselines(narrow.dataset, load_chunks, fitted))
    summary.save_scored_baselines(task.run, scored)
    return [replace(fold, baselines=one) for fold, one in zip(folds, scored, strict=True)]


def save_folds(task: TrainingTask, folds: Sequence[FoldSums], uses: str) -> None:
    """Write lanes/."""
    records = []
    for fold in folds:
        weights = [fit.weights for fit in fold.group.fits_with_model]
        records.append(FoldRecord(fold.group.label, weights, fold.best, fold.half_widths))
    scaler, targets = task.dataset.scaler, task.dataset.signature.targets
    ensemble.save_lanes(task.run, records, scaler, targets, uses)


def summarize_lanes(
    task: TrainingTask, folds: Sequence[FoldSums]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the run's summary, of all folds together, and the metrics in detail."""
    model = {which: merge_sums([fold.model[which] for fold in folds]) for which in SETS}
    together: SetSums = {}
    if all(fold.ensemble for fold in folds):
        together = {
            which: merge_sums([fold.ensemble[which] for fold in folds]) for which in ("val", "test")
        }
    others = {ENSEMBLE: together["test"]} if together else {}
    baselines = merge_baselines([fold.baselines for fold in folds])
    scores, detail = summary.summarize_scores(
        task.run, task.config, task.dataset, model, baselines, others
    )
    by_ensemble, uses = None, MODEL
    if together:
        by_ensemble = summarize_sums(together) | {"coverage": _compute_coverage(folds, ENSEMBLE)}
        by_ensemble |= _compare_ensemble(task, together["test"], baselines, scores["judged_by"])
        metric = scores["judged_by"]
        mean, single = (summary.get_metric(one, "val", metric) for one in (by_ensemble, scores))
        if stats.is_better(mean, single, metric):
            uses = ENSEMBLE
    return scores | {
        **summary.summarize_filter(task.config, task.dataset, _merge_unfiltered(folds)),
        "lanes": [lane for fold in folds for lane in _summarize_each(fold, scores)],
        **_summarize_spreads(task, folds),
        "folds": [_summarize_fold(fold) for fold in folds if fold.group.fold] or None,
        "ensemble": by_ensemble,
        "uses": uses,
        "coverage": _compute_coverage(folds, MODEL),
        "notes": [
            *task.dataset.notes,
            *summary.list_missing_baselines(folds[-1].baselines),
            *(
                f"seed {fit.lane.config.seed}{fold.group.where} has no model: {fit.stop_reason}"
                for fold in folds
                for fit in fold.group.fits
                if not fit.weights
            ),
        ],
    }, detail


def _compare_ensemble(
    task: TrainingTask, test: Any, baselines: BaselineSums, metric: str
) -> dict[str, Any]:
    """Compare the ensemble with the baselines on the test set, as the model is."""
    tested = {name: sums["test"] for name, (_, sums) in baselines.items() if sums}
    context = task.dataset.signature.context
    paired = get_task_metrics(task.dataset).compare_with(test, tested, context=context)
    return summary.summarize_comparison(paired, metric)


def _merge_unfiltered(folds: Sequence[FoldSums]) -> SetSums:
    """Return the model's sums without the filter; empty where there is none."""
    many = [fold.unfiltered[MODEL] for fold in folds if fold.unfiltered]
    return {which: merge_sums([one[which] for one in many]) for which in many[0]} if many else {}


def merge_baselines(folds: Sequence[BaselineSums]) -> BaselineSums:
    """Return the last fold's baselines with the sums over all folds."""
    return {
        name: (
            baseline,
            {which: merge_sums([one[name][1][which] for one in folds]) for which in sums},
        )
        for name, (baseline, sums) in folds[-1].items()
    }


def _compute_coverage(folds: Sequence[FoldSums], who: str) -> dict[str, float]:
    return ensemble.compute_coverage([fold.coverage[who] for fold in folds])


def _summarize_each(sums: FoldSums, model: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the summary of each lane, with the model's kinds of metrics."""
    group, with_model = sums.group, sums.group.fits_with_model
    for fit in group.fits:
        scores: dict[str, Any] = {key: None for key in ("metrics", "scaled") if key in model}
        if fit.weights:
            position = with_model.index(fit)
            scores = summarize_sums({which: many[position] for which, many in sums.lanes.items()})
        yield {
            "lane": fit.number,
            "seed": fit.lane.config.seed,
            "fold": group.number if group.fold else None,
            "label": group.label,
            "best": fit is with_model[sums.best],
            "val_loss": fit.progress.best_loss,
            "best_epoch": fit.progress.best_epoch,
            "epochs": fit.progress.epoch,
            "steps": fit.progress.step,
            "stopped": fit.stop_reason,
            **scores,
        }


def _summarize_fold(sums: FoldSums) -> dict[str, Any]:
    return {
        "fold": sums.group.number,
        "label": sums.group.label,
        "windows": sums.group.fold and sums.group.fold.num_windows,
        **summarize_sums(sums.model),
        "ensemble": summarize_sums(sums.ensemble) if sums.ensemble else None,
        "coverage": _compute_coverage([sums], MODEL),
        "baselines": {
            name: summarize_sums(by_set) if by_set else None
            for name, (_, by_set) in sums.baselines.items()
        },
    }


def _summarize_spreads(
    task: TrainingTask, folds: Sequence[FoldSums]
) -> dict[str, dict[str, Any] | None]:
    """Return how each test metric varies over the repeats, also in standardised units.

    Each repeat is scored on all folds together.
    """
    repeats = []
    for seed in range(task.config.seed, task.config.seed + task.config.train.repeats):
        sums = [
            fold.lanes["test"][position]
            for fold in folds
            for position, fit in enumerate(fold.group.fits_with_model)
            if fit.lane.config.seed == seed
        ]
        if len(sums) == len(folds):
            repeats.append(merge_sums(sums).compute())
    result: dict[str, dict[str, Any] | None] = {"spread": None}
    if not task.dataset.signature.classes:
        result["scaled_spread"] = None
    for key in result if len(repeats) > 1 else ():
        many = [one["scaled" if key == "scaled_spread" else "overall"] for one in repeats]
        result[key] = {name: stats.summarize_spread([m[name] for m in many]) for name in many[0]}
    return result
