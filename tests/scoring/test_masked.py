from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from slipstream.scoring import masked
from tests.conftest import close


@given(mask=st.lists(st.booleans(), min_size=2, max_size=12).filter(lambda m: not all(m)))
def test_masked_rows_are_filled_in_from_the_nearest_visible_ones(mask):
    rows = len(mask)
    values = torch.linspace(-1, 2, rows).square()[:, None, None]
    visible = masked.find_visible_rows(torch.tensor(mask)[:, None])
    last = masked.fill_with_last_visible(values, visible)
    straight = masked.fill_by_interpolation(values, visible)
    shown = [row for row in range(rows) if not mask[row]]
    wanted = np.interp(range(rows), shown, values[shown, 0, 0].numpy())
    close(straight[:, 0, 0], wanted, rel=1e-5)
    for row in range(rows):
        assert int(visible.distance[row, 0]) == min(abs(row - one) for one in shown)
        before = [one for one in shown if one <= row]
        assert last[row, 0, 0] == values[before[-1] if before else shown[0], 0, 0]
