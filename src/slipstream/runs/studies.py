"""The storage of a search's study, and the command that resumes a search."""

import os
from contextlib import suppress
from pathlib import Path

from slipstream.base.errors import Command, Message, Option, UserError
from slipstream.base.run_names import AUTO_FILE
from slipstream.events import SearchStart
from slipstream.runs.folder import Run
from slipstream.runs.log import parse_line

ENV_VARIABLE = "SLIPSTREAM_STORAGE"
"""The environment variable that names the storage where --storage is not given"""
PREFIX = "journal:"
"""The prefix of the URL of a journal"""
OPENING = (b'{"event": "search"', b'{"event": "resume"')
"""The beginnings of the log lines that state the storage"""


def is_journal(url: str) -> bool:
    return url.startswith(PREFIX)


def find_path(url: str) -> Path:
    """Return the file of a journal, by its real name: links to one file must share its lock."""
    name = url.removeprefix(PREFIX)
    if name.startswith("///"):  # as in the URL of a SQLite file
        name = name[2:]
    if not name or name.startswith("//"):
        raise UserError(Option("storage", url) + ": names no file; use journal:/shared/study.log")
    return Path(name).expanduser().resolve()


def read_storage(folder: Path) -> str | None:
    """Return the storage that the log of a search states, without its password; None where the
    study is in the folder."""
    stated = None
    with suppress(FileNotFoundError), Run(folder).log.open("rb") as lines:
        for line in lines:
            event = parse_line(line.rstrip(b"\n")) if line.startswith(OPENING) else None
            if isinstance(event, SearchStart):
                stated = event.storage or stated
    return None if stated is None else str(stated)


def find_storage(stated: str) -> str | None:
    """Return the storage to resume with where none is named: the journal that the log states, if it
    exists, else the storage of the environment. The URL of a database is not taken from the log:
    its password is not there, and should not be sent to an address that the log names."""
    if is_journal(stated):
        with suppress(UserError, OSError, RuntimeError, ValueError):  # of a damaged log
            if find_path(stated).is_file():
                return stated
    return os.environ.get(ENV_VARIABLE) or None


def suggest_resume(folder: Path, storage: str | None) -> Command:
    """Return the command that resumes a search whose study is in `storage`, None for its folder."""
    command = Command("auto" if (folder / AUTO_FILE).exists() else "tune", resume=folder)
    if storage is None or find_storage(storage):
        return command
    return command.add(storage=f"{PREFIX}FILE" if is_journal(storage) else "URL")


def explain_missing(folder: Path, stated: str) -> Message:
    """Return the message on how to resume a search whose storage has to be named."""
    how = f"; with the same password, set {ENV_VARIABLE}, or"
    if is_journal(stated):
        how = ", which does not exist here; if it was moved,"
    command = suggest_resume(folder, stated)
    return f"{folder}: its study is in {stated}{how} resume with: " + command
