"""Every computation: cutting the series, and beginning later, changes no digit of what remains."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from slipstream.config.prepare import FilterStep
from slipstream.data.filters import design_filter, filter_column, get_reach
from slipstream.data.prepare import calendars, joins, resampling, rolling
from slipstream.data.prepare.formulas import parse_formula

FORMULAS = (
    "a + b * 2 - a / b",
    "lag(a, 3)",
    "lag(a, -3) - lag(b, 2)",
    "diff(log(abs(a)), 2)",
    "mean(a, 7) + sum(b, 5)",
    "zscore(a, 20)",
    "std(a, 13) > lag(std(a, 13))",
    "max(a, 6) - min(b, 9)",
    "median(a, 5) + median(b, 4)",
    "ema(a, 12)",
    "cumsum(a) * hour()",
    "mean(ema(b, 4), 3)",
    "where(a > b and not b < 0, exp(-abs(a)), sqrt(abs(b)))",
    "sin(a) ** 3 + cos(b) + tanh(a) + a ** 0.5 + a % 3 + b // 2",
    "clip(fill(a, 0), -1, 1) + sign(b) + floor(a) + missing(b)",
    "weekday() + month() / day_of_year() + minute()",
    "mean(lag(a, -2), 5)",
)


@dataclass(frozen=True)
class Computation:
    name: str
    settings: Any

    @property
    def reach(self) -> tuple[int | None, int]:
        if self.name == "formula":
            formula = parse_formula(self.settings)
            return formula.look_back, formula.look_ahead
        if self.name == "calendar":
            return 0, 0
        return get_reach(FilterStep(columns=("a",), **self.settings))

    def compute(self, columns, times):
        if self.name == "formula":
            return parse_formula(self.settings).evaluate(columns, times)
        if self.name == "calendar":
            return np.stack(list(calendars.compute_calendar(times, **self.settings).values()), 1)
        design = design_filter(FilterStep(columns=("a",), **self.settings), 60.0)
        return filter_column(columns["a"], design)


COMPUTATIONS = [
    *(Computation("formula", text) for text in FORMULAS),
    Computation("filter", {"kind": "ema", "rows": 9}),
    Computation("filter", {"kind": "butterworth", "cutoff_hz": 0.001, "order": 3}),
    *(
        Computation("filter", {"kind": kind, "rows": rows, "centered": centered})
        for kind in ("moving_average", "median", "savgol")
        for rows, centered in ((3, False), (11, False), (5, True))
    ),
    Computation("filter", {"kind": "median", "rows": 6}),
    Computation("calendar", {"features": ["hour", "weekday", "day_of_year", "month"]}),
]


SEEDS = st.integers(0, 2**32 - 1)
FEW = settings(max_examples=20)
MANY = settings(max_examples=500)


def make_series(draw):
    """Draw two columns of up to 80 rows; their times are a minute apart."""
    num_rows = int(draw.integers(0, 81))
    values = np.cumsum(draw.standard_normal((2, num_rows)), axis=1)
    kind = draw.choice(["walk", "constant", "offset"], p=[0.6, 0.2, 0.2])
    values = {"walk": values, "constant": values * 0 + 0.1, "offset": values + 1e8}[kind]
    values[draw.random(values.shape) < draw.choice([0.0, 0.15, 1.0], p=[0.5, 0.4, 0.1])] = np.nan
    times = draw.integers(0, 10**15) + 60_000_000 * np.arange(num_rows)
    return {"a": values[0], "b": values[1]}, times


def take(columns, rows):
    return {name: values[rows] for name, values in columns.items()}


def check_computation(one, seed):
    draw = np.random.default_rng(seed)
    columns, times = make_series(draw)
    back, ahead = one.reach
    whole = one.compute(columns, times)
    assert len(whole) == len(times)
    cut, begin = (int(row) for row in draw.integers(0, len(times) + 1, 2))
    part = one.compute(take(columns, slice(cut)), times[:cut])
    certain = max(cut - ahead, 0)
    np.testing.assert_array_equal(part[:certain], whole[:certain])
    if back is not None:
        part = one.compute(take(columns, slice(begin, None)), times[begin:])
        np.testing.assert_array_equal(part[back:], whole[begin + back :])


every_computation = pytest.mark.parametrize(
    "one", COMPUTATIONS, ids=lambda one: f"{one.name} {one.settings}"
)


@every_computation
@FEW
@given(seed=SEEDS)
def test_cut_series_and_slices_give_the_same_digits(one, seed):
    check_computation(one, seed)


@pytest.mark.slow
@every_computation
@MANY
@given(seed=SEEDS)
def test_cut_series_and_slices_give_the_same_digits_in_many_cases(one, seed):
    check_computation(one, seed)


@every_computation
def test_long_series_are_the_same_in_parts(one, monkeypatch):
    random = np.random.default_rng(1)
    columns = {name: random.standard_normal(500) for name in "ab"}
    columns["a"][random.random(500) < 0.05] = np.nan
    times = 60_000_000 * np.arange(500)
    whole = one.compute(columns, times)
    monkeypatch.setattr(rolling, "CHUNK_ROWS", 37)
    np.testing.assert_array_equal(one.compute(columns, times), whole)


def check_resampling(method, dates, seed):
    draw = np.random.default_rng(seed)
    columns, _ = make_series(draw)
    num_rows = len(columns["a"])
    times = np.cumsum(draw.choice([0.1, 0.5, 1.0, 1.3, 7.0], num_rows))
    times = (times * 1e6).astype(np.int64) if dates else times
    every, limit = draw.choice([0.25, 1.0, 2.0]), draw.choice([2.0, 4.0, 20.0])
    chosen = {"every": float(every), "method": method, "limit": float(limit)}
    cut = int(draw.integers(0, num_rows + 1))
    whole = resampling.resample(times, columns, **chosen)
    part = resampling.resample(times[:cut], take(columns, slice(cut)), **chosen)
    np.testing.assert_array_equal(part.times, whole.times[: len(part.times)])
    ahead = resampling.get_look_ahead(every, limit, method)
    certain = max(len(part.times) - ahead, 0)
    for name in columns:
        wanted = whole.columns[name][:certain]
        np.testing.assert_array_equal(part.columns[name][:certain], wanted)


@pytest.mark.parametrize("method", ["mean", "last", "linear", "nearest"])
@pytest.mark.parametrize("dates", [True, False], ids=["dates", "numbers"])
@FEW
@given(seed=SEEDS)
def test_cutting_before_resampling_keeps_the_rows_up_to_the_cut(method, dates, seed):
    check_resampling(method, dates, seed)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["mean", "last", "linear", "nearest"])
@pytest.mark.parametrize("dates", [True, False], ids=["dates", "numbers"])
@MANY
@given(seed=SEEDS)
def test_cutting_before_resampling_keeps_the_rows_in_many_cases(method, dates, seed):
    check_resampling(method, dates, seed)


@FEW
@given(cut=st.integers(1, 60), delay=st.sampled_from([None, 30.0, 600.0]))
@example(cut=60, delay=None)
def test_rows_of_the_other_table_that_are_not_known_yet_change_nothing(cut, delay):
    times = 60_000_000 * np.arange(60)
    other_times = 240_000_000 * np.arange(-1, 16)
    values = np.random.default_rng(0).standard_normal(17)
    chosen = {"period": "4min", "label": "start", "delay": delay}
    whole = joins.join_as_of(times, other_times, {"x": values}, **chosen)["x"]
    known = other_times + 240_000_000 + int((delay or 0) * 1e6) <= times[cut - 1]
    changed = np.where(known, values, values + 1)
    if np.isnan(whole[:cut]).all():
        return  # refused: nothing is known yet
    part = joins.join_as_of(times[:cut], other_times, {"x": changed}, **chosen)["x"]
    np.testing.assert_array_equal(part, whole[:cut])
    part = joins.join_as_of(times[:cut], other_times[known], {"x": values[known]}, **chosen)["x"]
    np.testing.assert_array_equal(part, whole[:cut])
