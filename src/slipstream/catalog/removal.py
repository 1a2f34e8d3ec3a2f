"""Remove runs: never one that a process writes to, and always as a whole."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from os import PathLike
from pathlib import Path

from slipstream import runs
from slipstream.catalog.listing import RunTable, find_listed, group_comparable, list_runs
from slipstream.catalog.rows import DAMAGED, FINISHED, STOPPED, RunRow, read_files, read_row
from slipstream.catalog.scores import rank
from slipstream.errors import UserError
from slipstream.object_storage import refuse_url
from slipstream.run_names import OUT
from slipstream.runs import lock as locks
from slipstream.runs.folder import UNPUBLISHED

KEEP_BEST = 5


def remove_runs(*names: str | PathLike[str], out: str | PathLike[str] = OUT) -> RunTable:
    """Remove runs with all their files.

    If a process writes to one of them, none is removed.

    Args:
        names: The runs: folders, beginnings of names, `last`, or results of `train`.
        out: The folder in which names are looked up.

    Returns:
        The rows of the runs that were removed.

    Raises:
        UserError: There is no such run, or a process writes to it.

    Example:
        slipstream.remove_runs("job-20260131T120000Z", "runs/old-20260101T000000Z")
    """
    paths = (find_listed(name, out) for name in names)
    folders = list(dict.fromkeys(path.parent.resolve() / path.name for path in paths))
    for folder in folders:
        _refuse_locked(folder)
        _refuse_protected(folder)
    rows = RunTable(read_row(folder) for folder in folders)
    for folder in folders:
        _remove(folder)
    return rows


def prune_runs(
    out: str | PathLike[str] = OUT,
    *,
    keep_best: int = KEEP_BEST,
    metric: str | None = None,
    unfinished: bool = False,
    dry_run: bool = False,
) -> RunTable:
    """Remove all but the best finished runs of each data set.

    Runs that a process writes to stay, as do runs that another one needs: the encoder of
    `train.init_from`.

    Args:
        out: The folder that holds the runs.
        keep_best: How many runs to keep of those whose errors can be compared: of the same kind,
            data and targets.
        metric: The metric to compare by, as for `list_runs`.
        unfinished: Also remove stopped and damaged runs.
        dry_run: Remove nothing; return what would be removed.

    Returns:
        The rows of the runs that were removed.

    Raises:
        UserError: There is no such folder, or a run cannot be removed.

    Example:
        slipstream.prune_runs(keep_best=5, dry_run=True)
    """
    refuse_url(out, "runs are removed on this machine only", "remove copies with the tools for")
    if keep_best < 0:
        raise UserError(f"keep_best is {keep_best}; expected 0 or more")
    rows = list_runs(out, metric=metric)
    finished = [row for row in rows if row.state == FINISHED]
    removed = set[Path]()
    for kinds in (("train", "search", "ensemble"), ("pretrain",), ("probe",)):
        for _, group in group_comparable(row for row in finished if row.kind in kinds):
            removed |= {row.run for row in sorted(group, key=_rank)[keep_best:]}
    if unfinished:
        removed |= {row.run for row in rows if row.state in (STOPPED, DAMAGED)}
    needed = _find_needed([row for row in rows if row.run not in removed])
    pruned = RunTable(row for row in rows if row.run in removed and row.run.resolve() not in needed)
    if dry_run or not pruned:
        return pruned
    return remove_runs(*(row.run for row in pruned))


def _rank(row: RunRow) -> float:
    return rank(row.val if row.test is None else row.test, row.metric or "")


def _find_needed(rows: Sequence[RunRow]) -> set[Path]:
    """Return the runs that these were trained from."""
    needed = set()
    for row in rows:
        train = read_files(row.run, only_listed=True).config.get("train")
        if isinstance(train, dict) and train.get("init_from"):
            needed.add(Path(str(train["init_from"])).resolve())
    return needed


def measure_size(folder: Path) -> int:
    """Return the bytes of all files of a run."""
    return sum(path.lstat().st_size for path in folder.rglob("*") if not path.is_dir())


def _refuse_locked(folder: Path) -> None:
    """Raise an error if a process writes to a run, or to one inside of it, as a probe has."""
    for inside in (folder, *_find_locked_folders(folder)):
        if who := runs.find_holder(inside):
            raise UserError(
                f"{inside}: process {who['pid']} on {who['host']} is writing to this run; nothing "
                "was removed"
            )


def _find_locked_folders(folder: Path) -> Iterator[Path]:
    for name in (locks.NAME, locks.WITHOUT_FLOCK):
        yield from (path.parent for path in folder.rglob(name))


def _remove(folder: Path) -> None:
    """Hide the folder, holding its lock, then remove it: a kill in between leaves no half run, and
    the next run that is created beside it removes the rest."""
    try:
        if folder.is_symlink():
            folder.unlink()
            return
        with locks.hold_lock(folder) as lock:
            hidden = folder.with_name(f".{folder.name}.{os.getpid()}.removed{UNPUBLISHED}")
            lock.folder = folder.rename(hidden)
            for path in hidden.iterdir():
                if path.name != locks.NAME:  # which goes last: without it, nothing removes the rest
                    runs.remove(path)
            shutil.rmtree(hidden)
    except OSError as error:
        raise UserError(f"{folder}: cannot be removed ({error.strerror or error})") from None


def _refuse_protected(folder: Path) -> None:
    """Raise an error, before anything is removed, if a folder's content may not be changed."""
    for path, _, _ in () if folder.is_symlink() else os.walk(folder):  # which follows no links
        if not os.access(path, os.W_OK | os.X_OK):
            raise UserError(f"{path}: is protected against writing; nothing was removed")
