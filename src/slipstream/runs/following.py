"""Starts `slipstream follow` beside a run, as a process of its own that outlives it."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol

from slipstream.runs.folder import Run

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
            f'follow.to = "{settings.to}": {EXTRAS[settings.to]} is missing, so that nothing is '
            f"sent; pip install 'slipstream[{settings.to}]', then: slipstream follow {run.folder} "
            f"--to {settings.to}"
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
        process.returncode = 0  # it is not waited for, and Popen shall not warn of that
    except OSError as error:
        run.warn(f"follow.to = {settings.to}: the follower cannot start ({error})")
