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
from slipstream.engine import checkpoint, recovery
from slipstream.engine.loop import StopRequest, catch_signals
from slipstream.errors import Interrupted
from slipstream.runs import Run
from slipstream.tuning.packing import grouping
from slipstream.tuning.packing.dataset_cache import DatasetCache
from slipstream.tuning.packing.grouping import PackShape, TrialGroup
from slipstream.tuning.packing.pack import TrialPack
from slipstream.tuning.packing.trial import TrialRun

COMPANY = 4
"""Candidates of one shape that make a pack while others train"""
MOST_PACKS = {"cuda": 8, "cpu": 1}
"""Packs at a time"""
POLL_S = 2e-4
"""Between looks at whether one of them is done: far less than a round's steps take"""


class TrialSource(Protocol):
    """Who decides what is trained."""

    def ask(self) -> TrialRun | None:
        """Another one, if there is any."""

    def reopen(self, number: int) -> TrialRun:
        """One that was handed out before, by its number; `settled` where its result stands."""

    def report(self, one: TrialRun, epoch: int, loss: float) -> str:
        """Its folds' mean validation loss after an epoch; why it has to end, if it has to."""

    def finish_fold(self, one: TrialRun, fold: int) -> None:
        """One of its folds is done."""

    def finish(self, one: TrialRun) -> None:
        """All of them are."""

    def fail(self, one: TrialRun, why: str) -> None:
        """It could not be trained."""

    def list_extremes(self, config: Config) -> Sequence[Config]:
        """Variants that a pack of such ones needs room for, because they may come later."""


class PackScheduler:
    """Packs of candidates on one device, several at a time where it is a GPU: a pack's step is a
    chain that leaves room beside it."""

    def __init__(
        self, run: Run, shelf: DatasetCache, director: TrialSource, *, parallel: int
    ) -> None:
        self.run, self.datasets, self.source = run, shelf, director
        self.parallel = parallel
        self.waiting: list[TrialRun] = []
        self.running: list[TrialRun] = []
        self.active_packs: list[TrialPack] = []
        self.is_exhausted = False
        """Whether the director had nothing more when last asked"""
        self.max_lanes: dict[PackShape, int] = {}
        """Places that fit into memory, where all did not"""
        self.num_packs = 0
        self.grouping: tuple[list[TrialRun], list[TrialGroup]] = [], []
        """Those that waited when groups were last made of them, and the groups"""

    @property
    def folder(self) -> Path:
        return self.run.folder / "packs"

    def train(self) -> None:
        """Until the director has nothing more; packs that were in training go on first."""
        with catch_signals() as stop:
            try:
                self._pick_up(stop)
                self._ask()
                while self.active_packs or (self.waiting and not stop.requested):
                    if not stop.requested:
                        self._ask()
                        self._start(stop)
                    self._turn(stop)
                if stop.requested:
                    raise Interrupted("stopped", signal_number=stop.signal_number)
            finally:
                for packed in self.active_packs:
                    packed.close()

    def _pick_up(self, stop: StopRequest) -> None:
        for folder in sorted(self.folder.glob("*")):
            self.num_packs = max(self.num_packs, int(folder.name))
            self._resume(Run(folder, self.run.watch), None, stop)

    def _resume(self, run: Run, most: int | None, stop: StopRequest) -> list[TrialRun]:
        """Go on with a pack from its newest checkpoint, no more than `most` lanes at a time; whose
        lanes those are. Without a checkpoint its folder goes."""
        packed = TrialPack(self, run)
        if not checkpoint.list_steps(run):
            runs.remove(run.folder)
            return []
        self.active_packs.append(packed)
        with self._surviving(packed, stop):
            if not packed.resume(stop, most):
                self.active_packs.remove(packed)
                runs.remove(run.folder)
        return packed.trials

    def _ask(self) -> None:
        while new := self._new():
            self.waiting.append(new)

    def _new(self) -> TrialRun | None:
        if len(self.waiting) + len(self.running) >= self.parallel:
            return None
        found = self.source.ask()
        self.is_exhausted = found is None
        return found

    def take_fitting(self, fits: Callable[[TrialRun], bool]) -> TrialRun | None:
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

    def _start(self, stop: StopRequest) -> None:
        """Make packs of those that wait. A few wait for company while others train and more may
        come; then they cost a pack of their own."""
        if not self.waiting:
            return
        ready = self.datasets.get(self.waiting[0].config)
        device = ready.series.values.device.type
        if len(self.active_packs) >= MOST_PACKS[device]:
            return
        if self.grouping[0] != self.waiting:
            windows = len(ready.folds[-1]["train"])
            self.grouping = list(self.waiting), grouping.group_trials(self.waiting, device, windows)
        for group in self.grouping[1]:
            enough = self.is_exhausted or len(group.trials) >= COMPANY
            if self.active_packs and (len(self.active_packs) >= MOST_PACKS[device] or not enough):
                continue
            self.waiting = [one for one in self.waiting if one not in group.trials]
            self._begin(group.shape, group.trials, stop)

    def _begin(self, shape: PackShape, members: list[TrialRun], stop: StopRequest) -> None:
        self.num_packs += 1
        folder = self.folder / f"{self.num_packs:04d}"
        folder.mkdir(parents=True)
        packed = TrialPack(self, Run(folder, self.run.watch))
        self.running += members
        self.active_packs.append(packed)
        with self._surviving(packed, stop):
            packed.start(shape, members, stop)

    def _turn(self, stop: StopRequest) -> None:
        """One round of the pack whose steps are done first. To wait for a certain one would leave
        the device without steps of those that are done before it."""
        if not self.active_packs:
            return
        while (packed := next((one for one in self.active_packs if one.is_ready()), None)) is None:
            time.sleep(POLL_S)
        self.active_packs.remove(packed)
        self.active_packs.append(packed)
        with self._surviving(packed, stop):
            if packed.advance():
                return
            self.active_packs.remove(packed)
            if not packed.stopped:
                runs.remove(packed.run.folder)

    @contextmanager
    def _surviving(self, packed: TrialPack, stop: StopRequest) -> Iterator[None]:
        """Where memory runs out, go on from the pack's newest checkpoint with half as many lanes at
        a time; candidates that are not in it are trained again from their start."""
        try:
            yield
            return
        except recovery.MEMORY_ERRORS as error:
            if not (packed.shapes and recovery.is_out_of_memory(error)):
                raise
            why = recovery.first_line(error)
        # past the except block, whose traceback would pin the memory
        self.active_packs.remove(packed)
        packed.close()
        recovery.free_memory()
        shape, places = packed.shapes[0], packed.num_lanes
        members = [one for one in self.running if one in packed.trials]
        self.running = [one for one in self.running if one not in members]
        if places == 1:
            runs.remove(packed.run.folder)
            for one in members:
                self.source.fail(one, f"out of memory: {why}")
            return
        most = self.max_lanes[shape] = places // 2
        known = checkpoint.list_steps(packed.run)
        since = f"step {known[-1]} of the pack" if known else "the start"
        remedy = f"{most} lanes at a time, from {since}"
        self.run.append("recovery", what="out of memory", remedy=remedy, why=why)
        back = {
            one.number for one in self._resume(Run(packed.run.folder, self.run.watch), most, stop)
        }
        self.waiting = [
            one.copy_untrained() for one in members if one.number not in back
        ] + self.waiting
