"""Class predictions window by window: areas under ROC curves, calibration, the worst mistakes.

`RocArea`, `GroupSums` and `CalibrationBins` take weights, so that the bootstrap can compute a
metric for many resamples at once. Shapes: N windows, H predicted rows, M = N * H answers,
Q classes, R resamples, G groups.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

NUM_BINS = 15
MAX_EXAMINED = 20_000
"""Answers that `find_worst` looks through, the least likely first"""


class ClassAnswers(NamedTuple):
    """Predictions and labels of some windows, in their order."""

    log_probs: Array
    """[N, H, Q]"""
    labels: Array
    """[N, H]"""
    starts: Array
    """[N]: first rows, among all rows"""
    series: Array
    """[N]: numbers of the series"""


def join_answers(parts: Sequence[ClassAnswers]) -> ClassAnswers:
    """Put answers one after the other."""
    return ClassAnswers(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))


class RocArea:
    """The area under one class's ROC curve against all others; ties count half."""

    def __init__(self, answers: ClassAnswers, label: int) -> None:
        scores = answers.log_probs[..., label].ravel()
        self.order = np.argsort(scores, kind="stable")
        ranked = scores[self.order]
        self.group_starts = np.flatnonzero(np.diff(ranked, prepend=np.nan) != 0)
        self.positive = (answers.labels.ravel() == label)[self.order].astype(np.float64)

    def compute(self, weights: Array) -> Array:
        """Return the area for each row of weights: [R, M] to [R]."""
        ranked = weights[:, self.order]
        positive = np.add.reduceat(ranked * self.positive, self.group_starts, axis=1)
        negative = np.add.reduceat(ranked * (1 - self.positive), self.group_starts, axis=1)
        below = np.cumsum(negative, axis=1) - negative / 2
        pairs = positive.sum(axis=1) * negative.sum(axis=1)
        with np.errstate(invalid="ignore"):
            return np.asarray((positive * below).sum(axis=1) / np.where(pairs > 0, pairs, np.nan))


class GroupSums:
    """Sums of weights over groups of answers."""

    def __init__(self, codes: Array, size: int) -> None:
        self.size, self.order = size, np.argsort(codes, kind="stable")
        ranked = codes[self.order]
        self.group_starts = np.flatnonzero(np.diff(ranked, prepend=-1))
        self.present = ranked[self.group_starts]

    def compute(self, weights: Array) -> Array:
        """Return the sum of each group: [R, M] to [R, G]."""
        sums = np.zeros((len(weights), self.size))
        sums[:, self.present] = np.add.reduceat(weights[:, self.order], self.group_starts, axis=1)
        return sums


class CalibrationBins:
    """Confidence and accuracy of the answers, in bins of equal width of the confidence."""

    def __init__(self, answers: ClassAnswers) -> None:
        log_probs = answers.log_probs.reshape(-1, answers.log_probs.shape[-1])
        self.confidence = np.exp(log_probs.max(axis=1).astype(np.float64))
        self.correct = (log_probs.argmax(axis=1) == answers.labels.ravel()).astype(np.float64)
        codes = np.clip(np.ceil(self.confidence * NUM_BINS).astype(np.int64) - 1, 0, NUM_BINS - 1)
        self.bins = GroupSums(codes, NUM_BINS)

    def compute(self, weights: Array) -> tuple[Array, Array, Array]:
        """Return counts, summed confidences and numbers of correct answers, each [R, bins]."""
        compute = self.bins.compute
        return compute(weights), compute(weights * self.confidence), compute(weights * self.correct)


def compute_auc(answers: ClassAnswers) -> Array:
    """Return the area under each class's curve, [Q]; NaN for a class of all or no labels."""
    ones = np.ones((1, answers.labels.size))
    num_classes = answers.log_probs.shape[-1]
    return np.array([RocArea(answers, label).compute(ones)[0] for label in range(num_classes)])


def average_auc(by_class: Array) -> float:
    """Return the mean area; of two classes that of the second, which equals that of the first."""
    return float(by_class[-1] if len(by_class) == 2 else np.mean(by_class))


def compute_reliability(answers: ClassAnswers) -> list[dict[str, float]]:
    """Return the accuracy by bins of the predicted class's probability."""
    bins = CalibrationBins(answers).compute(np.ones((1, answers.labels.size)))
    rows = zip(*(values[0] for values in bins), strict=True)
    return [
        {
            "low": b / NUM_BINS,
            "high": (b + 1) / NUM_BINS,
            "count": int(count),
            "confidence": float(confidence / count) if count else float("nan"),
            "accuracy": float(correct / count) if count else float("nan"),
        }
        for b, (count, confidence, correct) in enumerate(rows)
    ]


def compute_ece(bins: list[dict[str, float]]) -> float:
    """Return the expected calibration error: the mean distance of confidence from accuracy."""
    full = [each for each in bins if each["count"]]
    gaps = [each["count"] * abs(each["confidence"] - each["accuracy"]) for each in full]
    return sum(gaps) / sum(each["count"] for each in full)


def find_worst(
    answers: ClassAnswers, *, min_distance: int, limit: int
) -> Iterator[tuple[int, int]]:
    """Yield window and predicted row of wrong answers, the least likely labels first.

    Of windows that begin fewer than `min_distance` rows from each other, only one is selected.
    """
    of_label = np.take_along_axis(answers.log_probs, answers.labels[..., None], axis=-1)[..., 0]
    wrong = answers.log_probs.argmax(axis=-1) != answers.labels
    selected: list[int] = []
    for at in np.argsort(of_label, axis=None, kind="stable")[:MAX_EXAMINED]:
        window, row = divmod(int(at), of_label.shape[1])
        start = int(answers.starts[window])
        is_near = any(abs(start - int(answers.starts[one])) < min_distance for one in selected)
        if wrong[window, row] and not is_near:
            selected.append(window)
            yield window, row
        if len(selected) == limit or not wrong[window, row]:
            return
