"""Predictions over a set's windows, every one of them, and what they amount to."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor, nn

from slipstream import baselines, metrics
from slipstream.data import windows
from slipstream.data.dataset import Dataset
from slipstream.data.prepare import MICROSECONDS
from slipstream.data.windows import Piece, Series
from slipstream.engine import objective, recover, step
from slipstream.engine.plan import Plan
from slipstream.metrics import Tally
from slipstream.objectives import point

RIDGE_WORK = 2e11
"""Multiplications that fitting the ridge may take; where all windows need more, it sees fewer."""


class Chunk(NamedTuple):
    """Some windows' predictions, scaled."""

    piece: Piece
    starts: Tensor
    """[B], within the piece"""
    prediction: Tensor
    """[B, H, C, Q]"""
    truth: Tensor | None
    """[B, H, C]; None where the future is not known"""


Predictor = Callable[[Series, Tensor], Tensor]
"""First rows of windows to their predictions, one row per sequence: [B * fold, H, C / fold, Q]."""


def of_model(model: nn.Module, plan: Plan) -> Predictor:
    def predict(series: Series, starts: Tensor) -> Tensor:
        try:
            inputs, static = windows.gather_inputs(series, starts)
            inputs = inputs.to(plan.device)
            return objective.forward(
                model, inputs, None if static is None else static.to(plan.device), plan=plan
            )
        except RuntimeError as error:
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
) -> list[Tally]:
    """The sums over each of several models' chunks, which come side by side."""
    sums: list[Tally] = []
    for beside in predicted:
        sums = sums or [_begun(chunk, dataset) for chunk in beside]
        for mine, chunk in zip(sums, beside, strict=True):
            assert chunk.truth is not None
            device = chunk.truth.device
            band = (chunk.prediction[..., 0], chunk.prediction[..., -1]) if quantiles else None
            piece = chunk.piece
            owner = piece.owners.to(device)[piece.series.series_of(chunk.starts).to(device)]
            mine.add(point(chunk.prediction, quantiles), chunk.truth, owner, band)
    assert sums
    return sums


def _begun(chunk: Chunk, dataset: Dataset) -> Tally:
    assert chunk.truth is not None
    targets, scaler = dataset.signature.targets, dataset.scaler
    return metrics.start(
        size=[scaler.size[name] for name in targets],
        deviation=[scaler.deviation[name] for name in targets],
        steps=dataset.signature.steps_out,
        series=len(dataset.layout.series),
        device=chunk.truth.device,
    )


def figures(sums: Tally, dataset: Dataset) -> dict[str, Any]:
    """Metrics from the sums."""
    return metrics.read(sums, targets=dataset.signature.targets, series=dataset.layout.series)


class Baseline(NamedTuple):
    what: str
    """In a few words; where there is none here, why"""
    predict: Predictor | None


Pieces = Callable[[str], Iterable[Piece]]
"""A set's name to its windows."""


def find_baselines(dataset: Dataset, pieces: Pieces) -> dict[str, Baseline]:
    """Repeat, seasonal and ridge, as far as each means something for this data."""
    return {
        "repeat": _repeat(dataset, pieces),
        "seasonal": _seasonal(dataset),
        "ridge": _ridge(dataset, pieces),
    }


def _repeat(dataset: Dataset, pieces: Pieces) -> Baseline:
    signature = dataset.signature
    if signature.horizon:
        return Baseline(
            "the last known value",
            lambda series, starts: baselines.repeat(
                windows.gather_past(series, starts), signature.steps_out
            )[..., None],
        )
    total = torch.zeros(len(signature.targets), dtype=torch.float64)
    for piece in pieces("train"):
        rows = piece.starts.to(piece.series.values.device) + signature.lead
        total += piece.series.targets[rows].double().sum(dim=0).cpu()
    mean = (total / dataset.count["train"]).float()
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
        lambda series, starts: baselines.seasonal(
            windows.gather_past(series, starts), signature.steps_out, period
        )[..., None],
    )


def _ridge(dataset: Dataset, pieces: Pieces) -> Baseline:
    signature = dataset.signature
    features = min(signature.context * signature.model_inputs, baselines.MAX_FEATURES)
    most = max(int(RIDGE_WORK / (features**2 * signature.fold)), step.CHUNK)
    every = -(-dataset.count["train"] // most)

    def batches(which: str) -> Iterator[tuple[Tensor, Tensor]]:
        for piece in pieces(which):
            for some in piece.starts[::every].split(step.CHUNK):
                here = some.to(piece.series.values.device)
                batch = windows.gather(piece.series, here)
                yield batch.inputs, batch.targets

    fitted = baselines.fit_ridge(
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


def as_table(chunk: Chunk, dataset: Dataset, reach: Mapping[str, Tensor] | None = None) -> pa.Table:
    """One row per window and predicted row, in physical units.

    `reach` are intervals: by their level, how far they go to either side, [H, C], scaled.
    """
    signature, scaler, piece = dataset.signature, dataset.scaler, chunk.piece
    offsets, steps = dataset.layout.offsets, signature.steps_out
    starts = chunk.starts.cpu().numpy() + piece.first_row
    owner = np.repeat(np.searchsorted(offsets, starts, side="right") - 1, steps)
    rows = (starts[:, None] + signature.lead + np.arange(steps)).ravel()
    columns: dict[str, Any] = {
        "series": pa.DictionaryArray.from_arrays(
            owner.astype(np.int32), list(dataset.layout.series)
        ),
        "row": rows - offsets[owner],
    }
    if piece.time is not None:
        columns["time"] = _times(piece, dataset, rows, owner)
    if signature.horizon:
        columns["step"] = np.tile(np.arange(1, steps + 1, dtype=np.int32), len(starts))
    for i, name in enumerate(signature.targets):
        shift, size = scaler.shift[name], scaler.size[name]

        def physical(values: Tensor, shift: float = shift, size: float = size) -> Any:
            return (values.double() * size + shift).float().cpu().numpy().ravel()

        if chunk.truth is not None:
            columns[name] = physical(chunk.truth[..., i])
        value = point(chunk.prediction, signature.quantiles)[..., i]
        columns[f"{name}_predicted"] = physical(value)
        for q, level in enumerate(signature.quantiles):
            columns[f"{name}_q{100 * level:g}"] = physical(chunk.prediction[..., i, q])
        for percent, far in (reach or {}).items():
            off = far[:, i].to(value.device)
            columns[f"{name}_lo{percent}"] = physical(value - off)
            columns[f"{name}_hi{percent}"] = physical(value + off)
    return pa.table(columns)


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
