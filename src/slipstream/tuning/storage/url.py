"""The URL of a database: read, and shown without what is secret in it.

What is shown is put together from parts that are known to be harmless; whatever does not have the
expected form is hidden as a whole. So a mistyped URL gives nothing away, either.
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
"""The environment variable that stands for --storage"""
HIDDEN = "***"
FORM = re.compile(
    r"(?P<scheme>[a-z][a-z0-9_]*(?:\+[a-z0-9_]+)?)://"
    r"(?:(?P<user>[\w.%+-]*)(?P<password>:[^@]*)?@)?"
    r"(?P<place>(?:[A-Za-z0-9._-]*|\[[0-9A-Fa-f:.]+\])(?::[0-9]+)?(?:/[\w./%~+ -]*)?)"
    r"(?:\?(?P<query>.*))?",
    re.DOTALL,
)
FILE = re.compile(r"(?P<place>sqlite(?:\+pysqlite)?:///[^?]*)(?:\?(?P<query>.*))?", re.DOTALL)
SHOWN = ("sslmode", "connect_timeout", "timeout", "mode", "cache", "uri")
"""Options of a URL that hold no secret"""
NAMED = ("password", "sslpassword", "passfile", "user", "host", "odbc_connect")
"""Options whose name is shown, but not their value"""
OPEN = (
    *(*SHOWN, "user", "host", "passfile", "application_name", "target_session_attrs"),
    *("sslrootcert", "sslcert", "sslkey", "driver", "charset"),
)
"""Options that are no reason to warn"""


def mask_url(url: str) -> str:
    """The URL to show: no password, no option that may hold one."""
    if file := FILE.fullmatch(url):
        return file["place"] + _mask_query(file["query"])
    parts = FORM.fullmatch(url)
    if parts is None:
        scheme = re.match(r"[a-z][a-z0-9+]{0,30}://", url)
        return f"{scheme[0] if scheme else ''}{HIDDEN}"
    user = parts["user"] or ""
    secret = f":{HIDDEN}" if parts["password"] else ""
    who = f"{user}{secret}@" if user or secret else ""
    return f"{parts['scheme']}://{who}{parts['place']}{_mask_query(parts['query'])}"


def _mask_query(query: str | None) -> str:
    if query is None:
        return ""
    shown = []
    for option in query.split("&"):
        name, _, value = option.partition("=")
        if name in SHOWN and re.fullmatch(r"[\w.-]*", value):
            shown.append(option)
        else:
            shown.append(f"{name}={HIDDEN}" if name in NAMED else HIDDEN)
    return "?" + "&".join(shown)


def holds_secret(url: str) -> bool:
    """Whether a password, or what may be one, stands in the URL."""
    return any(True for _ in _secrets(url))


def mask_secrets(text: str, url: str | None) -> str:
    """A text of a driver's, without what is secret in the URL that it was given."""
    if not url:
        return text
    text = text.replace(url, mask_url(url))
    found = {form for one in _secrets(url) for form in (one, unquote(one), unquote_plus(one))}
    for secret in sorted(filter(None, found), key=len, reverse=True):
        text = text.replace(secret, HIDDEN)
    return text


def _secrets(url: str) -> Iterator[str]:
    """Everything between the user's name and the host, and the values of options."""
    rest = "" if FILE.fullmatch(url) else url.partition("://")[2]
    before, at, _ = rest.rpartition("@")
    if at and ":" in before:
        password = before.partition(":")[2]
        yield from filter(None, [password, *password.split("@")])
    for option in url.partition("?")[2].split("&"):
        name, _, value = option.partition("=")
        if name in OPEN:
            continue
        if name not in NAMED:  # perhaps the rest of a password that holds a &
            yield from filter(None, [name])
        yield from filter(None, [value])
        for part in re.split(r"[;}]", unquote_plus(value)):  # odbc_connect is a list itself
            yield from filter(None, [part.partition("=")[2].strip("{")])


def parse_url(url: str) -> sqlalchemy.URL:
    """The parts of a URL; a UserError says what is wrong with it."""
    try:
        address = sqlalchemy.make_url(url)
    except (exc.ArgumentError, ValueError):  # ValueError: of a port that is no number
        raise _misread(url) from None
    if "@" in (address.host or ""):  # one of the password's, that ended it too early
        raise _misread(url)
    if address.drivername in ("postgresql", "postgres"):
        return address.set(drivername="postgresql+psycopg2")
    return address


def _misread(url: str) -> UserError:
    return UserError(
        f"--storage {mask_url(url)}: is not the URL of a database; give sqlite:///FILE or "
        "postgresql://USER@HOST:PORT/DATABASE, with a number as PORT; in a name or a password, "
        "write @ : / ? % as %40 %3A %2F %3F %25"
    )


def refuse_in_memory(url: str) -> None:
    """A UserError for a database that no other process sees, and that ends with this one."""
    address = parse_url(url)
    if address.get_backend_name() != "sqlite":
        return
    named = address.database or ""
    if named in ("", ":memory:") or ":memory:" in named or address.query.get("mode") == "memory":
        raise UserError(
            f"--storage {mask_url(url)}: is a database in memory, which other workers cannot see "
            "and which is gone when this process ends; name a file: sqlite:///FILE"
        )


def make_absolute(url: str) -> str:
    """The same database, whatever the working folder is."""
    address = parse_url(url)
    named = address.database or ""
    if (
        address.get_backend_name() != "sqlite"
        or named.startswith("file:")
        or Path(named).is_absolute()
    ):
        return url
    return address.set(database=str(Path(named).absolute())).render_as_string(hide_password=False)


def add_password(url: str) -> str:
    """The URL with PostgreSQL's password from the environment, for workers that do not share it."""
    address, password = parse_url(url), os.environ.get("PGPASSWORD")
    known = address.password or "password" in address.query
    if address.get_backend_name() != "postgresql" or known or not password:
        return url
    return address.set(password=password).render_as_string(hide_password=False)
