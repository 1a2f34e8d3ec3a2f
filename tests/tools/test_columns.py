"""A column in little memory: nothing of what is kept depends on how the rows came."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.tools import columns
from slipstream.tools.columns import MAX_BINS, SAMPLE, RunningCourse, Sample


@pytest.mark.slow
@given(st.lists(st.integers(0, 700), min_size=1, max_size=6), st.integers(0, 2**31))
def test_the_course_is_the_range_and_mean_of_each_stretch(sizes, seed):
    draw = np.random.default_rng(seed)
    values = draw.normal(size=sum(sizes))
    values[draw.random(len(values)) < 0.1] = np.nan
    course = RunningCourse()
    for part in np.split(values, np.cumsum(sizes)[:-1]):
        course.add(part)
    assert course.num_rows == len(values)
    assert course.num_bins <= MAX_BINS
    for number in range(course.num_bins):
        part = values[number * course.stride : (number + 1) * course.stride]
        known = part[~np.isnan(part)]
        if len(known):
            assert course.low[number] == known.min()
            assert course.high[number] == known.max()
            assert course.compute_means()[number] == pytest.approx(known.mean())
        else:
            assert np.isnan(course.low[number])
            assert np.isnan(course.compute_means()[number])


@given(st.lists(st.integers(0, 9000), min_size=1, max_size=8))
def test_a_sample_is_evenly_spread_and_never_large(sizes):
    sample = Sample()
    values = np.arange(float(sum(sizes)))
    for part in np.split(values, np.cumsum(sizes)[:-1]):
        sample.add(part)
    assert len(sample.get_values()) <= SAMPLE
    assert np.array_equal(sample.get_values(), values[:: sample.stride])


def test_bars_show_the_course_and_leave_missing_stretches_blank():
    course = RunningCourse()
    course.add(np.array([0.0, 1.0, np.nan, 7.0]))
    assert course.draw(4) == f"{columns.BARS[0]}{columns.BARS[1]} {columns.BARS[-1]}"
    flat = RunningCourse()
    flat.add(np.full(9, 3.0))
    assert flat.draw(3) == columns.BARS[0] * 3
    assert flat.is_constant(0.7)
    assert not course.is_constant(1.0)
