"""Coordinates the workers that share a study.

Every worker records a heartbeat for each of its trials. If a worker stops doing so, its trials fail
and are queued once more, for any worker that asks.
"""

import math
import time
import uuid
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from threading import Event, Thread

import optuna
from optuna.exceptions import StorageInternalError
from optuna.trial import FrozenTrial, Trial, TrialState

from slipstream import config as configs
from slipstream import runs
from slipstream.base.errors import UserError
from slipstream.config import Config
from slipstream.runs import Run
from slipstream.search import storage
from slipstream.search.packs import NOT_STARTED
from slipstream.search.storage import LOST, NOTES
from slipstream.search.study import TimedStudy

OWNER = "slipstream.worker"
"""The user attribute of a trial that names its worker"""
SEARCH = "slipstream.search"
"""The user attribute of a study that describes the search"""
SURPLUS = "surplus: other workers had started all trials"
SILENT = "no heartbeat from the worker for"
"""Begins the reason of an event about trials whose worker may have ended; several workers may log
the same one"""
MAY_DIFFER = ("tune.trials", "tune.minutes", "tune.retrain", "data.path", "data.labels", "out")
"""Settings that workers of one study need not share; nor those of [engine] and [follow]"""


def join_study(study: optuna.Study, config: Config, fingerprint: str) -> None:
    """Record what this study searches, or refuse a search that differs from the first one."""
    first = study.user_attrs.get(SEARCH)
    if first is None:
        study.set_user_attr(SEARCH, {"config": config.model_dump_json(), "data": fingerprint})
        return
    changed = configs.list_differences(Config.model_validate_json(first["config"]), config)
    differences = [
        name
        for name in changed
        if name not in MAY_DIFFER and not name.startswith(("engine.", "follow."))
    ]
    if first["data"] != fingerprint:
        differences.append("the data")
    if differences:
        raise UserError(
            f'the study "{study.study_name}" in this storage belongs to another search, which '
            f"differs in {', '.join(differences)}; set another name"
        )


def count_started(trials: Sequence[FrozenTrial]) -> int:
    """Count the started trials: a retried trial once, a surplus trial not at all."""
    return sum(not is_retry(trial) and not is_surplus(trial) for trial in trials)


def select_counted(trials: Sequence[FrozenTrial]) -> list[FrozenTrial]:
    """Select the trials that count as results: neither surplus nor retried under another number."""
    retried = {number for trial in trials for number in trial.system_attrs.get("retry_history", ())}
    return [trial for trial in trials if trial.number not in retried and not is_surplus(trial)]


def is_retry(trial: FrozenTrial) -> bool:
    """Whether it replaces an earlier trial whose worker disappeared."""
    return bool(trial.system_attrs.get("retry_history"))


def is_surplus(trial: FrozenTrial) -> bool:
    """Whether it was never trained, since other workers had all trials or the time was over, or is
    lost with a part of the study; another one replaces it."""
    return trial.user_attrs.get(NOTES, {}).get("stopped") in (SURPLUS, NOT_STARTED, LOST)


def exceeds_limit(trial: Trial, trials: Sequence[FrozenTrial], limit: int) -> bool:
    """Whether `limit` trials had started before this one, because two workers asked at once."""
    frozen = next(candidate for candidate in trials if candidate.number == trial.number)
    earlier = [candidate for candidate in trials if candidate.number < trial.number]
    return not is_retry(frozen) and count_started(earlier) >= limit


def get_owner(trial: FrozenTrial) -> str | None:
    """Return the worker of a trial; a retry also has the attribute of the trial it replaces."""
    attribute = trial.user_attrs.get(OWNER, {})
    return attribute["id"] if attribute.get("trial") == trial.number else None


def read_worker_id(run: Run) -> str:
    """Return the id of the worker of this folder, which stays the same after a restart. If the file
    is unreadable, create another id; the old worker's trials then fail as stale."""
    path = run.folder / "worker.json"
    with suppress(UserError, KeyError, TypeError, ValueError):
        return uuid.UUID(hex=runs.read_json(path)["id"]).hex
    worker_id = uuid.uuid4().hex
    runs.write_json(path, {"id": worker_id})
    return worker_id


class StudyMembership:
    """One worker's part in a study that it shares with others."""

    def __init__(self, study: TimedStudy, owner: str) -> None:
        self.study, self.owner = study, owner
        self.storage = study.storage
        self.heartbeat_s: int = self.storage.get_heartbeat_interval()
        self._unclaimed: set[int] = set()
        """Trials without an owner that have a heartbeat from this worker"""
        self._silent: set[int] = set()
        """Trials of others without heartbeat, which were mentioned"""
        self._checked_at = -math.inf

    def claim(self, trial: Trial) -> None:
        """Record that this worker trains the trial, with a first heartbeat."""
        with self.study.measure_time():
            self.storage.record_heartbeat(trial._trial_id)
            trial.set_user_attr(OWNER, {"id": self.owner, "trial": trial.number})

    def owns(self, trial: FrozenTrial) -> bool:
        return get_owner(trial) == self.owner

    def fail_stale_trials(self) -> list[tuple[str, str]]:
        """Fail the trials of workers without heartbeat, which queues them once more; at most twice
        per heartbeat interval. Return what is new of such trials, and why."""
        if time.monotonic() - self._checked_at < self.heartbeat_s / 2:
            return []
        self._checked_at = time.monotonic()
        running = self.study.get_trials(TrialState.RUNNING)
        for trial in running:
            # a worker killed before its first heartbeat would never become stale
            if get_owner(trial) is None and trial.number not in self._unclaimed:
                self._unclaimed.add(trial.number)
                self.storage.record_heartbeat(trial._trial_id)
        grace_s = storage.get_grace_s(self.storage)
        silent_s = min(3 * self.heartbeat_s, grace_s)
        with self.study.measure_time():
            ids = storage.find_silent_trials(self.storage, self.study.study._study_id, silent_s)
            if ids:
                optuna.storages.fail_stale_trials(self.study.study)
        silent = [trial for trial in running if trial._trial_id in ids and not self.owns(trial)]
        lost = [
            trial for trial in silent if self.storage.get_trial(trial._trial_id).state.is_finished()
        ]
        late = [trial for trial in silent if trial not in lost]
        new = [trial for trial in late if trial.number not in self._silent]
        self._silent = {trial.number for trial in late}
        why = (
            f"{SILENT} {silent_s:.0f} s; retried in about {grace_s - silent_s:.0f} s if it is gone"
        )
        messages = [(f"{_list_numbers(new)} may be lost", why)] if new else []
        return messages + _describe_lost(lost, grace_s)

    def others_are_busy(self) -> bool:
        """Whether other workers have unfinished trials, which may come back."""
        unfinished = self.study.get_trials(TrialState.RUNNING, TrialState.WAITING)
        return any(not self.owns(trial) for trial in unfinished)

    @contextmanager
    def send_heartbeats(self, running: Mapping[int, Trial]) -> Iterator[None]:
        """Record heartbeats for all running trials in a thread."""
        ended = Event()

        def beat() -> None:
            while not ended.wait(self.heartbeat_s):
                for trial in list(running.values()):
                    with suppress(StorageInternalError):  # the next heartbeat may succeed
                        self.storage.record_heartbeat(trial._trial_id)

        thread = Thread(target=beat, name="heartbeats", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()


def _describe_lost(lost: Sequence[FrozenTrial], grace_s: float) -> list[tuple[str, str]]:
    """Say what becomes of trials that were failed for lack of a heartbeat; each is retried once."""
    messages = []
    if again := [trial for trial in lost if not is_retry(trial)]:
        messages.append((f"training {_list_numbers(again)} again", f"{SILENT} {grace_s:.0f} s"))
    if failed := [trial for trial in lost if is_retry(trial)]:
        why = f"{SILENT} {grace_s:.0f} s, for the second time"
        messages.append((f"counting {_list_numbers(failed)} as failed", why))
    return messages


def _list_numbers(trials: Sequence[FrozenTrial]) -> str:
    numbers = ", ".join(str(trial.number) for trial in trials)
    return f"trial{'s' * (len(trials) > 1)} {numbers}"


def refresh_heartbeats(study: TimedStudy, owners: Collection[str]) -> None:
    """Record a heartbeat for the trials of workers that are about to restart."""
    for trial in study.get_trials(TrialState.RUNNING):
        if get_owner(trial) in owners:
            study.storage.record_heartbeat(trial._trial_id)
