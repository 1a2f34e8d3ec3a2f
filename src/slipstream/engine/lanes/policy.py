"""Decisions about lanes that a search makes while they train."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from slipstream.engine.lanes.lane import Lane
from slipstream.engine.progress import LaneResult

NextLane = Callable[[LaneResult], Lane | None]
"""Returns the lane that takes the place of one that has ended, if any"""
StopVerdict = Callable[[Sequence[tuple[LaneResult, float]]], Sequence[str]]
"""From lanes and their new validation losses to the reason why each has to end, "" for none"""


class LanePolicy(NamedTuple):
    """Decisions about lanes that a search makes."""

    next_lane: NextLane | None = None
    judge: StopVerdict | None = None
    stop_now: Callable[[LaneResult], str] | None = None
    """Why a lane in the middle of an epoch has to end, once others have been judged"""
    drop_ended: bool = False
    """Drop a lane once `next_lane` has seen its result"""
    cut: Callable[[], str] = lambda: ""
    """Why all lanes have to end now, in the middle of an epoch too; "" while they may go on"""
    keeps_rows: Callable[[LaneResult], bool] = lambda _: False
    """Whether the result of a lane that has ended is to contain its rows"""


NO_POLICY = LanePolicy()
