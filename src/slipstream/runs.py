"""The run folder and its event log. No torch here.

Everything is written to a temporary name, flushed to disk, then renamed.
"""

from __future__ import annotations

import json
import math
import os
import platform
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

from slipstream.errors import UserError

Event = dict[str, Any]


@dataclass(frozen=True)
class Run:
    """One run's folder. `watch` is shown every event that is logged."""

    folder: Path
    watch: Callable[[Event], None] | None = None
    started: float = field(default_factory=time.perf_counter)
    told: set[str] = field(default_factory=set)
    """Troubles that the watcher knows of"""

    @property
    def model(self) -> Path:
        return self.folder / "model"

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    @property
    def log(self) -> Path:
        return self.folder / "events.jsonl"

    def append(self, event: str, **values: Any) -> None:
        """Add one line to events.jsonl; where that cannot be done, the run goes on without."""
        line: Event = {"event": event, "at_s": round(time.perf_counter() - self.started, 4)}
        line |= values
        try:
            _add_line(self.log, to_json(line, indent=None) + "\n")
        except OSError as error:
            self.trouble(f"{self.log} cannot be written ({error.strerror})")
        self.show(line)

    def trouble(self, what: str) -> None:
        """Tell the watcher, once, of something that the run survives."""
        if what not in self.told:
            self.told.add(what)
            self.show({"event": "trouble", "what": what})

    def show(self, line: Event) -> None:
        """Let the watcher see something that is not worth logging."""
        if self.watch:
            self.watch(line)


def create(
    name: str,
    *,
    out: str,
    folder: Path | None = None,
    watch: Callable[[Event], None] | None = None,
) -> Run:
    """Make `out/<name>-<UTC time>`, unlike any that exists; or the folder that is given."""
    if folder is not None:
        folder.mkdir(parents=True)
        return Run(folder.resolve(), watch)
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


def find(folder: str | Path, watch: Callable[[Event], None] | None = None) -> Run:
    """An existing run."""
    path = Path(folder)
    if not path.is_dir():
        raise UserError(f"{path}: there is no such run folder")
    if not (path / "config.toml").is_file():
        raise UserError(f"{path}: is not a run folder (it holds no config.toml)")
    return Run(path.resolve(), watch)


def with_model(run: Run) -> tuple[Run, str]:
    """The run whose model is to be used, and a few words on it where it is not the run's own: a
    search's is of its best settings, trained again or else as the best trial left it."""
    inner = run.folder / "retrained" / "best", run.folder / "best"
    if run.model.exists() or not any((folder / "model").exists() for folder in inner):
        return run, ""
    if (inner[0] / "metrics.json").exists():
        return Run(inner[0], run.watch), "the search's best settings, trained again"
    return Run(inner[1], run.watch), "the search's best trial"


def last(out: str, name: str | None = None) -> Path:
    """The run folder under `out` that was written to most recently."""
    found = [path.parent for path in Path(out).glob("*/config.toml")]
    if name is not None:
        found = [folder for folder in found if folder.name.startswith(f"{name}-")]
    if not found:
        raise UserError(f"out = {out!r}: holds no run to resume")
    return max(found, key=lambda folder: (folder / "config.toml").stat().st_mtime)


def events(run: Run) -> Iterator[Event]:
    """The log's lines; the last one may have been cut off by a kill, and is then left out."""
    if run.log.exists():
        with run.log.open(encoding="utf-8", errors="replace") as log:
            for line in log:
                with suppress(json.JSONDecodeError):
                    yield json.loads(line)


def _add_line(path: Path, line: str) -> None:
    """Append a whole line or nothing."""
    with path.open("ab") as log:
        before = log.tell()
        try:
            log.write(line.encode())
            log.flush()
        except OSError:
            with suppress(OSError):
                log.truncate(before)
            raise


def log_size(run: Run) -> int:
    return run.log.stat().st_size if run.log.exists() else 0


def cut_log(run: Run, size: int) -> None:
    """Take back what was logged after a checkpoint that the run goes on from."""
    if log_size(run) > size:
        os.truncate(run.log, size)


@contextmanager
def locked(run: Run) -> Iterator[None]:
    """Be the only one who writes to a run; a lock whose owner is gone is taken over."""
    path = run.folder / "lock.json"
    owner = psutil.Process()
    mine = {"host": platform.node(), "pid": owner.pid, "since": owner.create_time()}
    while True:
        try:
            with path.open("x", encoding="utf-8") as file:
                file.write(json.dumps(mine))
            break
        except FileExistsError:
            _refuse_if_alive(path, mine)
            with suppress(FileNotFoundError):  # another one may have been faster
                aside = path.with_name(f".lock.{owner.pid}.tmp")
                path.rename(aside)
                aside.unlink()
        except OSError as error:
            raise UserError(f"{run.folder}: cannot be written to ({error.strerror})") from None
    try:
        yield
    finally:
        with suppress(OSError):
            path.unlink()


def _refuse_if_alive(path: Path, mine: dict[str, Any]) -> None:
    try:
        held = json.loads(path.read_text(encoding="utf-8"))
        host, pid, since = str(held["host"]), int(held["pid"]), float(held["since"])
    except (OSError, ValueError, KeyError, TypeError):
        return  # its owner was killed while writing it, or it is gone
    if host != mine["host"]:
        raise UserError(
            f"{path.parent}: process {pid} on {host} holds this run; if that one is gone, remove "
            f"{path}"
        )
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        alive = process.status() != psutil.STATUS_ZOMBIE
        if alive and abs(process.create_time() - since) < 1.0:
            raise UserError(f"{path.parent}: process {pid} on this machine is writing to this run")


def cache_folder() -> Path:
    """Where what can be made again is kept from run to run."""
    home = os.environ.get("SLIPSTREAM_CACHE") or os.environ.get("XDG_CACHE_HOME")
    base = Path(home) if home else Path.home() / ".cache"
    return base / "slipstream"


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
    """Yield a temporary name; what is written there takes `path`'s place, flushed to disk."""
    temporary, old = (path.with_name(f".{path.name}.{os.getpid()}.{end}") for end in ("tmp", "old"))
    remove(temporary)
    try:
        yield temporary
        for written in [*temporary.rglob("*"), temporary]:
            _flush(written)
        if path.is_dir():  # a folder can only take the place of an empty one
            path.replace(old)
        temporary.replace(path)
        _flush(path.parent)
    finally:
        remove(temporary)
        remove(old)


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
