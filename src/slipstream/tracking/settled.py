"""How much of a run's log will stand: a resumed run cuts its log to its newest checkpoint.

A tracker that cannot take back a point gets only those before that, which are at most
`engine.checkpoint_minutes` behind. Logs that are not cut, those of searches and of runs with
workers, are sent as they grow.
"""

from __future__ import annotations

from pathlib import Path

from slipstream import runs
from slipstream.errors import UserError
from slipstream.run_names import find_kind

STATE = "state.json"
"""Of a checkpoint"""


def find_settled_size(folder: Path) -> int | None:
    """Return the bytes of a run's log that will stand; None for all."""
    if (folder / "workers").is_dir() or find_kind(folder) == "search":
        return None
    steps = [
        int(path.name.removeprefix("step-"))
        for path in (folder / "checkpoints").glob("step-*")
        if path.name.removeprefix("step-").isdecimal()
    ]
    for step in sorted(steps, reverse=True):
        try:
            saved = runs.read_json(folder / "checkpoints" / f"step-{step}" / STATE)
            return int(saved["log_bytes"])
        except (UserError, KeyError, TypeError, ValueError):
            continue  # just removed, or damaged
    return None if is_finished(folder) else 0


def is_finished(folder: Path) -> bool:
    return (folder / "metrics.json").exists()
