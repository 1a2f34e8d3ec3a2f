"""The storage of a study that several processes share: a database or a journal, by its URL."""

from pathlib import Path

from optuna.storages import BaseStorage, RDBStorage

from slipstream.tuning.storage import database, shared_journal
from slipstream.tuning.storage.database import HEARTBEAT
from slipstream.tuning.storage.shared_journal import PREFIX

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


def is_journal(url: str) -> bool:
    return url.startswith(PREFIX)


def make_absolute(url: str) -> str:
    """Return a URL that names the same storage from every working directory; refuse a database in
    memory, which other processes cannot see."""
    if is_journal(url):
        return f"{PREFIX}{shared_journal.find_path(url)}"
    database.refuse_in_memory(url)
    return database.make_absolute(url)


def open_storage(url: str, heartbeat: tuple[int, int] = HEARTBEAT) -> BaseStorage:
    """Open the storage, or create it."""
    if is_journal(url):
        return shared_journal.open_journal(url, heartbeat)
    return database.open_storage(url, heartbeat)


def check_storage(url: str) -> None:
    """Raise a UserError unless the storage can be opened and written."""
    storage = open_storage(url)
    if isinstance(storage, RDBStorage):
        storage.engine.dispose()


def add_password(url: str) -> str:
    """Add the password to the URL for workers that do not have this process's environment."""
    return url if is_journal(url) else database.add_password(url)


def exists(url: str) -> bool:
    """Whether there is a journal already."""
    return shared_journal.find_path(url).is_file()


def needs_one_machine(url: str) -> bool:
    """Whether only processes of one machine can share the storage."""
    return not is_journal(url) and database.is_sqlite(url)
