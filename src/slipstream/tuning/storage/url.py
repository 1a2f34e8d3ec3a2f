"""Parses the URL of a database, and masks its secrets.

`mask_url` keeps only the parts that are known to be harmless and masks a URL without the expected
form as a whole. So a mistyped URL reveals nothing either.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote, unquote_plus

import sqlalchemy
from sqlalchemy import exc

from slipstream.errors import UserError

ENV_VARIABLE = "SLIPSTREAM_STORAGE"
"""Used where --storage is not given"""
HIDDEN = "***"
URL = re.compile(
    r"(?P<scheme>[a-z][a-z0-9_]*(?:\+[a-z0-9_]+)?)://"
    r"(?:(?P<user>[\w.%+-]*)(?P<password>:[^@]*)?@)?"
    r"(?P<location>(?:[A-Za-z0-9._-]*|\[[0-9A-Fa-f:.]+\])(?::[0-9]+)?(?:/[\w./%~+ -]*)?)"
    r"(?:\?(?P<query>.*))?",
    re.DOTALL,
)
SQLITE_FILE = re.compile(
    r"(?P<location>sqlite(?:\+pysqlite)?:///[^?]*)(?:\?(?P<query>.*))?", re.DOTALL
)
HARMLESS = ("sslmode", "connect_timeout", "timeout", "mode", "cache", "uri")
"""Options of a URL whose values are no secrets"""
MASKED = ("password", "sslpassword", "passfile", "user", "host", "odbc_connect")
"""Options whose name is kept and whose value is masked"""
NOT_SECRET = (
    *(*HARMLESS, "user", "host", "passfile", "application_name", "target_session_attrs"),
    *("sslrootcert", "sslcert", "sslkey", "driver", "charset"),
)
"""Options that need no warning in a command line"""


def mask_url(url: str) -> str:
    """Return the URL without its password and without options that may contain one."""
    if file := SQLITE_FILE.fullmatch(url):
        return file["location"] + _mask_query(file["query"])
    parts = URL.fullmatch(url)
    if parts is None:
        scheme = re.match(r"[a-z][a-z0-9+]{0,30}://", url)
        return f"{scheme[0] if scheme else ''}{HIDDEN}"
    user = parts["user"] or ""
    secret = f":{HIDDEN}" if parts["password"] else ""
    who = f"{user}{secret}@" if user or secret else ""
    return f"{parts['scheme']}://{who}{parts['location']}{_mask_query(parts['query'])}"


def _mask_query(query: str | None) -> str:
    if query is None:
        return ""
    masked = []
    for option in query.split("&"):
        name, _, value = option.partition("=")
        if name in HARMLESS and re.fullmatch(r"[\w.-]*", value):
            masked.append(option)
        else:
            masked.append(f"{name}={HIDDEN}" if name in MASKED else HIDDEN)
    return "?" + "&".join(masked)


def holds_secret(url: str) -> bool:
    """Whether the URL contains a password, or something that may be one."""
    return any(True for _ in _find_secrets(url))


def mask_secrets(text: str, url: str | None) -> str:
    """Mask the secrets of the URL in a message of a database driver."""
    if not url:
        return text
    text = text.replace(url, mask_url(url))
    secrets = {
        form
        for secret in _find_secrets(url)
        for form in (secret, unquote(secret), unquote_plus(secret))
    }
    for secret in sorted(filter(None, secrets), key=len, reverse=True):
        text = text.replace(secret, HIDDEN)
    return text


def _find_secrets(url: str) -> Iterator[str]:
    """Yield everything between the user name and the host, and the values of options."""
    rest = "" if SQLITE_FILE.fullmatch(url) else url.partition("://")[2]
    before, at, _ = rest.rpartition("@")
    if at and ":" in before:
        password = before.partition(":")[2]
        yield from filter(None, [password, *password.split("@")])
    for option in url.partition("?")[2].split("&"):
        name, _, value = option.partition("=")
        if name in NOT_SECRET:
            continue
        if name not in MASKED:  # it may be the rest of a password with a &
            yield from filter(None, [name])
        yield from filter(None, [value])
        for part in re.split(r"[;}]", unquote_plus(value)):  # odbc_connect is a list of options
            yield from filter(None, [part.partition("=")[2].strip("{")])


def parse_url(url: str) -> sqlalchemy.URL:
    """Parse the URL; a UserError says what is wrong with it."""
    try:
        address = sqlalchemy.make_url(url)
    except (exc.ArgumentError, ValueError):  # ValueError: the port is not a number
        raise _make_url_error(url) from None
    if "@" in (address.host or ""):  # an unescaped @ ended the password too early
        raise _make_url_error(url)
    if address.drivername in ("postgresql", "postgres"):
        return address.set(drivername="postgresql+psycopg2")
    return address


def _make_url_error(url: str) -> UserError:
    return UserError(
        f"--storage {mask_url(url)}: is not the URL of a database; use sqlite:///FILE or "
        "postgresql://USER@HOST:PORT/DATABASE with a numeric PORT; in a name or a password, "
        "write @ : / ? % as %40 %3A %2F %3F %25"
    )


def refuse_in_memory(url: str) -> None:
    """Raise a UserError for a database in memory, which other processes cannot see."""
    address = parse_url(url)
    if address.get_backend_name() != "sqlite":
        return
    name = address.database or ""
    if name == "" or ":memory:" in name or address.query.get("mode") == "memory":
        raise UserError(
            f"--storage {mask_url(url)}: is a database in memory, which other workers cannot see "
            "and which ends with this process; name a file: sqlite:///FILE"
        )


def make_absolute(url: str) -> str:
    """Return a URL that names the same database from every working directory."""
    address = parse_url(url)
    name = address.database or ""
    if (
        address.get_backend_name() != "sqlite"
        or name.startswith("file:")
        or Path(name).is_absolute()
    ):
        return url
    return address.set(database=str(Path(name).absolute())).render_as_string(hide_password=False)


def add_password(url: str) -> str:
    """Add PostgreSQL's password from the environment, for workers with another environment."""
    address, password = parse_url(url), os.environ.get("PGPASSWORD")
    has_password = address.password or "password" in address.query
    if address.get_backend_name() != "postgresql" or has_password or not password:
        return url
    return address.set(password=password).render_as_string(hide_password=False)
