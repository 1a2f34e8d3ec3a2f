"""The lanes of a run, divided into shares: the folder of each share, and its checkpoint.

A share begins with its lanes of the run's checkpoint. `merge_shares` makes one checkpoint of all
again, from which the run can be divided anew or go on in one process.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

import torch

from slipstream import runs
from slipstream.base.errors import UserError
from slipstream.engine import checkpoint
from slipstream.engine import pack as packs
from slipstream.engine import state as states
from slipstream.engine.checkpoint import Checkpoint
from slipstream.engine.lanes import Lane, LaneResult, Progress
from slipstream.engine.pack import compute_capacity, describe_capacity, parse_capacity
from slipstream.engine.step import Rows
from slipstream.events import Start
from slipstream.runs import Run
from slipstream.runs.folder import FOLDER, SHARES
from slipstream.workers.ray import release_locks

MAX_WAIT_S = 60.0
"""For workers whose command was killed"""
OWN = ("config", "format")
"""Metadata that is written with every checkpoint"""
BEST = "best."
"""The rows with the best weights of a model that trains alone"""
MIXED = "mixed"
"""Marks a checkpoint from shares of which only some train several models at a time: it says where
they stand, but no program goes on from it"""
Entries = dict[int, dict[str, Any]]


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
    settings: dict[str, dict[str, Any]] = field(default_factory=dict)
    """The value and the reason of each setting that the data have decided"""

    def complete_plan(self, plan: dict[str, Any]) -> dict[str, Any]:
        """Return the plan of a share, as JSON has it, with what was decided for all."""
        plan = plan | {"settings": self.settings}
        if self.batch is None or "batch" in plan["reasons"]:
            return plan
        reasons = plan["reasons"] | {"batch": self.batch["reason"]}
        evidence = [*self.batch["evidence"], *plan["evidence"]]
        return plan | {"reasons": reasons, "evidence": evidence}


def divide_lanes(costs: Mapping[int, int], num_shares: int) -> list[list[int]]:
    """Divide lanes, given by their number and cost, into shares of about equal cost."""
    shares: list[list[int]] = [[] for _ in range(min(num_shares, len(costs)))]
    spent = [0] * len(shares)
    for lane in sorted(costs, key=lambda number: (-costs[number], number)):
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
    starts = [event for event in runs.read_events(run) if isinstance(event, Start)]
    pack = next((start.pack for start in reversed(starts) if start.pack), {})
    return pack.get("workers", 1), pack.get("on")


def wait_for_shares(run: Run, division: Division) -> None:
    """Wait until the workers of a command that was killed have saved their state."""
    if division.on is not None:  # Ray has ended its tasks, and those of other machines left locks
        release_locks(run.folder / FOLDER)
    until = time.monotonic() + MAX_WAIT_S
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


def select_lanes(saved: Checkpoint, numbers: Sequence[int], lanes: Sequence[Lane]) -> Checkpoint:
    """Return the checkpoint of a share: some lanes of a run's; `lanes` are all of the run."""
    rows, wanted = states.split_rows(saved), {number: index for index, number in enumerate(numbers)}
    entries = {
        wanted[entry["number"]]: entry | {"number": wanted[entry["number"]]}
        for entry in saved.metadata["lanes"]
        if entry["number"] in wanted
    }
    own_rows = {wanted[number]: rows[number] for number in rows if number in wanted}
    limit = min(saved.metadata["limit"], len(numbers))
    facts = saved.metadata | {"limit": limit, "log_bytes": 0}
    result = _assemble(saved.step, facts, entries, own_rows)
    return fit_capacity(result, [lanes[number] for number in numbers])


def merge_shares(
    division: Division, base: Checkpoint | None, shares: Mapping[int, Checkpoint]
) -> Checkpoint | None:
    """Return one checkpoint of all lanes: of the run's own, if it had one, and those of its shares;
    None where there is none. `fit_capacity` makes it one to go on from."""
    parts = [(list(range(division.num_lanes)), base)] if base else []
    parts += [(division.shares[index], saved) for index, saved in shares.items()]
    if not parts:
        return None
    entries, rows = Entries(), dict[int, Rows]()
    for numbers, saved in parts:
        for number, row in states.split_rows(saved).items():
            rows[numbers[number]] = row
        for entry in saved.metadata["lanes"]:
            number = numbers[entry["number"]]
            entries[number] = entry | {"number": number}
            if number not in rows:
                rows[number] = {}
    newest = [saved.metadata for saved in shares.values()] or [parts[0][1].metadata]
    facts = newest[0] | _join(division, newest)
    if len({"capacity" in metadata for metadata in newest}) > 1:
        facts[MIXED] = True
    return _assemble(
        max(saved.step for _, saved in parts),
        facts,
        _add_waiting(entries, division.num_lanes, parts[-1][1]),
        rows,
    )


def _join(division: Division, parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return what of the metadata is that of all shares together."""
    plan, pack = division.complete_plan(parts[0]["plan"]), parts[0].get("pack", {})
    threads = sum(part["plan"]["threads"] for part in parts)
    limit = sum(part["limit"] for part in parts) if "capacity" in parts[0] else 1
    return {
        "plan": plan | ({"threads": threads} if plan["device"] == "cpu" else {}),
        "pack": pack | {"lanes": division.num_lanes},
        "limit": min(division.num_lanes, limit),
        "seconds": [max(seconds) for seconds in zip(*(p["seconds"] for p in parts), strict=True)],
        "log_bytes": division.log_bytes,
    }


def _add_waiting(entries: Entries, num_lanes: int, like: Checkpoint) -> Entries:
    """Add lanes of which no checkpoint exists yet."""
    config = like.metadata["lanes"][0]["config"]
    new = {"config": config, "progress": asdict(Progress()), "stopped": ""}
    return {n: entries.get(n, new | {"number": n}) for n in range(num_lanes)}


def _assemble(
    step: int, facts: Mapping[str, Any], entries: Entries, rows: Mapping[int, Rows]
) -> Checkpoint:
    """Return a checkpoint in which no lane has a place: it has ended, or waits."""
    ordered = [entries[number] for number in sorted(entries)]
    waiting = [e for e in ordered if not e["stopped"]]
    waiting.sort(key=lambda e: not e["progress"]["step"])  # those that have begun come first
    metadata = {key: value for key, value in facts.items() if key not in OWN} | {
        "places": [],
        "lanes": ordered,
        "waiting": [entry["number"] for entry in waiting],
        "entered": len(ordered),
        "timed_from": None,
    }
    tensors: dict[str, Rows] = {states.ENDED: {}, states.WAITING: {}}
    for entry in ordered:
        file = states.ENDED if entry["stopped"] else states.WAITING
        for name, row in rows.get(entry["number"], {}).items():
            tensors[file][f"{entry['number']}/{name}"] = row.contiguous()
    return Checkpoint(step, {name: rows for name, rows in tensors.items() if rows}, metadata)


def fit_capacity(saved: Checkpoint, lanes: Sequence[Lane]) -> Checkpoint:
    """Return a checkpoint with the capacity of a pack of these lanes, and rows of that length."""
    if "capacity" not in saved.metadata:
        return saved
    capacity = compute_capacity(lanes, places=saved.metadata["limit"])
    saved.metadata.update(describe_capacity(capacity))
    for rows in saved.tensors.values():
        for key, row in rows.items():
            if key.endswith(f"/{states.LOSSES}"):
                rows[key] = torch.zeros(capacity.steps, dtype=row.dtype)
                rows[key][: len(row)] = row[: capacity.steps]
    return saved


def refuse_mixed(saved: Checkpoint) -> Checkpoint:
    """Return a checkpoint that a program can go on from; raise a UserError for any other."""
    if saved.metadata.get(MIXED):
        raise UserError(
            "some workers train several models at a time, others one after another, so that their "
            "states cannot be joined; resume with the number of workers that the run began with"
        )
    return saved


def read_lanes(saved: Checkpoint, lanes: Sequence[Lane], signature: Any) -> list[LaneResult]:
    """Return where every lane of a checkpoint stands, with its best weights so far."""
    results = [states.parse_lane(entry, lanes) for entry in saved.metadata["lanes"]]
    rows = states.split_rows(saved)
    model = lanes[0].config.model
    if "capacity" in saved.metadata:
        model = parse_capacity(saved.metadata).model
    in_packs = any("best" in row for row in rows.values())
    layout = packs.build_lane_layout(model, signature) if in_packs else []
    for result in results:
        row = rows.get(result.number, {})
        if not (result.has_best and row):
            continue
        if "best" in row:
            result.weights = packs.read_weights(row["best"], layout, result.lane, model, signature)
        else:
            names = [name for name in row if name.startswith(BEST)]
            result.weights = {name.removeprefix(BEST): row[name] for name in names}
    return results
