"""The database that several processes keep one study in."""

from __future__ import annotations

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

from slipstream.errors import ResumableError, UserError
from slipstream.tuning.storage import url as addresses
from slipstream.tuning.storage.url import mask_secrets, mask_url

DATABASE = "study.db"
HEARTBEAT_S, GRACE_PERIOD_S = 10, 60
"""From one sign of life to the next, and the silence after which a trial is given to others"""
ATTEMPTS = 5


def open_storage(
    url: str, *, beat_s: int = HEARTBEAT_S, grace_s: int = GRACE_PERIOD_S
) -> RDBStorage:
    """The database that `url` names, with its tables."""
    address = addresses.parse_url(url)
    options: dict[str, Any] = {"pool_pre_ping": True}
    match address.get_backend_name():
        case "sqlite":
            options["connect_args"] = {"timeout": 60}  # others may be writing
        case "postgresql":
            options["connect_args"] = {"connect_timeout": 10}
    for attempt in range(1, ATTEMPTS + 1):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
                storage = RDBStorage(
                    # Optuna fills in what is in braces
                    _text(address).replace("{", "{{").replace("}", "}}"),
                    engine_kwargs=options,
                    heartbeat_interval=beat_s,
                    grace_period=grace_s,
                    heartbeat_stale_trial_callback=RetryHeartbeatStaleTrialCallback(max_retry=1),
                )
            break
        except (ImportError, exc.NoSuchModuleError):
            raise _undriven(url, address) from None
        except (exc.DBAPIError, StorageInternalError) as error:
            raced = isinstance(error, exc.IntegrityError) or "already exists" in str(error)
            if attempt == ATTEMPTS or not raced:
                raise _unreachable(url, error) from None
            time.sleep(0.2 * attempt)  # another process is making the same tables
        except RuntimeError as error:  # Optuna's: tables of another version
            raise UserError(f"--storage {mask_url(url)}: {mask_secrets(str(error), url)}") from None
        except Exception as error:  # whatever a driver makes of the URL's options
            raise _unreachable(url, error) from None
    if address.get_backend_name() == "sqlite":  # who reads does not wait for who writes
        with suppress(exc.DBAPIError), storage.engine.connect() as connection:
            connection.exec_driver_sql("PRAGMA journal_mode=WAL")
    return storage


def make_run_database_url(folder: Path) -> str:
    """The URL of a database in a run's folder."""
    return sqlalchemy.URL.create("sqlite", database=str(folder / DATABASE)).render_as_string()


def check_integrity(folder: Path) -> None:
    """A UserError where the database in a run's folder is damaged, before a search goes on."""
    path = folder / DATABASE
    if not path.exists():
        return
    try:
        with closing(sqlite3.connect(path, timeout=60)) as connection:
            (found,) = connection.execute("PRAGMA quick_check(1)").fetchone()
    except sqlite3.DatabaseError as error:
        found = str(error)
    if found != "ok":
        found = found.splitlines()[-1]
        raise UserError(
            f"{path}: is damaged ({found}); restore it from a copy, or start a new search (the "
            f"finished trials are in {folder / 'events.jsonl'})"
        )


def is_sqlite(url: str) -> bool:
    return addresses.parse_url(url).get_backend_name() == "sqlite"


def _text(address: sqlalchemy.URL) -> str:
    return address.render_as_string(hide_password=False)


def _undriven(url: str, address: sqlalchemy.URL) -> UserError:
    kind = address.drivername.split("+")[0]
    if kind == "postgresql":
        fix = "install it with: pip install 'slipstream[postgres]'"
    else:
        fix = "give sqlite:///FILE or postgresql://..."
    return UserError(f"--storage {mask_url(url)}: no driver for {kind} is here; {fix}")


def _unreachable(url: str, error: Exception) -> Exception:
    said = str(getattr(error, "orig", None) or error.__cause__ or error).strip()
    why = mask_secrets(said.split("\n")[0], url) if said else type(error).__name__
    if "disk is full" in why:
        return ResumableError(f"{mask_url(url)}: {why}; make room")
    return UserError(
        f"--storage {mask_url(url)}: the database cannot be opened ({why}); is it running, "
        "and may this user write to it?"
    )
