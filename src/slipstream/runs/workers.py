"""The folders of workers in that of their run: who trains there, and which shares are done."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from slipstream.errors import UserError
from slipstream.runs.files import read_json
from slipstream.runs.lock import find_holder

FOLDER, SHARES = "workers", "shares.json"
RESULT = "result"
"""The folder with the result of a share, complete when it is there"""


class ShareCount(NamedTuple):
    """The shares of a run whose lanes are divided."""

    done: int
    of: int


def list_worker_folders(folder: Path) -> list[Path]:
    """List the folders of a run's workers."""
    try:
        return sorted(path for path in (folder / FOLDER).iterdir() if path.is_dir())
    except OSError:
        return []


def find_writers(folder: Path) -> list[Mapping[str, Any]]:
    """Return the process that writes to a run or, without one, those that train shares of it: host
    and process each."""
    if holder := find_holder(folder):
        return [holder]
    return [who for one in list_worker_folders(folder) if (who := find_holder(one))]


def count_shares(folder: Path) -> ShareCount | None:
    """Count the shares of a run that is not finished; None where it has none."""
    try:
        shares = read_json(folder / FOLDER / SHARES)["shares"]
    except (UserError, LookupError, TypeError):
        return None
    done = sum((one / RESULT).is_dir() for one in list_worker_folders(folder))
    return ShareCount(done, len(shares))
