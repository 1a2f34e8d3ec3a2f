"""The place of this process among those that train one model together.

`torchrun` tells its processes by environment variables; Slipstream tells those that it starts
itself by their task.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from slipstream.base.errors import UserError

NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
RUN_ID, RESTARTS = "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"
NO_ID = "none"
"""The run id of torchrun that means that the user has named none"""


@dataclass(frozen=True)
class RankPlace:
    """One of several processes that train a model: the first one writes, logs and scores."""

    rank: int
    size: int
    local_rank: int
    """The number of its GPU"""
    store: str | None = None
    """The file through which processes of this machine find each other; None to use torchrun's
    address"""
    run_id: str = ""
    """torchrun's id of the run: a run that torchrun restarts is continued"""
    restarts: int = 0
    why: str = ""
    """Why the processes were started again"""
    announce: Callable[[Path], None] = field(default=lambda _: None)
    """A function that is called with the run's folder once it exists"""

    @property
    def is_leader(self) -> bool:
        return self.rank == 0


def is_follower(place: RankPlace | None) -> bool:
    """Whether another process writes, logs and scores."""
    return place is not None and not place.is_leader


def find_place() -> RankPlace | None:
    """Return the place that torchrun has given this process; None if it is alone."""
    if not all(os.environ.get(name) for name in NEEDED):
        return None
    try:
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        local_rank = int(os.environ.get("LOCAL_RANK") or rank)
        restarts = int(os.environ.get(RESTARTS) or 0)
    except ValueError:
        raise UserError(
            "RANK, WORLD_SIZE, LOCAL_RANK or TORCHELASTIC_RESTART_COUNT in the environment is not "
            "a number; start with torchrun, or unset them"
        ) from None
    if size == 1:
        return None
    run_id = os.environ.get(RUN_ID) or NO_ID
    if run_id == NO_ID:  # the process that starts and restarts this one
        run_id = f"{NO_ID}-{os.getppid()}"
    why = "torchrun has started the processes again" if restarts else ""
    return RankPlace(rank, size, local_rank, run_id=run_id, restarts=restarts, why=why)
