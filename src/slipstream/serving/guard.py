"""Stands before the application: who may ask, how much, for how long, and how many at a time."""

from __future__ import annotations

import asyncio
import hmac
import time
from typing import TYPE_CHECKING, Any

from slipstream.serving.formats.responses import to_json
from slipstream.serving.limits import RequestError, ServerLimits

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from slipstream.serving.metrics import ServerMetrics

OPEN = "/health"
"""The route that needs no token: for the probes of an orchestrator"""
LOOPBACK = ("127.0.0.1", "localhost", "::1")
WATCHED = (OPEN, "/metrics")
"""The routes that a busy server answers too: an orchestrator would end it otherwise"""
BODY, ROUTE, STRANGER = "slipstream.body", "slipstream.route", "slipstream.stranger"
"""Where a request's body, the name of its route, and whether it came without the token, are in the
scope"""


class Guard:
    """Checks a request's origin and token, reads its body within the limits, and measures it."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        limits: ServerLimits,
        token: str | None,
        metrics: ServerMetrics,
    ) -> None:
        self.app, self.limits, self.metrics = app, limits, metrics
        self.token = None if token is None else token.encode()
        self.running = self.body_bytes = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self.app(scope, receive, send)
            return
        begin = time.perf_counter()
        answer = _Answer(send)
        try:
            await self._serve(scope, receive, answer)
        except RequestError as error:
            await answer.refuse(error)
        finally:
            route = scope.get(ROUTE, "other")
            self.metrics.count_request(route, answer.status, time.perf_counter() - begin)

    async def _serve(self, scope: Scope, receive: Receive, answer: _Answer) -> None:
        headers = {name.decode("latin-1"): value for name, value in scope["headers"]}
        self._check_client(scope, headers)
        if self.running >= self.limits.requests and scope["path"] not in WATCHED:
            raise make_busy(f"{self.running} requests are being worked on")
        self.running += 1
        length = 0
        try:
            async with asyncio.timeout(self.limits.request_s):
                async for part in self._read_body(headers, receive):
                    length += len(part)
                    scope.setdefault(BODY, bytearray()).extend(part)
                scope["slipstream.read"] = True
                await self.app(scope, receive, answer)
        except TimeoutError:
            if scope.get("slipstream.read"):
                raise make_busy(f"it took more than {self.limits.request_s:g} s") from None
            text = f"the body did not arrive within {self.limits.request_s:g} s"
            raise RequestError(408, text, {"Connection": "close"}) from None
        finally:
            self.running -= 1
            self.body_bytes -= length
            scope.pop(BODY, None)

    def _check_client(self, scope: Scope, headers: dict[str, bytes]) -> None:
        """Refuse a wrong token; without one, what a page of another site makes a browser send.

        With a token, neither Host nor Origin is checked. Browsers add no token on their own, as
        they add a cookie, so a page of another site, or one under a name that resolves to this
        machine, gets status 401 whatever it sends; and no answer allows another origin to read it.
        A proxy in front of the server, which TLS needs, sends the Host of its clients or its own.
        """
        if self.token is not None:
            scheme, _, token = headers.get("authorization", b"").partition(b" ")
            right = hmac.compare_digest(token.strip(), self.token) and scheme.lower() == b"bearer"
            scope[STRANGER] = not right
            if scope["path"] != OPEN and not right:
                text = "send the server's token: Authorization: Bearer TOKEN"
                raise RequestError(401, text, {"WWW-Authenticate": "Bearer"})
            return
        host = headers.get("host", b"").decode("latin-1")
        name, port = _split_host(host)
        if name not in LOOPBACK or port not in ("", str((scope.get("server") or ("", ""))[1])):
            text = f'Host is "{host[:100]}"; ask for 127.0.0.1 or localhost with the server\'s port'
            raise RequestError(403, text)
        origin = headers.get("origin")
        if origin is not None and origin.decode("latin-1") != f"http://{host}":
            raise RequestError(403, "requests of other sites' pages are refused")

    async def _read_body(self, headers: dict[str, bytes], receive: Receive) -> Any:
        """Yield the parts of the body."""
        most, total = self.limits.body_bytes, 0
        too_long = RequestError(
            413, f"the body has more than {most:,} bytes", {"Connection": "close"}
        )
        stated = headers.get("content-length", b"0")
        if stated.isdigit() and int(stated[:20]) > most:
            raise too_long
        if headers.get("content-encoding", b"identity").lower() != b"identity":
            raise RequestError(415, "send the body without Content-Encoding")
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise RequestError(400, "the client left before its body was complete")
            part = message.get("body", b"")
            total += len(part)
            if total > most:
                raise too_long
            if self.body_bytes + len(part) > self.limits.all_bodies_bytes:
                raise make_busy("the bodies of other requests fill the memory")
            self.body_bytes += len(part)
            yield part
            if not message.get("more_body", False):
                return


class _Answer:
    """Sends a response, and knows what was sent."""

    def __init__(self, send: Send) -> None:
        self.send, self.status = send, 0

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
        await self.send(message)

    async def refuse(self, error: RequestError) -> None:
        """Send an error; a response that has begun is cut off instead."""
        if self.status:
            return
        body = to_json(error.content)
        headers = {"Content-Type": "application/json", "Content-Length": str(len(body))}
        listed = [
            (name.lower().encode(), value.encode())
            for name, value in (headers | error.headers).items()
        ]
        await self({"type": "http.response.start", "status": error.status, "headers": listed})
        await self({"type": "http.response.body", "body": body})


def make_busy(reason: str) -> RequestError:
    """Return the error of a server that has too much to do."""
    return RequestError(503, f"the server is busy: {reason}; try again", {"Retry-After": "1"})


def _split_host(host: str) -> tuple[str, str]:
    """Return the name or address of a Host header, and its port, which may be left out."""
    if host.startswith("["):
        name, _, rest = host[1:].partition("]")
        return name, rest.removeprefix(":")
    name, _, port = host.partition(":")
    return name.lower(), port
