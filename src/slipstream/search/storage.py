"""Where the study of a search is: Optuna's journal in the run folder, a journal or a database that
several workers share.

Optuna replays a journal and locks it. `Journal` adds what kills, full disks and damage need: a
checksum in each line, and the removal of a line that was cut off. The journal of a run folder that
is damaged within is rebuilt from its intact beginning and from the log of the search, which has
every trial that has ended (`repair`).
"""

from __future__ import annotations

import errno
import json
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path
from typing import Any

import optuna
from optuna.distributions import BaseDistribution
from optuna.exceptions import StorageInternalError
from optuna.storages import (
    BaseStorage,
    JournalStorage,
    RDBStorage,
    RetryHeartbeatStaleTrialCallback,
)
from optuna.storages._heartbeat import BaseHeartbeat
from optuna.storages.journal import BaseJournalBackend, JournalFileBackend, JournalFileOpenLock
from optuna.trial import FrozenTrial, TrialState, create_trial

from slipstream import runs
from slipstream.base.errors import Option, UserError
from slipstream.events import Event, TrialEnd, format_event
from slipstream.runs import Run
from slipstream.runs.studies import PREFIX, find_path, is_journal
from slipstream.search import database
from slipstream.search.database import HEARTBEAT

Operation = dict[str, Any]
"""One line of a journal"""
Distributions = Mapping[str, BaseDistribution]
JOURNAL = "study.log"
"""In the folder of a search"""
FIRST = b'{"op_code"'
"""How every line begins"""
CHECKSUM = "sum"
"""The key of a line's checksum, the last one"""
NOTES = "slipstream"
"""The user attribute of a trial with what Slipstream records about it"""
STATE_NAMES = {
    TrialState.COMPLETE: "finished",
    TrialState.PRUNED: "pruned",
    TrialState.FAIL: "failed",
}
CUT_OFF = "cut off"
"""The state of a trial that `tune.minutes` ended; Optuna has it as pruned"""
OUT_OF_TIME = "tune.minutes have passed"
OUT_OF_MINUTES, OUT_OF_SHARE = "the minutes have passed", "its share of the minutes has passed"
"""Why a candidate of `slipstream auto` is cut off: the search ends, or others need the time"""
TIME_REASONS = {OUT_OF_TIME, OUT_OF_MINUTES, OUT_OF_SHARE}
STATES = {name: state for state, name in STATE_NAMES.items()} | {CUT_OFF: TrialState.PRUNED}
LOST = "its settings were lost with a damaged line of study.log"
"""Why a trial stopped that was under way when the journal was damaged; another one replaces it"""
RUNNING = (TrialState.RUNNING,)
CLOCK = "clock"
"""A file among the heartbeats, whose time is the current one"""


def name_state(state: TrialState, notes: Mapping[str, Any]) -> str:
    """Return the name of a trial's state, by what is noted about it."""
    stopped = notes.get("stopped", "")
    is_cut_off = state == TrialState.PRUNED and any(reason in stopped for reason in TIME_REASONS)
    return CUT_OFF if is_cut_off else STATE_NAMES.get(state, "under way")


def format_line(operation: Operation) -> str:
    """Return the line of an operation, with its checksum."""
    return _to_json({**operation, CHECKSUM: _compute_checksum(operation)}) + "\n"


def is_intact(operation: Any) -> bool:
    """Whether a line's checksum is right; a line that Optuna itself wrote has none."""
    if not isinstance(operation, dict) or "op_code" not in operation:
        return False
    content = {key: value for key, value in operation.items() if key != CHECKSUM}
    return bool(operation.get(CHECKSUM) in (None, _compute_checksum(content)))


def _compute_checksum(operation: Operation) -> str:
    return f"{zlib.crc32(_to_json(operation).encode()):08x}"


def _to_json(operation: Operation) -> str:
    return json.dumps(operation, separators=(",", ":"))


class Journal(JournalFileBackend):
    """Optuna's journal file, which neither a kill nor a full disk can damage.

    Optuna appends to a line that was cut off, and can read neither of the two then. And it has the
    disk store every line, which costs milliseconds: `flush` does so for results and new trials.
    Without it, a kill loses no line, only a power failure does.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.lock = path, JournalFileOpenLock(str(path))
        super().__init__(str(path), self.lock)
        self._end = 0
        """Where a line is known to end"""

    def read_logs(self, log_number_from: int) -> Iterator[Operation]:  # type: ignore[override]
        """Yield the operations from that one on; raise StorageInternalError at a damaged one."""
        number = log_number_from + 1
        try:
            for operation in super().read_logs(log_number_from):
                if not is_intact(operation):
                    raise ValueError
                yield operation
                number += 1
        except ValueError:  # of its text, too
            raise StorageInternalError(f"line {number} is damaged") from None

    def append_logs(self, logs: list[Operation]) -> None:
        lines = "".join(map(format_line, logs)).encode()
        self.lock.acquire()
        try:
            self._append(lines)
        finally:
            with suppress(RuntimeError):  # others took it for that of a dead process
                self.lock.release()

    def _append(self, lines: bytes) -> None:
        with _open_existing(self.path) as file:
            size = file.seek(0, os.SEEK_END)
            if size < self._end:
                raise StorageInternalError("it has become shorter; was it replaced?")
            file.seek(self._end)
            end = self._end + file.read().rfind(b"\n") + 1
            if end < size:  # a kill has cut off a line
                file.truncate(end)
            try:
                if file.write(lines) != len(lines):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            except OSError:
                file.truncate(end)
                raise
            self._end = end + len(lines)

    def flush(self) -> None:
        """Have the disk store all lines."""
        with _open_existing(self.path) as file:
            os.fsync(file.fileno())


def _open_existing(path: Path) -> FileIO:
    """Open a journal to append to it, unless it is gone: a new file would not be this journal."""
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | getattr(os, "O_BINARY", 0))
    return os.fdopen(descriptor, "r+b", buffering=0)


@contextmanager
def _explain_failure() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StorageInternalError(error.strerror or str(error)) from error


class SharedJournal(Journal):
    """The journal of several workers: what the system refuses is the failure of a storage, as for a
    database."""

    def read_logs(self, log_number_from: int) -> Iterator[Operation]:  # type: ignore[override]
        with _explain_failure():
            yield from super().read_logs(log_number_from)

    def append_logs(self, logs: list[Operation]) -> None:
        with _explain_failure():
            super().append_logs(logs)

    def flush(self) -> None:
        with _explain_failure():
            super().flush()


class MemoryJournal(BaseJournalBackend):
    """A journal as a list of operations."""

    def __init__(self, operations: Iterable[Operation] = ()) -> None:
        self.operations = list(operations)

    def read_logs(self, log_number_from: int) -> list[Operation]:
        return self.operations[log_number_from:]

    def append_logs(self, logs: list[Operation]) -> None:
        self.operations += logs


def repair(
    path: Path, study: str, distributions: Distributions, events: Iterable[Event]
) -> list[str]:
    """Rebuild a damaged journal; return what was wrong, a sentence, or nothing.

    The caller holds the lock of the run, so a lock file of Optuna belongs to a dead process.
    """
    Path(f"{path}.lock").unlink(missing_ok=True)
    content = path.read_bytes() if path.exists() else b""
    ends = _find_ends(events)
    intact = _parse_beginning(content)
    trials = _replay(intact)
    ended = {trial.number for trial in trials or () if trial.state.is_finished()}
    is_whole = len(intact) == content.count(b"\n") and content[-1:] in (b"", b"\n")
    if is_whole and trials is not None and ended >= ends.keys():
        return []
    operations = _rebuild(study, trials or [], ends, distributions)
    if content:
        with runs.replace_atomically(_get_backup(path)) as temporary:
            temporary.write_bytes(content)
    runs.write_text(path, "".join(map(format_line, operations)))
    damage = f"is damaged after line {len(intact)}" if content else "is missing"
    kept = f", the damaged file is {_get_backup(path).name}" if content else ""
    return [f"{path}: {damage}; rebuilt from the lines before and events.jsonl{kept}"]


def _get_backup(path: Path) -> Path:
    return path.with_name(f"{path.name}.damaged")


def _parse_beginning(content: bytes) -> list[Operation]:
    """Return the operations up to the first damaged line."""
    operations = []
    for line in content.split(b"\n")[:-1]:
        try:
            operation = json.loads(line)
        except ValueError:
            break
        if not is_intact(operation):
            break
        operations.append(operation)
    return operations


def _replay(operations: Sequence[Operation]) -> list[FrozenTrial] | None:
    """Return the trials of a journal with one study; None where Optuna cannot replay it."""
    try:
        storage = JournalStorage(MemoryJournal(operations))
        return storage.get_all_trials(0, deepcopy=False) if operations else []
    except Exception:  # of any kind: Optuna does not expect damage
        return None


def _find_ends(events: Iterable[Event]) -> dict[int, TrialEnd]:
    """Return the events of trials that have ended in the log of the search, by trial number."""
    ends = {}
    for event in events:
        match event:
            case TrialEnd(trial=int(number), params=dict(), state=str(state)):
                has_value = isinstance(event.value, float) or state != "finished"
                if number >= 0 and state in STATES and has_value:
                    ends[number] = event
    return ends


def _rebuild(
    name: str,
    trials: Sequence[FrozenTrial],
    ends: Mapping[int, TrialEnd],
    distributions: Distributions,
) -> list[Operation]:
    """Return the operations of a new journal, with the known trials and what the log says of their
    ends."""
    journal = MemoryJournal()
    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        study = optuna.create_study(study_name=name, storage=JournalStorage(journal))
    finally:
        optuna.logging.set_verbosity(verbosity)
    for number in range(max([len(trials), *(number + 1 for number in ends)])):
        trial = trials[number] if number < len(trials) else None
        if number in ends and not (trial and trial.state.is_finished()):
            trial = _end_trial(trial, ends[number], distributions)
        lost = {NOTES: {"stopped": LOST}}
        study.add_trial(trial or create_trial(state=TrialState.FAIL, user_attrs=lost))
    return journal.operations


def _end_trial(
    trial: FrozenTrial | None, event: TrialEnd, distributions: Distributions
) -> FrozenTrial | None:
    """Return a trial as the event of its end describes it; None where its settings do not fit into
    the space."""
    state = STATES[event.state]
    known = ("event", "at_s", "trial", "params", "state", "value", "best")
    notes = {key: value for key, value in format_event(event).items() if key not in known}
    try:
        return create_trial(
            state=state,
            value=None if state == TrialState.FAIL else event.value,
            params=event.params,
            distributions={name: distributions[name] for name in event.params},
            user_attrs={NOTES: notes},
            system_attrs=trial.system_attrs if trial else {},
            intermediate_values=trial.intermediate_values if trial else {},
        )
    except (KeyError, TypeError, ValueError):
        return None


class SharedJournalStorage(JournalStorage, BaseHeartbeat):
    """Optuna's journal storage with heartbeats, which Optuna has for databases only."""

    def __init__(self, journal: SharedJournal, heartbeat: tuple[int, int]) -> None:
        self.interval_s, self.grace_s = heartbeat
        self.heartbeats = Path(f"{journal.path}.heartbeats")
        with _explain_failure():
            self.heartbeats.mkdir(exist_ok=True)
        super().__init__(journal)

    def record_heartbeat(self, trial_id: int) -> None:
        with _explain_failure():
            _touch(self.heartbeats / str(trial_id))

    def _get_stale_trial_ids(self, study_id: int) -> list[int]:
        """Return the running trials without heartbeat, and forget those of finished trials."""
        with _explain_failure():
            paths = list(self.heartbeats.iterdir())  # first: the journal then has their trials
            trials = self.get_all_trials(study_id, False, RUNNING)
            running = {trial._trial_id for trial in trials}
            clock = self.heartbeats / CLOCK
            _touch(clock)
            latest = _read_time(clock)
            stale = []
            for path in (path for path in paths if path.name.isdecimal()):
                trial_id = int(path.name)
                if trial_id in running:
                    if latest - _read_time(path, default=latest) > self.grace_s:
                        stale.append(trial_id)
                elif self._is_finished(trial_id):
                    path.unlink(missing_ok=True)
            return stale

    def _is_finished(self, trial_id: int) -> bool:
        with suppress(KeyError):
            return self.get_trial(trial_id).state.is_finished()
        return False

    def get_heartbeat_interval(self) -> int:
        return self.interval_s

    def get_heartbeat_stale_trial_callback(
        self,
    ) -> Callable[[optuna.Study, FrozenTrial], None]:
        return RetryHeartbeatStaleTrialCallback(max_retry=1)


def _touch(path: Path) -> None:
    """Set the time of a file to the file server's."""
    try:
        os.utime(path)
    except FileNotFoundError:
        path.touch()


def _read_time(path: Path, default: float = 0.0) -> float:
    """Return the time of a file. Opening it makes NFS ask the server."""
    try:
        with path.open("rb") as file:
            return os.fstat(file.fileno()).st_mtime
    except FileNotFoundError:
        return default


def open_journal(url: str, heartbeat: tuple[int, int]) -> SharedJournalStorage:
    """Open the journal of `url`, or create it; a UserError says what is wrong with it."""
    path = find_path(url)
    _refuse_other_files(path)
    try:
        _remove_old_lock(path)
        journal = SharedJournal(path)
        storage = SharedJournalStorage(journal, heartbeat)
        journal.append_logs([])  # shows whether it can be locked and written
    except OSError as error:
        raise _make_open_error(path, error.strerror or str(error)) from None
    except StorageInternalError as error:
        if not isinstance(error.__cause__, OSError):
            raise UserError(
                f"{path}: {error}; restore the file from a backup, or name another one for a new "
                "study"
            ) from None
        raise _make_open_error(path, str(error)) from None
    return storage


def _remove_old_lock(path: Path) -> None:
    """Remove the lock of an earlier version, a symbolic link to nothing, which Optuna would wait
    for forever."""
    lock = Path(f"{path}.lock")
    if lock.is_symlink():
        lock.unlink(missing_ok=True)


def _make_open_error(path: Path, reason: str) -> UserError:
    return UserError(
        Option("storage", f"{PREFIX}{path}")
        + f": cannot be written ({reason}); check that this user may write to the file and "
        f"to the folder {path.parent}, which also has its lock"
    )


def _refuse_other_files(path: Path) -> None:
    """Raise a UserError for a file that is not a shared journal, before anything is written."""
    if not path.parent.is_dir():
        raise UserError(
            Option("storage", f"{PREFIX}{path}")
            + f": the folder {path.parent} does not exist; create it, on a drive that all "
            "machines of the search reach"
        )
    if path.is_dir():
        raise UserError(Option("storage", f"{PREFIX}{path}") + ": is a folder; name a file in it")
    if path.name == JOURNAL and Run(path.parent).log.exists():
        raise UserError(
            Option("storage", f"{PREFIX}{path}")
            + f": belongs to the search in {path.parent}, which writes to it alone; name "
            "another file"
        )
    with suppress(OSError), path.open("rb") as file:
        start = file.read(len(FIRST))
        if not FIRST.startswith(start):
            raise UserError(
                Option("storage", f"{PREFIX}{path}")
                + ": is not a journal of a study; name another file, or one that does not exist yet"
            )


RUN_JOURNAL = "study-shared.log"
RUN_FILES = (RUN_JOURNAL, database.DATABASE)
"""A study that workers share, in the folder of their search; earlier versions had a database"""


def find_run_storage(folder: Path) -> str:
    """Return the URL of the storage that the workers of a search share without another one."""
    if (folder / database.DATABASE).exists():
        return database.make_run_database_url(folder)
    return f"{PREFIX}{folder.absolute() / RUN_JOURNAL}"


def has_run_storage(folder: Path) -> bool:
    """Whether workers share a study in the folder of their search."""
    return any((folder / name).exists() for name in RUN_FILES)


def make_absolute(url: str) -> str:
    """Return a URL that names the same storage from every working directory; refuse a database in
    memory, which other processes cannot see."""
    if is_journal(url):
        return f"{PREFIX}{find_path(url)}"
    database.refuse_in_memory(url)
    return database.make_absolute(url)


def open_storage(url: str, heartbeat: tuple[int, int] = HEARTBEAT) -> BaseStorage:
    """Open the storage, or create it."""
    if is_journal(url):
        return open_journal(url, heartbeat)
    return database.open_storage(url, heartbeat)


def get_grace_s(storage: Any) -> float:
    """Return the seconds without heartbeat after which a trial is retried."""
    if isinstance(storage, SharedJournalStorage):
        return storage.grace_s
    return float(storage._backend.grace_period)


def find_silent_trials(storage: Any, study_id: int, silent_s: float) -> list[int]:
    """Return the ids of the running trials without a heartbeat for more than `silent_s`."""
    with _set_grace(storage, silent_s):
        silent: list[int] = storage._get_stale_trial_ids(study_id)
        return silent


@contextmanager
def _set_grace(storage: Any, seconds: float) -> Iterator[None]:
    """Let trials count as stale earlier: Optuna tells which ones are, but not since when."""
    owner, name = storage, "grace_s"
    if not isinstance(storage, SharedJournalStorage):
        owner, name = storage._backend, "grace_period"
    before = getattr(owner, name)
    setattr(owner, name, seconds)
    try:
        yield
    finally:
        setattr(owner, name, before)


def check_storage(url: str) -> None:
    """Raise a UserError unless the storage can be opened and written."""
    _close(open_storage(url))


def _close(storage: BaseStorage) -> None:
    if isinstance(storage, RDBStorage):
        storage.engine.dispose()


def has_study(url: str, name: str) -> bool:
    """Whether the storage has a study of this name."""
    storage = open_storage(url)
    try:
        storage.get_study_id_from_name(name)
    except KeyError:
        return False
    finally:
        _close(storage)
    return True


def add_password(url: str) -> str:
    """Add the password to the URL for workers that do not have this process's environment."""
    return url if is_journal(url) else database.add_password(url)


def needs_one_machine(url: str) -> bool:
    """Whether only processes of one machine can share the storage."""
    return not is_journal(url) and database.is_sqlite(url)
