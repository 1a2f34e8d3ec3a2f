"""The event log: one line of JSON per event, each with a checksum."""

from __future__ import annotations

import json
import math
import os
import re
import zlib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Protocol

from slipstream.events import Event, Resume, SearchStart, format_event, parse_event
from slipstream.runs.files import to_json

SCHEMA = 1
"""The version of the events (docs/events.md), which the event that opens a log states"""
CHECKSUM = ', "crc": "'
"""Separates an event from its checksum at the end of the line"""


class LoggedRun(Protocol):
    """The part of a run that its log needs."""

    @property
    def log(self) -> Path: ...


def add_event(path: Path, event: Event) -> None:
    """Append a complete line or nothing."""
    line = _add_checksum(to_json(format_event(event), indent=None))
    with path.open("ab") as log:
        before = log.tell()
        try:
            log.write(line.encode() + b"\n")
            log.flush()
        except OSError:
            with suppress(OSError):
                log.truncate(before)
            raise


def _add_checksum(text: str) -> str:
    return f'{text[:-1]}{CHECKSUM}{zlib.crc32(text.encode()):08x}"}}'


def read_events(run: LoggedRun) -> Iterator[Event]:
    """Return the events of a log, without damaged and torn lines."""
    return iter(read_log(run)[0])


def read_log(run: LoggedRun) -> tuple[list[Event], list[str]]:
    """Return the events of a log, and notes on the lines that were skipped."""
    try:
        lines = run.log.read_bytes().split(b"\n")
    except OSError as error:
        missing = isinstance(error, FileNotFoundError)
        return [], [] if missing else [f"{run.log}: cannot be read ({error.strerror})"]
    torn = bool(lines.pop())  # a complete line ends with a line break
    parsed = [parse_line(line) for line in lines]
    damaged = [number for number, event in enumerate(parsed, 1) if event is None]
    notes = []
    if damaged:
        numbers = ", ".join(map(str, damaged[:5])) + (" ..." if len(damaged) > 5 else "")
        notes.append(f"{run.log}: skipped {len(damaged)} damaged lines ({numbers})")
    if torn:
        notes.append(f"{run.log}: skipped the last line, which was cut off")
    return [event for event in parsed if event is not None], notes


def parse_line(line: bytes) -> Event | None:
    """Return the event of a line; None where it is damaged."""
    values = parse_values(line)
    return None if values is None else parse_event(values)


def parse_values(line: bytes) -> dict[str, Any] | None:
    """Return the JSON object of a line without its checksum; None where it is damaged. Version 0.1
    wrote no checksums."""
    try:
        text = line.decode()
        body, separator, _ = text.rpartition(CHECKSUM)
        if separator and text != _add_checksum(body + "}"):
            return None
        values: dict[str, Any] = json.loads(body + "}" if separator else text)
        is_valid = isinstance(values["event"], str) and math.isfinite(values["at_s"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return values if is_valid else None


def sum_parts(run: LoggedRun) -> float:
    """Return the seconds that a run has taken so far, from its first start on; each resume begins a
    new part, and states the seconds before it, since a resume also truncates the log."""
    total, part = 0.0, 0.0
    for event in read_events(run):
        if isinstance(event, Resume):
            total, part = total + part if event.spent_s is None else event.spent_s, 0.0
        elif isinstance(event, SearchStart) and event.is_resumed:
            total, part = total + part, 0.0
        part = max(part, event.at_s or 0.0)
    return total + part


def drop_torn_line(path: Path) -> bool:
    """Truncate a last line without a line break, which would corrupt the next event."""
    if not path.is_file():
        return False
    content = path.read_bytes()
    size = content.rfind(b"\n") + 1
    if size < len(content):
        os.truncate(path, size)
    return size < len(content)


def get_log_size(run: LoggedRun) -> int:
    return run.log.stat().st_size if run.log.exists() else 0


def truncate_log(run: LoggedRun, size: int) -> None:
    """Drop the events after the checkpoint that a run resumes from."""
    if get_log_size(run) > size:
        os.truncate(run.log, size)


SIGNED_BYTES = 4096
"""The number of bytes before a position that its checksum covers"""
MAX_BYTES = 1 << 20
"""The number of bytes of the log that are read at once"""
POSITION = re.compile(r"([0-9a-f]{8}):(\d{1,15})")
LOG_START = "00000000:0"
"""The position before the first line"""


class Chunk(NamedTuple):
    """New lines of a log."""

    position: str
    """After them"""
    events: list[Event]
    is_reset: bool
    """Whether the log was truncated: earlier events are void, and these lines are the first"""


def read_chunk(log: Path, position: str, *, end: int | None = None) -> Chunk:
    """Return the complete lines of a log after a position, without damaged ones; `end` limits the
    bytes of the log that count."""
    match = POSITION.fullmatch(position)
    offset, is_reset = int(match[2]) if match else 0, False
    try:
        with log.open("rb") as file:
            if offset and _sign(file, offset) != position:
                offset, is_reset = 0, True
            file.seek(offset)
            text = file.read(MAX_BYTES)
            text += b"" if b"\n" in text else file.readline()
            if end is not None:
                text = text[: max(end - offset, 0)]
            size = text.rfind(b"\n") + 1
            lines = text[:size].split(b"\n")[:-1]
            offset += size
            new = _sign(file, offset) if offset else LOG_START
    except FileNotFoundError:
        return Chunk(LOG_START, [], is_reset=offset > 0)
    parsed = [parse_line(line) for line in lines]
    return Chunk(new, [event for event in parsed if event is not None], is_reset)


def _sign(file: BinaryIO, offset: int) -> str:
    if offset > os.fstat(file.fileno()).st_size:
        return ""
    file.seek(max(offset - SIGNED_BYTES, 0))
    return f"{zlib.crc32(file.read(min(offset, SIGNED_BYTES))):08x}:{offset}"
