"""Lanes that another run has trained, such as the pack of a search: saved, and made a run's own."""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from slipstream import runs
from slipstream.base.errors import UserError
from slipstream.base.storage import read_verified
from slipstream.config import Config
from slipstream.data.dataset import Dataset
from slipstream.engine import checkpoint, state
from slipstream.engine.checkpoint import Checkpoint
from slipstream.engine.context import EncoderMatch, resolve_settings
from slipstream.engine.lanes import parse_progress
from slipstream.engine.plan import PackChoice, Plan
from slipstream.engine.planning import MAX_LANES
from slipstream.engine.state import EndedLane
from slipstream.events import (
    Epoch,
    Event,
    LaneEnd,
    Log,
    Recovery,
    format_event,
    parse_event,
)
from slipstream.runs import Run
from slipstream.training import fitting

ROWS, METADATA = "rows.safetensors", "lane.json"


@dataclass(frozen=True)
class TrainedLane:
    """A lane that has ended, and what the log of its pack contains of it."""

    lane: EndedLane
    events: list[Event]


@dataclass(frozen=True)
class LoadedData:
    """Data that this process has loaded already."""

    dataset: Dataset
    fingerprint: str
    init: EncoderMatch | None = None
    """The encoder that `train.init_from` names"""


def select_events(events: Iterable[Event], number: int) -> Iterator[Event]:
    """Yield what the log of a pack contains of a lane, as that of lane 0."""
    for event in events:
        match event:
            case Epoch(lane=lane) | LaneEnd(lane=lane) | Recovery(lane=lane) if lane == number:
                yield replace(event, lane=0)
            case Log(losses=dict(losses)) if number in losses:
                yield replace(event, losses={0: losses[number]})


def save_lane(folder: Path, trained: TrainedLane) -> None:
    """Write a lane to a folder of its own."""
    lane = trained.lane
    facts = {
        "progress": asdict(lane.progress),
        "stopped": lane.stop_reason,
        "plan": lane.plan.to_dict(),
        "mode": lane.mode,
        "seconds": lane.seconds,
        "events": [format_event(event) for event in trained.events],
    }
    folder.parent.mkdir(exist_ok=True)
    checkpoint.write_folder(folder, {ROWS: lane.rows}, {METADATA: facts})


def load_lane(folder: Path) -> TrainedLane | None:
    """Read a lane; None if it was not saved or is damaged, since it can be trained again."""
    try:
        files = read_verified(folder)
        rows = checkpoint.parse_tensors(files[ROWS], folder / ROWS)
    except (UserError, KeyError):
        return None
    facts = json.loads(files[METADATA])
    setup_s, train_s, validate_s = facts["seconds"]
    lane = EndedLane(
        rows,
        parse_progress(facts["progress"]),
        facts["stopped"],
        Plan.from_dict(facts["plan"]),
        facts["mode"],
        (setup_s, train_s, validate_s),
    )
    return TrainedLane(lane, [parse_event(line) for line in facts["events"]])


def make_checkpoint(
    config: Config, data: LoadedData, trained: Mapping[int, TrainedLane], why: str
) -> Checkpoint:
    """Return the checkpoint of a run of these lanes, by their number in it; the others wait."""
    settings = resolve_settings(config, data.dataset)
    init = data.init.weights if data.init else {}
    lanes = fitting.build_lanes(settings, data.dataset, init)
    first = next(iter(trained.values())).lane
    places = min(len(lanes), MAX_LANES)
    pack = PackChoice(first.mode, places, reason=why).summarize(len(lanes))
    extra = {"data": data.fingerprint, "pack": pack, "why": why}
    known = {number: ended.lane for number, ended in trained.items()}
    return state.make_checkpoint(lanes, known, max_lanes=places, extra=extra)


def write_lanes(run: Run, saved: Checkpoint, trained: Mapping[int, TrainedLane]) -> None:
    """Write the log and the checkpoint of a run whose lanes, or some of them, are trained."""
    for event in _merge_events(trained):
        runs.add_event(run.log, event)
    saved.metadata["log_bytes"] = runs.get_log_size(run)
    checkpoint.write_checkpoint(run, saved)


def _merge_events(trained: Mapping[int, TrainedLane]) -> list[Event]:
    """Return the events of all lanes in the order of time; losses of one step in one event."""
    losses: dict[tuple[float, int], dict[int, float]] = {}
    events: list[Event] = []
    for number, ended in trained.items():
        for event in ended.events:
            match event:
                case Log(step=step, losses=dict(values)):
                    key = event.at_s or 0.0, step
                    if key not in losses:
                        losses[key] = {}
                        events.append(replace(event, losses=losses[key]))
                    losses[key][number] = values[0]
                case Epoch() | LaneEnd() | Recovery():
                    events.append(replace(event, lane=number))
    return sorted(events, key=lambda event: event.at_s or 0.0)
