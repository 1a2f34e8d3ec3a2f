"""Paths below the folder, where the names in a request are looked up after resolving links."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterator
from pathlib import Path

from slipstream.base.errors import UserError
from slipstream.config.data import find_matches
from slipstream.data.formats import ENDINGS, PACKED
from slipstream.reporting.run_rows import looks_like_run

MAX_FILES = 2_000
"""Files that a list shows"""
MAX_DEPTH = 5
MAX_LOOKED_AT = 100_000
"""Matches and links of one path that are looked at"""
HIDDEN_FOLDERS = {"__pycache__", "node_modules", "venv"}


class MissingError(UserError):
    """A file or run that a request names does not exist below the folder."""


def resolve_below(folder: Path, relative: str) -> Path:
    """Return the path of something below the folder; a link must not lead out of it."""
    try:
        path = (folder / relative).resolve()
    except (OSError, ValueError, RuntimeError):  # too long a name, a NUL, a loop of links
        raise MissingError("there is no such file") from None
    if not is_below(folder, path):
        raise MissingError("there is no such file below the folder")
    return path


def find_link_out(folder: Path, path: Path) -> Path | None:
    """Return the first path outside the folder that a file, folder or pattern leads to after
    resolving links: itself, a match, or a link in it; None where all are inside."""
    candidates = itertools.chain([path], find_matches(path)[1], _list_links(path))
    for number, candidate in enumerate(candidates):
        if number >= MAX_LOOKED_AT:
            raise UserError(f"{path}: stands for more than {MAX_LOOKED_AT:,} files; name a folder")
        try:
            if not is_below(folder, candidate.resolve()):
                return candidate
        except (OSError, ValueError, RuntimeError):  # too long a name, a NUL, a loop of links
            return candidate
    return None


def _list_links(folder: Path) -> Iterator[Path]:
    """Yield the links in a folder and below it, without following them."""
    try:
        entries = list(os.scandir(folder)) if folder.is_dir() else []
    except OSError:
        return
    for entry in entries:
        if entry.is_symlink():
            yield Path(entry.path)
        elif entry.is_dir():
            yield from _list_links(Path(entry.path))


def is_below(folder: Path, path: Path) -> bool:
    """Whether a resolved path is the folder, or below it."""
    return path == folder or folder in path.parents


def find_run_folder(folder: Path, run: str) -> Path:
    """Return the folder of a run by its id, which is its path below the folder."""
    missing = MissingError("there is no such run; it may have been removed or renamed")
    parts = run.split("/")
    if not run or any(part in ("", ".", "..") or part[0] == "." for part in parts):
        raise missing
    try:
        path = resolve_below(folder, run)
    except MissingError:
        raise missing from None
    if path == folder or not looks_like_run(path):
        raise missing
    return folder / run


def list_tables(folder: Path, endings: tuple[str, ...] = ENDINGS) -> list[str]:
    """Return the data files below the folder, relative to it, the shallow ones first."""
    names = []
    for name in _walk(folder, folder, 0):
        stem = name.lower()
        for packed in PACKED:
            stem = stem.removesuffix(packed)
        if stem.endswith(endings) or name.lower().endswith(".zip"):
            names.append(name)
        if len(names) >= MAX_FILES:
            break
    return sorted(names, key=lambda name: (name.count("/"), name))


def read_text(path: Path) -> str:
    """Return the text of a file; "" where it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def list_configs(folder: Path) -> list[str]:
    """Return the config files below the folder, without those of runs."""
    return [
        name
        for name in list_tables(folder, (".toml",))
        if name.lower().endswith(".toml") and Path(name).name != "pyproject.toml"
    ]


def _walk(root: Path, folder: Path, depth: int) -> Iterator[str]:
    """Yield files below a folder; runs, hidden folders and links are left out."""
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError:
        return
    for entry in entries:
        if entry.name[0] == "." or entry.is_symlink():
            continue
        if entry.is_file():
            yield str(Path(entry.path).relative_to(root))
        elif depth < MAX_DEPTH and entry.name not in HIDDEN_FOLDERS and entry.is_dir():
            path = Path(entry.path)
            if not looks_like_run(path):
                yield from _walk(root, path, depth + 1)


def clean_run_name(text: str) -> str:
    """Return the text with only characters that the name of a run may have."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("._-") or "run"
