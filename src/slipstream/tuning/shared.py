"""What a worker needs to know of the others that work on the same study.

Every worker gives a sign of life for each of its trials. Trials whose worker has gone silent fail,
and are put back once, for whoever asks next.
"""

from __future__ import annotations

import math
import time
import uuid
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from threading import Event, Thread
from typing import Any

import optuna
from optuna.exceptions import StorageInternalError
from optuna.storages._heartbeat import is_heartbeat_enabled
from optuna.trial import FrozenTrial, Trial, TrialState

from slipstream import config as configs
from slipstream import runs
from slipstream.config import Config
from slipstream.errors import UserError
from slipstream.runs import Run
from slipstream.tuning.journal import NOTES
from slipstream.tuning.study import Board

OWNER = "slipstream.worker"
"""The user attribute that says whose a trial is"""
JOINED = "slipstream.search"
"""The study's attribute that says what is searched"""
SURPLUS = "surplus: other workers had begun all trials"
MAY_DIFFER = ("tune.trials", "tune.minutes", "tune.retrain", "data.path", "data.labels", "out")
"""Settings that workers of one study need not have in common; nor those of [engine]"""


def join(study: optuna.Study, settings: Config, fingerprint: str) -> None:
    """Refuse to mix two searches in one study: the first one says what it is."""
    found = study.user_attrs.get(JOINED)
    if found is None:
        mine = {"config": settings.model_dump_json(), "data": fingerprint}
        study.set_user_attr(JOINED, mine)
        return
    was = Config.model_validate_json(found["config"])
    changed = [
        name
        for name in configs.differences(was, settings)
        if name not in MAY_DIFFER and not name.startswith("engine.")
    ]
    if found["data"] != fingerprint:
        changed.append("the data")
    if changed:
        raise UserError(
            f'the study "{study.study_name}" in this database is of another search (it differs '
            f"in {', '.join(changed)}); give this one another name"
        )


def begun(trials: Sequence[FrozenTrial]) -> int:
    """How many trials have been begun: one that is tried again counts once, surplus not at all."""
    return sum(not is_again(trial) and not is_surplus(trial) for trial in trials)


def counted(trials: Sequence[FrozenTrial]) -> list[FrozenTrial]:
    """Those that are results: neither surplus nor tried again under another number."""
    again = {number for trial in trials for number in trial.system_attrs.get("retry_history", ())}
    return [one for one in trials if one.number not in again and not is_surplus(one)]


def is_again(trial: FrozenTrial) -> bool:
    """Whether it stands for an earlier trial whose worker went away."""
    return bool(trial.system_attrs.get("retry_history"))


def is_surplus(trial: FrozenTrial) -> bool:
    return bool(trial.user_attrs.get(NOTES, {}).get("stopped") == SURPLUS)


def is_beyond(trial: Trial, trials: Sequence[FrozenTrial], limit: int) -> bool:
    """Whether so many had been begun before this one: two workers asked at once."""
    own = next(one for one in trials if one.number == trial.number)
    earlier = [one for one in trials if one.number < trial.number]
    return not is_again(own) and begun(earlier) >= limit


def owner_of(trial: FrozenTrial) -> str | None:
    """Whose it is; what it has from the trial that it stands for does not count."""
    said = trial.user_attrs.get(OWNER, {})
    return said["id"] if said.get("trial") == trial.number else None


def identity(run: Run) -> str:
    """Who works in this folder: the same after a restart. Where that can no longer be read, it is
    another one, and the trials of the first come back as those of a worker that fell silent."""
    path = run.folder / "worker.json"
    with suppress(UserError, KeyError, TypeError, ValueError):
        return uuid.UUID(hex=runs.read_json(path)["id"]).hex
    found = uuid.uuid4().hex
    runs.write_json(path, {"id": found})
    return found


class Share:
    """One worker's part in a study that others work on too."""

    def __init__(self, board: Board, owner: str) -> None:
        self.board, self.owner = board, owner
        self.storage = _beating(board.study)
        self.beat_s: int = self.storage.get_heartbeat_interval()
        self._seen: set[int] = set()
        self._tidied = -math.inf

    def mark(self, trial: Trial) -> None:
        """Say that a trial is this worker's, and that it lives."""
        with self.board.timed():
            self.storage.record_heartbeat(trial._trial_id)
            trial.set_user_attr(OWNER, {"id": self.owner, "trial": trial.number})

    def owns(self, trial: FrozenTrial) -> bool:
        return owner_of(trial) == self.owner

    def tidy(self) -> None:
        """Fail the trials of silent workers, which puts them back once; not at every call."""
        if time.monotonic() - self._tidied < self.beat_s / 2:
            return
        self._tidied = time.monotonic()
        for trial in self.board.trials(TrialState.RUNNING):
            # killed between asking and its first sign of life, it would never count as silent
            if owner_of(trial) is None and trial.number not in self._seen:
                self._seen.add(trial.number)
                self.storage.record_heartbeat(trial._trial_id)
        with self.board.timed():
            optuna.storages.fail_stale_trials(self.board.study)

    def others_busy(self) -> bool:
        """Whether trials may yet come back from other workers."""
        open_trials = self.board.trials(TrialState.RUNNING, TrialState.WAITING)
        return any(not self.owns(trial) for trial in open_trials)

    @contextmanager
    def alive(self, under_way: Mapping[int, Trial]) -> Iterator[None]:
        """Meanwhile, give signs of life for all trials under way."""
        ended = Event()

        def beat() -> None:
            while not ended.wait(self.beat_s):
                for trial in list(under_way.values()):
                    with suppress(StorageInternalError):  # the next one may get through
                        self.storage.record_heartbeat(trial._trial_id)

        thread = Thread(target=beat, name="signs of life", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()


def keep_alive(board: Board, owners: Collection[str]) -> None:
    """Give a sign of life for workers that are about to start again."""
    storage = _beating(board.study)
    for trial in board.trials(TrialState.RUNNING):
        if owner_of(trial) in owners:
            storage.record_heartbeat(trial._trial_id)


def _beating(study: optuna.Study) -> Any:
    storage = study._storage
    assert is_heartbeat_enabled(storage)
    return storage
