"""Checkpoints of shares: made from that of a run, and made into one again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch

from slipstream.base.errors import UserError
from slipstream.engine import pack as lane_rows
from slipstream.engine import state as states
from slipstream.engine.checkpoint import Checkpoint
from slipstream.engine.lanes import Lane, LaneResult, Progress
from slipstream.engine.pack import compute_capacity, describe_capacity, parse_capacity
from slipstream.engine.step import Rows
from slipstream.training.shares.division import Division

OWN = ("config", "format")
"""Metadata that is written with every checkpoint"""
BEST = "best."
"""The rows with the best weights of a model that trains alone"""
MIXED = "mixed"
"""Marks a checkpoint from shares of which only some train several models at a time: it says where
they stand, but no program goes on from it"""
Entries = dict[int, dict[str, Any]]


def select_lanes(saved: Checkpoint, numbers: Sequence[int], lanes: Sequence[Lane]) -> Checkpoint:
    """Return the checkpoint of a share: some lanes of a run's; `lanes` are all of the run."""
    rows, wanted = states.split_rows(saved), {number: at for at, number in enumerate(numbers)}
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
    every = list(range(division.num_lanes))
    parts = [(every, base)] if base else []
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
    if len({"capacity" in one for one in newest}) > 1:
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
    threads = sum(one["plan"]["threads"] for one in parts)
    limit = sum(one["limit"] for one in parts) if "capacity" in parts[0] else 1
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
    return Checkpoint(step, {name: one for name, one in tensors.items() if one}, metadata)


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
    layout = lane_rows.build_lane_layout(model, signature) if in_packs else []
    for one in results:
        row = rows.get(one.number, {})
        if not (one.has_best and row):
            continue
        if "best" in row:
            one.weights = lane_rows.read_weights(row["best"], layout, one.lane, model, signature)
        else:
            names = [name for name in row if name.startswith(BEST)]
            one.weights = {name.removeprefix(BEST): row[name] for name in names}
    return results
