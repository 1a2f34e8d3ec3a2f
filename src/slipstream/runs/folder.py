"""The run folder: made, found, and held by one process at a time."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from slipstream.errors import ResumableError, UserError
from slipstream.runs import lock as locks
from slipstream.runs.files import flush, flush_folder, recover_leftovers, remove
from slipstream.runs.lock import Lock
from slipstream.runs.log import Event, add_event, drop_torn_line

UNPUBLISHED = ".unpublished"
"""Ends the name of a folder that is still being made"""
MOST_COLLISIONS = 20


@dataclass(frozen=True)
class Run:
    """One run's folder. `watch` is shown every event that is logged."""

    folder: Path
    watch: Callable[[Event], None] | None = None
    started: float = field(default_factory=time.perf_counter)
    warnings: set[str] = field(default_factory=set)
    """Troubles that the watcher knows of"""
    origin: dict[str, Any] = field(default_factory=dict)
    """What its checkpoints and its model are bound to: the text of config.toml and the data's
    fingerprint, once they are known"""

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
            add_event(self.log, line)
        except OSError as error:
            self.warn(f"{self.log} cannot be written ({error.strerror})")
        self.notify(line)

    def warn(self, what: str) -> None:
        """Tell the watcher, once, of something that the run survives."""
        if what not in self.warnings:
            self.warnings.add(what)
            self.notify({"event": "trouble", "what": what})

    def notify(self, line: Event) -> None:
        """Let the watcher see something that is not worth logging."""
        if self.watch:
            self.watch(line)


def create_run(
    name: str,
    *,
    out: str,
    files: Mapping[str, str] | None = None,
    watch: Callable[[Event], None] | None = None,
) -> Run:
    """Make `out/<name>-<UTC time>`, unlike any that exists, with some files in it."""
    with create_locked(name, out=out, files=files, watch=watch) as run:
        return run


@contextmanager
def create_locked(
    name: str,
    *,
    out: str,
    files: Mapping[str, str] | None = None,
    folder: Path | None = None,
    watch: Callable[[Event], None] | None = None,
) -> Iterator[Run]:
    """Make a run's folder and hold its lock meanwhile: `out/<name>-<UTC time>`, or `folder`.

    It is made under a hidden name and gets its own when its files are on disk, so whoever sees it
    finds a whole run, which can be resumed.
    """
    parent = Path(out) if folder is None else folder.parent
    new = not parent.exists()
    try:
        lock = _unpublished(parent, name if folder is None else folder.name)
    except OSError as error:
        if new:
            with suppress(OSError):
                parent.rmdir()
        raise _cannot_be_made(out if folder is None else str(folder), error) from None
    with ExitStack() as undo:
        undo.callback(lock.release)
        unpublished = undo.enter_context(_removed_unless_renamed(lock))
        try:
            for file, text in (files or {}).items():
                (unpublished / file).write_text(text, encoding="utf-8")
            flush_folder(unpublished)
            lock.folder = _publish(unpublished, name, parent, folder)
        except OSError as error:
            raise _cannot_be_made(out if folder is None else str(folder), error) from None
        with suppress(OSError):
            flush(parent)
        yield Run(lock.folder.resolve(), watch)


def _unpublished(parent: Path, name: str) -> Lock:
    """A new hidden folder, locked. Those of processes that were killed at this point are removed:
    their locks are free."""
    parent.mkdir(parents=True, exist_ok=True)
    for leftover in parent.glob(f".*{UNPUBLISHED}"):
        locks.remove_leftover(leftover)
    for attempt in range(1000):
        folder = parent / f".{name}.{os.getpid()}.{attempt}{UNPUBLISHED}"
        try:
            folder.mkdir()
            return locks.take(folder)
        except FileExistsError:
            continue  # another machine's, another thread's
        except UserError:
            if attempt > MOST_COLLISIONS:
                raise
            # else another process took it for a leftover between the two lines above
    raise UserError(f"{parent}: holds too many unfinished folders of {name}")


@contextmanager
def _removed_unless_renamed(lock: Lock) -> Iterator[Path]:
    folder = lock.folder
    try:
        yield folder
    finally:
        if lock.folder == folder:
            with suppress(OSError):
                remove(folder)


def _publish(unpublished: Path, name: str, parent: Path, folder: Path | None) -> Path:
    """Give a folder its name; one that is taken already is not empty, and cannot be replaced."""
    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    for attempt in range(1, 1000):
        again = f"-{attempt}" if attempt > 1 else ""
        wanted = folder or parent / f"{name}-{stamp}{again}"
        if folder is None and wanted.exists():  # a rename would replace an empty folder
            continue
        try:
            unpublished.rename(wanted)
            return wanted
        except OSError:
            if folder is not None or not wanted.exists():
                raise
    raise UserError(f"{parent}: holds too many runs named {name}-{stamp}")


def _cannot_be_made(out: str, error: OSError) -> Exception:
    if error.errno in locks.DISK_FULL:
        return ResumableError(f"out = {out!r}: {error.strerror}; make room and start again")
    if isinstance(error, (FileExistsError, NotADirectoryError)):
        return UserError(f"out = {out!r}: is not a folder")
    return UserError(
        f"out = {out!r}: cannot make a folder there ({error.strerror}); give another with "
        "--set out=FOLDER"
    )


def open_run(folder: str | Path, watch: Callable[[Event], None] | None = None) -> Run:
    """An existing run."""
    path = Path(folder)
    if not path.is_dir():
        raise UserError(f"{path}: there is no such run folder")
    if not (path / "config.toml").is_file():
        raise UserError(f"{path}: is not a run folder (it holds no config.toml)")
    return Run(path.resolve(), watch)


def find_model_run(run: Run) -> tuple[Run, str]:
    """The run whose model is to be used, and a few words on it where it is not the run's own: a
    search's is of its best settings, trained again or else as the best trial left it."""
    inner = run.folder / "retrained" / "best", run.folder / "best"
    if run.model.exists() or not any((folder / "model").exists() for folder in inner):
        return run, ""
    if (inner[0] / "metrics.json").exists():
        return Run(inner[0], run.watch), "the search's best settings, trained again"
    return Run(inner[1], run.watch), "the search's best trial"


def find_last(out: str, name: str | None = None) -> Path:
    """The run folder under `out` that was written to most recently."""
    found = [path.parent for path in Path(out).glob("*/config.toml")]
    found = [folder for folder in found if not folder.name.startswith(".")]
    if name is not None:
        found = [folder for folder in found if folder.name.startswith(f"{name}-")]
    if not found:
        raise UserError(f"out = {out!r}: holds no run to resume")
    return max(found, key=lambda folder: (folder / "config.toml").stat().st_mtime)


@contextmanager
def lock_run(run: Run) -> Iterator[None]:
    """Be the only one who writes to a run; what a writer that was killed left there is removed."""
    with locks.holding(run.folder):
        recover_leftovers(run.checkpoints, all_writers=True)
        recover_leftovers(run.folder)
        recover_leftovers(run.folder / "best")
        if drop_torn_line(run.log):
            run.warn(f"{run.log}: its last line was cut off by a kill, and is left out")
        yield


def get_cache_folder() -> Path:
    """Where what can be made again is kept from run to run."""
    home = os.environ.get("SLIPSTREAM_CACHE") or os.environ.get("XDG_CACHE_HOME")
    base = Path(home) if home else Path.home() / ".cache"
    return base / "slipstream"
