"""What the processes other than the first do: they train its model with it, and write nothing."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from slipstream import runs
from slipstream.base.errors import Interrupted, UserError
from slipstream.base.rank import RankPlace
from slipstream.config import Config
from slipstream.engine import checkpoint as checkpoints
from slipstream.engine import loop
from slipstream.engine.context import RunContext, build_model, seed_generators
from slipstream.engine.events import LaneEvents
from slipstream.engine.parallel import Ranks, SilentRun
from slipstream.engine.plan import Plan
from slipstream.training.fitting import load_dataset
from slipstream.training.parallel.meeting import find_device
from slipstream.training.request import FinishedRun


def follow(config: Config, data: Any, ranks: Ranks, place: RankPlace) -> FinishedRun:
    """Train with the first process; return its run once that is scored."""
    init, dataset = load_dataset(config, data)
    text = ranks.share_text()
    if text.startswith("{"):  # else the run was finished before
        message = json.loads(text)
        if dataset.compute_fingerprint() != message["data"]:
            raise UserError(
                f"process {ranks.rank + 1} of {ranks.size} has read other data than the first one; "
                "check that data.path is the same everywhere"
            )
        settled = Config.model_validate_json(message["config"])
        device = find_device(settled, place)
        plan = replace(Plan.from_dict(message["plan"]), device=device)
        run = SilentRun(Path(message["run"]))
        saved = None
        if message["step"] is not None:
            saved = checkpoints.read_checkpoint(run.checkpoints / f"step-{message['step']}")
        context = RunContext(run, settled, dataset, plan, init=init, checkpoint=saved, ranks=ranks)
        with seed_generators(settled.seed, device), plan.flags():
            context = build_model(context)
            context = replace(context, lanes=[context.build_lane()])
            fit = loop.fit_lanes(context, LaneEvents(run))
        if fit.signal_number:
            raise Interrupted("stopped", signal_number=fit.signal_number)
        text = ranks.share_text()
    return read_finished(Path(text))


def describe_training(context: RunContext) -> str:
    """Return what the other processes need to train the same model, as JSON."""
    saved = context.checkpoint
    message = {
        "run": str(context.run.folder),
        "config": context.config.model_dump_json(),
        "plan": context.plan.to_dict(),
        "data": context.fingerprint,
        "step": None if saved is None else saved.step,
    }
    return json.dumps(message)


def read_finished(folder: Path, *, is_new: bool = True) -> FinishedRun:
    """Return a finished run by its folder; empty where this machine does not see it."""
    if not (folder / "metrics.json").exists():
        return FinishedRun(folder, {})
    summary = runs.read_metrics(folder)
    summary.pop("detail", None)
    return FinishedRun(folder, summary, is_new)
