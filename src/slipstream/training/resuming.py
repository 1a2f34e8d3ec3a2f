"""Resume a run: read its newest checkpoint, refuse what may not change, and go on from there."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from slipstream import config as configs
from slipstream import runs
from slipstream.base.errors import Command, Message, Option, UserError
from slipstream.base.text import format_count
from slipstream.config import Config
from slipstream.data import defaults
from slipstream.data.dataset import Dataset
from slipstream.data.defaults import Choice
from slipstream.engine import checkpoint
from slipstream.engine.checkpoint import Checkpoint
from slipstream.engine.context import RunContext
from slipstream.engine.lanes import Progress, parse_progress
from slipstream.engine.plan import Plan
from slipstream.engine.state import split_rows
from slipstream.events import CheckpointSaved, Fallback, Resume
from slipstream.models.forecaster import build
from slipstream.runs import Run
from slipstream.training import fitting, shares
from slipstream.training.division import (
    Division,
    find_workers,
    forget_shares,
    read_division,
    sum_parts,
    wait_for_shares,
)
from slipstream.training.request import FinishedRun, TrainRequest

LIVE_WEIGHTS = "live.model."
"""The start of the names of a checkpoint's weights"""


class NothingToTrainError(UserError):
    """The run to resume is finished."""

    def __init__(self, message: str, folder: Path) -> None:
        super().__init__(message)
        self.folder = folder

    def accept(self, request: TrainRequest) -> FinishedRun:
        """Return the finished run, where the request allows one; raise this error elsewhere."""
        if not request.may_be_finished:
            raise self
        return FinishedRun(self.folder, runs.read_metrics(self.folder), is_new=False)


def load_resumed(run: Run, request: TrainRequest) -> RunContext:
    """Return what a run continues from; its log is cut to the checkpoint's end."""
    division = read_division(run)
    if division is not None:
        wait_for_shares(run, division)
    saved, wrong = _read_newest(run, division)
    was = runs.load_config(run, origin=saved.metadata if saved else None)
    config = configs.load(was if request.config is None else request.config, request.settings)
    config = defaults.keep_resolved(config, was, request.data)
    changed = refuse_changes(run, was, config, request.force)
    resume = _describe_start(run, config, saved)
    runs.require_data(run, config, request.data, runs.SAME_ROWS)
    placement = _place_workers(run, request, config)
    context = replace(
        fitting.load_context(config, request.data, request.timer, run=run),
        started_at=request.started_at,
        spent_s=sum_parts(run, division),
        choices=_read_choices(run),
        **placement._asdict(),
    )
    if saved is None:
        if division is not None:
            forget_shares(run)
        runs.truncate_log(run, 0)
        run.append(replace(resume, spent_s=context.spent_s))
        return context
    if context.fingerprint != saved.metadata["data"]:
        raise UserError(_explain_other_data(run, changed))
    if changed:
        _refuse_misfit(run, config, context.dataset, saved, changed)
    now, then = context.plan, Plan.from_dict(saved.metadata["plan"])
    keep = (then.device, then.data_parallel) == (now.device, now.data_parallel) and not changed
    context = replace(context, plan=then if keep else now, is_plan_final=keep, checkpoint=saved)
    if division is None:
        runs.truncate_log(run, saved.metadata["log_bytes"])
    else:
        differences = configs.list_differences(was, config)
        goes_on = any(name.startswith("train.") for name in differences)
        context = shares.take_up(context, division, changed=goes_on)
    for problem in wrong:
        run.append(Fallback(what="an older checkpoint is used", why=problem))
    differs = _describe_differences(then, now, changed)
    run.append(replace(resume, differs=differs, spent_s=context.spent_s))
    return context


def _read_choices(run: Run) -> dict[str, Choice]:
    """Return what the data decided of the run's config when it began."""
    path = run.folder / "plan.json"
    settings = runs.read_json(path).get("settings", {}) if path.exists() else {}
    return {name: Choice(**choice) for name, choice in settings.items()}


def _place_workers(run: Run, request: TrainRequest, config: Config) -> shares.Placement:
    """Return where a run goes on: where it was, unless the request says otherwise."""
    num_workers, cluster = find_workers(run)
    moves = request.on is not None and request.on != cluster
    workers = request.workers or (None if moves else num_workers)
    return shares.place_workers(workers, request.on or cluster, config, request.data)


def _read_newest(run: Run, division: Division | None) -> tuple[Checkpoint | None, list[str]]:
    """Return the newest checkpoint, None if the run has written none yet, and what is wrong with
    later ones. Where the lanes are divided among workers, it is that of all of them."""
    if division is not None:
        return shares.read_merged(run), []
    was_saved = any(isinstance(event, CheckpointSaved) for event in runs.read_events(run))
    if checkpoint.list_steps(run) or was_saved or (run.folder / "metrics.json").exists():
        return checkpoint.read_newest(run)
    return None, []


def _describe_start(run: Run, config: Config, saved: Checkpoint | None) -> Resume:
    """Return the event with which a resumed run starts; raise a UserError if nothing is left to
    do."""
    finished = saved is not None and (run.folder / "metrics.json").exists()
    entries = saved.metadata["lanes"] if saved else []
    if config.trains_lanes:
        ended = len(fitting.list_ended(saved.metadata, config)) if saved else 0
        num_lanes = saved.metadata["pack"]["lanes"] if saved else 0
        if finished and ended == num_lanes:
            raise NothingToTrainError(
                f"{run.folder}: is finished, with all lanes done; to train them further, raise "
                "train.epochs, or train.patience",
                run.folder,
            )
        lanes = f"{ended} of {num_lanes} lanes done" if saved else "no lane done"
        return Resume(step=saved.step if saved else 0, lanes=lanes)
    progress = parse_progress(entries[0]["progress"]) if entries else Progress()
    if (
        finished
        and progress.epochs >= config.train.epochs
        and progress.find_stop_reason(config.train)
    ):
        raise NothingToTrainError(
            f"{run.folder}: is finished, after {format_count(progress.epochs, 'epoch')}; to train "
            "it further, raise train.epochs",
            run.folder,
        )
    return Resume(step=progress.step, epoch=progress.epoch)


def refuse_changes(run: Run, was: Config, config: Config, force: bool) -> list[str]:
    """Return the settings that have changed and matter; raise a UserError if they may not."""
    several = was.trains_lanes or config.trains_lanes
    differences = configs.list_differences(was, config)
    changed = [name for name in differences if name not in runs.CHANGEABLE_ON_RESUME]
    if changed and (several or not force):
        forced = "start a new run, or pass " + Option("force", True)
        raise UserError(
            f"{run.folder}: cannot be resumed with other settings than it began with "
            f"({', '.join(changed)})",
            fix="start a new run" if several else forced,
        )
    return changed


def _explain_other_data(run: Run, changed: list[str]) -> Message:
    """Say why a run is not resumed with other data, whatever is forced, and what to do."""
    settings = [name for name in changed if name.startswith("data.")]
    why = f" ({', '.join(settings)} was changed)" if settings else ""
    return (
        f"{run.folder}: the data are not those that it began with{why}, and its weights "
        "were trained for the scaling of those; resume with the data as they were, or "
        "start a new run: " + Command("train", run.folder / "config.toml")
    )


def _refuse_misfit(
    run: Run, config: Config, dataset: Dataset, saved: Checkpoint, changed: list[str]
) -> None:
    """Refuse settings of another network, before anything of the run is touched."""
    with torch.random.fork_rng([]):
        weights = build(config.model, dataset.signature).state_dict()
    shapes = {
        name.removeprefix(LIVE_WEIGHTS): values.shape
        for name, values in split_rows(saved)[0].items()
        if name.startswith(LIVE_WEIGHTS)
    }
    if shapes != {name: values.shape for name, values in weights.items()}:
        raise UserError(
            f"{run.folder}: its weights do not fit these settings ({', '.join(changed)}), which "
            "describe another network; start a new run"
        )


def _describe_differences(then: Plan, now: Plan, changed: list[str]) -> str:
    """Return why the resumed run may differ from an uninterrupted one; empty if it cannot."""
    differences = [f"{name} was changed" for name in changed]
    if then.data_parallel != now.data_parallel:
        processes = format_count(now.data_parallel, "process")
        differences.append(f"{processes} instead of {then.data_parallel}")
    if then.device.type != now.device.type:
        differences.append(f"{now.device.type} instead of {then.device.type}")
    differences += [
        f"{key} {now.hardware.get(key)} instead of {then.hardware.get(key)}"
        for key in ("gpu", "cpu", "torch")
        if then.hardware.get(key) != now.hardware.get(key)
    ]
    return "; ".join(differences)
