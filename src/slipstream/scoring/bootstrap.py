"""Confidence intervals of class metrics by a block bootstrap.

Windows that overlap say much the same, so they are drawn in blocks of neighbours, as long as
windows share rows, and every metric is computed again for each resample.

Shapes: N windows, H predicted rows, M = N * H answers, Q classes, R resamples.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

from slipstream.scoring.answers import Array, CalibrationBins, ClassAnswers, GroupSums, RocArea
from slipstream.stats import compute_percentile_interval

NUM_RESAMPLES, RESAMPLES_AT_ONCE = 1000, 50
MAX_ANSWERS = 20_000
"""Answers from which on metrics are precise enough without an interval"""
MAX_SCORES = 200_000
"""Answers times classes from which on resampling the areas takes too long"""
MIN_BLOCKS = 5


class BootstrapResult(NamedTuple):
    """Metrics of several predictors over the same resamples."""

    metrics: dict[str, dict[str, Array]]
    """By predictor and by metric, [R]; empty where nothing was resampled"""
    how: str
    """How the resamples were drawn, or why there are none"""
    enough: bool
    """Whether there were windows enough to say anything"""

    def get_interval(
        self, name: str, key: str, *, relative_to: str | None = None
    ) -> list[float] | None:
        """Return the interval of one predictor's metric, or of its difference from another's."""
        values = self.metrics.get(name, {}).get(key)
        if values is None:
            return None
        return compute_percentile_interval(
            values if relative_to is None else values - self.metrics[relative_to][key]
        )


def bootstrap(answers: Mapping[str, ClassAnswers], *, context: int) -> BootstrapResult:
    """Resample the windows, each with `context` rows, and compute every predictor's metrics.

    Areas, which take longest, are computed for the first predictor only.
    """
    first = next(iter(answers.values()))
    num_windows, steps = first.labels.shape
    block = estimate_block_length(first.starts, context)
    if num_windows * steps > MAX_ANSWERS:
        how = f"none, of more than {MAX_ANSWERS:,} predicted rows"
        return BootstrapResult({}, how, enough=True)
    if num_windows < MIN_BLOCKS * block:
        how = f"none: the {num_windows:,} windows hold fewer than {MIN_BLOCKS} that share no rows"
        return BootstrapResult({}, how, enough=False)
    weighted = {name: WeightedMetrics(one, areas=one is first) for name, one in answers.items()}
    parts: dict[str, list[dict[str, Array]]] = {name: [] for name in answers}
    for counts in draw_counts(num_windows, block):
        weights = np.repeat(counts, steps, axis=1)
        for name, metrics in weighted.items():
            parts[name].append(metrics.compute(weights))
    joined = {
        name: {key: np.concatenate([part[key] for part in own]) for key in own[0]}
        for name, own in parts.items()
    }
    how = f"{NUM_RESAMPLES:,} resamples in blocks of {block:,} windows"
    return BootstrapResult(joined, how, enough=True)


def estimate_block_length(starts: Array, context: int) -> int:
    """Return how many consecutive windows share rows with the first of them, typically."""
    ordered = np.sort(starts)
    ahead = np.searchsorted(ordered, ordered + context) - np.arange(len(starts))
    return max(int(np.median(ahead)), 1)


def draw_counts(num_windows: int, block: int) -> Iterator[Array]:
    """Yield how often each window is drawn, [R, N], some resamples at a time, from a fixed seed."""
    generator = np.random.default_rng(0)
    resample = np.arange(RESAMPLES_AT_ONCE)[:, None]
    for _ in range(0, NUM_RESAMPLES, RESAMPLES_AT_ONCE):
        firsts = generator.integers(num_windows, size=(RESAMPLES_AT_ONCE, -(-num_windows // block)))
        windows = (firsts[..., None] + np.arange(block)) % num_windows
        windows = windows.reshape(RESAMPLES_AT_ONCE, -1)[:, :num_windows] + num_windows * resample
        counts = np.bincount(windows.ravel(), minlength=RESAMPLES_AT_ONCE * num_windows)
        yield counts.reshape(-1, num_windows).astype(float)


class WeightedMetrics:
    """Every metric of one set of answers, for any weights of the answers."""

    def __init__(self, answers: ClassAnswers, *, areas: bool) -> None:
        num_classes = answers.log_probs.shape[-1]
        log_probs, labels = answers.log_probs.reshape(-1, num_classes), answers.labels.ravel()
        guesses = log_probs.argmax(axis=1)
        self.loss = -log_probs[np.arange(len(labels)), labels].astype(np.float64)
        self.labels, self.guesses = GroupSums(labels, num_classes), GroupSums(guesses, num_classes)
        self.correct = (guesses == labels).astype(np.float64)
        self.bins = CalibrationBins(answers)
        self.areas: list[RocArea] = []
        has_all = len(np.unique(labels)) == num_classes  # with a class missing there is no area
        if areas and has_all and answers.log_probs.size <= MAX_SCORES:
            classes = (1,) if num_classes == 2 else range(num_classes)
            self.areas = [RocArea(answers, label) for label in classes]

    def compute(self, weights: Array) -> dict[str, Array]:
        """Return each metric for each row of weights: [R, M] to [R]."""
        total = weights.sum(axis=1)
        labels, guesses = self.labels.compute(weights), self.guesses.compute(weights)
        hits = self.labels.compute(weights * self.correct)
        named = labels + guesses
        metrics = {
            "accuracy": hits.sum(axis=1) / total,
            "balanced_accuracy": _average_where(hits / np.maximum(labels, 1), labels > 0),
            "f1_macro": _average_where(2 * hits / np.maximum(named, 1), named > 0),
            "log_loss": weights @ self.loss / total,
        }
        if self.areas:
            metrics["auc"] = np.mean([area.compute(weights) for area in self.areas], axis=0)
        count, confidence, correct = self.bins.compute(weights)
        ece = np.abs(confidence - correct).sum(axis=1) / count.sum(axis=1)
        return metrics | {"ece": ece}


def _average_where(values: Array, mask: Array) -> Array:
    return np.asarray((values * mask).sum(axis=1) / mask.sum(axis=1))
