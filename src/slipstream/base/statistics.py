"""Moments of values that come in parts, spreads over seeds and confidence intervals, and the rule
by which one predictor is better than another.

Needs numpy and scipy, not torch, and imports them where they are used: a list of runs does without.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Array = npt.NDArray[Any]

LEVEL = 0.95
BETTER, WORSE, NO_DIFFERENCE = "better", "worse", "no difference shown"
HIGHER_IS_BETTER = {"r2", "accuracy", "balanced_accuracy", "f1_macro", "auc"}
NUM_RESAMPLES, RESAMPLES_AT_ONCE = 1000, 20
"""The number of bootstrap resamples, and of those drawn at a time, to limit memory"""
MIN_BLOCKS = 5
"""The minimum number of blocks of windows without shared rows for a meaningful interval"""


class Interval(NamedTuple):
    """A mean and its two-sided confidence interval."""

    mean: float
    low: float
    high: float

    def judge(self, *, higher_is_better: bool) -> str:
        """Return the verdict on a difference; an interval that contains 0 shows none."""
        above, below = (BETTER, WORSE) if higher_is_better else (WORSE, BETTER)
        return above if self.low > 0 else below if self.high < 0 else NO_DIFFERENCE


class Spread(TypedDict):
    """The spread of a metric over seeds, as summaries have it."""

    mean: float
    sd: float | None
    min: float
    max: float
    n: int


class Difference(TypedDict):
    """How a metric differs from that of another predictor, as summaries have it."""

    difference: float
    interval: Sequence[float] | None
    relative: float | None
    """As a share of the other predictor's error; None where higher is better"""
    relative_interval: Sequence[float] | None
    verdict: str


def summarize_spread(values: Sequence[float]) -> Spread:
    """Return mean, standard deviation, extremes and count; all NaN if one of the values is.

    R² of a constant truth is such a value. The deviation of a single value is None.
    """
    if any(math.isnan(value) for value in values):
        return {
            "mean": math.nan,
            "sd": math.nan,
            "min": math.nan,
            "max": math.nan,
            "n": len(values),
        }
    return {
        "mean": statistics.fmean(values),
        "sd": compute_deviation(values),
        "min": min(values),
        "max": max(values),
        "n": len(values),
    }


def compute_deviation(values: Sequence[float]) -> float | None:
    """Return the sample standard deviation of the finite values, None with fewer than two."""
    finite = [value for value in values if math.isfinite(value)]
    return statistics.stdev(finite) if len(finite) > 1 else None


def compute_t_interval(values: Sequence[float]) -> Interval:
    """Return the mean of two or more values with Student's interval.

    Of the differences of pairs, this is the paired t interval.
    """
    error = statistics.stdev(values) / math.sqrt(len(values))
    return _make_interval(statistics.fmean(values), error, len(values) - 1)


def compute_spread_interval(spread: Spread) -> Interval:
    """Return the mean of a spread of two or more values with Student's interval."""
    error = _get_deviation(spread) / math.sqrt(spread["n"])
    return _make_interval(spread["mean"], error, spread["n"] - 1)


def compute_welch_interval(first: Spread, second: Spread) -> Interval:
    """Return the mean of `first` less that of `second`, two spreads, with Welch's interval."""
    variances = [_get_deviation(sample) ** 2 / sample["n"] for sample in (first, second)]
    terms = [
        variance**2 / (sample["n"] - 1)
        for variance, sample in zip(variances, (first, second), strict=True)
    ]
    freedom = sum(variances) ** 2 / max(sum(terms), 1e-300)
    error = math.sqrt(sum(variances))
    return _make_interval(first["mean"] - second["mean"], error, max(freedom, 1.0))


def _get_deviation(spread: Spread) -> float:
    """Return the deviation of a spread of two or more values."""
    deviation = spread["sd"]
    assert deviation is not None
    return deviation


def _make_interval(mean: float, error: float, freedom: float) -> Interval:
    from scipy.special import stdtrit  # takes a second to import

    half_width = float(stdtrit(freedom, (1 + LEVEL) / 2)) * error
    return Interval(mean, mean - half_width, mean + half_width)


def is_better(value: float, reference: float, metric: str) -> bool:
    """Return whether a value of a metric is better than the reference value."""
    return value > reference if metric in HIGHER_IS_BETTER else value < reference


class WindowUnits(NamedTuple):
    """A predictor's sums on each window of a set, or on groups of neighbouring windows."""

    firsts: Array
    """[U]: the first row of each window or group"""
    sums: Array
    """[U, K]: the sums that metrics are computed from"""


class PairedComparison(NamedTuple):
    """A comparison of one predictor with others on the same windows."""

    differences: Mapping[str, Mapping[str, Difference]]
    """The differences, by metric and by the other predictor's name"""
    how: str
    """A description of how the intervals were computed, or why there are none"""


def compare_predictors(
    model: WindowUnits,
    references: Mapping[str, WindowUnits],
    metrics: Mapping[str, Callable[[Array], Array]],
    *,
    context: int,
) -> PairedComparison:
    """Return the difference of each metric of a model from the references, with an interval and a
    verdict. This is the only rule by which something is called better or worse.

    Windows are resampled in blocks of neighbours that share rows, and the same blocks for both
    predictors, so that the difficulty of a window cancels out. A difference is better or worse
    where the whole 95 % interval is, otherwise it is not shown. Metrics are functions of sums [...,
    K].
    """
    import numpy as np

    sums_of = [model.sums, *(reference.sums for reference in references.values())]
    num_units, block = len(model.firsts), estimate_block_length(model.firsts, context)
    samples: list[list[Array]] = [[] for _ in sums_of]
    how = f"none: the windows hold fewer than {MIN_BLOCKS} that share no rows"
    if num_units >= MIN_BLOCKS * block:
        how = f"{NUM_RESAMPLES:,} resamples of the windows in {num_units / block:.0f} blocks"
        for counts in draw_counts(num_units, block):
            for drawn, sums in zip(samples, sums_of, strict=True):
                drawn.append(counts @ sums)
    totals = [sums.sum(axis=0) for sums in sums_of]
    resampled = [np.concatenate(drawn) if drawn else None for drawn in samples]
    with np.errstate(invalid="ignore", divide="ignore"):
        differences = {
            metric: {
                name: _compare_pair(
                    metric, compute, totals[0], totals[i], resampled[0], resampled[i]
                )
                for i, name in enumerate(references, start=1)
            }
            for metric, compute in metrics.items()
        }
    return PairedComparison(differences, how)


def _compare_pair(
    metric: str,
    compute: Callable[[Array], Array],
    total: Array,
    reference: Array,
    samples: Array | None,
    other_samples: Array | None,
) -> Difference:
    value, base = float(compute(total)), float(compute(reference))
    is_error = metric not in HIGHER_IS_BETTER
    interval = relative = None
    if samples is not None and other_samples is not None:
        values, bases = compute(samples), compute(other_samples)
        interval = compute_percentile_interval(values - bases)
        if is_error and base:
            relative = compute_percentile_interval(values / bases - 1)
    verdict = NO_DIFFERENCE
    if interval is not None:
        verdict = Interval(value - base, *interval).judge(higher_is_better=not is_error)
    return {
        "difference": value - base,
        "interval": interval,
        "relative": value / base - 1 if is_error and base else None,
        "relative_interval": relative,
        "verdict": verdict,
    }


def combine_verdicts(verdicts: Iterable[str]) -> str:
    """Return the verdict on a model from its verdicts against each baseline: worse than any of them
    is worse, and better means better than all."""
    outcomes = set(verdicts)
    return WORSE if WORSE in outcomes else BETTER if outcomes == {BETTER} else NO_DIFFERENCE


def estimate_block_length(starts: Array, context: int) -> int:
    """Return the typical number of consecutive windows that share rows with the first of them."""
    import numpy as np

    ordered = np.sort(starts)
    ahead = np.searchsorted(ordered, ordered + context) - np.arange(len(starts))
    return max(int(np.median(ahead)), 1)


def draw_counts(num_windows: int, block: int) -> Iterator[Array]:
    """Yield the number of times that each window is drawn, [R, N], several resamples at a time,
    from a fixed seed."""
    import numpy as np

    generator = np.random.default_rng(0)
    resample = np.arange(RESAMPLES_AT_ONCE)[:, None]
    for _ in range(0, NUM_RESAMPLES, RESAMPLES_AT_ONCE):
        firsts = generator.integers(num_windows, size=(RESAMPLES_AT_ONCE, -(-num_windows // block)))
        windows = (firsts[..., None] + np.arange(block)) % num_windows
        windows = windows.reshape(RESAMPLES_AT_ONCE, -1)[:, :num_windows] + num_windows * resample
        counts = np.bincount(windows.ravel(), minlength=RESAMPLES_AT_ONCE * num_windows)
        yield counts.reshape(-1, num_windows).astype(float)


def compute_percentile_interval(samples: npt.NDArray[Any]) -> list[float] | None:
    """Return the interval of the middle share of bootstrap samples; None if all are NaN."""
    import numpy as np

    known = samples[~np.isnan(samples)]
    if not len(known):
        return None
    tail = (1 - LEVEL) / 2
    return [float(bound) for bound in np.quantile(known, [tail, 1 - tail])]


@dataclass
class Moments:
    """Count, mean, spread and range of values that are added part by part."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0
    """Sum of squared distances from the mean"""
    low: float = math.inf
    high: float = -math.inf

    def add(self, values: npt.NDArray[np.float64]) -> None:
        if not len(values):
            return
        count, mean = len(values), float(values.mean())
        squares = float(values.var()) * count
        if self.count:
            distance, total = mean - self.mean, self.count + count
            squares += self.squares + distance**2 * self.count * count / total
            mean = self.mean + distance * count / total
            count = total
        self.count, self.mean, self.squares = count, mean, squares
        self.low = min(self.low, float(values.min()))
        self.high = max(self.high, float(values.max()))

    @property
    def deviation(self) -> float:
        return math.sqrt(self.squares / self.count) if self.count else math.nan


def find_median(quantiles: Sequence[float]) -> tuple[int, int, float]:
    """Return the positions of the two increasing quantiles around the median, and the median's
    relative position between them: 0.5 between 0.1 and 0.9. Where 0.5 is among the levels, or all
    lie to one side of it, both positions are the nearest level's and the relative position is 0."""
    nearest = min(range(len(quantiles)), key=lambda i: abs(quantiles[i] - 0.5), default=0)
    above = next((i for i, level in enumerate(quantiles) if level > 0.5), 0)
    if not above or 0.5 in quantiles:
        return nearest, nearest, 0.0
    low, high = quantiles[above - 1], quantiles[above]
    return above - 1, above, (0.5 - low) / (high - low)


def select_median(values: Any, quantiles: Sequence[float]) -> Any:
    """Return the point prediction [...] from quantiles [..., Q], an array or a tensor: the median,
    or an interpolation between the quantiles around it. Without quantiles, the last axis has one
    value."""
    low, high, share = find_median(quantiles)
    if not share:
        return values[..., low]
    return values[..., low] * (1 - share) + values[..., high] * share
