"""Which lanes each worker gets."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from slipstream.training.division import divide_lanes


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=40), st.integers(1, 12))
def test_every_lane_is_in_one_share_and_no_share_is_much_larger(costs, num_shares):
    shares = divide_lanes(dict(enumerate(costs)), num_shares)
    assert len(shares) == min(num_shares, len(costs))
    assert sorted(lane for share in shares for lane in share) == list(range(len(costs)))
    sums = [sum(costs[lane] for lane in share) for share in shares]
    assert max(sums) - min(sums) <= max(costs)
    assert all(share == sorted(share) for share in shares)


def test_only_lanes_that_have_not_ended_are_divided():
    assert divide_lanes({3: 10, 5: 10, 6: 10, 7: 10}, 2) == [[3, 6], [5, 7]]
    assert divide_lanes({}, 2) == []
