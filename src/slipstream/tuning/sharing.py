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
from slipstream.tuning.storage.journal import NOTES
from slipstream.tuning.study import TimedStudy

OWNER = "slipstream.worker"
"""The user attribute that says whose a trial is"""
JOINED = "slipstream.search"
"""The study's attribute that says what is searched"""
SURPLUS = "surplus: other workers had begun all trials"
MAY_DIFFER = ("tune.trials", "tune.minutes", "tune.retrain", "data.path", "data.labels", "out")
"""Settings that workers of one study need not have in common; nor those of [engine]"""


def join_study(study: optuna.Study, settings: Config, fingerprint: str) -> None:
    """Refuse to mix two searches in one study: the first one says what it is."""
    found = study.user_attrs.get(JOINED)
    if found is None:
        mine = {"config": settings.model_dump_json(), "data": fingerprint}
        study.set_user_attr(JOINED, mine)
        return
    was = Config.model_validate_json(found["config"])
    changed = [
        name
        for name in configs.list_differences(was, settings)
        if name not in MAY_DIFFER and not name.startswith("engine.")
    ]
    if found["data"] != fingerprint:
        changed.append("the data")
    if changed:
        raise UserError(
            f'the study "{study.study_name}" in this database is of another search (it differs '
            f"in {', '.join(changed)}); give this one another name"
        )


def count_started(trials: Sequence[FrozenTrial]) -> int:
    """How many trials have been begun: one that is tried again counts once, surplus not at all."""
    return sum(not is_retry(trial) and not is_surplus(trial) for trial in trials)


def select_counted(trials: Sequence[FrozenTrial]) -> list[FrozenTrial]:
    """Those that are results: neither surplus nor tried again under another number."""
    again = {number for trial in trials for number in trial.system_attrs.get("retry_history", ())}
    return [one for one in trials if one.number not in again and not is_surplus(one)]


def is_retry(trial: FrozenTrial) -> bool:
    """Whether it stands for an earlier trial whose worker went away."""
    return bool(trial.system_attrs.get("retry_history"))


def is_surplus(trial: FrozenTrial) -> bool:
    return bool(trial.user_attrs.get(NOTES, {}).get("stopped") == SURPLUS)


def exceeds_limit(trial: Trial, trials: Sequence[FrozenTrial], limit: int) -> bool:
    """Whether so many had been begun before this one: two workers asked at once."""
    own = next(one for one in trials if one.number == trial.number)
    earlier = [one for one in trials if one.number < trial.number]
    return not is_retry(own) and count_started(earlier) >= limit


def get_owner(trial: FrozenTrial) -> str | None:
    """Whose it is; what it has from the trial that it stands for does not count."""
    said = trial.user_attrs.get(OWNER, {})
    return said["id"] if said.get("trial") == trial.number else None


def read_worker_id(run: Run) -> str:
    """Who works in this folder: the same after a restart. Where that can no longer be read, it is
    another one, and the trials of the first come back as those of a worker that fell silent."""
    path = run.folder / "worker.json"
    with suppress(UserError, KeyError, TypeError, ValueError):
        return uuid.UUID(hex=runs.read_json(path)["id"]).hex
    found = uuid.uuid4().hex
    runs.write_json(path, {"id": found})
    return found


class StudyMembership:
    """One worker's part in a study that others work on too."""

    def __init__(self, board: TimedStudy, owner: str) -> None:
        self.study, self.owner = board, owner
        self.storage = _beating(board.study)
        self.heartbeat_s: int = self.storage.get_heartbeat_interval()
        self._seen: set[int] = set()
        self._tidied = -math.inf

    def claim(self, trial: Trial) -> None:
        """Say that a trial is this worker's, and that it lives."""
        with self.study.measure_time():
            self.storage.record_heartbeat(trial._trial_id)
            trial.set_user_attr(OWNER, {"id": self.owner, "trial": trial.number})

    def owns(self, trial: FrozenTrial) -> bool:
        return get_owner(trial) == self.owner

    def fail_stale_trials(self) -> None:
        """Fail the trials of silent workers, which puts them back once; not at every call."""
        if time.monotonic() - self._tidied < self.heartbeat_s / 2:
            return
        self._tidied = time.monotonic()
        for trial in self.study.get_trials(TrialState.RUNNING):
            # killed between asking and its first sign of life, it would never count as silent
            if get_owner(trial) is None and trial.number not in self._seen:
                self._seen.add(trial.number)
                self.storage.record_heartbeat(trial._trial_id)
        with self.study.measure_time():
            optuna.storages.fail_stale_trials(self.study.study)

    def others_are_busy(self) -> bool:
        """Whether trials may yet come back from other workers."""
        open_trials = self.study.get_trials(TrialState.RUNNING, TrialState.WAITING)
        return any(not self.owns(trial) for trial in open_trials)

    @contextmanager
    def send_heartbeats(self, under_way: Mapping[int, Trial]) -> Iterator[None]:
        """Meanwhile, give signs of life for all trials under way."""
        ended = Event()

        def beat() -> None:
            while not ended.wait(self.heartbeat_s):
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


def refresh_heartbeats(board: TimedStudy, owners: Collection[str]) -> None:
    """Give a sign of life for workers that are about to start again."""
    storage = _beating(board.study)
    for trial in board.get_trials(TrialState.RUNNING):
        if get_owner(trial) in owners:
            storage.record_heartbeat(trial._trial_id)


def _beating(study: optuna.Study) -> Any:
    storage = study._storage
    assert is_heartbeat_enabled(storage)
    return storage
