"""A pack: K models of one architecture, the lanes, trained by one program.

A lane has its own weights, seed, learning rate, decay, dropout, clip, width, windows and end, and
becomes what its config would give alone. All of it is rows of tensors that keep their place, so a
captured step goes on when lanes end and others take their places.

Shapes: K lanes, P weights of one, S steps of an epoch, A passes per step, B windows per pass,
V validation batches of C windows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from slipstream import config as configs
from slipstream.config import Config, Model, Signature
from slipstream.data import windows
from slipstream.data.windows import Series
from slipstream.engine import flat, optim, step, widths
from slipstream.engine.capture import Captured
from slipstream.engine.homes import Draw, Program, Share
from slipstream.engine.plan import RECURRENT, Plan
from slipstream.errors import UserError
from slipstream.models import Noise, build, drops, use
from slipstream.objectives import window_losses

Mode = Literal["together", "branches"]
MAY_DIFFER = {
    *("name", "out", "seed", "data.split", "model.hidden", "model.dropout"),
    *("train.optimizer", "train.lr", "train.momentum", "train.weight_decay", "train.schedule"),
    *("train.warmup_epochs", "train.lr_min", "train.step_epochs", "train.step_factor"),
    *("train.plateau_patience", "train.plateau_factor", "train.restart_epochs"),
    *("train.restart_growth", "train.batch", "train.epochs", "train.clip", "train.patience"),
    *("train.min_delta", "train.validate_every", "train.minutes"),
}
"""Settings that lanes of one pack may have each for itself"""
MOST_STREAMS = 16
ALIGNED = 4
"""Every weight begins at a multiple of so many numbers, as vector loads want it"""


@dataclass(frozen=True)
class Lane:
    """One model to train: what is asked of it, and its windows' first rows, train and val."""

    config: Config
    starts: dict[str, Tensor]

    def draw(self) -> Draw:
        batch = self.config.train.batch
        assert batch != "auto"
        effective = batch * self.config.train.accumulate
        return Draw(self.starts["train"], effective, batch, self.config.seed)


class Room(NamedTuple):
    """What the places of a pack can hold."""

    config: Config
    """Of one lane: what all of them share"""
    model: Model
    """The widest"""
    steps: int
    passes: int
    batch: int
    val_steps: int
    chunk: int
    optimizers: tuple[str, ...]
    drops: bool


def refuse_unlike(lanes: Sequence[Lane]) -> None:
    """A UserError names the settings that keep lanes from being one program."""
    first = lanes[0].config
    if first.train.batch == "auto":
        raise UserError('train.batch is "auto"; lanes of a pack need a number')
    for lane in lanes[1:]:
        found = configs.differences(first, lane.config)
        unlike = [name for name in found if name not in MAY_DIFFER]
        if "model.hidden" in found and first.model.kind == "transformer":
            unlike.append("model.hidden (of a transformer)")
        if unlike:
            raise UserError(
                f"models trained together cannot differ in {', '.join(unlike)}; train them in "
                "packs of their own"
            )


def room_for(lanes: Sequence[Lane], *, places: int) -> Room:
    """The least that holds each of these."""
    refuse_unlike(lanes)
    draws = [lane.draw() for lane in lanes]
    batch = max(draw.batch for draw in draws)
    most = max(len(lane.starts["val"]) for lane in lanes)
    chunk = min(max(batch, step.CHUNK // places), most)
    return Room(
        config=lanes[0].config,
        model=widths.widest([lane.config.model for lane in lanes]),
        steps=max(draw.num_steps for draw in draws),
        passes=lanes[0].config.train.accumulate,
        batch=batch,
        val_steps=-(-most // chunk),
        chunk=chunk,
        optimizers=tuple(sorted({lane.config.train.optimizer for lane in lanes})),
        drops=any(drops(lane.config.model) for lane in lanes),
    )


def make(
    lanes: Sequence[Lane],
    signature: Signature,
    series: Series,
    plan: Plan,
    *,
    mode: Mode = "together",
    room: Sequence[Lane] = (),
) -> Pack:
    """A pack of these lanes, on the device that holds the series; `room` are further ones that may
    take a place later."""
    held = room_for([*lanes, *room], places=len(lanes))
    pack = Pack(len(lanes), held, signature, series, plan, mode)
    for place, lane in enumerate(lanes):
        pack.put(place, lane)
    return pack


class Pack:
    """The lanes' tensors, and the programs over them."""

    def __init__(
        self,
        places: int,
        room: Room,
        signature: Signature,
        series: Series,
        plan: Plan,
        mode: Mode,
    ) -> None:
        self.room, self.signature, self.series = room, signature, series
        self.plan, self.mode = plan, mode
        self.lanes: list[Lane | None] = [None] * places
        self._at_work: set[int] = set()
        """Places that a program has to serve, where it can choose"""
        self._template = self._model()
        self._layout = _layout(self._template)
        self._allocate(places)
        self._workers: ThreadPoolExecutor | None = None
        self._models: list[nn.Module] = []
        if mode == "branches":
            self._models = [self._branch_model(place) for place in range(places)]
            if plan.device.type == "cuda":
                count = min(places, MOST_STREAMS)
                self._streams = [torch.cuda.Stream(plan.device) for _ in range(count)]
            elif plan.threads > 1:
                self._workers = ThreadPoolExecutor(
                    plan.threads, initializer=torch.set_num_threads, initargs=(1,)
                )
        elif room.model.kind in RECURRENT:
            self._template.core.own = True  # type: ignore[union-attr]
        self.advance: Program = self._advance
        self.check: Program = self._check
        if plan.capture:
            self.advance = Captured(self._advance, plan.device)
            self.check = Captured(self._check, plan.device)

    def _model(self) -> nn.Module:
        with torch.random.fork_rng([]):
            return build(self.room.model, self.signature).to(self.plan.device)

    def _branch_model(self, place: int) -> nn.Module:
        """A module whose weights are a row of the pack's."""
        model, plan = self._model(), self.plan
        rows = _views(self.live["weights"][place : place + 1], self._layout)
        for name, weight in model.named_parameters():
            weight.data = rows[name][0]
        use(model, algorithms=plan.cudnn, recompute=plan.recompute, compiled=plan.compile)
        return model

    def _allocate(self, K: int) -> None:
        room, device = self.room, self.plan.device
        P = sum(entry.size + entry.padding for entry in self._layout)

        def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(K, *shape, dtype=dtype, device=device)

        def moving() -> dict[str, Tensor]:
            found = {name: zeros(P) for name in ("weights", "first", "second")}
            found["count"] = zeros()
            if self.plan.precision == "fp16":
                found |= {"scale": zeros(), "since_growth": zeros(dtype=torch.int32)}
            return found

        self.live, self.good, self.best = moving(), moving(), zeros(P)
        self.settings = {
            "seed": zeros(dtype=torch.int64),
            "dropout": zeros(),
            "decay": zeros(),
            "clip": zeros(),
            "momentum": zeros(),
            "optimizer": zeros(dtype=torch.int64),
        }
        self.tape = {
            "rows": zeros(room.steps, room.passes, room.batch, dtype=torch.int64),
            "shares": zeros(room.steps, room.passes, room.batch),
            "rates": zeros(room.steps),
            "losses": zeros(room.steps),
            "cursor": zeros(dtype=torch.int64),
            "before": zeros(dtype=torch.int64),
            "active": zeros(dtype=torch.bool),
            "val_rows": zeros(room.val_steps, room.chunk, dtype=torch.int64),
            "val_shares": zeros(room.val_steps, room.chunk),
            "val_losses": zeros(room.val_steps),
        }
        self._val_cursor = torch.zeros(1, dtype=torch.int64, device=device)
        self._index = torch.arange(K, device=device)
        self._ones = torch.ones(K, device=device)
        self._loss, self._grads = zeros(), zeros(P)
        self._zeros = torch.zeros(ALIGNED, device=device)

    def changing(self) -> dict[str, Tensor]:
        """What training changes, by name; a lane's place comes first."""
        return {
            **{f"live.{name}": tensor for name, tensor in self.live.items()},
            **{f"good.{name}": tensor for name, tensor in self.good.items()},
            "best": self.best,
            "losses": self.tape["losses"],
        }

    def tensors(self) -> dict[str, Tensor]:
        """All that a lane is."""
        return {**self.changing(), **self.settings, **self.tape}

    def put(self, place: int, lane: Lane) -> None:
        """Give a place to a new lane, as it would begin alone; its epoch is still to `begin`."""
        refuse_unlike([Lane(self.room.config, lane.starts), lane])
        self._refuse_larger(lane, room_for([lane], places=len(self.lanes)))
        self.lanes[place] = lane
        for tensor in self.tensors().values():
            tensor[place].zero_()
        train, model = lane.config.train, lane.config.model
        with torch.random.fork_rng([]):
            torch.manual_seed(lane.config.seed)
            alone = dict(build(model, self.signature).named_parameters())
        padded = widths.pad(alone, model, self.room.model, self._tokens)
        views = _views(self.live["weights"], self._layout)
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
            "optimizer": self.room.optimizers.index(train.optimizer),
        }
        for name, value in values.items():
            self.settings[name][place] = value
        chunk = self.room.chunk
        rows, shares = Draw(lane.starts["val"], chunk, chunk, None).order(0)
        self.tape["val_rows"][place, : len(rows)] = rows[:, 0].to(self.plan.device)
        self.tape["val_shares"][place, : len(rows)] = shares[:, 0].to(self.plan.device)

    def _refuse_larger(self, lane: Lane, asked: Room) -> None:
        room = self.room
        tight = [
            name
            for name, fits in {
                "model.hidden": widths.widest([room.model, asked.model]).sizes == room.model.sizes,
                "train.batch or the training windows": asked.steps <= room.steps
                and asked.batch <= room.batch,
                "the validation windows": len(lane.starts["val"]) <= room.val_steps * room.chunk,
                "train.optimizer": lane.config.train.optimizer in room.optimizers,
                "model.dropout": room.drops or not drops(lane.config.model),
            }.items()
            if not fits
        ]
        if tight:
            raise UserError(
                f"the pack has no room for a lane's {', '.join(tight)}; make it with such a lane "
                "among `room`"
            )

    @property
    def _tokens(self) -> int:
        return self.signature.context // self.room.model.patch

    def num_steps(self, place: int) -> int:
        lane = self.lanes[place]
        assert lane is not None
        return lane.draw().num_steps

    def begin(
        self, place: int, epoch: int, *, rate: float = 1.0, before: int = 0, at: int = 0
    ) -> None:
        """Lay out a lane's epoch and set it going; `before` steps lie behind it. From its first
        step on, this is where `go_back` leads."""
        lane, tape = self.lanes[place], self.tape
        assert lane is not None
        draw = lane.draw()
        rows, shares = draw.order(epoch)
        tape["rows"][place].zero_()
        tape["shares"][place].zero_()
        tape["rows"][place, : len(rows), :, : draw.batch] = rows.to(self.plan.device)
        tape["shares"][place, : len(rows), :, : draw.batch] = shares.to(self.plan.device)
        rates = torch.tensor(optim.rates(lane.config.train, epoch, len(rows)))
        tape["rates"][place, : len(rows)] = (rate * rates).to(self.plan.device)
        tape["cursor"][place], tape["before"][place] = at, before
        tape["active"][place] = True
        self._at_work.add(place)
        if not at:
            _copy_rows(self.live, self.good, place)

    def freeze(self, place: int) -> None:
        """Stop a lane at once; it keeps what it has."""
        self.tape["active"][place] = False
        self._at_work.discard(place)
        self.tape["cursor"][place] = 0

    def leave(self, place: int) -> None:
        """Empty a place."""
        self.freeze(place)
        self.lanes[place] = None

    def go_back(self, place: int) -> None:
        """Put a lane back to where its epoch began."""
        _copy_rows(self.good, self.live, place)

    def keep_best(self, place: int) -> None:
        self.best[place] = self.live["weights"][place]

    def weights(self, place: int, *, best: bool = False) -> dict[str, Tensor]:
        """A lane's weights, as the model by itself has them."""
        lane = self.lanes[place]
        assert lane is not None
        rows = self.best if best else self.live["weights"]
        views = _views(rows[place : place + 1], self._layout)
        own = {name: view[0].detach() for name, view in views.items()}
        return widths.cut(own, lane.config.model, self.room.model, self._tokens)

    def compacted(self, keep: Sequence[int]) -> Pack:
        """A smaller pack of some places, each as it stands. This one is closed."""
        smaller = Pack(len(keep), self.room, self.signature, self.series, self.plan, self.mode)
        index = torch.tensor(keep, device=self.plan.device)
        mine = self.tensors()
        for name, tensor in smaller.tensors().items():
            tensor.copy_(mine[name].index_select(0, index))
        smaller.lanes = [self.lanes[place] for place in keep]
        smaller._at_work = {new for new, old in enumerate(keep) if old in self._at_work}
        self.close()
        return smaller

    def score(self, places: Sequence[int]) -> list[float]:
        """The validation losses of some lanes; the host waits for them."""
        counts = []
        for place in places:
            lane = self.lanes[place]
            assert lane is not None
            counts.append(len(lane.starts["val"]))
        self._val_cursor.zero_()
        training, self._at_work = self._at_work, set(places)
        for _ in range(-(-max(counts) // self.room.chunk)):
            self.check()
        self._at_work = training
        sums = self.tape["val_losses"].double().sum(dim=1).tolist()
        self.tape["val_losses"].zero_()
        return [sums[place] / count for place, count in zip(places, counts, strict=True)]

    def failures(self) -> dict[str, str]:
        """Programs that could not be captured, and why."""
        named = {"training step": self.advance, "validation step": self.check}
        return {
            name: program.failure
            for name, program in named.items()
            if isinstance(program, Captured) and program.failure
        }

    def close(self) -> None:
        """Let go of threads and graphs."""
        for program in (self.advance, self.check):
            if isinstance(program, Captured):
                program.close()
        if self._workers:
            self._workers.shutdown()

    def _advance(self) -> None:
        """One step of every active lane: gather, forward, loss, backward, clip, update."""
        live, tape, settings = self.live, self.tape, self.settings
        rows = tape["rows"][self._index, tape["cursor"]]
        shares = tape["shares"][self._index, tape["cursor"]]
        noise = None
        if self.room.drops:
            noise = Noise(settings["seed"], settings["dropout"])
        now, scale = tape["before"] + tape["cursor"], live.get("scale")
        run = self._together if self.mode == "together" else self._branches
        loss, grads = run(rows, shares, noise, now, self._ones if scale is None else scale)
        with torch.no_grad():
            divisor, overflow = flat.divide(grads, settings["clip"], scale)
            moves = tape["active"] if overflow is None else tape["active"] & ~overflow
            live["count"].add_(moves)
            lr = tape["rates"].gather(1, tape["cursor"][:, None])[:, 0]
            for code, optimizer in enumerate(self.room.optimizers):
                alone = len(self.room.optimizers) == 1
                flat.flat_update(
                    optimizer,
                    live["weights"],
                    grads,
                    live["first"],
                    live["second"],
                    lr=lr,
                    decay=settings["decay"],
                    momentum=settings["momentum"],
                    count=live["count"],
                    divisor=divisor,
                    moves=moves if alone else moves & (settings["optimizer"] == code),
                )
            if scale is not None and overflow is not None:
                flat.rescale(scale, live["since_growth"], overflow, tape["active"])
            tape["losses"].scatter_(1, tape["cursor"][:, None], loss[:, None])
            tape["cursor"].add_(tape["active"])

    @torch.no_grad()
    def _check(self) -> None:
        """One validation batch of every lane; the summed losses go onto the tape."""
        rows = self.tape["val_rows"].index_select(1, self._val_cursor)[:, 0]
        shares = self.tape["val_shares"].index_select(1, self._val_cursor)[:, 0]
        if self.mode == "together":
            weights = _views(self.live["weights"], self._layout)
            loss = self._losses(weights, rows, shares, None)
        else:
            self._each(lambda place: self._validate_branch(place, rows, shares))
            loss = self._loss
        self.tape["val_losses"].index_copy_(1, self._val_cursor, loss[:, None])
        self._val_cursor.add_(1)

    def _together(
        self, rows: Tensor, shares: Tensor, noise: Noise | None, now: Tensor, scale: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Losses [K] and gradients [K, P] of all lanes by one program."""
        weights = self.live["weights"].detach().requires_grad_()
        total = grads = None
        for number in range(self.room.passes):
            here = noise and noise.at(now, number)
            views = _views(weights, self._layout)
            loss = self._losses(views, rows[:, number], shares[:, number], here)
            (found,) = torch.autograd.grad(loss, weights, scale)
            grads = found if grads is None else grads + found
            total = loss.detach() if total is None else total + loss.detach()
        assert total is not None
        assert grads is not None
        return total, grads

    def _losses(
        self, weights: dict[str, Tensor], rows: Tensor, shares: Tensor, noise: Noise | None
    ) -> Tensor:
        """The lanes' weighted losses, [K], of windows [K, B]."""
        K, batch = len(self.lanes), windows.gather(self.series, rows)
        one_by_one = (0, 0, None if batch.static is None else 0, None if noise is None else 0)

        def one(weights: dict[str, Tensor], *given: Tensor) -> Tensor:
            found: Tensor = functional_call(self._template, weights, given)
            return found

        def every(*given: Tensor) -> Tensor:
            found: Tensor = vmap(one, in_dims=one_by_one)(weights, *given)
            return found

        prediction = step.forward(every, batch.inputs, batch.static, noise, plan=self.plan)
        losses = window_losses(
            prediction.flatten(0, 1), batch.targets.flatten(0, 1), self.room.config.train
        )
        losses = losses.view(K, -1, self.signature.fold)
        losses = losses[..., 0] if self.signature.fold == 1 else losses.mean(dim=2)
        return (losses * shares).sum(dim=1)

    def _branches(
        self, rows: Tensor, shares: Tensor, noise: Noise | None, now: Tensor, scale: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The same, of each lane by itself."""
        self._each(lambda place: self._train_branch(place, rows, shares, noise, now, scale))
        return self._loss, self._grads

    def _each(self, work: Callable[[int], None]) -> None:
        """Do something for every place: on CUDA in parallel streams, else in the plan's threads and
        for those at work only."""
        if self.plan.device.type == "cuda":
            main = torch.cuda.current_stream(self.plan.device)
            for stream in self._streams:
                stream.wait_stream(main)
            for place in range(len(self.lanes)):  # a capture may be replayed for any of them
                with torch.cuda.stream(self._streams[place % len(self._streams)]):
                    work(place)
            for stream in self._streams:
                main.wait_stream(stream)
        elif self._workers:
            list(self._workers.map(work, sorted(self._at_work)))
        else:
            for place in sorted(self._at_work):
                work(place)

    def _train_branch(
        self,
        place: int,
        rows: Tensor,
        shares: Tensor,
        noise: Noise | None,
        now: Tensor,
        scale: Tensor,
    ) -> None:
        model = self._models[place].train()
        weights = list(model.parameters())
        total: Tensor | None = None
        sums: list[Tensor] = []
        for number in range(self.room.passes):
            here = None
            if noise is not None:
                here = Noise(noise.key[place], noise.rate[place]).at(now[place], number)
            loss = self._branch_loss(model, rows[place, number], shares[place, number], here)
            found = torch.autograd.grad(loss, weights, scale[place])
            sums = [a + b for a, b in zip(sums, found, strict=True)] if sums else list(found)
            total = loss.detach() if total is None else total + loss.detach()
        assert total is not None
        self._loss[place].copy_(total)
        torch.cat(list(self._in_a_row(sums)), out=self._grads[place])

    def _in_a_row(self, tensors: Sequence[Tensor]) -> Iterator[Tensor]:
        for tensor, entry in zip(tensors, self._layout, strict=True):
            yield tensor.reshape(-1)
            if entry.padding:
                yield self._zeros[: entry.padding]

    @torch.no_grad()
    def _validate_branch(self, place: int, rows: Tensor, shares: Tensor) -> None:
        model = self._models[place].eval()
        self._loss[place].copy_(self._branch_loss(model, rows[place], shares[place], None))

    def _branch_loss(
        self, model: nn.Module, rows: Tensor, shares: Tensor, noise: Noise | None
    ) -> Tensor:
        share = Share(windows.gather(self.series, rows), shares)
        train, fold = self.room.config.train, self.signature.fold
        return step.loss(model, share, noise, train=train, plan=self.plan, fold=fold)


class Entry(NamedTuple):
    """One weight's place among a lane's P numbers."""

    name: str
    shape: tuple[int, ...]
    size: int
    padding: int
    """Unused numbers after it"""


def _layout(model: nn.Module) -> list[Entry]:
    return [
        Entry(name, tuple(weight.shape), weight.numel(), -weight.numel() % ALIGNED)
        for name, weight in model.named_parameters()
    ]


def _views(flat_weights: Tensor, layout: Sequence[Entry]) -> dict[str, Tensor]:
    """Every weight of the lanes, [K, ...], as parts of one split, whose gradient is one tensor."""
    sizes = [size for entry in layout for size in (entry.size, entry.padding) if size]
    parts = iter(flat_weights.split(sizes, dim=1))
    found = {}
    for entry in layout:
        found[entry.name] = next(parts).view(-1, *entry.shape)
        if entry.padding:
            next(parts)
    return found


def _copy_rows(source: dict[str, Tensor], to: dict[str, Tensor], place: int) -> None:
    for name, tensor in source.items():
        to[name][place] = tensor[place]
