"""The run folder and the folders of its workers."""

from __future__ import annotations

import hashlib
import os
import shlex
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple, cast

from slipstream import events
from slipstream.base.errors import Option, ResumableError, UserError
from slipstream.base.run_names import ENSEMBLE_FILE, UNTESTED_FILE, find_run
from slipstream.base.storage import MANIFEST, compute_sha256
from slipstream.base.text import mask_argument
from slipstream.events import Event
from slipstream.runs import files as disk
from slipstream.runs import lock as locks
from slipstream.runs.files import read_json, remove
from slipstream.runs.lock import Lock, find_holder
from slipstream.runs.log import SCHEMA, add_event, drop_torn_line
from slipstream.runs.summary import RunOrigin, RunSummary, Summary

Watch = Callable[[Event], None]
UNPUBLISHED = ".unpublished"
"""Suffix of a folder that is still being created"""
MAX_COLLISIONS = 20
"""How often other processes may remove a new hidden folder as a leftover before an error"""
METRICS = "metrics.json"
UNTESTED = "untested"
LISTED = (
    *("config.toml", "labels.toml", "encoder.toml", "plan.json", "trials.json", "best.toml"),
    *("predictions.parquet", "reconstructions.parquet", "ensemble.json"),
)
"""Files of a finished run whose SHA-256 sums the manifest lists"""


@dataclass(frozen=True)
class Run:
    """A run folder. `watch` is called with every event that is logged."""

    folder: Path
    watch: Watch | None = None
    started_at: float = field(default_factory=time.perf_counter)
    warnings: set[str] = field(default_factory=set)
    """Warnings that were shown already"""
    origin: dict[str, Any] = field(default_factory=dict)
    """The text of config.toml and, once known, the data's fingerprint; saved with checkpoints and
    model"""

    @property
    def model(self) -> Path:
        return self.folder / "model"

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    @property
    def log(self) -> Path:
        return self.folder / "events.jsonl"

    def append(self, event: Event) -> None:
        """Add an event to events.jsonl and show it to the watcher; if the file cannot be written,
        warn and continue."""
        elapsed_s = time.perf_counter() - self.started_at
        changes: dict[str, Any] = {"at_s": round(elapsed_s, 4)}
        if isinstance(event, events.Start | events.Resume | events.SearchStart):
            opened = datetime.fromtimestamp(time.time() - elapsed_s, UTC)
            changes["opened_at"] = opened.isoformat(timespec="milliseconds")
            changes["schema"] = SCHEMA
        event = replace(event, **changes)
        try:
            add_event(self.log, event)
        except OSError as error:
            self.warn(f"{self.log} cannot be written ({error.strerror})")
        self.notify(event)

    def warn(self, problem: str) -> None:
        """Show the watcher, once, a problem that the run survives."""
        if problem not in self.warnings:
            self.warnings.add(problem)
            self.notify(events.Trouble(what=problem))

    def notify(self, event: Event) -> None:
        """Show the watcher an event without logging it."""
        if self.watch:
            self.watch(event)


def create_run(
    name: str,
    *,
    out: str,
    files: Mapping[str, str] | None = None,
    folder: Path | None = None,
    watch: Watch | None = None,
) -> Run:
    """Create a new folder, `out/<name>-<UTC time>` or `folder`, with some files in it."""
    with create_locked(name, out=out, files=files, folder=folder, watch=watch) as run:
        return run


@contextmanager
def create_locked(
    name: str,
    *,
    out: str,
    files: Mapping[str, str] | None = None,
    folder: Path | None = None,
    watch: Watch | None = None,
    fill: Callable[[Run], None] | None = None,
) -> Iterator[Run]:
    """Create a run folder, `out/<name>-<UTC time>` or `folder`, and hold its lock.

    The folder has a hidden name until its files, and those that `fill` writes, are on disk, so
    every visible run folder is complete and can be resumed.
    """
    parent = Path(out) if folder is None else folder.parent
    where = out if folder is None else str(folder)
    is_new = not parent.exists()
    try:
        lock = _create_hidden(parent, name if folder is None else folder.name)
    except OSError as error:
        if is_new:
            with suppress(OSError):
                parent.rmdir()
        raise _explain_failure(where, error) from None
    hidden = lock.folder
    try:
        try:
            for file, text in (files or {}).items():
                (hidden / file).write_text(text, encoding="utf-8")
            if fill is not None:
                fill(Run(hidden.resolve(), watch))
            disk.flush_folder(hidden)
            lock.folder = _publish(hidden, name, parent, folder)
        except OSError as error:
            if folder is not None and folder.exists():
                raise UserError(
                    f"{folder}: exists and is not a run; name another folder, or remove it"
                ) from None
            raise _explain_failure(where, error) from None
        with suppress(OSError):
            disk.flush(parent)
        yield Run(lock.folder.resolve(), watch)
    finally:
        if lock.folder == hidden:  # it was not published
            with suppress(OSError):
                remove(hidden)
        lock.release()


def _create_hidden(parent: Path, name: str) -> Lock:
    """Create and lock a hidden folder; remove those of killed processes, whose locks are free."""
    parent.mkdir(parents=True, exist_ok=True)
    for leftover in parent.glob(f".*{UNPUBLISHED}"):
        locks.remove_leftover(leftover)
    for attempt in range(1000):
        folder = parent / f".{name}.{os.getpid()}.{attempt}{UNPUBLISHED}"
        try:
            folder.mkdir()
            return locks.acquire(folder)
        except FileExistsError:
            continue  # of another machine or thread
        except UserError:
            if attempt > MAX_COLLISIONS:
                raise
            # otherwise another process took it for a leftover between mkdir and acquire
    raise UserError(f"{parent}: holds too many unfinished folders of {name}")


def _publish(hidden: Path, name: str, parent: Path, folder: Path | None) -> Path:
    """Rename a hidden folder to its final name; an existing run folder is never replaced."""
    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    for attempt in range(1, 1000):
        again = f"-{attempt}" if attempt > 1 else ""
        target = folder or parent / f"{name}-{stamp}{again}"
        if folder is None and target.exists():  # a rename would replace an empty folder
            continue
        try:
            hidden.rename(target)
            return target
        except OSError:
            if folder is not None or not target.exists():
                raise
    raise UserError(f"{parent}: holds too many runs named {name}-{stamp}")


def _explain_failure(out: str, error: OSError) -> Exception:
    if error.errno in locks.DISK_FULL:
        return ResumableError(f"out = {out!r}: {error.strerror}; make room and start again")
    if isinstance(error, (FileExistsError, NotADirectoryError)):
        return UserError(f"out = {out!r}: is not a folder")
    return UserError(
        f"out = {out!r}: cannot create a folder there ({error.strerror}); choose another "
        "with " + Option("set", "out=FOLDER")
    )


def open_run(name: str | Path, watch: Watch | None = None, *, kinds: Collection[str] = ()) -> Run:
    """Open an existing run by its folder, the beginning of its name, or `last`."""
    path = find_run(name, kinds=kinds)
    if (path / "labels.toml").is_file() and not (path / "config.toml").is_file():
        raise UserError(
            f"{path}: is a probe; name one of its runs: {path / 'scratch'}, {path / 'frozen'} or "
            f"{path / 'fine-tuned'}"
        )
    if not (path / "config.toml").is_file():
        raise UserError(f"{path}: is not a run folder (it holds no config.toml)")
    return Run(path.resolve(), watch)


def find_model_run(run: Run) -> tuple[Run, str]:
    """Return the run whose model is used, and a description where it is not `run` itself: for a
    search, the best settings, retrained or as the best trial left them. A run that is untested is
    described as such."""
    inner = run.folder / "retrained" / "best", run.folder / "best"
    has_own = run.model.exists() or (run.folder / ENSEMBLE_FILE).exists()
    files = ("model", ENSEMBLE_FILE)
    if has_own or not any((folder / name).exists() for folder in inner for name in files):
        return run, describe_untested(run.folder)
    if (inner[0] / "metrics.json").exists():
        return Run(inner[0], run.watch), "the search's best settings, retrained"
    return Run(inner[1], run.watch), "the search's best trial"


def describe_untested(folder: Path) -> str:
    """Return that a run was trained on all rows, so that no rows are left to test it on, and whose
    error it is expected to have; empty for every other run."""
    path = folder / UNTESTED_FILE
    if not path.exists():
        return ""
    tested = read_json(path)["expected"]
    return f"{UNTESTED}: trained on all rows, its expected error is that of {tested}"


def describe_model(predictor: str, owner: str) -> str:
    """Return the description of a predictor with what `find_model_run` says of its run."""
    if owner.startswith(UNTESTED):
        return f"{predictor} ({owner})"
    return f"{owner}: {predictor}" if owner else predictor


@contextmanager
def lock_run(run: Run) -> Iterator[None]:
    """Hold a run's lock, and remove the leftovers of killed writers."""
    with locks.hold_lock(run.folder):
        disk.recover_leftovers(run.checkpoints, all_writers=True)
        disk.recover_leftovers(run.folder)
        disk.recover_leftovers(run.folder / "best")
        if drop_torn_line(run.log):
            run.warn(f"{run.log}: dropped its last line, which a kill had cut off")
        yield


def get_cache_folder() -> Path:
    """Return the folder for data that is cached between runs and can be recreated."""
    home = os.environ.get("SLIPSTREAM_CACHE") or os.environ.get("XDG_CACHE_HOME")
    base = Path(home) if home else Path.home() / ".cache"
    return base / "slipstream"


def write_metrics(run: Run, summary: Summary, *, name: str = METRICS) -> None:
    """Write metrics.json, which marks a run as finished, and before it the manifest of SHA-256 sums
    of all its files. A probe uses another `name`."""
    text = disk.to_json(summary) + "\n"
    files = [run.folder / name for name in LISTED if (run.folder / name).is_file()]
    sums = {path.name: _compute_sum(path) for path in files}
    sums[name] = _hash_text(text)
    disk.write_json(run.folder / MANIFEST, sums)
    disk.write_text(run.folder / name, text)


def update_metrics(folder: Path, **values: Any) -> RunSummary:
    """Change entries of a finished run's metrics.json; return all of them.

    There is no manifest in between, so that a kill leaves a run that can be read.
    """
    metrics, manifest = read_metrics(folder), folder / MANIFEST
    metrics |= cast(RunSummary, values)
    text = disk.to_json(metrics) + "\n"
    sums = read_json(manifest) if manifest.exists() else None
    remove(manifest)
    disk.write_text(folder / METRICS, text)
    if sums is not None:
        disk.write_json(manifest, sums | {METRICS: _hash_text(text)})
    return metrics


def _hash_text(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def remove_manifest(run: Run) -> None:
    """Remove the manifest: the run continues, and its files will change."""
    remove(run.folder / MANIFEST)


def verify_files(folder: Path, *names: str) -> None:
    """Verify files against the run's manifest; a UserError names a damaged one. Unfinished runs and
    runs of version 0.1 have no manifest."""
    manifest = folder / MANIFEST
    if not manifest.exists():
        return
    sums = read_json(manifest)
    fix = f"restore it from a copy, train again, or remove {manifest} to skip the check"
    if not isinstance(sums, dict):
        raise UserError(f"{manifest}: lists no files; restore it from a copy, or remove it")
    for name in names:
        path = folder / name
        if name not in sums and not path.exists():
            continue
        if not path.is_file():
            raise UserError(f"{path}: is missing; {fix}")
        if sums.get(name) != _compute_sum(path):
            raise UserError(f"{path}: is damaged (its SHA-256 differs from {MANIFEST}); {fix}")


def read_metrics(folder: Path, *, name: str = METRICS) -> RunSummary:
    """Read and verify the metrics.json of a finished run. A probe uses another `name`."""
    verify_files(folder, name)
    metrics = read_json(folder / name)
    if not isinstance(metrics, dict):
        raise UserError(f"{folder / name}: holds no metrics; train the run again")
    return cast(RunSummary, metrics)


def _compute_sum(path: Path) -> str:
    try:
        return compute_sha256(path)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None


def describe_origin() -> RunOrigin:
    """Return the entries of a summary about its origin: the time at which it was made, and the
    command."""
    return {
        # tells a run from the same one trained longer, which may end within the same second
        "finished_at": datetime.now(UTC).isoformat(timespec="milliseconds"),
        "command": find_command(sys.argv),
    }


def find_command(argv: list[str]) -> str | None:
    """Return a command line of Slipstream without passwords; None of another program."""
    program = Path(argv[0])
    name = program.parent.name if program.name == "__main__.py" else program.stem
    if name != "slipstream":
        return None
    return shlex.join(["slipstream", *map(mask_argument, argv[1:])])


FOLDER, SHARES = "workers", "shares.json"
RESULT = "result"
"""The folder with the result of a share, complete when it is there"""


class ShareCount(NamedTuple):
    """The shares of a run whose lanes are divided."""

    done: int
    of: int


def list_worker_folders(folder: Path) -> list[Path]:
    """List the folders of a run's workers."""
    try:
        return sorted(path for path in (folder / FOLDER).iterdir() if path.is_dir())
    except OSError:
        return []


def find_writers(folder: Path) -> list[Mapping[str, Any]]:
    """Return the process that writes to a run or, without one, the processes that train its shares:
    host and process each."""
    if holder := find_holder(folder):
        return [holder]
    holders = (find_holder(worker) for worker in list_worker_folders(folder))
    return [holder for holder in holders if holder]


def count_shares(folder: Path) -> ShareCount | None:
    """Count the shares of a run that is not finished; None where it has none."""
    try:
        shares = read_json(folder / FOLDER / SHARES)["shares"]
    except (UserError, LookupError, TypeError):
        return None
    done = sum((worker / RESULT).is_dir() for worker in list_worker_folders(folder))
    return ShareCount(done, len(shares))
