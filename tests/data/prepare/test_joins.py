"""The as-of join compared with a loop, and with the join that leaks."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.base.errors import UserError
from slipstream.data.prepare.joins import join_as_of, match_rows

MINUTE = 60_000_000
HOUR = 60 * MINUTE


def loop(times, other_times, values, wait, limit):
    result = []
    for time in times:
        known = [
            value
            for other, value in zip(other_times, values, strict=True)
            if other + wait <= time and (limit is None or time - (other + wait) < limit)
        ]
        result.append(known[-1] if known else np.nan)
    return result


@settings(max_examples=60)
@given(
    seed=st.integers(0, 10_000),
    period=st.integers(1, 9),
    label=st.sampled_from(["start", "end"]),
    delay=st.sampled_from([None, 1, 5]),
    limit=st.sampled_from([None, 3, 50]),
)
def test_the_join_agrees_with_a_loop(seed, period, label, delay, limit):
    draw = np.random.default_rng(seed)
    times = np.cumsum(draw.integers(1, 5, 40))
    other_times = np.cumsum(draw.integers(1, 9, 15)) - 20
    values = draw.standard_normal(15)
    wait = (period if label == "start" else 0) + (delay or 0)
    wanted = loop(times, other_times, values, wait, limit)
    for unit in (1_000_000, 1.0):
        chosen = {"period": float(period), "label": label}
        chosen |= {"delay": delay and float(delay), "limit": limit and float(limit)}
        result = join_as_of(times * unit, other_times * unit, {"x": values}, **chosen)
        np.testing.assert_array_equal(result["x"], wanted)


def make_bars(minutes, days=5):
    """Bars of a random walk, stamped with their start; and the walk, minute by minute."""
    prices = 100 + np.cumsum(np.random.default_rng(3).standard_normal(days * 24 * 60))
    starts = np.arange(0, len(prices), minutes)
    closes = prices[starts + minutes - 1]  # known when the bar is over
    return starts * MINUTE, closes, prices


@pytest.mark.parametrize("hours", [1, 4])
@pytest.mark.parametrize("label", ["start", "end"])
def test_quarter_hour_bars_see_the_last_long_bar_that_is_over(hours, label):
    times, _, _ = make_bars(15)
    starts, closes, prices = make_bars(60 * hours)
    stamps = starts if label == "start" else starts + hours * HOUR
    result = join_as_of(times, stamps, {"close": closes}, period=f"{hours}h", label=label)["close"]
    first = 4 * hours
    assert np.isnan(result[:first]).all()
    for row in range(first, len(times)):
        over = times[row] // (hours * HOUR) * hours * 60  # minutes that are over, in whole bars
        assert result[row] == prices[over - 1]


def test_a_naive_join_shows_the_close_of_a_four_hour_bar_up_to_four_hours_early():
    times, closes, _ = make_bars(15, days=250)
    starts, long_closes, _ = make_bars(240, days=250)

    def join_naively(values):
        return values[np.searchsorted(starts, times, side="right") - 1]  # time <=

    def join(values):
        return join_as_of(times, starts, {"c": values}, period="4h", label="start")["c"]

    move = closes[32:] - closes[16:-16]  # over the next four hours, from the 17th bar on
    leak, honest = (
        np.corrcoef((joined(long_closes) - closes)[16:-16], move)[0, 1]
        for joined in (join_naively, join)
    )
    assert leak > 0.4  # as if a random walk could be predicted
    assert abs(honest) < 0.1
    # the second long bar is over when the 33rd short one begins
    changed = long_closes + (np.arange(len(long_closes)) > 0)
    assert (join_naively(changed)[16:32] != join_naively(long_closes)[16:32]).all()
    np.testing.assert_array_equal(join(changed)[:32], join(long_closes)[:32])
    assert join(changed)[32] != join(long_closes)[32]


def test_a_delay_makes_rows_known_later():
    times, other = np.arange(0, 120, 15) * MINUTE, np.array([0, 60]) * MINUTE
    chosen = {"period": "1h", "label": "start"}
    rows = match_rows(times, other, delay="30min", **chosen)
    assert rows.tolist() == [-1] * 6 + [0] * 2


def test_missing_values_of_the_other_table_stay_missing():
    result = join_as_of(np.arange(3.0), np.arange(3.0), {"x": np.array([1.0, np.nan, 3.0])})
    np.testing.assert_array_equal(result["x"], [1.0, np.nan, 3.0])


def test_times_that_miss_each_other_by_rounding_match():
    rows = match_rows(np.array([0.3]), np.array([0.1]), period=0.2, label="start")  # 0.1 + 0.2
    assert rows.tolist() == [0]


@pytest.mark.parametrize(
    ("times", "other", "chosen", "message"),
    [
        ([0, 1], [5, 6], {}, "matches nothing"),
        ([0, 1], [], {}, "matches nothing"),
        ([0, 1], [0, 0, 1, 1], {}, "2 rows of the other table repeat the time .* first row 2"),
        ([0, 1], [1, 0], {}, "not in time order"),
        ([0, 1], [0], {"label": "start"}, "needs the period"),
        ([9, 10], [0], {"limit": 5.0}, "matches nothing"),
    ],
)
def test_what_cannot_be_joined_is_refused(times, other, chosen, message):
    times, other = (np.array(one, dtype=np.int64) * 1_000_000 for one in (times, other))
    with pytest.raises(UserError, match=message):
        join_as_of(times, other, {"x": np.zeros(len(other))}, **chosen)


def test_dates_and_plain_numbers_do_not_join():
    with pytest.raises(UserError, match="dates and the other plain numbers"):
        match_rows(np.arange(3), np.arange(3.0))


def test_no_rows_join_to_none():
    assert join_as_of(np.arange(0), np.arange(3), {"x": np.ones(3)})["x"].shape == (0,)
