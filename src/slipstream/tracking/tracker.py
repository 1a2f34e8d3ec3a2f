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


class Tracker(ABC):
    """Takes points and, at the end, figures and files."""

    def __init__(self, about: FollowedRun, memory: Memory) -> None:
        self.about, self.memory, self.remote = about, memory, memory.remote
        self.trial_settings: dict[str, dict[str, Any]] = {}
        """By part: what a trial of a search has of its own"""

    def get_settings(self, part: str) -> dict[str, Any]:
        return self.about.settings | self.trial_settings.get(part, {})

    @abstractmethod
    def send(self, points: Sequence[Point]) -> None:
        """Send points of any parts; they have arrived when it returns."""

    @abstractmethod
    def begin_anew(self) -> bool:
        """Erase what was sent, because it may no longer hold; False where that is not possible."""

    @abstractmethod
    def find_missing(self, points: Sequence[Point]) -> list[Point]:
        """Return those of the points that have not arrived; a killed process may have sent some."""

    @abstractmethod
    def finish(self, figures: dict[str, float], files: dict[str, Path]) -> None:
        """Add the final figures and files of a finished run."""

    @abstractmethod
    def close(self) -> None: ...

    @abstractmethod
    def describe(self) -> str:
        """Return where the points are, for the terminal."""
