from __future__ import annotations

import numpy as np

from slipstream.reporting import charts


def test_thinning_keeps_the_extremes():
    y = np.zeros(100_000)
    y[[70, 99_000]] = 5, -7
    rows = charts.thin([y, -y], 1500)
    assert len(rows) <= 1500
    assert (y[rows].max(), y[rows].min()) == (5, -7)
    assert (np.diff(rows) > 0).all()
    assert (rows[0], rows[-1]) == (0, len(y) - 1)
    assert len(charts.thin([y[:1000]], 1500)) == 1000


def test_thinning_finds_extremes_beside_values_that_are_not_known():
    y = np.zeros(10_000)
    y[::7] = np.nan
    y[5_001] = 3.0
    y[7_001] = -3.0
    rows = charts.thin([y], 200)
    assert {5_001, 7_001} <= set(rows.tolist())
