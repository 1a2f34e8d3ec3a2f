"""The baselines that a model must beat: repeat, seasonal and ridge, or majority and logistic.

Shapes: T context rows, B windows, H predicted rows, C targets, D features, Q classes.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from slipstream.data import windows
from slipstream.data.dataset import Dataset
from slipstream.data.windows import Batch, Series
from slipstream.engine.step import EVAL_BATCH
from slipstream.scoring import linear
from slipstream.scoring.batch import Baseline, ChunkLoader

RIDGE_WORK = 2e11
"""Multiplications that fitting the ridge may take; where all windows need more, it sees fewer."""
LOGISTIC_WORK, LOGISTIC_PASSES = 2e11, 2000
"""Multiplications that fitting the logistic regression may take, and for each weight and window;
where all windows need more, it sees fewer."""
LOGISTIC_NUMBERS = 2e7
"""Features that it may hold at once"""
MIN_PROBABILITY = 1e-7
"""What the majority baseline gives to a class that training never saw"""


def fit_baselines(dataset: Dataset, load_chunks: ChunkLoader) -> dict[str, Baseline]:
    """Fit every baseline of the task, as far as each means something for this data."""
    if dataset.signature.classes:
        return {
            "majority": _fit_majority(dataset, load_chunks),
            "logistic": _fit_logistic(dataset, load_chunks),
        }
    return {
        "repeat": _fit_repeat(dataset, load_chunks),
        "seasonal": _make_seasonal(dataset),
        "ridge": _fit_ridge(dataset, load_chunks),
    }


def predict_repeat(past: Tensor, steps: int) -> Tensor:
    """Return the last known target for every predicted row: [T, B, C] to [B, H, C]."""
    return past[-1][:, None].expand(-1, steps, -1)


def predict_seasonal(past: Tensor, steps: int, period: int) -> Tensor:
    """Return the targets one season ago, over and over: [T, B, C] to [B, H, C]."""
    rows = torch.arange(steps, device=past.device) % period
    return past[-period:][rows].transpose(0, 1)


def _fit_repeat(dataset: Dataset, load_chunks: ChunkLoader) -> Baseline:
    signature = dataset.signature
    if signature.horizon:
        return Baseline(
            "the last known value",
            lambda series, starts: predict_repeat(
                windows.gather_past(series, starts), signature.steps_out
            )[..., None],
        )
    total = torch.zeros(len(signature.targets), dtype=torch.float64)
    for chunk in load_chunks("train"):
        rows = chunk.starts.to(chunk.series.values.device) + signature.lead
        total += chunk.series.targets[rows].double().sum(dim=0).cpu()
    mean = (total / dataset.num_windows["train"]).float()
    return Baseline(
        "the training mean (no past target is known when estimating)",
        lambda _, starts: mean.to(starts.device).expand(len(starts), 1, -1)[..., None],
    )


def _make_seasonal(dataset: Dataset) -> Baseline:
    signature, period = dataset.signature, dataset.period
    if not signature.horizon:
        return Baseline("estimation has no season", None)
    if period is None:
        return Baseline("no period is known; set data.period", None)
    if period > signature.context:
        return Baseline(f"its {period} rows are more than data.context", None)
    return Baseline(
        f"the values {period} rows ago",
        lambda series, starts: predict_seasonal(
            windows.gather_past(series, starts), signature.steps_out, period
        )[..., None],
    )


def _fit_ridge(dataset: Dataset, load_chunks: ChunkLoader) -> Baseline:
    signature = dataset.signature
    features = min(signature.context * signature.model_inputs, linear.MAX_FEATURES)
    work = features**2 * signature.sequences_per_window
    max_windows = max(int(RIDGE_WORK / work), EVAL_BATCH)
    if signature.model_inputs >= linear.WIDE_INPUTS:  # each window is compared with each other
        max_windows = linear.MAX_FEATURES
    stride = -(-dataset.num_windows["train"] // max_windows)

    def load(which: str) -> Iterator[tuple[Tensor, Tensor]]:
        return (
            (batch.inputs, batch.targets) for batch in _iter_batches(load_chunks, which, stride)
        )

    ridge = linear.fit_ridge(
        load("train"),
        load("val"),
        context=signature.context,
        inputs=signature.model_inputs,
        relative=signature.model_shared == signature.model_targets,
    )

    def predict(series: Series, starts: Tensor) -> Tensor:
        inputs, _ = windows.gather_inputs(series, starts)
        return ridge.predict(inputs, signature.steps_out)[..., None]

    return Baseline(f"least squares on the window's rows, from {_describe(stride)}", predict)


def _fit_majority(dataset: Dataset, load_chunks: ChunkLoader) -> Baseline:
    classes, steps = dataset.signature.classes, dataset.signature.steps_out
    counts = torch.zeros(len(classes), dtype=torch.int64)
    for batch in _iter_batches(load_chunks, "train", 1):
        counts += torch.bincount(batch.targets.long().flatten().cpu(), minlength=len(counts))
    log_probs = (counts / counts.sum()).clamp(min=MIN_PROBABILITY).log().float()
    return Baseline(
        f'always "{classes[int(counts.argmax())]}", each class as likely as in training',
        lambda _, starts: log_probs.to(starts.device).expand(len(starts), steps, 1, -1),
    )


def _fit_logistic(dataset: Dataset, load_chunks: ChunkLoader) -> Baseline:
    signature = dataset.signature
    features = len(linear.STATISTICS) * len(signature.inputs) + len(signature.static)
    outputs = signature.steps_out * len(signature.classes)
    work = LOGISTIC_WORK / (LOGISTIC_PASSES * features * outputs)
    max_windows = max(int(min(work, LOGISTIC_NUMBERS / features)), EVAL_BATCH)
    stride = -(-dataset.num_windows["train"] // max_windows)

    def load(which: str) -> Iterator[tuple[Tensor, Tensor]]:
        for batch in _iter_batches(load_chunks, which, stride):
            labels = batch.targets[..., 0].long()
            yield linear.compute_statistics(batch.inputs, batch.static), labels

    logistic = linear.fit_logistic(load("train"), load("val"), num_classes=len(signature.classes))

    def predict(series: Series, starts: Tensor) -> Tensor:
        statistics = linear.compute_statistics(*windows.gather_inputs(series, starts))
        return logistic.predict(statistics).view(len(starts), signature.steps_out, 1, -1)

    what = f"logistic regression on the window's statistics, from {_describe(stride)}"
    return Baseline(what, predict)


def _iter_batches(load_chunks: ChunkLoader, which: str, stride: int) -> Iterator[Batch]:
    """Yield a set's windows, or one in `stride`."""
    for chunk in load_chunks(which):
        for starts in chunk.starts[::stride].split(EVAL_BATCH):
            yield windows.gather(chunk.series, starts.to(chunk.series.values.device))


def _describe(stride: int) -> str:
    return "every training window" if stride == 1 else f"one training window in {stride}"
