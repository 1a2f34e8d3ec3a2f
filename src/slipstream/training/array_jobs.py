"""`slipstream train --share`: trains one share of a run in this process, as each task of a batch
system's array job does.

The first task to arrive creates the run and divides its lanes. Resuming the run joins the shares.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from slipstream import config as configs
from slipstream import runs
from slipstream.base.errors import (
    SAME_COMMAND,
    Command,
    Interrupted,
    Option,
    ResumableError,
    UserError,
    Wording,
)
from slipstream.base.phases import PhaseTimer
from slipstream.base.run_names import is_run
from slipstream.config import Config
from slipstream.data import defaults
from slipstream.engine.recovery import explain_out_of_memory
from slipstream.events import Event, Start
from slipstream.models import custom
from slipstream.runs import Run
from slipstream.training import division as divisions
from slipstream.training import fitting, resuming
from slipstream.training.division import Division, get_share
from slipstream.training.shares import (
    ShareTask,
    check_divisible,
    count_workers,
    divide_run,
    renumber,
    suggest,
    train_share,
)


@dataclass(frozen=True)
class ShareNumber:
    """Which share of how many, from 1."""

    number: int
    of: int

    def __str__(self) -> str:
        return f"{self.number}/{self.of}"


def train_share_of(
    config: Config,
    folder: Path,
    share: ShareNumber,
    *,
    watch: Callable[[Event], None] | None = None,
    timer: PhaseTimer | None = None,
) -> dict[str, Any]:
    """Train one share of the run in `folder` to its end, and return what it was; begin the run if
    it is not there. Called again, it goes on."""
    custom.allow_classes(config)
    if not is_run(folder):
        _create_run(config, folder, share.of, timer or PhaseTimer())
    run = Run(folder.resolve(), watch)
    summary = {"run": str(run.folder), "share": share.number, "of": share.of}
    was = runs.load_config(run)
    config = defaults.keep_resolved(config, was)
    resuming.refuse_changes(run, was, config, force=False)
    if (run.folder / "metrics.json").exists():
        return summary | {"lanes": []}
    division = _read_division(run, share)
    if share.number > len(division.shares):  # there are fewer models
        return summary | {"lanes": []}
    index, lanes = share.number - 1, division.shares[share.number - 1]
    task = ShareTask(
        folder=str(get_share(run, index).folder),
        index=index,
        config_toml=configs.to_toml(config),
        lanes=lanes,
        fingerprint=division.fingerprint,
    )
    try:
        with explain_out_of_memory():
            train_share(task, _show_as_share(watch, share, lanes))
    except ResumableError as error:
        raise suggest(error, f"run share {share} again, with " + SAME_COMMAND) from error
    except Interrupted as stop:
        message = f"stopped share {share} of {run.folder}; " + SAME_COMMAND + " continues it"
        raise Interrupted(message, signal_number=stop.signal_number) from None
    return summary | {"lanes": lanes}


def _show_as_share(
    watch: Callable[[Event], None] | None, share: ShareNumber, lanes: list[int]
) -> Callable[[Event], None] | None:
    """Have events shown with the numbers that the models have in the run."""
    if watch is None:
        return None

    def show(event: Event) -> None:
        if isinstance(event, Start):
            event = replace(event, pack=(event.pack or {}) | {"share": str(share)})
        watch(renumber(event, lanes))

    return show


def _create_run(config: Config, folder: Path, num_shares: int, timer: PhaseTimer) -> None:
    """Create a run whose lanes are divided; one that another task has created meanwhile stays."""
    check_divisible(config, Option("share"))
    count_workers(num_shares, config, None)
    config, choices = fitting.resolve_config(config)
    context = fitting.load_context(config, None, timer)

    def divide(run: Run) -> None:
        divide_run(replace(context, run=run, choices=choices, num_workers=num_shares))

    files = {"config.toml": runs.format_config(config)}
    try:
        with runs.create_locked(
            config.name, out=config.out, files=files, folder=folder, fill=divide
        ):
            return
    except UserError:
        if not is_run(folder):
            raise


def _read_division(run: Run, share: ShareNumber) -> Division:
    division = divisions.read_division(run)
    if division is None:
        raise UserError(
            f"{run.folder}: was not begun with "
            + Option("share")
            + "; continue it with: "
            + Command("train", resume=run.folder)
        )
    if division.workers != share.of:
        raise UserError(
            f"{run.folder}: is divided into {division.workers} shares, so "
            + Wording(f"--share {share}", f"share {share}")
            + " is none of them; pass "
            + Option("share", f"{min(share.number, division.workers)}/{division.workers}")
        )
    return division
