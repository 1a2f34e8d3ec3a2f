"""Trains the trials of a source as lanes, in packs, and keeps the packs full.

Trials that share a program wait for each other and form a pack. When a lane of a pack ends, the
next trial that fits takes its place, without a new capture.
"""

import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from slipstream import runs
from slipstream.autotune.pack_size import MAX_LANES
from slipstream.engine import checkpoint, recovery
from slipstream.errors import Interrupted, ResumableError, UserError
from slipstream.errors.stop_signals import StopRequest, catch_signals
from slipstream.runs import Run
from slipstream.tuning.packing import grouping
from slipstream.tuning.packing.dataset_cache import DatasetCache, TrialData
from slipstream.tuning.packing.grouping import PackShape, TrialGroup
from slipstream.tuning.packing.pack import TrialPack
from slipstream.tuning.packing.trial import TrialPool, TrialRun, TrialSource

MIN_TRIALS = 4
"""Trials of one shape that form a pack while other packs train"""
MIN_RUNNING = 0.5
"""Share of the parallel trials in training below which none wait for more of their shape"""
MAX_PACKS = {"cuda": 8, "cpu": 1}
"""Packs that train at the same time: a step is a chain of kernels that leaves part of a GPU idle"""
MAX_FAILURES = 2
"""Packs that fail with a trial before it counts as failed itself"""
PACK_FAILED = "a pack failed"
POLL_S = 2e-4
"""Between checks whether a pack is done: far less than the steps of a round take"""


class PackScheduler:
    """Trains packs of trials on one device."""

    def __init__(
        self, run: Run, datasets: DatasetCache, source: TrialSource, *, parallel: int
    ) -> None:
        self.run, self.datasets, self.folder = run, datasets, run.folder / "packs"
        self.pool = TrialPool(source, parallel=parallel)
        self.packs: list[TrialPack] = []
        self.max_lanes: dict[PackShape, int] = {}
        """Lanes that fit into memory, for shapes that ran out of it"""
        self.stop = StopRequest()
        self.num_packs = 0
        """Packs started so far, by earlier parts of the search too"""
        self._grouped: list[TrialRun] = []
        self._groups: list[TrialGroup] = []
        """The groups of the trials in `_grouped`"""

    def train(self, is_done: Callable[[], bool] = lambda: False) -> None:
        """Resume interrupted packs, then train until the source has no more trials, or until
        `is_done` says so: the next call then continues with the packs that are left."""
        with catch_signals(self.stop), self._close_on_error():
            if not self.packs:
                for folder in sorted(self.folder.glob("*")):
                    self.num_packs = max(self.num_packs, int(folder.name))
                    self._resume(folder)
            self.pool.fill()
            while self.packs or (self.pool.waiting and not self.stop.requested):
                if not self.stop.requested:
                    self.pool.fill()
                    if is_done():
                        return
                    if self.pool.source.is_over():
                        self.pool.drop_waiting()
                    self._start_packs()
                self._advance()
            if self.stop.requested:
                raise Interrupted("stopped", signal_number=self.stop.signal_number)

    @contextmanager
    def _close_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Release the memory of all packs."""
        for pack in self.packs:
            pack.close()

    def _make_pack(self, folder: Path) -> TrialPack:
        return TrialPack(self.pool, self.datasets, Run(folder, self.run.watch), self.run)

    def _resume(self, folder: Path) -> None:
        """Resume a pack from its newest checkpoint, or delete its folder if there is none."""
        pack = self._make_pack(folder)
        if not checkpoint.list_steps(pack.run):
            runs.remove(folder)
            return
        self.packs.append(pack)
        with self._recover(pack):
            if not pack.resume(self.stop):
                self.packs.remove(pack)
                runs.remove(folder)

    def _start_packs(self) -> None:
        """Form packs of waiting trials. A few trials wait for more of their shape while other packs
        train and the source has more, since a pack has a minimum cost; not if so few train that
        the device has too little to do."""
        pool, data = self.pool, self._load_first()
        if data is None:
            return
        device = data.series.values.device.type
        if len(self.packs) >= MAX_PACKS[device]:
            return
        if self._grouped != pool.waiting:
            num_windows = len(data.folds[-1]["train"])
            self._grouped = list(pool.waiting)
            self._groups = grouping.group_trials(pool.waiting, device, num_windows)
        for group in self._groups:
            few = len(pool.running) < MIN_RUNNING * pool.parallel
            enough = pool.is_exhausted or len(group.trials) >= MIN_TRIALS or few
            if self.packs and (len(self.packs) >= MAX_PACKS[device] or not enough):
                continue
            self._start(group)

    def _load_first(self) -> TrialData | None:
        """Return the data of the first trial that waits; those whose data cannot be had fail."""
        while self.pool.waiting:
            try:
                return self.datasets.get(self.pool.waiting[0].config)
            except UserError as error:
                self.pool.source.fail(self.pool.waiting.pop(0), str(error))
        return None

    def _start(self, group: TrialGroup) -> None:
        self.num_packs += 1
        folder = self.folder / f"{self.num_packs:04d}"
        folder.mkdir(parents=True)
        pack = self._make_pack(folder)
        self.pool.start(group.trials)
        self.packs.append(pack)
        limit = self.max_lanes.get(group.shape, MAX_LANES)
        with self._recover(pack):
            pack.start(group.shape, group.trials, self.stop, max_lanes=limit)

    def _advance(self) -> None:
        """Train one round of whichever pack finishes its steps first: waiting for a particular pack
        would leave the device idle when others finish earlier."""
        if not self.packs:
            return
        while (pack := next((one for one in self.packs if one.is_ready()), None)) is None:
            time.sleep(POLL_S)
        self.packs.remove(pack)
        self.packs.append(pack)
        with self._recover(pack):
            if pack.advance():
                return
            self.packs.remove(pack)
            if not pack.was_interrupted:
                runs.remove(pack.run.folder)

    @contextmanager
    def _recover(self, pack: TrialPack) -> Iterator[None]:
        """Record how many lanes of a shape fit into memory, and survive a pack that fails.

        A pack that runs out of memory halves its lanes by itself; if a single lane does not fit,
        its trials fail. The trials of a pack that fails otherwise are trained again, once.
        """
        try:
            yield
            if pack.memory_limit is not None:
                self.max_lanes[pack.shapes[0]] = pack.memory_limit
            return
        except (Interrupted, ResumableError, OSError):  # they end the search, which can be resumed
            raise
        except Exception as error:
            is_full, is_ours = recovery.is_out_of_memory(error), not isinstance(error, UserError)
            reason = recovery.first_line(error)
            if is_full and not pack.shapes:
                raise
            if not is_full and is_ours:
                reason = f"{type(error).__name__}: {reason}"
                with suppress(OSError):
                    runs.write_text(self.run.folder / "crash.txt", traceback.format_exc())
        # outside the except block, whose traceback would keep the memory alive
        with suppress(ValueError):  # it had ended
            self.packs.remove(pack)
        with suppress(Exception):  # what failed may fail again
            pack.close()
        if is_ours:
            recovery.check_device(reason)
        recovery.free_memory()
        runs.remove(pack.run.folder)
        trials = self.pool.withdraw(pack.trials)
        if is_full and pack.num_lanes > 1:
            self.max_lanes[pack.shapes[0]] = pack.num_lanes // 2
            self._train_again(trials)
        elif is_full or not is_ours:
            self._fail(trials, f"out of memory: {reason}" if is_full else reason)
        else:
            self._report_failure(trials, reason)

    def _train_again(self, trials: Sequence[TrialRun]) -> None:
        self.pool.waiting = [trial.copy_untrained() for trial in trials] + self.pool.waiting

    def _fail(self, trials: Sequence[TrialRun], reason: str) -> None:
        for trial in trials:
            self.pool.source.fail(trial, reason)

    def _report_failure(self, trials: Sequence[TrialRun], reason: str) -> None:
        """Train the trials of a pack that failed again, or give them up."""
        trials = [replace(trial, num_failures=trial.num_failures + 1) for trial in trials]
        given_up = [trial for trial in trials if trial.num_failures == MAX_FAILURES]
        again = [trial for trial in trials if trial not in given_up]
        remedies = (
            *([f"training {_name_trials(again)} again"] if again else []),
            *([f"giving up {_name_trials(given_up)}"] if given_up else []),
        )
        remedy = " and ".join(remedies) or "none of its trials is left"
        self.run.append("recovery", what=PACK_FAILED, remedy=remedy, why=reason)
        self._fail(given_up, reason)
        self._train_again(again)


def _name_trials(trials: Sequence[TrialRun]) -> str:
    numbers = ", ".join(str(trial.number) for trial in trials if trial.number >= 0)
    return f"trial{'s' * (len(trials) > 1)} {numbers}" if numbers else "what it retrained"
