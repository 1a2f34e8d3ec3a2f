"""Find run folders by name: a path, the beginning of a run's name, or `last`."""

import os
from collections.abc import Collection, Iterator
from contextlib import suppress
from os import PathLike
from pathlib import Path

from slipstream.base.errors import Command, UserError, Wording
from slipstream.base.storage import refuse_url

OUT = "runs"
"""The default of the setting `out`"""
LAST = "last"
CONFIGS = ("config.toml", "labels.toml")
"""Files of which one makes a folder a run; labels.toml is that of a probe"""
SEARCH_FILES = ("trials.json", "study.log")
AUTO_FILE = "auto.json"
"""The file that makes a search one of `slipstream auto`"""
ENSEMBLE_FILE = "ensemble.json"
UNTESTED_FILE = "untested.json"
"""The file of a run that was trained on all rows and so is untested; it names the tested run"""
EXPORT_FILE = "export.json"
"""The file that makes a folder an export, which can be named like a run but is never the `last`
one"""
KINDS = ("train", "pretrain", "search", "auto", "probe", "ensemble")
RETRAINED = "retrained"
"""The folder of a search that holds the runs of its models"""
SEARCHES = ("search", "auto")
"""Kinds of run that have trials"""
MAX_CANDIDATES = 10
"""The number of runs that a message about an ambiguous name lists"""
FIRST_BYTES = 4096
"""The number of bytes at the start of a log that contain its first event"""


def find_run(
    name: str | Path,
    *,
    out: str | PathLike[str] = OUT,
    kinds: Collection[str] = (),
    with_links: bool = False,
) -> Path:
    """Return the folder of the run that `name` means.

    `name` is a run folder, the beginning of the name of one run in `out`, or `last` for the run in
    `out` that was started or resumed most recently; `FOLDER/last` and `FOLDER/beginning` look into
    FOLDER instead. Where runs of `kinds` fit, others are not considered. A folder that is not a run
    is returned as it is. A run with a link out of its folder is refused, unless `with_links`.
    """
    folder = _find_folder(name, out, kinds)
    if not with_links and (foreign := find_foreign_entry(folder)) is not None:
        raise UserError(_describe_foreign(foreign))
    return folder


def name_run(folder: Path) -> str:
    """Return the name of a run: of the model that a search has trained, that of the search."""
    is_inner = folder.parent.name == RETRAINED and is_run(folder.parent.parent)
    return f"{folder.parent.parent.name}/{RETRAINED}/{folder.name}" if is_inner else folder.name


def _find_folder(name: str | Path, out: str | PathLike[str], kinds: Collection[str]) -> Path:
    refuse_url(name, "is in object storage", "copy the run first:", Command("copy"))
    path = Path(name)
    if is_run(path):
        return path
    parent = path.parent if len(path.parts) > 1 else Path(out)
    if path.name == LAST:
        if (folders := list_folders(parent)) or not _is_folder(path):
            return _find_newest(_select_kinds(folders, kinds), parent)
        return path
    folders = list_folders(parent, path.name) if path.name else []
    if any(folder.name == path.name for folder in folders):
        return parent / path.name
    candidates = _select_kinds(folders, kinds)
    if len(candidates) > 1:
        raise UserError(_describe_ambiguity(name, candidates))
    if not candidates and not _is_folder(path):
        raise UserError(
            f"{name}: there is no such run folder, and no run in {parent} has a name that "
            "begins with it; "
            + Wording(f"`slipstream runs {parent}`", Command("runs", parent).render("python"))
            + " lists the runs"
        )
    return candidates[0] if candidates else path


def find_foreign_entry(folder: Path, *, depth: int = 20) -> Path | None:
    """Return the first entry that does not belong to a run: a link that leads out of its folder, a
    FIFO or a device.

    Another person's run may contain links to files of whoever reads, copies or exports it. Links
    that stay inside do no harm, nor do broken ones, such as those of locks.
    """
    try:
        root = folder.resolve()
        entries = list(os.scandir(root))
    except (OSError, ValueError, RuntimeError):
        return None
    return _find_foreign(entries, root, depth)


def _find_foreign(entries: list[os.DirEntry[str]], root: Path, depth: int) -> Path | None:
    for entry in entries:
        with suppress(OSError, RuntimeError):  # it has just been removed, or is a loop of links
            if entry.is_symlink():
                if root not in Path(entry.path).resolve().parents:
                    return Path(entry.path)
            elif entry.is_dir(follow_symlinks=False):
                inner = (
                    _find_foreign(list(os.scandir(entry.path)), root, depth - 1) if depth else None
                )
                if inner is not None:
                    return inner
            elif not entry.is_file(follow_symlinks=False):
                return Path(entry.path)
    return None


def _describe_foreign(path: Path) -> str:
    if path.is_symlink():
        problem = (
            "is a link out of the run's folder, which is not followed; put the file in its place"
        )
    else:
        problem = "is a FIFO, a socket or a device, not a file of a run; remove it"
    return f"{path}: {problem}" + (", or remove the link" if path.is_symlink() else "")


def find_last(out: str | Path, name: str | None = None, kinds: Collection[str] = ()) -> Path:
    """Return the run in `out`, of the setting `name` if given, that was started or resumed most
    recently."""
    folders = list_folders(Path(out), "" if name is None else f"{name}-")
    return _find_newest(_select_kinds(folders, kinds), out)


def list_folders(out: Path, prefix: str = "") -> list[Path]:
    """List the run folders in `out` whose names begin with `prefix`."""
    return sorted(_iter_folders(out, prefix))


def _iter_folders(out: Path, prefix: str) -> Iterator[Path]:
    try:
        folders = list(out.iterdir())
    except OSError:
        return
    for folder in folders:
        fits = folder.name[0] != "." and folder.name.startswith(prefix) and is_run(folder)
        if fits and not (folder / EXPORT_FILE).exists():
            yield folder


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except (OSError, ValueError):  # too long a name, a NUL
        return False


def is_run(folder: Path) -> bool:
    try:
        return any((folder / name).is_file() for name in CONFIGS)
    except (OSError, ValueError):
        return False


def find_kind(folder: Path) -> str:
    """Return the kind of a run, one of KINDS, from its small files."""
    if not (folder / "config.toml").exists() and (folder / "labels.toml").exists():
        return "probe"
    if (folder / ENSEMBLE_FILE).exists():
        return "ensemble"
    if any((folder / name).exists() for name in SEARCH_FILES) or _logs_search(folder):
        return "auto" if (folder / AUTO_FILE).exists() else "search"
    try:
        config = (folder / "config.toml").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return "train"
    return "pretrain" if '\nobjective = "masked"\n' in config else "train"


def suggest_resume(folder: Path) -> Command:
    """Return the command that resumes a training, a pre-training or a search."""
    verbs = {"pretrain": "pretrain", "search": "tune", "auto": "auto"}
    verb = verbs.get(find_kind(folder), "train")
    return Command(verb, resume=folder)


def _logs_search(folder: Path) -> bool:
    """Return whether a run's log begins like a search's; a search with a database has no other
    mark."""
    try:
        if not (folder / "events.jsonl").is_file():
            return False
        with (folder / "events.jsonl").open("rb") as log:
            first = log.read(FIRST_BYTES).partition(b"\n")[0]
    except OSError:
        return False
    return first.startswith(b'{"event": "search"')


def get_start_time(folder: Path) -> float:
    """Return when a run was started or resumed most recently, as a POSIX time."""
    times = [0.0]
    for name in CONFIGS:
        try:
            times.append((folder / name).stat().st_mtime)
        except OSError:
            continue
    return max(times)


def _select_kinds(folders: list[Path], kinds: Collection[str]) -> list[Path]:
    """Return the runs of these kinds, or all runs if there are none, so that errors can say
    more."""
    return [folder for folder in folders if not kinds or find_kind(folder) in kinds] or folders


def _find_newest(folders: list[Path], out: str | Path) -> Path:
    if not folders:
        raise UserError(f"out = {str(out)!r}: holds no run to resume or to read")
    return max(folders, key=get_start_time)


def _describe_ambiguity(name: str | Path, candidates: list[Path]) -> str:
    newest = sorted(candidates, key=get_start_time, reverse=True)
    names = [f"  {folder.name}" for folder in newest[:MAX_CANDIDATES]]
    if len(newest) > MAX_CANDIDATES:
        names.append(f"  and {len(newest) - MAX_CANDIDATES} more")
    listed = "\n".join(names)
    return (
        f"{name}: {len(newest)} runs in {newest[0].parent} have names that begin with it; type "
        f"more of one, or last for the newest run:\n{listed}"
    )
