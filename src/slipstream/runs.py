"""The run folder and its event log. No torch here.

Everything is written to a temporary name, flushed to disk, then renamed.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from slipstream.errors import UserError

Event = dict[str, Any]


@dataclass(frozen=True)
class Run:
    """One run's folder. `watch` is shown every event that is logged."""

    folder: Path
    watch: Callable[[Event], None] | None = None
    started: float = field(default_factory=time.perf_counter)

    @property
    def model(self) -> Path:
        return self.folder / "model"

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    def append(self, event: str, **values: Any) -> None:
        """Add one line to events.jsonl."""
        line: Event = {"event": event, "at_s": round(time.perf_counter() - self.started, 4)}
        line |= values
        with (self.folder / "events.jsonl").open("a", encoding="utf-8") as log:
            log.write(to_json(line, indent=None) + "\n")
        self.show(line)

    def show(self, line: Event) -> None:
        """Let the watcher see something that is not worth logging."""
        if self.watch:
            self.watch(line)


def create(name: str, *, out: str, watch: Callable[[Event], None] | None = None) -> Run:
    """Make `out/<name>-<UTC time>`, unlike any that exists."""
    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    for attempt in range(1, 1000):
        folder = Path(out) / (f"{name}-{stamp}" + (f"-{attempt}" if attempt > 1 else ""))
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            if not folder.exists():  # a file stands where a parent folder should be
                raise UserError(f"out = {out!r}: is not a folder") from None
            continue
        except OSError as error:
            raise UserError(
                f"out = {out!r}: cannot make a folder there ({error.strerror}); "
                "give another with --set out=FOLDER"
            ) from None
        return Run(folder.resolve(), watch)
    raise UserError(f"out = {out!r}: holds too many runs named {name}-{stamp}")


def find(folder: str | Path) -> Run:
    """An existing run."""
    path = Path(folder)
    if not path.is_dir():
        raise UserError(f"{path}: there is no such run folder")
    if not (path / "config.toml").is_file():
        raise UserError(f"{path}: is not a run folder (it holds no config.toml)")
    return Run(path.resolve())


def events(run: Run) -> Iterator[Event]:
    path = run.folder / "events.jsonl"
    if path.exists():
        with path.open(encoding="utf-8") as log:
            for line in log:
                yield json.loads(line)


def to_json(value: Any, *, indent: int | None = 1) -> str:
    """JSON that every reader takes: what is not finite becomes null."""
    return json.dumps(_finite(value), indent=indent, allow_nan=False, ensure_ascii=False)


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {str(k): _finite(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(v) for v in value]
    return value


def read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path}: is missing; was the run finished?") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise UserError(f"{path}: cannot be read as JSON ({error})") from None


def write_text(path: Path, text: str) -> None:
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: Path, value: Any) -> None:
    write_text(path, to_json(value) + "\n")


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary name; what is written there takes `path`'s place (a folder must be new)."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    remove(temporary)
    try:
        yield temporary
        for written in [*temporary.rglob("*"), temporary]:
            _flush(written)
        temporary.replace(path)
        _flush(path.parent)
    finally:
        remove(temporary)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
