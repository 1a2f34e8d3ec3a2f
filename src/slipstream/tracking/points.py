"""The points of a log: what its events say in numbers, by model, name and step."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple

WHOLE = ""
"""The part of points that belong to the run as a whole"""
LOGGED = ("loss", "lr", "steps_per_s")
VALIDATED = ("train_loss", "val_loss", "lr")


class Point(NamedTuple):
    """One number."""

    part: str
    """The model it belongs to: lane-0, trial-7, or WHOLE"""
    name: str
    step: int
    value: float
    at: float
    """POSIX time"""


class PointReader:
    """Turns the events of one log into points, in their order."""

    def __init__(
        self,
        opened: float,
        child: str = "lane",
        counts: dict[str, int] | None = None,
        waiting: Sequence[Sequence[Any]] = (),
        last: dict[str, Sequence[float]] | None = None,
    ) -> None:
        """`opened`: the POSIX time from which `at_s` counts, for logs that do not state it."""
        self.opened, self.child, self.counts = opened, child, counts or {}
        self.waiting = [Point(*one) for one in waiting]
        """Samples of the machine since the last loss: they count once another one follows, since a
        finished run that trains longer writes those after its last checkpoint anew"""
        self.last = last or {}
        """Step and value of the last point, by part and name"""

    def read(self, event: Mapping[str, Any]) -> list[Point]:
        """Return the points of an event; numbers that are not finite are left out, and those that
        the event before has already."""
        if "opened_at" in event:
            self.opened = datetime.fromisoformat(event["opened_at"]).timestamp()
        if "space" in event:
            self.child = "trial"
        at = self.opened + event["at_s"]
        points = [
            Point(part, name, step, float(value), at)
            for part, name, step, value in self._list_values(event)
            if _is_number(value)
        ]
        if event["event"] == "monitor":
            self.waiting += points
            return []
        if points:
            points, self.waiting = [*self.waiting, *points], []
        return [point for point in points if self._is_new(point)]

    def _is_new(self, point: Point) -> bool:
        series, value = f"{point.part}/{point.name}", (point.step, point.value)
        before = tuple(self.last.get(series, ()))
        self.last[series] = value
        return before != value

    def _list_values(self, event: Mapping[str, Any]) -> Iterator[tuple[str, str, int, Any]]:
        match event["event"]:
            case "log":
                for name in LOGGED:
                    yield WHOLE, name, event["step"], event.get(name)
                for model, loss in (event.get("losses") or {}).items():
                    yield f"{self.child}-{model}", "loss", event["step"], loss
            case "epoch":
                part = self._find_part(event)
                for name in VALIDATED:
                    yield part, name, event["step"], event.get(name)
            case "trial":
                yield WHOLE, "trial_value", event["trial"], event.get("value")
                step = event.get("steps") or 0
                yield f"trial-{event['trial']}", "val_loss", step, event.get("value")
                yield f"trial-{event['trial']}", "epochs", step, event.get("epochs")
            case "retrained":
                yield WHOLE, "retrained_loss", self._count("retrained"), event.get("loss")
            case "monitor":
                owner = f"monitor/worker-{event['worker']}" if "worker" in event else "monitor"
                sample = self._count(owner)
                for name, value in event.items():
                    if name not in ("event", "at_s", "seconds", "worker"):
                        yield WHOLE, f"{owner}/{name}", sample, value

    def _find_part(self, event: Mapping[str, Any]) -> str:
        for kind in ("trial", "lane"):
            if event.get(kind) is not None:
                return f"{kind}-{event[kind]}"
        return WHOLE

    def _count(self, name: str) -> int:
        self.counts[name] = self.counts.get(name, -1) + 1
        return self.counts[name]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
