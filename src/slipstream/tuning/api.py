"""From a config, or an earlier search, to the best settings and a model of them."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from optuna.exceptions import StorageInternalError
from torch import nn

from slipstream import config as configs
from slipstream import machine, runs
from slipstream.autotune.pack_size import MAX_LANES
from slipstream.config import Config
from slipstream.engine import monitor, recovery
from slipstream.errors import Interrupted, ResumableError, UserError
from slipstream.models import custom, permission
from slipstream.runs import Event, Run
from slipstream.tuning import sharing
from slipstream.tuning import space as spaces
from slipstream.tuning.packing.dataset_cache import DatasetCache
from slipstream.tuning.search import STATE_NAMES
from slipstream.tuning.study import TimedStudy, count_trials
from slipstream.tuning.summary import Study, finish_search
from slipstream.tuning.workers import launcher as crews
from slipstream.tuning.workers import worker
from slipstream.tuning.workers.launcher import Launcher

MIN_PARALLEL = 8
"""Trials at a time, if not told otherwise; on a CPU also the most, unless it has more cores"""


@recovery.explain_out_of_memory()
def tune(
    config: Config | str | Path | Mapping[str, Any] | None = None,
    data: Any = None,
    *,
    overrides: tuple[str, ...] = (),
    watch: Callable[[Event], None] | None = None,
    resume: str | Path | None = None,
    storage: str | None = None,
    workers: int | Literal["auto"] | None = None,
    on: Literal["ray"] | None = None,
    model: type[nn.Module] | None = None,
    allow_code: bool = False,
) -> Study:
    """Search for the settings with the lowest validation loss, and retrain the best ones.

    Optuna proposes the trials of `config.tune`; they train as lanes of one program. The best
    settings are retrained from fresh seeds and compared with `config` itself on the test set.

    Args:
        config: A TOML file, a mapping or a `Config`. It may be omitted with `resume`.
        data: A table to use instead of `data.path`.
        overrides: Settings that override `config`.
        watch: A function that is called with every event.
        resume: The folder of a search to continue: finished trials are kept, the others continue
            from their pack's checkpoint.
        storage: A database URL that several workers share (`sqlite:///...`, `postgresql://...`);
            defaults to the environment variable SLIPSTREAM_STORAGE, else to the run folder.
        workers: The number of processes, or "auto" for one per GPU; by default one, or as many as
            the resumed search had.
        on: "ray" starts the workers on a Ray cluster.
        model: Your own `torch.nn.Module` class, as for `train`.
        allow_code: Let a resumed search's config import the network class that it names.

    Returns:
        A `Study` with the best config, the summary and Optuna's own study.

    Raises:
        UserError: A setting, the data or an argument is wrong, or no trial reached a finite loss.
        Interrupted: Ctrl-C or SIGTERM stopped the search, after it saved its state.

    Example:
        study = slipstream.tune("job.toml", overrides=("tune.trials=50",))
        slipstream.train(study.best)
    """
    began = time.perf_counter()
    if model is not None:
        overrides = (*overrides, f"model.kind={custom.format_class_path(model)}")
    if resume is not None:
        run = runs.open_run(resume, watch)
        permission.require_permission(
            run.folder, config, overrides=overrides, allow_code=allow_code
        )
        was = runs.load_config(run)
        settings = configs.load(config or was, overrides)
        changed = [
            name
            for name in configs.list_differences(was, settings)
            if name not in sharing.MAY_DIFFER
        ]
        if changed:
            raise UserError(
                f"{run.folder}: cannot go on with other settings than it began with "
                f"({', '.join(changed)}); start a new search"
            )
        if any(event["event"] == "start" for event in runs.read_events(run)):  # no search says that
            raise UserError(
                f"{run.folder}: is a training run, not a search; go on with: slipstream train "
                f"--resume {run.folder}"
            )
    else:
        if config is None:
            raise UserError("there is neither a config nor a search to resume")
        settings = configs.load(config, overrides)
        permission.allow_classes(settings)
    check_config(settings)
    space = spaces.make_space(settings)
    going_on = None if resume is None else run
    crew = crews.make_launcher(
        settings, data, resumed=going_on, storage=storage, workers=workers, on=on
    )
    shelf = DatasetCache(settings, data)
    first = shelf.get(settings)  # whatever is wrong with the data is said before a folder is made
    if resume is None:
        files = {"config.toml": runs.format_config(settings)}
        run = runs.create_run(settings.name, out=settings.out, files=files, watch=watch)
    device = first.series.values.device
    parallel = count_parallel_trials(settings, device.type, crew.num_workers)
    with runs.lock_run(run), _resumable(run, crew):
        board = crew.open_study(run)
        if crew.storage is not None:
            sharing.join_study(board.study, settings, first.fingerprint)
        run.append(
            "search" if resume is None else "resume",
            run=str(run.folder),
            trials=count_trials(settings.tune, space),
            parallel=crew.num_workers * parallel,
            space=list(space),
            windows=first.dataset.num_windows,
            device=str(device),
            done=len(sharing.select_counted(board.get_trials(*STATE_NAMES))),
            **crew.describe(),
        )
        crews.check_logged(run)
        with monitor.Monitor(run, device, on=settings.engine.monitor), _counted(board, settings):
            searched = _searched(run, settings) or crew.run(
                run,
                board,
                shelf,
                parallel=parallel,
                spent_s=_spent(run),
                resumed=resume is not None,
            )
            return finish_search(
                run, settings, board, shelf, search_result=searched, started_at=began
            )


@contextmanager
def _counted(board: TimedStudy, settings: Config) -> Iterator[None]:
    """Say how far a search was when it was stopped."""
    try:
        yield
    except Interrupted as stop:
        done = len(sharing.select_counted(board.get_trials(*STATE_NAMES)))
        raise Interrupted(
            f"stopped with {done} of {settings.tune.trials} trials done",
            signal_number=stop.signal_number,
        ) from None


@contextmanager
def _resumable(run: Run, crew: Launcher) -> Iterator[None]:
    """Say how to go on with a search that had to stop, whatever stopped it."""
    go_on = f"go on with: slipstream tune --resume {run.folder}"
    go_on += "" if crew.storage is None else " --storage URL"
    try:
        yield
    except Interrupted as stop:
        raise Interrupted(f"{stop}; {go_on}", signal_number=stop.signal_number) from None
    except ResumableError as error:  # a run of the search says how it goes on by itself
        raise ResumableError(f"{_without_advice(str(error))}; {go_on}") from None
    except StorageInternalError as error:
        raise ResumableError(
            f"{worker.make_storage_error(crew.get_storage_url(run), error)}; {go_on}"
        ) from None
    except OSError as error:
        raise ResumableError(
            f"{run.folder}: the search had to stop ({error}); make room, or whatever else that "
            f"takes, and {go_on}"
        ) from None


def _without_advice(told: str) -> str:
    return re.sub(r";[^;]*go on with: .*", "", told, flags=re.DOTALL)


def check_config(settings: Config) -> None:
    """A UserError names what does not go with a search."""
    for name, found, fix in (
        ("train.repeats", settings.train.repeats > 1, "set tune.retrain_seeds instead"),
        ("train.minutes", settings.train.minutes is not None, "set tune.minutes instead"),
        ("train.batch", settings.train.batch == "auto", "a search needs a number"),
        (
            "train.objective",
            settings.masked,
            "pre-train first, then set train.init_from",
        ),
        ("augment.cache", settings.augment.cache > 0, "take it out"),
        ("engine.sync", settings.engine.sync, "take it out"),
    ):
        if found:
            raise UserError(f"{name} does not go with a search; {fix}")


def count_parallel_trials(settings: Config, device: str, workers: int = 1) -> int:
    """Trials that a worker has under way at a time: of all workers together half of all, so that
    the sampler knows how these went when it draws the others; of many trials, as many as a pack has
    places. A CPU trains more than it has cores hardly faster."""
    asked = settings.tune.parallel
    if asked != "auto":
        return -(-asked // workers)
    together = max(settings.tune.trials // 2, MIN_PARALLEL)
    most = MAX_LANES if device == "cuda" else max(MIN_PARALLEL, machine.count_available_cores())
    return min(-(-together // workers), most)


def _searched(run: Run, settings: Config) -> Event | None:
    """How the search ended, if there is nothing left to try; more can be asked for when it goes
    on."""
    wanted = worker.get_budget(settings)
    found = [
        event
        for event in runs.read_events(run)
        if event["event"] == "searched" and event.get("asked") == wanted
    ]
    whole = [event for event in found if {"seconds", "optuna_s", "packs"} <= event.keys()]
    return whole[-1] if whole else None


def _spent(run: Run) -> float:
    """Seconds that earlier parts of a search took."""
    found, last = 0.0, 0.0
    for event in runs.read_events(run):
        if event["event"] in ("search", "resume"):
            found, last = found + last, 0.0
        last = max(last, event["at_s"])
    return found
