"""Rows that are resampled one after the other are those of the whole series."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream import UserError
from slipstream.config import Data
from slipstream.data.prepare.resampling import BarColumns, resample
from slipstream.data.prepare.rows import RowResampler, RowTime

SECOND = 1_000_000
BARS = {"method": "ohlc", "open": "a", "high": "b", "low": "c", "close": "d", "volume": "e"}
STEPS = {
    "mean": {},
    "last": {"method": "last"},
    "bars": BARS,
    "ticks": {"method": "ohlc", "price": "a", "volume": ["e"]},
    "starts": {**BARS, "label": "start"},
    "held": {"method": "mean", "limit": 7.5},
}


def make_resampler(step, columns):
    data = Data(time="time", horizon=1, prepare=[{"step": "resample", "every": 1.5, **step}])
    return RowResampler(data, columns, {})


def push(resampler, times, columns):
    """All new rows, and the time of the row that completed each."""
    state, made, completed = resampler.start(), [], []
    for row, time in enumerate(times.tolist()):
        values = np.array([columns[name][row] for name in resampler.sources])
        moment = RowTime(time, times.dtype == np.int64)
        state, rows = resampler.add(state, values, moment)
        made += rows
        completed += [time] * len(rows)
    return made, completed


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("is_date", [True, False], ids=["dates", "numbers"])
@given(
    steps=st.lists(
        st.sampled_from([0.1, 0.1, 0.1, 0.25, 0.5, 1.0, 1.5, 3.0, 4.0, 4.5, 5.9, 6.0, 30.0]),
        min_size=1,
        max_size=60,
    ),
    begin=st.sampled_from([0.0, 0.1, 1.5, 100.7, -20.0]),
    missing=st.lists(st.integers(0, 300), max_size=60),
)
def test_rows_one_by_one_are_those_of_the_series(name, is_date, steps, begin, missing):
    seconds = begin + np.concatenate([[0.0], np.cumsum(steps)])
    times = np.round(seconds * SECOND).astype(np.int64) if is_date else seconds
    draw = np.random.default_rng(len(steps))
    columns = {name: draw.standard_normal(len(times)).round(2) for name in "abcdef"}
    for place in missing:
        columns["abcdef"[place % 6]][(place // 6) % len(times)] = np.nan
    step = {"limit": 4.5, **STEPS[name]}
    wanted = list("abcdef") + (["open", "high", "low", "close"] if name == "ticks" else [])
    resampler = make_resampler(step, wanted)
    bars = BarColumns.from_step(resampler.step.config)
    whole = resample(
        times,
        dict(columns),
        every=1.5,
        method=resampler.step.config.method,
        limit=step["limit"],
        bars=bars,
    )
    made, _ = push(resampler, times, columns)
    assert [row.time.value for row in made] == pytest.approx(whole.times.tolist(), abs=1e-9)
    for i, column in enumerate(wanted):
        got = [row.values[i] for row in made]
        np.testing.assert_allclose(got, whole.columns[column], atol=1e-12, err_msg=column)


def test_a_row_is_made_as_soon_as_it_is_complete():
    resampler = make_resampler({}, ["a"])
    times = np.array([0.0, 0.5, 1.5, 1.6, 2.9, 3.4, 8.0])
    made, completed = push(resampler, times, {"a": np.arange(7.0)})
    assert [row.time.value for row in made] == [0.0, 1.5, 3.0, 4.5, 6.0, 7.5]
    assert completed == [0.0, 1.5, 3.4, 8.0, 8.0, 8.0]  # with the row at its end, or a later one
    assert [row.values[0] for row in made] == [0.0, 1.5, 3.5, 5.0, 5.0, 5.0]


def test_bars_are_those_of_pandas():
    draw = np.random.default_rng(0)
    times = pd.date_range("2026-01-05 00:01", periods=600, freq="1min")
    price = 100 + np.cumsum(draw.standard_normal(600))
    ticks = pd.DataFrame({"price": price, "size": draw.integers(1, 9, 600).astype(float)}, times)
    step = {"every": "15min", "method": "ohlc"}
    config = Data(
        time="t",
        horizon=1,
        prepare=[{"step": "resample", **step, "price": "price", "volume": "size"}],
    ).prepare[0]
    got = resample(
        times.to_numpy().astype("datetime64[us]").astype(np.int64),
        {name: ticks[name].to_numpy() for name in ticks},
        **step,
        bars=BarColumns.from_step(config),
    ).columns
    grouped = ticks.resample("15min", closed="right", label="right")
    wanted = grouped["price"].ohlc()
    for name in ("open", "high", "low", "close"):
        np.testing.assert_array_equal(got[name], wanted[name])
    np.testing.assert_array_equal(got["size"], grouped["size"].sum())
    # stamped with the start, of the rows and of the bars
    started = config.model_copy(update={"label": "start"})
    got = resample(
        times.to_numpy().astype("datetime64[us]").astype(np.int64),
        {name: ticks[name].to_numpy() for name in ticks},
        **step,
        bars=BarColumns.from_step(started),
    )
    left = ticks.resample("15min")["price"].ohlc()[:-1]  # the last bar is not complete
    np.testing.assert_array_equal(
        got.times, left.index.to_numpy().astype("datetime64[us]").astype(np.int64)
    )
    for name in ("open", "high", "low", "close"):
        np.testing.assert_array_equal(got.columns[name], left[name])
    # bars of bars are the bars of the ticks
    fine = ticks.resample("5min", closed="right", label="right")
    bars = fine["price"].ohlc().assign(volume=fine["size"].sum())
    again = resample(
        bars.index.to_numpy().astype("datetime64[us]").astype(np.int64),
        {name: bars[name].to_numpy() for name in bars},
        **step,
        bars=BarColumns.from_step(config.model_copy(update={"price": None, "volume": "volume"})),
    ).columns
    for name in ("open", "high", "low", "close"):
        np.testing.assert_array_equal(again[name], wanted[name])
    np.testing.assert_array_equal(again["volume"], grouped["size"].sum())


@pytest.mark.parametrize(
    ("step", "message"),
    [
        ({"method": "mean", "price": "p"}, 'price applies only with method = "ohlc"'),
        ({"method": "ohlc", "price": "open"}, "named twice"),
        ({"method": "last", "label": "start"}, "label = .start. applies only"),
    ],
)
def test_columns_of_bars_are_checked(step, message):
    with pytest.raises(ValueError, match=message):
        Data(time="t", horizon=1, prepare=[{"step": "resample", "every": 1, **step}])


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ([{"step": "resample", "every": 1, "method": "linear", "lookahead": True}], "rows ahead"),
        (
            [
                {"step": "filter", "kind": "butterworth", "cutoff_hz": 0.1, "columns": ["a"]},
                {"step": "resample", "every": 1},
            ],
            r"put data.prepare, step 2 \(resample\) first",
        ),
    ],
)
def test_what_cannot_be_resampled_row_by_row_is_refused(steps, message):
    from slipstream.data.prepare.rows import RowSteps

    data = Data(time="time", horizon=1, prepare=steps)

    def make() -> None:
        RowSteps(data, ["a"], {}, 1.0)
        RowResampler(data, ["a"], {})

    with pytest.raises(UserError, match=message):
        make()
