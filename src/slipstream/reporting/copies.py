"""Copies of runs in object storage."""

from __future__ import annotations

import json
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from os import PathLike
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, NamedTuple

from slipstream import runs
from slipstream.base.errors import Command, UserError
from slipstream.base.run_names import CONFIGS, OUT, find_run, is_run
from slipstream.base.storage import (
    BLOCK_BYTES,
    MANIFEST,
    PARALLEL,
    ObjectPath,
    compute_sha256,
    explain_failures,
    is_url,
    parse_path,
)
from slipstream.base.text import find_nearest, mask_url
from slipstream.reporting.run_rows import RunRow, read_row
from slipstream.runs import lock as locks
from slipstream.runs.watching import PREVIEW, WATCHED

LISTING = "copy.json"
LOG = "events.jsonl"


class CopiedFile(NamedTuple):
    """One file of a copy."""

    bytes: int
    sha256: str | None
    """None in a copy that something else has made"""
    modified: float | None


@dataclass
class Listing:
    """The state of a copy: its run, whether all of it has arrived, and its files."""

    identity: str
    complete: bool = False
    files: dict[str, CopiedFile] = field(default_factory=dict)

    def to_text(self) -> str:
        files = {name: file._asdict() for name, file in sorted(self.files.items())}
        values = {"version": 1, "identity": self.identity, "complete": self.complete}
        return runs.to_json(values | {"files": files}) + "\n"

    @classmethod
    def from_text(cls, text: bytes, where: ObjectPath) -> Listing:
        try:
            values = json.loads(text)
            files = {
                check_name(name, where): CopiedFile(**file)
                for name, file in values["files"].items()
            }
            return cls(str(values["identity"]), bool(values["complete"]), files)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(
                f"{where}: cannot be read ({error}); remove the copy, and copy the run again"
            ) from None


def check_name(name: str, where: ObjectPath) -> str:
    """Refuse a name in a copy that would be written outside of the run's folder."""
    path, on_windows = PurePosixPath(name), PureWindowsPath(name)
    leaves = path.is_absolute() or ".." in path.parts or on_windows.drive or "\\" in name
    if leaves or "\0" in name or not path.parts:
        raise UserError(f'{where}: "{name}" is no name of a file below a run; copy the run again')
    return name


def read_listing(copy: ObjectPath) -> Listing | None:
    """Read the listing of a copy; None where there is none."""
    text = read_object(copy / LISTING)
    return None if text is None else Listing.from_text(text, copy / LISTING)


def read_object(path: ObjectPath) -> bytes | None:
    try:
        with explain_failures(path), path.open() as file:
            return bytes(file.read())
    except FileNotFoundError:
        return None


def summarize(
    run: str, to: str, files: dict[str, CopiedFile], copied: Sequence[str]
) -> dict[str, Any]:
    return {
        "run": run,
        "to": to,
        "files": len(files),
        "bytes": sum(file.bytes for file in files.values()),
        "copied_files": len(copied),
        "copied_bytes": sum(files[name].bytes for name in copied),
    }


Show = Callable[[int, int], None]
"""Is called with the bytes that are copied and those to copy"""


def map_parallel(function: Callable[[str], Any], names: Sequence[str]) -> Iterator[Any]:
    """Yield results in order; at the first error what has not begun is left out."""
    with ThreadPoolExecutor(PARALLEL) as pool:
        try:
            yield from pool.map(function, names)
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise


class Meter:
    """Counts the bytes that several threads have copied."""

    def __init__(self, total: int, show: Show | None) -> None:
        self.total, self.show, self.count, self.lock = total, show, 0, threading.Lock()

    def add(self, count: int) -> None:
        with self.lock:
            self.count += count
            if self.show is not None:
                self.show(self.count, self.total)


SKIPPED = {locks.NAME, locks.WITHOUT_FLOCK, WATCHED, PREVIEW, LISTING}


def list_names(folder: Path) -> list[str]:
    """List the files of a run, except locks, temporary and hidden ones; links are not followed."""
    files = (path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    names = (path.relative_to(folder) for path in sorted(files))
    return [
        name.as_posix()
        for name in names
        if name.name not in SKIPPED and not any(part.startswith(".") for part in name.parts)
    ]


def read_state(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_size, status.st_mtime_ns


def refuse_running(folder: Path) -> None:
    if writers := runs.find_writers(folder):
        where = f"process {writers[0].get('pid')} on {writers[0].get('host')}"
        raise UserError(
            f"{folder}: {where} writes to it; copy it once that has finished, or stop it first "
            "(Ctrl-C saves a checkpoint)"
        )


def compute_sums(folder: Path, names: Any) -> dict[str, str]:
    try:
        return {name: compute_sha256(folder / name) for name in names}
    except OSError as error:
        raise UserError(f"{folder}: cannot be read ({error.strerror})") from None


def refuse_damaged(folder: Path, sums: dict[str, str]) -> None:
    """Compare sums with those of all manifests in a run."""
    for name in sums:
        if PurePosixPath(name).name != MANIFEST:
            continue
        listed = runs.read_json(folder / name)
        for file, expected in listed.items() if isinstance(listed, dict) else ():
            path = PurePosixPath(name).parent / file
            if sums.get(path.as_posix()) != expected:
                raise UserError(
                    f"{folder / path}: is damaged (its SHA-256 differs from {folder / name}); "
                    "restore it, or train again"
                )


PARTIAL = ".copying"
"""Suffix of the hidden folder that a run is copied into before it has its name"""
SMALL, SMALL_BYTES = (".json", ".jsonl", ".toml"), 4 << 20
"""Files that a list of runs reads"""


def list_copies(place: ObjectPath, metric: str | None = None) -> list[RunRow]:
    """Describe the copies in a place, from their small files."""
    copies = [path.name for path in place.iterdir() if path.name != ".."]
    if not copies:
        raise UserError(f"{place}: there is no such folder, or it is empty")
    with tempfile.TemporaryDirectory(prefix="slipstream-") as name:
        folder = Path(name)
        for _ in map_parallel(lambda name: _fetch_small(place / name, folder / name), copies):
            pass
        rows = [read_row(path, metric) for path in sorted(folder.iterdir())]
    return [replace(row, run=Path(str(place / row.name))) for row in rows]


def _fetch_small(source: ObjectPath, folder: Path) -> None:
    """Copy the files of a complete copy that a list of runs reads; others are empty here."""
    listing = read_listing(source)
    if listing is None or not listing.complete:
        return
    folder.mkdir()
    for name, file in listing.files.items():
        first, *below = PurePosixPath(name).parts
        if below:
            (folder / first).mkdir(exist_ok=True)
            continue
        is_small = PurePosixPath(name).suffix in SMALL and file.bytes <= SMALL_BYTES
        content = read_object(source / name) if is_small else None
        (folder / name).write_bytes(content or b"")
        if file.modified is not None:
            os.utime(folder / name, (file.modified, file.modified))


def download(source: ObjectPath, out: Path, show: Show | None) -> dict[str, Any]:
    listing = _list_files(source)
    target = out / source.name
    hidden = out / f".{source.name}{PARTIAL}"
    if target.exists():
        _refuse_different(source, target, listing)
        return summarize(str(source), str(target), listing.files, [])
    try:
        hidden.mkdir(parents=True, exist_ok=True)
        missing = [
            name for name, file in listing.files.items() if not _is_there(hidden / name, file)
        ]
        _fetch_files(source, hidden, {name: listing.files[name] for name in missing}, show)
        for extra in [name for name in list_names(hidden) if name not in listing.files]:
            runs.remove(hidden / extra)
        if any(file.sha256 is None for file in listing.files.values()):
            refuse_damaged(hidden, compute_sums(hidden, listing.files))
        runs.flush_folder(hidden)
        hidden.rename(target)
    except OSError as error:
        raise UserError(f"{target}: cannot be written ({error.strerror or error})") from None
    return summarize(str(source), str(target.resolve()), listing.files, missing)


def _list_files(source: ObjectPath) -> Listing:
    """Read what a copy consists of; without copy.json, take every object there is."""
    listing = read_listing(source)
    if listing is not None:
        if not listing.complete:
            raise UserError(
                f"{source}: the copy was interrupted, or is being made; repeat the command that "
                "makes it"
            )
        return listing
    objects = {path.pure.relative_to(source.pure).as_posix(): path for path in source.rglob()}
    if not any(name in objects for name in CONFIGS):
        names = [path.name for path in source.parent.iterdir()]
        nearest = find_nearest(source.name, names)
        hint = f'did you mean "{nearest}"?' if nearest else f"there is {', '.join(names[:5])}"
        hint = f"; {hint}" if names else ""
        raise UserError(f"{source}: there is no run{hint}")
    files = {
        check_name(name, source): CopiedFile(
            path.stat().st_size, None, path.stat().st_mtime_ns / 1e9
        )
        for name, path in objects.items()
    }
    return Listing("", complete=True, files=files)


def _fetch_files(
    source: ObjectPath, folder: Path, files: dict[str, CopiedFile], show: Show | None
) -> None:
    meter = Meter(sum(file.bytes for file in files.values()), show)

    def fetch(name: str) -> None:
        expected, path = files[name], folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with runs.replace_atomically(path) as temporary:
            try:
                (source / name).download(temporary)
            except FileNotFoundError:
                raise UserError(f"{source / name}: is missing; copy the run again") from None
            if expected.sha256 is not None and compute_sha256(temporary) != expected.sha256:
                raise UserError(
                    f"{source / name}: is damaged (its SHA-256 differs from {LISTING}); copy the "
                    "run again"
                )
        if expected.modified is not None:  # `last` is the run that was started last
            os.utime(path, (expected.modified, expected.modified))
        meter.add(expected.bytes)

    for _ in map_parallel(fetch, list(files)):
        pass


def _refuse_different(source: ObjectPath, target: Path, listing: Listing) -> None:
    """Refuse to copy over a run that is not the same."""
    refuse_running(target)
    different = [n for n, file in listing.files.items() if not _is_there(target / n, file)]
    if different:
        raise UserError(
            f"{target}: exists and differs from {source} ({', '.join(different[:3])}); remove it, "
            "or copy to another folder"
        )


def _is_there(path: Path, expected: CopiedFile) -> bool:
    """Whether a file is already the one to copy."""
    if not path.is_file() or path.stat().st_size != expected.bytes or expected.sha256 is None:
        return False
    return compute_sha256(path) == expected.sha256


LAST = (MANIFEST, "metrics.json")
"""Sent after all other files, since they say that a run has finished"""
SAVE_S = 5.0
"""How often the list of what has arrived is written meanwhile"""


def upload(folder: Path, place: ObjectPath, show: Show | None) -> dict[str, Any]:
    if not is_run(folder):
        raise UserError(f"{folder}: is not a run folder (it holds no config.toml)")
    refuse_running(folder)
    target = place / folder.name
    states = {name: read_state(folder / name) for name in list_names(folder)}
    sums = compute_sums(folder, states)
    refuse_damaged(folder, sums)
    wanted = {
        name: CopiedFile(size, sums[name], changed / 1e9)
        for name, (size, changed) in states.items()
    }
    known = _read_known(target, _identify(folder), wanted)
    here = {file.pure.relative_to(target.pure).as_posix(): file for file in target.rglob()}
    there = {
        name: file
        for name, file in known.files.items()
        if name in here and here[name].stat().st_size == file.bytes
    }
    missing = [name for name, file in wanted.items() if not _is_same(there.get(name), file)]
    removed = [name for name in known.files if name not in wanted and name in here]
    listing = Listing(known.identity, False, {n: file for n, file in there.items() if n in wanted})
    if missing or removed or not known.complete:
        with _saving(listing, target):
            _send_files(folder, target, {name: wanted[name] for name in missing}, listing, show)
            _refuse_changed(folder, states)
            for name in removed:
                with explain_failures(target / name):
                    target.connect().delete_file((target / name).key)
            listing.complete = True
    return summarize(str(folder), str(target), wanted, missing)


def _read_known(target: ObjectPath, identity: str, wanted: dict[str, CopiedFile]) -> Listing:
    """Read what an earlier copy has sent; another run's is refused, and so is a later state."""
    known = read_listing(target)
    if known is None:
        if target.is_dir():
            raise UserError(
                f"{target}: exists, but no {LISTING} is there, so that it is no copy of this "
                "command; remove it, or copy to another place"
            )
        return Listing(identity)
    if known.identity != identity:
        raise UserError(f"{target}: is the copy of another run of this name; copy elsewhere")
    if LOG in known.files and LOG in wanted and known.files[LOG].bytes > wanted[LOG].bytes:
        raise UserError(
            f"{target}: is the copy of a later state of this run, which was resumed "
            "elsewhere; copy it here: " + Command("copy", target)
        )
    return known


def _send_files(
    folder: Path,
    target: ObjectPath,
    files: dict[str, CopiedFile],
    listing: Listing,
    show: Show | None,
) -> None:
    """Send files, several at a time, those that mark a finished run last."""
    meter = Meter(sum(file.bytes for file in files.values()), show)
    marks = [name for name in LAST if name in files]
    unmarked = [name for name in files if name not in marks]
    saved_at = time.monotonic()

    def send(name: str) -> str:
        _send(folder / name, target / name, meter)
        return name

    for names in (unmarked, *([mark] for mark in marks)):
        for name in map_parallel(send, names):
            listing.files[name] = files[name]
            if time.monotonic() - saved_at > SAVE_S:
                _write_listing(target, listing)
                saved_at = time.monotonic()


def _send(path: Path, target: ObjectPath, meter: Meter) -> None:
    size = path.stat().st_size
    with explain_failures(target):
        with path.open("rb") as source, _open_output(target) as sink:
            while block := source.read(BLOCK_BYTES):
                sink.write(block)
                meter.add(len(block))
        arrived = target.connect().get_file_info(target.key).size
    if arrived != size:
        raise UserError(f"{target}: has {arrived:,} bytes instead of {size:,}; repeat the command")


def _open_output(target: ObjectPath) -> Any:
    system = target.connect()
    if target.scheme == "file":
        system.create_dir(target.parent.key, recursive=True)
    return system.open_output_stream(target.key, compression=None)


def _write_listing(target: ObjectPath, listing: Listing) -> None:
    with explain_failures(target), _open_output(target / LISTING) as sink:
        sink.write(listing.to_text().encode())


@contextmanager
def _saving(listing: Listing, target: ObjectPath) -> Iterator[None]:
    """Write the listing before and after, also where the copy is interrupted."""
    _write_listing(target, listing)
    try:
        yield
    except BaseException:
        with suppress(UserError, OSError):
            _write_listing(target, listing)
        raise
    _write_listing(target, listing)


def _refuse_changed(folder: Path, states: dict[str, tuple[int, int]]) -> None:
    refuse_running(folder)
    for name, state in states.items():
        if not (folder / name).is_file() or read_state(folder / name) != state:
            raise UserError(f"{folder / name}: changed while it was copied; repeat the command")


def _identify(folder: Path) -> str:
    """Return what tells a run from others of its name: how its log begins, which a resume keeps."""
    import hashlib

    for name in (LOG, *CONFIGS):
        with suppress(OSError), (folder / name).open("rb") as file:
            return hashlib.sha256(file.readline()).hexdigest()
    return ""


def _is_same(file: CopiedFile | None, wanted: CopiedFile) -> bool:
    return file is not None and (file.bytes, file.sha256) == (wanted.bytes, wanted.sha256)


def copy_run(
    run: str | PathLike[str], to: str | PathLike[str] = OUT, *, show: Show | None = None
) -> dict[str, Any]:
    """Copy a run to object storage, or from there to a folder.

    Every file is verified by its SHA-256 sum. A repeated copy sends only what has changed, and an
    interrupted one is repeated. A run that is training is refused; one that has stopped is copied
    with its checkpoints, and can be resumed where the copy is.

    Args:
        run: A run, or the URL of a copy, such as s3://bucket/runs/job-20260131T120000Z.
        to: The destination of the run's folder: a URL, such as s3://bucket/runs, or a folder of
            runs on this machine.
        show: A function that is called with the bytes copied so far and the bytes in total.

    Returns:
        A dict: `run`, `to`, `files` and `bytes` of the whole run, and `copied_files` and
        `copied_bytes` of what was sent.

    Raises:
        UserError: There is no such run, it is training or damaged, another run of its name is
            there, or the storage cannot be reached.

    Example:
        slipstream.copy_run("last", "s3://bucket/runs")
        slipstream.copy_run("s3://bucket/runs/job-20260131T120000Z", "runs")
    """
    for text in map(str, (run, to)):
        if "://" in text and not is_url(text):
            raise UserError(f"{mask_url(text)}: runs are copied to and from s3://, gs:// and az://")
    if is_url(run) == is_url(to):
        where = "object storage" if is_url(to) else "this machine"
        raise UserError(
            f"{run} and {to} are both on {where}; copy from a folder to a URL such as "
            "s3://bucket/runs, or the other way round"
        )
    if is_url(to):
        return upload(find_run(Path(run)).resolve(), _parse_url(to), show)
    return download(_parse_url(run), Path(to), show)


def _parse_url(text: str | PathLike[str]) -> ObjectPath:
    path = parse_path(text)
    assert isinstance(path, ObjectPath)
    return path
