"""SHA-256 sums of files: folders whose manifest.json lists them, and files of the same content."""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

from slipstream.errors import UserError
from slipstream.object_storage import AnyPath

MANIFEST = "manifest.json"
END_BYTES = 1 << 16
"""Of each end of a file: two files that differ there need not be read as a whole"""


def read_verified(folder: Path) -> dict[str, bytes]:
    """Return a folder's files, each verified against the manifest; a UserError names a damaged one.

    Callers parse the returned bytes, not the file itself, which may change afterwards.
    """
    if not folder.is_dir():
        raise UserError(f"{folder}: is missing; was the run finished?")
    sums = _read_manifest(folder / MANIFEST)
    present = {path.name for path in folder.iterdir()} - {MANIFEST}
    for name in sorted(present - set(sums)):
        raise UserError(f"{folder / name}: is not in the manifest; it was added later")
    files = {}
    for name, expected in sums.items():
        if name not in present:
            raise UserError(f"{folder / name}: is missing")
        try:
            files[name] = (folder / name).read_bytes()
        except OSError as error:
            raise UserError(f"{folder / name}: cannot be read ({error.strerror})") from None
        if hashlib.sha256(files[name]).hexdigest() != expected:
            raise UserError(f"{folder / name}: is damaged (its SHA-256 differs from the manifest)")
    return files


def compute_sha256(path: AnyPath) -> str:
    """Return the SHA-256 of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _read_manifest(manifest: Path) -> dict[str, str]:
    try:
        sums = json.loads(manifest.read_bytes())
    except FileNotFoundError:
        raise UserError(f"{manifest}: is missing; was the run finished?") from None
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{manifest}: cannot be read as JSON ({error})") from None
    if not isinstance(sums, dict) or not sums:
        raise UserError(f"{manifest}: lists no files")
    return sums


def group_by_content(paths: Iterable[AnyPath]) -> list[list[AnyPath]]:
    """Group the files that hold the same bytes; cheap comparisons come first."""
    groups = [list(paths)]
    for compute in (lambda path: path.stat().st_size, _hash_ends, compute_sha256):
        finer: dict[tuple[int, object], list[AnyPath]] = {}
        for number, group in enumerate(groups):
            for path in group:
                finer.setdefault((number, compute(path)), []).append(path)
        groups = [group for group in finer.values() if len(group) > 1]
    return groups


def _hash_ends(path: AnyPath) -> bytes:
    with path.open("rb") as file:
        digest = hashlib.sha256(file.read(END_BYTES))
        file.seek(max(path.stat().st_size - END_BYTES, 0))
        digest.update(file.read())
    return digest.digest()
