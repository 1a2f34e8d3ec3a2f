"""Moments of values that come in parts, spreads over seeds and confidence intervals.

Needs numpy and scipy, not torch.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

LEVEL = 0.95
BETTER, WORSE, NO_DIFFERENCE = "better", "worse", "no difference shown"


class Interval(NamedTuple):
    """A mean and its two-sided confidence interval."""

    mean: float
    low: float
    high: float

    def judge(self, *, higher_is_better: bool) -> str:
        """Say whether a difference is an improvement; an interval that holds 0 shows none."""
        above, below = (BETTER, WORSE) if higher_is_better else (WORSE, BETTER)
        return above if self.low > 0 else below if self.high < 0 else NO_DIFFERENCE


def summarize_spread(values: Sequence[float]) -> dict[str, Any]:
    """Return mean, standard deviation, extremes and count; all NaN if one of the values is.

    R² of a constant truth is such a value. The deviation of a single value is None.
    """
    if any(math.isnan(value) for value in values):
        return dict.fromkeys(("mean", "sd", "min", "max"), math.nan) | {"n": len(values)}
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


def compute_spread_interval(spread: Mapping[str, Any]) -> Interval:
    """Return the mean of a spread of two or more values with Student's interval."""
    return _make_interval(spread["mean"], spread["sd"] / math.sqrt(spread["n"]), spread["n"] - 1)


def compute_welch_interval(first: Mapping[str, Any], second: Mapping[str, Any]) -> Interval:
    """Return the mean of `first` less that of `second`, two spreads, with Welch's interval."""
    variances = [one["sd"] ** 2 / one["n"] for one in (first, second)]
    terms = [
        variance**2 / (one["n"] - 1)
        for variance, one in zip(variances, (first, second), strict=True)
    ]
    freedom = sum(variances) ** 2 / max(sum(terms), 1e-300)
    error = math.sqrt(sum(variances))
    return _make_interval(first["mean"] - second["mean"], error, max(freedom, 1.0))


def _make_interval(mean: float, error: float, freedom: float) -> Interval:
    from scipy.special import stdtrit  # takes a second to import

    half_width = float(stdtrit(freedom, (1 + LEVEL) / 2)) * error
    return Interval(mean, mean - half_width, mean + half_width)


def compute_percentile_interval(samples: npt.NDArray[Any]) -> list[float] | None:
    """Return what the middle share of bootstrap samples lies within; None if all are NaN."""
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
    """Return between which of some quantiles, which increase, the median lies, and how far it is
    from the first of them to the second: 0.5 between 0.1 and 0.9.

    Where 0.5 is among them, or all lie to one side of it, that is the nearest one, and no way.
    """
    nearest = min(range(len(quantiles)), key=lambda i: abs(quantiles[i] - 0.5), default=0)
    above = next((i for i, level in enumerate(quantiles) if level > 0.5), 0)
    if not above or 0.5 in quantiles:
        return nearest, nearest, 0.0
    low, high = quantiles[above - 1], quantiles[above]
    return above - 1, above, (0.5 - low) / (high - low)


def select_median(values: Any, quantiles: Sequence[float]) -> Any:
    """Return the point prediction [...] from quantiles [..., Q], an array or a tensor: the median,
    or what lies between the quantiles around it. Without quantiles, the last axis has one value."""
    low, high, share = find_median(quantiles)
    if not share:
        return values[..., low]
    return values[..., low] * (1 - share) + values[..., high] * share
