"""What a training run returns: its folder and its summary."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class FinishedRun:
    """A run that is trained, scored and written; `slipstream.Result` is made from it."""

    run: Path
    summary: dict[str, Any]
    """The object that `slipstream train --json` prints, and metrics.json without `detail`"""
    is_new: bool = True
    """Whether it was finished by this call, not before"""
