"""The log of a run as the JSON objects that are on disk, and watchers that get these."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from slipstream.events import Event, format_event
from slipstream.runs.log import LoggedRun, parse_values

Line = dict[str, Any]


def read_lines(run: LoggedRun) -> list[Line]:
    """The intact lines of a run's log, without their checksums."""
    content = run.log.read_bytes() if run.log.exists() else b""
    parsed = map(parse_values, content.split(b"\n")[:-1])
    return [values for values in parsed if values is not None]


def as_lines(watch: Callable[[Line], Any] | None) -> Callable[[Event | Line], None] | None:
    """A watcher of a run that calls a function with the line of each event; None without one."""
    if watch is None:
        return None

    def call(event: Event | Line) -> None:
        watch(format_event(event) if isinstance(event, Event) else event)

    return call
