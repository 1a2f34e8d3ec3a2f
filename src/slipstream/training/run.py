"""A run, from the request to the finished folder: load, plan, build, train, score, write.

`train` is what the command line, Python, the app and worker processes call. `train_run` is the
whole run of a context, whatever it trains: one model is a run of one lane.
"""

from __future__ import annotations

import math
import operator
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from slipstream import config as configs
from slipstream import runs
from slipstream.base import machine
from slipstream.base.errors import (
    Command,
    Interrupted,
    Option,
    ResumableError,
    StorageError,
    UserError,
)
from slipstream.base.phases import EARLIER
from slipstream.base.rank import RankPlace
from slipstream.base.run_names import ENSEMBLE_FILE
from slipstream.base.text import format_count
from slipstream.config import Config
from slipstream.data import defaults
from slipstream.engine import loop, recovery
from slipstream.engine.context import RunContext
from slipstream.engine.lanes import FitResult, LaneResult
from slipstream.engine.monitor import compare_with_estimate, summarize
from slipstream.engine.parallel import LOST
from slipstream.engine.plan import Plan
from slipstream.events import End, Event, SearchStart
from slipstream.runs import DISK_FULL, Run
from slipstream.runs.summary import RunSummary, SetDetail, TrainingSummary
from slipstream.runs.watching import start_follower
from slipstream.scoring import masked, summary
from slipstream.scoring.baselines import start_boosting
from slipstream.scoring.boosting import BackgroundBoosting
from slipstream.scoring.summary import BaselineSums, FoldLanes, FoldSums
from slipstream.training import advice, fitting, parallel, resuming, shares, trained_lanes
from slipstream.training.fitting import FIT_PHASES
from slipstream.training.overview import summarize_data
from slipstream.training.parallel import RankLeader
from slipstream.training.request import FinishedRun, TrainRequest
from slipstream.training.resuming import NothingToTrainError
from slipstream.training.trained_lanes import LoadedData, TrainedLane


def train(request: TrainRequest) -> FinishedRun:
    """Train a model, or resume a run; `slipstream.train` documents the request.

    A run in the request's folder that was finished before is returned as it is.
    """
    request = request.find_run()
    if request.place is not None:
        return _train_as_rank(request, request.place)
    if request.count_processes() > 1:
        return _launch_ranks(request)
    try:
        with _open_run(request) as context:
            return train_run(context)
    except NothingToTrainError as finished:
        return finished.accept(request)


def _launch_ranks(request: TrainRequest) -> FinishedRun:
    """Train one model in several processes, which this one starts."""
    config = request.load_config()
    request.permit_classes(config)
    parallel.check_job(config, request.data)
    shares.place_workers(request.workers, request.on, config, request.data)  # refuses several
    return parallel.launch(parallel.describe_ranks(request, config), request.watch)


def _train_as_rank(request: TrainRequest, place: RankPlace) -> FinishedRun:
    """Train with the other processes: the first one as if it were alone, the others with it."""
    parallel.check_size(request.count_processes(), place)
    if request.load_config().trains_lanes:
        raise UserError(
            f"torchrun has started {format_count(place.size, 'process')} for one model, and "
            "this run trains several (train.repeats, data.split.walk_forward), which are "
            "faster side by side: start it without torchrun, with " + Option("workers", place.size)
        )
    request = request.for_rank(place)
    config = fitting.resolve_config(request.load_config(), request.data).config
    request.permit_classes(config)
    with parallel.join_ranks(config, place) as ranks:
        if not place.is_leader:
            return parallel.follow(config, request.data, ranks, place)
        marked = None if request.resume else parallel.find_marked_run(place, config)
        if marked is not None:
            request = replace(request, resume=marked, may_be_finished=True)
        try:
            with _open_run(request, RankLeader(ranks, place)) as context:
                result = train_run(context)
        except NothingToTrainError as finished:
            result = finished.accept(request)
        ranks.share_text(str(result.run))
        return result


@contextmanager
def _open_run(request: TrainRequest, leader: RankLeader | None = None) -> Iterator[RunContext]:
    """Load the data and create the run folder, or open that of the run to resume; the folder is
    locked within the block, and an error there leaves its traceback in it.

    `leader` has the processes of which this is the first, if there are several.
    """
    if request.resume is not None:
        run = replace(request.open_run(), started_at=request.started_at)
        request.permit_classes()
        _refuse_other_kinds(request, run)
        with runs.lock_run(run), _keep_traceback(run):
            context = resuming.load_resumed(run, request)
            yield replace(context, ranks=leader.open(run) if leader else None)
        return
    request.timer.end("start-up")
    with request.timer.time("data"):  # rules for what is left out read them
        config, choices = fitting.resolve_config(request.load_config(), request.data)
    request.permit_classes(config)
    placement = shares.place_workers(request.workers, request.on, config, request.data)
    # bad data are refused before there is a folder
    context = fitting.load_context(config, request.data, request.timer)
    if leader is not None:
        parallel.check_dataset(config, context.dataset)
    files = {"config.toml": runs.format_config(config)}
    created = runs.create_locked(
        config.name, out=config.out, files=files, folder=request.folder, watch=request.watch
    )
    with created as run, _keep_traceback(run):
        run = replace(run, started_at=request.started_at)
        ranks = leader.open(run) if leader else None
        context = replace(context, run=run, ranks=ranks, started_at=request.started_at)
        yield replace(context, choices=choices, **placement._asdict())


def _refuse_other_kinds(request: TrainRequest, run: Run) -> None:
    """Raise a UserError for a run that is not one of training."""
    if (run.folder / ENSEMBLE_FILE).exists():
        raise UserError(f"{run.folder}: is an ensemble; there is nothing to train further")
    if any(isinstance(event, SearchStart) for event in runs.read_events(run)):
        raise UserError(
            f"{run.folder}: is a search; resume with: " + Command("tune", resume=run.folder)
        )
    if request.pretrain and request.config is None and not runs.load_config(run).masked:
        raise UserError(
            f"{run.folder}: is not a pre-training run",
            fix="resume with: " + runs.suggest_resume(run.folder),
        )


@contextmanager
def _keep_traceback(run: Run) -> Iterator[None]:
    """Write the traceback of an internal error into the run folder; the run can be resumed."""
    fix = "resume with: " + runs.suggest_resume(run.folder)
    try:
        yield
    except (KeyboardInterrupt, Interrupted) as stop:
        if isinstance(stop, Interrupted) and stop.fix is not None:
            raise
        # before or after training, which ends by itself
        number = stop.signal_number if isinstance(stop, Interrupted) else int(signal.SIGINT)
        raise Interrupted("interrupted", signal_number=number, fix=fix) from None
    except ResumableError as error:
        if str(error) == LOST:
            raise ResumableError(LOST, fix=fix) from error
        raise
    except StorageError as error:
        raise ResumableError(error.message, fix=fix) from None
    except UserError:
        raise
    except OSError as error:
        fix = "make room and " + fix if error.errno in DISK_FULL else fix
        raise ResumableError(f"the run had to stop: {error}", fix=fix) from error
    except Exception:
        with suppress(OSError):
            runs.write_text(run.folder / "crash.txt", traceback.format_exc())
        raise


@recovery.explain_out_of_memory()
def train_run(
    context: RunContext,
    *,
    baselines: list[BaselineSums] | None = None,
    train_tasks: shares.TrainTasks | None = None,
) -> FinishedRun:
    """Train what the context has, score it and write everything: the whole run.

    `baselines` are those of each fold that were scored by a run on the same data; it is extended.
    `train_tasks` has shares of the lanes trained somewhere else than in processes on this machine.
    """
    start_follower(context.run, context.config.follow)
    boosting = None if context.config.masked or baselines else _start_boosting(context)
    # train: workers have the lanes, or this process builds the model, plans and trains
    spread = shares.train_spread(context, train_tasks) if context.is_spread else None
    with fitting.build_monitor(context) as monitor:
        if spread is not None:
            context, fit = shares.join_results(spread)
        else:
            context = fitting.prepare_model(context)
            context = fitting.plan_lanes(context)
            with context.plan.flags():
                fitting.announce(context)
                if context.ranks is not None:
                    context.ranks.share_text(parallel.describe_training(context))
                fit = loop.fit_lanes(context, fitting.make_events(context, monitor))
            context = fitting.record_training(context, fit)
        groups, best = _save_best(context, fit)
        # score: the model or every lane, and the baselines
        with context.plan.flags():
            if context.config.masked:
                scores, detail = _score_encoder(context, best)
            else:
                scored = [] if baselines is None else baselines
                folds = _score_lanes(context, groups, scored, boosting)
            if context.plan.device.type == "cuda":
                recovery.free_memory()
    # write: the summary, and for several lanes their weights
    if not context.config.masked:
        with context.timer.time("scoring"):
            scores, detail = summary.summarize_folds(context, folds)
    if context.config.trains_lanes:
        summary.save_folds(context, folds, scores["uses"])
        facts = context.plan.to_dict() | {"pack": context.summarize_packing()}
        runs.write_json(context.run.folder / "plan.json", facts)
    scores |= cast(RunSummary, _summarize_training(context, fit, best))
    finished = _write_summary(context, scores, detail)
    if spread is not None:
        shares.forget(spread)
    return finished


def _start_boosting(context: RunContext) -> BackgroundBoosting | None:
    """Start fitting the gbm baseline on the cores that a GPU leaves idle; None where the training
    needs them itself, or where reading the data twice at once would slow it down."""
    is_idle = context.plan.device.type == "cuda" and machine.count_available_cores() > 1
    return start_boosting(context.dataset) if is_idle and context.dataset.memory else None


def _save_best(context: RunContext, fit: FitResult) -> tuple[list[FoldLanes], LaneResult]:
    """Write model/, the best lane of the last fold; return the lanes by fold, and the best one.

    A signal that has stopped training is raised here, and a fold without a model.
    """
    dataset, repeats = context.dataset, context.config.train.repeats
    groups = summary.group_by_fold(fit.lanes, dataset, repeats)
    best = summary.find_best_lane(groups[-1].fits)
    if best is not None:
        fitting.save_model(context.run, best.weights, dataset)
    if fit.signal_number:
        raise fitting.describe_interrupt(context, fit, best)
    summary.refuse_failed(context.config, groups)
    assert best is not None
    return groups, best


def _score_encoder(
    context: RunContext, best: LaneResult
) -> tuple[RunSummary, dict[str, SetDetail]]:
    """Score the rows that a pre-trained encoder fills in; return the summary and the detail."""
    with context.timer.time("scoring"):
        return masked.score_encoder(context, best.weights)


def _score_lanes(
    context: RunContext,
    groups: list[FoldLanes],
    baselines: list[BaselineSums],
    boosting: BackgroundBoosting | None,
) -> list[FoldSums]:
    """Score every lane and the baselines, and write the predictions."""
    with context.timer.time("scoring"):
        folds = summary.score_folds(context, groups)
    with context.timer.time("baselines"):
        return summary.score_fold_baselines(context, folds, baselines, boosting)


def _summarize_training(context: RunContext, fit: FitResult, best: LaneResult) -> TrainingSummary:
    """Return the summary of the training itself; `best` is the lane whose model the run deploys."""
    logged, several = list(runs.read_events(context.run)), context.config.trains_lanes
    progress, whole = best.progress, context.dataset.num_windows["train"]
    counts = [len(lane.lane.starts["train"]) if lane.lane.starts else whole for lane in fit.lanes]
    epochs = [lane.progress.epoch for lane in fit.lanes]
    result: TrainingSummary = {
        "steps": progress.step,
        "repeated_steps": sum(lane.progress.repeated for lane in fit.lanes),
        "epochs": progress.epoch,
        "best_epoch": progress.best_epoch,
        "stopped": best.stop_reason,
        "parameters": context.num_parameters,
        "windows_per_s": sum(map(operator.mul, epochs, counts)) / fit.train_s,
        "plan": context.plan.to_dict(),
        "monitor": summarize(logged),
        "estimate": compare_with_estimate(logged, steps=fit.steps, took_s=fit.train_s),
    }
    if several:
        result["pack"] = context.summarize_packing() | {"steps": fit.steps}
        result["estimate"]["planned_steps"] = None
    if "workers" in context.packing.workers:
        result["workers"] = context.packing.workers["workers"]
    if context.init is not None:
        result["init_from"] = context.init.summarize()
    return result


def _write_summary(
    context: RunContext, result: RunSummary, detail: Mapping[str, SetDetail]
) -> FinishedRun:
    """Write the summary, with the duration of the run and of its phases, from its first start."""
    run, dataset, spent_s = context.run, context.dataset, context.spent_s
    config = context.requested or context.config
    result["seconds"] = spent_s + time.perf_counter() - context.started_at
    result["seconds_by_phase"] = context.timer.seconds | _time_earlier_phases(context)
    if spent_s:
        result["seconds_before_resume"] = spent_s
    result["data"] = summarize_data(dataset, config)
    result["notes"] = [*result["notes"], *_describe_still_frozen(config, result["epochs"])]
    if not config.masked:
        advised = advice.advise(config, result)
        if advised is not None:
            result |= {"advice": advised, "notes": [*result["notes"], *advised["lines"]]}
    result |= cast(RunSummary, runs.describe_origin())
    result["time"] = _summarize_time(context)
    runs.write_metrics(run, result | {"detail": detail})
    run.append(End(seconds=result["seconds"]))
    return FinishedRun(run.folder, result)


def _describe_still_frozen(config: Config, epochs: float) -> list[str]:
    """Note that training ran out of time before the encoder's turn came."""
    train = config.train
    if train.init_from is None or not epochs <= train.freeze_epochs < train.max_epochs:
        return []
    return [
        f"the encoder stayed frozen: training ended in epoch {max(math.ceil(epochs), 1)}, and "
        f"train.freeze_epochs is {train.freeze_epochs}; lower it to fine-tune the encoder"
    ]


def _summarize_time(context: RunContext) -> dict[str, float]:
    """Return where the time went; the command adds the report's, once that is drawn."""
    saved, before = context.checkpoint, _time_earlier_phases(context)
    if saved and before:
        before |= dict(zip(FIT_PHASES, saved.metadata["seconds"], strict=True))
    return context.timer.summarize(before=before)


def _time_earlier_phases(context: RunContext) -> dict[str, float]:
    """Return the time before a resume that is in no phase: set-up, training and validation up to
    the checkpoint go on from there."""
    saved = context.checkpoint
    counted = sum(saved.metadata["seconds"]) if saved else 0.0
    return {EARLIER: max(context.spent_s - counted, 0.0)} if context.spent_s else {}


def train_or_resume(
    folder: Path, config: Config, data: Any, watch: Callable[[Event], None] | None
) -> RunSummary:
    """Return the summary of the run in `folder`; train it, or resume it, where it is not finished.

    A run of other settings is replaced.
    """
    if is_run_of(folder, config):
        if (folder / "metrics.json").exists():
            return runs.read_metrics(folder)
        return train(TrainRequest(None, data, resume=folder, watch=watch)).summary
    runs.remove(folder)
    return train(TrainRequest(config, data, folder=folder, watch=watch)).summary


def is_run_of(folder: Path, config: Config) -> bool:
    """Whether a folder is a run with these settings; where it is, how it is run and what is left to
    the data does not matter."""
    if not (folder / "config.toml").exists():
        return False
    ignored = {"name", "out", "data.path", "data.labels", "train.minutes"}
    ignored |= {"train.batch"} if config.train.batch == "auto" else set()
    ignored |= set(defaults.list_unset(config))
    changed = set(configs.list_differences(runs.load_config(Run(folder)), config)) - ignored
    return all(name.startswith("engine.") for name in changed)


def finish_trained(
    folder: Path,
    config: Config,
    data: LoadedData,
    trained: Mapping[int, TrainedLane],
    *,
    why: str,
    watch: Callable[[Event], None] | None,
    baselines: list[BaselineSums],
) -> RunSummary:
    """Create the run of a config whose lanes were trained elsewhere, `why` says where; score them,
    write everything and return the summary.

    `trained` has the lanes by their number in the run; lanes that are missing there are trained
    first. A run on the same data takes over and extends `baselines`.
    """
    began, text = time.perf_counter(), runs.format_config(config)
    saved = trained_lanes.make_checkpoint(config, data, trained, why)

    def fill(run: Run) -> None:
        run.origin["config"] = text
        trained_lanes.write_lanes(run, saved, trained)

    created = runs.create_locked(
        config.name,
        out=config.out,
        files={"config.toml": text},
        folder=folder,
        watch=watch,
        fill=fill,
    )
    with created as run, _keep_traceback(run):
        spent_s = sum(saved.metadata["seconds"])
        context = RunContext(
            replace(run, started_at=began - spent_s),
            config,
            data.dataset,
            Plan.from_dict(saved.metadata["plan"]),
            is_plan_final=True,
            content=data.fingerprint,
            init=data.init,
            checkpoint=saved,
            started_at=began,
            spent_s=spent_s,
        )
        return train_run(context, baselines=baselines).summary
