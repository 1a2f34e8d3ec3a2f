"""Starts `slipstream follow` beside a run, as a process of its own that outlives it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Protocol

from slipstream.runs.folder import Run

LOG = "follow.log"


class FollowSettings(Protocol):
    """The section [follow] of a config."""

    @property
    def to(self) -> str: ...
    @property
    def out(self) -> str | None: ...
    @property
    def project(self) -> str: ...


def start_follower(run: Run, settings: FollowSettings) -> None:
    """Start the follower that a config asks for; where it cannot start, warn and go on."""
    if settings.to == "none":
        return
    program = [sys.executable, "-m", "slipstream", "follow", str(run.folder)]
    options = ["--to", settings.to, "--project", settings.project, "--quiet"]
    if settings.out is not None:
        is_address = "://" in settings.out
        options += ["--out", settings.out if is_address else str(Path(settings.out).absolute())]
    try:
        with (run.folder / LOG).open("ab") as log:
            process = subprocess.Popen(
                [*program, *options],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        process.returncode = 0  # it is not waited for, and Popen shall not warn of that
    except OSError as error:
        run.warn(f"follow.to = {settings.to}: the follower cannot start ({error})")
