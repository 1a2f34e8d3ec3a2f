"""Resampling compared with a loop over the new times."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.base.errors import UserError
from slipstream.data.prepare.resampling import get_look_ahead, resample

SECOND = 1_000_000
METHODS = ("mean", "last", "linear", "nearest")


def pick(times, values, at, every, limit, method):
    """The value at one time, and whether the rows give any; times are whole numbers."""
    known = [(int(t), v) for t, v in zip(times, values, strict=True) if not np.isnan(v)]
    before = [row for row in known if row[0] <= at]
    after = [row for row in known if row[0] > at]
    if method in ("mean", "last"):
        if not before or at - before[-1][0] >= limit:
            return None
        recent = [value for time, value in before if time > at - every]
        return np.mean(recent) if recent and method == "mean" else before[-1][1]
    if before and before[-1][0] == at:
        return before[-1][1]
    if method == "linear":
        if not before or not after or after[0][0] - before[-1][0] > limit:
            return None
        (left, low), (right, high) = before[-1], after[0]
        return low + (high - low) * (at - left) / (right - left)
    near = [(abs(time - at), time, v) for time, v in (*before[-1:], *after[:1])]
    distance, _, value = min(near, default=(limit, 0, 0))
    return value if 2 * distance <= limit else None


@pytest.mark.parametrize("method", METHODS)
@settings(max_examples=40)
@given(
    seed=st.integers(0, 10_000),
    every=st.integers(1, 6),
    longer=st.integers(0, 12),
    holes=st.sampled_from([0.0, 0.3]),
)
def test_resampling_agrees_with_a_loop(method, seed, every, longer, holes):
    draw, limit = np.random.default_rng(seed), every + longer
    times = np.cumsum(draw.choice([1, 2, 3, 20], draw.integers(1, 30), p=[0.5, 0.2, 0.2, 0.1]))
    columns = {"x": draw.standard_normal(len(times)), "full": np.arange(len(times)) * 1.0}
    columns["x"][draw.random(len(times)) < holes] = np.nan
    expected = [
        (at, pick(times, columns["x"], at, every, limit, method))
        for at in range(0, int(times[-1]) + 1, every)
        if at >= times[0] and pick(times, columns["full"], at, every, limit, method) is not None
    ]
    for unit in (SECOND, 1.0):
        result = resample(
            times * SECOND if unit == SECOND else times.astype(float),
            columns,
            every=float(every),
            method=method,
            limit=float(limit),
        )
        assert (result.times / unit).tolist() == [at for at, _ in expected]
        wanted = [np.nan if value is None else value for _, value in expected]
        np.testing.assert_allclose(result.columns["x"], wanted, rtol=1e-12)
        assert (times[result.rows] <= result.times / unit).all()


def test_ten_hertz_become_one_row_a_second_of_the_rows_up_to_it():
    times = np.arange(1, 41) * 100_000
    result = resample(times, {"x": np.arange(1.0, 41.0)}, every="1s")
    assert (result.times // SECOND).tolist() == [1, 2, 3, 4]
    assert result.columns["x"].tolist() == [5.5, 15.5, 25.5, 35.5]


def test_times_that_miss_the_grid_by_rounding_are_on_it():
    times = np.cumsum(np.full(1000, 0.1))  # 99.9999999999986 at the end, not 100
    result = resample(times, {"x": np.arange(1000.0)}, every=0.1, method="last")
    assert result.columns["x"].tolist() == list(range(1000))
    result = resample(times, {"x": np.ones(1000)}, every=10.0)
    assert len(result.times) == 10


def test_hours_become_quarters_of_an_hour():
    times = np.array([0, 1, 2, 4]) * 3600 * SECOND
    columns = {"x": np.array([0.0, 4.0, 8.0, 0.0])}
    settings = {"every": "15min", "limit": "1h"}
    result = resample(times, columns, method="linear", **settings)
    assert result.columns["x"].tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 0]
    assert np.diff(result.times).max() == 2 * 3600 * SECOND  # the gap stays
    result = resample(times, columns, method="last", **settings)
    assert result.columns["x"].tolist() == [0] * 4 + [4] * 4 + [8] * 4 + [0]


def test_look_ahead_is_declared_in_new_rows():
    assert [get_look_ahead("15min", "1h", method) for method in METHODS] == [0, 0, 4, 2]
    assert [get_look_ahead(1.0, None, method) for method in METHODS] == [0, 0, 3, 2]


@pytest.mark.parametrize("method", METHODS)
def test_a_constant_column_stays_exactly_constant(method):
    times = np.cumsum(np.random.default_rng(0).integers(1, 9, 500)) * 10_000
    result = resample(times, {"x": np.full(500, 0.1)}, every=0.1, method=method)
    assert len(result.times) > 100
    assert (result.columns["x"] == 0.1).all()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("num_rows", [0, 1])
def test_a_series_of_no_or_one_row(method, num_rows):
    times = np.arange(num_rows) * SECOND
    result = resample(times, {"x": np.ones(num_rows)}, every=1.0, method=method)
    assert result.times.tolist() == times.tolist()
    assert result.columns["x"].tolist() == [1.0] * num_rows


def test_a_gap_of_years_takes_no_memory():
    times = np.array([0, 1, 2, 10**9]) * SECOND
    for method in METHODS:
        result = resample(times, {"x": np.arange(4.0)}, every=0.001, method=method, limit=2.0)
        assert len(result.times) < 10_000


@pytest.mark.parametrize(
    ("times", "settings", "message"),
    [
        ([0, 2, 1], {"every": 1.0}, "row 3 of the series is earlier"),
        ([0, 1, 2], {"every": 2.0, "limit": 1.0}, "shorter than every"),
        ([0, 3600, 7200, 10800], {"every": "15min"}, "set limit"),
        ([0, 1, 2], {"every": 1e-7}, "whole number of microseconds"),
        ([0, 400 * 86400], {"every": 0.1, "limit": "1000d"}, "rows of 2; use a longer every"),
    ],
)
def test_what_cannot_be_resampled_is_refused(times, settings, message):
    with pytest.raises(UserError, match=message):
        resample(np.array(times) * SECOND, {}, **settings)


def test_text_needs_timestamps():
    with pytest.raises(UserError, match="holds plain numbers; write every as a number"):
        resample(np.arange(5.0), {}, every="15min")
