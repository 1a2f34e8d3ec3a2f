"""Opens the database of a study that several processes share."""

import os
import sqlite3
import time
import warnings
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import optuna
import sqlalchemy
from optuna.exceptions import StorageInternalError
from optuna.storages import RDBStorage, RetryHeartbeatStaleTrialCallback
from sqlalchemy import exc

from slipstream.base.errors import Option, ResumableError, UserError
from slipstream.base.text import mask_secrets, mask_url


def parse_url(url: str) -> sqlalchemy.URL:
    """Parse the URL; a UserError says what is wrong with it."""
    try:
        address = sqlalchemy.make_url(url)
    except (exc.ArgumentError, ValueError):  # ValueError: the port is not a number
        address = None
    # an unescaped @ ends the password too early
    if address is None or "@" in (address.host or ""):
        raise UserError(
            Option("storage", mask_url(url))
            + ": is not the URL of a database; use journal:FILE, sqlite:///FILE or "
            "postgresql://USER@HOST:PORT/DATABASE with a numeric PORT; in a name or a "
            "password, write @ : / ? % as %40 %3A %2F %3F %25"
        )
    if address.drivername in ("postgresql", "postgres"):
        return address.set(drivername="postgresql+psycopg2")
    return address


def refuse_in_memory(url: str) -> None:
    """Raise a UserError for a database in memory, which other processes cannot see."""
    address = parse_url(url)
    name = address.database or ""
    in_memory = not name or ":memory:" in name or address.query.get("mode") == "memory"
    if in_memory and address.get_backend_name() == "sqlite":
        raise UserError(
            Option("storage", mask_url(url))
            + ": is a database in memory, which other workers cannot see and which ends with "
            "this process; name a file: sqlite:///FILE"
        )


def make_absolute(url: str) -> str:
    """Return a URL that names the same database from every working directory."""
    address = parse_url(url)
    name = address.database or ""
    is_absolute = name.startswith("file:") or Path(name).is_absolute()
    if is_absolute or address.get_backend_name() != "sqlite":
        return url
    return _to_text(address.set(database=str(Path(name).absolute())))


def add_password(url: str) -> str:
    """Add PostgreSQL's password from the environment, for workers with another environment."""
    address, password = parse_url(url), os.environ.get("PGPASSWORD")
    has_password = address.password or "password" in address.query
    if address.get_backend_name() != "postgresql" or has_password or not password:
        return url
    return _to_text(address.set(password=password))


DATABASE = "study.db"
HEARTBEAT = (10, 60)
"""Seconds between heartbeats of a trial, and those without one until another worker retries it"""
MAX_ATTEMPTS = 5


def open_storage(url: str, heartbeat: tuple[int, int] = HEARTBEAT) -> RDBStorage:
    """Open the database of `url` and create its tables."""
    address = parse_url(url)
    options: dict[str, Any] = {"pool_pre_ping": True}
    backend = address.get_backend_name()
    if backend == "sqlite":
        options["connect_args"] = {"timeout": 60}  # other processes may be writing
    elif backend == "postgresql":
        options["connect_args"] = {"connect_timeout": 10}
    for attempt in range(1, MAX_ATTEMPTS + 1):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
                storage = RDBStorage(
                    # Optuna formats the URL, so braces must be doubled
                    _to_text(address).replace("{", "{{").replace("}", "}}"),
                    engine_kwargs=options,
                    heartbeat_interval=heartbeat[0],
                    grace_period=heartbeat[1],
                    heartbeat_stale_trial_callback=RetryHeartbeatStaleTrialCallback(max_retry=1),
                )
            break
        except (ImportError, exc.NoSuchModuleError):
            raise _make_driver_error(url, address) from None
        except (exc.DBAPIError, StorageInternalError) as error:
            is_race = isinstance(error, exc.IntegrityError) or "already exists" in str(error)
            if attempt == MAX_ATTEMPTS or not is_race:
                raise _make_open_error(url, error) from None
            time.sleep(0.2 * attempt)  # another process creates the same tables
        except RuntimeError as error:  # from Optuna: the tables have another version
            raise UserError(
                Option("storage", mask_url(url)) + f": {mask_secrets(str(error), url)}"
            ) from None
        except Exception as error:  # drivers raise anything for the options of a URL
            raise _make_open_error(url, error) from None
    if backend == "sqlite":  # readers do not wait for writers in WAL mode
        with suppress(exc.DBAPIError), storage.engine.connect() as connection:
            connection.exec_driver_sql("PRAGMA journal_mode=WAL")
    return storage


def make_run_database_url(folder: Path) -> str:
    """Return the URL of the database in a run folder."""
    return sqlalchemy.URL.create("sqlite", database=str(folder / DATABASE)).render_as_string()


def check_integrity(folder: Path) -> None:
    """Raise a UserError if the database in a run folder is damaged."""
    path = folder / DATABASE
    if not path.exists():
        return
    try:
        with closing(sqlite3.connect(path, timeout=60)) as connection:
            (answer,) = connection.execute("PRAGMA quick_check(1)").fetchone()
    except sqlite3.DatabaseError as error:
        answer = str(error)
    if answer != "ok":
        raise UserError(
            f"{path}: is damaged ({answer.splitlines()[-1]}); restore it from a backup, or start a "
            f"new search (the finished trials are in {folder / 'events.jsonl'})"
        )


def is_sqlite(url: str) -> bool:
    return parse_url(url).get_backend_name() == "sqlite"


def _to_text(address: sqlalchemy.URL) -> str:
    return address.render_as_string(hide_password=False)


def _make_driver_error(url: str, address: sqlalchemy.URL) -> UserError:
    kind = address.drivername.split("+")[0]
    fix = "use sqlite:///FILE or postgresql://..."
    if kind == "postgresql":
        fix = "install it with: pip install 'slipstream[postgres]'"
    return UserError(
        Option("storage", mask_url(url)) + f": the driver for {kind} is not installed; {fix}"
    )


def _make_open_error(url: str, error: Exception) -> Exception:
    message = str(getattr(error, "orig", None) or error.__cause__ or error).strip()
    reason = mask_secrets(message.split("\n")[0], url) if message else type(error).__name__
    if "disk is full" in reason:
        return ResumableError(f"{mask_url(url)}: {reason}; free some space")
    return UserError(
        Option("storage", mask_url(url))
        + f": cannot open the database ({reason}); check that the server is running and "
        "that this user may write to it"
    )
