"""A journal that several processes write to, also from several machines: `journal:FILE`.

The file has Optuna's format with a checksum per line, as the journal of a single process. A lock
beside it (`FILE.lock`) orders the writers. A line that a kill cut off was never acknowledged: those
who read ignore it, and the next one who writes removes it.

Heartbeats of running trials are files in `FILE.heartbeats`, one per trial. They do not lengthen the
journal, need no lock, and their times all come from the clock of the file server.
"""

import errno
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import optuna
from optuna.exceptions import StorageInternalError
from optuna.storages import JournalStorage, RetryHeartbeatStaleTrialCallback
from optuna.storages._heartbeat import BaseHeartbeat
from optuna.storages.journal import JournalFileOpenLock
from optuna.storages.journal._file import BaseJournalFileLock
from optuna.trial import FrozenTrial, TrialState

from slipstream.errors import UserError
from slipstream.runs import Run
from slipstream.runs.studies import PREFIX, find_path
from slipstream.tuning.storage.journal import FLUSHED, JOURNAL, ChecksummedJournal, Log, parse_log
from slipstream.tuning.storage.lock import SymlinkLock

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
        f"--storage {PREFIX}{path}: cannot be written ({reason}); check that this user may write "
        f"to the file and to the folder {path.parent}, which also has its lock"
    )


def _refuse_other_files(path: Path) -> None:
    """Raise a UserError for a file that is not a shared journal, before anything is written."""
    if not path.parent.is_dir():
        raise UserError(
            f"--storage {PREFIX}{path}: the folder {path.parent} does not exist; create it, on a "
            "drive that all machines of the search reach"
        )
    if path.is_dir():
        raise UserError(f"--storage {PREFIX}{path}: is a folder; name a file in it")
    if path.name == JOURNAL and Run(path.parent).log.exists():
        raise UserError(
            f"--storage {PREFIX}{path}: belongs to the search in {path.parent}, which writes to it "
            "alone; name another file"
        )
    with suppress(OSError), path.open("rb") as file:
        start = file.read(len(FIRST))
        if not FIRST.startswith(start):
            raise UserError(
                f"--storage {PREFIX}{path}: is not a journal of a study; name another file, or one "
                "that does not exist yet"
            )
