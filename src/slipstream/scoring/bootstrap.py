"""What single answers tell beyond counts: areas, calibration, the most wrong, and intervals.

Intervals are of a block bootstrap: windows that overlap tell much the same, so they are drawn in
blocks of neighbours, as long as a window's rows are shared, and every figure is worked out again.

Shapes: N windows, H predicted rows, M = N * H answers, Q classes, R resamples, G groups.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

BINS = 15
RESAMPLES, AT_A_TIME = 1000, 50
MOST_ANSWERS = 20_000
"""Answers from which on figures are sure enough without an interval"""
MOST_SCORES = 200_000
"""Answers times classes from which on resampling the areas takes too long"""
FEWEST_BLOCKS = 5
MOST_LOOKED_AT = 20_000
LEVEL = 0.95


class Answers(NamedTuple):
    """One set's windows in their order."""

    likely: Array
    """[N, H, Q]: logarithms of the probabilities"""
    number: Array
    """[N, H]: the labels"""
    start: Array
    """[N]: first rows, among all"""
    owner: Array
    """[N]: which series"""


def areas(found: Answers) -> Array:
    """Under each class's ROC curve against all others, [Q]; NaN where it is all or none."""
    ones = np.ones((1, found.number.size))
    size = found.likely.shape[-1]
    return np.array([_Area(found, number).of(ones)[0] for number in range(size)])


def mean_area(by_class: Array) -> float:
    """Of two classes that of the second, which is that of the first; of more, the mean of all."""
    return float(by_class[-1] if len(by_class) == 2 else np.mean(by_class))


class _Area:
    """The area under one class's curve, for any weights of the answers: ties count half."""

    def __init__(self, found: Answers, number: int) -> None:
        scores = found.likely[..., number].ravel()
        self.order = np.argsort(scores, kind="stable")
        ranked = scores[self.order]
        self.begins = np.flatnonzero(np.diff(ranked, prepend=np.nan) != 0)
        self.mine = (found.number.ravel() == number)[self.order].astype(np.float64)

    def of(self, weights: Array) -> Array:
        """[R, M] to [R]."""
        ranked = weights[:, self.order]
        mine = np.add.reduceat(ranked * self.mine, self.begins, axis=1)
        others = np.add.reduceat(ranked * (1 - self.mine), self.begins, axis=1)
        below = np.cumsum(others, axis=1) - others / 2
        pairs = mine.sum(axis=1) * others.sum(axis=1)
        with np.errstate(invalid="ignore"):
            return np.asarray((mine * below).sum(axis=1) / np.where(pairs > 0, pairs, np.nan))


class _Groups:
    """Sums of weights over groups of answers."""

    def __init__(self, codes: Array, size: int) -> None:
        self.size, self.order = size, np.argsort(codes, kind="stable")
        ranked = codes[self.order]
        self.begins = np.flatnonzero(np.diff(ranked, prepend=-1))
        self.present = ranked[self.begins]

    def sums(self, weights: Array) -> Array:
        """[R, M] to [R, G]."""
        found = np.zeros((len(weights), self.size))
        found[:, self.present] = np.add.reduceat(weights[:, self.order], self.begins, axis=1)
        return found


class _Bins:
    """How sure the answers were and how often right, by how sure they were."""

    def __init__(self, found: Answers) -> None:
        likely = found.likely.reshape(-1, found.likely.shape[-1])
        self.sure = np.exp(likely.max(axis=1).astype(np.float64))
        self.right = (likely.argmax(axis=1) == found.number.ravel()).astype(np.float64)
        codes = np.clip(np.ceil(self.sure * BINS).astype(np.int64) - 1, 0, BINS - 1)
        self.groups = _Groups(codes, BINS)

    def of(self, weights: Array) -> tuple[Array, Array, Array]:
        """Counts, summed confidences and hits, each [R, BINS]."""
        sums = self.groups.sums
        return sums(weights), sums(weights * self.sure), sums(weights * self.right)


def reliability(found: Answers) -> list[dict[str, float]]:
    """By bins of the probability of the class that was named: how often it was right."""
    ((count,), (sure,), (right,)) = _Bins(found).of(np.ones((1, found.number.size)))
    return [
        {
            "low": b / BINS,
            "high": (b + 1) / BINS,
            "count": int(count[b]),
            "confidence": float(sure[b] / count[b]) if count[b] else float("nan"),
            "accuracy": float(right[b] / count[b]) if count[b] else float("nan"),
        }
        for b in range(BINS)
    ]


def expected_error(bins: list[dict[str, float]]) -> float:
    """The mean distance of confidence from accuracy, over all answers."""
    full = [each for each in bins if each["count"]]
    apart = [each["count"] * abs(each["confidence"] - each["accuracy"]) for each in full]
    return sum(apart) / sum(each["count"] for each in full)


def worst(found: Answers, *, apart: int, most: int) -> Iterator[tuple[int, int]]:
    """The windows, and the predicted rows, whose label was held least likely; of those that begin
    fewer than `apart` rows from each other, only one."""
    likely = np.take_along_axis(found.likely, found.number[..., None], axis=-1)[..., 0]
    wrong = found.likely.argmax(axis=-1) != found.number
    taken: list[int] = []
    for at in np.argsort(likely, axis=None, kind="stable")[:MOST_LOOKED_AT]:
        window, place = divmod(int(at), likely.shape[1])
        near = (abs(int(found.start[window]) - int(found.start[one])) < apart for one in taken)
        if wrong[window, place] and not any(near):
            taken.append(window)
            yield window, place
        if len(taken) == most or not wrong[window, place]:
            return


def block_length(start: Array, rows: int) -> int:
    """How many windows in a row share rows with the first of them, typically; `rows` are one's."""
    ahead = np.searchsorted(np.sort(start), np.sort(start) + rows) - np.arange(len(start))
    return max(int(np.median(ahead)), 1)


class Resampled(NamedTuple):
    """Figures over the same resamples, of several who gave answers."""

    figures: dict[str, dict[str, Array]]
    """By whose they are and by name, [R]; empty where there are none"""
    how: str
    """They were drawn, or why not"""
    enough: bool
    """Whether there were windows enough to say anything"""

    def interval(self, name: str, key: str, *, beyond: str | None = None) -> list[float] | None:
        """What the middle of one's figures lies within, or of what they are beyond another's."""
        values = self.figures.get(name, {}).get(key)
        if values is None:
            return None
        return interval(values if beyond is None else values - self.figures[beyond][key])


def resampled(found: Mapping[str, Answers], *, rows: int) -> Resampled:
    """Each one's figures; areas, which take longest, are the first one's only."""
    first = next(iter(found.values()))
    num, steps = first.number.shape
    block = block_length(first.start, rows)
    if num * steps > MOST_ANSWERS:
        return Resampled({}, f"none, of more than {MOST_ANSWERS:,} predicted rows", enough=True)
    if num < FEWEST_BLOCKS * block:
        how = f"none: the {num:,} windows hold fewer than {FEWEST_BLOCKS} that share no rows"
        return Resampled({}, how, enough=False)
    figures = {name: _Figures(one, areas=one is first) for name, one in found.items()}
    parts: dict[str, list[dict[str, Array]]] = {name: [] for name in found}
    for drawn in _draws(num, block):
        weights = np.repeat(drawn, steps, axis=1)
        for name, one in figures.items():
            parts[name].append(one.of(weights))
    joined = {
        name: {key: np.concatenate([part[key] for part in mine]) for key in mine[0]}
        for name, mine in parts.items()
    }
    how = f"{RESAMPLES:,} resamples in blocks of {block:,} windows"
    return Resampled(joined, how, enough=True)


def _draws(num: int, block: int) -> Iterator[Array]:
    """How often each window is drawn, [R, N], some resamples at a time; the same every time."""
    generator = np.random.default_rng(0)
    for _ in range(0, RESAMPLES, AT_A_TIME):
        firsts = generator.integers(num, size=(AT_A_TIME, -(-num // block)))
        windows = (firsts[..., None] + np.arange(block)) % num
        windows = windows.reshape(AT_A_TIME, -1)[:, :num] + num * np.arange(AT_A_TIME)[:, None]
        yield np.bincount(windows.ravel(), minlength=AT_A_TIME * num).reshape(-1, num).astype(float)


class _Figures:
    """Every metric of one set of answers, for any weights."""

    def __init__(self, found: Answers, *, areas: bool) -> None:
        self.size = found.likely.shape[-1]
        likely, number = found.likely.reshape(-1, self.size), found.number.ravel()
        self.loss = -likely[np.arange(len(number)), number].astype(np.float64)
        guess = likely.argmax(axis=1)
        self.labels, self.guesses = _Groups(number, self.size), _Groups(guess, self.size)
        self.right = (guess == number).astype(np.float64)
        self.bins = _Bins(found)
        every = len(np.unique(number)) == self.size  # with a class missing there is no area
        if not (areas and every and found.likely.size <= MOST_SCORES):
            self.areas = []
        else:
            self.areas = [_Area(found, c) for c in ((1,) if self.size == 2 else range(self.size))]

    def of(self, weights: Array) -> dict[str, Array]:
        """[R, M] to [R] of each."""
        total = weights.sum(axis=1)
        labels, guesses = self.labels.sums(weights), self.guesses.sums(weights)
        hits = self.labels.sums(weights * self.right)
        named = labels + guesses
        found = {
            "accuracy": hits.sum(axis=1) / total,
            "balanced_accuracy": _mean_where(hits / np.maximum(labels, 1), labels > 0),
            "f1_macro": _mean_where(2 * hits / np.maximum(named, 1), named > 0),
            "log_loss": weights @ self.loss / total,
        }
        if self.areas:
            found["auc"] = np.mean([area.of(weights) for area in self.areas], axis=0)
        count, sure, right = self.bins.of(weights)
        return found | {"ece": np.abs(sure - right).sum(axis=1) / count.sum(axis=1)}


def _mean_where(values: Array, there: Array) -> Array:
    return np.asarray((values * there).sum(axis=1) / there.sum(axis=1))


def interval(values: Array) -> list[float] | None:
    """What the middle of the resamples lies within."""
    known = values[~np.isnan(values)]
    if not len(known):
        return None
    tail = (1 - LEVEL) / 2
    return [float(bound) for bound in np.quantile(known, [tail, 1 - tail])]
