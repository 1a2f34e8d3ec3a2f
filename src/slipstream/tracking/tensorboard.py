"""TensorBoard: event files in `out/<run>`, and in a folder below it for each model.

tensorboardX's own SummaryWriter writes in a thread and its `flush` does not wait for it, so that a
point that counts as sent could be lost. Its file writer is used directly.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slipstream.tracking.points import WHOLE, Point
from slipstream.tracking.tracker import FollowedRun, Memory, Tracker

EVENT_FILES = "events.out.tfevents.*"


class TensorBoard(Tracker):
    """Writes event files with tensorboardX."""

    def __init__(self, about: FollowedRun, memory: Memory) -> None:
        from tensorboardX.event_file_writer import EventsWriter

        super().__init__(about, memory)
        self._create_writer: Any = EventsWriter
        self._writers: dict[str, Any] = {}
        self.folder = Path(about.out or "tensorboard") / about.name

    def _get_writer(self, part: str) -> Any:
        from tensorboardX.summary import text

        if part not in self._writers:
            folder = self.folder / part
            folder.mkdir(parents=True, exist_ok=True)
            is_new = not list(folder.glob(EVENT_FILES))
            self._writers[part] = self._create_writer(str(folder / "events"), f".{time.time_ns()}")
            if is_new:
                rows = (f"| {key} | {value} |" for key, value in self.get_settings(part).items())
                table = "\n".join(["| setting | value |", "|-|-|", *rows])
                self._write(part, text("settings", table), step=0, at=time.time())
        return self._writers[part]

    def _write(self, part: str, summary: Any, *, step: int, at: float) -> None:
        from tensorboardX.proto.event_pb2 import Event

        event = Event(wall_time=at, step=step, summary=summary)
        self._get_writer(part).write_event(event)

    def _flush(self) -> None:
        for writer in self._writers.values():
            writer.flush()

    def send(self, points: Sequence[Point]) -> None:
        from tensorboardX.summary import scalar

        for point in points:
            self._write(point.part, scalar(point.name, point.value), step=point.step, at=point.at)
        self._flush()

    def begin_anew(self) -> bool:
        self.close()
        for folder in (self.folder, *self.folder.glob("lane-*"), *self.folder.glob("trial-*")):
            for file in folder.glob(EVENT_FILES):  # and nothing else: `out` may hold other things
                file.unlink()
        return True

    def find_missing(self, points: Sequence[Point]) -> list[Point]:
        return list(points)  # all was erased before

    def finish(self, figures: dict[str, float], files: dict[str, Path]) -> None:
        from matplotlib.image import imread
        from tensorboardX.summary import image, scalar

        now = time.time()
        for name, value in figures.items():
            self._write(WHOLE, scalar(name, value), step=0, at=now)
        for file in files.values():
            if file.suffix == ".png":
                picture = image(file.stem, imread(file), dataformats="HWC")
                self._write(WHOLE, picture, step=0, at=now)
        self._flush()

    def close(self) -> None:
        for writer in self._writers.values():
            writer.close()
        self._writers = {}

    def describe(self) -> str:
        return f"{self.folder} (tensorboard --logdir {self.folder.parent})"
