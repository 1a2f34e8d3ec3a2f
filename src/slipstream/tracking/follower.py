"""Follows a run's log and sends its points to a tracker, each of them once.

What was sent is in a small file in the run's folder, so that a follower that was killed goes on
where it was. A resumed run cuts its log and writes the same steps again: these points are sent
again only where they differ.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from slipstream import runs
from slipstream.errors import UserError
from slipstream.run_names import get_start_time
from slipstream.runs import lock as locks
from slipstream.runs.tail import LOG_START, read_chunk
from slipstream.tracking.points import Point, PointReader
from slipstream.tracking.summary import list_files, read_figures
from slipstream.tracking.tracker import Tracker

POLL_S = 1.0


class Followed(NamedTuple):
    """How far a follower has come."""

    points: int
    """Sent by this process"""
    is_finished: bool
    """Whether the run is, and its figures and files were added"""


class SentPoints:
    """What was sent, on disk."""

    def __init__(self, path: Path, opened: float) -> None:
        self.path = path
        saved = runs.read_json(path) if path.exists() else {}
        self.position: str = saved.get("position", LOG_START)
        self.remote: dict[str, str] = saved.get("remote", {})
        self.finished_at: str | None = saved.get("finished_at")
        self.reader = PointReader(**saved.get("reader", {"opened": opened}))
        self.sent: dict[str, int] = saved.get("sent", {})
        """By part and name: the last step"""
        self.recent: dict[str, dict[str, float]] = saved.get("recent", {})
        """By part and name: values by step, since the last checkpoint"""
        self.pending: list[Point] = [Point(*one) for one in saved.get("pending", [])]
        """That may or may not have arrived"""

    def save(self) -> None:
        names = ("position", "remote", "finished_at", "sent", "recent", "pending")
        reader = {"reader": vars(self.reader)}
        runs.write_json(self.path, {name: getattr(self, name) for name in names} | reader)

    def forget(self) -> None:
        """Begin anew: nothing was sent."""
        self.sent, self.recent, self.pending, self.finished_at = {}, {}, [], None

    def is_new(self, point: Point) -> bool:
        series = _name_series(point)
        if point.step > self.sent.get(series, -1):
            return True
        return self.recent.get(series, {}).get(str(point.step), point.value) != point.value

    def note(self, points: Sequence[Point]) -> None:
        """Note points that have arrived."""
        for point in points:
            series = _name_series(point)
            self.sent[series] = max(self.sent.get(series, -1), point.step)
            self.recent.setdefault(series, {})[str(point.step)] = point.value


def _name_series(point: Point) -> str:
    return f"{point.part}/{point.name}"


class Follower:
    """Sends one run's points to one tracker."""

    def __init__(self, folder: Path, state: SentPoints, tracker: Tracker) -> None:
        self.folder, self.state, self.tracker = folder, state, tracker
        self._sent = 0
        self._has_ended = False

    def follow(self, show: Callable[[int], None] | None) -> Followed:
        """Send points until the run ends; `show` is called with their number."""
        self._recover()
        while True:
            is_running = bool(locks.find_holder(self.folder))  # before its last lines are read
            while self._read_once():
                if show is not None:
                    show(self._sent)
            if not is_running or (self._has_ended and self._is_finished()):
                break
            time.sleep(POLL_S)
        if self._is_finished():
            self._finish()
        return Followed(self._sent, self._is_finished())

    def _is_finished(self) -> bool:
        return (self.folder / "metrics.json").exists()

    def _recover(self) -> None:
        """Settle what a killed follower left."""
        pending = self.state.pending
        if pending and self.tracker.begin_anew():
            self._begin_anew()
        elif pending:
            self._send(self.tracker.find_missing(pending))
            self.state.note(pending)
        self.state.pending = []

    def _begin_anew(self) -> None:
        self.state.forget()
        self.state.position = LOG_START
        self.state.reader = PointReader(get_start_time(self.folder))

    def _read_once(self) -> bool:
        chunk = read_chunk(self.folder / "events.jsonl", self.state.position)
        if chunk.is_reset:
            self.state.reader = PointReader(get_start_time(self.folder))
            if self.tracker.begin_anew():
                self.state.forget()
        elif chunk.position == self.state.position:
            return False
        parts: list[list[Point]] = [[]]  # a checkpoint lies between two of them
        met: set[tuple[str, str, int]] = set()
        for event in chunk.events:
            for point in self.state.reader.read(event):
                if point[:3] not in met and self.state.is_new(point):
                    met.add(point[:3])
                    parts[-1].append(point)
            if event["event"] == "trial":
                self.tracker.trial_settings[f"trial-{event['trial']}"] = event.get("params") or {}
            if event["event"] == "checkpoint":
                parts.append([])
        self._has_ended = bool(chunk.events) and chunk.events[-1]["event"] == "end"
        self._send([point for part in parts for point in part])
        for number, part in enumerate(parts):
            if number:
                self.state.recent = {}  # no resumed run writes these steps again
            self.state.note(part)
        self.state.position, self.state.pending = chunk.position, []
        self.state.save()
        return True

    def _send(self, points: list[Point]) -> None:
        if points:
            self.state.pending = points
            self.state.save()
            self.tracker.send(points)
            self._sent += len(points)

    def _finish(self) -> None:
        metrics = runs.read_json(self.folder / "metrics.json")
        finished_at = str(metrics.get("finished_at"))
        if self.state.finished_at != finished_at:
            with list_files(self.folder) as files:
                self.tracker.finish(read_figures(metrics), files)
            self.state.finished_at = finished_at
        self.state.save()


def check_run(folder: Path) -> None:
    """Refuse a run whose folder cannot take the state."""
    if not (folder / "events.jsonl").exists() and not locks.find_holder(folder):
        raise UserError(f"{folder}: has no events.jsonl to follow")
