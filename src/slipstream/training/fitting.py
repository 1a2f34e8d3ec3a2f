"""From a config to trained lanes: load, build, plan and record, in the order of a run.

`run` calls these for a run of this process, `shares` for the lanes of a worker.
"""

import math
import operator
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from slipstream import runs
from slipstream.base.errors import Interrupted, ResumableError, UserError
from slipstream.base.phases import PhaseTimer
from slipstream.base.text import format_count, format_epoch
from slipstream.config import Config, describe_recurrent, list_unused
from slipstream.data import checks, defaults
from slipstream.data import dataset as datasets
from slipstream.data.dataset import Dataset
from slipstream.data.defaults import ResolvedConfig
from slipstream.engine import checkpoint, planning, recovery
from slipstream.engine import state as states
from slipstream.engine.context import EncoderMatch, RunContext, build_model, seed_generators
from slipstream.engine.events import LaneEvents
from slipstream.engine.lanes import INTERRUPTED, FitResult, Lane, LaneResult, parse_progress
from slipstream.engine.monitor import Monitor
from slipstream.engine.plan import ONE_AT_A_TIME, PackChoice, Plan
from slipstream.events import Fallback, Start
from slipstream.models.custom import list_buffers
from slipstream.models.forecaster import build
from slipstream.models.losses import explain_point, make_validation_settings
from slipstream.runs import Run
from slipstream.scoring.predict import make_window_filter
from slipstream.scoring.summary import count_windows
from slipstream.training import encoder as encoders
from slipstream.training.encoder import PretrainedEncoder
from slipstream.training.preview import build_preview

FIT_PHASES = ("set-up", "training", "validation")
"""The phases whose seconds a checkpoint has"""


@recovery.explain_out_of_memory()
def resolve_config(config: Config, data: Any = None) -> ResolvedConfig:
    """Resolve what is left to the data, from that of the config or from the table passed
    instead."""
    return defaults.resolve(config, data)


def load_context(
    config: Config, data: Any, timer: PhaseTimer, *, run: Run = planning.NOWHERE
) -> RunContext:
    """Load the windows, and the encoder to start from; make the rules-of-thumb plan.

    A new run has no folder yet, so that bad data leave none behind.
    """
    timer.end("start-up")
    with timer.time("data"):
        init, dataset = load_dataset(config, data)
    hashing = ThreadPoolExecutor(1)  # beside the set-up: a GB takes a second or two
    content = hashing.submit(dataset.compute_fingerprint)
    hashing.shutdown(wait=False)
    streamed = dataset.stream is not None
    with timer.time("plan"):
        plan = planning.make_plan(config, data_bytes=dataset.data_bytes, streamed=streamed)
    return RunContext(run, config, dataset, plan, content=content, init=init, timer=timer)


@recovery.explain_out_of_memory()
def load_dataset(
    settings: Config, data: Any = None, *, num_folds: int = 1, whole: bool = False
) -> tuple[EncoderMatch | None, Dataset]:
    """Load the windows, and the encoder to start from, if any, whose scaling they then have.

    `num_folds` are those of a search. `whole`: the rows of all sets train.
    """
    encoder = encoders.load_encoder(settings)
    known = encoder.scaler if encoder else None
    replay = encoders.select_limits(encoder, settings) if encoder else None
    dataset = datasets.load_dataset(
        settings, data, known=known, num_folds=num_folds, replay=replay, whole=whole
    )
    make_window_filter(settings, dataset)  # refuses one that does not fit
    recovery.refuse_oversized(settings, dataset.signature)
    targets = {"prepare": settings.data.prepare, "targets": dataset.signature.targets}
    changed = () if dataset.signature.masked else runs.list_changed_targets(targets)
    before = (
        *checks.find_suspicious(dataset),
        *(target.describe() for target in changed),
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
        f"are {', '.join(init.event.new)}; inputs are scaled as they were there"
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


def _has_seen_test_rows(encoder: PretrainedEncoder, settings: Config, dataset: Dataset) -> bool:
    """Whether the encoder was pre-trained on rows that are tested here, as far as is known."""
    encoder_data, data = encoder.config.data, settings.data
    names = ("paths", "ids", "where", "short")
    same = all(getattr(encoder_data, name) == getattr(data, name) for name in names)
    alike = (encoder_data.split.by, encoder_data.split.folders) == (
        data.split.by,
        data.split.folders,
    )
    return (
        dataset.memory is not None
        and same
        and alike
        and datasets.shares_rows(dataset, encoder_data)
    )


def build_monitor(context: RunContext) -> Monitor:
    """Build the monitor that samples the device during training."""
    return Monitor(context.run, context.plan.device, on=context.config.engine.monitor)


def prepare_model(context: RunContext) -> RunContext:
    """Build the model, put the data in place and settle the plan; write config and plan."""
    run, timer, ranks = context.run, context.timer, context.ranks
    with seed_generators(context.config.seed, context.plan.device):
        if context.init is not None and context.checkpoint is None:
            run.append(context.init.event)
        # the other ranks wait until the plan is settled
        context = replace(context, ranks=ranks and ranks.without_sums())
        with timer.time("set-up"):
            context = build_model(context)
        with timer.time("plan"):
            if not context.is_plan_final:
                context = _settle_plan(context)
    plan = replace(context.plan, settings=defaults.to_plain(context.choices))
    context = replace(context, ranks=ranks, plan=plan)
    runs.remove_manifest(run)
    write_config(context)
    record_data(context)
    runs.write_json(run.folder / "plan.json", context.plan.to_dict())
    return context


def _settle_plan(context: RunContext) -> RunContext:
    """Measure what was left to it: the batch size, then the rest of the plan."""
    if context.config.train.batch != "auto":
        return replace(context, plan=planning.choose_plan(context, context.plan))
    config, batch = _measure_batch(context)
    context = replace(context, config=config)
    plan = planning.choose_plan(context, context.plan)
    reasons, evidence = plan.reasons | {"batch": batch.reason}, [*batch.evidence, *plan.evidence]
    return replace(context, plan=replace(plan, reasons=reasons, evidence=evidence))


class MeasuredBatch(NamedTuple):
    """How a batch size was chosen, for the plan."""

    reason: str
    evidence: list[dict[str, Any]]


def measure_batch(context: RunContext) -> tuple[Config, MeasuredBatch]:
    """Return the config with the batch size that is fastest here, and how it was chosen."""
    device = context.plan.device
    with context.timer.time("plan"), seed_generators(context.config.seed, device):
        measured = _measure_batch(build_model(context))
    if device.type == "cuda":
        recovery.free_memory()
    return measured


def _measure_batch(context: RunContext) -> tuple[Config, MeasuredBatch]:
    batch, evidence = planning.find_batch_size(context, context.plan)
    reason = f"{format_count(batch, 'window')}: the most that fit and made training faster"
    return planning.set_batch_size(context.config, batch), MeasuredBatch(reason, evidence)


def record_data(context: RunContext) -> None:
    """Have checkpoints and the model state what data they were trained on."""
    dataset = context.dataset
    context.run.origin.update(
        data=context.fingerprint,
        streamed=dataset.stream is not None,
        left_out=dataset.left_out,
    )


def write_config(context: RunContext) -> None:
    """Write the requested config, with the values that were left to measuring."""
    config, requested = context.config, context.requested or context.config
    train = config.train.model_copy(update={"class_weights": requested.train.class_weights})
    text = runs.format_config(config.model_copy(update={"train": train}))
    runs.write_text(context.run.folder / "config.toml", text)
    context.run.origin["config"] = text


def build_lanes(config: Config, dataset: Dataset, init: Mapping[str, Tensor]) -> list[Lane]:
    """Return every fold's repeats, the earliest fold first, all from the same encoder weights if
    any."""
    memory = dataset.memory
    folds = [fold.starts for fold in dataset.folds] or [memory.starts if memory else {}]
    seeds = range(config.seed, config.seed + config.train.repeats)
    configs = [config.model_copy(update={"seed": seed}) for seed in seeds]
    folds = [{name: fold[name] for name in ("train", "val") if name in fold} for fold in folds]
    return [Lane(seeded, starts, init=init) for starts in folds for seeded in configs]


def plan_lanes(context: RunContext, numbers: Sequence[int] | None = None) -> RunContext:
    """Choose how the lanes are trained, and how many at a time.

    `numbers` are those of a worker's share; by default, it is all of them.
    """
    if not context.config.trains_lanes:
        return replace(context, lanes=[context.build_lane()])
    lanes = build_lanes(context.config, context.dataset, context.init_weights)
    if numbers is not None:
        lanes = [lanes[number] for number in numbers]
    with context.timer.time("plan"):
        packing, plan = _choose_packing(context, lanes)
    return replace(context, lanes=lanes, packing=packing, plan=plan)


def _choose_packing(context: RunContext, lanes: list[Lane]) -> tuple[PackChoice, Plan]:
    """Return how lanes are trained, from measuring where that pays, and the plan for that."""
    plan, saved, obstacle = context.plan, context.checkpoint, _find_obstacle(context)
    if saved is not None:
        packing = PackChoice(
            saved.metadata["mode"],
            saved.metadata["limit"],
            reason=saved.metadata.get("why", "as it began"),
        )
        if packing.mode != ONE_AT_A_TIME:
            if obstacle:
                raise UserError(
                    f"the run began with several models at a time, which does not work with "
                    f"{obstacle}; leave that as it was, or start a new run"
                )
            plan = planning.adapt_plan_to_pack(plan, packing.mode, None)
        return packing, plan
    if obstacle:
        return PackChoice(reason=f"one after another: {obstacle}"), plan
    config, signature = context.config, context.dataset.signature
    guessed_s = planning.guess_duration_s(context, plan)
    limit_s = planning.limit_measuring(guessed_s, len(lanes), plan)
    if config.train.minutes is None and config.engine.plan != "off" and limit_s:
        packing = planning.recall_or_choose(context, lanes, plan, limit_s)
        ms = next(
            entry["ms"]
            for entry in packing.evidence
            if "ms" in entry
            and (entry["mode"], entry["places"]) == (packing.mode, packing.num_lanes)
        )
        return packing, planning.adapt_plan_to_pack(plan, packing.mode, ms)
    mode, reason = planning.choose_mode(config, signature, plan)
    num_lanes = min(len(lanes), planning.MAX_LANES, planning.count_fitting(context, lanes, plan))
    if config.train.minutes is not None:
        reason, num_lanes = "all at a time, since train.minutes is for all of them", len(lanes)
    return PackChoice(mode, num_lanes, reason=reason), planning.adapt_plan_to_pack(plan, mode, None)


def _find_obstacle(context: RunContext) -> str:
    """Return what keeps several models from training at a time; empty where nothing does."""
    plan, config, extra = context.plan, context.config, list_buffers(context.model)
    if context.dataset.stream is not None or plan.home != "device":
        return f"series that are not on the device ({plan.home}: {plan.reasons['home']})"
    if context.copies is not None:
        return "augmented windows that are read from disk (augment.cache)"
    if config.train.state == "carried":
        return 'train.state = "carried", which keeps the state of each piece from step to step'
    if config.engine.sync:
        return "engine.sync, which waits for every step"
    if plan.micro_batch:
        return f"a batch that fits into memory {format_count(plan.micro_batch, 'window')} at a time"
    if extra:
        return f"a model that keeps more than weights ({', '.join(extra[:3])})"
    return ""


def announce(context: RunContext) -> None:
    """Log what is about to be trained, and how long that is expected to take."""
    config, dataset, plan = context.config, context.dataset, context.plan
    train, num_lanes = config.train, len(context.lanes)
    counts = [fold.num_windows["train"] for fold in dataset.folds] or [dataset.num_windows["train"]]
    steps = -(-max(counts) // context.windows_per_step)
    if context.is_carried:
        steps = context.num_steps  # of the last fold
    rounds = -(-num_lanes // context.packing.num_lanes)
    if plan.ms_per_step is not None:
        expected_s = plan.ms_per_step / 1e3 * steps * train.max_epochs * rounds
    else:
        expected_s = planning.guess_duration_s(context, plan) * num_lanes
    pack: dict[str, Any] | None = None
    if config.trains_lanes:
        saved = context.checkpoint
        done = len(list_ended(saved.metadata, config)) if saved else 0
        facts = {"folds": len(dataset.folds), "repeats": train.repeats, "seed": config.seed}
        pack = context.summarize_packing() | facts | {"done": done}
    context.run.append(
        Start(
            run=str(context.run.folder),
            windows=count_windows(dataset),
            series=len(dataset.index.series_names),
            parameters=context.num_parameters,
            epochs=train.max_epochs,
            steps_per_epoch=steps,
            plan=plan.to_dict(),
            scale=_describe_scale(context),
            rounds=None if pack is None else rounds,
            pack=pack,
            expected_s=expected_s,
            expected_is="guessed" if plan.ms_per_step is None else "measured",
            notes=list(dataset.notes),
            files=dataset.summarize_files(),
        )
    )


def _describe_scale(context: RunContext) -> dict[str, Any] | None:
    """Return how losses become errors in the unit of the target; None unless it is one number."""
    signature, train = context.dataset.signature, context.config.train
    if signature.masked or signature.classes or len(signature.targets) > 1:
        return None
    (target,) = signature.targets
    losses = {"train": train.loss, "val": make_validation_settings(train).loss}
    return {"target": target, "size": context.dataset.scaler.size[target]} | losses


def make_events(context: RunContext, monitor: Monitor) -> LaneEvents:
    """Return what logs the training."""
    preview = build_preview(context)
    return LaneEvents(context.run, monitor, preview, single=not context.config.trains_lanes)


def record_training(context: RunContext, fit: FitResult) -> RunContext:
    """Count the time of training and write the plan as it ran; return the context with it."""
    count_seconds(context, fit)
    if not (context.run.folder / "config.toml").exists():  # the folder was removed meanwhile
        context.run.folder.mkdir(parents=True, exist_ok=True)
        write_config(context)
    plan, packing = _record_plan(context.run, fit.plan, fit.failures), context.packing
    if fit.limit < packing.num_lanes:
        packing = replace(packing, num_lanes=fit.limit, reason="more did not fit into memory")
    return replace(context, plan=plan, packing=packing)


def count_seconds(context: RunContext, result: FitResult) -> None:
    """Count the time of training, set-up and validation; a checkpoint's is in the result too."""
    timer, saved = context.timer, context.checkpoint
    fitted = dict(zip(FIT_PHASES, (result.setup_s, result.train_s, result.validate_s), strict=True))
    timer.seconds |= fitted | {"set-up": timer.seconds["set-up"] + result.setup_s}
    before = saved.metadata["seconds"] if saved else (0.0, 0.0, 0.0)
    setup_s, _, validate_s = map(operator.sub, fitted.values(), before)
    timer.end("training")  # with checkpoints, and what else comes between its steps
    captures = result.capture_s
    timer.move(
        {
            "set-up": setup_s + captures.training + captures.validation,
            "validation": validate_s - captures.validation,
        },
        source="training",
    )


def _record_plan(run: Run, ran: Plan, failures: Mapping[str, str]) -> Plan:
    """Write the plan as it ran, with every program that could not be captured; return it."""
    if failures:
        for name, why in failures.items():
            run.append(Fallback(what=f"{name} not captured", why=why))
        reason = "; ".join(f"{name} ran eagerly: {why}" for name, why in failures.items())
        ran = replace(ran, capture=False, reasons=ran.reasons | {"capture": reason})
    runs.write_json(run.folder / "plan.json", ran.to_dict())
    return ran


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


def list_ended(metadata: Mapping[str, Any], config: Config) -> list[int]:
    """List a checkpoint's lanes that have ended and have no more to do by the config."""
    return [
        entry["number"]
        for entry in metadata["lanes"]
        if entry["stopped"]
        and not states.can_go_on(entry["stopped"], parse_progress(entry["progress"]), config.train)
    ]


def describe_interrupt(context: RunContext, fit: FitResult, best: LaneResult | None) -> Interrupted:
    """Return the error of a run that a signal has stopped; `best` is the lane in model/."""
    run = context.run
    if context.config.trains_lanes:
        done = sum(lane.stop_reason != INTERRUPTED for lane in fit.lanes)
        epoch = max((lane.progress.epoch for lane in fit.lanes), default=0.0)
        where = f"in epoch {math.ceil(epoch)} with {done} of {len(context.lanes)} lanes done"
        saved = "there was no validation yet of what model/ is to hold"
        if best is not None:
            saved = f"the best weights so far are in {run.model}"
    else:
        progress = fit.lanes[0].progress
        where = f"at step {progress.step}, in epoch {math.ceil(progress.epoch)}"
        saved = "there was no validation yet"
        if best is not None:
            epochs = format_epoch(progress.best_epoch)
            saved = f"the best weights, of epoch {epochs}, are in {run.model}"
    return Interrupted(
        f"stopped {where}; {saved}",
        signal_number=fit.signal_number,
        fix="resume with: " + runs.suggest_resume(run.folder),
    )
