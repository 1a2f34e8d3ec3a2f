"""Which lanes belong to which share, and the folder of each share in that of its run."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from slipstream import runs
from slipstream.base.errors import UserError
from slipstream.engine import checkpoint
from slipstream.engine.checkpoint import Checkpoint
from slipstream.runs import Run
from slipstream.runs.folder import FOLDER, SHARES
from slipstream.workers.ray import release_locks

MOST_WAIT_S = 60.0
"""For workers whose command was killed"""


@dataclass(frozen=True)
class Division:
    """The shares of a run; it is written once their folders are complete."""

    workers: int
    """As requested; there are fewer shares where fewer lanes are left"""
    shares: list[list[int]]
    """The lanes of each, by their numbers in the run"""
    num_lanes: int
    """Of the run; those in no share had ended before"""
    log_bytes: int
    """The size of the run's log when the lanes were divided"""
    on: Literal["ray"] | None = None
    """The cluster of the workers; without it, they are on this machine"""
    fingerprint: str = ""
    """Of the run's data"""
    batch: dict[str, Any] | None = None
    """How the batch size of all was chosen, where it was measured: the reason and the evidence"""

    def complete_plan(self, plan: dict[str, Any]) -> dict[str, Any]:
        """Return the plan of a share, as JSON has it, with what was measured for all."""
        if self.batch is None or "batch" in plan["reasons"]:
            return plan
        reasons = plan["reasons"] | {"batch": self.batch["reason"]}
        evidence = [*self.batch["evidence"], *plan["evidence"]]
        return plan | {"reasons": reasons, "evidence": evidence}


def divide_lanes(costs: Mapping[int, int], num_shares: int) -> list[list[int]]:
    """Divide lanes, given by their number and cost, into shares of about equal cost."""
    shares: list[list[int]] = [[] for _ in range(min(num_shares, len(costs)))]
    spent = [0] * len(shares)
    for lane in sorted(costs, key=lambda one: (-costs[one], one)):
        index = min(range(len(shares)), key=lambda i: (spent[i], len(shares[i]), i))
        shares[index].append(lane)
        spent[index] += costs[lane]
    return [sorted(share) for share in shares]


def get_share(run: Run, index: int) -> Run:
    """Return the folder of a share."""
    return replace(run, folder=run.folder / FOLDER / str(index), watch=None, origin={})


def write_division(run: Run, division: Division) -> None:
    runs.write_json(run.folder / FOLDER / SHARES, asdict(division))


def read_division(run: Run) -> Division | None:
    """Return the shares of a run that is not finished; None where it has none."""
    path = run.folder / FOLDER / SHARES
    return Division(**runs.read_json(path)) if path.exists() else None


def find_workers(run: Run) -> tuple[int, Literal["ray"] | None]:
    """Return how many workers a run has begun with, and the cluster that they were on."""
    division = read_division(run)
    if division is not None:
        return division.workers, division.on
    starts = [e for e in runs.read_events(run) if e["event"] == "start" and e.get("pack")]
    pack = starts[-1]["pack"] if starts else {}
    return pack.get("workers", 1), pack.get("on")


def wait_for_shares(run: Run, division: Division) -> None:
    """Wait until the workers of a command that was killed have saved their state."""
    if division.on is not None:  # Ray has ended its tasks, and those of other machines left locks
        release_locks(run.folder / FOLDER)
    until = time.monotonic() + MOST_WAIT_S
    for index in range(len(division.shares)):
        folder = get_share(run, index).folder
        while holder := runs.find_holder(folder):
            where = f"process {holder['pid']} on {holder['host']}"
            if time.monotonic() > until:
                raise UserError(
                    f"{run.folder}: {where} still trains a part of this run; wait until it has "
                    "ended, or stop it"
                )
            run.warn(f"waiting for {where}, which trains a part of this run")
            time.sleep(0.1)


def sum_parts(run: Run, division: Division | None) -> float:
    """Return the seconds that a run has taken so far; those of the longest share where commands of
    their own have trained them, and the run has logged nothing yet."""
    shares = range(len(division.shares)) if division else ()
    longest_s = max((runs.sum_parts(get_share(run, index)) for index in shares), default=0.0)
    return runs.sum_parts(run) or longest_s


def read_newest(run: Run) -> tuple[Checkpoint | None, list[str]]:
    """Return the newest checkpoint of a run or a share, None if it has written none yet, and what
    is wrong with later ones."""
    if not checkpoint.list_steps(run):
        return None, []
    return checkpoint.read_newest(run)


def read_shares(run: Run, division: Division) -> dict[int, Checkpoint]:
    """Return the newest checkpoint of every share that has one. A share whose checkpoints are all
    damaged has none: it is trained again."""
    newest = {}
    for index in range(len(division.shares)):
        try:
            saved, _ = read_newest(get_share(run, index))
        except UserError as error:
            run.warn(f"{error}; these models are trained again")
            continue
        if saved is not None:
            newest[index] = saved
    return newest


def forget_shares(run: Run) -> None:
    """Remove what the shares have written, once the run has it."""
    runs.remove(run.folder / FOLDER / SHARES)
    runs.remove(run.folder / FOLDER)
