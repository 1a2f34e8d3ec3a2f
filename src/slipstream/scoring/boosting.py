"""Gradient-boosted trees on the features of a window: fitting the gbm baseline.

The trees are scikit-learn's (`trees` fits them), predictions are those of `models/boosting.py`: a
saved baseline needs no scikit-learn. Many predicted rows are a few principal components: on ETTh1,
96 rows ahead, eight of them have a scaled MSE of 0.37, trees with the row's number as a feature
0.52.

Shapes: T context rows, B windows or sequences, F inputs, H predicted rows, C targets, D features,
K outputs, U columns known ahead, M trees, S splits and L leaves of a tree, Q classes.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from threading import Thread
from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.base import machine
from slipstream.config import Signature
from slipstream.data import windows
from slipstream.data.dataset import Dataset
from slipstream.engine.step import EVAL_BATCH
from slipstream.models.boosting import Boosting, split_static
from slipstream.models.kinds.boosting import (
    AHEAD_NUMBERS,
    FEATURES,
    MAX_FEATURES,
    TreeOptions,
)
from slipstream.scoring.batch import ChunkLoader
from slipstream.scoring.trees import Array, TreeTask, fit_trees, take_process

WORK_S, MAX_CORES = 1.5, 8
"""Seconds that fitting may take, on each of so many cores; where all windows would take longer, it
is fitted to fewer windows. The estimate is a fixed one, so that a run that is repeated or resumed
has the same trees"""
SPLIT_S, ROW_S = 3e-5, 7e-9
"""Seconds of one tree and feature: for finding splits, and for each window, on one core"""
MAX_TREES, MIN_TREES = 300, 40
"""Trees of all outputs together, and of each output at least"""
WINDOWS_PER_OUTPUT, WINDOWS_PER_TREE, MIN_FEW_TREES = 100, 16, 8
"""Where there are few windows: those for each output with trees, for each tree of an output, and
the trees that it has at least. A tree takes milliseconds however small it is"""
MAX_COMPONENTS = 8
"""Principal components per target, in place of more predicted rows"""
MAX_OUTPUTS = 16
MAX_CLASS_ROWS = 4
"""Predicted rows with classes that have trees; of more, the rows between are interpolated"""
NEWEST_ROWS, SEASON_ROWS = 4, 12
MAX_NUMBERS = 5e7
"""Features and targets that are held at once"""
MAX_COVARIANCE = 1024
"""Predicted numbers above which components come from the products of windows with each other"""
ANCHORS = ((1.0, 0, 0, 0), (0, 1.0, 0, 0), (0, 0, 1.0, 0), (0, 0, 0, 1.0), (0, 0, 0.5, 0.5))
"""Shares of the anchors to choose from by the validation set"""


def list_features(context: int, period: int, limit: int, *, classes: bool) -> list[tuple[int, int]]:
    """Return the kinds of features of an input and their numbers of rows, at most `limit`, the
    most useful ones first."""
    lengths = [length for length in (2**n for n in range(1, 30)) if length < context]
    names = [("last", 1), *(("mean", length) for length in (context, *lengths[::-1]))]
    names += [("row", 2)] if context > 1 else []
    if period:
        step = max(period // SEASON_ROWS, 1)
        names += [("row", rows) for rows in range(period, 0, -step)]
    names += [("row", rows) for rows in range(3, min(NEWEST_ROWS + 1, context) + 1)]
    if classes:  # of numbers, they are worse in periods that are unlike those of training
        names += [("deviation", context), ("least", context), ("most", context)]
    if context == 1:
        names = names[:1]
    unique = list(dict.fromkeys(name for name in names if name != ("row", 1)))
    return [(FEATURES.index(kind), rows) for kind, rows in unique[:limit]]


class FittedBoosting(NamedTuple):
    """Trees, and how many of the training windows they are fitted to."""

    boosting: Boosting
    stride: int
    """Of so many training windows one is used"""


@dataclass(frozen=True)
class PreparedBoosting:
    """The windows that trees are to be fitted to, as numbers, and all but the trees."""

    boosting: Boosting
    task: TreeTask
    stride: int
    """Of so many training windows one is used"""

    def fit(self) -> FittedBoosting:
        """Fit the trees in this process."""
        return self.finish(fit_trees(self.task, torch.get_num_threads()))

    def finish(self, trees: Mapping[str, Array]) -> FittedBoosting:
        """Return the boosting with these trees."""
        tensors = {name: torch.from_numpy(array) for name, array in trees.items()}
        return FittedBoosting(replace(self.boosting, trees=tensors), self.stride)


Parts = tuple[Tensor, Tensor | None, Tensor | None, Tensor]
"""Inputs [T, B, F], static columns, rows known ahead [B, H, U] and targets [B, H, C]"""


def prepare_boosting(
    dataset: Dataset, load_chunks: ChunkLoader, *, num_folds: int = 1, max_windows: int = 0
) -> PreparedBoosting:
    """Return what trees are fitted to. A fold has its share of the time, and the sample of the
    largest fold, which has `max_windows`."""
    signature = dataset.signature
    steps, targets, inputs = signature.steps_out, signature.model_targets, signature.model_inputs
    classes, period = len(signature.classes), dataset.period or 0
    period = period if 1 < period <= signature.context else 0
    if classes:
        num_outputs = min(steps, MAX_CLASS_ROWS)
        num_trees = num_outputs * (1 if classes == 2 else classes)
    else:
        most = max(dataset.num_windows["train"] // WINDOWS_PER_OUTPUT, 2)
        num_trees = num_outputs = min(steps * targets, MAX_COMPONENTS * targets, MAX_OUTPUTS, most)
    limit = max(MAX_FEATURES // inputs, 1)
    layout = list_features(signature.context, period, limit, classes=bool(classes))
    num_columns = min(inputs, MAX_FEATURES)
    rows, future = signature.future_shape
    num_features = len(layout) * num_columns + len(signature.static)
    num_features += min(rows * future, AHEAD_NUMBERS + num_outputs * future)
    iterations = max(MAX_TREES // num_trees, MIN_TREES)
    work_s = WORK_S * min(machine.count_available_cores(), MAX_CORES) / num_folds
    each_s = work_s / (iterations * num_trees * num_features)
    max_rows = max(int((each_s - SPLIT_S) / ROW_S), EVAL_BATCH)
    max_rows = min(max_rows, int(MAX_NUMBERS / (num_features + steps * targets)))
    num_windows = max(dataset.num_windows["train"], max_windows)
    stride = max(-(-num_windows * signature.sequences_per_window // max_rows), 1)

    def load(set_name: str, every: int) -> Iterator[Parts]:
        for chunk in load_chunks(set_name):
            for starts in chunk.starts[::every].split(EVAL_BATCH):
                batch = windows.gather(chunk.series, starts.to(chunk.series.values.device))
                static, ahead = split_static(batch.static, signature.future_shape)
                yield batch.inputs, static, ahead, batch.targets

    val_stride = max(dataset.num_windows["val"] * signature.sequences_per_window // max_rows, 1)
    boosting = Boosting(
        layout=tuple(layout),
        columns=torch.arange(inputs)[-num_columns:],
        anchor=(0.0,) * len(ANCHORS[0]),
        period=period,
        future=future,
        basis=torch.zeros(0),
        mean=torch.zeros(0),
        trees={},
    )
    relative = signature.horizon and signature.model_shared == targets
    if relative:
        boosting = replace(boosting, anchor=_choose_anchor(load("val", val_stride), boosting))
    if classes:
        mean = torch.zeros(steps)  # of classes, the constants are those of the trees
        basis = _interpolate(steps, num_outputs).float()
        boosting = replace(boosting, basis=basis, mean=mean)
    elif steps * targets <= num_outputs:  # each predicted number has trees of its own
        identity = torch.eye(num_outputs)
        boosting = replace(boosting, mean=torch.zeros_like(identity[0]), basis=identity)
    else:
        rest = [
            (parts[3] - boosting.compute_anchor(parts[0], steps, targets)).flatten(1).cpu()
            for parts in load("train", stride)
        ]
        mean, basis = _find_components(torch.cat(rest).double(), num_outputs)
        boosting = replace(boosting, mean=mean.float(), basis=basis.float())
    if num_columns < inputs:
        boosting = _choose_columns(load("train", stride), boosting, signature, num_columns)
    x, y = _read(load("train", stride), boosting, signature)
    x_val, y_val = _read(load("val", val_stride), boosting, signature)
    iterations = min(iterations, max(len(x) // WINDOWS_PER_TREE, MIN_FEW_TREES))
    rate = 0.1 if iterations >= 100 else 0.15 if iterations >= MIN_TREES else 0.3
    task = TreeTask(x, y, x_val, y_val, classes, iterations, rate)
    return PreparedBoosting(boosting, task, stride)


def _choose_anchor(val: Iterator[Parts], boosting: Boosting) -> tuple[float, ...]:
    """Return the shares of the anchors with the lowest squared error over these windows."""
    choices = [shares for shares in ANCHORS if boosting.period or not any(shares[2:])]
    errors = [0.0] * len(choices)
    for inputs, _, _, truth in val:
        for number, shares in enumerate(choices):
            candidate = replace(boosting, anchor=shares)
            anchor = candidate.compute_anchor(inputs, truth.shape[1], truth.shape[2])
            errors[number] += float((truth - anchor).square().sum(dtype=torch.float64))
    return choices[errors.index(min(errors))]


def _interpolate(steps: int, count: int) -> Tensor:
    """Return the shares of `count` predicted rows in all `steps` rows, [K, H] float64."""
    places = torch.linspace(0, steps - 1, count, dtype=torch.float64).round()
    rows = torch.arange(steps, dtype=torch.float64)
    if count == 1:
        return torch.ones(1, steps, dtype=torch.float64)
    left = (torch.searchsorted(places, rows, right=True) - 1).clamp(max=count - 2)
    share = (rows - places[left]) / (places[left + 1] - places[left])
    basis = torch.zeros(count, steps, dtype=torch.float64)
    basis[left, torch.arange(steps)] = 1 - share
    basis[left + 1, torch.arange(steps)] += share
    return basis


def _find_components(rest: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the mean of [N, H * C] and its first principal components [K, H * C]."""
    width, mean = rest.shape[1], rest.mean(dim=0)
    centred = rest - mean
    if width <= MAX_COVARIANCE:
        _, vectors = torch.linalg.eigh(centred.T @ centred)
        return mean, vectors[:, -count:].T.flip(0).contiguous()
    centred = centred[:: math.ceil(len(centred) / MAX_COVARIANCE)]
    sizes, vectors = torch.linalg.eigh(centred @ centred.T)
    count = min(count, len(centred))
    basis = vectors[:, -count:].T.flip(0) @ centred
    return mean, basis / sizes[-count:].flip(0).clamp(min=1e-12).sqrt()[:, None]


def _read(parts: Iterator[Parts], boosting: Boosting, signature: Signature) -> tuple[Array, Array]:
    """Return the features [N, D] and outputs [N, K] of windows."""
    features, outputs = [], []
    for inputs, static, ahead, truth in parts:
        features.append(boosting.to(inputs.device).build(inputs, static, ahead).cpu())
        outputs.append(_compute_outputs(inputs, truth, boosting, signature))
    return torch.cat(features).numpy(), torch.cat(outputs).numpy()


def _compute_outputs(
    inputs: Tensor, truth: Tensor, boosting: Boosting, signature: Signature
) -> Tensor:
    """Return the outputs that windows should have, [B, K]: numbers, or classes."""
    steps, targets = truth.shape[1:]
    if signature.classes:
        places = torch.linspace(0, steps - 1, len(boosting.basis)).round().long()
        return truth.cpu()[:, places, 0].long()
    rest = truth - boosting.compute_anchor(inputs, steps, targets)
    centred = rest.flatten(1).cpu().double() - boosting.mean
    return (centred @ boosting.basis.double().T).float()


def _choose_columns(
    train: Iterator[Parts], boosting: Boosting, signature: Signature, count: int
) -> Boosting:
    """Return the boosting with the inputs of a wide table whose newest values are correlated most
    with any output."""
    newest, outputs = [], []
    for inputs, _, _, truth in train:
        newest.append(inputs[-1].cpu().double())
        wanted = _compute_outputs(inputs, truth, boosting, signature)
        if signature.classes:
            wanted = torch.nn.functional.one_hot(wanted, len(signature.classes)).flatten(1)
        outputs.append(wanted.double())
    x, y = (values - values.mean(dim=0) for values in (torch.cat(newest), torch.cat(outputs)))
    sizes = x.norm(dim=0)[:, None] * y.norm(dim=0)
    correlation = (x.T @ y).abs() / sizes.clamp(min=1e-12)
    chosen = correlation.amax(dim=1).topk(count).indices.sort().values
    return replace(boosting, columns=chosen)


def make_network(
    state: Mapping[str, Tensor], signature: Signature
) -> tuple[TreeOptions, dict[str, Tensor]]:
    """Return fitted trees as the options and weights of `model.kind = "gbm"`."""
    boosting = Boosting.from_state(state)
    options = TreeOptions(
        features=tuple((FEATURES[kind], rows) for kind, rows in boosting.layout),
        anchor=boosting.anchor if any(boosting.anchor) else (),
        period=boosting.period,
        outputs=len(boosting.basis),
        trees=len(boosting.trees["output"]),
        leaves=boosting.trees["value"].shape[1],
        targets=signature.model_targets,
    )
    weights = {f"trees.{name}": values for name, values in boosting.trees.items()}
    weights |= {name: getattr(boosting, name) for name in ("columns", "basis", "mean")}
    weights["trees.level"] = weights["trees.level"].float()
    return options, {f"core.{name}": values for name, values in weights.items()}


class BackgroundBoosting:
    """Fits the trees of every fold in a process beside the training, on cores that it leaves
    idle."""

    def __init__(self, prepare: Callable[[], Sequence[PreparedBoosting]]) -> None:
        self._fitted: list[FittedBoosting] | None = None
        self.seconds = 0.0
        """What fitting all folds took, once it has ended"""
        self._thread = Thread(target=self._fit, args=(prepare,), daemon=True)
        self._thread.start()

    def _fit(self, prepare: Callable[[], Sequence[PreparedBoosting]]) -> None:
        # the training's own thread is busy as well
        threads = min(max(machine.count_available_cores() - 1, 1), MAX_CORES)
        began, process = time.perf_counter(), take_process()
        try:
            with torch.inference_mode():
                prepared = prepare()
        except BaseException:
            process.close()
            raise
        trees = process.fit([fold.task for fold in prepared], threads)
        self.seconds = time.perf_counter() - began
        if trees is not None:
            self._fitted = [
                fold.finish(fitted) for fold, fitted in zip(prepared, trees, strict=True)
            ]

    @property
    def is_done(self) -> bool:
        return not self._thread.is_alive()

    def wait(self) -> list[FittedBoosting] | None:
        """Return what was fitted for every fold; None where that failed."""
        self._thread.join()
        return self._fitted
