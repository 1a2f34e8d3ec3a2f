"""Note files that are read twice: named twice, or a copy of another one."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path

from slipstream.data.io.table import DataTable

END_BYTES = 1 << 16
MOST_NOTES = 5


def find_duplicates(tables: Sequence[DataTable]) -> list[str]:
    """Return notes on files that are named twice or have the same content as another one.

    Only files of one size whose ends agree are read as a whole.
    """
    files = [file for table in tables for file in table.files]
    names: dict[Path, str] = {}
    notes = []
    for file in files:
        if file.path is None:
            continue
        path = file.path.resolve()
        if path in names:
            notes.append(f'"{file.name}" is read twice: data.path names it more than once')
        names.setdefault(path, file.name)
    for alike in _group_by_content(names):
        first, *others = (names[path] for path in alike)
        notes += [
            f'"{name}" has the same content as "{first}": its rows come twice' for name in others
        ]
    if len(notes) > MOST_NOTES:
        more = f"{len(notes) - MOST_NOTES:,} further files are read twice or have a copy"
        notes = [*notes[:MOST_NOTES], more]
    return notes


def _group_by_content(paths: Iterable[Path]) -> list[list[Path]]:
    """Group the files that hold the same bytes; cheap comparisons come first."""
    groups = [list(paths)]
    for compute in (lambda path: path.stat().st_size, _hash_ends, _hash_file):
        finer: dict[tuple[int, object], list[Path]] = {}
        for number, group in enumerate(groups):
            for path in group:
                finer.setdefault((number, compute(path)), []).append(path)
        groups = [group for group in finer.values() if len(group) > 1]
    return groups


def _hash_ends(path: Path) -> bytes:
    with path.open("rb") as file:
        digest = hashlib.sha256(file.read(END_BYTES))
        file.seek(max(path.stat().st_size - END_BYTES, 0))
        digest.update(file.read())
    return digest.digest()


def _hash_file(path: Path) -> bytes:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").digest()
