"""The weights of an ensemble's members, fitted to the validation set.

They are not negative and add up to one. Shapes: M members, N numbers or windows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from slipstream.base.errors import UserError
from slipstream.config import Signature
from slipstream.data.dataset import Dataset
from slipstream.data.folds import Fold
from slipstream.data.series import Flags, Ints
from slipstream.scoring.batch import PredictionBatch

Floats = npt.NDArray[np.float64]
MAX_NUMBERS = 20_000_000
"""Errors up to which weights are fitted to all of them; above, to an even sample"""
ROUNDS = 200
"""Steps from one set of weights to a better one, where there is no closed form"""
MIN_PROBABILITY = 1e-12
"""The lowest probability that a true class counts with, since the logarithm of 0 is infinite"""
NO_WEIGHT = 1e-6
"""Weights below it are rounding errors"""
SMALLEST = 1e-9
"""Added to the diagonal of the errors' products, relative to its mean, so that copies of a model
share a weight"""


class MemberErrors:
    """The members' errors on the validation set, to which weights are fitted: in standard
    deviations, or for classes the probabilities of the true class."""

    def __init__(self, dataset: Dataset, num_members: int) -> None:
        signature, scaler = dataset.signature, dataset.scaler
        numbers = dataset.num_windows["val"] * signature.steps_out * len(signature.targets)
        self._stride, self._signature = -(-numbers * num_members // MAX_NUMBERS), signature
        sizes = [1.0]
        if not signature.classes:
            sizes = [scaler.size[name] / scaler.deviation[name] for name in signature.targets]
        self._sizes = torch.tensor(sizes, dtype=torch.float64)
        self._rows: list[Tensor] = []

    def add(self, row: Sequence[PredictionBatch]) -> None:
        """Add a batch of each member, of the same windows."""
        read = _read_probabilities if self._signature.classes else _read_errors
        values = [read(batch, self._signature)[:: self._stride].cpu().double() for batch in row]
        self._rows.append((torch.stack(values) * self._sizes).flatten(1))

    def fit(self, metric: str) -> list[float]:
        """Return the weights with the lowest error."""
        values = torch.cat(self._rows, dim=1).numpy()
        weights = fit_to_classes(values) if self._signature.classes else fit_weights(values, metric)
        return [float(weight) for weight in weights]


def _read_errors(batch: PredictionBatch, signature: Signature) -> Tensor:
    """Return the errors of a batch [B, H, C]."""
    return batch.errors(signature.quantiles)


def _read_probabilities(batch: PredictionBatch, _: Signature) -> Tensor:
    """Return the probabilities of the true classes of a batch [B, H, 1]."""
    assert batch.truth is not None
    likely = torch.softmax(batch.prediction.double(), dim=-1)
    return likely.gather(-1, batch.truth.long()[..., None])[..., 0]


def fit_weights(errors: Floats, metric: str) -> Floats:
    """Return the weights whose mean error [M, N] has the lowest mean square, or absolute value."""
    weights = _minimize_square(errors @ errors.T)
    if metric != "mae":
        return weights

    def compute_error(weights: Floats) -> float:
        return float(np.abs(weights @ errors).mean())

    candidates = [*np.eye(len(errors)), weights]
    for _ in range(ROUNDS):  # least squares, in which each error counts by what it was, inverted
        sizes = np.abs(weights @ errors)
        if not sizes.any():
            break
        weights = _minimize_square((errors / np.maximum(sizes, 1e-6 * sizes.mean())) @ errors.T)
        candidates.append(weights)
        if compute_error(weights) >= compute_error(candidates[-2]) * (1 - 1e-7):
            break
    return min(reversed(candidates), key=compute_error)


def _minimize_square(products: Floats) -> Floats:
    """Return the weights w with the lowest w'Aw for the errors' products A [M, M].

    The v >= 0 with the lowest v'Av / 2 - sum(v) is a multiple of them, and a least-squares problem.
    """
    from scipy import optimize  # takes a while to import

    mean = np.trace(products) / len(products)
    if not mean > 0:  # all of them are right
        return np.full(len(products), 1 / len(products))
    factor = np.linalg.cholesky(products / mean + SMALLEST * np.eye(len(products)))
    solution, _ = optimize.nnls(factor.T, np.linalg.solve(factor, np.ones(len(products))))
    result: Floats = solution / solution.sum()
    return result


def fit_to_classes(probabilities: Floats) -> Floats:
    """Return the weights whose mean of the true classes' probabilities [M, N] has the lowest
    log-loss."""
    from scipy import optimize

    likely = np.maximum(probabilities, MIN_PROBABILITY)
    count = len(likely)

    def compute_loss(weights: Floats) -> tuple[float, Floats]:
        mean = weights @ likely
        return float(-np.log(mean).mean()), -(likely / mean).mean(axis=1)

    solution = optimize.minimize(
        compute_loss,
        np.full(count, 1 / count),
        jac=True,
        method="SLSQP",
        bounds=[(0.0, 1.0)] * count,
        constraints={"type": "eq", "fun": lambda w: w.sum() - 1, "jac": np.ones_like},
        options={"maxiter": ROUNDS, "ftol": 1e-10},
    )
    weights = np.where(solution.x < NO_WEIGHT, 0.0, solution.x)
    result: Floats = weights / weights.sum()
    return result


SEEN_BEFORE = {"val": ("train",), "test": ("train", "val")}
"""By set: the sets of other members whose target rows it must not hold"""


class JointData(NamedTuple):
    """The data set of one member, with the windows that all members have."""

    dataset: Dataset
    starts: list[Tensor]
    """By member: the start of its own window for each row where a joint window may start"""


def match_rows(of: Dataset, among: Dataset) -> Ints:
    """Return for each row of one data set the same row of another; -1 where it has none."""
    assert of.memory is not None
    assert among.memory is not None
    result = np.full(of.index.num_rows, -1, dtype=np.int64)
    numbers = {name: number for number, name in enumerate(among.index.series_names)}
    times = of.memory.time, among.memory.time
    for number, name in enumerate(of.index.series_names):
        if name not in numbers:
            continue
        begin, end = of.index.offsets[number : number + 2]
        first, last = among.index.offsets[numbers[name] : numbers[name] + 2]
        if times[0] is not None and times[1] is not None:
            left, right = times[0][begin:end], times[1][first:last]
        else:
            left = of.index.number_rows(np.arange(begin, end), number)
            right = among.index.number_rows(np.arange(first, last), numbers[name])
        _, left_rows, right_rows = np.intersect1d(left, right, return_indices=True)
        result[begin + left_rows] = first + right_rows
    return result


def find_starts(of: Dataset, among: Dataset, rows: Ints) -> Ints:
    """Return for each row where a window of one data set may start, where the other's window
    starts that ends with the same context row; -1 where it has none, or lacks rows that it reads
    ahead. `rows` match the rows."""
    result = np.full(len(rows), -1, dtype=np.int64)
    before = of.signature.context - 1
    last = rows[before:] if before else rows
    starts, breaks = last - among.signature.context + 1, among.index.breaks
    segments = breaks[np.searchsorted(breaks, np.maximum(last, 0), side="right") - 1]
    fits = (last >= 0) & (starts >= segments)
    if among.signature.future:  # the rows ahead must follow the context
        ends = last + among.signature.horizon
        after = np.searchsorted(breaks, np.maximum(ends, 0), side="right") - 1
        fits &= (ends < among.index.num_rows) & (breaks[after] == segments)
    result[: len(last)] = np.where(fits, starts, -1)
    return result


def join_datasets(datasets: Sequence[Dataset], reference: int) -> JointData:
    """Return the windows of the reference that every member has too.

    A member may lack one for want of context, or because a value is missing in a row. Validation
    and test windows whose targets another member was trained or chosen by are left out as well;
    this happens where members have different rows, and their splits different borders.
    """
    of = datasets[reference]
    assert of.memory is not None
    rows = [match_rows(of, dataset) for dataset in datasets]
    pairs = zip(datasets, rows, strict=True)
    starts = [find_starts(of, dataset, match) for dataset, match in pairs]
    present = np.all([rows >= 0 for rows in starts], axis=0)

    def select(folds: Sequence[Dataset]) -> dict[str, Tensor]:
        memory = folds[reference].memory
        assert memory is not None
        result = {}
        for set_name, windows in memory.starts.items():
            fits = present[windows.numpy()]
            for fold, match in zip(folds, rows, strict=True):
                if fold.memory is memory or _has_same_windows(fold, folds[reference]):
                    continue
                fits &= ~_holds_seen_rows(windows, of, fold, match, SEEN_BEFORE.get(set_name, ()))
            result[set_name] = windows[torch.from_numpy(fits)]
        return result

    joint = [torch.from_numpy(member_starts) for member_starts in starts]
    if not of.folds:
        chosen = select(datasets)
        return JointData(_replace_starts(of, chosen, ()), joint)
    folds = []
    for number, fold in enumerate(of.folds):
        chosen = select([dataset.select_fold(dataset.folds[number]) for dataset in datasets])
        folds.append(replace(fold, starts=chosen))
    return JointData(_replace_starts(of, folds[-1].starts, tuple(folds)), joint)


def _has_same_windows(dataset: Dataset, second: Dataset) -> bool:
    assert dataset.memory is not None
    assert second.memory is not None
    starts = dataset.memory.starts
    pairs = [(starts[set_name], windows) for set_name, windows in second.memory.starts.items()]
    same_rows = np.array_equal(dataset.index.offsets, second.index.offsets)
    return (
        same_rows
        and dataset.signature.lead == second.signature.lead
        and all(torch.equal(*pair) for pair in pairs)
    )


def _holds_seen_rows(
    starts: Tensor, of: Dataset, seen_in: Dataset, rows: Ints, sets: Sequence[str]
) -> Flags:
    """Return which windows have a target row that `seen_in` has in one of these sets."""
    assert seen_in.memory is not None
    seen = np.zeros(seen_in.index.num_rows + 1, dtype=bool)  # the last entry is for absent rows
    first = [seen_in.memory.starts[name].numpy() + seen_in.signature.lead for name in sets]
    for begin in first:
        for ahead in range(seen_in.signature.steps_out):
            seen[begin + ahead] = True
    before = np.concatenate([[0], np.cumsum(seen[rows])])
    begin = starts.numpy() + of.signature.lead
    result: Flags = before[np.minimum(begin + of.signature.steps_out, len(rows))] > before[begin]
    return result


def _replace_starts(
    dataset: Dataset, starts: dict[str, Tensor], folds: tuple[Fold, ...]
) -> Dataset:
    assert dataset.memory is not None
    memory = replace(dataset.memory, starts=starts)
    counts = {set_name: len(windows) for set_name, windows in starts.items()}
    return replace(dataset, memory=memory, num_windows=counts, folds=folds)


def describe_left_out(before: Dataset, joint: Dataset, sets: Sequence[str]) -> list[str]:
    """Note how many windows of each set are left out; refuse a set that has none any more."""
    notes = []
    for set_name in sets:
        was, now = (
            sum(fold.num_windows[set_name] for fold in data.folds or (data,))
            for data in (before, joint)
        )
        if not all(fold.num_windows[set_name] for fold in joint.folds or (joint,)):
            name = "" if set_name == "all" else f"{set_name} "
            raise UserError(
                f"the members have no {name}window in common: none has the same series and time "
                "and a full context for each of them"
            )
        if now < was:
            name = "" if set_name == "all" else f"{set_name} "
            notes.append(
                f"{was - now:,} of {was:,} {name}windows are left out, because not every member "
                "has them with a full context and unseen targets"
            )
    return notes
