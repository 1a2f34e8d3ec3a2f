"""Windows compared with a loop over all rows, in higher precision."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.data.prepare import rolling

NAIVE = {
    "mean": np.mean,
    "sum": np.sum,
    "std": np.std,
    "min": np.min,
    "max": np.max,
    "median": np.median,
    "zscore": lambda window: (window[-1] - window.mean()) / (window.std() or 1),
}
KNOWN = {"known_mean": np.mean, "known_median": np.median}


def walk(values, rows, compute):
    """Compute each window on its own; NaN before the first complete one."""
    wide = values.astype(np.longdouble)
    result = [
        compute(wide[end - rows : end]) if end >= rows else np.nan
        for end in range(1, len(values) + 1)
    ]
    return np.array(result, dtype=np.float64)


def make_values(seed, num_rows, *, offset=0.0, scale=1.0, holes=0.0):
    draw = np.random.default_rng(seed)
    values = offset + scale * np.cumsum(draw.standard_normal(num_rows))
    values[draw.random(num_rows) < holes] = np.nan
    return values


@pytest.mark.parametrize("name", NAIVE)
@settings(max_examples=40)
@given(
    seed=st.integers(0, 1000),
    num_rows=st.integers(0, 60),
    rows=st.integers(1, 33),
    offset=st.sampled_from([0.0, 1e6, -1e9]),
    holes=st.sampled_from([0.0, 0.1]),
)
def test_windows_agree_with_a_loop(name, seed, num_rows, rows, offset, holes):
    values = make_values(seed, num_rows, offset=offset, holes=holes)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the loop divides by zero
        wanted = walk(values, rows, NAIVE[name])
    result = getattr(rolling, f"compute_{name}")(values, rows)
    # a difference of numbers around the offset has the absolute error of these
    atol = 1e-12 + 1e-19 * abs(offset)
    np.testing.assert_allclose(result, wanted, rtol=1e-9, atol=atol)


@pytest.mark.parametrize("name", KNOWN)
@settings(max_examples=40)
@given(seed=st.integers(0, 1000), num_rows=st.integers(0, 60), rows=st.integers(1, 33))
def test_windows_of_known_values_agree_with_a_loop(name, seed, num_rows, rows):
    values = make_values(seed, num_rows, offset=1e6, holes=0.4)
    wanted = np.full(num_rows, np.nan)
    for row in range(num_rows):
        window = values[max(row - rows + 1, 0) : row + 1]
        if not np.isnan(window).all():
            wanted[row] = KNOWN[name](window[~np.isnan(window)])
    result = getattr(rolling, f"compute_{name}")(values, rows)
    np.testing.assert_allclose(result, wanted, rtol=1e-12)


@pytest.mark.parametrize("name", [*NAIVE, *KNOWN])
@pytest.mark.parametrize("rows", [1, 2, 3, 7, 20])
def test_constant_columns_stay_exactly_constant(name, rows):
    result = getattr(rolling, f"compute_{name}")(np.full(50, 0.1), rows)[rows - 1 :]
    if name == "sum":
        np.testing.assert_allclose(result, 0.1 * rows, rtol=1e-15)
    else:
        assert (result == (0.0 if name in ("std", "zscore") else 0.1)).all()


def test_the_deviation_of_a_small_ripple_on_a_large_offset_is_precise():
    ripple = np.random.default_rng(0).integers(-8, 9, 2000) / 1024
    values = 1e9 + ripple  # exact in float64
    for rows in (2, 20, 37, 500):
        wanted = walk(ripple, rows, np.std)
        result = rolling.compute_std(values, rows)
        np.testing.assert_allclose(result[rows - 1 :], wanted[rows - 1 :], rtol=1e-12)


def test_a_missing_value_leaves_the_windows_after_it_untouched():
    values = make_values(0, 100)
    broken = values.copy()
    broken[40] = np.nan
    for name in NAIVE:
        compute = getattr(rolling, f"compute_{name}")
        whole, part = compute(values, 8), compute(broken, 8)
        assert np.isnan(part[40:48]).all()
        np.testing.assert_array_equal(part[48:], whole[48:])


@given(num_rows=st.integers(0, 400_000), back=st.integers(0, 50_000), ahead=st.integers(0, 99))
def test_parts_cover_every_row_once_with_the_rows_around_them(num_rows, back, ahead):
    end = 0
    for read, write, inner in rolling.split_rows(num_rows, back, ahead):
        assert write.start == end
        end = write.stop
        assert read.start + inner.start == write.start
        assert inner.stop - inner.start == write.stop - write.start
        assert read.start == max(write.start - back, 0)
        assert read.stop == min(write.stop + ahead, num_rows)
    assert end == num_rows
