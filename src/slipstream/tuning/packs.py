"""Trains candidates as lanes, pack after pack, and keeps the packs full.

Who wants candidates trained is a `Director`: it hands them out one by one, is told of every
validation and every end, and may end one early. Those that share a program wait for each other;
when a lane of a pack ends, the next one takes its place, with nothing captured anew.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Protocol

from slipstream import config as configs
from slipstream import runs
from slipstream.config import Config
from slipstream.engine import checkpoint, lanes, lanestate, pack, packing, recover
from slipstream.engine.lane import Lane, Room, refuse_larger
from slipstream.engine.lanes import Guide
from slipstream.engine.lanestate import LaneFit
from slipstream.errors import Interrupted, UserError
from slipstream.runs import Event, Run
from slipstream.tuning import groups
from slipstream.tuning.candidates import Candidate, Outcome, TrialLane
from slipstream.tuning.groups import Group, Shape
from slipstream.tuning.shelf import Ready, Shelf

SETTLED = "its result stood already"


class Director(Protocol):
    """Who decides what is trained."""

    def next(self) -> Candidate | None:
        """Another one, if there is any."""

    def again(self, number: int) -> Candidate:
        """One that was handed out before, by its number; `settled` where its result stands."""

    def validated(self, one: Candidate, epoch: int, loss: float) -> str:
        """Its folds' mean validation loss after an epoch; why it has to end, if it has to."""

    def lane_ended(self, one: Candidate, fold: int) -> None:
        """One of its folds is done."""

    def ended(self, one: Candidate) -> None:
        """All of them are."""

    def failed(self, one: Candidate, why: str) -> None:
        """It could not be trained."""

    def extremes(self, config: Config) -> Sequence[Config]:
        """Variants that a pack of such ones needs room for, because they may come later."""


class Trainer:
    """Packs of candidates, one after another, on one device."""

    def __init__(self, run: Run, shelf: Shelf, director: Director, *, parallel: int) -> None:
        self.run, self.shelf, self.director = run, shelf, director
        self.parallel = parallel
        self.waiting: list[Candidate] = []
        self.running: list[Candidate] = []
        self.most: dict[Shape, int] = {}
        """Places that fit into memory, where all did not"""
        self.packs = 0

    @property
    def folder(self) -> Path:
        return self.run.folder / "packs"

    def train(self) -> None:
        """Until the director has nothing more."""
        self._ask()
        while self.waiting:
            ready = self.shelf.get(self.waiting[0].config)
            device = ready.series.values.device.type
            windows = len(ready.folds[-1]["train"])
            group = groups.grouped(self.waiting, device, windows)[0]
            self.waiting = [one for one in self.waiting if one not in group.members]
            self._train(group)
            self._ask()

    def resume(self) -> None:
        """Go on with the pack that was in training, then with the rest."""
        for folder in sorted(self.folder.glob("*")):
            self.packs = max(self.packs, int(folder.name))
            run = Run(folder, self.run.watch)
            if checkpoint.numbered(run):
                _Packed(self, run).resume()
            runs.remove(folder)
        self.train()

    def _ask(self) -> None:
        while len(self.waiting) + len(self.running) < self.parallel:
            one = self.director.next()
            if one is None:
                return
            self.waiting.append(one)

    def another(self, fits: Callable[[Candidate], bool]) -> Candidate | None:
        """Of those that wait, else of new ones, the first that fits; other new ones wait."""
        for one in self.waiting:
            if fits(one):
                self.waiting.remove(one)
                return one
        while len(self.waiting) + len(self.running) < self.parallel:
            new = self.director.next()
            if new is None or fits(new):
                return new
            self.waiting.append(new)
        return None

    def _train(self, group: Group) -> None:
        members = group.members
        while members:
            self.packs += 1
            folder = self.folder / f"{self.packs:04d}"
            folder.mkdir(parents=True)
            packed = _Packed(self, Run(folder, self.run.watch))
            try:
                packed.train(group.shape, members)
                members = []
            except RuntimeError as error:
                if not recover.is_out_of_memory(error):
                    raise
                why = str(error).split("\n", 1)[0]
                members = list(self.running)
            if members:  # past the except block, whose traceback would pin the memory
                members = self._halve(group.shape, members, why)
            runs.remove(folder)

    def _halve(self, shape: Shape, members: list[Candidate], why: str) -> list[Candidate]:
        """Try them again from their start, half as many at a time."""
        recover.free_memory()
        self.running.clear()
        if self.most.get(shape) == 1:
            for one in members:
                self.director.failed(one, f"out of memory: {why}")
            return []
        self.most[shape] = max(1, min(self.most.get(shape, packing.MOST_PLACES), len(members)) // 2)
        remedy = f"{self.most[shape]} lanes at a time, from the start"
        self.run.append("recovery", what="out of memory", remedy=remedy, why=why)
        return [replace(one, seen={}, outcomes={}, weights={}) for one in members]


class _Packed:
    """One pack in training."""

    def __init__(self, trainer: Trainer, run: Run) -> None:
        self.trainer, self.run = trainer, replace(run, watch=self._watch)
        self.shapes: list[Shape] = []
        """Of the pack, then those of its members: what may join them"""
        self.room: Room | None = None
        self.ready: Ready | None = None
        self.queue: deque[TrialLane] = deque()
        self.came: list[tuple[int, int]] = []
        """Whose each lane is, in the order that they came in: the candidate's number, the fold"""
        self.stopped_by = 0
        """The number of the signal that did"""

    def train(self, shape: Shape, members: Sequence[Candidate]) -> None:
        trainer = self.trainer
        ready = self.ready = trainer.shelf.get(members[0].config)
        device = ready.series.values.device.type
        self.shapes = [shape, *{groups.shape_of(one.config, device) for one in members}]
        trainer.running += [one for one in members if one not in trainer.running]
        every = [lane for one in members for lane in _lanes(one, ready)]
        places = min(len(every), trainer.most.get(shape, packing.MOST_PLACES))
        self.queue.extend(every[places:])
        widest = _widened(members[0].config, shape)
        roomy = [widest, *trainer.director.extremes(widest)]
        plan, mode = ready.plan(widest)
        with plan.flags():
            made = pack.make(
                every[:places],
                ready.dataset.signature,
                ready.series,
                plan,
                mode=mode,
                room=[
                    *every,
                    *(Lane(config, starts) for config in roomy for starts in ready.folds),
                ],
            )
            self.room = made.room
            self.came = [(lane.candidate.number, lane.fold) for lane in every[:places]]
            trainer.run.append(
                "pack",
                trials=[one.number for one in members],
                places=places,
                mode=mode,
                widths=shape.widths,
                batch=shape.batch,
                plan=plan.to_dict(),
            )
            lanes.fit(made, self.run, guide=self._guide(), facts=self._facts)
        self._stop_if_asked()

    def resume(self) -> None:
        trainer = self.trainer
        saved, wrong = checkpoint.newest(self.run)
        for what in wrong:
            trainer.run.append("fallback", what="an older checkpoint of the pack", why=what)
        facts = saved.facts["search"]
        self.shapes = [Shape(name, batch, tuple(widths)) for name, batch, widths in facts["shapes"]]
        self.came = [(number, fold) for number, fold in facts["came"]]
        self.room = lanestate.room_of(saved.facts)
        training = {told["number"] for told in saved.facts["lanes"]}
        waiting = [(number, fold) for number, fold in facts["queue"]]
        owners = {self.came[at][0] for at in training} | {number for number, _ in waiting}
        found = {number: self._again(number, facts) for number in sorted(owners)}
        if not training:
            return
        trainer.waiting = [one for one in trainer.waiting if one.number not in found]
        trainer.running += found.values()
        first = next(iter(found.values())).config
        ready = self.ready = trainer.shelf.get(first)
        of = {number: _lanes(one, ready) for number, one in found.items()}
        back = {at: of[self.came[at][0]][self.came[at][1]] for at in training}
        self.queue.extend(of[number][fold] for number, fold in waiting)
        plan, _ = ready.plan(_widened(first, self.shapes[0]))
        with plan.flags():
            lanes.resume(
                saved,
                back,
                ready.dataset.signature,
                ready.series,
                self.run,
                guide=self._guide(),
                facts=self._facts,
            )
        self._stop_if_asked()

    def _again(self, number: int, facts: dict[str, Any]) -> Candidate:
        one = self.trainer.director.again(number)
        ended = facts["outcomes"].get(str(number), {})
        one.outcomes = {int(fold): Outcome(**told) for fold, told in ended.items()}
        return one

    def _guide(self) -> Guide:
        return Guide(self._refill, self._verdict, forget=True)

    def _verdict(self, fit: LaneFit, loss: float) -> str:
        one, fold = _owner(fit)
        if one.settled:
            return SETTLED
        epoch = fit.progress.epochs + 1
        mean = one.note(epoch, fold, loss)
        return "" if mean is None else self.trainer.director.validated(one, epoch, mean)

    def _refill(self, fit: LaneFit) -> Lane | None:
        one, fold = _owner(fit)
        trainer = self.trainer
        last = one.end(fold, fit)
        if not one.settled:
            trainer.director.lane_ended(one, fold)
        if last:
            trainer.running.remove(one)
            if not one.settled:
                trainer.director.ended(one)
            one.weights = {}
        if not self.queue:
            self._queue_another()
        if not self.queue:
            return None
        lane = self.queue.popleft()
        self.came.append((lane.candidate.number, lane.fold))
        return lane

    def _queue_another(self) -> None:
        ready = self.ready
        assert ready is not None
        found = self.trainer.another(self._fits)
        if found is not None:
            self.trainer.running.append(found)
            self.queue.extend(_lanes(found, ready))

    def _fits(self, one: Candidate) -> bool:
        """Whether it may join; no captured program changes for it."""
        assert self.ready is not None
        assert self.room is not None
        device = self.ready.series.values.device.type
        if groups.shape_of(one.config, device) not in self.shapes:
            return False
        try:
            for lane in _lanes(one, self.ready):
                refuse_larger(lane, self.room)
        except UserError:
            return False
        return True

    def _watch(self, event: Event) -> None:
        """Show what happens in the pack, with the candidates' numbers."""
        if event["event"] == "trained":
            self.stopped_by = event["signal_number"]
        if "lane" in event and event["lane"] < len(self.came):
            number, fold = self.came[event["lane"]]
            event = event | {"trial": number, "fold": fold}
        self.trainer.run.show(event)

    def _stop_if_asked(self) -> None:
        if self.stopped_by:
            raise Interrupted("stopped", signal_number=self.stopped_by)

    def _facts(self) -> dict[str, Any]:
        """What a checkpoint tells of the search."""
        under_way = self.trainer.running
        return {
            "search": {
                "shapes": list(self.shapes),
                "came": list(self.came),
                "queue": [(lane.candidate.number, lane.fold) for lane in self.queue],
                "outcomes": {
                    str(one.number): {fold: asdict(end) for fold, end in one.outcomes.items()}
                    for one in under_way
                },
            }
        }


def _owner(fit: LaneFit) -> tuple[Candidate, int]:
    lane = fit.lane
    assert isinstance(lane, TrialLane)
    return lane.candidate, lane.fold


def _lanes(one: Candidate, ready: Ready) -> list[TrialLane]:
    return [TrialLane(one.config, starts, one, fold) for fold, starts in enumerate(ready.folds)]


def _widened(config: Config, shape: Shape) -> Config:
    """The same settings, as wide as the pack."""
    if config.model.kind in ("transformer", "linear"):
        return config
    return configs.changed(config, {"model.hidden": shape.widths, "train.batch": shape.batch})
