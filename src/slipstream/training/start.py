"""Train, pre-train or resume: from a config or an earlier run to a `FinishedRun`."""

from __future__ import annotations

import signal
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from torch import nn

from slipstream import config as configs
from slipstream import runs
from slipstream.base.errors import (
    Command,
    Interrupted,
    Option,
    ResumableError,
    StorageError,
    UserError,
)
from slipstream.base.phases import PhaseTimer
from slipstream.base.rank import RankPlace
from slipstream.base.run_names import ENSEMBLE_FILE, is_run
from slipstream.base.text import format_count
from slipstream.config import Config
from slipstream.engine import recovery
from slipstream.engine.parallel import LOST
from slipstream.engine.plan import Plan
from slipstream.models import custom
from slipstream.runs import DISK_FULL, Event, Run
from slipstream.runs.watching import start_follower
from slipstream.scoring.summary import BaselineSums
from slipstream.training import fitting, lanes, parallel, shares, single, trained_lanes
from slipstream.training.context import RunContext, RunStart, load_start
from slipstream.training.parallel import RankLeader, TrainingJob, follow
from slipstream.training.result import FinishedRun
from slipstream.training.resuming import Clock, NothingToTrainError, load_resumed
from slipstream.training.trained_lanes import LoadedData, TrainedLane
from slipstream.workers.resources import WorkerCount


def train(
    config: Config | str | Path | Mapping[str, Any] | None = None,
    data: Any = None,
    *,
    overrides: tuple[str, ...] = (),
    watch: Callable[[Event], None] | None = None,
    resume: str | Path | None = None,
    force: bool = False,
    folder: Path | None = None,
    model: type[nn.Module] | None = None,
    allow_code: bool = False,
    workers: WorkerCount | None = None,
    on: Literal["ray"] | None = None,
    timer: PhaseTimer | None = None,
    place: RankPlace | None = None,
) -> FinishedRun:
    """Train a model, or resume a run; `slipstream.train` documents the arguments.

    `watch` is called with every event as it is logged: a dict. `timer` has the time before. The
    summary of a finished run in `folder` is returned as it is. `place` is that of this process
    among those that train the model together, if it is one of several.
    """
    clock = timer or PhaseTimer(), time.perf_counter()
    if model is not None:
        overrides = (*overrides, f"model.kind={custom.format_class_path(model)}")
    named, is_open = resume, False
    if resume is None and folder is not None and is_run(folder):
        named, is_open = folder, True
    if config is None and named is None:
        raise UserError("there is neither a config nor a run to resume")
    job = TrainingJob(config, data, overrides, watch, named, folder)
    job = replace(job, force=force, allow_code=allow_code, may_be_finished=is_open)
    job = replace(job, workers=workers, on=on)
    if place is not None:
        return _train_together(job, place, clock)
    if job.count_processes() > 1:
        return _launch_ranks(job)
    return _train(job, clock)


def _launch_ranks(job: TrainingJob) -> FinishedRun:
    """Train one model in several processes, which this one starts."""
    settings = job.load_settings()
    job.permit_classes(settings)
    parallel.check_job(settings, job.data)
    shares.place_workers(job.workers, job.on, settings, job.data)  # refuses several
    return parallel.launch(job.describe_ranks(settings), job.watch)


def _train_together(job: TrainingJob, place: RankPlace, clock: Clock) -> FinishedRun:
    """Train with the other processes: the first one as if it were alone, the others with it."""
    parallel.check_size(job.count_processes(), place)
    if fitting.trains_lanes(job.load_settings()):
        raise UserError(
            f"torchrun has started {format_count(place.size, 'process')} for one model, and "
            "this run trains several (train.repeats, data.split.walk_forward), which are "
            "faster side by side: start it without torchrun, with " + Option("workers", place.size)
        )
    job = job.for_place(place)
    settings = job.load_settings()
    job.permit_classes(settings)
    with parallel.join_ranks(settings, place) as ranks:
        if not place.is_leader:
            return follow(settings, job.data, ranks, place)
        marked = None if job.resume else parallel.find_marked_run(place, settings)
        if marked is not None:
            job = replace(job, resume=marked, may_be_finished=True)
        result = _train(job, clock, RankLeader(ranks, place))
        ranks.share_text(str(result.run))
        return result


def _train(job: TrainingJob, clock: Clock, leader: RankLeader | None = None) -> FinishedRun:
    """Train or resume in this process."""
    timer, began = clock
    if job.resume is not None:
        earlier = replace(job.open_run(), started_at=began)
        job.permit_classes()
        _refuse_other_kinds(earlier)
        with runs.lock_run(earlier), _keep_traceback(earlier):
            try:
                return _run(load_resumed(earlier, job, clock, leader))
            except NothingToTrainError:
                if not job.may_be_finished:
                    raise
                return FinishedRun(earlier.folder, runs.read_metrics(earlier.folder), False)
    settings = job.load_settings()
    job.permit_classes(settings)
    placement = shares.place_workers(job.workers, job.on, settings, job.data)
    dataset, start = load_start(settings, job.data, timer)
    if leader is not None:
        parallel.check_dataset(settings, dataset)
    files = {"config.toml": runs.format_config(settings)}
    created = runs.create_locked(
        settings.name, out=settings.out, files=files, folder=job.folder, watch=job.watch
    )
    with created as run, _keep_traceback(run):
        run = replace(run, started_at=began)
        ranks = leader.open(run) if leader else None
        context = RunContext(run, settings, dataset, start, timer, began)
        return _run(replace(context, ranks=ranks, **placement._asdict()))


def pretrain(
    config: Config | str | Path | Mapping[str, Any] | None = None,
    data: Any = None,
    *,
    overrides: tuple[str, ...] = (),
    watch: Callable[[Event], None] | None = None,
    resume: str | Path | None = None,
    force: bool = False,
    folder: Path | None = None,
    timer: PhaseTimer | None = None,
    place: RankPlace | None = None,
) -> FinishedRun:
    """Pre-train an encoder; `slipstream.pretrain` documents the arguments."""
    if config is not None:
        config = configs.load(config, (*overrides, configs.PRETRAIN_OVERRIDE))
        overrides = ()
    elif resume is not None:
        earlier = runs.open_run(resume, kinds=("pretrain",))
        _refuse_other_kinds(earlier)
        if not runs.load_config(earlier).masked:
            raise UserError(
                f"{earlier.folder}: is not a pre-training run",
                fix="resume with: " + runs.suggest_resume(earlier.folder),
            )
        resume = earlier.folder
    options: dict[str, Any] = {"overrides": overrides, "resume": resume, "force": force}
    options |= {"place": place, "folder": folder, "timer": timer}
    return train(config, data, watch=watch, **options)


def train_or_resume(
    folder: Path, config: Config, data: Any, watch: Callable[[Event], None] | None
) -> dict[str, Any]:
    """Return the summary of the run in `folder`; train it, or resume it, where it is not finished.

    A run of other settings is replaced.
    """
    if is_run_of(folder, config):
        if (folder / "metrics.json").exists():
            return runs.read_metrics(folder)
        return train(None, data, resume=folder, watch=watch).summary
    runs.remove(folder)
    return train(config, data, folder=folder, watch=watch).summary


def finish_trained(
    folder: Path,
    config: Config,
    data: LoadedData,
    trained: Mapping[int, TrainedLane],
    *,
    why: str,
    watch: Callable[[Event], None] | None,
    baselines: list[BaselineSums],
) -> dict[str, Any]:
    """Create the run of a config whose lanes were trained elsewhere, `why` says where; score them,
    write everything and return the summary.

    `trained` has the lanes by their number in the run; lanes that are missing there are trained
    first. A run on the same data takes over and extends `baselines`.
    """
    began, timer, text = time.perf_counter(), PhaseTimer(), runs.format_config(config)
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
        run = replace(run, started_at=began - spent_s)
        plan = Plan.from_dict(saved.metadata["plan"])
        start = RunStart(data.fingerprint, plan, True, saved, data.init)
        context = RunContext(run, config, data.dataset, start, timer, began, spent_s, baselines)
        return _run(context).summary


def is_run_of(folder: Path, config: Config) -> bool:
    """Whether a folder is a run with these settings; where it is and how it is run does not
    matter."""
    if not (folder / "config.toml").exists():
        return False
    ignored = {"name", "out", "data.path", "data.labels", "train.minutes"}
    ignored |= {"train.batch"} if config.train.batch == "auto" else set()
    changed = set(configs.list_differences(runs.load_config(Run(folder)), config)) - ignored
    return all(name.startswith("engine.") for name in changed)


def _refuse_other_kinds(run: Run) -> None:
    """Raise a UserError for a run that is not one of training."""
    if (run.folder / ENSEMBLE_FILE).exists():
        raise UserError(f"{run.folder}: is an ensemble; there is nothing to train further")
    if any(event["event"] == "search" for event in runs.read_events(run)):
        raise UserError(
            f"{run.folder}: is a search; resume with: " + Command("tune", resume=run.folder)
        )


@recovery.explain_out_of_memory()
def _run(context: RunContext) -> FinishedRun:
    start_follower(context.run, context.config.follow)
    if context.config.masked:
        return single.train_encoder(context)
    if fitting.trains_lanes(context.config):
        several = context.num_workers > 1 or context.bundle is not None
        return shares.train_spread(context) if several else lanes.train_lanes(context)
    return single.train_single(context)


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
