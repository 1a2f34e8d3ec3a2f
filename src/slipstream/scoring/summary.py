"""Score a trained model and the baselines, and summarize the scores."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, cast

import pyarrow as pa
import pyarrow.parquet
from torch import Tensor, nn

from slipstream.base import statistics
from slipstream.base.errors import DivergedError, UserError
from slipstream.base.statistics import PairedComparison, Spread
from slipstream.base.text import format_count
from slipstream.config import CLASS_LOSSES, Config
from slipstream.data import predictions
from slipstream.data.dataset import Dataset
from slipstream.data.folds import Fold
from slipstream.data.splits import SETS
from slipstream.data.table import open_table_writer
from slipstream.engine.context import RunContext
from slipstream.engine.lanes import LaneResult
from slipstream.events import Scoring
from slipstream.models.forecaster import set_execution
from slipstream.runs import Run
from slipstream.runs.lanes import ENSEMBLE, MODEL
from slipstream.runs.summary import (
    BaselineScores,
    ByStep,
    ComparedScores,
    FoldSummary,
    IntervalScores,
    LaneSummary,
    QuantileLevels,
    RunSummary,
    Scores,
    SetDetail,
    get_metrics,
)
from slipstream.scoring import ensemble
from slipstream.scoring.baselines import FoldWork, fit_baselines, save_baselines
from slipstream.scoring.batch import (
    Baseline,
    ChunkLoader,
    HalfWidths,
    PredictionBatch,
    Predictor,
)
from slipstream.scoring.boosting import BackgroundBoosting
from slipstream.scoring.ensemble import FoldRecord, IntervalSums
from slipstream.scoring.predict import (
    WindowFilter,
    accumulate_side_by_side,
    build_tables,
    get_task_metrics,
    make_predictor,
    make_window_filter,
    predict_batches,
    predict_side_by_side,
)

PREDICTIONS = "predictions.parquet"
SetSums = dict[str, Any]
"""The sums over the windows of each set, by its name"""
BaselineSums = dict[str, tuple[Baseline, SetSums]]
"""Each baseline and its sums, by name; empty sums where the baseline is not meaningful"""


def make_chunk_loader(context: RunContext, *, with_time: bool = False) -> ChunkLoader:
    """Return a function from the name of a set to its windows; `with_time` adds the times to
    windows of the test set."""
    dataset, rows = context.dataset, context.config.engine.buffer_rows
    return lambda set_name: dataset.iter_chunks(
        set_name, context.series, rows=rows, with_time=with_time and set_name == "test"
    )


def join_unfiltered(
    rows: Iterable[list[PredictionBatch]], window_filter: WindowFilter, positions: Sequence[int]
) -> Iterator[list[PredictionBatch]]:
    """Yield rows of all filtered batches, followed by the unfiltered batches at these positions."""
    for filtered, row in window_filter.filter_rows(rows):
        yield [*filtered, *(row[position] for position in positions)]


def summarize_filter(config: Config, dataset: Dataset, unfiltered: SetSums) -> RunSummary:
    """Return the part of the summary on the filter: what it is, and the overall metrics without it
    by set; nothing without a filter."""
    window_filter = make_window_filter(config, dataset)
    if window_filter is None:
        return {}
    return {"filter": window_filter.describe(), "unfiltered": summarize_sums(unfiltered)}


def score_baselines(
    dataset: Dataset, load_chunks: ChunkLoader, baselines: Mapping[str, Baseline] | None = None
) -> BaselineSums:
    """Score these baselines, or baselines fitted to the data set's own training windows, on every
    set."""
    baselines = baselines or fit_baselines(dataset, load_chunks)
    scored: BaselineSums = {name: (baseline, {}) for name, baseline in baselines.items()}
    usable = {name: baseline.predict for name, baseline in baselines.items() if baseline.predict}
    for set_name in dataset.num_windows:
        rows = predict_side_by_side([*usable.values()], load_chunks, set_name)
        for name, sums in zip(usable, accumulate_side_by_side(rows, dataset), strict=True):
            scored[name][1][set_name] = sums
    return scored


def save_scored_baselines(run: Run, folds: Sequence[BaselineSums]) -> None:
    """Write baselines/: the baselines of every fold, or of a run without folds."""
    save_baselines(
        run, [{name: baseline for name, (baseline, _) in fold.items()} for fold in folds]
    )


def summarize_scores(
    run: Run,
    config: Config,
    dataset: Dataset,
    model: SetSums,
    baselines: BaselineSums,
    references: Mapping[str, Any] = MappingProxyType({}),
) -> tuple[RunSummary, dict[str, SetDetail]]:
    """Return a run's summary as far as its scores go, and the metrics of every set in detail.

    `references` are further sums over the test set that the model is compared with, as with the
    baselines.
    """
    detail: dict[str, SetDetail] = {name: sums.compute() for name, sums in model.items()}
    beside = {
        name: summarize_baseline(baseline, sums, dataset) if sums else None
        for name, (baseline, sums) in baselines.items()
    }
    tested = {name: sums["test"] for name, (_, sums) in baselines.items() if sums}
    metrics, metric = get_task_metrics(dataset), get_comparison_metric(config)
    comparison, more = metrics.describe_test(model["test"], {**tested, **references}, dataset)
    detail["test"] |= cast(SetDetail, more)
    paired = metrics.compare_with(model["test"], tested, context=dataset.signature.context)
    summary: RunSummary = {
        "run": str(run.folder),
        "name": config.name,
        **cast(RunSummary, group_by_set(detail)),
        "windows": count_windows(dataset),
        "windows_without_target": dataset.left_out,
        "baselines": beside,
        "judged_by": metric,
        **cast(RunSummary, summarize_comparison(paired, metric)),
        **cast(RunSummary, comparison),
        **list_quantiles(dataset),
    }
    return summary, detail


def list_quantiles(dataset: Dataset) -> QuantileLevels:
    """Return the levels of predicted quantiles, where there are any."""
    levels = dataset.signature.quantiles
    return {"quantiles": list(levels)} if levels else {}


def summarize_comparison(paired: PairedComparison, metric: str) -> ComparedScores:
    """Return the verdict on a model, the baselines that are better, and every difference."""
    key = metric if metric in paired.differences else f"scaled_{metric}"
    verdicts = {name: difference["verdict"] for name, difference in paired.differences[key].items()}
    return {
        "beaten_by": [name for name, verdict in verdicts.items() if verdict == statistics.WORSE],
        "against_baselines": {
            "verdict": statistics.combine_verdicts(verdicts.values()),
            "metric": key,
            "level": statistics.LEVEL,
            "how": paired.how,
            "differences": paired.differences,
        },
    }


def count_windows(dataset: Dataset) -> dict[str, int]:
    """Return the number of windows by set, of all folds together."""
    counts = [fold.num_windows for fold in dataset.folds] or [dataset.num_windows]
    return {set_name: sum(count[set_name] for count in counts) for set_name in counts[0]}


def group_by_set(detail: Mapping[str, SetDetail]) -> Scores:
    """Return each set's overall metrics, and if there are any, those in standardised units."""
    scores: Scores = {"metrics": {name: metrics["overall"] for name, metrics in detail.items()}}
    if all("scaled" in metrics for metrics in detail.values()):
        scores["scaled"] = {name: metrics["scaled"] for name, metrics in detail.items()}
    return scores


def summarize_sums(sums: SetSums) -> Scores:
    """Return the overall metrics from each set's sums."""
    return group_by_set({set_name: total.compute() for set_name, total in sums.items()})


def summarize_baseline(baseline: Baseline, sums: SetSums, dataset: Dataset) -> BaselineScores:
    """Return a baseline's overall metrics, the headline metric of every predicted row and, for
    numbers, the metrics of each target."""
    detail: dict[str, SetDetail] = {name: total.compute() for name, total in sums.items()}
    test, headline = detail["test"], get_task_metrics(dataset).HEADLINE
    scores = cast(BaselineScores, group_by_set(detail))
    result: BaselineScores = {"what": baseline.description, **scores}
    key: ByStep = "log_loss_by_step" if dataset.signature.classes else "mae_by_step"
    result[key] = [row[headline] for row in test["per_step"]]
    if "per_target" in test:
        result["per_target"] = test["per_target"]
    return result


def list_missing_baselines(baselines: BaselineSums) -> list[str]:
    """List the baselines without scores, with the reason."""
    return [
        f"no {name} baseline: {baseline.description}"
        for name, (baseline, sums) in baselines.items()
        if not sums
    ]


def get_comparison_metric(config: Config) -> str:
    """Return the metric by which models are compared: an error in standardised units, or for
    classes the log-loss. With class weights, which shift the probabilities in favour of rare
    classes, it is the balanced accuracy."""
    if config.train.loss in CLASS_LOSSES:
        return "log_loss" if config.train.class_weights == "none" else "balanced_accuracy"
    return "mae" if config.train.loss in ("mae", "quantile") else "mse"


def get_metric(scores: Scores, set_name: str, metric: str) -> float:
    """Return a metric of a model or a baseline on one set; NaN where it is undefined."""
    value = (scores.get("scaled") or get_metrics(scores))[set_name][metric]
    return math.nan if value is None else float(value)


def get_metric_over_seeds(summary: ComparedScores, metric: str) -> Spread | None:
    """Return the spread of a metric over the seeds on the test set; None with a single seed."""
    spread = summary.get("scaled_spread") or summary["spread"]
    return spread[metric] if spread else None


def merge_sums(many: Sequence[Any]) -> Any:
    """Return the sums over several sets of the same shape."""
    return many[0].merge(many[1:]) if len(many) > 1 else many[0]


class FoldLanes(NamedTuple):
    """The lanes of one fold; all lanes of a run without folds."""

    number: int
    """The number of the fold, from 1"""
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

    def narrow(self, context: RunContext) -> RunContext:
        """Return the run context narrowed to this fold's windows."""
        if self.fold is None:
            return context
        return replace(context, dataset=context.dataset.select_fold(self.fold))


def group_by_fold(fits: Sequence[LaneResult], dataset: Dataset, repeats: int) -> list[FoldLanes]:
    """Group lanes by fold, without the lanes that never began."""
    folds: list[Fold | None] = [*dataset.folds] or [None]
    groups = [FoldLanes(number, fold, []) for number, fold in enumerate(folds, start=1)]
    for fit in fits:
        groups[fit.number // repeats].fits.append(fit)
    return groups


def find_best_lane(fits: Sequence[LaneResult]) -> LaneResult | None:
    """Return the lane with the lowest validation loss."""
    with_model = [fit for fit in fits if fit.weights]
    return min(with_model, key=lambda fit: fit.progress.best_loss, default=None)


def refuse_failed(config: Config, groups: Sequence[FoldLanes]) -> None:
    """Raise an error if a fold has no model."""
    remedies = 'lower train.lr, set train.clip, or set engine.precision = "fp32"'
    for group in groups:
        if not group.fits:
            raise UserError(
                f"train.minutes had passed before a model of fold {group.number} began; raise it"
            )
        if group.fits_with_model:
            continue
        if not config.trains_lanes:
            step = group.fits[0].progress.step
            raise UserError(f"no validation loss was finite up to step {step}; {remedies}")
        raise DivergedError(
            f"no validation loss{group.where} was finite, from any seed; {remedies}"
        )


@dataclass(frozen=True)
class FoldSums:
    """The sums over one fold's windows."""

    group: FoldLanes
    best: int
    """The position of the run's model among the lanes that have a model"""
    lanes: dict[str, list[Any]]
    """The sums of each lane that has a model, for val and test"""
    model: SetSums
    """The model's sums, for every set"""
    ensemble: SetSums
    """The ensemble's sums, for val and test; empty with a single lane"""
    half_widths: dict[str, HalfWidths]
    intervals: dict[str, IntervalSums]
    """The sums over the intervals on the test set, by predictor"""
    baselines: BaselineSums
    unfiltered: dict[str, SetSums]
    """The sums of the model and the ensemble without `predict.filter`, where there is one"""


def score_folds(context: RunContext, groups: Sequence[FoldLanes]) -> list[FoldSums]:
    """Return every fold's sums, and write the models' predictions for the test sets."""
    scored = []
    with open_table_writer(context.run.folder / PREDICTIONS) as write:
        for group in groups:
            subject = "the model"
            if context.config.trains_lanes:
                subject = format_count(len(group.fits_with_model), "model")
            context.run.append(Scoring(what=f"{subject}{_name_fold(group, groups)}"))
            scored.append(_score_fold(group.narrow(context), group, write))
    return scored


def _name_fold(group: FoldLanes, groups: Sequence[FoldLanes]) -> str:
    return f" of fold {group.number} of {len(groups)}" if len(groups) > 1 else ""


def _score_fold(
    context: RunContext, group: FoldLanes, write: Callable[[pa.Table], None]
) -> FoldSums:
    dataset, fits = context.dataset, group.fits_with_model
    load_chunks = make_chunk_loader(context, with_time=True)
    predictors = _build_predictors(context, fits)
    best = min(range(len(fits)), key=lambda i: fits[i].progress.best_loss)
    positions = {MODEL: best} | ({ENSEMBLE: len(fits)} if len(fits) > 1 else {})

    def write_row(row: list[PredictionBatch], half_widths: dict[str, HalfWidths]) -> None:
        for table in build_tables(row[best], dataset, half_widths.get(MODEL)):
            if group.fold is not None:
                numbers = pa.array([group.number] * table.num_rows, pa.int32())
                table = table.add_column(1, predictions.FOLD, numbers)
            write(table)

    window_filter = make_window_filter(context.config, dataset)
    mixing = ensemble.Mixing(filter=window_filter)
    # they are stored in lanes/, which a run of one model does not have
    intervals = context.config.trains_lanes
    scores = ensemble.score_with_mean(
        predictors, dataset, load_chunks, positions, write_row, mixing, intervals=intervals
    )
    val, test, unfiltered = scores.val, scores.test, scores.unfiltered
    rows: Iterable[list[PredictionBatch]]
    rows = ([batch] for batch in predict_batches(predictors[best], load_chunks("train")))
    if window_filter:
        rows = join_unfiltered(rows, window_filter, [0])
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
        intervals=scores.intervals,
        baselines={},
        unfiltered=unfiltered,
    )


def _build_predictors(context: RunContext, fits: Sequence[LaneResult]) -> list[Predictor]:
    """Return a predictor of each lane; the only lane of a run predicts by the model that was
    trained."""
    config, dataset, plan = context.config, context.dataset, context.plan
    if len(context.lanes) > 1:
        return [ensemble.build_predictor(fit.weights, config, dataset, plan) for fit in fits]
    (fit,) = fits
    model = restore_model(context, fit.weights)
    return [make_predictor(model, plan, dataset.signature, dataset.scaler)]


def restore_model(context: RunContext, weights: Mapping[str, Tensor]) -> nn.Module:
    """Return the trained model with these weights, set up to run as planned."""
    model, plan = context.model, context.plan
    model.load_state_dict(weights)
    model.eval()
    # a run resumed after its last step has not built the step, which does it
    set_execution(model, algorithms=plan.rnn, recompute=plan.recompute, compiled=plan.compile)
    return model


def score_fold_baselines(
    context: RunContext,
    folds: Sequence[FoldSums],
    scored: list[BaselineSums],
    boosting: BackgroundBoosting | None = None,
) -> list[FoldSums]:
    """Add the baselines of each fold, fitted on its own training windows, and save them.

    Where another run on the same data has scored them, `scored` has them already; otherwise they
    are added to it. `boosting` fits the trees beside the training.
    """
    work = FoldWork(context.dataset) if context.dataset.folds else None
    groups = [fold.group for fold in folds]
    trees = boosting.wait() if boosting else None
    for number, fold in enumerate(folds[len(scored) :], start=len(scored)):
        context.run.append(Scoring(what=f"the baselines{_name_fold(fold.group, groups)}"))
        narrow = fold.group.narrow(context)
        load_chunks = make_chunk_loader(narrow)
        fitted = fit_baselines(narrow.dataset, load_chunks, work, trees[number] if trees else None)
        scored.append(score_baselines(narrow.dataset, load_chunks, fitted))
    save_scored_baselines(context.run, scored)
    return [replace(fold, baselines=sums) for fold, sums in zip(folds, scored, strict=True)]


def save_folds(context: RunContext, folds: Sequence[FoldSums], uses: str) -> None:
    """Write lanes/: the weights and metadata of every fold's lanes."""
    records = []
    for fold in folds:
        weights = [fit.weights for fit in fold.group.fits_with_model]
        records.append(FoldRecord(fold.group.label, weights, fold.best, fold.half_widths))
    scaler, targets = context.dataset.scaler, context.dataset.signature.targets
    ensemble.save_lanes(context.run, records, scaler, targets, uses)


def summarize_folds(
    context: RunContext, folds: Sequence[FoldSums]
) -> tuple[RunSummary, dict[str, SetDetail]]:
    """Return the run's summary, of all folds together, and the metrics in detail."""
    config, dataset = context.config, context.dataset
    model = {set_name: merge_sums([fold.model[set_name] for fold in folds]) for set_name in SETS}
    together: SetSums = {}
    if all(fold.ensemble for fold in folds):
        together = {
            set_name: merge_sums([fold.ensemble[set_name] for fold in folds])
            for set_name in ("val", "test")
        }
    references = {ENSEMBLE: together["test"]} if together else {}
    baselines = merge_baselines([fold.baselines for fold in folds])
    scores, detail = summarize_scores(context.run, config, dataset, model, baselines, references)
    scores |= summarize_filter(config, dataset, _merge_unfiltered(folds))
    if config.trains_lanes:
        scores |= _summarize_lanes(context, folds, scores, together, baselines)
    scores["notes"] = [
        *dataset.notes,
        *list_missing_baselines(folds[-1].baselines),
        *(
            f"seed {fit.lane.config.seed}{fold.group.where} has no model: {fit.stop_reason}"
            for fold in folds
            for fit in fold.group.fits
            if not fit.weights
        ),
    ]
    return scores, detail


def _summarize_lanes(
    context: RunContext,
    folds: Sequence[FoldSums],
    scores: RunSummary,
    together: SetSums,
    baselines: BaselineSums,
) -> RunSummary:
    """Return the part of the summary on each lane, on each fold and on the mean of the lanes, whose
    sums are `together`; empty where a fold has one lane."""
    by_ensemble: ComparedScores | None = None
    uses, metric = MODEL, scores["judged_by"]
    if together:
        by_ensemble = {
            **cast(ComparedScores, summarize_sums(together)),
            **cast(ComparedScores, _score_intervals(folds, ENSEMBLE)),
            **_compare_ensemble(context, together["test"], baselines, metric),
        }
        mean, single = (get_metric(summary, "val", metric) for summary in (by_ensemble, scores))
        if statistics.is_better(mean, single, metric):
            uses = ENSEMBLE
    return {
        "lanes": [lane for fold in folds for lane in _summarize_each(fold, scores)],
        **cast(RunSummary, _summarize_spreads(context, folds)),
        "folds": [_summarize_fold(fold) for fold in folds if fold.group.fold] or None,
        "ensemble": by_ensemble,
        "uses": uses,
        **cast(RunSummary, _score_intervals(folds, MODEL)),
    }


def _compare_ensemble(
    context: RunContext, test: Any, baselines: BaselineSums, metric: str
) -> ComparedScores:
    """Compare the ensemble with the baselines on the test set, in the same way as the model."""
    tested = {name: sums["test"] for name, (_, sums) in baselines.items() if sums}
    length = context.dataset.signature.context
    paired = get_task_metrics(context.dataset).compare_with(test, tested, context=length)
    return summarize_comparison(paired, metric)


def _merge_unfiltered(folds: Sequence[FoldSums]) -> SetSums:
    """Return the model's sums without the filter; empty where there is none."""
    many = [fold.unfiltered[MODEL] for fold in folds if fold.unfiltered]
    return (
        {set_name: merge_sums([sums[set_name] for sums in many]) for set_name in many[0]}
        if many
        else {}
    )


def merge_baselines(folds: Sequence[BaselineSums]) -> BaselineSums:
    """Return the last fold's baselines with the sums over all folds."""
    return {
        name: (
            baseline,
            {
                set_name: merge_sums([fold[name][1][set_name] for fold in folds])
                for set_name in sums
            },
        )
        for name, (baseline, sums) in folds[-1].items()
    }


def _score_intervals(folds: Sequence[FoldSums], predictor: str) -> IntervalScores:
    return ensemble.score_intervals([fold.intervals[predictor] for fold in folds])


def _summarize_each(sums: FoldSums, model: Scores) -> Iterator[LaneSummary]:
    """Yield the summary of each lane, with the same metrics as the model."""
    group, with_model = sums.group, sums.group.fits_with_model
    for fit in group.fits:
        scores: Scores = (
            {"metrics": None, "scaled": None} if "scaled" in model else {"metrics": None}
        )
        if fit.weights:
            position = with_model.index(fit)
            scores = summarize_sums(
                {set_name: many[position] for set_name, many in sums.lanes.items()}
            )
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


def _summarize_fold(sums: FoldSums) -> FoldSummary:
    return {
        "fold": sums.group.number,
        "label": sums.group.label,
        "windows": sums.group.fold.num_windows if sums.group.fold else None,
        **cast(FoldSummary, summarize_sums(sums.model)),
        "ensemble": summarize_sums(sums.ensemble) if sums.ensemble else None,
        **cast(FoldSummary, _score_intervals([sums], MODEL)),
        "baselines": {
            name: cast(BaselineScores, summarize_sums(by_set)) if by_set else None
            for name, (_, by_set) in sums.baselines.items()
        },
    }


def _summarize_spreads(context: RunContext, folds: Sequence[FoldSums]) -> ComparedScores:
    """Return the spread of each test metric over the repeats, also in standardised units.

    Each repeat is scored on all folds together.
    """
    repeats = []
    for seed in range(context.config.seed, context.config.seed + context.config.train.repeats):
        sums = [
            fold.lanes["test"][position]
            for fold in folds
            for position, fit in enumerate(fold.group.fits_with_model)
            if fit.lane.config.seed == seed
        ]
        if len(sums) == len(folds):
            repeats.append(merge_sums(sums).compute())

    def summarize(section: Literal["overall", "scaled"]) -> dict[str, Spread] | None:
        many = [scores[section] for scores in repeats]
        if len(many) < 2:
            return None
        return {name: statistics.summarize_spread([m[name] for m in many]) for name in many[0]}

    result: ComparedScores = {"spread": summarize("overall")}
    if not context.dataset.signature.classes:
        result["scaled_spread"] = summarize("scaled")
    return result
