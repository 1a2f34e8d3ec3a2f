"""What the server accepts, and the error that a request ends with where it is beyond that."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from slipstream.text import escape_controls

MEGABYTE = 1 << 20


@dataclass(frozen=True)
class ServerLimits:
    """Bounds of requests, queues and streams; each is an option of `slipstream serve`."""

    body_bytes: int = 8 * MEGABYTE
    rows: int = 100_000
    """Rows of one request"""
    columns: int = 2_000
    """Columns of one request, those that the model does not read included"""
    requests: int = 256
    """Requests that are worked on at a time; more get status 503"""
    request_s: float = 30.0
    """From a request's first byte to the last of its response"""
    streams: int = 10_000
    idle_s: float = 3600.0
    """A stream that had no row for so long is removed"""

    @property
    def all_bodies_bytes(self) -> int:
        """Bytes that the bodies of all requests may hold together."""
        return 8 * self.body_bytes

    @property
    def cells(self) -> int:
        """Values of one request: a table of many columns must have fewer rows."""
        return max(self.rows, self.columns) * 50


class RequestError(Exception):
    """A request that cannot be served; the message is for the client."""

    def __init__(
        self,
        status: int,
        message: str,
        headers: Mapping[str, str] | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.headers = dict(headers or {})
        self.content = {"error": escape_controls(message), **(extra or {})}
