"""The files of a run on this machine: their names and sums, and whether they may be copied."""

from __future__ import annotations

from pathlib import Path, PurePosixPath
from typing import Any

from slipstream import runs
from slipstream.catalog.copies.listing import LISTING
from slipstream.checksums import MANIFEST, compute_sha256
from slipstream.errors import UserError
from slipstream.runs import lock as locks
from slipstream.runs.watching import PREVIEW, WATCHED

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
