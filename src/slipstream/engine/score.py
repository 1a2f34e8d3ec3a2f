"""Predictions over a set's windows, every one of them, and what they amount to."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor, nn

from slipstream import baselines, metrics
from slipstream.data import windows
from slipstream.data.dataset import Dataset
from slipstream.data.prepare import MICROSECONDS
from slipstream.data.windows import Series
from slipstream.engine import step
from slipstream.engine.plan import Plan
from slipstream.metrics import Tally
from slipstream.objectives import point

RIDGE_WORK = 2e11
"""Multiplications that fitting the ridge may take; where all windows need more, it sees fewer."""


class Chunk(NamedTuple):
    """Some windows' predictions, scaled."""

    starts: Tensor
    """[B]"""
    prediction: Tensor
    """[B, H, C, Q]"""
    truth: Tensor | None
    """[B, H, C]; None where the future is not known"""


Predictor = Callable[[Series, Tensor], Tensor]
"""First rows of windows to their predictions, one row per sequence: [B * fold, H, C / fold, Q]."""


def of_model(model: nn.Module, plan: Plan) -> Predictor:
    def predict(series: Series, starts: Tensor) -> Tensor:
        inputs, static = windows.gather_inputs(series, starts)
        inputs = inputs.to(plan.device)
        return step.forward(
            model, inputs, None if static is None else static.to(plan.device), plan=plan
        )

    return predict


@torch.inference_mode()
def chunks(
    predict: Predictor, series: Series, starts: Tensor, *, truth: bool = True
) -> Iterator[Chunk]:
    """Predictions for every window, a chunk at a time."""
    for some in starts.split(step.CHUNK):
        here = some.to(series.values.device)
        prediction = windows.unfold_targets(predict(series, here), series.fold)
        known = series.targets[here[:, None] + series.target_rows] if truth else None
        yield Chunk(here, prediction, None if known is None else known.to(prediction.device))


def tally(
    predicted: Iterator[Chunk], series: Series, dataset: Dataset, quantiles: tuple[float, ...]
) -> dict[str, Any]:
    """Metrics over the chunks."""
    signature = dataset.signature
    sums: Tally | None = None
    for chunk in predicted:
        assert chunk.truth is not None
        sums = sums or metrics.start(
            size=[dataset.scaler.size[name] for name in signature.targets],
            deviation=[dataset.scaler.deviation[name] for name in signature.targets],
            steps=signature.steps_out,
            series=len(dataset.names),
            device=chunk.truth.device,
        )
        band = (chunk.prediction[..., 0], chunk.prediction[..., -1]) if quantiles else None
        owner = series.series_of(chunk.starts).to(chunk.truth.device)
        sums.add(point(chunk.prediction, quantiles), chunk.truth, owner, band)
    assert sums is not None
    return metrics.read(sums, targets=signature.targets, series=dataset.names)


class Baseline(NamedTuple):
    what: str
    """In a few words; where there is none here, why"""
    predict: Predictor | None


def find_baselines(series: Series, dataset: Dataset) -> dict[str, Baseline]:
    """Repeat, seasonal and ridge, as far as each means something for this data."""
    return {
        "repeat": _repeat(dataset),
        "seasonal": _seasonal(dataset),
        "ridge": _ridge(series, dataset),
    }


def _repeat(dataset: Dataset) -> Baseline:
    signature = dataset.signature
    if signature.horizon:
        return Baseline(
            "the last known value",
            lambda series, starts: baselines.repeat(
                windows.gather_past(series, starts), signature.steps_out
            )[..., None],
        )
    rows = dataset.starts["train"] + signature.lead
    mean = dataset.series.targets[rows].double().mean(dim=0).float()
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


def _ridge(series: Series, dataset: Dataset) -> Baseline:
    signature = dataset.signature
    features = min(signature.context * signature.model_inputs, baselines.MAX_FEATURES)
    most = max(int(RIDGE_WORK / (features**2 * signature.fold)), step.CHUNK)
    every = -(-len(dataset.starts["train"]) // most)

    def batches(name: str) -> Iterator[tuple[Tensor, Tensor]]:
        for some in dataset.starts[name][::every].split(step.CHUNK):
            batch = windows.gather(series, some.to(series.values.device))
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


def as_table(chunk: Chunk, dataset: Dataset) -> pa.Table:
    """One row per window and predicted row, in physical units."""
    signature, scaler = dataset.signature, dataset.scaler
    starts = chunk.starts.cpu().numpy()
    offsets = dataset.series.offsets.numpy()
    owner = np.searchsorted(offsets, starts, side="right") - 1
    steps = signature.steps_out
    rows = (starts[:, None] + signature.lead + np.arange(steps)).ravel()
    owner = np.repeat(owner, steps)
    columns: dict[str, Any] = {
        "series": pa.DictionaryArray.from_arrays(owner.astype(np.int32), list(dataset.names)),
        "row": rows - offsets[owner],
    }
    if dataset.time is not None:
        columns["time"] = _times(dataset, rows, owner)
    if signature.horizon:
        columns["step"] = np.tile(np.arange(1, steps + 1, dtype=np.int32), len(starts))
    for i, name in enumerate(signature.targets):
        shift, size = scaler.shift[name], scaler.size[name]

        def physical(values: Tensor, shift: float = shift, size: float = size) -> Any:
            return (values.double() * size + shift).float().cpu().numpy().ravel()

        if chunk.truth is not None:
            columns[name] = physical(chunk.truth[..., i])
        columns[f"{name}_predicted"] = physical(
            point(chunk.prediction, signature.quantiles)[..., i]
        )
        for q, level in enumerate(signature.quantiles):
            columns[f"{name}_q{100 * level:g}"] = physical(chunk.prediction[..., i, q])
    return pa.table(columns)


def _times(dataset: Dataset, rows: Any, owner: Any) -> pa.Array:
    """Each row's time; rows past a series' end count on by its usual step."""
    assert dataset.time is not None
    last = dataset.series.offsets.numpy()[1:][owner] - 1
    known = np.minimum(rows, last)
    if dataset.time.dtype == np.int64:
        step = round((dataset.signature.step or 0.0) * MICROSECONDS)
        times = dataset.time[known] + (rows - known) * step
        return pa.array(times).cast(pa.timestamp("us"))
    return pa.array(dataset.time[known] + (rows - known) * (dataset.signature.step or 0.0))
