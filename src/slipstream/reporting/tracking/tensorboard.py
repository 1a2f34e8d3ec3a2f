"""TensorBoard: event files in `out/<run>`, and in a folder below it for each model.

tensorboardX's own SummaryWriter writes in a thread and its `flush` does not wait for it, so that a
point that counts as sent could be lost. Its file writer is used directly.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slipstream.base.errors import UserError
from slipstream.reporting.tracking.tracker import (
    WHOLE,
    FollowedRun,
    Memory,
    Point,
    Tracker,
    TrackerDown,
)

EVENT_FILES = "events.out.tfevents.*"


class TensorBoard(Tracker):
    """Writes event files with tensorboardX."""

    can_rewrite = True

    def __init__(self, about: FollowedRun, memory: Memory) -> None:
        super().__init__(about, memory)
        self._create_writer = _import_writer()
        self._writers: dict[str, Any] = {}
        self.folder = Path(about.out or "tensorboard") / about.name
        if memory.is_new and self._list_files():
            raise UserError(
                f"{self.folder}: has points already, of another run of this name or of this one; "
                "remove the folder, or pass another --out"
            )

    def _list_files(self) -> list[Path]:
        """List the event files of the run, and nothing else: `out` may hold other things."""
        parts = (self.folder, *self.folder.glob("lane-*"), *self.folder.glob("trial-*"))
        return [file for folder in parts for file in folder.glob(EVENT_FILES)]

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

        try:
            for point in points:
                summary = scalar(point.name, point.value)
                self._write(point.part, summary, step=point.step, at=point.at)
            self._flush()
        except OSError as error:  # such as a full disk
            raise TrackerDown(f"{self.folder}: cannot be written to ({error})") from None

    def begin_anew(self) -> None:
        self.close()
        for file in self._list_files():
            file.unlink()

    def find_missing(self, points: Sequence[Point]) -> None:
        """Nothing says which of them are on disk."""

    def end_part(self, part: str, state: str) -> None:
        if part in self._writers:
            self._writers.pop(part).close()

    def stop(self) -> None:
        """Nothing says so in its files."""

    def finish(self, figures: Sequence[Point], files: dict[str, Path]) -> None:
        import numpy as np
        from PIL import Image
        from tensorboardX.summary import image

        self.send(figures)
        now = time.time()
        for file in files.values():
            if file.suffix == ".png":
                picture = image(file.stem, np.asarray(Image.open(file)), dataformats="HWC")
                self._write(WHOLE, picture, step=0, at=now)
        self._flush()

    def close(self) -> None:
        for writer in self._writers.values():
            writer.close()
        self._writers = {}

    def describe(self) -> str:
        return f"{self.folder} (tensorboard --logdir {self.about.out or 'tensorboard'})"


def _import_writer() -> Any:
    """Import tensorboardX's file writer without torch, which takes seconds and which it needs for
    the name of a type only."""
    hides = "torch" not in sys.modules
    if hides:
        sys.modules["torch"] = None  # type: ignore[assignment]
    try:
        from tensorboardX.event_file_writer import EventsWriter
    finally:
        if hides:
            del sys.modules["torch"]
    return EventsWriter
