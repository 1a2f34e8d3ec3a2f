"""Binds an address and runs an ASGI application there until a signal ends it."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

import uvicorn

from slipstream.base.errors import UserError

HEADERS_S = 10.0
"""How long a client may take to send a request's headers"""
KEEP_ALIVE_S = 30
"""How long a connection may stay idle between two requests"""
BACKLOG = 1024
"""The number of connections that may wait to be accepted"""
MAX_CONNECTIONS = 2_000
"""With more connections at a time, requests are answered with 503"""
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def bind(host: str, port: int) -> socket.socket:
    """Return a socket that is bound to the address, before anything slow is loaded."""
    if not 0 <= port < 1 << 16:
        raise UserError(f"port {port}: a port is a number from 0 to 65535")
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = addresses[0]
        bound = socket.socket(family, kind, protocol)
        if os.name == "posix":  # elsewhere it would share the port with another server
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(
            f"{host} port {port}: cannot be bound ({reason}); choose another port, 0 for any that "
            "is free, or another host"
        ) from None
    return bound


def is_loopback(host: str) -> bool:
    """Return whether an address can be reached from this machine only."""
    if host == "localhost":
        return True
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return False


def format_url(bound: socket.socket) -> str:
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def run_server(
    app: Any,
    bound: socket.socket,
    announce: Callable[[], None],
    *,
    stop: Callable[[], None] | None = None,
    stop_s: int = 30,
    headers_s: float = HEADERS_S,
) -> None:
    """Serve until SIGTERM or SIGINT, then finish the running requests, for at most `stop_s`.

    Connections that are without a request's headers for `headers_s` are closed.

    `announce` is called, in the event loop, when the server is ready, `stop` when a signal comes.
    """
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format="%(message)s")
    config = uvicorn.Config(
        app,
        http="httptools" if find_spec("httptools") else "h11",
        log_config=None,
        access_log=False,
        lifespan="off",
        ws="none",
        proxy_headers=False,
        server_header=False,
        date_header=False,
        backlog=BACKLOG,
        limit_concurrency=MAX_CONNECTIONS,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=stop_s,
        h11_max_incomplete_event_size=1 << 16,
    )
    asyncio.run(_Server(config, announce, stop, headers_s).serve(sockets=[bound]))


class _Server(uvicorn.Server):
    """Says when it is ready, ends with exit code 0 after a signal, and closes connections of
    clients that take too long to send their headers."""

    def __init__(
        self,
        config: uvicorn.Config,
        announce: Callable[[], None],
        stop: Callable[[], None] | None,
        headers_s: float,
    ) -> None:
        super().__init__(config)
        self.announce, self.stop, self.headers_s = announce, stop, headers_s
        self.incomplete: dict[Any, float] = {}
        """The time at which each connection was first seen without a complete request"""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        self.announce()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture signals as uvicorn does, but do not raise them again afterwards: that would end
        the process as killed."""
        before = {number: signal.signal(number, self.handle_exit) for number in _SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: Any) -> None:
        if self.stop is not None:
            self.stop()
        super().handle_exit(sig, frame)

    async def on_tick(self, counter: int) -> bool:
        if counter % 10 == 0:
            self._close_slow(time.monotonic())
        return await super().on_tick(counter)

    def _close_slow(self, now: float) -> None:
        """Close connections that have been waiting for a request's headers for too long; those that
        are idle between two requests have a timer of their own."""
        connections: set[Any] = set(self.server_state.connections)
        waiting = {
            connection: self.incomplete.get(connection, now)
            for connection in connections
            if getattr(connection, "timeout_keep_alive_task", None) is None
            and ((cycle := getattr(connection, "cycle", None)) is None or cycle.response_complete)
        }
        for connection, since in waiting.items():
            if now - since > self.headers_s:
                connection.transport.close()
        self.incomplete = waiting
