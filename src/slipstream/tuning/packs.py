"""Trains candidates as lanes, pack after pack, and keeps the packs full.

Who wants candidates trained is a `Director`: it hands them out one by one, is told of every
validation and every end, and may end one early. Those that share a program wait for each other;
when a lane of a pack ends, the next one takes its place, with nothing captured anew.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from slipstream import runs
from slipstream.config import Config
from slipstream.engine import checkpoint, recover
from slipstream.engine.loop import Stop, stoppable
from slipstream.errors import Interrupted
from slipstream.runs import Run
from slipstream.tuning import groups
from slipstream.tuning.candidates import Candidate
from slipstream.tuning.groups import Group, Shape
from slipstream.tuning.packed import Packed
from slipstream.tuning.shelf import Shelf

COMPANY = 4
"""Candidates of one shape that make a pack while others train"""
MOST_PACKS = {"cuda": 8, "cpu": 1}
"""Packs at a time"""
POLL_S = 2e-4
"""Between looks at whether one of them is done: far less than a round's steps take"""


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
    """Packs of candidates on one device, several at a time where it is a GPU: a pack's step is a
    chain that leaves room beside it."""

    def __init__(self, run: Run, shelf: Shelf, director: Director, *, parallel: int) -> None:
        self.run, self.shelf, self.director = run, shelf, director
        self.parallel = parallel
        self.waiting: list[Candidate] = []
        self.running: list[Candidate] = []
        self.active: list[Packed] = []
        self.dry = False
        """Whether the director had nothing more when last asked"""
        self.most: dict[Shape, int] = {}
        """Places that fit into memory, where all did not"""
        self.packs = 0
        self.sorted: tuple[list[Candidate], list[Group]] = [], []
        """Those that waited when groups were last made of them, and the groups"""

    @property
    def folder(self) -> Path:
        return self.run.folder / "packs"

    def train(self) -> None:
        """Until the director has nothing more; packs that were in training go on first."""
        with stoppable() as stop:
            try:
                self._pick_up(stop)
                self._ask()
                while self.active or (self.waiting and not stop.requested):
                    if not stop.requested:
                        self._ask()
                        self._start(stop)
                    self._turn(stop)
                if stop.requested:
                    raise Interrupted("stopped", signal_number=stop.signal_number)
            finally:
                for packed in self.active:
                    packed.close()

    def _pick_up(self, stop: Stop) -> None:
        for folder in sorted(self.folder.glob("*")):
            self.packs = max(self.packs, int(folder.name))
            self._resume(Run(folder, self.run.watch), None, stop)

    def _resume(self, run: Run, most: int | None, stop: Stop) -> list[Candidate]:
        """Go on with a pack from its newest checkpoint, no more than `most` lanes at a time; whose
        lanes those are. Without a checkpoint its folder goes."""
        packed = Packed(self, run)
        if not checkpoint.numbered(run):
            runs.remove(run.folder)
            return []
        self.active.append(packed)
        with self._surviving(packed, stop):
            if not packed.resume(stop, most):
                self.active.remove(packed)
                runs.remove(run.folder)
        return packed.members

    def _ask(self) -> None:
        while new := self._new():
            self.waiting.append(new)

    def _new(self) -> Candidate | None:
        if len(self.waiting) + len(self.running) >= self.parallel:
            return None
        found = self.director.next()
        self.dry = found is None
        return found

    def another(self, fits: Callable[[Candidate], bool]) -> Candidate | None:
        """Of those that wait, else of new ones, the first that fits; other new ones wait."""
        for one in self.waiting:
            if fits(one):
                self.waiting.remove(one)
                return one
        while new := self._new():
            if fits(new):
                return new
            self.waiting.append(new)
        return None

    def _start(self, stop: Stop) -> None:
        """Make packs of those that wait. A few wait for company while others train and more may
        come; then they cost a pack of their own."""
        if not self.waiting:
            return
        ready = self.shelf.get(self.waiting[0].config)
        device = ready.series.values.device.type
        if len(self.active) >= MOST_PACKS[device]:
            return
        if self.sorted[0] != self.waiting:
            windows = len(ready.folds[-1]["train"])
            self.sorted = list(self.waiting), groups.grouped(self.waiting, device, windows)
        for group in self.sorted[1]:
            enough = self.dry or len(group.members) >= COMPANY
            if self.active and (len(self.active) >= MOST_PACKS[device] or not enough):
                continue
            self.waiting = [one for one in self.waiting if one not in group.members]
            self._begin(group.shape, group.members, stop)

    def _begin(self, shape: Shape, members: list[Candidate], stop: Stop) -> None:
        self.packs += 1
        folder = self.folder / f"{self.packs:04d}"
        folder.mkdir(parents=True)
        packed = Packed(self, Run(folder, self.run.watch))
        self.running += members
        self.active.append(packed)
        with self._surviving(packed, stop):
            packed.begin(shape, members, stop)

    def _turn(self, stop: Stop) -> None:
        """One round of the pack whose steps are done first. To wait for a certain one would leave
        the device without steps of those that are done before it."""
        if not self.active:
            return
        while (packed := next((one for one in self.active if one.is_ready()), None)) is None:
            time.sleep(POLL_S)
        self.active.remove(packed)
        self.active.append(packed)
        with self._surviving(packed, stop):
            if packed.go_on():
                return
            self.active.remove(packed)
            if not packed.stopped:
                runs.remove(packed.run.folder)

    @contextmanager
    def _surviving(self, packed: Packed, stop: Stop) -> Iterator[None]:
        """Where memory runs out, go on from the pack's newest checkpoint with half as many lanes at
        a time; candidates that are not in it are trained again from their start."""
        try:
            yield
            return
        except recover.FULL as error:
            if not (packed.shapes and recover.is_out_of_memory(error)):
                raise
            why = recover.reason(error)
        # past the except block, whose traceback would pin the memory
        self.active.remove(packed)
        packed.close()
        recover.free_memory()
        shape, places = packed.shapes[0], packed.places
        members = [one for one in self.running if one in packed.members]
        self.running = [one for one in self.running if one not in members]
        if places == 1:
            runs.remove(packed.run.folder)
            for one in members:
                self.director.failed(one, f"out of memory: {why}")
            return
        most = self.most[shape] = places // 2
        known = checkpoint.numbered(packed.run)
        since = f"step {known[-1]} of the pack" if known else "the start"
        remedy = f"{most} lanes at a time, from {since}"
        self.run.append("recovery", what="out of memory", remedy=remedy, why=why)
        back = {
            one.number for one in self._resume(Run(packed.run.folder, self.run.watch), most, stop)
        }
        self.waiting = [one.anew() for one in members if one.number not in back] + self.waiting
