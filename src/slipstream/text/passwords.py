"""Masks the passwords of URLs, of databases and of servers, in whatever is shown or written.

`mask_url` keeps only the parts that are known to be harmless and masks a URL without the expected
form as a whole. So a mistyped URL reveals nothing either.
"""

import re
from collections.abc import Iterator
from urllib.parse import unquote, unquote_plus

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
    if url.startswith("journal:"):  # a path
        return url
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


def mask_argument(argument: str) -> str:
    """Mask the URL in an argument of a command, such as `--storage=URL`, if it has a password."""
    start = re.search(r"[a-z][a-z0-9+]*://", argument)
    if start is None or not holds_secret(argument[start.start() :]):
        return argument
    return argument[: start.start()] + mask_url(argument[start.start() :])


def mask_secrets(text: str, url: str | None) -> str:
    """Mask the secrets of the URL in a message, such as that of a database driver."""
    if not url:
        return text
    text = text.replace(url, mask_url(url))
    forms = {make(one) for one in _find_secrets(url) for make in (str, unquote, unquote_plus)}
    for secret in sorted(filter(None, forms), key=len, reverse=True):
        text = text.replace(secret, HIDDEN)
    return text


def _find_secrets(url: str) -> Iterator[str]:
    """Yield everything between the user name and the host, and the values of options."""
    if url.startswith("journal:"):
        return
    rest = "" if SQLITE_FILE.fullmatch(url) else url.partition("://")[2]
    before, at, _ = rest.rpartition("@")
    if at and ":" in before:
        password = before.partition(":")[2]
        yield from filter(None, [password, *password.split("@")])
    for option in url.partition("?")[2].split("&"):
        name, _, value = option.partition("=")
        if name in NOT_SECRET:
            continue
        # the name of an unknown option may be the rest of a password with a &
        yield from filter(None, [value] if name in MASKED else [name, value])
        for part in re.split(r"[;}]", unquote_plus(value)):  # odbc_connect is a list of options
            yield from filter(None, [part.partition("=")[2].strip("{")])
