"""Predictions over a set's windows, every one of them, and what they amount to."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor, nn

from slipstream.data import prediction_columns, windows
from slipstream.data.dataset import Dataset
from slipstream.data.series import MICROSECONDS
from slipstream.data.windows import Series, WindowChunk
from slipstream.engine import objective, recovery, step
from slipstream.engine.plan import Plan
from slipstream.errors import UserError
from slipstream.scoring import classification, regression
from slipstream.scoring.batch import Baseline, ChunkLoader, PredictionBatch, Predictor, TaskMetrics


def get_task_metrics(dataset: Dataset) -> TaskMetrics:
    return classification if dataset.signature.classes else regression


def make_predictor(model: nn.Module, plan: Plan) -> Predictor:
    def predict(series: Series, starts: Tensor) -> Tensor:
        try:
            inputs, static = windows.gather_inputs(series, starts)
            inputs = inputs.to(plan.device)
            return objective.forward(
                model, inputs, None if static is None else static.to(plan.device), plan=plan
            )
        except recovery.MEMORY_ERRORS as error:
            if len(starts) == 1 or not recovery.is_out_of_memory(error):
                raise
        recovery.free_memory()
        return torch.cat([predict(series, half) for half in starts.chunk(2)])

    return predict


@torch.inference_mode()
def predict_batches(
    predict: Predictor, pieces: Iterable[WindowChunk], *, truth: bool = True
) -> Iterator[PredictionBatch]:
    """Predictions for every window of the pieces, a chunk at a time."""
    for piece in pieces:
        series = piece.series
        for some in piece.starts.split(step.EVAL_BATCH):
            here = some.to(series.values.device)
            prediction = windows.merge_channels(predict(series, here), series.sequences_per_window)
            known = None
            if truth:
                known = series.targets[here[:, None] + series.target_rows].to(prediction.device)
            yield PredictionBatch(piece, here, prediction, known)


def score_batches(
    predicted: Iterator[PredictionBatch], dataset: Dataset, quantiles: tuple[float, ...]
) -> dict[str, Any]:
    """Metrics over the chunks."""
    (sums,) = accumulate_sums(([chunk] for chunk in predicted), dataset, quantiles)
    return compute_metrics(sums, dataset)


def accumulate_sums(
    predicted: Iterable[Sequence[PredictionBatch]], dataset: Dataset, quantiles: tuple[float, ...]
) -> list[Any]:
    """The sums over each of several models' chunks, which come side by side."""
    kind = get_task_metrics(dataset)
    sums: list[Any] = []
    for beside in predicted:
        sums = sums or [kind.begin(dataset, chunk) for chunk in beside]
        for mine, chunk in zip(sums, beside, strict=True):
            assert chunk.truth is not None
            device, piece = chunk.truth.device, chunk.chunk
            owner = piece.series_ids.to(device)[piece.series.find_series(chunk.starts).to(device)]
            kind.add(mine, chunk, owner, quantiles)
    assert sums
    return sums


def compute_metrics(sums: Any, dataset: Dataset) -> dict[str, Any]:
    """Metrics from the sums."""
    return get_task_metrics(dataset).read(sums, dataset)


def fit_baselines(dataset: Dataset, pieces: ChunkLoader) -> dict[str, Baseline]:
    """What a model must beat."""
    return get_task_metrics(dataset).baselines(dataset, pieces)


def build_table(
    chunk: PredictionBatch, dataset: Dataset, reach: Mapping[str, Tensor] | None = None
) -> pa.Table:
    """One row per window and predicted row: physical units, or how likely each class is.

    `reach` are intervals: by their level, how far they go to either side, [H, C], scaled.
    """
    signature, piece = dataset.signature, chunk.chunk
    offsets, steps = dataset.index.offsets, signature.steps_out
    starts = chunk.starts.cpu().numpy() + piece.first_row
    owner = np.repeat(np.searchsorted(offsets, starts, side="right") - 1, steps)
    rows = (starts[:, None] + signature.lead + np.arange(steps)).ravel()
    series = pa.DictionaryArray.from_arrays(
        owner.astype(np.int32), list(dataset.index.series_names)
    )
    columns = [(prediction_columns.SERIES, series), (prediction_columns.ROW, rows - offsets[owner])]
    if piece.time is not None:
        columns.append((prediction_columns.TIME, _times(piece, dataset, rows, owner)))
    if signature.horizon:
        ahead = np.tile(np.arange(1, steps + 1, dtype=np.int32), len(starts))
        columns.append((prediction_columns.STEP, ahead))
    columns += get_task_metrics(dataset).columns(chunk, dataset, reach)
    twice = prediction_columns.find_duplicate_name(name for name, _ in columns)
    if twice:
        raise UserError(
            f'two columns of the predictions would be named "{twice}"; rename the target and train '
            "the model again"
        )
    return pa.table(dict(columns))


def _times(piece: WindowChunk, dataset: Dataset, rows: Any, owner: Any) -> pa.Array:
    """Each row's time; rows past a series' end count on by its usual step."""
    assert piece.time is not None
    last = dataset.index.offsets[1:][owner] - 1
    known = np.minimum(rows, last)
    times, ahead = piece.time[known - piece.first_row], rows - known
    step_size = dataset.signature.step or 0.0
    if dataset.index.has_dates:
        times = times + ahead * round(step_size * MICROSECONDS)
        return pa.array(times).cast(pa.timestamp("us"))
    return pa.array(times + ahead * step_size)
