"""What every run does before its first step and after its last, however many models it trains."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from slipstream import runs
from slipstream.autotune.measure import choose_plan, find_batch_size, set_batch_size
from slipstream.config import Config
from slipstream.data.dataset import Dataset
from slipstream.engine import checkpoint, monitor
from slipstream.engine.checkpoint import Checkpoint
from slipstream.engine.plan import Plan
from slipstream.engine.single import TrainingTask, build_task, seed_generators
from slipstream.errors import ResumableError
from slipstream.runs import Run
from slipstream.training.encoder import EncoderMatch
from slipstream.training.result import Result


@dataclass(frozen=True)
class RunStart:
    """What a run begins or goes on with."""

    fingerprint: str
    plan: Plan
    plan_is_final: bool = False
    """Whether the plan is taken as it is, not as rules of thumb to measure from"""
    checkpoint: Checkpoint | None = None
    init: EncoderMatch | None = None
    """What `train.init_from` names, as the model takes it"""


@dataclass(frozen=True)
class RunContext:
    """A run on its way: what its training is handed, however many models that trains."""

    run: Run
    config: Config
    """As requested for: what is left to measuring is not in them yet"""
    dataset: Dataset
    start: RunStart
    seconds: dict[str, float]
    """By phase; what each takes is added to it"""
    started_at: float
    """By `time.perf_counter`"""

    def summarize_init(self) -> dict[str, Any]:
        """What a summary says of the encoder that training starts from, if there is one."""
        return {"init_from": self.start.init.summary} if self.start.init else {}


def build_monitor(context: RunContext) -> monitor.Monitor:
    """What looks at the device meanwhile."""
    on = context.config.engine.monitor
    return monitor.Monitor(context.run, context.start.plan.device, on=on)


def prepare_task(context: RunContext) -> tuple[TrainingTask, Plan]:
    """The model and its data in place and the plan made, both written down."""
    run, dataset, start, seconds = context.run, context.dataset, context.start, context.seconds
    chosen, init = start.plan, start.init.weights if start.init else {}
    with seed_generators(context.config.seed, chosen.device):
        if start.init is not None and start.checkpoint is None:
            run.append("init", **start.init.summary)
        with time_phase(seconds, "set-up"):
            task = build_task(
                context.config, dataset, chosen, run, fingerprint=start.fingerprint, init=init
            )
        with time_phase(seconds, "plan"):
            if not start.plan_is_final:
                task, chosen = _settle(task, chosen)
    runs.remove_manifest(run)
    write_config(run, task.config, context.config)
    run.origin.update(data=start.fingerprint, streamed=dataset.stream is not None)
    runs.write_json(run.folder / "plan.json", chosen.to_dict())
    return task, chosen


def write_config(run: Run, config: Config, requested: Config) -> None:
    """What was requested, with what was left to measuring."""
    train = config.train.model_copy(update={"class_weights": requested.train.class_weights})
    text = runs.format_config(config.model_copy(update={"train": train}))
    runs.write_text(run.folder / "config.toml", text)
    run.origin["config"] = text


def _settle(task: TrainingTask, chosen: Plan) -> tuple[TrainingTask, Plan]:
    """What was left to measuring: the batch, then the rest of the plan."""
    if task.config.train.batch == "auto":
        batch, evidence = find_batch_size(task, chosen)
        task = replace(task, config=set_batch_size(task.config, batch))
        reason = f"{batch} windows: the most that fit and made training faster"
        chosen = replace(chosen, reasons=chosen.reasons | {"batch": reason}, evidence=evidence)
    decided = choose_plan(task, chosen)
    return task, replace(decided, evidence=[*chosen.evidence, *decided.evidence])


@contextmanager
def time_phase(seconds: dict[str, float], phase: str) -> Iterator[None]:
    began = time.perf_counter()
    yield
    seconds[phase] = seconds.get(phase, 0.0) + time.perf_counter() - began


def restore_folder(run: Run, settings: Config, requested: Config) -> None:
    """Make the folder again where it was removed under our feet."""
    if not (run.folder / "config.toml").exists():
        run.folder.mkdir(parents=True, exist_ok=True)
        write_config(run, settings, requested)


def save_model(run: Run, weights: Mapping[str, Tensor], dataset: Dataset) -> None:
    """Write model/; where the run's folder takes nothing any more, into a folder elsewhere."""
    what = weights, dataset.signature, dataset.scaler
    try:
        checkpoint.save_model(run, *what)
    except OSError as error:
        aside = replace(run, folder=Path(tempfile.mkdtemp(prefix=f"{run.folder.name}-")))
        checkpoint.save_model(aside, *what)
        raise ResumableError(
            f"{run.folder}: cannot be written to any more ({error}); the best weights are in "
            f"{aside.model}; make room and go on with: slipstream train --resume {run.folder}"
        ) from None


def record_plan(run: Run, ran: Plan, failures: Mapping[str, str]) -> Plan:
    """The plan, corrected where a fallback was taken."""
    if failures:
        for name, why in failures.items():
            run.append("fallback", what=f"{name} not captured", why=why)
        reason = "; ".join(f"{name} ran eagerly: {why}" for name, why in failures.items())
        ran = replace(ran, capture=False, reasons=ran.reasons | {"capture": reason})
    runs.write_json(run.folder / "plan.json", ran.to_dict())
    return ran


def finish_run(context: RunContext, summary: dict[str, Any], detail: dict[str, Any]) -> Result:
    """Write the figures down with the time that all of it took."""
    run = context.run
    summary["seconds"] = time.perf_counter() - context.started_at
    summary["seconds_by_phase"] = context.seconds
    runs.write_metrics(run, summary | {"detail": detail})
    run.append("end", seconds=summary["seconds"])
    return Result(run.folder, summary["metrics"], summary["baselines"], summary)
