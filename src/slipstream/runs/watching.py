"""Whether somebody looks at a run while it trains, and the predictions that they are shown.

Whoever looks at a run touches `watched` in its folder every few seconds; the run then writes
`preview.json` after validations. Nothing else depends on these two files.
"""

import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from slipstream.runs.files import to_json

WATCHED, PREVIEW = "watched", "preview.json"
WATCHED_S = 10.0
"""How long a touch counts"""


def mark_watched(folder: Path) -> None:
    """Ask the run in a folder to show its predictions in the next seconds."""
    with suppress(OSError):  # a folder that cannot be written to
        (folder / WATCHED).touch()


def is_watched(folder: Path) -> bool:
    """Whether somebody has looked at the run in a folder just now."""
    try:
        return time.time() - (folder / WATCHED).stat().st_mtime < WATCHED_S
    except OSError:
        return False


def write_preview(folder: Path, value: Any) -> None:
    """Write what is shown, by a rename; it need not survive a crash, so nothing is flushed."""
    temporary = folder / f".{PREVIEW}.{os.getpid()}.tmp"
    temporary.write_text(to_json(value, indent=None), encoding="utf-8")
    temporary.replace(folder / PREVIEW)
