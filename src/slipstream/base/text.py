"""Words for people: numbers, lists, sizes, and URLs without their passwords."""

from __future__ import annotations

import difflib
import html
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from urllib.parse import unquote, unquote_plus

CONTROLS = re.compile(
    "[\x00-\x09\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)
"""Characters that a terminal or a page acts on instead of showing them: control characters except
for the line feed, marks that turn the direction of writing, and halves of characters"""
SHORT = {"\t": "\\t", "\r": "\\r", "\n": "\\n"}


def escape_controls(text: str) -> str:
    """Replace control characters by escapes such as \\x1b; lines stay lines."""
    return CONTROLS.sub(_escape, text)


def escape_to_line(text: str) -> str:
    """Replace control characters and line feeds, for a text that must stay on one line."""
    return escape_controls(text).replace("\n", "\\n")


def _escape(match: re.Match[str]) -> str:
    code = ord(match[0])
    return SHORT.get(match[0]) or (f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}")


def find_nearest(word: str, known: Iterable[str]) -> str | None:
    """Return the known name that may have been meant; upper and lower case count as equal."""
    names: dict[str, str] = {}
    for name in known:
        names.setdefault(name.casefold(), name)
    close = difflib.get_close_matches(word.casefold(), names, n=1)
    return names[close[0]] if close else None


def format_table(title: str, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Lay out a small table in plain text; the first column is aligned left, the others right."""
    lines = [[escape_to_line(cell) for cell in line] for line in (headings, *rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    aligned = [
        "  ".join([first.ljust(widths[0]), *map(str.rjust, cells, widths[1:])]).rstrip()
        for first, *cells in lines
    ]
    return "\n".join([escape_to_line(title), *aligned])


def format_html_table(title: str, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Lay out a small table in HTML, as a notebook shows it."""

    def make_row(cells: Sequence[str], tag: str) -> str:
        return f"<tr>{''.join(f'<{tag}>{_escape_html(cell)}</{tag}>' for cell in cells)}</tr>"

    body = "".join(make_row(row, "td") for row in rows)
    caption = f"<caption>{_escape_html(title)}</caption>"
    return f"<table>{caption}{make_row(headings, 'th')}{body}</table>"


def _escape_html(text: str) -> str:
    return html.escape(escape_to_line(text))


def format_number(value: float | None, decimals: int = 8, *, figures: int = 4) -> str:
    """Format a number with so many significant figures and at most so many decimals."""
    if value is None or not math.isfinite(value):
        return "–"
    if value == 0:
        return "0"
    digits = max(0, figures - 1 - math.floor(math.log10(abs(value))))
    return f"{value:,.{min(digits, decimals)}f}"


def format_epoch(epoch: float) -> str:
    """Format an epoch, which may have a fraction where validations come within it: 9, 8.7."""
    return f"{epoch:,.1f}".removesuffix(".0")


def format_ms(value: float) -> str:
    """Format milliseconds with three significant figures and never an exponent: 1,290 ms."""
    return f"{format_number(value, figures=3)} ms"


def format_count(count: int, noun: str) -> str:
    """Format a number of things with the noun in singular or plural: 1 thread, 2 threads."""
    plural = "es" if noun.endswith("s") else "s"
    return f"{count:,} {noun}{'' if count == 1 else plural}"


def format_speedup(competitor: str, other_ms: float, ms: float) -> str:
    """Describe how many times as fast a step is as a competitor's; the ratio is that of the printed
    figures."""
    figures = [format_number(value, figures=3) for value in (other_ms, ms)]
    slow, fast = (float(figure.replace(",", "")) for figure in figures)
    ratio = format_number(slow / fast, figures=3)
    return f"{ratio}x as fast as {competitor}: {figures[1]} ms a step instead of {figures[0]}"


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
"""Options of a URL whose name is kept and whose value is masked"""
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
    login = f"{user}{secret}@" if user or secret else ""
    return f"{parts['scheme']}://{login}{parts['location']}{_mask_query(parts['query'])}"


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
    """Return whether the URL contains a password, or something that may be one."""
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
    forms = {make(secret) for secret in _find_secrets(url) for make in (str, unquote, unquote_plus)}
    for secret in sorted(filter(None, forms), key=len, reverse=True):
        text = text.replace(secret, HIDDEN)
    return text


def _find_secrets(url: str) -> Iterator[str]:
    """Yield everything between the user name and the host, and the values of options."""
    if url.startswith("journal:"):
        return
    location = "" if SQLITE_FILE.fullmatch(url) else url.partition("://")[2]
    before, separator, _ = location.rpartition("@")
    if separator and ":" in before:
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


def format_c_double(value: float) -> str:
    """Return a number in C: a hexadecimal literal, which is exact; whole numbers stay readable."""
    if not math.isfinite(value):
        return "NAN" if math.isnan(value) else "INFINITY" if value > 0 else "-INFINITY"
    if value == int(value) and abs(value) < 1e6:
        return f"{value:.1f}"
    digits, _, exponent = value.hex().partition("p")
    whole, _, fraction = digits.partition(".")
    fraction = fraction.rstrip("0")
    return f"{whole}.{fraction or '0'}p{exponent}"
