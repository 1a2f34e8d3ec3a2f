"""Reads a log that grows: the new lines after a position, and whether the log was cut.

A position is a checksum of the bytes before it, and their number. A resumed run truncates its log
to its checkpoint and writes on: the checksum then no longer fits, and the reader begins anew.
"""

from __future__ import annotations

import os
import re
import zlib
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from slipstream.runs.log import parse_line

SIGNED_BYTES = 4096
"""Of the log before a position, in its checksum"""
MOST_BYTES = 1 << 20
"""Of the log that are read at once"""
POSITION = re.compile(r"([0-9a-f]{8}):(\d{1,15})")
LOG_START = "00000000:0"
"""The position before the first line"""


class Chunk(NamedTuple):
    """New lines of a log."""

    position: str
    """After them"""
    events: list[dict[str, Any]]
    is_reset: bool
    """Whether the log was cut: the events before no longer hold, and these are the first ones"""


def read_chunk(log: Path, position: str, *, end: int | None = None) -> Chunk:
    """Return the complete lines of a log after a position, without damaged ones; `end`: the bytes
    of the log that count."""
    match = POSITION.fullmatch(position)
    offset, is_reset = int(match[2]) if match else 0, False
    try:
        with log.open("rb") as file:
            if offset and _sign(file, offset) != position:
                offset, is_reset = 0, True
            file.seek(offset)
            text = file.read(MOST_BYTES)
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
