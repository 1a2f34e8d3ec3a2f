"""A pack: K models of one architecture, the lanes, trained by one program.

A lane has its own weights, seed, learning rate, decay, dropout, clip, width, windows and end, and
becomes what its config would give alone. All of it is rows of tensors that keep their place, so a
captured step goes on when lanes end and others take their places.

Shapes: K lanes, P weights of one, S steps of an epoch, A passes per step, B windows per pass,
V validation batches of C windows.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from slipstream.config import Signature
from slipstream.config.base import hash_seed
from slipstream.data.windows import Series
from slipstream.engine import objective, optim, pretrained
from slipstream.engine.batches.source import EpochSampler, Program
from slipstream.engine.capture import CapturedProgram, raise_closed
from slipstream.engine.lanes import flat_optim, gradients
from slipstream.engine.lanes.gradients import LaneMode
from slipstream.engine.lanes.lane import (
    EpochStart,
    Lane,
    PackCapacity,
    check_capacity,
    compute_capacity,
)
from slipstream.engine.plan import Plan
from slipstream.kernels import precompile, should_use_triton
from slipstream.models import Noise, build, padding


class Laid(NamedTuple):
    """An epoch on the host, in the pack's shapes."""

    number: int
    rows: Tensor
    shares: Tensor
    rates: Tensor


def build_pack(
    lanes: Sequence[Lane],
    signature: Signature,
    series: Series,
    plan: Plan,
    *,
    mode: LaneMode = "together",
    room: Sequence[Lane] = (),
) -> Pack:
    """A pack of these lanes, on the device that holds the series; `room` are further ones that may
    take a place later."""
    held = compute_capacity([*lanes, *room], places=len(lanes))
    pack = Pack(len(lanes), held, signature, series, plan, mode)
    for place, lane in enumerate(lanes):
        pack.put(place, lane)
    return pack


class Pack:
    """The lanes' tensors, and the programs over them."""

    def __init__(
        self,
        places: int,
        room: PackCapacity,
        signature: Signature,
        series: Series,
        plan: Plan,
        mode: LaneMode,
    ) -> None:
        assert series.values.device.type == plan.device.type, "windows are gathered on the device"
        self.capacity, self.signature, self.series = room, signature, series
        self.plan, self.mode = plan, mode
        self.lanes: list[Lane | None] = [None] * places
        self._going: set[int] = set()
        self._laid: dict[int, Laid] = {}
        job = gradients.LaneContext(
            room.model, signature, room.config, series, plan, room.passes, room.drops
        )
        self._layout = gradients.build_layout(job.build())
        self._parts = gradients.build_slices(self._layout, room.config)
        self._allocate(places)
        self._passes = gradients.GRADIENTS[mode](job, self.live["weights"], self._layout)
        if mode == "together" and should_use_triton(series.values):
            self._rehearse()
        self.advance: Program = self._advance
        self.validate_batch: Program = self._check
        if plan.capture:
            self.advance = CapturedProgram(self._advance, plan.device)
            self.validate_batch = CapturedProgram(self._check, plan.device)

    def _rehearse(self) -> None:
        """Have all kernels built at once. No lane is active yet, so that this changes nothing but
        losses, which lanes begin without."""
        with precompile():
            self._advance()
            self._check()

    def _allocate(self, K: int) -> None:
        room, device = self.capacity, self.plan.device
        P = sum(entry.size + entry.padding for entry in self._layout)

        def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(K, *shape, dtype=dtype, device=device)

        def moving() -> dict[str, Tensor]:
            found = {name: zeros(P) for name in ("weights", "first", "second")}
            found["count"] = zeros()
            if len(self._parts) > 1:
                found["encoder_count"] = zeros()
            if self.plan.precision == "fp16":
                found |= {"scale": zeros(), "since_growth": zeros(dtype=torch.int32)}
            return found

        self.live, self.good, self.best = moving(), moving(), zeros(P)
        self.settings = {
            **{name: zeros() for name in ("dropout", "decay", "clip", "momentum")},
            **{name: zeros(dtype=torch.int64) for name in ("seed", "optimizer")},
        }
        self.buffers = {
            "rows": zeros(room.steps, room.passes, room.batch, dtype=torch.int64),
            "shares": zeros(room.steps, room.passes, room.batch),
            "rates": zeros(room.steps),
            "losses": zeros(room.steps),
            "cursor": zeros(dtype=torch.int64),
            "before": zeros(dtype=torch.int64),
            "active": zeros(dtype=torch.bool),
            "frozen": zeros(dtype=torch.bool),
            "val_rows": zeros(room.val_steps, room.chunk, dtype=torch.int64),
            "val_shares": zeros(room.val_steps, room.chunk),
            "val_losses": zeros(room.val_steps),
        }
        self._val_cursor = torch.zeros(1, dtype=torch.int64, device=device)
        self._index = torch.arange(K, device=device)
        self._ones = torch.ones(K, device=device)

    def state(self) -> dict[str, Tensor]:
        """What training changes, by name; a lane's place comes first."""
        return {
            **{f"live.{name}": tensor for name, tensor in self.live.items()},
            **{f"good.{name}": tensor for name, tensor in self.good.items()},
            "best": self.best,
            "losses": self.buffers["losses"],
        }

    def tensors(self) -> dict[str, Tensor]:
        """All that a lane is."""
        return {**self.state(), **self.settings, **self.buffers}

    def put(self, place: int, lane: Lane) -> None:
        """Give a place to a new lane, as it would begin alone; its epoch is still to `begin`."""
        check_capacity(lane, self.capacity)
        self.leave(place)
        self.lanes[place] = lane
        for tensor in self.tensors().values():
            tensor[place].zero_()
        train, model = lane.config.train, lane.config.model
        device = self.plan.device
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            torch.manual_seed(hash_seed(lane.config.seed))
            alone = dict(build(model, self.signature).named_parameters()) | dict(lane.init)
        padded = padding.pad_weights(alone, model, self.capacity.model, self._tokens)
        views = gradients.view_weights(self.live["weights"], self._layout)
        with torch.no_grad():
            for name, weight in padded.items():
                views[name][place] = weight
        if "scale" in self.live:
            self.live["scale"][place] = optim.FIRST_SCALE
        values = {
            "seed": lane.config.seed,
            "dropout": model.dropout,
            "decay": train.weight_decay,
            "clip": math.inf if train.clip == "off" else train.clip,
            "momentum": train.momentum,
            "optimizer": self.capacity.optimizers.index(train.optimizer),
        }
        for name, value in values.items():
            self.settings[name][place] = value
        chunk = self.capacity.chunk
        rows, shares = EpochSampler(lane.starts["val"], chunk, chunk, None).sample_epoch(0)
        self.buffers["val_rows"][place, : len(rows)] = rows[:, 0].to(device)
        self.buffers["val_shares"][place, : len(rows)] = shares[:, 0].to(device)

    @property
    def _tokens(self) -> int:
        return self.signature.context // self.capacity.model.patch

    def num_steps(self, place: int) -> int:
        """Of one of the lane's epochs."""
        return self._lane(place).batch_order().num_steps

    def _lane(self, place: int) -> Lane:
        lane = self.lanes[place]
        assert lane is not None
        return lane

    def is_prepared(self, place: int, number: int) -> bool:
        laid = self._laid.get(place)
        return laid is not None and laid.number == number

    def prepare(self, place: int, number: int) -> None:
        """Lay out an epoch on the host; `begin` has less to do then."""
        if self.is_prepared(place, number):
            return
        lane, room = self._lane(place), self.capacity
        draw = lane.batch_order()
        order = draw.sample_epoch(number)
        rows, shares = (_widened(part, (room.steps, room.passes, room.batch)) for part in order)
        rates = torch.zeros(room.steps, dtype=torch.float64)
        rates[: draw.num_steps] = torch.tensor(
            optim.compute_lrs(lane.config.train, number, draw.num_steps), dtype=torch.float64
        )
        self._laid[place] = Laid(number, rows, shares, rates)

    def begin(self, epochs: Mapping[int, EpochStart]) -> None:
        """Set lanes going, by place. `go_back` leads to an epoch's first step from then on."""
        for place, epoch in epochs.items():
            self.prepare(place, epoch.number)
        places = list(epochs)
        laid, tape = [self._laid.pop(place) for place in places], self.buffers
        given = {
            "rows": torch.stack([one.rows for one in laid]),
            "shares": torch.stack([one.shares for one in laid]),
            "rates": torch.stack(
                [epochs[k].rate * one.rates for k, one in zip(places, laid, strict=True)]
            ).float(),
            "cursor": torch.tensor([epochs[place].step for place in places]),
            "before": torch.tensor([epochs[place].steps_before for place in places]),
            "active": torch.ones(len(places), dtype=torch.bool),
            "frozen": torch.tensor(
                [pretrained.is_frozen(self._lane(k).config.train, epochs[k].number) for k in places]
            ),
        }
        index = self._at(places)
        for name, value in given.items():
            tape[name].index_copy_(0, index, value.to(self.plan.device))
        _copy(self.live, self.good, self._at([k for k in places if not epochs[k].step]))
        self._going |= set(places)
        self._passes.select(self._going)

    def _at(self, places: Sequence[int]) -> Tensor:
        return torch.tensor(places, dtype=torch.int64, device=self.plan.device)

    def freeze(self, place: int) -> None:
        """Stop a lane at once; it keeps what it has."""
        self.buffers["active"][place] = False
        self.buffers["cursor"][place] = 0
        self._going -= {place}
        self._passes.select(self._going)

    def leave(self, place: int) -> None:
        """Empty a place."""
        self.freeze(place)
        self._laid.pop(place, None)
        self.lanes[place] = None

    def go_back(self, place: int) -> None:
        """Put a lane back to where its epoch began."""
        _copy(self.good, self.live, self._at([place]))

    def keep_best(self, places: Sequence[int]) -> None:
        """Note that these lanes' weights are the best so far."""
        _copy({"": self.live["weights"]}, {"": self.best}, self._at(places))

    def weights(self, place: int, *, best: bool = False) -> dict[str, Tensor]:
        """A lane's weights, as the model by itself has them."""
        rows = self.best if best else self.live["weights"]
        return self.name_weights(rows[place], self._lane(place))

    def name_weights(self, row: Tensor, lane: Lane) -> dict[str, Tensor]:
        """A row of a lane's weights by the names that the model has for them."""
        views = gradients.view_weights(row[None], self._layout)
        own = {name: view[0].detach() for name, view in views.items()}
        return padding.unpad_weights(own, lane.config.model, self.capacity.model, self._tokens)

    def compact(self, keep: Sequence[int]) -> Pack:
        """A smaller pack of some places, each as it stands. This one is closed."""
        smaller = Pack(len(keep), self.capacity, self.signature, self.series, self.plan, self.mode)
        index, mine = self._at(keep), self.tensors()
        for name, tensor in smaller.tensors().items():
            tensor.copy_(mine[name].index_select(0, index))
        smaller.lanes = [self.lanes[place] for place in keep]
        smaller._going = {new for new, old in enumerate(keep) if old in self._going}
        smaller._passes.select(smaller._going)
        self.close()
        return smaller

    def score(self, places: Sequence[int]) -> list[float]:
        """The validation losses of some lanes; the host waits for them."""
        counts = [len(self._lane(place).starts["val"]) for place in places]
        self._val_cursor.zero_()
        self._passes.select(set(places))
        for _ in range(-(-max(counts) // self.capacity.chunk)):
            self.validate_batch()
        self._passes.select(self._going)
        sums = self.buffers["val_losses"].double().sum(dim=1).tolist()
        self.buffers["val_losses"].zero_()
        return [sums[place] / count for place, count in zip(places, counts, strict=True)]

    def failures(self) -> dict[str, str]:
        """Programs that could not be captured, and why."""
        named = {"training step": self.advance, "validation step": self.validate_batch}
        return {
            name: program.failure
            for name, program in named.items()
            if isinstance(program, CapturedProgram) and program.failure
        }

    def close(self) -> None:
        """Let go of threads, graphs and programs: methods of its own would keep it from ending."""
        for program in (self.advance, self.validate_batch):
            if isinstance(program, CapturedProgram):
                program.close()
        if not self.plan.capture:
            self.advance = self.validate_batch = raise_closed
        self._passes.close()

    def _advance(self) -> None:
        """One step of every active lane: gather, forward, loss, backward, clip, update."""
        live, tape, settings = self.live, self.buffers, self.settings
        cursor, scale = tape["cursor"], live.get("scale")
        drawn = self.capacity.drops or objective.uses_noise(self.capacity.config)
        noise = Noise(settings["seed"], settings["dropout"]) if drawn else None
        loss, grads = self._passes.train(
            tape["rows"][self._index, cursor],
            tape["shares"][self._index, cursor],
            noise,
            tape["before"] + cursor,
            self._ones if scale is None else scale,
        )
        for part in self._parts:
            if part.starts_frozen:
                grads[:, part.columns].masked_fill_(tape["frozen"][:, None], 0.0)
        divisor, overflow = flat_optim.compute_divisor(grads, settings["clip"], scale)
        moves = tape["active"] if overflow is None else tape["active"] & ~overflow
        live["count"].add_(moves)
        thawed = moves
        if len(self._parts) > 1:
            thawed = moves & ~tape["frozen"]
            live["encoder_count"].add_(thawed)
        lr = tape["rates"].gather(1, cursor[:, None])[:, 0]
        several = len(self.capacity.optimizers) > 1
        for part, (code, optimizer) in itertools.product(
            self._parts, enumerate(self.capacity.optimizers)
        ):
            moving = thawed if part.starts_frozen else moves
            flat_optim.update_lanes(
                optimizer,
                live["weights"][:, part.columns],
                grads[:, part.columns],
                live["first"][:, part.columns],
                live["second"][:, part.columns],
                lr=lr if part.lr_factor == 1.0 else lr * part.lr_factor,
                decay=settings["decay"],
                momentum=settings["momentum"],
                count=live["encoder_count" if part.starts_frozen else "count"],
                divisor=divisor,
                moves=moving & (settings["optimizer"] == code) if several else moving,
            )
        if scale is not None and overflow is not None:
            flat_optim.update_loss_scale(scale, live["since_growth"], overflow, tape["active"])
        tape["losses"].scatter_(1, cursor[:, None], loss[:, None])
        cursor.add_(tape["active"])

    @torch.no_grad()
    def _check(self) -> None:
        """One validation batch of every lane; the summed losses go onto the tape."""
        rows = self.buffers["val_rows"].index_select(1, self._val_cursor)[:, 0]
        shares = self.buffers["val_shares"].index_select(1, self._val_cursor)[:, 0]
        loss = self._passes.validate(rows, shares)
        self.buffers["val_losses"].index_copy_(1, self._val_cursor, loss[:, None])
        self._val_cursor.add_(1)


def _widened(part: Tensor, shape: tuple[int, int, int]) -> Tensor:
    """Steps, passes and windows with zeros after them."""
    if part.shape == shape:
        return part
    whole = np.zeros(shape, dtype=part.numpy().dtype)
    steps, passes, batch = part.shape
    whole[:steps, :passes, :batch] = part.numpy()
    return torch.from_numpy(whole)


def _copy(source: Mapping[str, Tensor], to: Mapping[str, Tensor], index: Tensor) -> None:
    """Some rows of every tensor."""
    for name, tensor in source.items():
        to[name].index_copy_(0, index, tensor.index_select(0, index))
