"""Intervals against scipy's own tests and values worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats as reference

from slipstream import stats

FIRST, SECOND = [1.0, 1.2, 0.9, 1.1, 1.4], [0.9, 1.0, 0.9, 0.8]


def test_a_paired_interval_is_scipys():
    differences = [b - a for a, b in zip(FIRST, SECOND, strict=False)]
    interval = stats.compute_t_interval(differences)
    wanted = reference.ttest_rel(SECOND, FIRST[:4]).confidence_interval(stats.LEVEL)
    assert interval.mean == pytest.approx(np.mean(differences))
    assert interval[1:] == pytest.approx((wanted.low, wanted.high))


def test_welchs_interval_is_scipys():
    interval = stats.compute_welch_interval(*map(stats.summarize_spread, (FIRST, SECOND)))
    test = reference.ttest_ind(FIRST, SECOND, equal_var=False)
    wanted = test.confidence_interval(stats.LEVEL)
    assert interval.mean == pytest.approx(np.mean(FIRST) - np.mean(SECOND))
    assert interval[1:] == pytest.approx((wanted.low, wanted.high))


def test_seeds_that_all_agree_have_an_interval_of_no_width():
    alike = stats.summarize_spread([1.0, 1.0])
    assert stats.compute_welch_interval(alike, alike) == (0.0, 0.0, 0.0)
    assert stats.compute_t_interval([0.5, 0.5]) == (0.5, 0.5, 0.5)


@pytest.mark.parametrize(
    ("low", "high", "higher", "said"),
    [
        (0.1, 0.2, True, stats.BETTER),
        (0.1, 0.2, False, stats.WORSE),
        (-0.2, -0.1, False, stats.BETTER),
        (-0.2, -0.1, True, stats.WORSE),
        (-0.1, 0.1, True, stats.NO_DIFFERENCE),
    ],
)
def test_an_interval_shows_a_difference_only_beside_zero(low, high, higher, said):
    interval = stats.Interval((low + high) / 2, low, high)
    assert interval.judge(higher_is_better=higher) == said


def test_a_spread_tells_mean_deviation_and_extremes():
    spread = stats.summarize_spread(FIRST)
    assert spread["sd"] == pytest.approx(np.std(FIRST, ddof=1))
    assert (spread["min"], spread["max"], spread["n"]) == (0.9, 1.4, 5)
    unknown = stats.summarize_spread([1.0, math.nan])
    assert math.isnan(unknown["mean"])
    assert unknown["n"] == 2
    assert stats.compute_deviation([1.0, math.inf]) is None


def test_the_middle_of_samples_leaves_out_what_is_not_known():
    samples = np.append(np.arange(1001.0), np.nan)
    assert stats.compute_percentile_interval(samples) == pytest.approx([25.0, 975.0])
    assert stats.compute_percentile_interval(np.array([np.nan])) is None
