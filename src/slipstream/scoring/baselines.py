"""The baselines that a model must beat: repeat, seasonal, ridge and gbm, or for classes majority,
logistic, gbm and rocket.

Ridge regression is solved in closed form. Shapes: T context rows, B windows or sequences, F inputs,
H predicted rows, C targets, D features, K static columns, Q classes.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from slipstream.base import machine, storage
from slipstream.base.text import format_count
from slipstream.config import Signature
from slipstream.data import windows
from slipstream.data.dataset import Dataset
from slipstream.data.windows import Batch, Series
from slipstream.engine import checkpoint
from slipstream.engine.step import EVAL_BATCH
from slipstream.models.boosting import Boosting, split_static
from slipstream.models.convolutions import Convolutions
from slipstream.models.kinds.logistic import count_features
from slipstream.models.logistic import Logistic, compute_statistics
from slipstream.runs import Run
from slipstream.scoring import boosting, convolutions
from slipstream.scoring.batch import Baseline, ChunkLoader
from slipstream.scoring.boosting import (
    BackgroundBoosting,
    FittedBoosting,
    PreparedBoosting,
    prepare_boosting,
)
from slipstream.scoring.convolutions import MIN_CONTEXT, fit_convolutions

RIDGE_WORK = 2e11
"""The number of multiplications that fitting the ridge may take; where all windows would take more,
it is fitted to fewer windows."""
LOGISTIC_WORK, LOGISTIC_PASSES = 2e11, 2000
"""The number of multiplications that fitting the logistic regression may take, in all and per
weight and window; where all windows would take more, it is fitted to fewer windows."""
MIN_PARALLEL_WORK = 1 << 26
"""Multiplications of a step of the logistic regression from which on threads share it: of thousands
of short steps, each waits for a thread that another process keeps from running"""
LOGISTIC_NUMBERS = 2e7
"""The number of features that the logistic regression may hold at once"""
RIDGE_NUMBERS = 1 << 22
"""The number of features that the ridge is fitted to at a time on a GPU, which few of them leave
idle"""
MIN_PROBABILITY = 1e-7
"""The probability that the majority baseline gives to a class without training windows"""
MAX_FEATURES = 2048
WIDE_INPUTS = MAX_FEATURES // 2
"""With this many inputs or more, there are too many features even if rows are pooled"""
RELATIVE = (False, True)
"""Whether a ridge is on rows relative to the last one: which is better differs"""
MIN_ABSOLUTE_GAIN = 0.03
"""By how much the rows themselves have to be better in validation, since a later level may be one
that no training window has"""
RIDGE_PENALTIES = (1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1)
"""Ridge penalties to choose from, per training window"""
LOGISTIC_VALUES, MIN_LOGISTIC_VALUES = 256, 4
"""Values of all inputs together that the logistic regression reads beside the statistics, and of
each input at least; longer windows are averaged to so many"""
LOGISTIC_PENALTIES = (1.0, 1e-1, 1e-2, 1e-3, 1e-4)
"""Penalties to choose from, the strongest first: each starts from the solution of the one before"""
MAX_ITERATIONS = 200
"""The number of iterations that the optimizer of the logistic regression may take per penalty"""

Batches = Iterable[tuple[Tensor, ...]]
"""Inputs [T, B, F], targets [B, H, C] and, where some are known, rows ahead [B, H, U]; or features
[B, D] and labels [B, H]"""


class FoldWork:
    """Intermediate results that the baselines of consecutive folds share: the folds of a
    walk-forward split have most of their windows in common, and each window is processed once.

    The folds are over the same scaled series, and are fitted one after the other.
    """

    def __init__(self, dataset: Dataset) -> None:
        train = [fold.starts["train"] for fold in dataset.folds]
        self.max_windows = max(map(len, train))
        self.train = torch.cat(train).unique()
        """First rows of the windows that any fold trains on"""
        self.windows = torch.cat(
            [starts for fold in dataset.folds for starts in fold.starts.values()]
        )
        self.windows = self.windows.unique()
        """First rows of the windows of any fold and set"""
        self.moments: RidgeMoments | None = None
        self.statistics: Tensor | None = None
        """[windows, D]: the features of logistic regression"""
        self.num_folds = len(dataset.folds)


def fit_baselines(
    dataset: Dataset,
    load_chunks: ChunkLoader,
    work: FoldWork | None = None,
    fitted: FittedBoosting | None = None,
    *,
    without: Collection[str] = (),
) -> dict[str, Baseline]:
    """Fit every baseline of the task that is meaningful for this data; for a fold, reuse the work
    done for earlier folds. `fitted` has the trees where they were fitted beside the training,
    `without` the names of baselines that are not wanted."""
    fits: dict[str, Callable[[], Baseline]]
    if dataset.signature.classes:
        fits = {
            "majority": lambda: _fit_majority(dataset, load_chunks),
            "logistic": lambda: _fit_logistic(dataset, load_chunks, work),
            "gbm": lambda: _fit_gbm(dataset, load_chunks, work, fitted),
            "rocket": lambda: _fit_rocket(dataset, load_chunks, work),
        }
    else:
        fits = {
            "repeat": lambda: _fit_repeat(dataset, load_chunks),
            "seasonal": lambda: _make_seasonal(dataset, load_chunks),
            "ridge": lambda: _fit_ridge(dataset, load_chunks, work),
            "gbm": lambda: _fit_gbm(dataset, load_chunks, work, fitted),
        }
    return {name: fit() for name, fit in fits.items() if name not in without}


def list_baselines(dataset: Dataset) -> tuple[str, ...]:
    """Return the names of the baselines of the task."""
    if dataset.signature.classes:
        return ("majority", "logistic", "gbm", "rocket")
    return ("repeat", "seasonal", "ridge", "gbm")


def predict_repeat(past: Tensor, steps: int) -> Tensor:
    """Return the last known target for every predicted row: [T, B, C] to [B, H, C]."""
    return past[-1][:, None].expand(-1, steps, -1)


def predict_seasonal(past: Tensor, steps: int, period: int) -> Tensor:
    """Return the targets one season ago, over and over: [T, B, C] to [B, H, C]."""
    rows = torch.arange(steps, device=past.device) % period
    return past[-period:][rows].transpose(0, 1)


def restore_baseline(
    name: str, description: str, state: Mapping[str, Tensor], signature: Signature
) -> Baseline:
    """Return the baseline that was fitted to this state, for windows of this signature."""
    steps = signature.steps_out
    context = int(state.get("context", signature.context))

    def gather(series: Series, starts: Tensor) -> tuple[Tensor, Tensor | None]:
        inputs, beside = windows.gather_inputs(series, starts)
        return inputs[-context:], beside

    @functools.cache
    def load_boosting(device: torch.device) -> Boosting:
        return Boosting.from_state(state).to(device)

    @functools.cache
    def load_convolutions(device: torch.device) -> Convolutions:
        return Convolutions.from_state(state).to(device)

    def predict(series: Series, starts: Tensor) -> Tensor:
        match name:
            case "repeat" if signature.horizon:
                return predict_repeat(_gather_past(series, starts, state, 1), steps)[..., None]
            case "repeat":
                return state["mean"].to(starts.device).expand(len(starts), 1, -1)[..., None]
            case "seasonal":
                return _predict_season(series, starts, state, signature)[..., None]
            case "ridge":
                inputs, static = gather(series, starts)
                _, ahead = split_static(static, signature.future_shape)
                return Ridge.from_state(state).predict(inputs, steps, ahead)[..., None]
            case "gbm":
                inputs, beside = gather(series, starts)
                static, rows_ahead = split_static(beside, signature.future_shape)
                shape = (steps, signature.model_targets, max(len(signature.classes), 1))
                return load_boosting(inputs.device).predict(inputs, static, rows_ahead, shape)
            case "rocket":
                inputs, _ = windows.gather_inputs(series, starts)
                logits = load_convolutions(inputs.device).predict(inputs)
                return logits.view(len(starts), steps, 1, -1)
            case "majority":
                return state["log_probs"].to(starts.device).expand(len(starts), steps, 1, -1)
            case "logistic":
                logistic = Logistic.from_state(state)
                features = compute_statistics(
                    *windows.gather_inputs(series, starts), logistic.values
                )
                logits = logistic.predict(features)
                return logits.view(len(starts), steps, 1, -1)
        raise AssertionError(name)

    return Baseline(description, predict, state)


SHORTENED = ("ridge", "gbm")
"""Baselines that can read the newest rows of windows that are longer than those of their fit"""


def shorten(name: str, baseline: Baseline, context: int, signature: Signature) -> Baseline:
    """Return a ridge or trees, fitted to windows of `context` rows, for the longer windows of
    another signature."""
    state = {**baseline.state, "context": torch.tensor(context)}
    return restore_baseline(name, baseline.description, state, signature)


def _gather_past(
    series: Series, starts: Tensor, state: Mapping[str, Tensor], num_rows: int
) -> Tensor:
    """Gather the last past rows of the targets; without a known value, the training mean."""
    past = windows.gather_past(series, starts, num_rows)
    mean = state.get("mean")
    return past if mean is None else torch.where(past.isnan(), mean.to(past.device), past)


def _fit_past(dataset: Dataset, load_chunks: ChunkLoader) -> dict[str, Tensor]:
    """Return the state for `_gather_past`: a mean for targets that may be missing, which inputs
    never are."""
    if dataset.signature.shared == len(dataset.signature.targets):
        return {}
    return {"mean": _compute_mean(dataset, load_chunks)}


def _fit_repeat(dataset: Dataset, load_chunks: ChunkLoader) -> Baseline:
    signature = dataset.signature
    if signature.horizon:
        state = _fit_past(dataset, load_chunks)
        return restore_baseline("repeat", "the last known value", state, signature)
    state = {"mean": _compute_mean(dataset, load_chunks)}
    description = "the training mean (no past target is known when estimating)"
    return restore_baseline("repeat", description, state, signature)


def _compute_mean(dataset: Dataset, load_chunks: ChunkLoader) -> Tensor:
    """Return the mean of the training windows' first target rows, [C]."""
    total = torch.zeros(len(dataset.signature.targets), dtype=torch.float64)
    for chunk in load_chunks("train"):
        rows = chunk.starts.to(chunk.series.values.device) + dataset.signature.lead
        total += chunk.series.targets[rows].double().sum(dim=0).cpu()
    return (total / dataset.num_windows["train"]).float()


def _make_seasonal(dataset: Dataset, load_chunks: ChunkLoader) -> Baseline:
    signature, periods = dataset.signature, list(dataset.index.list_periods())
    if not signature.horizon:
        return Baseline("estimation has no season", None)
    if dataset.period is not None:
        periods = sorted({dataset.period, *periods})
    if not periods:
        return Baseline("no period is known; set data.period", None)
    reach = _measure_reach(dataset, load_chunks)
    usable = [period for period in periods if period <= reach]
    if not usable:
        return Baseline(f"its {periods[0]} rows are more than windows can look back", None)
    short = max((period for period in usable if period <= signature.context), default=0)
    past = _fit_past(dataset, load_chunks)
    choices = []
    for period in usable:
        state = {"period": torch.tensor(period), "short": torch.tensor(short)} | past
        description = f"the values {period} rows ago"
        choices.append(restore_baseline("seasonal", description, state, signature))
    if len(choices) == 1:
        return choices[0]
    errors = [_measure_error(choice, load_chunks) for choice in choices]
    best = choices[errors.index(min(errors))]
    tried = ", ".join(map(str, usable))
    return best._replace(description=f"{best.description}, the best in validation of {tried}")


def _predict_season(
    series: Series, starts: Tensor, state: Mapping[str, Tensor], signature: Signature
) -> Tensor:
    """Return the targets one season ago, over and over. A season that begins before the context is
    replaced where the rows are not there: by a shorter one, or by the last value."""
    period, steps = int(state["period"]), signature.steps_out
    short = min(period, int(state.get("short", period)))  # a season of 0.1 fits the context
    if short:
        past = predict_seasonal(_gather_past(series, starts, state, short), steps, short)
    else:
        past = predict_repeat(_gather_past(series, starts, state, 1), steps)
    if period <= signature.context:
        return past
    season = windows.gather_season(series, starts, period)
    season = windows.separate_channels(season, signature.sequences_per_window)
    return torch.where(season.isnan(), past, season)


def _measure_reach(dataset: Dataset, load_chunks: ChunkLoader) -> int:
    """Return the number of rows that every window of validation and test can look back, the context
    included; rows that stay on disk are known within the context alone."""
    context = dataset.signature.context
    if dataset.stream is not None:
        return context
    reach = []
    sets = [name for name in ("val", "test") if name in dataset.num_windows]  # a search has no test
    for chunk in (chunk for set_name in sets for chunk in load_chunks(set_name)):
        starts, series = chunk.starts.cpu(), chunk.series
        borders = (series.offsets if series.segments is None else series.segments).cpu()
        first = borders[(torch.bucketize(starts, borders, right=True) - 1).clamp(min=0)]
        reach.append(int((starts - first).min()) + context)
    return min(reach)


def _measure_error(baseline: Baseline, load_chunks: ChunkLoader) -> float:
    """Return the mean absolute error over the validation windows, scaled."""
    total, count = 0.0, 0
    assert baseline.predict is not None
    for chunk in load_chunks("val"):
        for part in chunk.starts.split(EVAL_BATCH):
            starts = part.to(chunk.series.values.device)
            truth = windows.gather(chunk.series, starts).targets
            errors = (baseline.predict(chunk.series, starts)[..., 0] - truth).abs()
            total, count = total + float(errors.sum(dtype=torch.float64)), count + errors.numel()
    return total / max(count, 1)


def _fit_ridge(dataset: Dataset, load_chunks: ChunkLoader, work: FoldWork | None) -> Baseline:
    signature = dataset.signature
    shape = WindowShape(
        signature.context, signature.model_inputs, signature.model_targets, signature.future_shape
    )
    features = min(shape.count_numbers(), MAX_FEATURES)
    max_windows = max(int(RIDGE_WORK / (features**2 * signature.sequences_per_window)), EVAL_BATCH)
    if shape.is_wide:  # each window is compared with each other
        max_windows = MAX_FEATURES
    num_windows = dataset.num_windows["train"] if work is None else work.max_windows
    stride = -(-num_windows // max_windows)

    def load(series: Series, starts: Tensor) -> Iterator[tuple[Tensor, ...]]:
        size = max(RIDGE_NUMBERS // features, EVAL_BATCH) if series.values.is_cuda else EVAL_BATCH
        for batch_starts in starts.split(size):
            batch = windows.gather(series, batch_starts.to(series.values.device))
            _, ahead = split_static(batch.static, signature.future_shape)
            yield (batch.inputs, batch.targets, *(() if ahead is None else (ahead,)))

    def load_set(set_name: str) -> Iterator[tuple[Tensor, ...]]:
        for chunk in load_chunks(set_name):
            yield from load(chunk.series, chunk.starts[::stride])

    choices = RELATIVE if signature.model_shared == signature.model_targets else (False,)
    if work is None or shape.is_wide:
        ridge = fit_ridge(load_set("train"), load_set("val"), shape, choices)
    else:
        (chunk,) = load_chunks("train")
        starts = chunk.starts[torch.isin(chunk.starts, work.train[::stride])]
        sums = functools.partial(RidgeMoments.sum, features=shape.choose_features())
        work.moments = _move_moments(
            work.moments, starts, lambda moved: sums(load(chunk.series, moved))
        )
        ridge = solve_ridge(work.moments, sums(load_set("val")), shape, choices)
    rows_read = "the window's rows"
    rows_read += " and those known ahead" if signature.future else ""
    level = ", relative to the last one" if ridge.features.relative else ""
    description = f"least squares on {rows_read}{level}, from {_describe(stride)}"
    return restore_baseline("ridge", description, ridge.to_state(), signature)


def _fit_gbm(
    dataset: Dataset,
    load_chunks: ChunkLoader,
    work: FoldWork | None,
    fitted: FittedBoosting | None,
) -> Baseline:
    signature = dataset.signature
    if fitted is None:
        fitted = _prepare_gbm(dataset, load_chunks, work).fit()
    features = "the window's newest rows and means"
    ahead = " and the rows known ahead" if signature.future else ""
    description = f"gradient-boosted trees on {features}{ahead}, from {_describe(fitted.stride)}"
    return restore_baseline("gbm", description, fitted.boosting.to_state(), signature)


def _fit_rocket(dataset: Dataset, load_chunks: ChunkLoader, work: FoldWork | None) -> Baseline:
    context = dataset.signature.context
    if context < MIN_CONTEXT:
        return Baseline(f"windows of {format_count(context, 'row')} are too short", None)
    max_windows = 0 if work is None else work.max_windows
    fitted, stride = fit_convolutions(dataset, load_chunks, max_windows)
    kernels = format_count(len(fitted.bias), "random convolution")
    description = f"ridge classifier on {kernels}, from {_describe(stride)}"
    return restore_baseline("rocket", description, fitted.to_state(), dataset.signature)


def _prepare_gbm(
    dataset: Dataset, load_chunks: ChunkLoader, work: FoldWork | None
) -> PreparedBoosting:
    if work is None:
        return prepare_boosting(dataset, load_chunks)
    return prepare_boosting(
        dataset, load_chunks, num_folds=work.num_folds, max_windows=work.max_windows
    )


def start_boosting(dataset: Dataset) -> BackgroundBoosting:
    """Start fitting the trees of every fold beside the training."""

    def prepare() -> list[PreparedBoosting]:
        work = FoldWork(dataset) if dataset.folds else None
        folds = [dataset.select_fold(fold) for fold in dataset.folds] or [dataset]
        return [
            _prepare_gbm(fold, functools.partial(fold.iter_chunks, series=None, rows=0), work)
            for fold in folds
        ]

    return BackgroundBoosting(prepare)


def _move_moments(
    last: RidgeMoments | None, starts: Tensor, compute: Callable[[Tensor], RidgeMoments]
) -> RidgeMoments:
    """Return the sums over these windows, by adding and removing windows from the sums of the fold
    before; where most windows differ, all are summed again."""
    if last is None or last.starts is None:
        return compute(starts)._replace(starts=starts)
    more = starts[~torch.isin(starts, last.starts)]
    less = last.starts[~torch.isin(last.starts, starts)]
    if len(more) + len(less) >= len(starts):
        return compute(starts)._replace(starts=starts)
    sums = last
    if len(more):
        sums = sums.add(compute(more), 1)
    if len(less):
        sums = sums.add(compute(less), -1)
    return sums._replace(starts=starts)


def _fit_majority(dataset: Dataset, load_chunks: ChunkLoader) -> Baseline:
    classes = dataset.signature.classes
    counts = torch.zeros(len(classes), dtype=torch.int64)
    for batch in _iter_batches(load_chunks, "train", 1):
        counts += torch.bincount(batch.targets.long().flatten().cpu(), minlength=len(counts))
    log_probs = (counts / counts.sum()).clamp(min=MIN_PROBABILITY).log().float()
    description = f'always "{classes[int(counts.argmax())]}", each class as likely as in training'
    return restore_baseline("majority", description, {"log_probs": log_probs}, dataset.signature)


def _fit_logistic(dataset: Dataset, load_chunks: ChunkLoader, work: FoldWork | None) -> Baseline:
    signature = dataset.signature
    num_inputs = len(signature.inputs)
    values = min(signature.context, max(LOGISTIC_VALUES // num_inputs, MIN_LOGISTIC_VALUES))
    features = count_features(values, num_inputs, signature.static_width)
    outputs = signature.steps_out * len(signature.classes)
    effort = LOGISTIC_WORK / (LOGISTIC_PASSES * features * outputs)
    max_windows = max(int(min(effort, LOGISTIC_NUMBERS / features)), EVAL_BATCH)
    num_windows = dataset.num_windows["train"] if work is None else work.max_windows
    stride = -(-num_windows // max_windows)
    get_statistics = _make_reader(load_chunks, work, features, values)

    def load(set_name: str) -> Iterator[tuple[Tensor, Tensor]]:
        for chunk in load_chunks(set_name):
            for batch_starts in chunk.starts[::stride].split(EVAL_BATCH):
                starts = batch_starts.to(chunk.series.values.device)
                labels = chunk.series.targets[starts[:, None] + chunk.series.target_rows]
                yield get_statistics(chunk.series, starts), labels[..., 0].long()

    logistic = fit_logistic(
        load("train"), load("val"), num_classes=len(signature.classes), values=values
    )
    ahead = ", statistics and the rows known ahead" if signature.future else " and statistics"
    description = f"logistic regression on the window's values{ahead}, from {_describe(stride)}"
    baseline = restore_baseline("logistic", description, logistic.to_state(), signature)
    if work is None:
        return baseline

    def predict(series: Series, starts: Tensor) -> Tensor:
        logits = logistic.predict(get_statistics(series, starts))
        return logits.view(len(starts), signature.steps_out, 1, -1)

    return baseline._replace(predict=predict)


def _make_reader(
    load_chunks: ChunkLoader, work: FoldWork | None, features: int, values: int
) -> Callable[[Series, Tensor], Tensor]:
    """Return a function from windows to their features; with folds, the features are computed once,
    unless there are too many to hold."""

    def compute(series: Series, starts: Tensor) -> Tensor:
        return compute_statistics(*windows.gather_inputs(series, starts), values)

    if work is None or len(work.windows) * features > LOGISTIC_NUMBERS:
        return compute
    if work.statistics is None:
        (chunk,) = load_chunks("train")
        device = chunk.series.values.device
        parts = [
            compute(chunk.series, batch_starts.to(device))
            for batch_starts in work.windows.split(EVAL_BATCH)
        ]
        work.statistics = torch.cat(parts)
    statistics, known = work.statistics, work.windows.to(work.statistics.device)

    def select(_: Series, starts: Tensor) -> Tensor:
        return statistics[torch.searchsorted(known, starts)]

    return select


def _iter_batches(load_chunks: ChunkLoader, set_name: str, stride: int) -> Iterator[Batch]:
    """Yield batches of a set's windows, of every `stride`-th window."""
    for chunk in load_chunks(set_name):
        for starts in chunk.starts[::stride].split(EVAL_BATCH):
            yield windows.gather(chunk.series, starts.to(chunk.series.values.device))


def _describe(stride: int) -> str:
    return "every training window" if stride == 1 else f"one training window in {stride}"


def _to_tensors(numbers: Mapping[str, float]) -> dict[str, Tensor]:
    return {name: torch.tensor(n, dtype=torch.float64) for name, n in numbers.items()}


class WindowShape(NamedTuple):
    """What the features of a ridge depend on."""

    context: int
    inputs: int
    targets: int
    future: tuple[int, int] = (0, 0)
    """The rows and columns that are known ahead"""

    @property
    def is_wide(self) -> bool:
        return self.inputs >= WIDE_INPUTS

    def count_numbers(self) -> int:
        return self.context * self.inputs + self.future[0] * self.future[1]

    def choose_features(self, *, relative: bool = False) -> RidgeFeatures:
        """Return the conversion of windows that gives few enough features."""
        pooled = -(-self.count_numbers() // MAX_FEATURES)
        return RidgeFeatures(pooled, relative, self.future[1])


class RidgeFeatures(NamedTuple):
    """The conversion of windows to features."""

    pooled: int
    """The number of rows that are averaged into one, to limit the number of features"""
    relative: bool
    """Whether rows and targets are relative to the window's last row, which requires that every
    target is an input"""
    future: int = 0
    """U, the number of inputs known ahead; they come first and are never relative"""

    def build(self, inputs: Tensor, ahead: Tensor | None = None) -> Tensor:
        """Return the features: rows averaged from the end, rows ahead, and a constant 1; [T, B, F]
        to [B, D + 1], float64."""
        if self.relative:
            inputs = torch.cat(
                [inputs[..., : self.future], (inputs - inputs[-1])[..., self.future :]], dim=-1
            )
        if self.pooled > 1:
            full = inputs[inputs.shape[0] % self.pooled :]
            means = full.unflatten(0, (-1, self.pooled)).mean(dim=1)
            inputs = torch.cat([means, inputs[-1:]])
        parts = [inputs.transpose(0, 1).flatten(1)]
        if ahead is not None:
            parts += [rows.mean(dim=1) for rows in ahead.split(self.pooled, dim=1)]
        return _append_one(torch.cat(parts, dim=1).double())

    def build_pairs(self, batches: Batches) -> Batches:
        """Yield features [B, D + 1] and targets [B, H * C] of every batch."""
        for inputs, targets, *ahead in batches:
            if self.relative:
                targets = targets - inputs[-1][:, None, -targets.shape[2] :]
            yield self.build(inputs, *ahead), targets.flatten(1).double()


@dataclass(frozen=True)
class Ridge:
    """Least squares from the window's rows, with a penalty chosen on the validation set."""

    weights: Tensor
    """[D + 1, H * C], the constant last"""
    penalty: float
    features: RidgeFeatures
    basis: Tensor | None = None
    """[D + 1, N + 1]: for wide tables, the products of features with N training windows, and the
    constant"""

    def to_state(self) -> dict[str, Tensor]:
        """Return it as tensors alone."""
        numbers = {**self.features._asdict(), "penalty": self.penalty}
        basis = {} if self.basis is None else {"basis": self.basis}
        return _to_tensors(numbers) | {"weights": self.weights} | basis

    @classmethod
    def from_state(cls, state: Mapping[str, Tensor]) -> Ridge:
        future = int(state.get("future", 0))  # a ridge fitted by 0.1 has none
        features = RidgeFeatures(int(state["pooled"]), bool(state["relative"]), future)
        return cls(state["weights"], float(state["penalty"]), features, state.get("basis"))

    def predict(self, inputs: Tensor, steps: int, ahead: Tensor | None = None) -> Tensor:
        """Return predictions [B, H, C]."""
        features = self.features.build(inputs, ahead)
        if self.basis is not None:
            features = features @ self.basis
        out: Tensor = (features @ self.weights).float().unflatten(1, (steps, -1))
        if not self.features.relative:
            return out
        return out + inputs[-1][:, None, -out.shape[2] :]


class BaselineNetwork(NamedTuple):
    """A fitted baseline as a network, which can be exported, served and streamed."""

    model: dict[str, Any]
    """Settings of `[model]`"""
    weights: dict[str, Tensor]


def make_network(
    name: str, state: Mapping[str, Tensor], signature: Signature
) -> BaselineNetwork | None:
    """Return a fitted baseline as a network; None where it reads more than its window."""
    match name:
        case "ridge":
            normalize = "last" if bool(state["relative"]) else "none"
            return _make_linear(normalize, make_linear_weights(state, signature))
        case "repeat" if not signature.horizon:
            weights = _make_selection(signature, 0, state["mean"].float().cpu())
            return _make_linear("none", weights)
        case "repeat" if signature.model_shared == signature.model_targets:
            return _make_linear("last", _make_selection(signature, 0))
        case "seasonal" if signature.model_shared == signature.model_targets:
            period = int(state["period"])
            if period <= signature.context:
                return _make_linear("none", _make_selection(signature, period))
        case "gbm":
            options, weights = boosting.make_network(state, signature)
            return BaselineNetwork({"kind": "gbm", "options": options.write()}, weights)
        case "rocket":
            groups, weights = convolutions.make_network(state)
            return BaselineNetwork({"kind": "rocket", "options": groups}, weights)
        case "logistic":
            names = ("mean", "size", "weights")
            weights = {f"core.{name}": state[name].float() for name in names}
            values = {"values": int(state.get("values", 0))}
            return BaselineNetwork({"kind": "logistic", "options": values}, weights)
    return None


def _make_linear(normalize: str, weights: dict[str, Tensor]) -> BaselineNetwork:
    return BaselineNetwork({"kind": "linear", "normalize": normalize}, weights)


def _make_selection(
    signature: Signature, period: int, constant: Tensor | None = None
) -> dict[str, Tensor]:
    """Return the weights of a linear network that repeats the last `period` rows of the targets,
    added to a constant [C]."""
    steps, targets, inputs = signature.steps_out, signature.model_targets, signature.model_inputs
    width = signature.context * inputs + signature.static_width
    weight = torch.zeros(steps, targets, width)
    for step in range(steps if period else 0):
        row = signature.context - period + step % period
        for target in range(targets):
            weight[step, target, row * inputs + inputs - targets + target] = 1.0
    bias = torch.zeros(targets) if constant is None else constant
    return {
        "core.head.linear.weight": weight.flatten(0, 1),
        "core.head.linear.bias": bias.repeat(steps),
    }


def make_linear_weights(state: Mapping[str, Tensor], signature: Signature) -> dict[str, Tensor]:
    """Return a fitted ridge as the weights of `model.kind = "linear"`, with `model.normalize` as
    `Ridge.features` says: "last" where they are relative, else "none"."""
    ridge = Ridge.from_state(state)
    weights = ridge.weights if ridge.basis is None else ridge.basis @ ridge.weights
    weights = weights.double().cpu()
    pooled, rows, inputs = ridge.features.pooled, signature.context, signature.model_inputs
    by_row = torch.zeros(rows, inputs, weights.shape[1], dtype=torch.float64)
    if pooled > 1:
        begin = rows % pooled
        count = (rows - begin) // pooled
        blocks = weights[: count * inputs].view(count, inputs, -1) / pooled
        by_row[begin:] = blocks.repeat_interleave(pooled, dim=0)
        by_row[-1] += weights[count * inputs : (count + 1) * inputs]
        used = (count + 1) * inputs
    else:
        by_row[:] = weights[: rows * inputs].view(rows, inputs, -1)
        used = rows * inputs
    parts = [by_row.flatten(0, 1), torch.zeros(len(signature.static), weights.shape[1]).double()]
    ahead, columns = signature.future_shape
    place = used
    for begin in range(0, ahead, pooled):
        size = min(pooled, ahead - begin)
        parts += [weights[place : place + columns] / size] * size
        place += columns
    return {
        "core.head.linear.weight": torch.cat(parts).T.float().contiguous(),
        "core.head.linear.bias": weights[-1].float().contiguous(),
    }


class RidgeMoments(NamedTuple):
    """Sums over windows of features x and targets y."""

    xx: Tensor
    """[D + 1, D + 1]"""
    xy: Tensor
    """[D + 1, H * C]"""
    yy: Tensor
    num_windows: int
    starts: Tensor | None = None
    """The first rows of the windows, where they are known"""

    @classmethod
    def sum(cls, batches: Batches, features: RidgeFeatures) -> RidgeMoments:
        """Return the sums over every window of the batches; of absolute features, those of relative
        ones follow."""
        xx = xy = yy = torch.zeros((), dtype=torch.float64)
        num_windows = 0
        for x, y in features.build_pairs(batches):
            xx, xy, yy = xx + x.T @ x, xy + x.T @ y, yy + y.square().sum()
            num_windows += len(x)
        return cls(xx, xy, yy, num_windows)

    def add(self, added: RidgeMoments, times: int) -> RidgeMoments:
        """Return the sums with the sums of other windows added `times` times; -1 removes them."""
        return RidgeMoments(
            self.xx + times * added.xx,
            self.xy + times * added.xy,
            self.yy + times * added.yy,
            self.num_windows + times * added.num_windows,
        )

    def subtract_last(self, shape: WindowShape) -> RidgeMoments:
        """Return the sums of rows and targets relative to the last row of each window."""
        pooled, inputs = shape.choose_features().pooled, shape.inputs
        last = inputs * (shape.context // pooled - (pooled == 1))
        moved = torch.arange(last + inputs, device=self.xx.device)
        moved = moved[moved % inputs >= shape.future[1]]
        by = last + moved % inputs
        xx = self.xx.clone()
        xx[:, moved] -= self.xx[:, by]
        xx[moved] -= xx[by]
        outputs = torch.arange(self.xy.shape[1], device=self.xx.device)
        levels = last + inputs - shape.targets + outputs % shape.targets
        xy = self.xy - self.xx[:, levels]
        yy = self.yy - (self.xy[levels, outputs] + xy[levels, outputs]).sum()
        xy[moved] -= xy[by]
        return self._replace(xx=xx, xy=xy, yy=yy)


def fit_ridge(
    train: Batches, val: Batches, shape: WindowShape, choices: Sequence[bool] = RELATIVE
) -> Ridge:
    """Solve in closed form, with `choices` of `RidgeFeatures.relative`."""
    if shape.is_wide:
        return _fit_wide(train, val, shape, choices)
    sums = functools.partial(RidgeMoments.sum, features=shape.choose_features())
    return solve_ridge(sums(train), sums(val), shape, choices)


def solve_ridge(
    train: RidgeMoments, val: RidgeMoments, shape: WindowShape, choices: Sequence[bool]
) -> Ridge:
    """Return the ridge with the lowest error on the validation set."""

    def solve(relative: bool) -> tuple[float, Ridge]:
        x, y = (part.subtract_last(shape) if relative else part for part in (train, val))
        penalized = torch.ones_like(x.xx[0])
        penalized[-1] = 1e-9  # the constant is free; what is left keeps the system regular

        def solve_with(penalty: float) -> tuple[float, Tensor]:
            matrix = x.xx + torch.diag(penalty * x.num_windows * penalized)
            factor, problem = torch.linalg.cholesky_ex(matrix)
            if int(problem):  # by rounding
                weights = torch.linalg.solve(matrix, x.xy)
            else:
                weights = torch.cholesky_solve(x.xy, factor)
            explained = 2 * (weights * y.xy).sum() - (weights * (y.xx @ weights)).sum()
            return float(y.yy - explained), weights

        error, weights, penalty = _choose_penalty(RIDGE_PENALTIES, solve_with)
        return error, Ridge(weights, penalty, shape.choose_features(relative=relative))

    return _choose_relative({relative: solve(relative) for relative in choices})


def _fit_wide(train: Batches, val: Batches, shape: WindowShape, choices: Sequence[bool]) -> Ridge:
    """Find the same solution from the products of windows with each other, where there are fewer
    windows than features."""
    train, val = list(train), list(val)

    def solve(relative: bool) -> tuple[float, Ridge]:
        features = shape.choose_features(relative=relative)
        x, y = _join(features.build_pairs(train))
        val_x, val_y = _join(features.build_pairs(val))
        mean, level = x.mean(dim=0), y.mean(dim=0)
        centred = x - mean  # without the constant, which is then free of penalty
        basis = torch.zeros(x.shape[1], len(x) + 1, dtype=x.dtype, device=x.device)
        basis[:, :-1] = centred.T
        basis[-1, :-1] = -(centred @ mean)
        basis[-1, -1] = 1.0
        sizes, vectors = torch.linalg.eigh(centred @ centred.T)
        rotated = vectors.T @ (y - level)
        val_x = val_x @ basis

        def solve_with(penalty: float) -> tuple[float, Tensor]:
            solved = vectors @ (rotated / (sizes.clamp(min=0.0) + penalty * len(x))[:, None])
            weights = torch.cat([solved, level[None]])
            return float((val_x @ weights - val_y).square().sum()), weights

        error, weights, penalty = _choose_penalty(RIDGE_PENALTIES, solve_with)
        return error, Ridge(weights, penalty, features, basis)

    return _choose_relative({relative: solve(relative) for relative in choices})


def _choose_relative(solved: Mapping[bool, tuple[float, Ridge]]) -> Ridge:
    """Return the ridge relative to the last row, unless that on the rows themselves is clearly
    better in validation."""
    errors = {relative: error for relative, (error, _) in solved.items()}
    is_relative = errors.get(True, math.inf) * (1 - MIN_ABSOLUTE_GAIN) <= errors.get(
        False, math.inf
    )
    return solved[is_relative][1]


def _choose_penalty(
    penalties: Iterable[float], solve: Callable[[float], tuple[float, Tensor]]
) -> tuple[float, Tensor, float]:
    """Return the lowest validation error, the weights that have it, and their penalty."""
    solved = ((*solve(penalty), penalty) for penalty in penalties)
    return min(solved, key=lambda result: result[0])


def _join(pairs: Batches) -> tuple[Tensor, Tensor]:
    features, targets = zip(*pairs, strict=True)
    return torch.cat(features), torch.cat(targets)


def _append_one(features: Tensor) -> Tensor:
    return torch.cat([features, features.new_ones(len(features), 1)], dim=1)


def fit_logistic(train: Batches, val: Batches, *, num_classes: int, values: int = 0) -> Logistic:
    """Fit to batches of features [B, D] and labels [B, H], with the penalty that validates best;
    so many `values` of each input are among the features."""
    (features, labels), (val_features, val_labels) = _join(train), _join(val)
    deviation, mean = torch.std_mean(features, dim=0, correction=0)
    size = torch.where(deviation > 1e-12, deviation, 1.0)
    x, val_x = (_append_one((values - mean) / size) for values in (features, val_features))
    warm_start = x.new_zeros(x.shape[1], labels.shape[1] * num_classes)
    products = x.T @ x / len(x)

    def solve(penalty: float) -> tuple[float, Tensor]:
        nonlocal warm_start
        warm_start = _minimize(x, labels, warm_start, penalty, products)
        return float(_compute_log_loss(val_x @ warm_start, val_labels)), warm_start

    _, weights, penalty = _choose_penalty(LOGISTIC_PENALTIES, solve)
    return Logistic(mean, size, weights, penalty, values)


def _compute_log_loss(logits: Tensor, labels: Tensor) -> Tensor:
    by_row = logits.unflatten(1, (labels.shape[1], -1))
    return torch.nn.functional.cross_entropy(by_row.flatten(0, 1), labels.flatten())


def _minimize(
    x: Tensor, labels: Tensor, weights: Tensor, penalty: float, products: Tensor
) -> Tensor:
    """Return the weights with the lowest penalised loss, starting from `weights`; `products` are
    the mean products of the features, [D + 1, D + 1]."""
    from scipy import optimize  # takes a while, and only classes need it

    steps, num_classes = labels.shape[1], weights.shape[1] // labels.shape[1]
    is_label = torch.nn.functional.one_hot(labels, num_classes).to(x.dtype)
    # The statistics of a window depend on one another. In coordinates in which the loss bends alike
    # in all directions, roughly, half of the steps are enough.
    factor = torch.linalg.cholesky(
        products / num_classes + penalty * torch.eye(len(products)).to(products)
    )

    def to_weights(flat: npt.NDArray[np.float64]) -> Tensor:
        moved = torch.from_numpy(flat).to(x.device).view_as(weights)
        solution: Tensor = torch.linalg.solve_triangular(factor.T, moved, upper=True)
        return solution

    def compute_loss(flat: npt.NDArray[np.float64]) -> tuple[float, npt.NDArray[np.float64]]:
        now = to_weights(flat)
        log_probs = torch.log_softmax((x @ now).unflatten(1, (steps, -1)), dim=-1)
        loss = -(log_probs * is_label).sum() / labels.numel()
        gradient = x.T @ ((log_probs.exp() - is_label) / labels.numel()).flatten(1)
        gradient[:-1] += penalty * now[:-1]  # the constant is free
        loss = loss + 0.5 * penalty * now[:-1].square().sum()
        gradient = torch.linalg.solve_triangular(factor, gradient, upper=False)
        return float(loss), gradient.cpu().numpy().ravel()

    start, options = (factor.T @ weights).cpu().numpy().ravel(), {"maxiter": MAX_ITERATIONS}
    is_short = x.numel() * weights.shape[1] < MIN_PARALLEL_WORK
    with machine.use_threads(1) if is_short else nullcontext():
        result = optimize.minimize(
            compute_loss, start, jac=True, method="L-BFGS-B", options=options
        )
    return to_weights(result.x)


FOLDER, WEIGHTS, METADATA = "baselines", "weights.safetensors", "baselines.json"
MAX_BYTES = 256 * 2**20
"""Larger baselines, of very many targets and predicted rows, are not saved but fitted when
needed"""


def save_baselines(run: Run, folds: Sequence[Mapping[str, Baseline]]) -> None:
    """Write baselines/, unless they are very large; a run without folds has one entry."""
    tensors: dict[str, Tensor] = {}
    entries: list[dict[str, Any]] = []
    for number, baselines in enumerate(folds):
        for name, baseline in baselines.items():
            for key, value in baseline.state.items():
                tensors[f"{number}/{name}/{key}"] = value.detach().cpu().contiguous()
        entries.append(
            {
                name: {"what": baseline.description, "known": baseline.predict is not None}
                for name, baseline in baselines.items()
            }
        )
    if sum(tensor.nbytes for tensor in tensors.values()) <= MAX_BYTES:
        folder = run.folder / FOLDER
        checkpoint.write_folder(folder, {WEIGHTS: tensors}, {METADATA: {"folds": entries}})


def load_baselines(
    run: Run, signature: Signature, device: torch.device
) -> list[dict[str, Baseline]] | None:
    """Load the baselines of every fold; None where a run has none, as in version 0.1."""
    folder = run.folder / FOLDER
    if not folder.exists():
        return None
    files = storage.read_verified(folder)
    tensors = checkpoint.parse_tensors(files[WEIGHTS], folder / WEIGHTS)
    folds = []
    for number, entries in enumerate(json.loads(files[METADATA])["folds"]):
        baselines = {}
        for name, entry in entries.items():
            prefix = f"{number}/{name}/"
            state = {
                key.removeprefix(prefix): value.to(device)
                for key, value in tensors.items()
                if key.startswith(prefix)
            }
            baselines[name] = Baseline(entry["what"], None)
            if entry["known"]:
                baselines[name] = restore_baseline(name, entry["what"], state, signature)
        folds.append(baselines)
    return folds
