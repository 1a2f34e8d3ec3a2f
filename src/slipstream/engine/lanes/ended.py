"""Lanes that have ended: as a checkpoint, as if a run of their own had trained them, and as results
without a program."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from slipstream.config import Signature
from slipstream.engine import state as states
from slipstream.engine.checkpoint import Checkpoint
from slipstream.engine.lanes import rows as lane_rows
from slipstream.engine.lanes.capacity import compute_capacity
from slipstream.engine.lanes.lane import Lane
from slipstream.engine.lanes.pack import describe_capacity, parse_capacity
from slipstream.engine.plan import Plan
from slipstream.engine.progress import FitResult, Progress
from slipstream.engine.step import Rows


@dataclass(frozen=True)
class EndedLane:
    """A lane that was trained in a pack, perhaps among others."""

    rows: Rows
    """As they are in a pack of its own width"""
    progress: Progress
    stop_reason: str
    plan: Plan
    """As it trained"""
    mode: str
    seconds: tuple[float, float, float]
    """Set-up, training and validation of its pack"""


def make_checkpoint(
    lanes: Sequence[Lane],
    ended: Mapping[int, EndedLane],
    *,
    max_lanes: int,
    extra: Mapping[str, Any],
) -> Checkpoint:
    """Return the checkpoint of a pack of these lanes, some of which have ended; the others wait.

    `ended` has them by their number. At most `max_lanes` of the others train at a time.
    """
    first = next(iter(ended.values()))
    limit = min(len(lanes), max_lanes)
    entries = []
    for number, lane in enumerate(lanes):
        one = ended.get(number)
        entry = {"number": number, "config": lane.config.model_dump_json()}
        progress, stopped = (one.progress, one.stop_reason) if one else (Progress(), "")
        entries.append(entry | {"progress": asdict(progress), "stopped": stopped})
    metadata = {
        **extra,
        **describe_capacity(compute_capacity(lanes, places=limit)),
        "mode": first.mode,
        "plan": first.plan.to_dict(),
        "limit": limit,
        "places": [],
        "lanes": entries,
        "waiting": [number for number in range(len(lanes)) if number not in ended],
        "entered": len(lanes),
        "seconds": [max(parts) for parts in zip(*(e.seconds for e in ended.values()), strict=True)],
        "log_bytes": 0,
    }
    tensors = {
        f"{number}/{name}": row for number, one in ended.items() for name, row in one.rows.items()
    }
    step = max(one.progress.step for one in ended.values())
    return Checkpoint(step, {states.ENDED: tensors}, metadata)


def read_results(
    checkpoint: Checkpoint, lanes: Sequence[Lane], signature: Signature, plan: Plan
) -> FitResult | None:
    """Return the results of a pack whose lanes have all ended; None if one of them can go on."""
    metadata = checkpoint.metadata
    if (
        "capacity" not in metadata
        or metadata["waiting"]
        or any(number is not None for number in metadata["places"])
    ):
        return None
    results = [states.parse_lane(entry, lanes) for entry in metadata["lanes"]]
    if any(states.can_go_on(one.stop_reason, one.progress, one.train) for one in results):
        return None
    results.sort(key=lambda one: one.number)
    model = parse_capacity(metadata).model
    layout, rows = lane_rows.build_layout(model, signature), states.split_rows(checkpoint)
    for one in results:
        if one.has_best:
            row = rows[one.number]["best"].to(plan.device)
            one.weights = lane_rows.read_weights(row, layout, one.lane, model, signature)
    seconds = metadata["seconds"]
    return FitResult(results, plan, {}, metadata["limit"], checkpoint.step, 0, *seconds)
