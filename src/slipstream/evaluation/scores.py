"""Score a trained model window by window, beside the baselines."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import torch

from slipstream.data.dataset import Dataset
from slipstream.data.windows import Series
from slipstream.evaluation.setup import LoadedEvaluation
from slipstream.inference.own_baselines import find_baselines
from slipstream.inference.trained import Member, TrainedRun
from slipstream.portable.mixture import MEMBERS
from slipstream.scoring.batch import Baseline, ChunkLoader, PredictionBatch, Predictor
from slipstream.scoring.ensemble import CoverageCounter, FoldPredictor, compute_coverage
from slipstream.scoring.filtering import WindowFilter, make_window_filter
from slipstream.scoring.predict import (
    accumulate_side_by_side,
    build_table,
    predict_side_by_side,
)
from slipstream.scoring.summary import list_quantiles, merge_sums, open_table_writer

UNFILTERED = "unfiltered"
"""The model without `predict.filter`"""
TableWriter = Callable[[pa.Table], None]


def score_windows(loaded: LoadedEvaluation, predictions: Path | None = None) -> dict[str, Any]:
    """Score the model and the baselines on the windows of a set; what the model predicts is written
    to a file, if one is named."""
    trained, which, dataset, folds = loaded.trained, loaded.which, loaded.dataset, loaded.folds
    plan, signature = trained.first.plan, dataset.signature
    coverage = [
        CoverageCounter(one.half_widths or {}, signature.quantiles) for one in loaded.predictors
    ]
    filters = [make_window_filter(trained.first.config, fold) for fold in folds]
    writer = nullcontext() if predictions is None else open_table_writer(predictions)
    with plan.flags(), writer as write:
        memory = dataset.memory
        series = None if memory is None else memory.series.to(plan.device)
        rows, with_time = trained.first.config.engine.buffer_rows, write is not None
        loaders = [_make_loader(fold, series, rows, with_time=with_time) for fold in folds]
        device = torch.device("cpu") if series is None else plan.device
        baselines, notes = find_baselines(trained, folds, loaders, device)
        beside = _list_beside(trained, loaded.members, baselines)
        writers = [write] * len(folds)
        parts = (folds, loaders, loaded.predictors, coverage, beside, filters, writers)
        sums = [_score_fold(_Fold(*one), which) for one in zip(*parts, strict=True)]
        scores, *others = (merge_sums(many).compute() for many in zip(*sums, strict=True))
    window_filter = filters[-1]
    names = [*beside[-1], *([UNFILTERED] if window_filter else [])]
    metrics = {name: get_overall(one) for name, one in zip(names, others, strict=True)}
    return {
        **loaded.describe(),
        **get_overall(scores),
        **({"filter": window_filter.describe()} if window_filter else {}),
        **({UNFILTERED: metrics[UNFILTERED]} if window_filter else {}),
        **({"classes": list(signature.classes)} if signature.classes else {}),
        "baselines": {
            name: {"what": one.what, **metrics[name]} if one.predict else None
            for name, one in baselines[-1].items()
        },
        **_summarize_members(trained, metrics),
        **list_quantiles(dataset),
        "coverage": compute_coverage(coverage) or None,
        **loaded.count_windows(),
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
    beside: Mapping[str, Predictor]
    filter: WindowFilter | None
    write: TableWriter | None


def _make_loader(
    dataset: Dataset, series: Series | None, rows: int, *, with_time: bool
) -> ChunkLoader:
    return lambda which: dataset.iter_chunks(which, series, rows=rows, with_time=with_time)


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
    """Return the sums of the model, of each predictor beside it, and where there is a filter of the
    model without it."""
    predictors = [fold.model.predict, *fold.beside.values()]
    names = ["", *fold.beside]
    filters = {
        position: fold.filter.start()
        for position, name in enumerate(names)
        if fold.filter and (not name or name.startswith(f"{MEMBERS}/"))
    }

    def count_coverage() -> Iterator[list[PredictionBatch]]:
        for row in predict_side_by_side(predictors, fold.load_chunks, which):
            raw = [row[0]] if fold.filter else []
            for position, one in filters.items():
                row[position] = one.apply(row[position])
            fold.coverage.add(row[0])
            if fold.write:
                fold.write(build_table(row[0], fold.dataset, fold.model.half_widths))
            yield [*row, *raw]

    return accumulate_side_by_side(count_coverage(), fold.dataset)


def get_overall(scores: Mapping[str, Any]) -> dict[str, Any]:
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
