"""Reads what followers wrote: TensorBoard's event files, and the points of a log."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

from tensorboardX.proto.event_pb2 import Event

from slipstream import runs
from slipstream.reporting.tracking.tracker import PointReader

Points = set[tuple[str, str, int, float]]


def read_scalars(folder: Path) -> list[tuple[str, str, int, float]]:
    """Every scalar of the event files below a folder: part, name, step, value."""
    found = []
    for file in sorted(folder.rglob("events.out.tfevents.*")):
        part = str(file.parent.relative_to(folder))
        for record in records(file):
            event = Event.FromString(record)
            for value in event.summary.value:
                if value.HasField("simple_value"):
                    name = "" if part == "." else part
                    found.append((name, value.tag, event.step, value.simple_value))
    return found


def records(file: Path) -> Iterator[bytes]:
    """The records of a file: a length, its checksum, the bytes, theirs."""
    content = file.read_bytes()
    at = 0
    while at < len(content):
        (length,) = struct.unpack_from("<Q", content, at)
        yield content[at + 12 : at + 12 + length]
        at += 16 + length


def logged_points(folder: Path) -> list[tuple[str, str, int, float]]:
    """The points that stand in a run's log, as single precision has them."""
    reader = PointReader(0.0)
    return [
        (point.part, point.name, point.step, to_single(point.value))
        for event in runs.read_events(runs.Run(folder))
        for point in reader.read(event)
    ]


def to_single(value: float) -> float:
    single: float = struct.unpack("<f", struct.pack("<f", value))[0]
    return single
