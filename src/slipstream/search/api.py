"""`slipstream.tune`: from a config, or an interrupted search, to the best settings and a model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from optuna.exceptions import StorageInternalError

from slipstream import config as configs
from slipstream import runs
from slipstream.base import machine
from slipstream.base.errors import Interrupted, Message, Option, ResumableError, UserError
from slipstream.base.phases import PhaseTimer
from slipstream.base.rank import find_place
from slipstream.base.run_names import AUTO_FILE, is_run
from slipstream.base.text import mask_url
from slipstream.config import Config
from slipstream.config import search_space as spaces
from slipstream.data import defaults
from slipstream.engine import monitor, recovery
from slipstream.engine.planning import MAX_LANES
from slipstream.events import SearchEnd, SearchStart, Start
from slipstream.runs import Run, studies
from slipstream.runs.watching import start_follower
from slipstream.search import auto as autos
from slipstream.search import sharing
from slipstream.search.budget import SearchBudget
from slipstream.search.candidates import AutoBudget, AutoPlan, AutoSearch, prepare_auto
from slipstream.search.packs import DatasetCache, PackScheduler, TrialSource
from slipstream.search.portfolio import Prefer
from slipstream.search.retraining import fill_places
from slipstream.search.storage import STATE_NAMES
from slipstream.search.study import TimedStudy, count_trials
from slipstream.search.summary import FinishedSearch, finish_search
from slipstream.search.workers import (
    Launcher,
    check_logged,
    get_budget,
    make_launcher,
    make_storage_error,
)
from slipstream.training.request import RunRequest

DEFAULT_MINUTES = 5.0
"""Of `slipstream auto`"""
MIN_PARALLEL = 8
"""With `tune.parallel = "auto"` the least; on a CPU with fewer cores also the most"""


@dataclass(frozen=True, kw_only=True)
class SearchRequest(RunRequest):
    """A search, new or to be resumed; `slipstream.tune` documents the fields."""

    kinds: ClassVar[tuple[str, ...]] = ("search",)

    storage: str | None = None


@dataclass(frozen=True, kw_only=True)
class AutoRequest(SearchRequest):
    """A search for the best model; `slipstream.auto` documents the fields."""

    kinds: ClassVar[tuple[str, ...]] = ("auto",)

    minutes: float | None = None
    """None: five minutes, or those of the search to resume"""
    prefer: Prefer | None = None
    """None: the best, or that of the search to resume"""
    refit: bool = False
    """Of a search to resume: True adds it, and what was asked for before stays"""


def tune(*arguments: Any, **options: Any) -> FinishedSearch:
    """Search, from the fields of a `SearchRequest`: tune(config, data, workers=2)."""
    return run_search(SearchRequest(*arguments, **options))


@recovery.explain_out_of_memory()
def run_search(request: SearchRequest) -> FinishedSearch:
    """Search for the best settings; `slipstream.tune` documents the request."""
    data, timer = request.data, request.timer
    if find_place() is not None:
        raise UserError(
            "torchrun starts processes that train one model together, and each of them would "
            "make a search of its own: start it without torchrun, with " + Option("workers", "N")
        )
    if request.resume is None and request.folder is not None and is_run(request.folder):
        request = replace(request, resume=request.folder)
    run = None if request.resume is None else request.open_run()
    if run is not None:
        request.permit_classes()
        settings = _load_resumed_config(run, request)
        runs.require_data(run, settings, data, runs.SAME_ROWS)
    elif request.config is not None:
        settings = defaults.resolve(request.load_config(), data, measures=False).config
        request.permit_classes(settings)
    else:
        raise UserError("give a config, or a search to resume")
    plan: AutoPlan | None = None
    datasets: DatasetCache | None = None
    if run is not None:
        plan = AutoPlan.read(run.folder)
        if isinstance(request, AutoRequest) and plan is None:
            raise UserError(
                f"{run.folder}: is a search, not one of auto; resume with: "
                + studies.suggest_resume(run.folder, None)
            )
        wanted = request.prefer if isinstance(request, AutoRequest) else None
        if plan is not None and wanted not in (None, plan.prefer):
            raise UserError(
                Option("prefer") + f" is {wanted}, but the search was started with {plan.prefer}",
                fix="remove it, or start a new one",
            )
        if isinstance(request, AutoRequest) and plan is not None and request.refit:
            plan = replace(plan, refit=True)
    elif isinstance(request, AutoRequest):
        settings, plan, datasets = prepare_auto(
            settings,
            data,
            minutes=request.minutes or DEFAULT_MINUTES,
            prefer=request.prefer or "best",
            refit=request.refit,
        )
    spaces.check_config(settings)
    spaces.make_space(settings)  # report mistakes in the space first
    launcher = make_launcher(
        *(settings, data, run),
        storage=request.storage,
        workers=request.workers,
        on=request.on,
    )
    timer.end("start-up")
    datasets = datasets or DatasetCache(settings, data)
    datasets.get(settings)  # report problems with the data before a folder is created
    timer.end("data")
    if run is None:
        files = {"config.toml": runs.format_config(settings)}
        if plan is not None:
            files[AUTO_FILE] = plan.to_json()
        run = runs.create_run(
            settings.name,
            out=settings.out,
            files=files,
            folder=request.folder,
            watch=request.watch,
        )
    with runs.lock_run(run), _explain_resume(run, launcher):
        if plan is not None:
            runs.write_text(run.folder / AUTO_FILE, plan.to_json())
        start_follower(run, settings.follow)
        resumed = request.resume is not None
        return _search(run, launcher, datasets, timer, resumed=resumed, plan=plan)


def _refuse_fewer_minutes(run: Run, minutes: float, earlier: float | None) -> None:
    """Refuse to give a search of `slipstream auto` that has ended fewer minutes than it had."""
    is_finished = (run.folder / "metrics.json").exists() and not runs.read_metrics(run.folder).get(
        "interrupted"
    )
    if is_finished and earlier is not None and minutes < earlier:
        raise UserError(
            Option("minutes") + f" is {minutes:g}, but the search had {earlier:g} and has ended",
            fix=f"give it more than {earlier:g}, which is the time in all",
            setting="tune.minutes",
        )


def _load_resumed_config(run: Run, request: SearchRequest) -> Config:
    """Load the config of a resumed search; only the settings in `MAY_DIFFER` may have changed."""
    if runs.find_kind(run.folder) == "ensemble":
        raise UserError(f"{run.folder}: is an ensemble, not a search; there is nothing to resume")
    earlier = runs.load_config(run)
    settings = configs.load(request.config or earlier, request.settings)
    if isinstance(request, AutoRequest) and request.minutes is not None:
        _refuse_fewer_minutes(run, request.minutes, earlier.tune.minutes)
        settings = configs.replace_settings(settings, {"tune.minutes": request.minutes})
    settings = defaults.keep_resolved(settings, earlier, request.data)
    differences = configs.list_differences(earlier, settings)
    if changed := [name for name in differences if name not in sharing.MAY_DIFFER]:
        raise UserError(
            f"{run.folder}: cannot resume with changed settings ({', '.join(changed)}); start a "
            "new search"
        )
    is_logged = any(isinstance(event, Start) for event in runs.read_events(run))
    if is_logged or (run.folder / "model").exists():  # an export of a run has no log
        raise UserError(
            f"{run.folder}: is a training run, not a search",
            fix="resume with: " + runs.suggest_resume(run.folder),
        )
    return settings


def _search(
    run: Run,
    launcher: Launcher,
    datasets: DatasetCache,
    timer: PhaseTimer,
    *,
    resumed: bool,
    plan: AutoPlan | None,
) -> FinishedSearch:
    """Run the trials, unless an earlier part of the search has finished them, and conclude."""
    config, data = launcher.config, datasets.get(launcher.config)
    device = data.series.values.device
    parallel = count_parallel_trials(config, device.type, launcher.num_workers)
    study = launcher.open_study(run, enqueue_given=plan is None)
    if launcher.storage is not None:
        sharing.join_study(study.study, config, data.fingerprint)
    budget_class = SearchBudget if plan is None else AutoBudget
    budget = budget_class.of(config, runs.sum_parts(run), timer.started_at)
    run.append(
        SearchStart(
            is_resumed=resumed,
            run=str(run.folder),
            trials=count_trials(config.tune, study.space),
            parallel=launcher.num_workers * parallel,
            space=list(study.space),
            windows=data.dataset.num_windows,
            device=str(device),
            done=_count_done(study),
            minutes=config.tune.minutes,
            left_s=None if config.tune.minutes is None else budget.total_s - budget.elapsed_s,
            workers=launcher.num_workers,  # a resumed search has the same workers
            on=launcher.cluster,
            storage=launcher.storage and mask_url(launcher.storage),
        )
    )
    check_logged(run)
    search = launcher.make_search(run, study, datasets, budget, plan)
    source: TrialSource = search
    if launcher.is_alone and plan is None:
        source = fill_places(search, device.type)
    scheduler = PackScheduler(run, datasets, source, parallel=parallel)
    try:
        with monitor.Monitor(run, device, on=config.engine.monitor):
            result = _find_result(run, config)
            if isinstance(search, AutoSearch):
                return autos.run_auto(search, scheduler, launcher, result, timer, resumed=resumed)
            result = result or launcher.run(search, scheduler, resumed=resumed)
            timer.end("searching")
            return finish_search(search, scheduler, result, timer)
    except Interrupted as stop:
        of_all = "" if plan is not None else f" of {config.tune.trials}"
        message = f"stopped with {_count_done(study)}{of_all} trials done"
        raise Interrupted(message, signal_number=stop.signal_number) from None
    finally:
        scheduler.close()


def _count_done(study: TimedStudy) -> int:
    return len(sharing.select_counted(study.get_trials(*STATE_NAMES)))


@contextmanager
def _explain_resume(run: Run, launcher: Launcher) -> Iterator[None]:
    """Add the command that resumes the search to whatever error stopped it."""
    fix = "resume with: " + studies.suggest_resume(run.folder, launcher.storage)
    try:
        yield
    except Interrupted as stop:
        raise Interrupted(stop.reason, signal_number=stop.signal_number, fix=fix) from None
    except ResumableError as error:
        message = error.reason  # a test run's fix is for itself alone
    except StorageInternalError as error:
        message = make_storage_error(launcher.get_storage_url(run), error).message
    except OSError as error:
        message = Message(f"{run.folder}: the search had to stop ({error})")
        fix = "free some space, or correct what else failed, and " + fix
    else:
        return
    raise ResumableError(message, fix=fix)


def count_parallel_trials(config: Config, device: str, num_workers: int = 1) -> int:
    """Return how many trials each worker trains at the same time.

    All workers together train half of the trials, so that the sampler knows their results when it
    samples the other half; a worker trains at most as many as fit into a pack. A CPU is hardly
    faster with more trials than cores.
    """
    requested = config.tune.parallel
    if requested != "auto":
        return -(-requested // num_workers)
    half = max(config.tune.trials // 2, MIN_PARALLEL)
    most = MAX_LANES if device == "cuda" else max(MIN_PARALLEL, machine.count_available_cores())
    return min(-(-half // num_workers), most)


def _find_result(run: Run, config: Config) -> SearchEnd | None:
    """Return the result of an earlier part that used up the budget; a resume may raise that."""
    budget = get_budget(config)
    for event in reversed(list(runs.read_events(run))):
        if isinstance(event, SearchEnd) and event.limits == budget:
            is_complete = event.optuna_s is not None and event.packs is not None
            if is_complete:  # else an earlier version has logged it
                return event
    return None
