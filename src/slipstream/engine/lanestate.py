"""A pack in training, taken to disk in the middle of it and brought back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from slipstream import config as configs
from slipstream import runs
from slipstream.config import Config, Model, Signature
from slipstream.data.windows import Series
from slipstream.engine import checkpoint, state
from slipstream.engine.checkpoint import Saved
from slipstream.engine.lane import Epoch, Lane, Room
from slipstream.engine.pack import Pack
from slipstream.engine.plan import Plan
from slipstream.engine.state import Progress
from slipstream.errors import UserError
from slipstream.runs import Run

LANES, ENDED = "lanes.safetensors", "ended.safetensors"


@dataclass
class LaneFit:
    """What training gave one lane, or has given it so far."""

    number: int
    """In the order that lanes came in"""
    lane: Lane
    progress: Progress = field(default_factory=Progress)
    weights: dict[str, Tensor] = field(default_factory=dict)
    """Of the best validation, under the model's own names; none where no loss was finite"""
    stopped: str = ""
    """Why it ended; empty while it trains"""
    signal_number: int = 0
    """Of the signal that stopped it, if one did"""


@dataclass
class Work:
    """A pack in training."""

    pack: Pack
    run: Run
    places: list[LaneFit | None]
    ended: list[LaneFit] = field(default_factory=list)
    came: int = 0
    steps: int = 0
    """Of the pack"""
    train_s: float = 0.0
    validate_s: float = 0.0
    losses: Tensor = field(default_factory=lambda: torch.zeros(0))
    """[K, S]: as last read"""

    def training(self) -> list[tuple[int, LaneFit]]:
        return [(place, fit) for place, fit in enumerate(self.places) if fit is not None]

    def everyone(self) -> list[LaneFit]:
        return [*self.ended, *(one for _, one in self.training())]


def epoch_of(at: Progress) -> Epoch:
    return Epoch(at.epochs, at.rate, before=at.step - at.done, at=at.done)


def take(work: Work, facts: Mapping[str, Any]) -> Saved:
    """A copy of all that the rest depends on; from a GPU it arrives while training goes on."""
    pack, device = work.pack, work.pack.plan.device
    ended = {f"{one.number}/{name}": w for one in work.ended for name, w in one.weights.items()}
    tensors = {LANES: checkpoint.on_host(pack.changing()), ENDED: checkpoint.on_host(ended)}
    ready = None
    if device.type == "cuda":
        ready = torch.cuda.Event()
        ready.record(torch.cuda.current_stream(device))
    room = pack.room._asdict()
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
                "stopped": one.stopped,
            }
            for one in work.everyone()
        ],
        "came": work.came,
        "seconds": [work.train_s, work.validate_s],
        "log_bytes": runs.log_size(work.run),
    }
    return Saved(work.steps, {name: found for name, found in tensors.items() if found}, told, ready)


def restored(
    saved: Saved,
    lanes: Sequence[Lane] | Mapping[int, Lane],
    signature: Signature,
    series: Series,
    run: Run,
) -> Work:
    """The pack of a checkpoint with every lane where it stood."""
    facts, places = saved.facts, saved.facts["places"]
    plan = Plan.from_dict(facts["plan"])
    pack = Pack(len(places), room_of(facts), signature, series, plan, facts["mode"])
    work = Work(pack, run, [None] * len(places), came=facts["came"], steps=saved.step)
    work.train_s, work.validate_s = facts["seconds"]
    for told in facts["lanes"]:
        one = _brought_back(told, lanes, saved.tensors.get(ENDED, {}), plan.device)
        if one.number not in places:
            work.ended.append(one)
            continue
        place = places.index(one.number)
        work.places[place] = one
        pack.put(place, one.lane)
    for name, tensor in pack.changing().items():
        tensor.copy_(saved.tensors[LANES][name])
    if work.training():  # all may have ended, and only their scores be missing
        pack.begin({place: epoch_of(one.progress) for place, one in work.training()})
    return work


def room_of(facts: Mapping[str, Any]) -> Room:
    """What the places of a checkpoint's pack can hold."""
    told = facts["room"]
    back = {
        "config": Config.model_validate_json(told["config"]),
        "model": Model.model_validate_json(told["model"]),
        "optimizers": tuple(told["optimizers"]),
    }
    return Room(**(told | back))


def _brought_back(
    told: dict[str, Any],
    lanes: Sequence[Lane] | Mapping[int, Lane],
    ended: dict[str, Tensor],
    device: torch.device,
) -> LaneFit:
    number, lane = told["number"], lanes[told["number"]]
    changed = configs.differences(Config.model_validate_json(told["config"]), lane.config)
    if changed:
        raise UserError(f"lane {number} has other settings than before ({', '.join(changed)})")
    prefix = f"{number}/"
    weights = {
        name.removeprefix(prefix): weight.to(device)
        for name, weight in ended.items()
        if name.startswith(prefix)
    }
    return LaneFit(number, lane, state.as_progress(told["progress"]), weights, told["stopped"])
