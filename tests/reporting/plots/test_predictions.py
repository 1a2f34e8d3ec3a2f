from __future__ import annotations

import numpy as np

from slipstream.reporting.plots import predictions as draw


def test_thinning_keeps_the_extremes():
    y = np.zeros(100_000)
    y[[70, 99_000]] = 5, -7
    x, thin = draw._thin(np.arange(100_000), y)
    assert len(thin) <= draw.MAX_POINTS
    assert (thin.max(), thin.min()) == (5, -7)
    assert (np.diff(x) > 0).all()
