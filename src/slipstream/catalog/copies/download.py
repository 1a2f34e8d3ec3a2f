"""Copy a run from object storage."""

from __future__ import annotations

import os
import tempfile
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

from slipstream import runs
from slipstream.catalog.copies.listing import (
    LISTING,
    CopiedFile,
    Listing,
    check_name,
    read_listing,
    read_object,
    summarize,
)
from slipstream.catalog.copies.run_files import (
    compute_sums,
    list_names,
    refuse_damaged,
    refuse_running,
)
from slipstream.catalog.copies.transfer import Meter, Show, map_parallel
from slipstream.catalog.rows import RunRow, read_row
from slipstream.checksums import compute_sha256
from slipstream.errors import UserError
from slipstream.object_storage import ObjectPath
from slipstream.run_names import CONFIGS
from slipstream.text import find_nearest

PARTIAL = ".copying"
"""Suffix of the hidden folder that a run is copied into before it has its name"""
SMALL, SMALL_BYTES = (".json", ".jsonl", ".toml"), 4 << 20
"""Files that a list of runs reads"""


def list_copies(place: ObjectPath, metric: str | None = None) -> list[RunRow]:
    """Describe the copies in a place, from their small files."""
    copies = [one.name for one in place.iterdir() if one.name != ".."]
    if not copies:
        raise UserError(f"{place}: there is no such folder, or it is empty")
    with tempfile.TemporaryDirectory(prefix="slipstream-") as name:
        folder = Path(name)
        for _ in map_parallel(lambda each: _fetch_small(place / each, folder / each), copies):
            pass
        rows = [read_row(one, metric) for one in sorted(folder.iterdir())]
    return [replace(row, run=Path(str(place / row.name))) for row in rows]


def _fetch_small(source: ObjectPath, folder: Path) -> None:
    """Copy the files of a complete copy that a list of runs reads; others are empty here."""
    listing = read_listing(source)
    if listing is None or not listing.complete:
        return
    folder.mkdir()
    for name, one in listing.files.items():
        first, *below = PurePosixPath(name).parts
        if below:
            (folder / first).mkdir(exist_ok=True)
            continue
        is_small = PurePosixPath(name).suffix in SMALL and one.bytes <= SMALL_BYTES
        content = read_object(source / name) if is_small else None
        (folder / name).write_bytes(content or b"")
        if one.modified is not None:
            os.utime(folder / name, (one.modified, one.modified))


def download(source: ObjectPath, out: Path, show: Show | None) -> dict[str, Any]:
    listing = _list_files(source)
    target = out / source.name
    hidden = out / f".{source.name}{PARTIAL}"
    if target.exists():
        _refuse_different(source, target, listing)
        return summarize(str(source), str(target), listing.files, [])
    try:
        hidden.mkdir(parents=True, exist_ok=True)
        missing = [name for name, one in listing.files.items() if not _is_there(hidden / name, one)]
        _fetch_files(source, hidden, {name: listing.files[name] for name in missing}, show)
        for extra in [name for name in list_names(hidden) if name not in listing.files]:
            runs.remove(hidden / extra)
        if any(one.sha256 is None for one in listing.files.values()):
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
    objects = {one.pure.relative_to(source.pure).as_posix(): one for one in source.rglob()}
    if not any(name in objects for name in CONFIGS):
        names = [one.name for one in source.parent.iterdir()]
        nearest = find_nearest(source.name, names)
        hint = f'did you mean "{nearest}"?' if nearest else f"there is {', '.join(names[:5])}"
        hint = f"; {hint}" if names else ""
        raise UserError(f"{source}: there is no run{hint}")
    files = {
        check_name(name, source): CopiedFile(one.stat().st_size, None, one.stat().st_mtime_ns / 1e9)
        for name, one in objects.items()
    }
    return Listing("", complete=True, files=files)


def _fetch_files(
    source: ObjectPath, folder: Path, files: dict[str, CopiedFile], show: Show | None
) -> None:
    meter = Meter(sum(one.bytes for one in files.values()), show)

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
    different = [n for n, one in listing.files.items() if not _is_there(target / n, one)]
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
