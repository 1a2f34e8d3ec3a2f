"""Filters of predictions: row by row, whole arrays, their delay, and other implementations."""

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import signal

from slipstream.base.errors import UserError
from slipstream.config import Config, PredictFilter, Signature
from slipstream.config.prepare import FilterStep
from slipstream.data.filters import (
    RowFilter,
    design_filter,
    design_low_pass,
    filter_column,
    make_filter,
)

KINDS = [
    {"kind": "moving_average", "rows": 7},
    {"kind": "moving_average", "rows": 1},
    {"kind": "ema", "rows": 12},
    {"kind": "savgol", "rows": 9},
    {"kind": "savgol", "rows": 31, "order": 3},
    {"kind": "butterworth", "rows": 20},
    {"kind": "butterworth", "cutoff_hz": 0.05, "order": 5},
]


def build(settings, step=1.0):
    design = design_filter(PredictFilter(**settings), step)
    assert design is not None
    return RowFilter(design)


def make_rows(rows=300, shape=(2, 3)):
    generator = np.random.default_rng(0)
    return 1e3 + generator.normal(size=(rows, *shape)).cumsum(axis=0)


@pytest.mark.parametrize("settings", KINDS)
def test_rows_one_at_a_time_equal_whole_arrays(settings):
    values = make_rows()
    one, many = build(settings), build(settings)
    pushed = np.stack([one.push(row) for row in values])
    np.testing.assert_allclose(many.apply(values), pushed, rtol=1e-12)


@given(cuts=st.lists(st.integers(0, 60), max_size=5), settings=st.sampled_from(KINDS))
def test_arrays_in_parts_equal_the_whole(cuts, settings):
    values = make_rows(60, (2,))
    parts = np.split(values, sorted(cuts))
    in_parts = build(settings)
    joined = np.concatenate([in_parts.apply(part) for part in parts])
    np.testing.assert_allclose(joined, build(settings).apply(values), rtol=1e-12)


@pytest.mark.parametrize("settings", KINDS)
def test_the_filters_equal_those_of_data_prepare(settings):
    values = make_rows(shape=())
    known = dict(settings)
    if settings["kind"] == "butterworth" and "rows" in settings:
        known["cutoff_hz"] = 1 / known.pop("rows")
    expected = filter_column(values, design_filter(FilterStep(columns=("x",), **known), 1.0))
    np.testing.assert_allclose(build(settings).apply(values), expected, rtol=1e-12)


@pytest.mark.parametrize("order", range(1, 11))
def test_the_low_pass_is_that_of_scipy(order):
    design = design_filter(PredictFilter(kind="butterworth", rows=11, order=order), None)
    assert design is not None
    impulse = np.zeros(200)
    impulse[3] = 1.0  # the first row is 0: the filter starts from rest
    expected = signal.sosfilt(signal.butter(order, 2 / 11, output="sos"), impulse)
    np.testing.assert_allclose(RowFilter(design).apply(impulse), expected, atol=1e-12)


@pytest.mark.parametrize("order", range(1, 11))
def test_the_sections_are_those_of_scipy_to_the_bit(order):
    """A run whose data were filtered with them is resumed only if its data are the same."""
    for cutoff in [0.002, 0.1, 0.2, 0.5, 2 / 3, *np.random.default_rng(0).uniform(0.001, 0.98, 50)]:
        expected = signal.butter(order, cutoff, output="sos")
        sections = np.insert(design_low_pass(cutoff, order).sections, 3, 1.0, axis=1)
        np.testing.assert_array_equal(sections, expected)


@pytest.mark.parametrize("settings", KINDS)
def test_a_constant_stays_exactly_as_it_is_from_the_first_row_on(settings):
    one = build(settings)
    assert (one.apply(np.full((50, 2), 0.1)) == 0.1).all()
    assert one.push(np.full(2, 0.1)).tolist() == [0.1, 0.1]


@pytest.mark.parametrize("settings", KINDS)
def test_the_delay_is_how_late_a_ramp_comes(settings):
    one = build(settings)
    ramp = np.arange(3000.0)
    assert ramp[-1] - one.apply(ramp)[-1] == pytest.approx(one.design.delay_rows, abs=1e-6)


def test_the_delays_are_those_of_the_manual():
    delays = {(one["kind"], one.get("rows")): build(one).design.delay_rows for one in KINDS[:5]}
    assert delays["moving_average", 7] == pytest.approx(3.0)
    assert delays["ema", 12] == pytest.approx(5.5)
    assert delays["savgol", 9] == 0.0


@pytest.mark.parametrize("settings", KINDS)
def test_after_a_reset_a_filter_is_new(settings):
    used = build(settings)
    used.apply(make_rows())
    used.reset()
    values = make_rows(40) + 5
    assert (used.apply(values) == build(settings).apply(values)).all()


def make_signature(**more):
    roles = {"inputs": ("x",), "targets": ("y",), "static": (), "shared": 0}
    more = {"quantiles": (), **more}
    return Signature(**roles, channels="together", context=4, horizon=0, step=1.0, **more)


def test_quantiles_do_not_cross_and_numbers_stay_in_their_range():
    config = Config(predict={"filter": {"kind": "savgol", "rows": 5}})
    signature = make_signature(quantiles=(0.1, 0.5, 0.9), output_range=(0.0, 1.0))
    generator = np.random.default_rng(1)
    values = np.sort(generator.uniform(size=(200, 1, 1, 3)), axis=-1)
    one = make_filter(config, signature)
    assert one is not None
    filtered = one.apply(values)
    assert (np.diff(filtered, axis=-1) >= 0).all()
    assert filtered.min() == 0.0
    assert filtered.max() == 1.0
    raw = build({"kind": "savgol", "rows": 5}).apply(values)
    assert (np.diff(raw, axis=-1) < 0).any()


def test_probabilities_still_add_up_to_one():
    config = Config(predict={"filter": {"kind": "moving_average", "rows": 5}})
    one = make_filter(config, make_signature(classes=("a", "b", "c")))
    assert one is not None
    values = np.random.default_rng(2).dirichlet([0.3] * 3, size=(100, 1))
    filtered = one.apply(values)
    np.testing.assert_allclose(filtered.sum(axis=-1), 1.0, rtol=1e-12)
    assert filtered.min() >= 0.0


def test_no_filter_is_none():
    assert make_filter(Config(), make_signature()) is None


def test_a_cut_off_above_half_the_rate_is_refused():
    settings = PredictFilter(kind="butterworth", cutoff_hz=0.5)
    with pytest.raises(UserError, match=r"below half their rate, 0.5 Hz"):
        design_filter(settings, 1.0)
    with pytest.raises(UserError, match="period of the cut-off"):
        design_filter(settings, None)


def test_pushing_rows_imports_neither_torch_nor_scipy():
    code = (
        "import sys; from slipstream.config import PredictFilter\n"
        "from slipstream.data.filters import RowFilter, design_filter\n"
        "for kind in ('savgol', 'butterworth'):\n"
        "    one = RowFilter(design_filter(PredictFilter(kind=kind, rows=9), None))\n"
        "    one.push([1.0]), one.push([2.0])\n"
        "assert not {'torch', 'scipy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
