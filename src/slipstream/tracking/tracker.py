"""What a tracker has to do, and which there are."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from slipstream.run_names import is_run
from slipstream.tracking.points import Point

MOST_DEPTH = 2
"""Folders between a run and the search that has trained it: search/retrained/best"""
OF_RUNS = ("events.jsonl", "labels.toml")
"""Files that only runs have, the second one those of probes"""


@dataclass(frozen=True)
class FollowedRun:
    """The run that is followed."""

    folder: Path
    project: str
    out: str | None
    """Where the points go: a folder or an address; None: where the tracker's own settings say"""
    settings: dict[str, Any] = field(default_factory=dict)
    """`model.hidden` and so on"""

    @cached_property
    def name(self) -> str:
        """The name of its folder; of a run inside of another one, such as those that a search
        retrains, the path from that one's, since all searches call them alike."""
        folder = self.folder.absolute()
        outer = [one for one in folder.parents[:MOST_DEPTH] if _holds_runs(one)]
        return folder.relative_to(outer[-1].parent).as_posix() if outer else folder.name


def _holds_runs(folder: Path) -> bool:
    """Whether a folder is itself a run: a search or a probe. A config alone may be a user's."""
    return is_run(folder) and any((folder / name).exists() for name in OF_RUNS)


class Memory(Protocol):
    """What is kept between processes."""

    is_new: bool
    """Whether nothing was sent before"""
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
