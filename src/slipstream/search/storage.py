"""Where the study of a search is: a journal, a shared folder or a database."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import platform
import re
import time
import uuid
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import optuna
import psutil
from optuna.distributions import BaseDistribution, distribution_to_json
from optuna.exceptions import StorageInternalError
from optuna.storages import (
    BaseStorage,
    JournalStorage,
    RDBStorage,
    RetryHeartbeatStaleTrialCallback,
)
from optuna.storages._heartbeat import BaseHeartbeat
from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock
from optuna.storages.journal._file import BaseJournalFileLock
from optuna.storages.journal._storage import JournalOperation as Op
from optuna.storages.journal._storage import JournalStorageReplayResult
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState

from slipstream import runs
from slipstream.base.errors import Option, UserError
from slipstream.runs import Event, Run
from slipstream.runs.studies import PREFIX, find_path, is_journal
from slipstream.search import database
from slipstream.search.database import HEARTBEAT

Log = dict[str, Any]
"""One operation of the journal"""
Distributions = Mapping[str, BaseDistribution]
JOURNAL = "study.log"
"""In the folder of a search"""
CHECKSUM, NUMBER = "sum", "number"
"""Our own keys: the checksum of a line, and the number of a trial that is a single line"""
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
STATES = {name: state for state, name in STATE_NAMES.items()} | {CUT_OFF: TrialState.PRUNED}
OP_CODES = frozenset(Op)
FLUSHED = (Op.CREATE_STUDY, Op.SET_TRIAL_STATE_VALUES)
"""Operations that the disk has to store at once"""
LOST = "its settings were lost with a damaged line of study.log"
UNKNOWN_TIME = "1970-01-01T00:00:00+00:00"


def name_state(state: TrialState, notes: Mapping[str, Any]) -> str:
    """Return the name of a trial's state, by what is noted about it."""
    is_cut_off = state == TrialState.PRUNED and OUT_OF_TIME in notes.get("stopped", "")
    return CUT_OFF if is_cut_off else STATE_NAMES.get(state, "under way")


class ChecksummedJournal(JournalFileBackend):
    """Optuna's journal file with a checksum in each line.

    The process holds the lock of the run, so the journal needs none. A kill loses no line. Only a
    power failure can lose lines since the last `flush`, which costs milliseconds: it comes with
    every result and every new trial, not with every value.
    """

    def append_logs(self, logs: list[Log]) -> None:
        with Path(self._file_path).open("ab") as file:
            file.write(self.encode(logs))
        if any(log["op_code"] in FLUSHED for log in logs):
            self.flush()

    def encode(self, logs: list[Log]) -> bytes:
        lines = [json.dumps(add_checksum(log), separators=(",", ":")) + "\n" for log in logs]
        return "".join(lines).encode()

    def flush(self) -> None:
        """Have the disk store all lines."""
        with Path(self._file_path).open("ab") as file:
            os.fsync(file.fileno())


def add_checksum(log: Mapping[str, Any]) -> Log:
    return {**log, CHECKSUM: _compute_checksum(log)}


def _compute_checksum(log: Mapping[str, Any]) -> str:
    rest = {key: value for key, value in log.items() if key != CHECKSUM}
    return _compute_crc(json.dumps(rest, separators=(",", ":")))


def _compute_crc(text: str) -> str:
    return f"{zlib.crc32(text.encode()):08x}"


def repair(
    path: Path, study: str, distributions: Distributions, events: Iterable[Event]
) -> list[str]:
    """Make the journal readable for Optuna to its end; return what was wrong, a sentence each.

    The caller holds the lock of the run, so a lock file of Optuna belongs to a dead process.
    """
    Path(f"{path}.lock").unlink(missing_ok=True)
    finished = _find_finished(events)
    content = path.read_bytes() if path.exists() else b""
    logs = _parse_logs(content)
    intact = [log for log in logs if log is not None]
    if None not in logs[:-1] and _is_valid(intact, finished):
        if len(intact) == len(logs) == content.count(b"\n"):
            return []
        _replace(path, content, intact)
        problem = "its end was truncated or damaged, and the last operation is repeated"
        if content.endswith(b"\n") and logs[-1] is not None:
            problem = "a line break was damaged, and nothing is lost"
        return [f"{path}: {problem}; the damaged file is {_backup(path).name}"]
    rebuilt = _rebuild(logs, study, distributions, finished)
    if not _is_valid(rebuilt, {}):
        raise UserError(
            f"{path}: is damaged beyond repair; restore it from a backup, or start a new search "
            f"(the finished trials are in {path.with_name('events.jsonl')})"
        )
    _replace(path, content, rebuilt)
    count = logs.count(None)
    return [
        f"{path}: {count or 'some'} damaged part{'s' if count > 1 else ''}; rebuilt from the other "
        f"lines and events.jsonl, the damaged file is {_backup(path).name}"
    ]


def _backup(path: Path) -> Path:
    return path.with_name(f"{path.name}.damaged")


def _replace(path: Path, content: bytes, logs: Sequence[Log]) -> None:
    """Write the journal again, and keep the damaged content beside it."""
    if content:
        with runs.replace_atomically(_backup(path)) as temporary:
            temporary.write_bytes(content)
    lines = (json.dumps(log, separators=(",", ":")) + "\n" for log in logs)
    runs.write_text(path, "".join(lines))


def _parse_logs(content: bytes) -> list[Log | None]:
    """Return every operation; None for a damaged part."""
    logs: list[Log | None] = []
    for line in content.split(b"\n"):
        for log in _parse_line(line.decode(errors="replace")) if line else []:
            if log is not None or not logs or logs[-1] is not None:
                logs.append(log)
    return logs


def _parse_line(line: str) -> list[Log | None]:
    """Return the operation of a line; two where the line break between them was damaged."""
    starts = [match.start() for match in re.finditer(r'\{"op_code"', line)]
    if len(starts) < 2:
        return [parse_log(line)]
    ends = [*starts[1:], len(line) + 1]
    return [parse_log(line[a : b - 1]) for a, b in zip(starts, ends, strict=True)]


def parse_log(text: str) -> Log | None:
    """Return the operation of a line; None if it is damaged."""
    try:
        log = json.loads(text)
    except ValueError:
        return None
    if not isinstance(log, dict) or log.get("op_code") not in OP_CODES:
        return None
    checksum = log.get(CHECKSUM)
    end = f',"{CHECKSUM}":"{checksum}"}}'
    if text.endswith(end):  # as we write it: no need to format the rest again
        rest = text[: -len(end)] + "}"
        return log if checksum == _compute_crc(rest) else None
    return log if checksum in (None, _compute_checksum(log)) else None


def _is_valid(logs: Sequence[Log], finished: Mapping[int, Event]) -> bool:
    """Whether Optuna accepts these operations and has every trial that is known to be finished."""
    replayed = JournalStorageReplayResult("")
    try:
        replayed.apply_logs(logs)
        trials = replayed.get_all_trials(0, None) if logs else []
    except Exception:  # of any kind: Optuna does not expect damage
        return False
    return {trial.number for trial in trials if trial.state.is_finished()} >= finished.keys()


def _find_finished(events: Iterable[Event]) -> dict[int, Event]:
    """Return the events of finished trials in the log of the search, by trial number."""
    finished = {}
    for event in events:
        match event:
            case {"event": "trial", "trial": int(number), "params": dict(), "state": str(state)}:
                has_value = isinstance(event.get("value"), float) or state != "finished"
                if number >= 0 and state in STATES and has_value:
                    finished[number] = event
    return finished


@dataclass
class TrialRecord:
    """What the intact lines and the log say about one trial."""

    params: dict[str, float] = field(default_factory=dict)
    """In Optuna's internal representation"""
    distributions: dict[str, str] = field(default_factory=dict)
    losses: dict[str, float] = field(default_factory=dict)
    user: dict[str, Any] = field(default_factory=dict)
    system: dict[str, Any] = field(default_factory=dict)
    state: TrialState = TrialState.RUNNING
    value: float | None = None
    start: str | None = None
    end: str | None = None

    def apply(self, log: Log) -> None:
        match log["op_code"]:
            case Op.SET_TRIAL_PARAM:
                self.params[log["param_name"]] = log["param_value_internal"]
                self.distributions[log["param_name"]] = log["distribution"]
            case Op.SET_TRIAL_STATE_VALUES:
                self.state, self.end = TrialState(log["state"]), log.get("datetime_complete")
                self.value = log["values"][0] if log["values"] else None
            case Op.SET_TRIAL_INTERMEDIATE_VALUE:
                self.losses[str(log["step"])] = log["intermediate_value"]
            case Op.SET_TRIAL_USER_ATTR:
                self.user |= log["user_attr"]
            case Op.SET_TRIAL_SYSTEM_ATTR:
                self.system |= log["system_attr"]
            case Op.CREATE_TRIAL:
                self.start, self.end = log["datetime_start"], log.get("datetime_complete")
                self.params |= log.get("params", {})
                self.distributions |= log.get("distributions", {})
                self.losses |= log.get("intermediate_values", {})
                self.user |= log.get("user_attrs", {})
                self.system |= log.get("system_attrs", {})
                self.state = TrialState(log.get("state", self.state))
                self.value = log.get("value")

    def complete(self, event: Event, distributions: Distributions) -> None:
        """Add what is missing from the event of the finished trial."""
        for name, value in event["params"].items():
            if name in distributions and name not in self.params:
                try:
                    self.params[name] = distributions[name].to_internal_repr(value)
                except ValueError:
                    continue
                self.distributions[name] = distribution_to_json(distributions[name])
        if not self.state.is_finished():
            self.state, self.value = STATES[event["state"]], event.get("value")
        other = ("event", "at_s", "trial", "params", "state", "value")
        self.user.setdefault(NOTES, {k: v for k, v in event.items() if k not in other})

    def to_log(self, number: int) -> Log:
        """Return one operation that creates the trial with all its values."""
        end = {"datetime_complete": self.end or self.start or UNKNOWN_TIME}
        return add_checksum(
            {
                "op_code": Op.CREATE_TRIAL,
                "worker_id": "mended",
                "study_id": 0,
                NUMBER: number,
                "datetime_start": self.start or UNKNOWN_TIME,
                **(end if self.state.is_finished() else {}),
                "state": self.state,
                "value": self.value,
                "values": None,
                "distributions": self.distributions,
                "params": self.params,
                "user_attrs": self.user,
                "system_attrs": self.system,
                "intermediate_values": self.losses,
            }
        )


def _rebuild(
    logs: Sequence[Log | None],
    study: str,
    distributions: Distributions,
    finished: Mapping[int, Event],
) -> list[Log]:
    """Build a journal of what is left: the study, its attributes and one line for each trial."""
    records, attributes = _collect_records(logs)
    for number, event in finished.items():
        records.setdefault(number, TrialRecord()).complete(event, distributions)
    for number in range(max(records, default=-1) + 1):
        record = records.setdefault(number, TrialRecord())
        if not set(distributions) <= set(record.params):
            record.state, record.value = TrialState.FAIL, None
            record.user = {NOTES: {"stopped": LOST}}
    create_study = {
        "op_code": Op.CREATE_STUDY,
        "worker_id": "mended",
        "study_name": study,
        "directions": [StudyDirection.MINIMIZE],
    }
    trials = (records[number].to_log(number) for number in sorted(records))
    return [add_checksum(create_study), *attributes, *trials]


def _collect_records(logs: Sequence[Log | None]) -> tuple[dict[int, TrialRecord], list[Log]]:
    """Return what the intact lines say: the trials by number, and the attributes of the study."""
    records: dict[int, TrialRecord] = {}
    attributes: list[Log] = []
    num_created: int | None = 0
    """None after a damaged line, which may have created a trial"""
    for log in logs:
        try:
            if log is None:
                num_created = None
            elif log["op_code"] == Op.CREATE_TRIAL:
                if (number := log.get(NUMBER, num_created)) is not None:
                    records.setdefault(number, TrialRecord()).apply(log)
                num_created = None if num_created is None else num_created + 1
            elif "trial_id" in log:
                records.setdefault(log["trial_id"], TrialRecord()).apply(log)
            elif log["op_code"] in (Op.SET_STUDY_USER_ATTR, Op.SET_STUDY_SYSTEM_ATTR):
                attributes.append(log)
        except (KeyError, TypeError, ValueError, IndexError):
            num_created = None
    return records, attributes


GRACE_S = 30.0
"""After which the unchanged lock of another machine counts as that of a dead process; a holder
needs milliseconds"""
LOOK_EVERY_S = 1.0
"""How often those who wait look who the holder is. NFS caches what was looked up, and may then go
on reporting a lock that has been released; it does not cache failures to create one"""
MAX_PAUSE_S = 0.05
"""Between attempts"""


class SymlinkLock(BaseJournalFileLock):
    """A lock on `path`, for one thread at a time."""

    def __init__(self, path: str, grace_s: float = GRACE_S) -> None:
        self.path, self.grace_s = Path(f"{path}.lock"), grace_s
        self._process = _identify_process()
        self._target = ""

    def acquire(self) -> bool:
        self._target = ":".join(map(str, (*self._process, uuid.uuid4().hex[:8])))
        looked_at, pause_s = time.monotonic(), 0.001
        holder, since = "", looked_at
        while True:
            with suppress(FileExistsError):
                self.path.symlink_to(self._target)
                return True
            now = time.monotonic()
            if now - looked_at > LOOK_EVERY_S:
                looked_at = now
                if (current := self._read_target()) != holder:
                    holder, since = current, now
                if holder and (_is_dead(holder, self._process) or now - since > self.grace_s):
                    self._remove(holder)
                    continue
            time.sleep(pause_s)
            pause_s = min(pause_s * 2, MAX_PAUSE_S)

    def is_held(self) -> bool:
        """Whether no other process has taken this lock for that of a dead one."""
        return self._read_target() == self._target

    def release(self) -> None:
        if self.is_held():
            with suppress(OSError):
                self.path.unlink()

    def _read_target(self) -> str:
        """Return the holder; "" where the lock is free."""
        try:
            return str(self.path.readlink())
        except FileNotFoundError:
            return ""
        except OSError:  # a file, as Optuna's other lock creates it
            with suppress(OSError):
                return f"{self.path.lstat().st_ino} {self.path.lstat().st_mtime_ns}"
            return ""

    def _remove(self, holder: str) -> None:
        """Remove the lock of a dead holder, unless another process has just done so."""
        aside = self.path.with_name(f"{self.path.name}.{uuid.uuid4().hex}")
        try:
            self.path.rename(aside)  # succeeds for one of those that wait
        except FileNotFoundError:
            return
        with suppress(OSError):
            if (target := str(aside.readlink())) != holder:
                self.path.symlink_to(target)  # that of a new holder, which gets it back
        aside.unlink(missing_ok=True)


def _identify_process() -> tuple[str, int, int]:
    """Return what tells others on this machine whether this process is alive: the machine, the
    number of the process and when it started.

    Together under 60 characters, since ext4 then stores the link without a block of its own, and
    removes it in microseconds instead of milliseconds.
    """
    names = [platform.node()]
    with suppress(OSError):  # containers may share a name, but not the numbers of processes
        names.append(Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii"))
        names.append(str(Path("/proc/self/ns/pid").readlink()))
    machine = hashlib.sha256("".join(names).encode()).hexdigest()[:12]
    process = psutil.Process()
    return machine, process.pid, int(process.create_time())


def _is_dead(holder: str, observer: tuple[str, int, int]) -> bool:
    """Whether the holder is a process of this machine that has ended."""
    try:
        machine, pid, since, _ = holder.split(":")
        if machine != observer[0]:
            return False
        process = psutil.Process(int(pid))
        same = abs(process.create_time() - int(since)) < 2
        return not same or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
    except (psutil.Error, ValueError, OverflowError):
        return False


FIRST = b'{"op_code"'
"""How every line begins"""
NUM_READS = 5
"""Of a line that seems damaged: somebody may be removing what a kill cut off at this moment"""
REREAD_S = 0.05
CLOCK = "clock"
"""A file among the heartbeats, whose time is the current one"""


class SharedJournal(ChecksummedJournal):
    """Optuna's journal file for several writers."""

    def __init__(self, path: Path) -> None:
        # Windows has no symbolic links for ordinary users
        lock = JournalFileOpenLock(str(path)) if os.name == "nt" else SymlinkLock(str(path))
        super().__init__(str(path), lock)
        self.path = path
        self._lock: BaseJournalFileLock
        self._num_read = self._offset = 0

    def read_logs(self, log_number_from: int) -> Iterator[Log]:  # type: ignore[override]
        """Yield the operations since the previous call; all of them from 0."""
        if log_number_from == 0:
            self._num_read = self._offset = 0
        assert log_number_from == self._num_read
        num_reads, last_damage = 0, -1
        while True:
            for line in self._read_lines():
                log = parse_log(line.decode(errors="replace"))
                if log is None:
                    break
                self._num_read, self._offset = self._num_read + 1, self._offset + len(line) + 1
                yield log
            else:
                return
            num_reads = num_reads + 1 if last_damage == self._offset else 1
            if num_reads == NUM_READS:
                raise StorageInternalError(f"line {self._num_read + 1} is damaged")
            last_damage = self._offset
            time.sleep(REREAD_S)

    def _read_lines(self) -> list[bytes]:
        """Return the complete lines that have not been read yet."""
        with _explain_failure(), self.path.open("rb") as file:  # which NFS then reads anew
            file.seek(self._offset)
            return file.read().split(b"\n")[:-1]

    def append_logs(self, logs: list[Log]) -> None:
        with _explain_failure():
            while not self._append(self.encode(logs)):
                pass
            if any(log["op_code"] in FLUSHED for log in logs):
                self.flush()

    def _append(self, lines: bytes) -> bool:
        """Append the lines; return whether this process had the lock until then."""
        self._lock.acquire()
        try:
            # without O_CREAT: a new file would not be this journal
            descriptor = os.open(self.path, os.O_RDWR | os.O_APPEND | getattr(os, "O_BINARY", 0))
            with os.fdopen(descriptor, "r+b", buffering=0) as file:
                end = self._remove_cut_off_line(file)
                if isinstance(self._lock, SymlinkLock) and not self._lock.is_held():
                    return False
                try:
                    if file.write(lines) != len(lines):
                        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                except OSError:
                    file.truncate(end)
                    raise
            return True
        finally:
            self._lock.release()

    def _remove_cut_off_line(self, file: Any) -> int:
        """Remove what follows the last line break; return the size of the file."""
        end: int = file.seek(0, os.SEEK_END)
        if end < self._offset:
            raise StorageInternalError("it has become shorter; was it replaced?")
        file.seek(max(end - 1, 0))
        if file.read(1) in (b"", b"\n"):
            return end
        file.seek(self._offset)
        end = self._offset + file.read().rfind(b"\n") + 1
        file.truncate(end)
        return end


@contextmanager
def _explain_failure() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StorageInternalError(error.strerror or str(error)) from error


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
            running = {one._trial_id for one in self.get_all_trials(study_id, False, _RUNNING)}
            clock = self.heartbeats / CLOCK
            _touch(clock)
            latest = _read_time(clock)
            stale = []
            for path in (one for one in paths if one.name.isdecimal()):
                trial_id = int(path.name)
                if trial_id in running:
                    if latest - _read_time(path, default=latest) > self.grace_s:
                        stale.append(trial_id)
                elif self._is_finished(trial_id):
                    path.unlink(missing_ok=True)
            return stale

    def _is_finished(self, trial_id: int) -> bool:
        trial = self._replay_result._trials.get(trial_id)
        return trial is not None and trial.state.is_finished()

    def get_heartbeat_interval(self) -> int:
        return self.interval_s

    def get_heartbeat_stale_trial_callback(
        self,
    ) -> Callable[[optuna.Study, FrozenTrial], None]:
        return RetryHeartbeatStaleTrialCallback(max_retry=1)


_RUNNING = (TrialState.RUNNING,)


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
