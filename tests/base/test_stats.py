"""Intervals against scipy's own tests and values worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats as reference

from slipstream.base import statistics
from slipstream.base.statistics import (
    BETTER,
    NO_DIFFERENCE,
    WORSE,
    WindowUnits,
    combine_verdicts,
    compare_predictors,
    is_better,
)

FIRST, SECOND = [1.0, 1.2, 0.9, 1.1, 1.4], [0.9, 1.0, 0.9, 0.8]


def test_a_paired_interval_is_scipys():
    differences = [b - a for a, b in zip(FIRST, SECOND, strict=False)]
    interval = statistics.compute_t_interval(differences)
    wanted = reference.ttest_rel(SECOND, FIRST[:4]).confidence_interval(statistics.LEVEL)
    assert interval.mean == pytest.approx(np.mean(differences))
    assert interval[1:] == pytest.approx((wanted.low, wanted.high))


def test_welchs_interval_is_scipys():
    interval = statistics.compute_welch_interval(*map(statistics.summarize_spread, (FIRST, SECOND)))
    test = reference.ttest_ind(FIRST, SECOND, equal_var=False)
    wanted = test.confidence_interval(statistics.LEVEL)
    assert interval.mean == pytest.approx(np.mean(FIRST) - np.mean(SECOND))
    assert interval[1:] == pytest.approx((wanted.low, wanted.high))


def test_seeds_that_all_agree_have_an_interval_of_no_width():
    alike = statistics.summarize_spread([1.0, 1.0])
    assert statistics.compute_welch_interval(alike, alike) == (0.0, 0.0, 0.0)
    assert statistics.compute_t_interval([0.5, 0.5]) == (0.5, 0.5, 0.5)


@pytest.mark.parametrize(
    ("low", "high", "higher", "said"),
    [
        (0.1, 0.2, True, statistics.BETTER),
        (0.1, 0.2, False, statistics.WORSE),
        (-0.2, -0.1, False, statistics.BETTER),
        (-0.2, -0.1, True, statistics.WORSE),
        (-0.1, 0.1, True, statistics.NO_DIFFERENCE),
    ],
)
def test_an_interval_shows_a_difference_only_beside_zero(low, high, higher, said):
    interval = statistics.Interval((low + high) / 2, low, high)
    assert interval.judge(higher_is_better=higher) == said


def test_a_spread_tells_mean_deviation_and_extremes():
    spread = statistics.summarize_spread(FIRST)
    assert spread["sd"] == pytest.approx(np.std(FIRST, ddof=1))
    assert (spread["min"], spread["max"], spread["n"]) == (0.9, 1.4, 5)
    unknown = statistics.summarize_spread([1.0, math.nan])
    assert math.isnan(unknown["mean"])
    assert unknown["n"] == 2
    assert statistics.compute_deviation([1.0, math.inf]) is None


def test_the_middle_of_samples_leaves_out_what_is_not_known():
    samples = np.append(np.arange(1001.0), np.nan)
    assert statistics.compute_percentile_interval(samples) == pytest.approx([25.0, 975.0])
    assert statistics.compute_percentile_interval(np.array([np.nan])) is None


MEAN = {"mae": lambda sums: sums[..., 1] / sums[..., 0]}


def make_units(errors, stride=1):
    errors = np.asarray(errors, dtype=float)
    return WindowUnits(
        stride * np.arange(len(errors)), np.stack([np.ones_like(errors), errors], axis=1)
    )


def compare(model, other, *, context=1):
    paired = compare_predictors(
        make_units(model), {"repeat": make_units(other)}, MEAN, context=context
    )
    return paired.differences["mae"]["repeat"], paired.how


def test_one_rule_says_better_worse_or_not_shown():
    draw = np.random.default_rng(0)
    hard = draw.exponential(size=400)  # for both: pairs cancel it
    noise = 0.05 * draw.standard_normal(400)
    gap, how = compare(0.9 * hard + noise, hard)
    assert how == "1,000 resamples of the windows in 400 blocks"
    assert gap["verdict"] == BETTER
    assert gap["interval"][0] < gap["difference"] < gap["interval"][1] < 0
    assert gap["relative"] == pytest.approx(gap["difference"] / hard.mean())
    assert gap["relative_interval"][0] < gap["relative"] < gap["relative_interval"][1] < 0
    assert compare(hard, 0.9 * hard + noise)[0]["verdict"] == WORSE
    gap, _ = compare(hard + noise, hard)
    assert gap["verdict"] == NO_DIFFERENCE
    assert gap["interval"][0] < 0 < gap["interval"][1]
    assert compare(hard, hard)[0]["interval"] == [0.0, 0.0]
    assert compare(hard, hard)[0]["verdict"] == NO_DIFFERENCE


def test_neighbours_that_share_rows_say_less():
    """Each of 40 windows repeated ten times: 400 errors, but no more than 40 are of their own."""
    draw = np.random.default_rng(0)
    gain = np.repeat(0.1 + 0.5 * draw.standard_normal(40), 10)
    alone, _ = compare(1 - gain, np.ones(400))
    blocks, how = compare(1 - gain, np.ones(400), context=10)
    assert "40 blocks" in how
    assert alone["verdict"] == BETTER
    assert blocks["verdict"] == NO_DIFFERENCE
    few, how = compare(1 - gain, np.ones(400), context=100)
    assert few["interval"] is few["relative_interval"] is None
    assert few["verdict"] == NO_DIFFERENCE
    assert "fewer than 5" in how


def test_what_is_better_when_higher_is_judged_the_other_way():
    metrics = {"accuracy": MEAN["mae"]}
    draw = np.random.default_rng(0)
    right = (draw.random(500) < 0.5).astype(float)
    more = np.maximum(right, draw.random(500) < 0.2)
    others = {"majority": make_units(right)}
    gap = compare_predictors(make_units(more), others, metrics, context=1).differences
    assert gap["accuracy"]["majority"]["verdict"] == BETTER
    assert gap["accuracy"]["majority"]["relative"] is None
    assert is_better(0.9, 0.8, "accuracy")
    assert is_better(0.8, 0.9, "mae")


def test_a_baseline_without_error_is_compared_all_the_same():
    gap, _ = compare(np.ones(50), np.zeros(50))
    assert gap["verdict"] == WORSE
    assert gap["relative"] is gap["relative_interval"] is None


def test_better_is_better_than_every_baseline():
    assert combine_verdicts([BETTER, BETTER]) == BETTER
    assert combine_verdicts([BETTER, NO_DIFFERENCE]) == NO_DIFFERENCE
    assert combine_verdicts([BETTER, WORSE, NO_DIFFERENCE]) == WORSE
    assert combine_verdicts([]) == NO_DIFFERENCE
