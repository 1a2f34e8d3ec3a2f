"""A run whose lanes are divided into shares, each trained by a worker of its own.

From top to bottom: what one worker does (`ShareTask`, `train_share`), its events as events of the
run (`EventRelay`), and the run that starts the workers and joins their results (`train_spread`).
"""

from __future__ import annotations

import errno
import json
import os
import time
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, TypeVar, get_args

from torch import Tensor

from slipstream import config as configs
from slipstream import runs
from slipstream.base.errors import (
    ExplainedError,
    Interrupted,
    Option,
    ResumableError,
    Text,
    UserError,
)
from slipstream.base.phases import PhaseTimer
from slipstream.base.storage import read_verified
from slipstream.config import Config
from slipstream.data import defaults
from slipstream.engine import checkpoint, loop
from slipstream.engine.checkpoint import Checkpoint
from slipstream.engine.context import RunContext, resolve_settings
from slipstream.engine.events import LaneEvents
from slipstream.engine.lanes import (
    INTERRUPTED,
    FitResult,
    Lane,
    LaneResult,
    Progress,
    parse_progress,
)
from slipstream.engine.plan import PackChoice, Plan
from slipstream.engine.recovery import explain_out_of_memory
from slipstream.events import (
    CheckpointSaved,
    CopiesOnDisk,
    EncoderLoaded,
    EncoderThawed,
    Epoch,
    Event,
    Exploit,
    Fallback,
    LaneEnd,
    Log,
    MachineSample,
    Recovery,
    Start,
    ThreadsReviewed,
    Trouble,
    WorkerChange,
)
from slipstream.models import custom
from slipstream.runs import Run
from slipstream.runs.folder import RESULT
from slipstream.scoring import summary
from slipstream.training import division as divisions
from slipstream.training import fitting
from slipstream.training.division import Division, get_share, read_newest
from slipstream.training.fitting import MeasuredBatch
from slipstream.workers import ray, resources
from slipstream.workers.child import Send, WorkerTask
from slipstream.workers.launcher import LocalWorkers, RestartRules, Workers, run_workers
from slipstream.workers.resources import Bundle, WorkerCount

FACTS, WEIGHTS = "result.json", "weights.safetensors"
"""The files of a share's result"""
LaneEvent = Log | Epoch | Exploit | LaneEnd | Recovery
"""Events of single lanes"""
WorkerEvent = Fallback | EncoderThawed | ThreadsReviewed | CopiesOnDisk
"""Events of the worker of a share"""
FEWER = "; fewer processes at a time (" + Option("workers") + ") need less as well"
EventKey = tuple[Any, ...]
"""Tells an event from others"""
EventT = TypeVar("EventT", bound=Event)


@dataclass(frozen=True)
class ShareTask(WorkerTask):
    """One share, by its folder and number: what a worker is started with."""

    cluster_events: ClassVar = (
        *(*get_args(LaneEvent), *get_args(WorkerEvent)),
        *(Start, EncoderLoaded, MachineSample, Trouble, CheckpointSaved),
    )
    config_toml: str
    """The config of the whole run"""
    lanes: list[int]
    """The lanes of the share, by their numbers in the run"""
    fingerprint: str
    """Of the run's data"""

    def run(self, send: Send) -> None:
        with explain_out_of_memory(FEWER):
            train_share(self, send)


@dataclass(frozen=True)
class ShareResult:
    """The result of a share, once all of its lanes have ended."""

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
        context = fitting.load_context(config, None, timer, run=run)
        if context.fingerprint != task.fingerprint:
            raise UserError(
                "the data are not those that the run began with; they must not change while it "
                "trains"
            )
        context = _resume(replace(context, started_at=began))
        with fitting.build_monitor(context) as monitor:
            context = fitting.prepare_model(context)
            context = fitting.plan_lanes(context, task.lanes)
            with context.plan.flags():
                fitting.announce(context)
                fit = loop.fit_lanes(context, fitting.make_events(context, monitor))
            context = fitting.record_training(context, fit)
        if fit.signal_number:
            raise Interrupted("stopped", signal_number=fit.signal_number)
        _check_saved(run, fit)
        _write_result(context, fit, task.lanes)


def _resume(context: RunContext) -> RunContext:
    """Return the context with the newest checkpoint of the share, if it has one."""
    run = context.run
    saved, wrong = read_newest(run)
    runs.truncate_log(run, saved.metadata["log_bytes"] if saved else 0)
    if saved is None:
        return context
    for problem in wrong:
        run.append(Fallback(what="an older checkpoint is used", why=problem))
    plan = Plan.from_dict(saved.metadata["plan"])
    if plan.device.type != context.plan.device.type:
        return replace(context, checkpoint=saved)
    threads = context.config.engine.threads
    if threads != "auto":
        plan = replace(plan, threads=threads)
    return replace(context, plan=plan, is_plan_final=True, checkpoint=saved)


def _check_saved(run: Run, fit: FitResult) -> None:
    """Raise an OSError if the last state is not on disk: that is only a warning in training, but
    the lanes of a share may have to go on from there."""
    if fit.steps not in checkpoint.list_steps(run):
        run.checkpoints.mkdir(exist_ok=True)  # raises any other reason than a full disk
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(run.checkpoints))


def _write_result(context: RunContext, fit: FitResult, numbers: Sequence[int]) -> None:
    facts = context.summarize_packing() | {
        "plan": context.plan.to_dict(),
        "limit": fit.limit,
        "steps": fit.steps,
        "seconds": [fit.setup_s, fit.train_s, fit.validate_s],
        "results": [
            {
                "number": numbers[lane.number],
                "progress": asdict(lane.progress),
                "stopped": lane.stop_reason,
            }
            for lane in fit.lanes
        ],
    }
    weights = {
        f"{numbers[lane.number]}/{name}": weight.detach().to("cpu", copy=True).contiguous()
        for lane in fit.lanes
        for name, weight in lane.weights.items()
    }
    tensors = {WEIGHTS: weights} if weights else {}
    checkpoint.write_folder(context.run.folder / RESULT, tensors, {FACTS: facts})


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


class EventRelay:
    """Logs the events of shares in the run, and remembers how each of them trains."""

    def __init__(self, run: Run, division: Division, done: Iterable[int] = ()) -> None:
        """`done`: the shares that were trained before."""
        self.run, self.division = run, division
        self._num_done = sum(len(division.shares[share]) for share in done)
        self.starts: dict[int, Start] = {}
        """By share: how it trains"""
        self._known = {key for event in runs.read_events(run) for key in _list_keys(event)}
        self._is_announced = False

    def add(self, share: int, event: Event) -> None:
        """Log an event of a share, or show it, unless that was done before."""
        match event:
            case Start():
                self._start(share, event)
            case Log() | Epoch() | Exploit() | LaneEnd() | Recovery():
                renumbered = renumber(event, self.division.shares[share])
                self._add_new(replace(renumbered, worker=share))
                if isinstance(event, Epoch) and share == 0:
                    self._show_predictions()
            case Fallback() | EncoderThawed() | ThreadsReviewed() | CopiesOnDisk():
                self._add_new(replace(event, worker=share))
            case EncoderLoaded():  # the same for all
                self._add_new(event)
            case MachineSample():
                self.run.append(replace(event, worker=share))
            case Trouble():
                self.run.warn(event.what)

    def announce(self) -> None:
        """Announce a run whose shares were trained by others, if its log has no start yet."""
        if any(isinstance(event, Start) for event in runs.read_events(self.run)):
            return
        for share in range(len(self.division.shares)):
            for event in runs.read_events(get_share(self.run, share)):
                if isinstance(event, Start):
                    self._start(share, event)
                    return

    def _show_predictions(self) -> None:
        """Have whoever looks at the run see what a model of the first share predicts."""
        share = get_share(self.run, 0).folder
        if not runs.is_watched(self.run.folder):
            return
        runs.mark_watched(share)
        if (share / runs.PREVIEW).exists():
            preview = runs.read_json(share / runs.PREVIEW)
            preview["lane"] = self.division.shares[0][preview["lane"]]
            runs.write_preview(self.run.folder, preview)

    def _add_new(self, event: Event) -> None:
        left = drop_known(event, self._known)
        if left is not None:
            self._known |= set(_list_keys(left))
            self.run.append(left)

    def _start(self, share: int, event: Start) -> None:
        """Announce the run as soon as one share knows its plan, with the lanes of all."""
        self.starts[share] = event
        if self._is_announced:
            return
        self._is_announced = True
        shares, pack = self.division.shares, event.pack
        assert pack is not None, "a share trains lanes"
        most = pack["places"] if pack["places"] < pack["lanes"] else self.division.num_lanes
        pack = pack | {
            "lanes": self.division.num_lanes,
            "places": sum(min(len(share_lanes), most) for share_lanes in shares),
            "done": self.division.num_lanes - sum(map(len, shares)) + self._num_done + pack["done"],
            "workers": len(shares),
            "shares": shares,
        }
        if self.division.on is not None:
            pack["on"] = self.division.on
        plan = self.division.complete_plan(event.plan)
        threads = {"threads": f"for each of {len(shares)} workers"}
        plan = plan | {"reasons": plan["reasons"] | threads}
        runs.write_json(self.run.folder / "plan.json", plan | {"pack": pack})
        self.run.append(replace(event, run=str(self.run.folder), pack=pack, plan=plan))


def renumber(event: EventT, numbers: Sequence[int]) -> EventT:
    """Return an event of a share with the numbers that its lanes have in the run."""
    match event:
        case Log(losses=dict(losses)):
            renumbered = {numbers[lane]: loss for lane, loss in losses.items()}
            return replace(event, losses=renumbered)
        case (
            Epoch(lane=int(lane))
            | Exploit(lane=int(lane))
            | LaneEnd(lane=int(lane))
            | Recovery(lane=int(lane))
        ):
            return replace(event, lane=numbers[lane])
    return event


def _list_keys(event: Event) -> list[EventKey]:
    """Return the keys that tell an event from others; of logged losses, one key for each lane."""
    kind = type(event)
    match event:
        case Log(step=step, losses=dict(losses)):
            return [(kind, lane, step) for lane in losses]
        case Recovery(lane=int(lane), step=step, remedy=remedy):
            return [(kind, lane, step, remedy)]
        case (
            Epoch(lane=int(lane), step=step)
            | Exploit(lane=int(lane), step=step)
            | LaneEnd(lane=int(lane), step=step)
        ):
            return [(kind, lane, step)]
        case EncoderLoaded():
            return [(kind,)]
        case Recovery(worker=int(worker)):
            return [(kind, worker, event.what, event.why, event.remedy)]
        case Fallback(worker=int(worker)):
            return [(kind, worker, event.what, event.why)]
        case EncoderThawed(worker=int(worker)) | CopiesOnDisk(worker=int(worker)):
            return [(kind, worker, event.what)]
        case (
            Log(worker=int(worker))
            | Epoch(worker=int(worker))
            | Exploit(worker=int(worker))
            | LaneEnd(worker=int(worker))
            | ThreadsReviewed(worker=int(worker))
        ):
            return [(kind, worker)]
    return []


def drop_known(event: Event, known: set[EventKey]) -> Event | None:
    """Return an event without the losses that are known; None where nothing is left."""
    new = [key for key in _list_keys(event) if key not in known]
    if not new:
        return None
    if not isinstance(event, Log) or event.losses is None:
        return event
    lanes = {lane for _, lane, _ in new}
    losses = {lane: loss for lane, loss in event.losses.items() if lane in lanes}
    return replace(event, losses=losses)


def rebuild_log(run: Run, division: Division, saved: Iterable[tuple[int, int]]) -> None:
    """Give the run's log what its shares have logged up to their checkpoints, no more and no less.

    `saved` has the length of each share's log there. The run may have heard less, if it was killed
    before its workers, or more, if a worker was killed after it had sent it.
    """
    events: list[Event] = []
    for share, log_bytes in saved:
        of_share = get_share(run, share)
        runs.truncate_log(of_share, log_bytes)
        numbers = division.shares[share]
        events += [
            replace(renumber(event, numbers), worker=share)
            for event in runs.read_events(of_share)
            if isinstance(event, LaneEvent)
        ]
    right = {key for event in events for key in _list_keys(event)}
    head, tail = split_log(run, division.log_bytes)
    retained, known = [], {key for event in head for key in _list_keys(event)}
    for event in tail:
        keys = _list_keys(event)
        is_of_lanes = isinstance(event, LaneEvent) and bool(keys)
        if is_of_lanes and not set(keys) <= right:
            left = drop_known(event, set(keys) - right)
            if left is None:
                continue
            event = left
        known |= set(_list_keys(event))
        retained.append(event)
    at_s = max((event.at_s or 0.0 for event in retained), default=0.0)
    for event in events:
        missing = drop_known(event, known)
        if missing is not None:
            known |= set(_list_keys(missing))
            retained.append(replace(missing, at_s=at_s))
    if retained != tail:
        with runs.replace_atomically(run.log) as temporary:
            for event in (*head, *retained):
                runs.add_event(temporary, event)


def split_log(run: Run, size: int) -> tuple[list[Event], list[Event]]:
    """Return the events in the first bytes of a log, and those after them."""
    try:
        content = run.log.read_bytes()
    except FileNotFoundError:
        return [], []
    parts = (content[:size], content[size:])
    parsed = [[runs.parse_line(line) for line in part.split(b"\n")[:-1]] for part in parts]
    head, tail = ([event for event in part if event is not None] for part in parsed)
    return head, tail


class Placement(NamedTuple):
    """Where a run trains."""

    num_workers: int
    bundle: Bundle | None = None
    """The resources of a Ray cluster that each worker gets"""


def place_workers(
    requested: WorkerCount | None, on: Literal["ray"] | None, config: Config, data: Any
) -> Placement:
    """Return how many workers train a run, and where; raise a UserError for what is not
    possible."""
    if on is None:
        return Placement(count_workers(requested, config, data))
    requested = "auto" if requested is None else requested
    resources.check_count(requested)
    if not config.trains_lanes:
        task = "pre-trains one encoder" if config.masked else "trains one model"
        raise UserError(
            Option("on", "ray")
            + " divides the models of train.repeats and data.split.walk_forward among workers, "
            f"but this run {task}; to train it on a node of the cluster, submit the whole "
            "command as a job of Ray (ray job submit)"
        )
    resources.check_config(config, data)
    nodes = ray.list_nodes()
    num_workers = resources.count_ray_workers(requested, nodes, config.engine.device)
    return Placement(num_workers, resources.choose_bundle(num_workers, nodes, config.engine.device))


def count_workers(requested: WorkerCount | None, config: Config, data: Any) -> int:
    """Return the number of processes that train a run; raise a UserError for what is not
    possible."""
    if requested is None:
        return 1
    resources.check_count(requested)
    num_workers = resources.count_workers(requested, config)
    if num_workers == 1 or (requested == "auto" and not config.trains_lanes):
        return 1
    check_divisible(config, Option("workers", requested))
    resources.check_config(config, data)
    return num_workers


def check_divisible(config: Config, option: Option) -> None:
    """Raise a UserError where there is one model only."""
    if not config.trains_lanes:
        task = "pre-trains one encoder" if config.masked else "trains one model"
        raise UserError(
            option + " divides the models of train.repeats and data.split.walk_forward, but this "
            f"run {task}"
        )


@dataclass(frozen=True)
class Spread:
    """A run whose lanes are spread over workers."""

    context: RunContext
    lanes: list[Lane]
    division: Division
    waited_s: float = 0.0
    """The time that the workers took, their start included"""

    @property
    def run(self) -> Run:
        return self.context.run

    def make_tasks(self) -> list[ShareTask]:
        """Return the task of every share."""
        config = resources.split_cores(self.context.config, len(self.division.shares))
        text = configs.to_toml(config)
        return [
            ShareTask(
                folder=str(get_share(self.run, index).folder),
                index=index,
                config_toml=text,
                lanes=numbers,
                fingerprint=self.context.fingerprint,
            )
            for index, numbers in enumerate(self.division.shares)
        ]

    def read_results(self) -> dict[int, ShareResult]:
        """Return the results of the shares that are done."""
        folders = [get_share(self.run, i).folder for i in range(len(self.division.shares))]
        results = {index: read_result(folder) for index, folder in enumerate(folders)}
        return {index: result for index, result in results.items() if result is not None}


class ShareReporter:
    """Logs in the run what happens to its shares."""

    def __init__(self, run: Run, relay: EventRelay) -> None:
        self.run, self.relay = run, relay

    def add(self, worker: int, event: Event) -> None:
        self.relay.add(worker, event)

    def log(self, slot: int, task: WorkerTask, what: str, **values: Any) -> None:
        if what != "died":
            values["lanes"] = self.relay.division.shares[task.index]
        self.run.append(WorkerChange(worker=slot, what=what, **values))


def train_in_processes(context: RunContext, tasks: Sequence[ShareTask], relay: EventRelay) -> None:
    """Train shares in processes on this machine, one on each GPU at a time."""
    envs = resources.assign_gpus(context.config, context.num_workers)
    run_local_shares(context.run, tasks, envs[: len(tasks)], relay)


def run_local_shares(
    run: Run, tasks: Sequence[ShareTask], envs: Sequence[Mapping[str, str]], relay: EventRelay
) -> None:
    """Train shares in processes with these environments; a share whose worker dies again and again
    is taken over by another one when it is free."""
    rules = RestartRules(
        progress=(CheckpointSaved,),
        given_up="its models are left to the others",
        hands_over=True,
        stops_together=True,
    )
    _run_shares(run, LocalWorkers(envs), tasks, rules, relay)


def train_on_ray(context: RunContext, tasks: Sequence[ShareTask], relay: EventRelay) -> None:
    """Train shares as tasks of the run's cluster."""
    bundle = context.bundle
    assert bundle is not None
    text = configs.to_toml(bundle.limit_threads(context.config))
    tasks = [replace(task, config_toml=text) for task in tasks]
    rules = RestartRules(progress=(CheckpointSaved,), given_up="its models are left unfinished")
    workers = ray.RayWorkers(context.run, tasks, bundle)
    _run_shares(context.run, workers, tasks, rules, relay)


def _run_shares(
    run: Run,
    opened: AbstractContextManager[Workers],
    tasks: Sequence[ShareTask],
    rules: RestartRules,
    relay: EventRelay,
) -> None:
    """Train the shares to their end; raise what ended them early."""
    fix = "resume with: " + runs.suggest_resume(run.folder)
    try:
        with opened as workers:
            outcomes = run_workers(workers, tasks, rules, ShareReporter(run, relay))
    except ResumableError as error:
        raise suggest(error, fix) from None
    if died := [outcome.reason for outcome in outcomes.values() if outcome.kind != "done"]:
        subject = "every worker" if rules.hands_over else "a worker"
        raise ResumableError(f"{subject} died again and again ({died[-1]})", fix=fix)


TrainTasks = Callable[[RunContext, Sequence[ShareTask], EventRelay], None]


def train_spread(context: RunContext, train_tasks: TrainTasks | None = None) -> Spread | None:
    """Train the lanes of a run in several processes; None where all of them had ended before.

    `train_tasks` has every task trained by `train_share`, somewhere, and its events sent to
    the relay; by default in processes on this machine, or on the run's cluster.
    """
    if train_tasks is None:
        train_tasks = train_in_processes if context.bundle is None else train_on_ray
    context, batch = _choose_batch(context)
    all_lanes = _build_lanes(context)
    division = divisions.read_division(context.run) or _divide(context, all_lanes, batch)
    if not division.shares:
        return None
    spread = Spread(context, all_lanes, division)
    done = spread.read_results()
    relay = EventRelay(context.run, division, done)
    tasks = [task for task in spread.make_tasks() if task.index not in done]
    started_at = time.perf_counter()
    if tasks:
        try:
            train_tasks(context, tasks, relay)
        except Interrupted as stop:
            raise _describe_interrupt(spread, stop) from None
        context.timer.end("training")
    return replace(spread, waited_s=time.perf_counter() - started_at)


def divide_run(context: RunContext) -> None:
    """Divide the lanes of a new run, whose shares others train."""
    context, batch = _choose_batch(context)
    _divide(context, _build_lanes(context), batch)


def _choose_batch(context: RunContext) -> tuple[RunContext, MeasuredBatch | None]:
    """Measure the batch size where it is left to that, since all lanes need the same one; write the
    config."""
    batch = None
    if context.config.train.batch == "auto":
        config, batch = fitting.measure_batch(context)
        context = replace(context, config=config, requested=context.config)
    fitting.write_config(context)
    fitting.record_data(context)
    runs.remove_manifest(context.run)
    return context, batch


def _build_lanes(context: RunContext) -> list[Lane]:
    settings = resolve_settings(context.config, context.dataset)
    return fitting.build_lanes(settings, context.dataset, context.init_weights)


def _divide(context: RunContext, all_lanes: list[Lane], batch: MeasuredBatch | None) -> Division:
    """Divide the lanes that have not ended, and write the checkpoints that their shares begin
    with."""
    run, saved = context.run, context.checkpoint
    divisions.forget_shares(run)
    costs = {number: _count_windows(context, lane) for number, lane in enumerate(all_lanes)}
    if saved is not None:
        for number in fitting.list_ended(saved.metadata, context.config):
            del costs[number]
    shares = divisions.divide_lanes(costs, context.num_workers)
    on: Literal["ray"] | None = None if context.bundle is None else "ray"
    fingerprint, log_bytes = context.fingerprint, runs.get_log_size(run)
    division = Division(context.num_workers, shares, len(all_lanes), log_bytes, on, fingerprint)
    division = replace(
        division,
        batch=None if batch is None else batch._asdict(),
        settings=defaults.to_plain(context.choices),
    )
    for index, numbers in enumerate(shares):
        share = get_share(run, index)
        share.folder.mkdir(parents=True)
        if saved is not None:
            checkpoint.write_checkpoint(share, divisions.select_lanes(saved, numbers, all_lanes))
    if shares:
        divisions.write_division(run, division)
    return division


def _count_windows(context: RunContext, lane: Lane) -> int:
    starts = lane.starts.get("train")
    return context.dataset.num_windows["train"] if starts is None else len(starts)


def read_merged(run: Run) -> Checkpoint | None:
    """Return what a run and its shares have saved, as one checkpoint; None where nothing is."""
    division = divisions.read_division(run)
    assert division is not None
    base, _ = divisions.read_newest(run)
    return divisions.merge_shares(division, base, divisions.read_shares(run, division))


def take_up(context: RunContext, division: Division, *, changed: bool) -> RunContext:
    """Have a resumed run go on with its shares, if the number of workers is the same; else join
    them, so that the lanes can be divided anew or trained here.

    `changed`: whether settings differ, so that shares that have ended may go on.
    """
    run = context.run
    shares = divisions.read_shares(run, division)
    saved = {index: share.metadata["log_bytes"] for index, share in shares.items()}
    lengths = [(index, saved.get(index, 0)) for index in range(len(division.shares))]
    EventRelay(run, division).announce()
    rebuild_log(run, division, lengths)
    if changed:
        for index in range(len(division.shares)):
            remove_result(get_share(run, index).folder)
    if context.num_workers == division.workers and (context.bundle is None) == (
        division.on is None
    ):
        return context
    merged = context.checkpoint
    if merged is not None:
        fitting.write_config(context)
        fitting.record_data(context)
        merged = divisions.fit_capacity(divisions.refuse_mixed(merged), _build_lanes(context))
        merged.metadata["log_bytes"] = runs.get_log_size(run)
        checkpoint.write_checkpoint(run, merged)
    divisions.forget_shares(run)
    return replace(context, checkpoint=merged)


def _describe_interrupt(spread: Spread, stop: Interrupted) -> Interrupted:
    """Save the best model so far and return the error to raise."""
    context, merged = spread.context, read_merged(spread.run)
    results = []
    if merged is not None:
        merged = divisions.fit_capacity(merged, spread.lanes)
        results = divisions.read_lanes(merged, spread.lanes, context.dataset.signature)
    for result in results:
        result.stop_reason = result.stop_reason or INTERRUPTED
    repeats = context.config.train.repeats
    groups = summary.group_by_fold(results, context.dataset, repeats)
    best = summary.find_best_lane(groups[-1].fits)
    if best is not None:
        fitting.save_model(context.run, best.weights, context.dataset)
    plan, number = context.plan, stop.signal_number
    fit = FitResult(results, plan, {}, 0, 0, number, 0.0, 0.0, 0.0)
    return fitting.describe_interrupt(replace(context, lanes=spread.lanes), fit, best)


def join_results(spread: Spread) -> tuple[RunContext, FitResult]:
    """Join the results of all shares, to be scored and written as those of one process."""
    context, run = spread.context, spread.run
    results = spread.read_results()
    merged = divisions.fit_capacity(_require_merged(run), spread.lanes)
    plan = Plan.from_dict(merged.metadata["plan"])
    if plan.device.type != context.plan.device.type:  # of another machine
        plan = context.plan
    prepared = fitting.prepare_model(
        replace(context, plan=plan, is_plan_final=True, checkpoint=merged)
    )
    fit = _join_fits(spread, merged, results, prepared.plan)
    _save_merged(run, merged)
    LaneEvents(run).end(fit)
    _count_seconds(context, fit, spread.waited_s)
    packing = _describe_packing(spread, results)
    # the time before a resume is that of the checkpoint which this run went on from
    return replace(
        prepared, checkpoint=context.checkpoint, lanes=spread.lanes, packing=packing
    ), fit


def forget(spread: Spread) -> None:
    """Remove the folders of the shares, once the run has all that was in them."""
    divisions.forget_shares(spread.run)


def _save_merged(run: Run, merged: Checkpoint) -> None:
    """Write the checkpoint that the run can be trained further from."""
    if merged.metadata.get(divisions.MIXED):
        why = "some workers trained several models at a time, others one after another"
        run.append(Fallback(what="the models cannot be trained further", why=why))
        return
    merged.metadata["log_bytes"] = runs.get_log_size(run)
    checkpoint.write_checkpoint(run, merged)


def _count_seconds(context: RunContext, fit: FitResult, waited_s: float) -> None:
    """Count the time of the workers; what is not set-up, training or validation was their start."""
    fitting.count_seconds(context, fit)
    saved = context.checkpoint
    before_s = sum(saved.metadata["seconds"]) if saved else 0.0
    fitted_s = fit.setup_s + fit.train_s + fit.validate_s - before_s
    context.timer.move({"start-up": max(waited_s - fitted_s, 0.0)}, source="training")


def _require_merged(run: Run) -> Checkpoint:
    merged = read_merged(run)
    assert merged is not None, "every share has written its last checkpoint"
    return merged


def _join_fits(
    spread: Spread, merged: Checkpoint, results: dict[int, ShareResult], plan: Plan
) -> FitResult:
    """Return the results of all lanes; those in no share had ended before."""
    signature = spread.context.dataset.signature
    divided = {number for share in spread.division.shares for number in share}
    before = divisions.read_lanes(merged, spread.lanes, signature)
    joined = [result for result in before if result.number not in divided]
    for result in results.values():
        for number, (progress, stopped) in result.progress.items():
            weights = result.weights.get(number, {})
            lane = spread.lanes[number]
            joined.append(LaneResult(number, lane, progress, weights, stop_reason=stopped))
    for trained in joined:
        on_device = {name: weight.to(plan.device) for name, weight in trained.weights.items()}
        trained.weights = on_device
    joined.sort(key=lambda trained: trained.number)
    facts = [share.facts for share in results.values()]
    seconds = (max(parts) for parts in zip(*(fact["seconds"] for fact in facts), strict=True))
    steps = max(fact["steps"] for fact in facts)
    return FitResult(joined, plan, {}, merged.metadata["limit"], steps, 0, *seconds)


def _describe_packing(spread: Spread, results: dict[int, ShareResult]) -> PackChoice:
    """Return how the lanes were trained, with what each worker ran."""
    facts = [result.facts for _, result in sorted(results.items())]
    shares = [
        {"lanes": numbers} | {key: fact[key] for key in ("mode", "places", "why", "plan", "steps")}
        for numbers, fact in zip(spread.division.shares, facts, strict=True)
    ]
    places = sum(fact["places"] for fact in facts)
    first = facts[0]
    more = {"workers": len(shares), "shares": shares}
    return PackChoice(first["mode"], places, first["evidence"], first["why"], more)
