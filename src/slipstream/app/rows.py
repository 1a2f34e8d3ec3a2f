"""The rows of all runs, read again only where files have changed; the tags and notes of runs."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from slipstream import __version__
from slipstream.app.jobs import read_object
from slipstream.app.paths import is_below
from slipstream.base.errors import UserError
from slipstream.base.text import format_number
from slipstream.reporting.run_rows import (
    RUNNING,
    STOPPED,
    RunRow,
    looks_like_run,
    make_row,
    read_files,
)
from slipstream.reporting.runs import format_against
from slipstream.reporting.wording import format_metric
from slipstream.runs import list_worker_folders, to_json, write_text

ANNOTATIONS = "ui.json"
"""The file in a run's folder with the user's tags and note"""
WATCHED = (
    "",
    "config.toml",
    "metrics.json",
    "manifest.json",
    "lock.json",
    "summary.json",
    ANNOTATIONS,
)
MAX_TAGS = 20
MAX_TAG = 40
MAX_NOTE = 10_000
Row = dict[str, Any]
Signature = tuple[int, ...]


class RowCache:
    """The rows of runs, as JSON has them; also between two starts of the server."""

    def __init__(self) -> None:
        self._rows: dict[str, tuple[Signature, Row]] = {}
        self._lock = threading.Lock()

    def list(self, root: Path, folders: Iterable[Path]) -> list[Row]:
        """Return the rows of the runs in some folders, the newest first."""
        with self._lock:
            rows: dict[str, Row] = {}
            for parent in folders:
                for folder in _list_folders(root, parent):
                    if row := self._read(root, folder):
                        rows[row["id"]] = row
            for removed in self._rows.keys() - rows.keys():
                del self._rows[removed]
        now = time.time()
        aged = [row | {"age_s": max(now - row["created_s"], 0.0)} for row in rows.values()]
        return sorted(aged, key=lambda row: str(row["at"]), reverse=True)

    def load(self, path: Path) -> None:
        """Take over rows that an earlier server of this version has saved."""
        saved = read_object(path)
        if saved.get("version") == __version__ and isinstance(saved.get("rows"), dict):
            with self._lock, suppress(TypeError, ValueError):
                self._rows = {
                    k: (tuple(sign), dict(row)) for k, (sign, row) in saved["rows"].items()
                }

    def save(self, path: Path) -> None:
        """Save the rows for the next server."""
        with suppress(OSError):  # a full disk; the next server reads the runs instead
            write_text(path, to_json({"version": __version__, "rows": self._rows}, indent=None))

    def _read(self, root: Path, folder: Path) -> Row | None:
        signature = _sign(folder)
        name = str(folder.relative_to(root))
        if (cached := self._rows.get(name)) and cached[0] == signature:
            return cached[1]
        if not looks_like_run(folder):
            return None
        row = describe_row(root, make_row(read_files(folder, only_listed=True)))
        may_run = row["state"] == STOPPED and list_worker_folders(folder)
        if row["state"] == RUNNING or may_run:  # processes may begin and end without a trace here
            signature = ()
        self._rows[name] = (signature, row)
        return row


def _list_folders(root: Path, parent: Path) -> list[Path]:
    try:
        with os.scandir(parent) as entries:
            folders = [
                (Path(entry.path), entry.is_symlink())
                for entry in entries
                if entry.name[0] != "." and entry.is_dir()
            ]
    except OSError:
        return []
    return sorted(
        folder for folder, link in folders if not link or is_below(root, folder.resolve())
    )


def _sign(folder: Path) -> Signature:
    """Return a value that changes whenever one of a run's small files does."""
    times = []
    for name in WATCHED:
        try:
            times.append(os.stat(folder / name if name else folder).st_mtime_ns)  # noqa: PTH116
        except OSError:
            times.append(0)
    return tuple(times)


def describe_row(root: Path, row: RunRow) -> Row:
    """Return a run's row with its id, formatted errors, tags and note."""
    value, where = (row.test, "test") if row.test is not None else (row.val, "validation")
    metric = format_metric(row.metric) if row.metric else ""
    return row.to_dict() | {
        "id": str(row.run.relative_to(root)),
        "created_s": row.at.timestamp(),
        "error": None if value is None else format_number(value),
        "error_of": f"{metric}, {where}" if value is not None else "",
        "against": format_against(row) if row.against_baseline is not None else "",
        **read_annotations(row.run),
    }


def read_annotations(folder: Path) -> dict[str, Any]:
    """Return a run's tags and note."""
    values = read_object(folder / ANNOTATIONS)
    tags, note = values.get("tags"), values.get("remark")
    return {
        "tags": [str(tag) for tag in tags] if isinstance(tags, list) else [],
        "remark": note if isinstance(note, str) else "",
    }


def write_annotations(folder: Path, tags: Any, remark: Any) -> dict[str, Any]:
    """Write a run's tags and note into its folder."""
    if not isinstance(tags, list) or not all(isinstance(tag, str) for tag in tags):
        raise UserError("tags: expected a list of texts")
    if not isinstance(remark, str):
        raise UserError("note: expected a text")
    tags = list(dict.fromkeys(tag.strip() for tag in tags if tag.strip()))
    if len(tags) > MAX_TAGS or any(len(tag) > MAX_TAG for tag in tags):
        raise UserError(f"at most {MAX_TAGS} tags of {MAX_TAG} characters")
    if len(remark) > MAX_NOTE:
        raise UserError(f"a note has at most {MAX_NOTE:,} characters; this one has {len(remark):,}")
    path = folder / ANNOTATIONS
    if not tags and not remark:
        with suppress(FileNotFoundError):
            path.unlink()
    else:
        write_text(path, to_json({"tags": tags, "remark": remark}) + "\n")
    return {"tags": tags, "remark": remark}
