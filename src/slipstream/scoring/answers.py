"""Class predictions window by window: areas under ROC curves, calibration, the worst mistakes, and
confidence intervals of all metrics by a block bootstrap.

Windows that overlap say much the same, so they are drawn in blocks of neighbours, as long as
windows share rows, and every metric is computed again for each resample: `RocArea`, `GroupSums`
and `CalibrationBins` take weights. Shapes: N windows, H predicted rows, M = N * H answers,
Q classes, R resamples, G groups.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from slipstream.base.statistics import (
    MIN_BLOCKS,
    NUM_RESAMPLES,
    WindowUnits,
    compute_percentile_interval,
    draw_counts,
    estimate_block_length,
)

Array = npt.NDArray[Any]

NUM_BINS = 15
"""The number of bins of the confidence, as is usual for the expected calibration error"""
MAX_EXAMINED = 20_000
"""The number of answers that `find_worst` examines, the least likely first"""
MAX_ANSWERS = 20_000
"""With more answers than this, metrics are precise enough without an interval"""
MAX_UNITS = 4_000
"""The number of windows in a comparison of models; of more windows, neighbours are joined"""
MAX_SCORES = 200_000
"""With more answers times classes than this, resampling the areas takes too long"""


class ClassAnswers(NamedTuple):
    """The predicted probabilities and the labels of windows, in their order."""

    log_probs: Array
    """[N, H, Q]"""
    labels: Array
    """[N, H]"""
    starts: Array
    """[N]: first rows, among all rows"""
    series: Array
    """[N]: numbers of the series"""


def join_answers(parts: Sequence[ClassAnswers]) -> ClassAnswers:
    """Return several sets of answers as one, one after the other."""
    return ClassAnswers(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))


class RocArea:
    """The area under one class's ROC curve against all others; ties count half."""

    def __init__(self, answers: ClassAnswers, label: int) -> None:
        scores = answers.log_probs[..., label].ravel()
        self.order = np.argsort(scores, kind="stable")
        ranked = scores[self.order]
        self.group_ends = np.flatnonzero(np.diff(ranked, append=np.nan) != 0)
        self.positive = (answers.labels.ravel() == label)[self.order].astype(np.float32)

    def compute(self, weights: Array) -> Array:
        """Return the area for each row of weights: [R, M] to [R]."""
        ranked = weights.take(self.order, axis=1)
        total = ranked.cumsum(axis=1)
        positive = np.multiply(ranked, self.positive, out=ranked).cumsum(axis=1)
        if len(self.group_ends) < len(self.order):  # there are ties
            positive, total = (sums.take(self.group_ends, axis=1) for sums in (positive, total))
        negative = np.subtract(total, positive, out=total)
        pairs = positive[:, -1].astype(np.float64) * negative[:, -1]
        rises, twice = np.diff(positive, prepend=np.float32(0)), negative + _shift(negative)
        area = np.einsum("rg,rg->r", rises, twice, dtype=np.float64) / 2
        with np.errstate(invalid="ignore"):
            return np.asarray(area / np.where(pairs > 0, pairs, np.nan))


def _shift(sums: Array) -> Array:
    """Return the cumulative sums before each column: [R, G]."""
    return np.concatenate([np.zeros_like(sums[:, :1]), sums[:, :-1]], axis=1)


class GroupSums:
    """Sums of weights over groups of answers."""

    def __init__(self, codes: Array, size: int, *factors: Array) -> None:
        """`codes` are the groups of the answers; each of `factors`, [M], adds a weighted sum."""
        member = (codes[:, None] == np.arange(size)).astype(np.float64)
        self.matrix = np.concatenate(
            [member, *(member * factor[:, None] for factor in factors)], axis=1
        )
        self.num_sums = 1 + len(factors)

    def compute(self, weights: Array) -> list[Array]:
        """Return the sums of each group, unweighted and weighted by each factor: [R, M] to [R,
        G]."""
        return np.split(weights @ self.matrix, self.num_sums, axis=1)


class CalibrationBins:
    """Confidence and accuracy of the answers, in bins of equal width of the confidence."""

    def __init__(self, answers: ClassAnswers) -> None:
        log_probs = answers.log_probs.reshape(-1, answers.log_probs.shape[-1])
        self.confidence = np.exp(log_probs.max(axis=1).astype(np.float64))
        self.correct = (log_probs.argmax(axis=1) == answers.labels.ravel()).astype(np.float64)
        codes = np.clip(np.ceil(self.confidence * NUM_BINS).astype(np.int64) - 1, 0, NUM_BINS - 1)
        self.bins = GroupSums(codes, NUM_BINS, self.confidence, self.correct)

    def compute(self, weights: Array) -> list[Array]:
        """Return counts, summed confidences and numbers of correct answers, each [R, bins]."""
        return self.bins.compute(weights)


def compute_auc(answers: ClassAnswers) -> Array:
    """Return the area under each class's curve, [Q]; NaN for a class of all or no labels."""
    unit_weights = np.ones((1, answers.labels.size))
    num_classes = answers.log_probs.shape[-1]
    return np.array(
        [RocArea(answers, label).compute(unit_weights)[0] for label in range(num_classes)]
    )


def average_auc(by_class: Array) -> float:
    """Return the mean area over the classes; with two classes, the area of the second, which equals
    that of the first."""
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
    full = [bin_ for bin_ in bins if bin_["count"]]
    gaps = [bin_["count"] * abs(bin_["confidence"] - bin_["accuracy"]) for bin_ in full]
    return sum(gaps) / sum(bin_["count"] for bin_ in full)


def count_units(answers: ClassAnswers) -> WindowUnits:
    """Return the sums for `COMPARED` window by window, joined for neighbours where there are very
    many: the number of answers, their loss, and hits, labels and guesses of each class."""
    num_windows, steps, num_classes = answers.log_probs.shape
    log_probs, labels = answers.log_probs.reshape(-1, num_classes), answers.labels.ravel()
    guesses = log_probs.argmax(axis=1)
    is_label, is_guess = (
        (codes[:, None] == np.arange(num_classes)).astype(np.float32) for codes in (labels, guesses)
    )
    loss = -np.take_along_axis(log_probs, labels[:, None], axis=1)
    columns = np.concatenate(
        [np.ones_like(loss), loss, is_label * is_guess, is_label, is_guess], axis=1
    )
    joined = steps * -(-num_windows // MAX_UNITS)
    firsts = np.arange(0, len(columns), joined)
    return WindowUnits(
        answers.starts[firsts // steps], np.add.reduceat(columns, firsts, axis=0, dtype=np.float64)
    )


def _split_counts(sums: Array) -> list[Array]:
    """Return hits, labels and guesses, [..., Q] each."""
    return np.split(sums[..., 2:], 3, axis=-1)


def _compute_balanced_accuracy(sums: Array) -> Array:
    hits, labels, _ = _split_counts(sums)
    return _average_where(hits / np.maximum(labels, 1), labels > 0)


def _compute_f1(sums: Array) -> Array:
    hits, labels, guesses = _split_counts(sums)
    named = labels + guesses
    return _average_where(2 * hits / np.maximum(named, 1), named > 0)


COMPARED: dict[str, Callable[[Array], Array]] = {
    "log_loss": lambda sums: sums[..., 1] / sums[..., 0],
    "accuracy": lambda sums: _split_counts(sums)[0].sum(axis=-1) / sums[..., 0],
    "balanced_accuracy": _compute_balanced_accuracy,
    "f1_macro": _compute_f1,
}
"""The functions that compute metrics from the sums of `count_units`"""


def find_worst(
    answers: ClassAnswers, *, min_distance: int, limit: int
) -> Iterator[tuple[int, int]]:
    """Yield window and predicted row of wrong answers, the least likely labels first.

    Of windows that begin fewer than `min_distance` rows from each other, only the first is
    selected.
    """
    of_label = np.take_along_axis(answers.log_probs, answers.labels[..., None], axis=-1)[..., 0]
    wrong = answers.log_probs.argmax(axis=-1) != answers.labels
    selected: list[int] = []
    for position in np.argsort(of_label, axis=None, kind="stable")[:MAX_EXAMINED]:
        window, row = divmod(int(position), of_label.shape[1])
        start = int(answers.starts[window])
        is_near = any(
            abs(start - int(answers.starts[chosen])) < min_distance for chosen in selected
        )
        if wrong[window, row] and not is_near:
            selected.append(window)
            yield window, row
        if len(selected) == limit or not wrong[window, row]:
            return


class BootstrapResult(NamedTuple):
    """Metrics of a predictor over resamples of its windows."""

    metrics: dict[str, Array]
    """The values of each metric, [R]; empty where nothing was resampled"""
    how: str
    """A description of how the resamples were drawn, or why there are none"""

    def get_interval(self, key: str) -> list[float] | None:
        """Return the interval of a metric."""
        values = self.metrics.get(key)
        return None if values is None else compute_percentile_interval(values)


def bootstrap(answers: ClassAnswers, *, context: int) -> BootstrapResult:
    """Resample the windows, each with `context` rows, and compute every metric."""
    num_windows, steps = answers.labels.shape
    block = estimate_block_length(answers.starts, context)
    if num_windows * steps > MAX_ANSWERS:
        return BootstrapResult({}, f"none, of more than {MAX_ANSWERS:,} predicted rows")
    if num_windows < MIN_BLOCKS * block:
        how = f"none: the {num_windows:,} windows hold fewer than {MIN_BLOCKS} that share no rows"
        return BootstrapResult({}, how)
    weighted = WeightedMetrics(answers)
    parts = [
        weighted.compute(np.repeat(counts, steps, axis=1))
        for counts in draw_counts(num_windows, block)
    ]
    joined = {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}
    how = f"{NUM_RESAMPLES:,} resamples in blocks of {block:,} windows"
    return BootstrapResult(joined, how)


class WeightedMetrics:
    """Every metric of one set of answers, for any weights of the answers."""

    def __init__(self, answers: ClassAnswers) -> None:
        num_classes = answers.log_probs.shape[-1]
        log_probs, labels = answers.log_probs.reshape(-1, num_classes), answers.labels.ravel()
        guesses = log_probs.argmax(axis=1)
        self.loss = -log_probs[np.arange(len(labels)), labels].astype(np.float64)
        correct = (guesses == labels).astype(np.float64)
        self.labels = GroupSums(labels, num_classes, correct)
        self.guesses = GroupSums(guesses, num_classes)
        self.bins = CalibrationBins(answers)
        has_all = len(np.unique(labels)) == num_classes  # with a class missing there is no area
        has_areas = has_all and answers.log_probs.size <= MAX_SCORES
        classes = (1,) if num_classes == 2 else range(num_classes)
        self.areas = [RocArea(answers, label) for label in classes if has_areas]

    def compute(self, weights: Array) -> dict[str, Array]:
        """Return each metric for each row of weights: [R, M] to [R]."""
        total = weights.sum(axis=1)
        (labels, hits), (guesses,) = self.labels.compute(weights), self.guesses.compute(weights)
        named = labels + guesses
        metrics = {
            "accuracy": hits.sum(axis=1) / total,
            "balanced_accuracy": _average_where(hits / np.maximum(labels, 1), labels > 0),
            "f1_macro": _average_where(2 * hits / np.maximum(named, 1), named > 0),
            "log_loss": weights @ self.loss / total,
        }
        if self.areas:
            whole = weights.astype(np.float32)
            metrics["auc"] = np.mean([area.compute(whole) for area in self.areas], axis=0)
        count, confidence, correct = self.bins.compute(weights)
        return metrics | {"ece": np.abs(confidence - correct).sum(axis=1) / count.sum(axis=1)}


def _average_where(values: Array, mask: Array) -> Array:
    return np.asarray((values * mask).sum(axis=-1) / mask.sum(axis=-1))
