"""A pack: K models of one architecture, the lanes, trained by one program.

A lane has its own weights, seed, learning rate, decay, dropout, clip, width, windows and end, and
becomes what its config would give alone. All of it is rows of tensors that keep their place, so a
captured step goes on when lanes end and others take their places.

Shapes: K lanes, P weights of one, S steps of an epoch, A passes per step, B windows per pass,
V validation batches of C windows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from slipstream.config import Config, Model, Signature
from slipstream.config.base import hash_seed
from slipstream.data.windows import Series
from slipstream.engine import objective, optim, step
from slipstream.engine.batches.source import EpochSampler, Program
from slipstream.engine.capture import CapturedProgram, CaptureSeconds, raise_closed
from slipstream.engine.lanes import flat_optim, gradients
from slipstream.engine.lanes.capacity import PackCapacity, check_capacity, compute_capacity
from slipstream.engine.lanes.epochs import EpochPreparer
from slipstream.engine.lanes.gradients import LaneMode
from slipstream.engine.lanes.lane import EpochStart, Lane
from slipstream.engine.lanes.rows import narrow_rows, read_weights
from slipstream.engine.plan import Plan
from slipstream.kernels import precompile, should_use_triton
from slipstream.models import Noise, build, padding


def build_pack(
    lanes: Sequence[Lane],
    signature: Signature,
    series: Series,
    plan: Plan,
    *,
    mode: LaneMode = "together",
    room: Sequence[Lane] = (),
) -> Pack:
    """Build a pack of these lanes, on the device that holds the series; `room` are further ones
    that may take a place later."""
    capacity = compute_capacity([*lanes, *room], places=len(lanes))
    pack = Pack(len(lanes), capacity, signature, series, plan, mode)
    for place, lane in enumerate(lanes):
        pack.put(place, lane)
    return pack


class Pack:
    """The step program of many lanes: their tensors, and the steps over all of them.

    A step allocates all that it needs before it changes the lanes, so one that fails for lack of
    memory leaves them as they were.
    """

    def __init__(
        self,
        num_places: int,
        capacity: PackCapacity,
        signature: Signature,
        series: Series,
        plan: Plan,
        mode: LaneMode,
    ) -> None:
        assert series.values.device.type == plan.device.type, "windows are gathered on the device"
        self.capacity, self.signature, self.series = capacity, signature, series
        self.plan, self.mode = plan, mode
        self.lanes: list[Lane | None] = [None] * num_places
        self._running: set[int] = set()
        self._used: set[int] = set()
        """Places that have had a lane, whose rows are not zeros"""
        self._epochs = EpochPreparer(capacity, num_places, plan.device)
        passes, drops = capacity.passes, capacity.drops
        job = gradients.LaneContext(
            capacity.model, signature, capacity.config, series, plan, passes, drops
        )
        self._layout = gradients.build_layout(job.build())
        self._parts = gradients.build_slices(self._layout, capacity.config)
        self._allocate(num_places)
        self._passes = gradients.GRADIENTS[mode](job, self.live["weights"], self._layout)
        if mode == "together" and should_use_triton(series.values):
            with precompile():  # no lane is active yet, so this changes only losses
                self._advance()
                self._check()
            for name in ("losses", "val_losses"):
                self.buffers[name].zero_()
        self.advance: Program = self._advance
        self.validate_batch: Program = self._check
        if plan.capture:
            self.advance = CapturedProgram(self._advance, plan.device)
            self.validate_batch = CapturedProgram(self._check, plan.device)

    def _allocate(self, K: int) -> None:
        capacity, device = self.capacity, self.plan.device
        P = sum(entry.size + entry.padding for entry in self._layout)

        def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(K, *shape, dtype=dtype, device=device)

        def moving() -> dict[str, Tensor]:
            tensors = {name: zeros(P) for name in ("weights", "first", "second")}
            tensors["count"] = zeros()
            if len(self._parts) > 1:
                tensors["encoder_count"] = zeros()
            if self.plan.precision == "fp16":
                tensors |= {"scale": zeros(), "since_growth": zeros(dtype=torch.int32)}
            return tensors

        self.live, self.good, self.best = moving(), moving(), zeros(P)
        self.settings = {
            **{name: zeros() for name in ("dropout", "decay", "clip", "momentum")},
            **{name: zeros(dtype=torch.int64) for name in ("seed", "optimizer")},
        }
        self.buffers = {
            "rows": zeros(capacity.steps, capacity.passes, capacity.batch, dtype=torch.int64),
            "shares": zeros(capacity.steps, capacity.passes, capacity.batch),
            "rates": zeros(capacity.steps),
            "losses": zeros(capacity.steps),
            "cursor": zeros(dtype=torch.int64),
            "before": zeros(dtype=torch.int64),
            "active": zeros(dtype=torch.bool),
            "frozen": zeros(dtype=torch.bool),
            "val_rows": zeros(capacity.val_steps, capacity.chunk, dtype=torch.int64),
            "val_shares": zeros(capacity.val_steps, capacity.chunk),
            "val_losses": zeros(capacity.val_steps),
        }
        self._val_cursor = torch.zeros(1, dtype=torch.int64, device=device)
        self._index = torch.arange(K, device=device)
        self._ones = torch.ones(K, device=device)

    @property
    def num_places(self) -> int:
        return len(self.lanes)

    @property
    def losses(self) -> Tensor:
        return self.buffers["losses"]

    @property
    def positions(self) -> Tensor | None:
        return self.buffers["cursor"] if "scale" in self.live else None

    def state(self) -> dict[str, Tensor]:
        rows = {"live": self.live, "good": self.good}
        tensors = {f"{kind}.{name}": t for kind, ts in rows.items() for name, t in ts.items()}
        return tensors | {"best": self.best, "losses": self.buffers["losses"]}

    def tensors(self) -> dict[str, Tensor]:
        """Return everything that a lane consists of, by name."""
        return {**self.state(), **self.settings, **self.buffers}

    def put(self, place: int, lane: Lane) -> None:
        check_capacity(lane, self.capacity)
        if place in self._used:
            self.leave(place)
            for tensor in self.tensors().values():
                tensor[place].zero_()
        self._used.add(place)
        self.lanes[place] = lane
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
        return self._lane(place).build_sampler().num_steps

    def _lane(self, place: int) -> Lane:
        lane = self.lanes[place]
        assert lane is not None
        return lane

    def prepare(self, place: int, epoch: EpochStart) -> bool:
        return self._epochs.prepare(place, self._lane(place), epoch)

    def begin(self, epochs: Mapping[int, EpochStart]) -> None:
        places, device = list(epochs), self.plan.device
        layouts = [self._epochs.take(place, self._lane(place), epochs[place]) for place in places]
        rates = [epochs[k].rate * one.rates for k, one in zip(places, layouts, strict=True)]
        values = {
            "rows": torch.stack([one.rows.to(device, non_blocking=True) for one in layouts]),
            "shares": torch.stack([one.shares.to(device, non_blocking=True) for one in layouts]),
            "rates": torch.stack(rates).float(),
            "cursor": torch.tensor([epochs[place].step for place in places]),
            "before": torch.tensor([epochs[place].steps_before for place in places]),
            "active": torch.ones(len(places), dtype=torch.bool),
            "frozen": torch.tensor(
                [optim.is_frozen(self._lane(k).config.train, epochs[k].number) for k in places]
            ),
        }
        index = self._at(places)
        for name, value in values.items():
            self.buffers[name].index_copy_(0, index, value.to(device))
        _copy(self.live, self.good, self._at([k for k in places if not epochs[k].step]))
        self._running |= set(places)
        self._passes.select(self._running)

    def update_rates(self, epochs: Mapping[int, EpochStart]) -> None:
        rates = [
            one.rate * self._epochs.compute_rates(self._lane(place), one)
            for place, one in epochs.items()
        ]
        device = self.plan.device
        index = step.send(torch.tensor(list(epochs)), device)
        self.buffers["rates"].index_copy_(0, index, step.send(torch.stack(rates).float(), device))

    def load_best(self, place: int) -> None:
        self.live["weights"][place].copy_(self.best[place])
        for name in ("first", "second", "count", "encoder_count"):
            if name in self.live:
                self.live[name][place].zero_()

    def _at(self, places: Sequence[int]) -> Tensor:
        return torch.tensor(places, dtype=torch.int64, device=self.plan.device)

    def freeze(self, place: int) -> None:
        """Stop a lane at once; it keeps its rows."""
        self.buffers["active"][place] = False
        self.buffers["cursor"][place] = 0
        self._running -= {place}
        self._passes.select(self._running)

    def leave(self, place: int) -> None:
        self.freeze(place)
        self._epochs.drop(place)
        self.lanes[place] = None

    def go_back(self, place: int) -> None:
        _copy(self.good, self.live, self._at([place]))

    def keep_best(self, places: Sequence[int]) -> None:
        _copy({"": self.live["weights"]}, {"": self.best}, self._at(places))

    def weights(self, place: int, *, best: bool = False) -> dict[str, Tensor]:
        """Return a lane's weights by the model's own names."""
        rows = self.best if best else self.live["weights"]
        return self.best_weights({"best": rows[place]}, self._lane(place))

    def best_weights(self, rows: Mapping[str, Tensor], lane: Lane) -> dict[str, Tensor]:
        row, model = rows["best"].to(self.plan.device), self.capacity.model
        return read_weights(row, self._layout, lane, model, self.signature)

    def narrow_rows(self, rows: Mapping[str, Tensor], lane: Lane) -> dict[str, Tensor]:
        """Return the rows of a lane that has ended as they are in a pack of its own width."""
        return narrow_rows(rows, self._layout, lane, self.capacity.model, self.signature)

    def restore(self, place: int, rows: Mapping[str, Tensor]) -> None:
        for name, tensor in self.state().items():
            if name in rows:
                tensor[place].copy_(rows[name])

    def describe(self) -> dict[str, Any]:
        return describe_capacity(self.capacity)

    def compact(self, places: Sequence[int]) -> Pack:
        data = self.signature, self.series
        smaller = Pack(len(places), self.capacity, *data, self.plan, self.mode)
        index, mine = self._at(places), self.tensors()
        for name, tensor in smaller.tensors().items():
            tensor.copy_(mine[name].index_select(0, index))
        smaller.lanes = [self.lanes[place] for place in places]
        smaller._used = set(range(len(places)))
        smaller._running = {new for new, old in enumerate(places) if old in self._running}
        smaller._passes.select(smaller._running)
        self.close()
        return smaller

    def leave_low_precision(self) -> bool:
        return False  # of one lane alone: the others would be other numbers

    def flush(self) -> None:
        """Nothing is put off: a graph holds one step."""

    def kernels(self) -> list[str]:
        if isinstance(self.advance, CapturedProgram):
            return self.advance.kernels()
        return self.plan.native_kernels

    def score(
        self, places: Sequence[int], should_stop: Callable[[], bool] = lambda: False
    ) -> list[float] | None:
        counts = [len(self._lane(place).starts["val"]) for place in places]
        self._val_cursor.zero_()
        self._passes.select(set(places))
        for _ in range(-(-max(counts) // self.capacity.chunk)):
            if stopped := should_stop():
                break
            self.validate_batch()
        self._passes.select(self._running)
        sums = [] if stopped else self.buffers["val_losses"].double().sum(dim=1).tolist()
        self.buffers["val_losses"].zero_()
        return None if stopped else [sums[k] / n for k, n in zip(places, counts, strict=True)]

    def failures(self) -> dict[str, str]:
        named = {"training step": self.advance, "validation step": self.validate_batch}
        captured = {k: one for k, one in named.items() if isinstance(one, CapturedProgram)}
        return {name: one.failure for name, one in captured.items() if one.failure}

    def capture_s(self) -> CaptureSeconds:
        steps = self.advance, self.validate_batch
        spent = (one.setup_s if isinstance(one, CapturedProgram) else 0.0 for one in steps)
        return CaptureSeconds(*spent)

    def close(self) -> None:
        """Release threads, graphs and programs: bound methods would keep the pack alive."""
        for program in (self.advance, self.validate_batch):
            if isinstance(program, CapturedProgram):
                program.close()
        if not self.plan.capture:
            self.advance = self.validate_batch = raise_closed
        self._passes.close()
        self._epochs.close()

    def _advance(self) -> None:
        """Run a step of every active lane: gather, forward, loss, backward, clip, update."""
        live, tape, settings = self.live, self.buffers, self.settings
        cursor, scale = tape["cursor"], live.get("scale")
        has_noise = self.capacity.drops or objective.uses_noise(self.capacity.config)
        noise = Noise(settings["seed"], settings["dropout"]) if has_noise else None
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
        updates, counts = self._prepare_updates(grads, divisor, moves)
        # from here on nothing large is allocated: the lanes change, or stay as they are
        for name, count in counts.items():
            live[name].copy_(count)
        for update in updates:
            update()
        if scale is not None and overflow is not None:
            flat_optim.update_loss_scale(scale, live["since_growth"], overflow, tape["active"])
        tape["losses"].scatter_(1, cursor[:, None], loss[:, None])
        cursor.add_(moves)  # the next step repeats what overflowed

    def _prepare_updates(
        self, grads: Tensor, divisor: Tensor, moves: Tensor
    ) -> tuple[list[Program], dict[str, Tensor]]:
        """Prepare the updates of each slice of weights by each optimizer, and the step counts."""
        live, tape, settings = self.live, self.buffers, self.settings
        counts, thawed = {"count": live["count"] + moves}, moves
        if len(self._parts) > 1:
            thawed = moves & ~tape["frozen"]
            counts["encoder_count"] = live["encoder_count"] + thawed
        lr = tape["rates"].gather(1, tape["cursor"][:, None])[:, 0]
        optimizers = self.capacity.optimizers
        updates: list[Program] = []
        for part in self._parts:
            moving, count = moves, counts["count"]
            if part.starts_frozen:
                moving, count = thawed, counts["encoder_count"]
            whole = live["weights"], grads, live["first"], live["second"]
            tensors = flat_optim.LaneTensors(*(one[:, part.columns] for one in whole))
            rate = lr if part.lr_factor == 1.0 else lr * part.lr_factor
            fixed = rate, settings["decay"], settings["momentum"], count, divisor
            for code, optimizer in enumerate(optimizers):
                mine = moving
                if len(optimizers) > 1:
                    mine = moving & (settings["optimizer"] == code)
                update_settings = flat_optim.UpdateSettings(*fixed, mine)
                updates.append(flat_optim.prepare_update(optimizer, tensors, update_settings))
        return updates, counts

    @torch.no_grad()
    def _check(self) -> None:
        """Run a validation batch of every lane; the summed losses go into the buffers."""
        rows = self.buffers["val_rows"].index_select(1, self._val_cursor)[:, 0]
        shares = self.buffers["val_shares"].index_select(1, self._val_cursor)[:, 0]
        loss = self._passes.validate(rows, shares)
        self.buffers["val_losses"].index_copy_(1, self._val_cursor, loss[:, None])
        self._val_cursor.add_(1)


def describe_capacity(capacity: PackCapacity) -> dict[str, Any]:
    """Return what a checkpoint contains of a pack."""
    values = capacity._asdict()
    values |= {name: values[name].model_dump_json() for name in ("config", "model")}
    return {"capacity": values}


def parse_capacity(metadata: Mapping[str, Any]) -> PackCapacity:
    """Read the capacity of a checkpoint's pack."""
    values = metadata["capacity"]
    parsed = {
        "config": Config.model_validate_json(values["config"]),
        "model": Model.model_validate_json(values["model"]),
        "optimizers": tuple(values["optimizers"]),
    }
    return PackCapacity(**(values | parsed))


def _copy(source: Mapping[str, Tensor], to: Mapping[str, Tensor], index: Tensor) -> None:
    """Copy some rows of every tensor."""
    for name, tensor in source.items():
        to[name].index_copy_(0, index, tensor.index_select(0, index))
