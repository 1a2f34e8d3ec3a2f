"""The weights of an ensemble's members, fitted to the validation set.

They are not negative and add up to one. Shapes: M members, N numbers or windows.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from slipstream.config import Signature
from slipstream.data.dataset import Dataset
from slipstream.scoring.batch import PredictionBatch

Floats = npt.NDArray[np.float64]
MAX_NUMBERS = 20_000_000
"""Errors that weights are fitted to; of more, an even sample"""
ROUNDS = 200
"""Steps from one set of weights to a better one, where there is no closed form"""
MIN_PROBABILITY = 1e-12
"""What a true class that a member holds for impossible counts as"""
NO_WEIGHT = 1e-6
"""Weights below it are rounding errors"""
SMALLEST = 1e-9
"""Relative to their mean, what is added to errors' products: copies of a model share a weight"""


class MemberErrors:
    """What the members' weights are fitted to, over the validation set: the errors of numbers, in
    standard deviations, or the probabilities of the true classes."""

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
        values = [read(one, self._signature)[:: self._stride].cpu().double() for one in row]
        self._rows.append((torch.stack(values) * self._sizes).flatten(1))

    def fit(self, metric: str) -> list[float]:
        """Return the weights with the lowest error."""
        values = torch.cat(self._rows, dim=1).numpy()
        weights = fit_to_classes(values) if self._signature.classes else fit_weights(values, metric)
        return [float(weight) for weight in weights]


def _read_errors(batch: PredictionBatch, signature: Signature) -> Tensor:
    """[B, H, C]"""
    return batch.errors(signature.quantiles)


def _read_probabilities(batch: PredictionBatch, _: Signature) -> Tensor:
    """[B, H, 1]"""
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
