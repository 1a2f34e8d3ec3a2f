"""The embedded bars: the same everywhere, and a regime that takes a window to tell."""

from __future__ import annotations

import numpy as np
import pytest

from slipstream.data.simulated import bars

CONTEXT = 64


@pytest.fixture(scope="module")
def table():
    return bars.simulate()


@pytest.mark.slow
def test_one_seed_gives_one_data_set(table):
    again = bars.simulate()
    assert table.equals(again)
    assert not table.equals(bars.simulate(1))
    assert table.num_rows == bars.NUM_INSTRUMENTS * bars.NUM_BARS


def test_bars_are_bars(table):
    open_, high, low, close = (table.column(name).to_numpy() for name in bars_columns())
    assert (high >= np.maximum(open_, close) - 1e-9).all()
    assert (low <= np.minimum(open_, close) + 1e-9).all()


def bars_columns():
    return ("open", "high", "low", "close")


def test_every_regime_has_its_share_and_lasts(table):
    names, counts = np.unique(
        table.column("regime").to_numpy(zero_copy_only=False), return_counts=True
    )
    assert sorted(names) == sorted(bars.REGIMES)
    assert (counts / table.num_rows > 0.15).all()
    regime = table.column("regime").to_numpy(zero_copy_only=False).reshape(-1, bars.NUM_BARS)
    changes = (regime[:, 1:] != regime[:, :-1]).mean()
    assert 1 / 250 < changes < 1 / 100


def accuracy(features, labels):
    """Of linear discriminants, fitted on the first half of the rows and scored on the second."""
    half = len(features) // 2
    features = (features - features[:half].mean(axis=0)) / features[:half].std(axis=0)
    design = np.column_stack([features, np.ones(len(features))])
    wanted = labels[:, None] == np.arange(len(bars.REGIMES))
    weights, *_ = np.linalg.lstsq(design[:half], wanted[:half].astype(float), rcond=None)
    found = (design[half:] @ weights).argmax(axis=1)
    return np.mean([(found == k)[labels[half:] == k].mean() for k in range(len(bars.REGIMES))])


def test_one_bar_says_little_and_a_window_much(table):
    columns = {
        name: table.column(name).to_numpy().reshape(-1, bars.NUM_BARS)
        for name in (*bars_columns(), "volume")
    }
    regime = table.column("regime").to_numpy(zero_copy_only=False).reshape(-1, bars.NUM_BARS)
    codes = np.array([bars.REGIMES.index(name) for name in regime.ravel()]).reshape(regime.shape)
    ends = np.arange(CONTEXT, bars.NUM_BARS, CONTEXT)
    steady = np.array(
        [[len(set(codes[i, e - CONTEXT : e])) == 1 for e in ends] for i in range(len(codes))]
    )
    single, window, labels = [], [], []
    for i, k in zip(*np.nonzero(steady), strict=True):
        rows = {name: values[i, ends[k] - CONTEXT : ends[k]] for name, values in columns.items()}
        close = rows["close"] / rows["close"].std()
        last = [values[-1] for values in rows.values()]
        single.append([*last, *np.abs(last)])
        window.append(
            [
                np.corrcoef(close[1:], close[:-1])[0, 1],
                np.corrcoef(np.abs(close[1:]), np.abs(close[:-1]))[0, 1],
                np.mean(close**4) ** 0.25,
                np.corrcoef(np.abs(close), rows["volume"])[0, 1],
                np.std(np.log(rows["high"] - rows["low"])),
            ]
        )
        labels.append(codes[i, ends[k] - 1])
    order = np.random.default_rng(0).permutation(len(labels))
    single, window, labels = (np.array(x)[order] for x in (single, window, labels))
    assert accuracy(single, labels) < 0.45
    assert accuracy(window, labels) > 0.75
