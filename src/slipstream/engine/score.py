"""Predictions over a set's windows, every one of them, and what they amount to."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor, nn

from slipstream.data import outputs, windows
from slipstream.data.dataset import Dataset
from slipstream.data.prepare import MICROSECONDS
from slipstream.data.windows import Piece, Series
from slipstream.engine import classes, numbers, objective, recover, step
from slipstream.engine.chunk import Baseline, Chunk, Kind, Pieces, Predictor
from slipstream.engine.plan import Plan
from slipstream.errors import UserError


def kind_of(dataset: Dataset) -> Kind:
    return classes if dataset.signature.classes else numbers


def of_model(model: nn.Module, plan: Plan) -> Predictor:
    def predict(series: Series, starts: Tensor) -> Tensor:
        try:
            inputs, static = windows.gather_inputs(series, starts)
            inputs = inputs.to(plan.device)
            return objective.forward(
                model, inputs, None if static is None else static.to(plan.device), plan=plan
            )
        except recover.FULL as error:
            if len(starts) == 1 or not recover.is_out_of_memory(error):
                raise
        recover.free_memory()
        return torch.cat([predict(series, half) for half in starts.chunk(2)])

    return predict


@torch.inference_mode()
def chunks(predict: Predictor, pieces: Iterable[Piece], *, truth: bool = True) -> Iterator[Chunk]:
    """Predictions for every window of the pieces, a chunk at a time."""
    for piece in pieces:
        series = piece.series
        for some in piece.starts.split(step.CHUNK):
            here = some.to(series.values.device)
            prediction = windows.unfold_targets(predict(series, here), series.fold)
            known = None
            if truth:
                known = series.targets[here[:, None] + series.target_rows].to(prediction.device)
            yield Chunk(piece, here, prediction, known)


def tally(
    predicted: Iterator[Chunk], dataset: Dataset, quantiles: tuple[float, ...]
) -> dict[str, Any]:
    """Metrics over the chunks."""
    (sums,) = tallies(([chunk] for chunk in predicted), dataset, quantiles)
    return figures(sums, dataset)


def tallies(
    predicted: Iterable[Sequence[Chunk]], dataset: Dataset, quantiles: tuple[float, ...]
) -> list[Any]:
    """The sums over each of several models' chunks, which come side by side."""
    kind = kind_of(dataset)
    sums: list[Any] = []
    for beside in predicted:
        sums = sums or [kind.begin(dataset, chunk) for chunk in beside]
        for mine, chunk in zip(sums, beside, strict=True):
            assert chunk.truth is not None
            device, piece = chunk.truth.device, chunk.piece
            owner = piece.owners.to(device)[piece.series.series_of(chunk.starts).to(device)]
            kind.add(mine, chunk, owner, quantiles)
    assert sums
    return sums


def figures(sums: Any, dataset: Dataset) -> dict[str, Any]:
    """Metrics from the sums."""
    return kind_of(dataset).read(sums, dataset)


def find_baselines(dataset: Dataset, pieces: Pieces) -> dict[str, Baseline]:
    """What a model must beat."""
    return kind_of(dataset).baselines(dataset, pieces)


def as_table(chunk: Chunk, dataset: Dataset, reach: Mapping[str, Tensor] | None = None) -> pa.Table:
    """One row per window and predicted row: physical units, or how likely each class is.

    `reach` are intervals: by their level, how far they go to either side, [H, C], scaled.
    """
    signature, piece = dataset.signature, chunk.piece
    offsets, steps = dataset.layout.offsets, signature.steps_out
    starts = chunk.starts.cpu().numpy() + piece.first_row
    owner = np.repeat(np.searchsorted(offsets, starts, side="right") - 1, steps)
    rows = (starts[:, None] + signature.lead + np.arange(steps)).ravel()
    series = pa.DictionaryArray.from_arrays(owner.astype(np.int32), list(dataset.layout.series))
    columns = [(outputs.SERIES, series), (outputs.ROW, rows - offsets[owner])]
    if piece.time is not None:
        columns.append((outputs.TIME, _times(piece, dataset, rows, owner)))
    if signature.horizon:
        ahead = np.tile(np.arange(1, steps + 1, dtype=np.int32), len(starts))
        columns.append((outputs.STEP, ahead))
    columns += kind_of(dataset).columns(chunk, dataset, reach)
    twice = outputs.repeated(name for name, _ in columns)
    if twice:
        raise UserError(
            f'two columns of the predictions would be named "{twice}"; rename the target and train '
            "the model again"
        )
    return pa.table(dict(columns))


def _times(piece: Piece, dataset: Dataset, rows: Any, owner: Any) -> pa.Array:
    """Each row's time; rows past a series' end count on by its usual step."""
    assert piece.time is not None
    last = dataset.layout.offsets[1:][owner] - 1
    known = np.minimum(rows, last)
    times, ahead = piece.time[known - piece.first_row], rows - known
    step_size = dataset.signature.step or 0.0
    if dataset.layout.dated:
        times = times + ahead * round(step_size * MICROSECONDS)
        return pa.array(times).cast(pa.timestamp("us"))
    return pa.array(times + ahead * step_size)
