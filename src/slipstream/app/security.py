"""Checks every request before its route: the token, the page it came from, and its size.

A request needs the token of the printed URL, once; afterwards a cookie. `Host` and `Origin` are
compared with their ports for every method, so that neither another site nor another server on this
machine can use the browser of a user, and a name that resolves to this machine is of no use.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import ipaddress
import socket
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from http.cookies import CookieError, SimpleCookie
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl, urlencode

from slipstream.base.web_server import is_loopback

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.types import Message, Receive, Scope, Send

POLICY = "; ".join(
    (
        *("default-src 'none'", "script-src 'self'", "style-src 'self'", "img-src 'self' data:"),
        *("connect-src 'self'", "font-src 'self'", "form-action 'self'", "base-uri 'none'"),
        "frame-ancestors 'none'",
    )
)
REPORT_POLICY = (
    "sandbox allow-scripts allow-downloads; default-src 'none'; script-src 'unsafe-inline'; "
    "style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'"
)
"""Of a run's report: its own scripts run, in an origin of its own from which nothing is reached"""
HEADERS = {
    "content-security-policy": POLICY,
    "x-frame-options": "DENY",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}
LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
SAFE_SITES = ("same-origin", "none")
BODY_BYTES = 1 << 20
BODY_S = 30.0
"""How long a request's body may take to arrive"""
STREAMED = {("POST", "/api/data/upload")}
"""Routes that read a body of any length, with limits of their own (`tables/uploads.py`)"""
NO_TOKEN = "open the URL that `slipstream ui` printed, with its token"


class RefusedError(Exception):
    """A request that is not served."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class Access:
    """Who may use the app, and under which address."""

    token: str
    port: int
    host: str = "127.0.0.1"

    @property
    def cookie_name(self) -> str:
        """The cookie's name, with the port: a browser sends cookies to every port of a host."""
        return f"slipstream-{self.port}"

    @property
    def cookie(self) -> str:
        """The cookie's value, from which the token does not follow."""
        return hmac.new(self.token.encode(), b"cookie", hashlib.sha256).hexdigest()

    def accepts_host(self, header: str) -> bool:
        """Whether a Host header names this server, with its port."""
        name, _, port = header.rpartition(":")
        if port != str(self.port) or not name:
            return False
        if name.lower() in LOOPBACK or name.lower() == self.host.lower():
            return True
        if is_loopback(self.host):
            return False
        with suppress(ValueError):  # an address cannot be made to point here by somebody's DNS
            return bool(ipaddress.ip_address(name.strip("[]")))
        return name.lower() in (socket.gethostname().lower(), socket.getfqdn().lower())


class Security:
    """Checks every request before the application sees it, and adds headers to every response."""

    def __init__(self, app: Starlette, access: Access) -> None:
        self.app, self.access = app, access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self.app(scope, receive, send)
            return
        reply = _Reply(send)
        headers = _read_headers(scope)
        try:
            self._check_origin(scope, headers)
            if location := self._check_token(scope, headers):
                await reply.redirect(location, self._format_cookie())
                return
            if (scope["method"], scope["path"]) not in STREAMED:
                receive = _replay(await _read_body(headers, receive), receive)
        except RefusedError as error:
            await reply.refuse(error)
            return
        await self.app(scope, receive, reply)

    def _check_origin(self, scope: Scope, headers: Mapping[str, str]) -> None:
        host = headers.get("host", "")
        if not self.access.accepts_host(host):
            raise RefusedError(403, f'Host is "{host[:100]}", which is not this server')
        origin = headers.get("origin")
        if origin is not None and origin.lower() != f"http://{host.lower()}":
            raise RefusedError(403, "requests of other sites' pages are refused")
        is_visit = scope["method"] == "GET" and headers.get("sec-fetch-mode") == "navigate"
        site = headers.get("sec-fetch-site", "none")
        if site not in SAFE_SITES and not (
            is_visit and headers.get("sec-fetch-dest") == "document"
        ):
            raise RefusedError(403, "requests of other sites' pages are refused")

    def _check_token(self, scope: Scope, headers: Mapping[str, str]) -> str:
        """Refuse a request without token or cookie. For a URL with the token, return the address
        without it to redirect to, so that the token stays out of the address bar and the
        history."""
        pairs = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
        for name, value in pairs:
            if name == "token" and _is_equal(value, self.access.token):
                if scope["method"] != "GET":
                    return ""
                query = urlencode([pair for pair in pairs if pair[0] != "token"])
                path = scope.get("raw_path", b"/").decode("latin-1").partition("?")[0]
                return f"/{path.lstrip('/')}" + (f"?{query}" if query else "")
        scheme, _, token = headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and _is_equal(token.strip(), self.access.token):
            return ""
        if _is_equal(_read_cookie(headers, self.access.cookie_name), self.access.cookie):
            return ""
        raise RefusedError(401, NO_TOKEN)

    def _format_cookie(self) -> str:
        name, value = self.access.cookie_name, self.access.cookie
        return f"{name}={value}; Path=/; HttpOnly; SameSite=Strict"


def _is_equal(given: str, expected: str) -> bool:
    return hmac.compare_digest(given.encode(), expected.encode())


def _read_headers(scope: Scope) -> dict[str, str]:
    """Return the headers. A repeated header gets a value that no check accepts."""
    headers: dict[str, str] = {}
    for name, value in scope["headers"]:
        key = name.decode("latin-1").lower()
        text = value.decode("latin-1")
        headers[key] = f"{headers[key]}, {text}" if key in headers else text
    return headers


def _read_cookie(headers: Mapping[str, str], name: str) -> str:
    try:
        cookies = SimpleCookie(headers.get("cookie", ""))
    except CookieError:
        return ""
    return cookies[name].value if name in cookies else ""


async def _read_body(headers: Mapping[str, str], receive: Receive) -> bytes:
    """Read a request's body, within the limits."""
    too_long = RefusedError(413, f"a request has at most {BODY_BYTES:,} bytes")
    stated = headers.get("content-length", "0")
    if stated.isdigit() and (len(stated) > 15 or int(stated) > BODY_BYTES):
        raise too_long
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_S):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise RefusedError(400, "the request was cut off")
                body += message.get("body", b"")
                if len(body) > BODY_BYTES:
                    raise too_long
                if not message.get("more_body", False):
                    return bytes(body)
    except TimeoutError:
        raise RefusedError(408, f"the request took more than {BODY_S:g} s to arrive") from None


def _replay(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` function that gives the application a body that was read already."""
    is_read = False

    async def replay() -> Message:
        nonlocal is_read
        if is_read:
            return await receive()
        is_read = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay


class _Reply:
    """Sends responses with the headers that all of them have."""

    def __init__(self, send: Send) -> None:
        self._send = send

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            present = {name.lower() for name, _ in message.get("headers", ())}
            extra = [(name.encode(), value.encode()) for name, value in HEADERS.items()]
            added = [pair for pair in extra if pair[0] not in present]
            message = {**message, "headers": [*message.get("headers", ()), *added]}
        await self._send(message)

    async def redirect(self, location: str, cookie: str) -> None:
        await self._finish(303, b"", {"location": location, "set-cookie": cookie})

    async def refuse(self, error: RefusedError) -> None:
        extra = {"connection": "close", "content-type": "text/plain; charset=utf-8"}
        await self._finish(error.status, f"{error}\n".encode(), extra)

    async def _finish(self, status: int, body: bytes, headers: Mapping[str, str]) -> None:
        listed = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
        listed.append((b"content-length", str(len(body)).encode()))
        await self({"type": "http.response.start", "status": status, "headers": listed})
        await self({"type": "http.response.body", "body": body})
