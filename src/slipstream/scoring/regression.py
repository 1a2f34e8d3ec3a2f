"""What is told of predicted numbers: errors, and the baselines repeat, seasonal and ridge."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from slipstream import scoring
from slipstream.data import prediction_columns, windows
from slipstream.data.dataset import Dataset
from slipstream.data.windows import Series
from slipstream.engine import step
from slipstream.objectives import select_point
from slipstream.scoring import Tally
from slipstream.scoring import baselines as simple
from slipstream.scoring.batch import Baseline, ChunkLoader, PredictionBatch

HEADLINE = "mae"
RIDGE_WORK = 2e11
"""Multiplications that fitting the ridge may take; where all windows need more, it sees fewer."""


def begin(dataset: Dataset, chunk: PredictionBatch) -> Tally:
    assert chunk.truth is not None
    targets, scaler = dataset.signature.targets, dataset.scaler
    return scoring.start(
        size=[scaler.size[name] for name in targets],
        deviation=[scaler.deviation[name] for name in targets],
        steps=dataset.signature.steps_out,
        series=len(dataset.index.series_names),
        device=chunk.truth.device,
    )


def add(sums: Tally, chunk: PredictionBatch, owner: Tensor, quantiles: tuple[float, ...]) -> None:
    assert chunk.truth is not None
    band = (chunk.prediction[..., 0], chunk.prediction[..., -1]) if quantiles else None
    sums.add(select_point(chunk.prediction, quantiles), chunk.truth, owner, band)


def merged(sums: Sequence[Tally]) -> Tally:
    return scoring.merged(sums)


def read(sums: Tally, dataset: Dataset) -> dict[str, Any]:
    return scoring.read(sums, targets=dataset.signature.targets, series=dataset.index.series_names)


def certainty(
    _: Tally, __: Mapping[str, Tally], ___: Dataset
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Nothing: errors of numbers come without intervals."""
    return {}, {}


def columns(
    chunk: PredictionBatch, dataset: Dataset, reach: Mapping[str, Tensor] | None
) -> Iterator[tuple[str, Any]]:
    """In physical units, float64, with quantiles or intervals where there are.

    What was scaled is exact to float32 of its distance from the centre; in physical units, a column
    that lies far from zero has no room for that in float32.
    """
    signature, scaler = dataset.signature, dataset.scaler
    for i, name in enumerate(signature.targets):
        shift, size = scaler.shift[name], scaler.size[name]

        def physical(values: Tensor, shift: float = shift, size: float = size) -> Any:
            return (values.double() * size + shift).cpu().numpy().ravel()

        mine = prediction_columns.name_columns(name, signature.quantiles)
        if chunk.truth is not None:
            yield mine.truth, physical(chunk.truth[..., i])
        value = select_point(chunk.prediction, signature.quantiles)[..., i]
        yield mine.predicted, physical(value)
        for q, quantile in enumerate(mine.quantiles):
            yield quantile, physical(chunk.prediction[..., i, q])
        for percent, far in (reach or {}).items():
            off = far[:, i].to(value.device).double()
            low, high = mine.intervals[percent]
            yield low, physical(value.double() - off)
            yield high, physical(value.double() + off)


def baselines(dataset: Dataset, pieces: ChunkLoader) -> dict[str, Baseline]:
    return {
        "repeat": _repeat(dataset, pieces),
        "seasonal": _seasonal(dataset),
        "ridge": _ridge(dataset, pieces),
    }


def _repeat(dataset: Dataset, pieces: ChunkLoader) -> Baseline:
    signature = dataset.signature
    if signature.horizon:
        return Baseline(
            "the last known value",
            lambda series, starts: simple.predict_repeat(
                windows.gather_past(series, starts), signature.steps_out
            )[..., None],
        )
    total = torch.zeros(len(signature.targets), dtype=torch.float64)
    for piece in pieces("train"):
        rows = piece.starts.to(piece.series.values.device) + signature.lead
        total += piece.series.targets[rows].double().sum(dim=0).cpu()
    mean = (total / dataset.num_windows["train"]).float()
    return Baseline(
        "the training mean (no past target is known when estimating)",
        lambda _, starts: mean.to(starts.device).expand(len(starts), 1, -1)[..., None],
    )


def _seasonal(dataset: Dataset) -> Baseline:
    signature, period = dataset.signature, dataset.period
    if not signature.horizon:
        return Baseline("estimation has no season", None)
    if period is None:
        return Baseline("no period is known; set data.period", None)
    if period > signature.context:
        return Baseline(f"its {period} rows are more than data.context", None)
    return Baseline(
        f"the values {period} rows ago",
        lambda series, starts: simple.predict_seasonal(
            windows.gather_past(series, starts), signature.steps_out, period
        )[..., None],
    )


def _ridge(dataset: Dataset, pieces: ChunkLoader) -> Baseline:
    signature = dataset.signature
    features = min(signature.context * signature.model_inputs, simple.MAX_FEATURES)
    most = max(int(RIDGE_WORK / (features**2 * signature.sequences_per_window)), step.EVAL_BATCH)
    if signature.model_inputs >= simple.WIDE_INPUTS:  # each window is compared with each other
        most = simple.MAX_FEATURES
    every = -(-dataset.num_windows["train"] // most)

    def batches(which: str) -> Iterator[tuple[Tensor, Tensor]]:
        for piece in pieces(which):
            for some in piece.starts[::every].split(step.EVAL_BATCH):
                here = some.to(piece.series.values.device)
                batch = windows.gather(piece.series, here)
                yield batch.inputs, batch.targets

    fitted = simple.fit_ridge(
        batches("train"),
        batches("val"),
        context=signature.context,
        inputs=signature.model_inputs,
        relative=signature.model_shared == signature.model_targets,
    )

    def predict(series: Series, starts: Tensor) -> Tensor:
        inputs, _ = windows.gather_inputs(series, starts)
        return fitted.predict(inputs, signature.steps_out)[..., None]

    seen = "every training window" if every == 1 else f"one training window in {every}"
    return Baseline(f"least squares on the window's rows, from {seen}", predict)
