"""What a copy of a run consists of: `copy.json` beside its files.

It lists those that have arrived, and says so when all have: that is written last, so an interrupted
copy is never taken for a whole one.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath, PureWindowsPath
from typing import Any, NamedTuple

from slipstream import runs
from slipstream.errors import UserError
from slipstream.object_storage import ObjectPath, explain_failures

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
    """What is known of a copy: which run, whether all of it has arrived, and its files."""

    identity: str
    complete: bool = False
    files: dict[str, CopiedFile] = field(default_factory=dict)

    def to_text(self) -> str:
        files = {name: one._asdict() for name, one in sorted(self.files.items())}
        values = {"version": 1, "identity": self.identity, "complete": self.complete}
        return runs.to_json(values | {"files": files}) + "\n"

    @classmethod
    def from_text(cls, text: bytes, where: ObjectPath) -> Listing:
        try:
            values = json.loads(text)
            files = {
                check_name(name, where): CopiedFile(**one) for name, one in values["files"].items()
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
        "bytes": sum(one.bytes for one in files.values()),
        "copied_files": len(copied),
        "copied_bytes": sum(files[name].bytes for name in copied),
    }
