"""Train, pre-train or resume: from a config or an earlier run to a `FinishedRun`."""

from __future__ import annotations

import signal
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from slipstream import config as configs
from slipstream import runs
from slipstream.autotune.rules import make_plan
from slipstream.config import Config
from slipstream.data.dataset import Dataset
from slipstream.engine import checkpoint, recovery
from slipstream.engine.checkpoint import Checkpoint
from slipstream.engine.plan import Plan
from slipstream.engine.progress import Progress, parse_progress
from slipstream.errors import Interrupted, ResumableError, UserError
from slipstream.models import custom, permission
from slipstream.phases import PhaseTimer
from slipstream.run_names import ENSEMBLE_FILE
from slipstream.runs import DISK_FULL, Event, Run
from slipstream.runs.following import start_follower
from slipstream.scoring.summary import BaselineSums
from slipstream.text import format_count
from slipstream.training import fitting, lanes, single, trained_lanes
from slipstream.training.context import RunContext, RunStart, load_dataset
from slipstream.training.result import FinishedRun
from slipstream.training.trained_lanes import LoadedData, TrainedLane


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
    timer: PhaseTimer | None = None,
) -> FinishedRun:
    """Train a model, or resume a run; `slipstream.train` documents the arguments.

    `watch` is called with every event as it is logged: a dict. `timer` has the time before.
    """
    began, timer = time.perf_counter(), timer or PhaseTimer()
    if model is not None:
        overrides = (*overrides, f"model.kind={custom.format_class_path(model)}")
    if resume is not None:
        earlier = runs.open_run(resume, watch, kinds=("train", "pretrain"))
        earlier = replace(earlier, started_at=began)
        permission.require_permission(
            earlier.folder, config, overrides=overrides, allow_code=allow_code
        )
        if (earlier.folder / ENSEMBLE_FILE).exists():
            raise UserError(f"{earlier.folder}: is an ensemble; there is nothing to train further")
        if any(event["event"] == "search" for event in runs.read_events(earlier)):
            raise UserError(
                f"{earlier.folder}: is a search; resume with: slipstream tune --resume "
                f"{earlier.folder}"
            )
        with runs.lock_run(earlier), _keep_traceback(earlier):
            return _resume(earlier, config, overrides, data, force, (timer, began))
    if config is None:
        raise UserError("there is neither a config nor a run to resume")
    settings = configs.load(config, overrides)
    permission.allow_classes(settings)
    dataset, start = _load(settings, data, timer)
    files = {"config.toml": runs.format_config(settings)}
    created = runs.create_locked(
        settings.name, out=settings.out, files=files, folder=folder, watch=watch
    )
    with created as run, _keep_traceback(run):
        run = replace(run, started_at=began)
        return _run(RunContext(run, settings, dataset, start, timer, began))


def pretrain(
    config: Config | str | Path | Mapping[str, Any] | None = None,
    data: Any = None,
    *,
    overrides: tuple[str, ...] = (),
    watch: Callable[[Event], None] | None = None,
    resume: str | Path | None = None,
    force: bool = False,
    timer: PhaseTimer | None = None,
) -> FinishedRun:
    """Pre-train an encoder; `slipstream.pretrain` documents the arguments."""
    if config is not None:
        config = configs.load(config, (*overrides, configs.PRETRAIN_OVERRIDE))
        overrides = ()
    elif resume is not None:
        earlier = runs.open_run(resume, kinds=("pretrain",))
        if not runs.load_config(earlier).masked:
            raise UserError(
                f"{earlier.folder}: is not a pre-training run; resume with: slipstream train "
                f"--resume {earlier.folder}"
            )
        resume = earlier.folder
    options: dict[str, Any] = {"overrides": overrides, "resume": resume, "force": force}
    return train(config, data, watch=watch, timer=timer, **options)


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


@recovery.explain_out_of_memory()
def _run(context: RunContext) -> FinishedRun:
    start_follower(context.run, context.config.follow)
    if context.config.masked:
        return single.train_encoder(context)
    if fitting.trains_lanes(context.config):
        return lanes.train_lanes(context)
    return single.train_single(context)


def _load(settings: Config, data: Any, timer: PhaseTimer) -> tuple[Dataset, RunStart]:
    """Load the windows and make the rules-of-thumb plan."""
    timer.end("start-up")
    with timer.time("data"):
        init, dataset = load_dataset(settings, data)
        fingerprint = dataset.compute_fingerprint()
    streamed = dataset.stream is not None
    with timer.time("plan"):
        plan = make_plan(settings, data_bytes=dataset.data_bytes, streamed=streamed)
    return dataset, RunStart(fingerprint, plan, init=init)


def _resume(
    run: Run,
    config: Config | str | Path | Mapping[str, Any] | None,
    overrides: tuple[str, ...],
    data: Any,
    force: bool,
    clock: tuple[PhaseTimer, float],
) -> FinishedRun:
    """Continue a run; `clock` is its timer, and when `train` was called."""
    timer, began = clock
    saved, wrong = _read_newest(run)
    was = runs.load_config(run, origin=saved.metadata if saved else None)
    settings = configs.load(was if config is None else config, overrides)
    if settings.train.batch == "auto" and was.train.batch != "auto":  # measured when it began
        settings = configs.replace_settings(settings, {"train.batch": was.train.batch})
    changed = _refuse_changes(run, was, settings, force)
    at = _describe_start(run, settings, saved)
    dataset, start = _load(settings, data, timer)
    spent_s = runs.sum_parts(run)
    if saved is None:
        runs.truncate_log(run, 0)
        run.append("resume", **at, differs="", spent_s=spent_s)
        return _run(RunContext(run, settings, dataset, start, timer, began, spent_s))
    if start.fingerprint != saved.metadata["data"] and not force:
        raise UserError(
            f"{run.folder}: the data are not those that it began with; start a new run, or pass "
            "--force"
        )
    now, then = start.plan, Plan.from_dict(saved.metadata["plan"])
    runs.truncate_log(run, saved.metadata["log_bytes"])
    for problem in wrong:
        run.append("fallback", what="an older checkpoint is used", why=problem)
    differs = _describe_differences(then, now, changed)
    run.append("resume", **at, differs=differs, spent_s=spent_s)
    keep = then.device == now.device and not changed
    start = replace(start, plan=then if keep else now, plan_is_final=keep, checkpoint=saved)
    return _run(RunContext(run, settings, dataset, start, timer, began, spent_s))


def _read_newest(run: Run) -> tuple[Checkpoint | None, list[str]]:
    """Return the newest checkpoint, None if the run has written none yet, and what is wrong with
    later ones."""
    had_one = any(event["event"] == "checkpoint" for event in runs.read_events(run))
    if checkpoint.list_steps(run) or had_one or (run.folder / "metrics.json").exists():
        return checkpoint.read_newest(run)
    return None, []


def _describe_start(run: Run, config: Config, saved: Checkpoint | None) -> dict[str, Any]:
    """Return what a resumed run logs of its start; raise a UserError if nothing is left to do."""
    finished = saved is not None and (run.folder / "metrics.json").exists()
    entries = saved.metadata["lanes"] if saved else []
    if fitting.trains_lanes(config):
        ended = fitting.count_ended(saved.metadata, config) if saved else 0
        num_lanes = saved.metadata["pack"]["lanes"] if saved else 0
        if finished and ended == num_lanes:
            raise UserError(
                f"{run.folder}: is finished, with all lanes done; to train them further, raise "
                "train.epochs, or train.patience"
            )
        lanes = f"{ended} of {num_lanes} lanes done" if saved else "no lane done"
        return {"step": saved.step if saved else 0, "lanes": lanes}
    progress = parse_progress(entries[0]["progress"]) if entries else Progress()
    if (
        finished
        and progress.epochs >= config.train.epochs
        and progress.find_stop_reason(config.train)
    ):
        raise UserError(
            f"{run.folder}: is finished, after {format_count(progress.epochs, 'epoch')}; to train "
            "it further, "
            "raise train.epochs"
        )
    return {"step": progress.step, "epoch": progress.epoch}


def _refuse_changes(run: Run, was: Config, config: Config, force: bool) -> list[str]:
    """Return the settings that have changed and matter; raise a UserError if they may not."""
    several = fitting.trains_lanes(was) or fitting.trains_lanes(config)
    differences = configs.list_differences(was, config)
    changed = [name for name in differences if name not in runs.CHANGEABLE_ON_RESUME]
    if changed and (several or not force):
        way_out = "start a new run" if several else "start a new run, or pass --force"
        raise UserError(
            f"{run.folder}: cannot be resumed with other settings than it began with "
            f"({', '.join(changed)}); {way_out}"
        )
    return changed


def _describe_differences(then: Plan, now: Plan, changed: list[str]) -> str:
    """Return why the resumed run may differ from an uninterrupted one; empty if it cannot."""
    differences = [f"{name} was changed" for name in changed]
    if then.device.type != now.device.type:
        differences.append(f"{now.device.type} instead of {then.device.type}")
    differences += [
        f"{key} {now.hardware.get(key)} instead of {then.hardware.get(key)}"
        for key in ("gpu", "cpu", "torch")
        if then.hardware.get(key) != now.hardware.get(key)
    ]
    return "; ".join(differences)


@contextmanager
def _keep_traceback(run: Run) -> Iterator[None]:
    """Write the traceback of an internal error into the run folder; the run can be resumed."""
    try:
        yield
    except KeyboardInterrupt:  # before or after training, which ends by itself
        raise Interrupted(
            f"interrupted; resume with: slipstream train --resume {run.folder}",
            signal_number=int(signal.SIGINT),
        ) from None
    except (UserError, Interrupted, ResumableError):
        raise
    except OSError as error:
        room = "make room and " if error.errno in DISK_FULL else ""
        raise ResumableError(
            f"the run had to stop: {error}; {room}resume with: slipstream train --resume "
            f"{run.folder}"
        ) from error
    except Exception:
        with suppress(OSError):
            runs.write_text(run.folder / "crash.txt", traceback.format_exc())
        raise
