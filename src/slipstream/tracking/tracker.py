"""What a tracker has to do, and which there are."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from slipstream.tracking.points import Point


@dataclass(frozen=True)
class FollowedRun:
    """The run that is followed."""

    folder: Path
    project: str
    out: str | None
    """Where the points go: a folder or an address; None: where the tracker's own settings say"""
    settings: dict[str, Any] = field(default_factory=dict)
    """`model.hidden` and so on"""

    @property
    def name(self) -> str:
        return self.folder.name


class Memory(Protocol):
    """What is kept between processes."""

    remote: dict[str, str]
    """What the tracker calls the run and its models"""

    def save(self) -> None: ...


class TrackerDown(Exception):
    """The tracker does not answer; it may later."""


class Tracker(ABC):
    """Takes points and, at the end, figures and files."""

    can_rewrite = False
    """Whether points can be taken back, so that those may be sent that a resumed run replaces"""

    def __init__(self, about: FollowedRun, memory: Memory) -> None:
        self.about, self.memory, self.remote = about, memory, memory.remote
        self.part_settings: dict[str, dict[str, Any]] = {}
        """By part: what a trial of a search has of its own"""

    def get_settings(self, part: str) -> dict[str, Any]:
        return self.about.settings | self.part_settings.get(part, {})

    @abstractmethod
    def send(self, points: Sequence[Point]) -> None:
        """Send points of any parts; they have arrived when it returns."""

    @abstractmethod
    def begin_anew(self) -> None:
        """Erase what was sent: the log was cut, and some of it no longer holds."""

    @abstractmethod
    def find_missing(self, points: Sequence[Point]) -> Sequence[Point] | None:
        """Return those of the points that have not arrived, of which a killed process may have sent
        some; None where that cannot be known, and all has to be sent anew."""

    @abstractmethod
    def end_part(self, part: str, state: str) -> None:
        """Note that a model has ended: finished, pruned, failed or cut off."""

    @abstractmethod
    def finish(self, figures: Sequence[Point], files: dict[str, Path]) -> None:
        """Add the final figures and files of a finished run."""

    @abstractmethod
    def stop(self) -> None:
        """Note that the run has stopped before its end; it may go on later."""

    @abstractmethod
    def close(self) -> None: ...

    @abstractmethod
    def describe(self) -> str:
        """Return where the points are, for the terminal."""
