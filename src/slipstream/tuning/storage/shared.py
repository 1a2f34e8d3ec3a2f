"""The storage of a study that several processes share: a database or a journal, by its URL."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from optuna.storages import BaseStorage, RDBStorage

from slipstream.runs.studies import PREFIX, find_path, is_journal
from slipstream.tuning.storage import database, shared_journal
from slipstream.tuning.storage.database import HEARTBEAT
from slipstream.tuning.storage.shared_journal import SharedJournalStorage

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
        return shared_journal.open_journal(url, heartbeat)
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
