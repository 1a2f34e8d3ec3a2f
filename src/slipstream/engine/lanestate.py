"""A pack in training, taken to disk in the middle of it and brought back."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from slipstream import config as configs
from slipstream import runs
from slipstream.config import Config, Model, Signature
from slipstream.data.windows import Series
from slipstream.engine import checkpoint, state
from slipstream.engine.checkpoint import Checkpoint
from slipstream.engine.lanes.lane import EpochStart, Lane, PackCapacity
from slipstream.engine.lanes.pack import Pack
from slipstream.engine.plan import Plan
from slipstream.engine.state import Progress
from slipstream.errors import UserError
from slipstream.runs import Run

LANES, ENDED, WAITING = (f"{name}.safetensors" for name in ("lanes", "ended", "waiting"))


@dataclass
class LaneResult:
    """What training gave one lane, or has given it so far."""

    number: int
    """In the order that lanes came in"""
    lane: Lane
    progress: Progress = field(default_factory=Progress)
    weights: dict[str, Tensor] = field(default_factory=dict)
    """Of the best validation, under the model's own names; none where no loss was finite"""
    stop_reason: str = ""
    """Why it ended; empty while it trains"""
    signal_number: int = 0
    """Of the signal that stopped it, if one did"""


class WaitingLane(NamedTuple):
    """A lane without a place: memory was too small for all, or its turn is yet to come."""

    result: LaneResult
    rows: dict[str, Tensor]
    """What training has changed, on the host, by the pack's names; nothing where it is new"""


@dataclass
class TrainingState:
    """A pack in training."""

    pack: Pack
    run: Run
    places: list[LaneResult | None]
    ended: list[LaneResult] = field(default_factory=list)
    waiting: list[WaitingLane] = field(default_factory=list)
    """Those that take the next places, in order"""
    num_entered: int = 0
    steps: int = 0
    """Of the pack"""
    train_s: float = 0.0
    validate_s: float = 0.0
    losses: Tensor = field(default_factory=lambda: torch.zeros(0))
    """[K, S]: as last read"""

    def list_active(self) -> list[tuple[int, LaneResult]]:
        return [(place, fit) for place, fit in enumerate(self.places) if fit is not None]

    def list_all(self) -> list[LaneResult]:
        waiting = (one.result for one in self.waiting)
        return [*self.ended, *(one for _, one in self.list_active()), *waiting]

    def seat(self, place: int, one: WaitingLane) -> None:
        """Give a place to a lane, where it stood; its epoch is still to begin."""
        self.places[place] = one.result
        self.pack.put(place, one.result.lane)
        if one.rows:
            for name, tensor in self.pack.state().items():
                tensor[place].copy_(one.rows[name])


def next_epoch(at: Progress) -> EpochStart:
    return EpochStart(at.epochs, at.rate, steps_before=at.step - at.done, step=at.done)


def read_best_weights(work: TrainingState, place: int) -> dict[str, Tensor]:
    """A lane's best weights so far; none where no validation was finite."""
    one = work.places[place]
    found = one is not None and math.isfinite(one.progress.best_loss)
    return work.pack.weights(place, best=True) if found else {}


def mark_stopped(work: TrainingState, stopped: str, *, signal_number: int) -> None:
    """Give the lanes that have not ended their best weights so far, and say why they stopped."""
    for place, one in work.list_active():
        one.weights = read_best_weights(work, place)
    for one, rows in work.waiting:
        if math.isfinite(one.progress.best_loss):
            row = rows["best"].to(work.pack.plan.device)
            one.weights = work.pack.name_weights(row, one.lane)
    for one in work.list_all():
        if not one.stop_reason:
            one.stop_reason, one.signal_number = stopped, signal_number
            if not signal_number:  # else it goes on, and has not ended
                told = asdict(one.progress)
                work.run.append("lane", lane=one.number, stopped=stopped, **told)


def take_checkpoint(work: TrainingState, facts: Mapping[str, Any]) -> Checkpoint:
    """A copy of all that the rest depends on; from a GPU it arrives while training goes on."""
    pack, device = work.pack, work.pack.plan.device
    ended = {f"{one.number}/{name}": w for one in work.ended for name, w in one.weights.items()}
    waiting = {
        f"{one.result.number}/{name}": row for one in work.waiting for name, row in one.rows.items()
    }
    live = {LANES: pack.state(), ENDED: ended, WAITING: waiting}
    tensors = {name: checkpoint.copy_to_host(found) for name, found in live.items() if found}
    ready = None
    if device.type == "cuda":
        ready = torch.cuda.Event()
        ready.record(torch.cuda.current_stream(device))
    room = pack.capacity._asdict()
    room |= {name: room[name].model_dump_json() for name in ("config", "model")}
    told = {
        **facts,
        "room": room,
        "mode": pack.mode,
        "plan": pack.plan.to_dict(),
        "places": [None if one is None else one.number for one in work.places],
        "lanes": [
            {
                "number": one.number,
                "config": one.lane.config.model_dump_json(),
                "progress": asdict(one.progress),
                "stopped": one.stop_reason,
            }
            for one in work.list_all()
        ],
        "waiting": [one.result.number for one in work.waiting],
        "came": work.num_entered,
        "seconds": [work.train_s, work.validate_s],
        "log_bytes": runs.get_log_size(work.run),
    }
    return Checkpoint(work.steps, tensors, told, ready)


def restore_pack(
    saved: Checkpoint,
    lanes: Sequence[Lane] | Mapping[int, Lane],
    signature: Signature,
    series: Series,
    run: Run,
    *,
    most: int | None = None,
) -> TrainingState:
    """The pack of a checkpoint with every lane where it stood; those beyond `most` wait."""
    facts, plan = saved.metadata, Plan.from_dict(saved.metadata["plan"])
    ended = saved.tensors.get(ENDED, {})
    every = [_brought_back(told, lanes, ended, plan.device) for told in facts["lanes"]]
    back = {one.number: one for one in every}
    order: list[int | None] = facts["places"]
    waiting = list(facts.get("waiting", []))
    if most is not None and most < len(order):
        in_training = [number for number in order if number is not None]
        order, waiting = list(in_training[:most]), in_training[most:] + waiting
    pack = Pack(len(order), read_capacity(facts), signature, series, plan, facts["mode"])
    work = TrainingState(
        pack, run, [None] * len(order), num_entered=facts["came"], steps=saved.step
    )
    work.train_s, work.validate_s = facts["seconds"]
    work.ended = [one for one in every if one.number not in {*order, *waiting}]
    for place, number in enumerate(order):
        if number is not None:
            work.seat(place, WaitingLane(back[number], _rows(saved, number)))
    work.waiting = [WaitingLane(back[number], _rows(saved, number)) for number in waiting]
    if work.list_active():  # all may have ended, and only their scores be missing
        pack.begin({place: next_epoch(one.progress) for place, one in work.list_active()})
    return work


def _rows(saved: Checkpoint, number: int) -> dict[str, Tensor]:
    """What a checkpoint has of a lane that is in training or waits."""
    places = saved.metadata["places"]
    if number in places:
        place = places.index(number)
        return {name: tensor[place] for name, tensor in saved.tensors[LANES].items()}
    prefix = f"{number}/"
    return {
        name.removeprefix(prefix): row
        for name, row in saved.tensors.get(WAITING, {}).items()
        if name.startswith(prefix)
    }


def read_capacity(facts: Mapping[str, Any]) -> PackCapacity:
    """What the places of a checkpoint's pack can hold."""
    told = facts["room"]
    back = {
        "config": Config.model_validate_json(told["config"]),
        "model": Model.model_validate_json(told["model"]),
        "optimizers": tuple(told["optimizers"]),
    }
    return PackCapacity(**(told | back))


def _brought_back(
    told: dict[str, Any],
    lanes: Sequence[Lane] | Mapping[int, Lane],
    ended: dict[str, Tensor],
    device: torch.device,
) -> LaneResult:
    number, lane = told["number"], lanes[told["number"]]
    changed = configs.list_differences(Config.model_validate_json(told["config"]), lane.config)
    if changed:
        raise UserError(f"lane {number} has other settings than before ({', '.join(changed)})")
    prefix = f"{number}/"
    weights = {
        name.removeprefix(prefix): weight.to(device)
        for name, weight in ended.items()
        if name.startswith(prefix)
    }
    return LaneResult(
        number, lane, state.parse_progress(told["progress"]), weights, told["stopped"]
    )
