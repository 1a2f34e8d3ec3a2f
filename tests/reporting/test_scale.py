from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.reporting.charts import EXTENT, Scale, cover, number_places

finite = st.floats(-1e12, 1e12, allow_subnormal=False)


@given(finite, finite, st.integers(2, 10))
def test_ticks_lie_on_the_axis_and_are_few(one, other, most):
    scale = cover([one, other])
    ticks = scale.list_ticks(most)
    assert 1 <= len(ticks) <= most + 1
    places = scale.place([value for value, _ in ticks])
    assert ((places >= -1e-3) & (places <= EXTENT + 1e-3)).all()


@given(st.floats(1e-9, 1e9), st.floats(10, 1e9), st.integers(2, 10))
def test_values_far_apart_get_a_logarithmic_axis(low, ratio, most):
    scale = cover([low, low * ratio], log=True)
    assert scale.log
    assert 1 <= len(scale.list_ticks(most)) <= most
    assert not cover([-low, low * ratio], log=True).log


@given(st.floats(1e-9, 1e9), st.floats(1 + 1e-6, 1e9), st.integers(2, 10))
def test_a_logarithmic_axis_has_ticks_however_short_it_is(low, ratio, most):
    scale = Scale(low, low * ratio, log=True)
    ticks = scale.list_ticks(most)
    assert 1 <= len(ticks) <= most + 1
    places = scale.place([value for value, _ in ticks])
    assert ((places >= -1e-3) & (places <= EXTENT + 1e-3)).all()


@pytest.mark.parametrize(("low", "high"), [(6.0, 9.0), (12.5, 18.0), (24.0, 25.0)])
def test_a_logarithmic_axis_within_a_decade_has_more_than_one_tick(low, high):
    assert len(Scale(low, high, log=True).list_ticks(6)) > 1


def test_no_category_is_no_tick():
    assert number_places([]).list_ticks(5) == []


@pytest.mark.parametrize(
    ("begin", "end", "labels"),
    [
        ("2016-07-01", "2018-06-26", ["2016-07", "2017-01", "2017-07", "2018-01"]),
        ("2020-01-01T05:00", "2020-01-03T02:00", ["12:00", "2020-01-02", "12:00", "2020-01-03"]),
        ("1990-06-01", "2020-06-01", ["1995", "2000", "2005", "2010", "2015", "2020"]),
    ],
)
def test_dates_have_round_ticks(begin, end, labels):
    low, high = (float(np.datetime64(day, "us").astype(int)) for day in (begin, end))
    found = Scale(low, high, dates=True).list_ticks(6)
    assert [text for _, text in found] == labels


def test_nothing_finite_still_has_an_axis():
    assert cover([None, float("nan")]).list_ticks(5)
    assert cover([3.0]).list_ticks(5)
