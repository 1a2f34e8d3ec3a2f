"""Whether somebody looks at a run while it trains, and the predictions that they are shown.

Whoever looks at a run touches `watched` in its folder every few seconds; the run then writes
`preview.json` after validations. Nothing else depends on these two files.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from slipstream.base.errors import Command
from slipstream.runs.files import to_json
from slipstream.runs.folder import Run

WATCHED, PREVIEW = "watched", "preview.json"
WATCHED_S = 10.0
"""How long after a touch of `watched` the run counts as watched"""


def mark_watched(folder: Path) -> None:
    """Ask the run in a folder to show its predictions in the next seconds."""
    with suppress(OSError):  # a folder that cannot be written to
        (folder / WATCHED).touch()


def is_watched(folder: Path) -> bool:
    """Return whether the run in a folder is being watched."""
    try:
        return time.time() - (folder / WATCHED).stat().st_mtime < WATCHED_S
    except OSError:
        return False


def write_preview(folder: Path, value: Any) -> None:
    """Write the preview by a rename, without flushing: it need not survive a crash."""
    temporary = folder / f".{PREVIEW}.{os.getpid()}.tmp"
    temporary.write_text(to_json(value, indent=None), encoding="utf-8")
    temporary.replace(folder / PREVIEW)


LOG = "follow.log"
EXTRAS = {"tensorboard": "tensorboardX", "mlflow": "mlflow", "wandb": "wandb"}
"""The trackers, each an extra of its name, and the module that it needs"""


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
        is_folder = settings.to != "mlflow"
        options += ["--out", str(Path(settings.out).absolute()) if is_folder else settings.out]
    if find_spec(EXTRAS[settings.to]) is None:
        run.warn(
            f'follow.to = "{settings.to}": {EXTRAS[settings.to]} is missing, so that nothing '
            f"is sent; pip install 'slipstream[{settings.to}]', then: "
            + str(Command("follow", run.folder, to=settings.to))
        )
        return
    try:
        with (run.folder / LOG).open("ab") as log:
            process = subprocess.Popen(
                [*program, *options],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        from slipstream.base import machine  # imports psutil, which a server does not

        machine.disown_process(process)
    except OSError as error:
        run.warn(f"follow.to = {settings.to}: the follower cannot start ({error})")
