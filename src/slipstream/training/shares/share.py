"""What a worker does: train one share of a run's lanes, from its checkpoint if it has one.

`train_share` is a plain function of its task, which any process can call that sees the folder and
the data: one that this machine starts, or one of a cluster.
"""

from __future__ import annotations

import errno
import json
import os
import time
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from slipstream import config as configs
from slipstream import runs
from slipstream.base.errors import ExplainedError, Interrupted, ResumableError, Text, UserError
from slipstream.base.phases import PhaseTimer
from slipstream.base.storage import read_verified
from slipstream.config import Config
from slipstream.engine import checkpoint
from slipstream.engine.lanes import Progress, parse_progress
from slipstream.engine.plan import Plan
from slipstream.models import custom
from slipstream.runs import Event, Run
from slipstream.runs.folder import RESULT
from slipstream.training import context as contexts
from slipstream.training import lanes
from slipstream.training.context import RunContext, RunStart
from slipstream.training.lanes import TrainedPack
from slipstream.training.shares.division import read_newest

FACTS, WEIGHTS = "result.json", "weights.safetensors"


@dataclass(frozen=True)
class ShareTask:
    """What a worker is started with; plain values, since they travel as JSON."""

    folder: str
    """The share's own folder"""
    index: int
    """Its number"""
    config_toml: str
    """The config of the whole run"""
    lanes: list[int]
    """Those of the share, by their numbers in the run"""
    fingerprint: str
    """Of the run's data"""


@dataclass(frozen=True)
class ShareResult:
    """What a share has given once all of its lanes have ended."""

    facts: dict[str, Any]
    """The plan, mode, places, steps and seconds"""
    progress: dict[int, tuple[Progress, str]]
    """By number in the run: where a lane stands, and why it ended. Lanes that never began for want
    of time are not in it"""
    weights: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    """The best of each lane that has any"""


def train_share(task: ShareTask, watch: Callable[[Event], None] | None) -> None:
    """Train the lanes of a share to their end, and write the result to its folder.

    A signal has them save their state and raises Interrupted, a disk that cannot be written to a
    ResumableError. Called again, it goes on from there.
    """
    try:
        _train(task, watch)
    except OSError as error:
        room = "make room" if error.errno in runs.DISK_FULL else None
        raise ResumableError(f"the run had to stop: {error}", fix=room) from error


def suggest(error: ExplainedError, fix: Text) -> ResumableError:
    """Return the error of a share that had to stop, with what to do then, after making room."""
    fix = fix if error.fix is None else error.fix + (" and " + fix)
    return ResumableError(error.reason, fix=fix)


def _train(task: ShareTask, watch: Callable[[Event], None] | None) -> None:
    began, timer = time.perf_counter(), PhaseTimer()
    Path(task.folder).mkdir(parents=True, exist_ok=True)
    run = Run(Path(task.folder), watch, started_at=began)
    config = configs.load(tomllib.loads(task.config_toml))
    custom.allow_classes(config)  # the launching process has checked the permission
    with runs.lock_run(run):
        if read_result(run.folder) is not None:
            return
        dataset, start = contexts.load_start(config, None, timer)
        if start.fingerprint != task.fingerprint:
            raise UserError(
                "the data are not those that the run began with; they must not change while it "
                "trains"
            )
        context = RunContext(run, config, dataset, _resume(run, config, start), timer, began)
        with contexts.build_monitor(context) as monitor:
            pack = lanes.fit_selected(context, monitor, task.lanes)
        if pack.fit.signal_number:
            raise Interrupted("stopped", signal_number=pack.fit.signal_number)
        _check_saved(run, pack)
        _write_result(run, pack, task.lanes)


def _resume(run: Run, config: Config, start: RunStart) -> RunStart:
    """Return the start from the newest checkpoint of the share, if it has one."""
    saved, wrong = read_newest(run)
    runs.truncate_log(run, saved.metadata["log_bytes"] if saved else 0)
    if saved is None:
        return start
    for problem in wrong:
        run.append("fallback", what="an older checkpoint is used", why=problem)
    plan = Plan.from_dict(saved.metadata["plan"])
    if plan.device.type != start.plan.device.type:
        return replace(start, checkpoint=saved)
    if config.engine.threads != "auto":
        plan = replace(plan, threads=config.engine.threads)
    return replace(start, plan=plan, plan_is_final=True, checkpoint=saved)


def _check_saved(run: Run, pack: TrainedPack) -> None:
    """Raise an OSError if the last state is not on disk: that is only a warning in training, but
    the lanes of a share may have to go on from there."""
    if pack.fit.steps not in checkpoint.list_steps(run):
        run.checkpoints.mkdir(exist_ok=True)  # raises any other reason than a full disk
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(run.checkpoints))


def _write_result(run: Run, pack: TrainedPack, numbers: Sequence[int]) -> None:
    fit, lane_plan = pack.fit, pack.lane_plan
    facts = lane_plan.summarize() | {
        "plan": lane_plan.plan.to_dict(),
        "limit": fit.limit,
        "steps": fit.steps,
        "seconds": [fit.setup_s, fit.train_s, fit.validate_s],
        "results": [
            {
                "number": numbers[one.number],
                "progress": asdict(one.progress),
                "stopped": one.stop_reason,
            }
            for one in fit.lanes
        ],
    }
    weights = {
        f"{numbers[one.number]}/{name}": weight.detach().to("cpu", copy=True).contiguous()
        for one in fit.lanes
        for name, weight in one.weights.items()
    }
    tensors = {WEIGHTS: weights} if weights else {}
    checkpoint.write_folder(run.folder / RESULT, tensors, {FACTS: facts})


def read_result(folder: Path) -> ShareResult | None:
    """Return the result of a share; None if it is not there, or damaged: it can be trained again
    from its checkpoint."""
    try:
        files = read_verified(folder / RESULT)
        facts = json.loads(files[FACTS])
        tensors = {}
        if WEIGHTS in files:
            tensors = checkpoint.parse_tensors(files[WEIGHTS], folder / RESULT / WEIGHTS)
    except (UserError, KeyError):
        return None
    entries = facts.pop("results")
    progress = {e["number"]: (parse_progress(e["progress"]), e["stopped"]) for e in entries}
    weights: dict[int, dict[str, Tensor]] = {}
    for key, weight in tensors.items():
        number, _, name = key.partition("/")
        weights.setdefault(int(number), {})[name] = weight
    return ShareResult(facts, progress, weights)


def remove_result(folder: Path) -> None:
    """Have a share go on, by settings that have changed."""
    runs.remove(folder / RESULT)
