"""What every run does before its first step and after its last, however many models it trains.

That is: load the windows, build the task, settle the plan; later save the model and the summary.
"""

import math
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from slipstream import runs
from slipstream.base.errors import ResumableError
from slipstream.base.phases import EARLIER, PhaseTimer
from slipstream.base.text import format_count
from slipstream.config import Config, describe_recurrent, list_unused
from slipstream.data import checks
from slipstream.data import dataset as datasets
from slipstream.data.dataset import Dataset
from slipstream.engine import checkpoint, monitor, recovery
from slipstream.engine.checkpoint import Checkpoint
from slipstream.engine.parallel import Ranks
from slipstream.engine.plan import Plan
from slipstream.engine.planning import choose_plan, find_batch_size, make_plan, set_batch_size
from slipstream.engine.single import TrainingTask, build_task, seed_generators
from slipstream.models.forecaster import build
from slipstream.models.losses import explain_point
from slipstream.runs import Run
from slipstream.scoring.predict import make_window_filter
from slipstream.scoring.summary import BaselineSums
from slipstream.training import advice
from slipstream.training import encoder as encoders
from slipstream.training.encoder import EncoderMatch, PretrainedEncoder
from slipstream.training.overview import summarize_data
from slipstream.training.result import FinishedRun
from slipstream.workers.resources import Bundle

FIT_PHASES = ("set-up", "training", "validation")
"""The phases whose seconds a checkpoint has"""


@dataclass(frozen=True)
class RunStart:
    """What a run starts or resumes with."""

    fingerprint: str
    plan: Plan
    plan_is_final: bool = False
    """Whether the plan is taken as it is, not as rules of thumb to measure from"""
    checkpoint: Checkpoint | None = None
    init: EncoderMatch | None = None
    """The encoder that `train.init_from` names"""


@dataclass(frozen=True)
class RunContext:
    """A run in progress, and all that its training needs."""

    run: Run
    config: Config
    """As requested: values that are left to measuring are not in it yet"""
    dataset: Dataset
    start: RunStart
    timer: PhaseTimer
    started_at: float
    """By `time.perf_counter`"""
    spent_s: float = 0.0
    """The duration of the run before it was resumed"""
    baselines: list[BaselineSums] = field(default_factory=list)
    """Those of each fold, once scored; runs on the same data can share them"""
    num_workers: int = 1
    """Processes that train the lanes"""
    ranks: Ranks | None = None
    """The processes that train the model together; this is the first of them"""
    bundle: Bundle | None = None
    """What each of them gets of a Ray cluster; without it, they are on this machine"""

    def summarize_init(self) -> dict[str, Any]:
        """Return the summary's entry on the encoder that training starts from, if there is one."""
        return {"init_from": self.start.init.summary} if self.start.init else {}


@recovery.explain_out_of_memory()
def load_dataset(
    settings: Config, data: Any = None, *, num_folds: int = 1
) -> tuple[EncoderMatch | None, Dataset]:
    """Load the windows, and the encoder to start from, if any, whose scaling they then have.

    `num_folds` are those of a search.
    """
    encoder = encoders.load_encoder(settings)
    known = encoder.scaler if encoder else None
    replay = encoders.select_limits(encoder, settings) if encoder else None
    dataset = datasets.load_dataset(settings, data, known=known, num_folds=num_folds, replay=replay)
    make_window_filter(settings, dataset)  # refuses one that does not fit
    recovery.refuse_oversized(settings, dataset.signature)
    targets = {"prepare": settings.data.prepare, "targets": dataset.signature.targets}
    changed = () if dataset.signature.masked else runs.list_changed_targets(targets)
    before = (
        *checks.find_suspicious(dataset),
        *(one.describe() for one in changed),
        *list_unused(settings),
        *explain_point(settings),
        *(describe_recurrent(settings.model) if settings.masked else ()),
    )
    dataset = replace(dataset, notes=(*before, *dataset.notes))
    if encoder is None:
        return None, dataset
    with torch.random.fork_rng([]):
        model = build(settings.model, dataset.signature)
    init = encoders.match_weights(encoder, settings, dataset.signature, model)
    notes = [
        f"starts from the encoder of {encoder.folder}: {len(init.weights)} weights matched, new "
        f"are {', '.join(init.summary['new'])}; inputs are scaled as they were there"
    ]
    notes += _describe_frozen(settings)
    if data is None and _has_seen_test_rows(encoder, settings, dataset):
        notes.append(
            "the encoder has seen rows of this run's test set, though not what is predicted there; "
            "pre-train it with the same data.split to keep them unseen"
        )
    return init, replace(dataset, notes=(*dataset.notes, *notes))


def _describe_frozen(settings: Config) -> list[str]:
    """Note that an encoder is never trained."""
    train = settings.train
    if train.freeze_epochs < train.max_epochs:
        return []
    return [
        f"the encoder stays frozen to the end: train.freeze_epochs = {train.freeze_epochs} leaves "
        f"none of train.epochs = {train.epochs}, so that only the head is trained; lower it to "
        "fine-tune the encoder"
    ]


def _describe_still_frozen(settings: Config, epochs: float) -> list[str]:
    """Note that training ran out of time before the encoder's turn came."""
    train = settings.train
    if train.init_from is None or not epochs <= train.freeze_epochs < train.max_epochs:
        return []
    return [
        f"the encoder stayed frozen: training ended in epoch {max(math.ceil(epochs), 1)}, and "
        f"train.freeze_epochs is {train.freeze_epochs}; lower it to fine-tune the encoder"
    ]


def _has_seen_test_rows(encoder: PretrainedEncoder, settings: Config, dataset: Dataset) -> bool:
    """Whether the encoder was pre-trained on rows that are tested here, as far as is known."""
    theirs, mine = encoder.config.data, settings.data
    names = ("paths", "ids", "where", "short")
    same = all(getattr(theirs, name) == getattr(mine, name) for name in names)
    alike = (theirs.split.by, theirs.split.folders) == (mine.split.by, mine.split.folders)
    return dataset.memory is not None and same and alike and datasets.shares_rows(dataset, theirs)


def load_start(settings: Config, data: Any, timer: PhaseTimer) -> tuple[Dataset, RunStart]:
    """Load the windows and make the rules-of-thumb plan."""
    timer.end("start-up")
    with timer.time("data"):
        init, dataset = load_dataset(settings, data)
        fingerprint = dataset.compute_fingerprint()
    streamed = dataset.stream is not None
    with timer.time("plan"):
        plan = make_plan(settings, data_bytes=dataset.data_bytes, streamed=streamed)
    return dataset, RunStart(fingerprint, plan, init=init)


def build_monitor(context: RunContext) -> monitor.Monitor:
    """Build the monitor that samples the device during training."""
    on = context.config.engine.monitor
    return monitor.Monitor(context.run, context.start.plan.device, on=on)


def prepare_task(context: RunContext) -> tuple[TrainingTask, Plan]:
    """Build the model, put the data in place and settle the plan; write config and plan."""
    run, dataset, start, timer = context.run, context.dataset, context.start, context.timer
    chosen, init = start.plan, start.init.weights if start.init else {}
    with seed_generators(context.config.seed, chosen.device):
        if start.init is not None and start.checkpoint is None:
            run.append("init", **start.init.summary)
        with timer.time("set-up"):
            task = build_task(
                *(context.config, dataset, chosen, run),
                fingerprint=start.fingerprint,
                init=init,
                # the others wait until the plan is settled
                ranks=context.ranks and context.ranks.without_sums(),
            )
        with timer.time("plan"):
            if not start.plan_is_final:
                task, chosen = _settle(task, chosen)
    task = replace(task, ranks=context.ranks)
    runs.remove_manifest(run)
    write_config(run, task.config, context.config)
    record_data(context)
    runs.write_json(run.folder / "plan.json", chosen.to_dict())
    return task, chosen


def record_data(context: RunContext) -> None:
    """Have checkpoints and the model state what data they were trained on."""
    dataset = context.dataset
    context.run.origin.update(
        data=context.start.fingerprint,
        streamed=dataset.stream is not None,
        left_out=dataset.left_out,
    )


def write_config(run: Run, config: Config, requested: Config) -> None:
    """Write the requested config, with the values that were left to measuring."""
    train = config.train.model_copy(update={"class_weights": requested.train.class_weights})
    text = runs.format_config(config.model_copy(update={"train": train}))
    runs.write_text(run.folder / "config.toml", text)
    run.origin["config"] = text


def _settle(task: TrainingTask, chosen: Plan) -> tuple[TrainingTask, Plan]:
    """Measure what was left to it: the batch size, then the rest of the plan."""
    if task.config.train.batch != "auto":
        return task, choose_plan(task, chosen)
    config, batch = _measure_batch(task, chosen)
    task = replace(task, config=config)
    decided = choose_plan(task, chosen)
    reasons = decided.reasons | {"batch": batch.reason}
    return task, replace(decided, reasons=reasons, evidence=[*batch.evidence, *decided.evidence])


class MeasuredBatch(NamedTuple):
    """How a batch size was chosen, for the plan."""

    reason: str
    evidence: list[dict[str, Any]]


def measure_batch(context: RunContext) -> tuple[Config, MeasuredBatch]:
    """Return the config with the batch size that is fastest here, and how it was chosen."""
    config, plan = context.config, context.start.plan
    init = context.start.init.weights if context.start.init else {}
    with context.timer.time("plan"), seed_generators(config.seed, plan.device):
        task = build_task(config, context.dataset, plan, context.run, init=init)
        measured = _measure_batch(task, plan)
    if plan.device.type == "cuda":
        recovery.free_memory()
    return measured


def _measure_batch(task: TrainingTask, plan: Plan) -> tuple[Config, MeasuredBatch]:
    batch, evidence = find_batch_size(task, plan)
    reason = f"{format_count(batch, 'window')}: the most that fit and made training faster"
    return set_batch_size(task.config, batch), MeasuredBatch(reason, evidence)


def restore_folder(run: Run, settings: Config, requested: Config) -> None:
    """Create the run folder again if it was removed during training."""
    if not (run.folder / "config.toml").exists():
        run.folder.mkdir(parents=True, exist_ok=True)
        write_config(run, settings, requested)


def save_model(run: Run, weights: Mapping[str, Tensor], dataset: Dataset) -> None:
    """Write model/, or a temporary folder elsewhere if the run folder cannot be written to."""
    content = weights, dataset.signature, dataset.scaler, dataset.limits
    try:
        checkpoint.save_model(run, *content)
    except OSError as error:
        aside = replace(run, folder=Path(tempfile.mkdtemp(prefix=f"{run.folder.name}-")))
        checkpoint.save_model(aside, *content)
        raise ResumableError(
            f"{run.folder}: cannot be written to any more ({error}); the best weights are in "
            f"{aside.model}",
            fix="make room and resume with: " + runs.suggest_resume(run.folder),
        ) from None


def record_plan(run: Run, ran: Plan, failures: Mapping[str, str]) -> Plan:
    """Write the plan as it ran, with every program that could not be captured; return it."""
    if failures:
        for name, why in failures.items():
            run.append("fallback", what=f"{name} not captured", why=why)
        reason = "; ".join(f"{name} ran eagerly: {why}" for name, why in failures.items())
        ran = replace(ran, capture=False, reasons=ran.reasons | {"capture": reason})
    runs.write_json(run.folder / "plan.json", ran.to_dict())
    return ran


def finish_run(context: RunContext, summary: dict[str, Any], detail: dict[str, Any]) -> FinishedRun:
    """Write the summary, with the duration of the run and of its phases, from its first start."""
    run, spent_s = context.run, context.spent_s
    summary["seconds"] = spent_s + time.perf_counter() - context.started_at
    summary["seconds_by_phase"] = context.timer.seconds | _time_earlier_phases(context)
    if spent_s:
        summary["seconds_before_resume"] = spent_s
    summary["data"] = summarize_data(context.dataset, context.config)
    frozen = _describe_still_frozen(context.config, summary["epochs"])
    summary["notes"] = [*summary["notes"], *frozen]
    if not context.config.masked:
        suggested = advice.summarize_suggestions(context.config, context.dataset, summary)
        if suggested is not None:
            summary |= {"advice": suggested, "notes": [*summary["notes"], *suggested["lines"]]}
    summary |= runs.describe_origin() | {"time": summarize_time(context)}
    runs.write_metrics(run, summary | {"detail": detail})
    run.append("end", seconds=summary["seconds"])
    return FinishedRun(run.folder, summary)


def summarize_time(context: RunContext) -> dict[str, float]:
    """Return where the time went; the command adds the report's, once that is drawn."""
    checkpoint, before = context.start.checkpoint, _time_earlier_phases(context)
    if checkpoint and before:
        before |= dict(zip(FIT_PHASES, checkpoint.metadata["seconds"], strict=True))
    return context.timer.summarize(before=before)


def _time_earlier_phases(context: RunContext) -> dict[str, float]:
    """Return the time before a resume that is in no phase: set-up, training and validation up to
    the checkpoint go on from there."""
    checkpoint = context.start.checkpoint
    counted = sum(checkpoint.metadata["seconds"]) if checkpoint else 0.0
    return {EARLIER: max(context.spent_s - counted, 0.0)} if context.spent_s else {}
