"""Checks every request before the application: who may ask, how much, for how long, and how many at
a time."""

from __future__ import annotations

import asyncio
import hmac
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from slipstream.server.bodies import RequestError, ServerLimits, to_json

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
WINDOWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
PREFIX = "slipstream_"


@dataclass
class Histogram:
    """Counts by upper bound, with their sum."""

    bounds: tuple[float, ...]
    counts: list[int] = field(default_factory=list)
    total: float = 0.0

    def add(self, value: float) -> None:
        self.counts = self.counts or [0] * (len(self.bounds) + 1)
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def format(self, name: str, labels: str = "") -> Iterator[str]:
        seen = 0
        separated = f"{labels}," if labels else ""
        for bound, count in zip((*self.bounds, "+Inf"), self.counts, strict=True):
            seen += count
            yield f'{name}_bucket{{{separated}le="{bound}"}} {seen}'
        braces = f"{{{labels}}}" if labels else ""
        yield f"{name}_sum{braces} {self.total:.6f}"
        yield f"{name}_count{braces} {seen}"


@dataclass
class ServerMetrics:
    """The figures of `GET /metrics`."""

    gauges: Mapping[str, tuple[str, Callable[[], float]]]
    """By name: the meaning of a gauge, and the function that reads it"""
    requests: Counter[tuple[str, int]] = field(default_factory=Counter)
    """Counts by route and status"""
    seconds: dict[str, Histogram] = field(default_factory=dict)
    """Durations by route"""
    batches: Histogram = field(default_factory=lambda: Histogram(WINDOWS))
    """Windows of each call of the model"""
    windows: int = 0

    def count_request(self, route: str, status: int, seconds: float) -> None:
        self.requests[route, status] += 1
        self.seconds.setdefault(route, Histogram(SECONDS)).add(seconds)

    def count_batch(self, num_windows: int) -> None:
        self.batches.add(num_windows)
        self.windows += num_windows

    def format(self) -> str:
        return "\n".join([*self._list_lines(), ""])

    def _list_lines(self) -> Iterator[str]:
        yield from _head("requests_total", "counter", "Answered requests.")
        for (route, status), count in sorted(self.requests.items()):
            yield f'{PREFIX}requests_total{{route="{route}",status="{status}"}} {count}'
        yield from _head("request_seconds", "histogram", "From a request's headers to its answer.")
        for route, histogram in sorted(self.seconds.items()):
            yield from histogram.format(f"{PREFIX}request_seconds", f'route="{route}"')
        yield from _head("batch_windows", "histogram", "Windows of each call of the model.")
        if self.batches.counts:
            yield from self.batches.format(f"{PREFIX}batch_windows")
        yield from _head("windows_total", "counter", "Windows that were predicted.")
        yield f"{PREFIX}windows_total {self.windows}"
        for name, (text, read) in self.gauges.items():
            yield from _head(name, "gauge", text)
            yield f"{PREFIX}{name} {read():g}"


def _head(name: str, kind: str, text: str) -> Iterator[str]:
    yield f"# HELP {PREFIX}{name} {text}"
    yield f"# TYPE {PREFIX}{name} {kind}"


OPEN = "/health"
"""The route that needs no token, for the probes of an orchestrator"""
LOOPBACK = ("127.0.0.1", "localhost", "::1")
WATCHED = (OPEN, "/metrics")
"""Routes that a busy server answers too: without an answer, an orchestrator would end it"""
BODY, ROUTE, STRANGER = "slipstream.body", "slipstream.route", "slipstream.stranger"
"""Keys of the scope: the request's body, the name of its route, and whether it came without the
token"""


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
    """Sends a response, and records what was sent."""

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
        name, _, port = host[1:].partition("]")
        return name, port.removeprefix(":")
    name, _, port = host.partition(":")
    return name.lower(), port
