"""The streams of a server: one state for each id, in memory, bounded in number and idle time."""

from __future__ import annotations

import asyncio
import re
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from slipstream.serving.limits import RequestError, ServerLimits
from slipstream.serving.streams.rows import StreamState

ID = re.compile(r"[A-Za-z0-9._~:@-]{1,128}")


@dataclass
class OpenStream:
    """A stream's state; requests to it are worked on one after the other."""

    state: StreamState
    used_s: float
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class Streams:
    """All streams, the one that was used least recently first."""

    def __init__(self, limits: ServerLimits, clock: Callable[[], float] = time.monotonic) -> None:
        self.limits, self.clock = limits, clock
        self._streams: OrderedDict[str, OpenStream] = OrderedDict()

    def __len__(self) -> int:
        return len(self._streams)

    @asynccontextmanager
    async def open(self, name: str, expected: int | None) -> AsyncIterator[OpenStream]:
        """Enter a stream, which is created if need be; one that has received nothing does not
        stay. It has to have the expected number of rows."""
        _check_name(name)
        while True:
            stream = self._find_or_create(name)
            async with stream.lock:
                if self._streams.get(name) is not stream:
                    continue  # removed while this request waited for its turn
                try:
                    _check_position(name, stream.state.num_rows, expected)
                    yield stream
                    stream.used_s = self.clock()
                    self._streams.move_to_end(name)
                finally:
                    if not stream.state.num_rows:
                        self._streams.pop(name, None)
                return

    def find(self, name: str) -> OpenStream:
        """Return a stream that has received rows."""
        _check_name(name)
        self._remove_idle()
        stream = self._streams.get(name)
        if stream is None or not stream.state.num_rows:
            raise RequestError(404, f'there is no stream "{name}"; the first rows sent create it')
        return stream

    async def remove(self, name: str) -> None:
        """Remove a stream, once the requests before this one are done with it."""
        stream = self.find(name)
        async with stream.lock:
            if self._streams.get(name) is stream:
                del self._streams[name]

    def export_states(self) -> dict[str, StreamState]:
        return {name: stream.state for name, stream in self._streams.items()}

    def import_states(self, states: dict[str, StreamState]) -> None:
        """Add streams that an earlier server saved, as used now."""
        for name, state in list(states.items())[-self.limits.streams :]:
            self._streams[name] = OpenStream(state, self.clock())

    def _find_or_create(self, name: str) -> OpenStream:
        self._remove_idle()
        if name not in self._streams:
            if len(self._streams) >= self.limits.streams:
                raise RequestError(
                    503,
                    f"there are {len(self._streams):,} streams, as many as the server keeps; "
                    "remove those that are done (DELETE /streams/ID)",
                    {"Retry-After": "60"},
                )
            self._streams[name] = OpenStream(StreamState(), self.clock())
        return self._streams[name]

    def _remove_idle(self) -> None:
        """Remove streams that had no row for too long."""
        oldest = self.clock() - self.limits.idle_s
        while self._streams:
            name, stream = next(iter(self._streams.items()))
            if stream.used_s >= oldest or stream.lock.locked():
                return
            del self._streams[name]


def _check_name(name: str) -> None:
    if not ID.fullmatch(name):
        raise RequestError(
            422, "a stream's id has 1 to 128 letters, digits or characters of . _ ~ : @ -"
        )


def _check_position(name: str, num_rows: int, expected: int | None) -> None:
    if expected is not None and expected != num_rows:
        raise RequestError(
            409,
            f'stream "{name}" has {num_rows} rows, not {expected}; go on from there, or remove the '
            "stream and send the rows of the last context again",
            extra={"rows": num_rows},
        )
