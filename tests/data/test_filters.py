"""Filters compared with what they are by definition."""

from __future__ import annotations

import numpy as np
import pytest
from pydantic import ValidationError
from scipy import signal

from slipstream.base.errors import UserError
from slipstream.config.prepare import FilterStep
from slipstream.data.filters import design_filter, filter_column, get_reach

WALK = 1e3 + np.cumsum(np.random.default_rng(0).standard_normal(300))
KINDS = {
    "ema": {"rows": 8},
    "butterworth": {"cutoff_hz": 1.0, "order": 4, "step_s": 0.1},
    "moving_average": {"rows": 7},
    "median": {"rows": 7},
    "savgol": {"rows": 7, "order": 2},
}


def apply_filter(values, *, step_s=None, **settings):
    design = design_filter(FilterStep(columns=("x",), **settings), step_s)
    return filter_column(values, design)


def windows(values, rows):
    padded = np.concatenate([np.full(rows - 1, values[0]), values])
    return np.lib.stride_tricks.sliding_window_view(padded, rows)


def test_an_exponential_average_is_its_recursion():
    wanted = [WALK[0]]
    for value in WALK[1:]:
        wanted.append(wanted[-1] + 2 / 9 * (value - wanted[-1]))
    np.testing.assert_allclose(apply_filter(WALK, kind="ema", rows=8), wanted, rtol=1e-13)


@pytest.mark.parametrize("order", [1, 2, 5, 10])
def test_a_butterworth_filter_begins_as_if_the_first_row_had_always_been(order):
    result = apply_filter(WALK, kind="butterworth", cutoff_hz=0.5, order=order, step_s=0.1)
    sections = signal.butter(order, 0.5, fs=10.0, output="sos")
    state = signal.sosfilt_zi(sections) * WALK[0]
    np.testing.assert_allclose(result, signal.sosfilt(sections, WALK, zi=state)[0], rtol=1e-9)


def test_a_butterworth_filter_passes_slow_waves_and_stops_fast_ones():
    seconds = np.arange(0, 60, 0.1)
    slow, fast = np.sin(2 * np.pi * 0.05 * seconds), np.sin(2 * np.pi * 3 * seconds)
    result = apply_filter(slow + fast, kind="butterworth", cutoff_hz=0.5, order=4, step_s=0.1)
    amplitude = np.abs(np.fft.rfft(result * np.hanning(600))) / 150
    assert amplitude[3] == pytest.approx(1, abs=0.02)
    assert amplitude[180] < 1e-3


@pytest.mark.parametrize("rows", [3, 4, 9])
def test_windows_are_those_of_past_rows(rows):
    mean = apply_filter(WALK, kind="moving_average", rows=rows)
    median = apply_filter(WALK, kind="median", rows=rows)
    for row in (0, 1, rows - 1, 100, 299):
        window = WALK[max(row - rows + 1, 0) : row + 1]
        assert mean[row] == pytest.approx(window.mean(), rel=1e-13)
        assert median[row] == np.median(window)


def test_a_polynomial_is_fitted_to_the_rows_up_to_each_one():
    result = apply_filter(WALK, kind="savgol", rows=7, order=3)
    wanted = [np.polyval(np.polyfit(np.arange(7.0), one, 3), 6) for one in windows(WALK, 7)]
    np.testing.assert_allclose(result, wanted, rtol=1e-9)


@pytest.mark.parametrize(("rows", "order"), [(31, 5), (1001, 5), (1001, 2)])
def test_the_weights_of_a_long_polynomial_are_exact(rows, order):
    """Of powers of row numbers, not scaled, floating point leaves nothing: 1000 ** 10."""
    design = design_filter(FilterStep(columns=("x",), kind="savgol", rows=rows, order=order), None)
    basis = np.polynomial.legendre.legvander(np.linspace(1, -1, rows), order)
    weights = basis @ np.linalg.solve(basis.T @ basis, basis[0])
    np.testing.assert_allclose(design.weights, weights, atol=1e-12)


@pytest.mark.parametrize("kind", ["moving_average", "median", "savgol"])
def test_a_centered_filter_sees_as_many_rows_after_as_before(kind):
    chosen = {"kind": kind, "rows": 9}
    assert get_reach(FilterStep(columns=("x",), **chosen)) == (8, 0)
    assert get_reach(FilterStep(columns=("x",), centered=True, **chosen)) == (4, 4)
    centered = apply_filter(WALK, centered=True, **chosen)
    if kind == "savgol":
        wanted = signal.savgol_filter(WALK, 9, 2)[4:-4]
    else:
        wanted = apply_filter(WALK, **chosen)[8:]
    np.testing.assert_allclose(centered[4:-4], wanted, rtol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_a_constant_column_stays_constant(kind):
    result = apply_filter(np.full(200, 0.1), kind=kind, **KINDS[kind])
    assert (result == 0.1).all()


@pytest.mark.parametrize("kind", KINDS)
def test_a_missing_value_is_missing_in_the_result_and_ends_there(kind):
    values = WALK.copy()
    values[[0, 1, 50, 51]] = np.nan
    result = apply_filter(values, kind=kind, **KINDS[kind])
    missing = np.flatnonzero(np.isnan(result)).tolist()
    if kind == "savgol":  # until the row is out of reach
        assert missing == [*range(8), *range(50, 58)]
    else:
        assert missing == [0, 1, 50, 51]
    whole = apply_filter(WALK, kind=kind, **KINDS[kind])
    np.testing.assert_allclose(result[-100:], whole[-100:], rtol=1e-6)


def test_recursive_filters_hold_the_last_known_value():
    values = np.array([1.0, 5.0, np.nan, np.nan, 2.0])
    held = np.array([1.0, 5.0, 5.0, 5.0, 2.0])
    for kind in ("ema", "butterworth"):
        result = apply_filter(values, kind=kind, **KINDS[kind])
        wanted = apply_filter(held, kind=kind, **KINDS[kind])
        np.testing.assert_array_equal(result, np.where(np.isnan(values), np.nan, wanted))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("values", [[], [3.0], [np.nan], [np.nan, np.nan]])
def test_very_short_and_empty_columns(kind, values):
    result = apply_filter(np.array(values), kind=kind, **KINDS[kind])
    np.testing.assert_array_equal(result, values)


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        ({"kind": "butterworth", "cutoff_hz": 5.0, "step_s": 0.1}, "half their rate, 5 Hz"),
        ({"kind": "butterworth", "cutoff_hz": 9.0, "step_s": 0.1}, "half their rate, 5 Hz"),
        ({"kind": "butterworth", "cutoff_hz": 1.0}, "set data.time"),
        ({"kind": "butterworth", "rows": 5}, "takes cutoff_hz"),
        ({"kind": "butterworth", "cutoff_hz": 1.0, "order": 11}, "order is 11"),
        ({"kind": "butterworth", "cutoff_hz": 1.0, "centered": True}, "cannot be centered"),
        ({"kind": "ema"}, "needs rows"),
        ({"kind": "ema", "rows": 5, "centered": True}, "cannot be centered"),
        ({"kind": "ema", "rows": 5, "cutoff_hz": 1.0}, 'kind = "ema" takes rows'),
        ({"kind": "savgol", "rows": 3, "order": 3}, "takes from 4 to 1,001"),
        ({"kind": "savgol", "rows": 5000}, "takes from 3 to 1,001"),
        ({"kind": "median", "rows": 4, "centered": True}, "an odd number of rows"),
        ({"kind": "kalman", "rows": 4}, "'ema', 'moving_average', 'median'"),
    ],
)
def test_settings_that_make_no_filter_are_refused(chosen, message):
    with pytest.raises((UserError, ValidationError), match=message):
        apply_filter(WALK, **chosen)
