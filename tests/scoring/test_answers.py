"""The block bootstrap of class metrics, against metrics of the windows drawn."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from slipstream.base import statistics
from slipstream.base.statistics import compute_percentile_interval
from slipstream.scoring import answers
from slipstream.scoring.answers import ClassAnswers, find_worst
from tests.scoring.test_classification import count, draw


def as_answers(num=300, steps=1, size=3, stride=1, seed=0):
    logits, labels = draw(num, steps, size, seed)
    log_probs, starts = torch.log_softmax(logits, dim=-1).numpy(), stride * np.arange(num)
    return ClassAnswers(log_probs, labels.numpy(), starts, np.zeros(num, dtype=np.int64))


def take(found, rows):
    return ClassAnswers(*(part[rows] for part in found))


@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("size", [2, 3])
def test_a_resample_has_the_metrics_of_the_windows_drawn(size, steps):
    found = as_answers(60, steps, size)
    metrics = answers.WeightedMetrics(found)
    draws = next(statistics.draw_counts(60, 4))
    assert draws.shape == (statistics.RESAMPLES_AT_ONCE, 60)
    assert (draws.sum(axis=1) == 60).all()
    got = metrics.compute(np.repeat(draws, steps, axis=1))
    for resample in (0, 17):
        rows = np.repeat(np.arange(60), draws[resample].astype(int))
        again = take(found, rows)
        counts = count(torch.from_numpy(again.log_probs), torch.from_numpy(again.labels))
        wanted = counts.compute()["overall"]
        for name, value in wanted.items():
            assert got[name][resample] == pytest.approx(value), name


def test_blocks_are_neighbours():
    draws = next(statistics.draw_counts(100, 10))
    for counts in draws[:5]:
        rolled = np.flatnonzero(np.diff(counts, prepend=counts[-1]))
        assert len(rolled) <= 20  # ten blocks begin and end
    again = next(statistics.draw_counts(100, 10))
    assert np.array_equal(draws, again)


@pytest.mark.parametrize(
    ("start", "length"),
    [
        (np.arange(500), 24),
        (np.arange(0, 500, 6), 4),
        (np.arange(0, 50_000, 100), 1),
        (np.concatenate([np.arange(200), 10_000 + np.arange(200)]), 24),
    ],
)
def test_blocks_are_as_long_as_windows_share_rows(start, length):
    assert statistics.estimate_block_length(start, 24) == length


def test_intervals_hold_the_metric_and_are_wider_for_neighbours():
    found = as_answers(600)
    alone = answers.bootstrap(found, context=1)
    assert alone.how == "1,000 resamples in blocks of 1 windows"
    low, high = alone.get_interval("accuracy")
    accuracy = float((found.log_probs.argmax(-1) == found.labels).mean())
    assert low < accuracy < high
    # a proportion's own error, from 600 that know nothing of each other
    wanted = 2 * 1.96 * math.sqrt(accuracy * (1 - accuracy) / 600)
    assert high - low == pytest.approx(wanted, rel=0.15)
    repeated = take(found, np.repeat(np.arange(60), 10))._replace(starts=np.arange(600))
    blocks, singles = (answers.bootstrap(repeated, context=n) for n in (10, 1))
    assert "blocks of 10" in blocks.how
    widths = [np.ptp(one.get_interval("accuracy")) for one in (blocks, singles)]
    assert widths[0] > 2.5 * widths[1]


def test_no_interval_where_it_would_mean_nothing():
    few = answers.bootstrap(as_answers(100), context=30)
    assert "fewer than 5" in few.how
    many = answers.bootstrap(as_answers(20_001), context=1)
    assert "more than" in many.how
    assert few.get_interval("accuracy") is many.get_interval("accuracy") is None
    assert compute_percentile_interval(np.array([np.nan, np.nan])) is None


@pytest.mark.parametrize("num", [300, 9_000])
@pytest.mark.parametrize(("steps", "size"), [(1, 3), (2, 2)])
def test_sums_of_windows_have_the_metrics_of_the_answers(num, steps, size):
    found = as_answers(num, steps, size)
    units = answers.count_units(found)
    joined = -(-num // answers.MAX_UNITS)
    assert units.firsts.tolist() == list(range(0, num, joined))
    overall = count(torch.from_numpy(found.log_probs), torch.from_numpy(found.labels))
    wanted = overall.compute()["overall"]
    for name, compute in answers.COMPARED.items():
        assert float(compute(units.sums.sum(axis=0))) == pytest.approx(wanted[name]), name
    part = take(found, np.arange(3 * joined))
    counts = count(torch.from_numpy(part.log_probs), torch.from_numpy(part.labels))
    for name, compute in answers.COMPARED.items():
        value = float(compute(units.sums[:3].sum(axis=0)))
        assert value == pytest.approx(counts.compute()["overall"][name]), name


def test_the_most_wrong_come_first_and_not_their_neighbours():
    likely = np.log(np.full((40, 1, 2), 0.5))
    number = np.zeros((40, 1), dtype=np.int64)
    for window, p in ((5, 0.01), (6, 0.02), (20, 0.3), (30, 0.1)):
        likely[window, 0] = np.log([p, 1 - p])
    likely[likely == np.log(0.5)] = 0.0
    found = ClassAnswers(likely, number, np.arange(40), np.zeros(40))
    assert list(find_worst(found, min_distance=3, limit=10)) == [(5, 0), (30, 0), (20, 0)]
    assert list(find_worst(found, min_distance=1, limit=2)) == [(5, 0), (6, 0)]
