"""Fit the members' weights, and score the ensemble beside its members and the baselines."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import pyarrow as pa

from slipstream import stats
from slipstream.config import Config
from slipstream.data import prediction_columns
from slipstream.data.dataset import Dataset
from slipstream.data.windows import Series
from slipstream.inference.mixture import MemberErrors
from slipstream.inference.trained import Member
from slipstream.portable.lanes import ENSEMBLE, MODEL
from slipstream.portable.mixture import FoldMixture
from slipstream.runs import Run
from slipstream.scoring import ensemble, lane_summary, summary
from slipstream.scoring.baselines import fit_baselines
from slipstream.scoring.batch import ChunkLoader, HalfWidths, PredictionBatch, Predictor
from slipstream.scoring.ensemble import MeanScores
from slipstream.scoring.filtering import make_window_filter
from slipstream.scoring.predict import accumulate_side_by_side, build_table, predict_side_by_side
from slipstream.scoring.summary import BaselineSums, merge_sums, summarize_sums

Write = Callable[[pa.Table], None]


class JointFold(NamedTuple):
    """One fold, or all windows of a run without folds."""

    number: int
    label: str | None
    dataset: Dataset
    """With the windows that all members have"""
    own: Dataset
    """With all windows of the reference, which the baselines are fitted to"""
    predictors: list[Predictor]


@dataclass(frozen=True)
class FoldScores:
    """The sums over one fold's windows; in each list the mean comes last."""

    fold: JointFold
    mixture: FoldMixture
    train: list[Any]
    scores: MeanScores
    baselines: BaselineSums

    @property
    def sums(self) -> dict[str, list[Any]]:
        """By set: of each member and of the ensemble"""
        return {"train": self.train, "val": self.scores.val, "test": self.scores.test}


def list_folds(
    dataset: Dataset, own: Dataset, predictors: Sequence[list[Predictor]]
) -> list[JointFold]:
    """List the folds of the joint data set, with the members' predictors of each."""
    if not dataset.folds:
        return [JointFold(1, None, dataset, own, predictors[-1])]
    return [
        JointFold(
            number + 1,
            fold.label,
            dataset.select_fold(fold),
            own.select_fold(own.folds[number]),
            predictors[number],
        )
        for number, fold in enumerate(dataset.folds)
    ]


def score_folds(
    run: Run, config: Config, folds: Sequence[JointFold], series: Series
) -> list[FoldScores]:
    """Score every fold, and write the ensemble's predictions for the test sets."""
    with summary.open_table_writer(run.folder / summary.PREDICTIONS) as write:
        return [_score_fold(fold, len(folds) > 1, series, config, write) for fold in folds]


def _score_fold(
    fold: JointFold, numbered: bool, series: Series, config: Config, write: Write
) -> FoldScores:
    dataset, predictors = fold.dataset, fold.predictors
    metric = summary.get_comparison_metric(config)
    window_filter = make_window_filter(config, dataset)
    load_chunks = _make_loader(dataset, series)
    errors = MemberErrors(dataset, len(predictors))

    def collect() -> Any:
        for row in predict_side_by_side(predictors, load_chunks, "val"):
            errors.add(row)
            yield row

    alone = [summarize_sums({"val": one}) for one in accumulate_side_by_side(collect(), dataset)]
    values = [summary.get_metric(one, "val", metric) for one in alone]
    best = 0
    for place, value in enumerate(values):
        best = place if stats.is_better(value, values[best], metric) else best
    weights = errors.fit(metric)
    positions = {MODEL: best, ENSEMBLE: len(predictors)}

    def write_row(row: list[PredictionBatch], half_widths: dict[str, HalfWidths]) -> None:
        table = build_table(row[-1], dataset, half_widths[ENSEMBLE])
        if numbered:
            numbers = pa.array([fold.number] * table.num_rows, pa.int32())
            table = table.add_column(1, prediction_columns.FOLD, numbers)
        write(table)

    mixing = ensemble.Mixing(weights, window_filter)
    scores = ensemble.score_with_mean(
        predictors, dataset, load_chunks, positions, write_row, mixing
    )
    signature = dataset.signature
    rows = ensemble.predict_with_mean(predictors, load_chunks, "train", signature, weights)
    if window_filter:
        rows = summary.join_unfiltered(rows, window_filter, [])
    train = accumulate_side_by_side(rows, dataset)
    fitted = fit_baselines(fold.own, _make_loader(fold.own, series))
    reach = ensemble.to_reach(scores.half_widths, dataset.scaler, signature.targets)
    mixture = FoldMixture(fold.label, weights, best, reach)
    baselines = summary.score_baselines(dataset, load_chunks, fitted)
    return FoldScores(fold, mixture, train, scores, baselines)


def _make_loader(dataset: Dataset, series: Series) -> ChunkLoader:
    return lambda which: dataset.iter_chunks(which, series, rows=0, with_time=True)


def summarize_ensemble(
    run: Run,
    config: Config,
    dataset: Dataset,
    members: Sequence[Member],
    folds: Sequence[FoldScores],
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the ensemble's summary, of all folds together, and the metrics in detail."""

    def merge(position: int) -> dict[str, Any]:
        sets = folds[-1].sums
        return {which: merge_sums([one.sums[which][position] for one in folds]) for which in sets}

    baselines = lane_summary.merge_baselines([one.baselines for one in folds])
    scores, detail = summary.summarize_scores(run, config, dataset, merge(-1), baselines)
    coverage = ensemble.compute_coverage([one.scores.coverage[ENSEMBLE] for one in folds])
    weights = folds[-1].mixture.weights
    unfiltered = [one.scores.unfiltered.get(ENSEMBLE, {}) for one in folds]
    without = {which: merge_sums([one[which] for one in unfiltered]) for which in unfiltered[-1]}
    return scores | {
        **summary.summarize_filter(config, dataset, without),
        "members": [
            {**describe_member(member), "weight": weight, **summarize_sums(merge(position))}
            for position, (member, weight) in enumerate(zip(members, weights, strict=True))
        ],
        "folds": [_summarize_fold(one, members) for one in folds] if len(folds) > 1 else None,
        "coverage": coverage,
        "notes": [*dataset.notes, *summary.list_missing_baselines(baselines)],
    }, detail


def describe_member(member: Member) -> dict[str, Any]:
    """Return what a member is."""
    signature = member.trained.signature
    return {
        "name": member.name,
        "run": str(member.run.folder),
        "kind": member.config.model.kind,
        "what": member.trained.description,
        "context": signature.context,
        "inputs": len(signature.inputs),
    }


def _summarize_fold(one: FoldScores, members: Sequence[Member]) -> dict[str, Any]:
    names = [member.name for member in members]
    baselines: Mapping[str, Any] = {
        name: summarize_sums(sums) if sums else None for name, (_, sums) in one.baselines.items()
    }
    return {
        "fold": one.fold.number,
        "label": one.fold.label,
        "windows": one.fold.dataset.num_windows,
        "weights": dict(zip(names, one.mixture.weights, strict=True)),
        **summarize_sums({which: sums[-1] for which, sums in one.sums.items()}),
        "coverage": ensemble.compute_coverage([one.scores.coverage[ENSEMBLE]]),
        "baselines": baselines,
    }
