"""The event log: one line of JSON per event, each with a checksum."""

from __future__ import annotations

import json
import math
import os
import zlib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipstream.runs.files import to_json

if TYPE_CHECKING:
    from slipstream.runs.folder import Run

Event = dict[str, Any]
SUM = ', "crc": "'
"""Stands before the checksum, at a line's end"""


def add_event(path: Path, event: Event) -> None:
    """Append a whole line or nothing."""
    line = _summed(to_json(event, indent=None))
    with path.open("ab") as log:
        before = log.tell()
        try:
            log.write(line.encode() + b"\n")
            log.flush()
        except OSError:
            with suppress(OSError):
                log.truncate(before)
            raise


def _summed(text: str) -> str:
    return f'{text[:-1]}{SUM}{zlib.crc32(text.encode()):08x}"}}'


def read_events(run: Run) -> Iterator[Event]:
    """The log's lines, without those that are damaged or were cut off by a kill."""
    return iter(read_log(run)[0])


def read_log(run: Run) -> tuple[list[Event], list[str]]:
    """The log's lines, and a note on those that are left out since they cannot be trusted."""
    try:
        lines = run.log.read_bytes().split(b"\n")
    except OSError as error:
        missing = isinstance(error, FileNotFoundError)
        return [], [] if missing else [f"{run.log}: cannot be read ({error.strerror})"]
    torn = bool(lines.pop())  # a whole line ends with a line break
    found = [_parsed(line) for line in lines]
    wrong = [number for number, event in enumerate(found, 1) if event is None]
    notes = []
    if wrong:
        which = ", ".join(map(str, wrong[:5])) + (" ..." if len(wrong) > 5 else "")
        notes.append(f"{run.log}: left out since they are damaged: {len(wrong)} lines ({which})")
    if torn:
        notes.append(f"{run.log}: left out since it was cut off: the last line")
    return [event for event in found if event is not None], notes


def _parsed(line: bytes) -> Event | None:
    """A line as it was logged; None where it is damaged. Version 0.1 wrote no checksums."""
    try:
        text = line.decode()
        body, given, _ = text.rpartition(SUM)
        if given and text != _summed(body + "}"):
            return None
        event = json.loads(body + "}" if given else text)
        sound = isinstance(event["event"], str) and math.isfinite(event["at_s"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return event if sound else None


def drop_torn_line(path: Path) -> bool:
    """Cut off a last line that has no end, or the next event would be lost with it."""
    if not path.is_file():
        return False
    content = path.read_bytes()
    whole = content.rfind(b"\n") + 1
    if whole < len(content):
        os.truncate(path, whole)
    return whole < len(content)


def get_log_size(run: Run) -> int:
    return run.log.stat().st_size if run.log.exists() else 0


def truncate_log(run: Run, size: int) -> None:
    """Take back what was logged after a checkpoint that the run goes on from."""
    if get_log_size(run) > size:
        os.truncate(run.log, size)
