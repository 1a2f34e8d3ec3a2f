"""Checkpoints and log of a training by several processes: the first one decides and writes."""

from collections.abc import Callable
from typing import Any

from slipstream.config import Engine
from slipstream.engine.checkpoint import Checkpoint, CheckpointSchedule, CheckpointWriter
from slipstream.engine.parallel.ranks import Ranks
from slipstream.runs import Event, Run


class SilentRun(Run):
    """The run as ranks other than the first see it: they read its folder and log nothing."""

    def append(self, event: str, **values: Any) -> None:
        pass

    def notify(self, line: Event) -> None:
        pass


class AgreedSchedule(CheckpointSchedule):
    """A schedule that is due on all ranks at the same steps. The others hold the same state as the
    first one, which writes it."""

    def __init__(self, engine: Engine, writer: CheckpointWriter, ranks: Ranks) -> None:
        super().__init__(engine, writer)
        self.ranks = ranks

    def is_due(self, *, validated: bool = False) -> bool:
        mine = self.ranks.is_leader and super().is_due(validated=validated)
        return bool(self.ranks.agree(mine)[0])

    def save(self, take: Callable[[], Checkpoint], *, at: object, best_step: int = 0) -> None:
        if self.ranks.is_leader:
            super().save(take, at=at, best_step=best_step)
