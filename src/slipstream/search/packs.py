"""Trials as lanes: which share a pack, and how packs are filled and trained."""

from __future__ import annotations

import json
import math
import statistics
import time
import traceback
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from slipstream import config as configs
from slipstream import runs
from slipstream.base.errors import Interrupted, ResumableError, UserError
from slipstream.base.signals import StopRequest, catch_signals
from slipstream.config import Config, Model
from slipstream.data import windows
from slipstream.data.dataset import Dataset
from slipstream.data.folds import Fold
from slipstream.data.windows import Series
from slipstream.engine import checkpoint, planning, recovery
from slipstream.engine import state as states
from slipstream.engine.checkpoint import Checkpoint
from slipstream.engine.context import EncoderMatch, resolve_settings
from slipstream.engine.events import LaneEvents
from slipstream.engine.lanes import Lane, LanePolicy, LaneResult
from slipstream.engine.loop import RoundIterator, TrainingLoop
from slipstream.engine.pack import (
    MAY_DIFFER,
    LaneMode,
    Pack,
    PackCapacity,
    check_capacity,
    compute_capacity,
    parse_capacity,
)
from slipstream.engine.plan import Plan
from slipstream.engine.planning import MAX_LANES, make_plan
from slipstream.engine.state import EndedLane, TrainingState
from slipstream.engine.step import Round
from slipstream.events import (
    Epoch,
    Event,
    Exploit,
    Fallback,
    LaneEnd,
    PackStart,
    Recovery,
    TrainingEnd,
)
from slipstream.runs import Run
from slipstream.training import trained_lanes
from slipstream.training.fitting import load_dataset
from slipstream.training.trained_lanes import TrainedLane

NOT_STARTED = "not started: tune.minutes left no time for it"


@dataclass(frozen=True)
class FoldResult:
    """The result of one lane."""

    loss: float
    """The lowest validation loss"""
    best_epoch: float
    epochs: float
    steps: int
    stopped: str


@dataclass(eq=False)
class TrialRun:
    """A trial that trains."""

    number: int
    config: Config
    num_folds: int = 1
    is_final: bool = False
    """The result is already known, so what still trains does not count"""
    stop_reason: str = ""
    """Set once the trial has to stop"""
    started_at: float = field(default_factory=time.perf_counter)
    val_losses: dict[int, dict[int, float]] = field(default_factory=dict)
    """Validation losses by epoch and fold"""
    fold_results: dict[int, FoldResult] = field(default_factory=dict)
    weights: dict[str, Tensor] = field(default_factory=dict)
    """The best weights of the last fold"""
    shapes: dict[str, Any] = field(default_factory=dict)
    """The shape of its pack, by device"""
    keeps_lane: bool = False
    """Whether a run is to be made from its lane"""
    trained: TrainedLane | None = None
    """The lane, once it has ended"""
    num_failures: int = 0
    """Packs that failed with this trial"""

    def copy_untrained(self) -> TrialRun:
        empty: dict[str, Any] = {"val_losses": {}, "fold_results": {}, "weights": {}}
        return replace(self, stop_reason="", trained=None, **empty)

    def record_validation(self, epoch: int, fold: int, loss: float) -> float | None:
        """Return the mean over the folds once every fold has validated this epoch."""
        losses = self.val_losses.setdefault(epoch, {})
        losses[fold] = loss
        return statistics.fmean(losses.values()) if len(losses) == self.num_folds else None

    @property
    def incomplete_epochs(self) -> dict[int, dict[int, float]]:
        """The validation losses of epochs that some folds have not reached yet."""
        return {epoch: row for epoch, row in self.val_losses.items() if len(row) < self.num_folds}

    def finish_fold(self, fold: int, result: LaneResult) -> bool:
        """Record the end of a lane; return whether it was the last one."""
        p = result.progress
        values = (p.best_loss, p.best_epoch, p.epoch, p.step)
        self.fold_results[fold] = FoldResult(*values, result.stop_reason)
        if fold == self.num_folds - 1:
            self.weights = result.weights
        return len(self.fold_results) == self.num_folds

    @property
    def score(self) -> float:
        """The mean of the folds' lowest validation losses; infinite until all folds have ended."""
        if len(self.fold_results) < self.num_folds:
            return math.inf
        return statistics.fmean(result.loss for result in self.fold_results.values())

    def summarize(self) -> dict[str, Any]:
        results = list(self.fold_results.values())
        return {
            "epochs": max((result.epochs for result in results), default=0.0),
            "steps": sum(result.steps for result in results),
            "best_epoch": statistics.fmean([result.best_epoch for result in results] or [0.0]),
            "seconds": time.perf_counter() - self.started_at,
            "stopped": "; ".join(sorted({result.stopped for result in results})),
        }


@dataclass(frozen=True, eq=False)
class TrialLane(Lane):
    """A lane that trains one fold of a trial."""

    trial: TrialRun
    fold: int

    @property
    def owner(self) -> tuple[int, int]:
        """The number of the trial, and the fold."""
        return self.trial.number, self.fold


class TrialSource(Protocol):
    """Proposes trials and receives their results: the search, or the retraining after it."""

    def ask(self) -> TrialRun | None:
        """Return the next trial, or None if there is none at the moment."""

    def reopen(self, number: int) -> TrialRun:
        """Return a trial that was proposed before; `is_final` if its result is known."""

    def report(self, trial: TrialRun, epoch: int, loss: float) -> str:
        """Take the mean validation loss of an epoch; return why the trial has to stop, or ""."""
        return ""

    def finish_fold(self, trial: TrialRun, fold: int, ended: LaneResult, data: TrialData) -> None:
        """Take the result of one fold, with its lane and the data that it was trained on."""
        return

    def finish(self, trial: TrialRun) -> None:
        """Take the result of a trial whose folds have all ended."""

    def fail(self, trial: TrialRun, reason: str) -> None:
        """Record that a trial could not be trained."""

    def record_setup(self, seconds: float) -> None:
        """Take the seconds that building a pack's program has taken, until its first round."""
        return

    def is_over(self) -> bool:
        """Whether no further trial may start."""
        return False

    def wants_lane(self, trial: TrialRun, fold: int, loss: float) -> bool:
        """Whether a run may be made from the lane of a fold, whose lowest loss this is."""
        return trial.keeps_lane

    def find_cut(self, costs: PackCosts | None = None) -> str:
        """Return why all that trains, or a pack of these costs, has to stop at once; empty while it
        may go on."""
        return ""

    def is_worth_validating(self, train_s: float, validate_s: float) -> bool:
        """Whether what was cut off after so long, before its first validation, gets one that takes
        `validate_s`."""
        return True

    def fill_place(self, fits: Callable[[TrialRun], bool]) -> TrialRun | None:
        """Return a trial that fits into a place which would stay empty; None without one."""
        return None

    def list_extremes(self, config: Config) -> Sequence[Config]:
        """List variants of `config` that later trials of the same pack may need memory for."""
        return ()


class PackCosts(NamedTuple):
    """What a pack takes, as far as its steps have shown."""

    trials: Sequence[TrialRun]
    validate_s: float
    """To validate all of it; 0 while its steps are few"""
    epoch_s: float
    """For an epoch of all of it; 0 while its steps are few"""


class TrialPool:
    """At most `parallel` trials that wait or train, and what is retrained beside them."""

    def __init__(self, source: TrialSource, *, parallel: int) -> None:
        self.source, self.parallel = source, parallel
        self.waiting: list[TrialRun] = []
        self.running: list[TrialRun] = []
        self.is_exhausted = False
        """The source had no trial when it was last asked"""

    def fill(self) -> None:
        """Ask for trials until `parallel` of them wait or train."""
        while trial := self._ask():
            self.waiting.append(trial)

    def _ask(self) -> TrialRun | None:
        if sum(not trial.keeps_lane for trial in (*self.waiting, *self.running)) >= self.parallel:
            return None
        trial = self.source.ask()
        self.is_exhausted = trial is None
        return trial

    def drop_waiting(self) -> None:
        """Record the waiting trials as not started."""
        for trial in self.waiting:
            self.source.fail(trial, NOT_STARTED)
        self.waiting = []

    def start(self, trials: Sequence[TrialRun]) -> None:
        """Move trials to the running ones."""
        self.waiting = [trial for trial in self.waiting if trial not in trials]
        self.running += trials

    def start_fitting(self, fits: Callable[[TrialRun], bool]) -> TrialRun | None:
        """Start the first waiting trial that fits, or a new one; new ones that do not fit wait.

        What is retrained forms packs of its own, or fills places that would stay empty while no
        trial waits.
        """
        if self.source.is_over():
            return None
        trials = [trial for trial in self.waiting if not trial.keeps_lane]
        trial = next(filter(fits, trials), None)
        while trial is None and (new := self._ask()):
            if not new.keeps_lane and fits(new):
                trial = new
            else:
                self.waiting.append(new)
        if trial is None and not any(not waiting.keeps_lane for waiting in self.waiting):
            trial = self.source.fill_place(fits)
        if trial is not None:
            self.start([trial])
        return trial

    def finish(self, trial: TrialRun) -> None:
        """Remove a trial whose folds have all ended, and report it unless its result is known."""
        self.running.remove(trial)
        if not trial.is_final:
            self.source.finish(trial)
        trial.weights, trial.trained = {}, None

    def withdraw(self, trials: Sequence[TrialRun]) -> list[TrialRun]:
        """Remove those of the trials that are running, and return them."""
        withdrawn = [trial for trial in self.running if trial in trials]
        self.running = [trial for trial in self.running if trial not in withdrawn]
        return withdrawn


MAX_DATASETS = 8
Starts = dict[str, Tensor]
"""The first rows of the windows, by set ("train", "val")"""


@dataclass(frozen=True)
class TrialData:
    """The data of one `[data]` section on the device, with the windows of every fold."""

    dataset: Dataset
    series: Series
    """One copy per fold, scaled by the training rows of that fold; that of the split comes first"""
    folds: tuple[Starts, ...]
    """The training and validation windows of each fold; test windows are in none"""
    first_fold: Starts
    """The windows of the first fold, in the copy of the split"""
    fingerprint: str
    encoder: EncoderMatch | None
    """The pre-trained encoder that models start from, if there is one"""
    first_rows: tuple[int, ...] = (0,)
    """By fold: the first row of its copy of the series"""

    @property
    def init(self) -> Mapping[str, Tensor]:
        """The weights of the encoder"""
        return self.encoder.weights if self.encoder else {}

    def select_folds(self, num_folds: int) -> TrialData:
        """Return the data for trials of so many folds: all, or the split itself for one."""
        if num_folds == len(self.folds):
            return self
        (*_, split) = self.folds
        return replace(self, folds=(split,), first_fold=split, first_rows=(0,))

    def make_plan(self, config: Config) -> tuple[Plan, LaneMode]:
        """Plan a pack of models with this config."""
        data_bytes = len(self.folds) * self.dataset.data_bytes
        plan = make_plan(config, data_bytes=data_bytes, lanes=True)
        mode, _ = planning.choose_mode(config, self.dataset.signature, plan)
        return planning.adapt_plan_to_pack(plan, mode), mode

    def resolve_settings(self, config: Config) -> Config:
        """Resolve what depends on the data; class weights from the training windows of the first
        fold: all folds of a pack share them, and the first must not use labels of later ones."""
        return resolve_settings(config, self.dataset.select_fold(Fold("", self.first_fold)))


class DatasetCache:
    """The most recently used data, by what a config requests."""

    def __init__(self, config: Config, table: Any = None, *, whole: bool = False) -> None:
        self.config, self.table, self.whole = config, table, whole
        """`whole`: the rows of all sets train, and there is one fold"""
        self._cache: OrderedDict[str, TrialData] = OrderedDict()

    def get(self, config: Config) -> TrialData:
        key = f"{config.data.model_dump_json()} {config.train.loss} {config.train.quantiles}"
        if key not in self._cache:
            self._cache[key] = self._load(config)
        self._cache.move_to_end(key)
        if len(self._cache) > MAX_DATASETS:
            self._cache.popitem(last=False)
        return self._cache[key]

    def _load(self, config: Config) -> TrialData:
        if config.model.spec.is_fitted:  # there is no plan for training it
            config = config.model_copy(update={"model": Model(kind="linear")})
        num_folds = 1 if self.whole else self.config.tune.folds or 1
        init, dataset = load_dataset(config, self.table, num_folds=num_folds, whole=self.whole)
        plan = make_plan(config, data_bytes=num_folds * dataset.data_bytes, lanes=True)
        if dataset.memory is None or plan.home != "device":
            raise UserError(
                "a search keeps one copy of the series per fold on the device, but the plan puts "
                f"the data elsewhere ({plan.home}: {plan.reasons['home']}); leave engine.home "
                "unset, use less data, or lower tune.folds"
            )
        memory, earlier = dataset.memory, dataset.search_folds
        # the first fold of a walk-forward split: the later ones are test data
        starts = dataset.folds[0].starts if dataset.folds else memory.starts
        last = {name: starts[name] for name in ("train", "val")}
        copies = [memory.series, *(fold.series for fold in earlier)]
        series, first_rows = windows.concatenate_series(copies)
        shifted = [
            {name: first + rows for name, first in fold.starts.items()}
            for fold, rows in zip(earlier, first_rows[1:], strict=True)
        ]
        return TrialData(
            replace(dataset, search_folds=()),
            series.to(plan.device),
            (*shifted, last),
            earlier[0].starts if earlier else last,
            dataset.compute_fingerprint(),
            init,
            (*first_rows[1:], 0),
        )


ON_CHIP = 128
"""Hidden units whose weights fit into one processor of a GPU"""
FLOOR_MS = {"cuda": (3e-3, 4e-5), "cpu": (0.0, 0.0)}
"""The minimum time of a step per context row and layer: a constant, and a part per hidden unit"""
OVERLAP = 0.5
"""The part of it that remains when other packs train at the same time"""
FLOPS_PER_MS = {"cuda": 1.5e11, "cpu": 2e7}
"""Throughput of lanes that fill the device. Measured on an H200, as are the constants above."""


MAX_WASTE = 2.0
"""Computations of a trial in a pack of another shape, as a multiple of its own"""


class PackShape(NamedTuple):
    """The program, batch size and layer widths of a pack."""

    program: str
    """Every setting that the lanes of a pack share, as JSON"""
    batch: int
    widths: tuple[int, ...]

    def merge(self, shape: PackShape) -> PackShape | None:
        """Return the smallest shape into which lanes of both fit, or None if there is none."""
        if self.program != shape.program or len(self.widths) != len(shape.widths):
            return None
        widths = tuple(map(max, self.widths, shape.widths))
        return PackShape(self.program, max(self.batch, shape.batch), widths)


def get_pack_shape(config: Config, device: str) -> PackShape:
    common: dict[str, Any] = {}
    for section, values in config.model_dump(exclude={"tune"}).items():
        if isinstance(values, dict):
            common |= {f"{section}.{key}": value for key, value in values.items()}
        else:
            common[section] = values
    common = {name: value for name, value in common.items() if name not in MAY_DIFFER}
    widths = config.model.sizes
    if not config.model.can_pad:
        common["model.hidden"] = widths
    elif config.model.spec.has_hidden:
        widths = tuple(_round_width(width, device) for width in widths)
    batch = config.train.batch
    assert batch != "auto"
    return PackShape(json.dumps(common, sort_keys=True, default=str), batch, widths)


def get_trial_shape(trial: TrialRun, device: str) -> PackShape:
    """Return the shape of a pack for this trial alone, computed once: it is compared often."""
    if device not in trial.shapes:
        trial.shapes[device] = get_pack_shape(trial.config, device)
    shape: PackShape = trial.shapes[device]
    return shape


def _round_width(width: int, device: str) -> int:
    """Round up to a power of two, as the kernels do anyway; on a CPU also to three quarters of one,
    and on a GPU to multiples of 64 where the weights do not fit on one processor."""
    if device == "cuda" and width > ON_CHIP:
        return -(-width // 64) * 64
    power = max(16, 1 << (width - 1).bit_length())
    return power * 3 // 4 if device == "cpu" and width <= power * 3 // 4 else power


def can_join(trial: TrialRun, pack: PackShape, device: str) -> bool:
    """Whether a trial of another shape may take a place that is empty in a running pack on a GPU,
    which costs at most `MAX_WASTE` times as much as a pack of its own shape."""
    trial_shape = get_trial_shape(trial, device)
    if device != "cuda" or trial_shape.merge(pack) != pack:
        return False
    return (
        _count_flops(pack) * pack.batch <= MAX_WASTE * _count_flops(trial_shape) * trial_shape.batch
    )


@dataclass
class TrialGroup:
    """Trials that train as one pack."""

    shape: PackShape
    trials: list[TrialRun]


def group_trials(waiting: Sequence[TrialRun], device: str, num_windows: int) -> list[TrialGroup]:
    """Group all trials, that of the given config first, then the largest; `num_windows` is the
    length of an epoch."""
    exact: dict[PackShape, TrialGroup] = {}
    for trial in waiting:
        shape = get_trial_shape(trial, device)
        exact.setdefault(shape, TrialGroup(shape, [])).trials.append(trial)
    groups = list(exact.values())
    while merged := _merge_best(groups, device, num_windows):
        groups = merged

    def rank(group: TrialGroup) -> tuple[bool, int]:
        # the given config, which is trial 0, does not wait: the time may end with the first pack
        return min(trial.number for trial in group.trials) > 0, -len(group.trials)

    return sorted(groups, key=rank)


def _merge_best(groups: list[TrialGroup], device: str, num_windows: int) -> list[TrialGroup]:
    """Merge the two groups whose union saves most time; return [] if no union saves any."""
    best_saving: float = 0.0
    best_merge: list[TrialGroup] = []
    costs = [_estimate_ms(group, device, num_windows) for group in groups]
    for i, group in enumerate(groups):
        for j, earlier in enumerate(groups[:i]):
            shape = group.shape.merge(earlier.shape)
            if shape is None:
                continue
            union = TrialGroup(shape, [*earlier.trials, *group.trials])
            saving = costs[i] + costs[j] - _estimate_ms(union, device, num_windows)
            if saving > best_saving:
                unmerged = [kept for kept in groups if kept not in (group, earlier)]
                best_saving, best_merge = saving, [*unmerged, union]
    return best_merge


def _estimate_ms(group: TrialGroup, device: str, num_windows: int) -> float:
    """Estimate the time that one epoch of every trial takes in one pack."""
    config = group.trials[0].config
    rows = config.data.context // config.model.patch
    constant, per_unit = FLOOR_MS[device]
    floor = OVERLAP * rows * sum(constant + per_unit * width for width in group.shape.widths)
    lane = 3 * _count_flops(group.shape) * rows * group.shape.batch / FLOPS_PER_MS[device]
    steps_left = sorted(-(-num_windows // int(trial.config.train.batch)) for trial in group.trials)
    total, done = 0.0, 0
    for ended, steps in enumerate(steps_left):  # a pack gets cheaper as its lanes end
        total += (steps - done) * (floor + lane * (len(steps_left) - ended))
        done = steps
    return total


def _count_flops(shape: PackShape) -> int:
    """Count the operations of a recurrent forward pass, per row and window."""
    before, flops = 16, 0
    for width in shape.widths:
        flops += 8 * width * (before + width)
        before = width
    return flops


ALREADY_KNOWN = "its result is already known"
FORWARD_SHARE = 0.5
"""Of the time that a window takes in training, for its forward pass; a third of the arithmetic, but
validations are less even"""
MIN_STEPS, MIN_STEPS_S = 10, 5.0
"""Steps from which on their time tells what others take: the first is slower; fewer steps that took
so many seconds do as well"""


class TrialPack:
    """Trains trials as lanes of one program; `run` is its folder, `search_run` that of the search.

    Call `start` or `resume`, then `advance` until it returns False.
    """

    def __init__(self, pool: TrialPool, datasets: DatasetCache, run: Run, search_run: Run) -> None:
        self.pool, self.datasets, self.search_run = pool, datasets, search_run
        self.run = replace(run, watch=self._forward_event)
        self.shapes: list[PackShape] = []
        """The shape of the pack, then those of its trials: only trials of these may join"""
        self.trials: list[TrialRun] = []
        self.num_lanes = 0
        self.memory_limit: int | None = None
        """Lanes that fit into memory at a time, where all did not"""
        self.data: TrialData
        self.plan: Plan
        self.capacity: PackCapacity
        self.state: TrainingState | None = None
        self.rounds: RoundIterator | None = None
        self.stream: torch.cuda.Stream | None = None
        self.round: Round | None = None
        """The round that the device works on"""
        self.queue: deque[TrialLane] = deque()
        """Lanes of started trials that wait for a place"""
        self.lane_owners: list[tuple[int, int]] = []
        """Trial number and fold of each lane, in the order in which the lanes started"""
        self.lane_starts: list[tuple[float, float]] = []
        """The seconds of training and validation of the pack before each lane"""
        self.cut_reason, self.dropped = "", set[int]()
        """Why its lanes had to end, and the trials that this has left without a validation"""
        self.was_interrupted = False
        """A signal stopped the pack, which wrote a checkpoint"""
        self.setup_s: float | None = 0.0
        """What building its program has taken so far; None once that is known"""

    def start(
        self, shape: PackShape, trials: Sequence[TrialRun], stop: StopRequest, *, max_lanes: int
    ) -> None:
        began = time.perf_counter()
        self.trials = list(trials)
        data = self.data = self._load_data()
        self.shapes = [shape, *{self._get_shape(trial) for trial in trials}]
        lanes = [lane for trial in trials for lane in _make_lanes(trial, data)]
        self.num_lanes = min(len(lanes), max_lanes)
        first = lanes[: self.num_lanes]
        self.queue.extend(lanes[self.num_lanes :])
        widest = _widen(trials[0].config, shape)
        extremes = (widest, *self.pool.source.list_extremes(widest))
        largest = [data.resolve_settings(config) for config in extremes]
        self.plan, mode = data.make_plan(widest)
        room = [*lanes, *(Lane(config, fold) for config in largest for fold in data.folds)]
        self.capacity = compute_capacity(room, places=self.num_lanes)
        with self._use_device():
            self.lane_owners = [lane.owner for lane in first]
            self.lane_starts = [(0.0, 0.0)] * len(first)
            self.search_run.append(
                PackStart(
                    trials=[trial.number for trial in trials],
                    places=self.num_lanes,
                    mode=mode,
                    widths=list(shape.widths),
                    batch=shape.batch,
                    plan=self.plan.to_dict(),
                )
            )
            build = partial(self._build, mode)
            state = states.start(first, build, TrialEvents(self), num_places=self.num_lanes)
            self._start_rounds(state, stop)
        self.setup_s = time.perf_counter() - began

    def _load_data(self) -> TrialData:
        data = self.datasets.get(self.trials[0].config)
        return data.select_folds(max(trial.num_folds for trial in self.trials))

    def _build(self, mode: LaneMode, num_places: int) -> Pack:
        signature, series = self.data.dataset.signature, self.data.series
        return Pack(num_places, self.capacity, signature, series, self.plan, mode)

    def resume(self, stop: StopRequest) -> bool:
        """Continue from the newest checkpoint; return whether it has a lane to train."""
        saved = self._read_checkpoint()
        if saved is None or not saved.metadata["lanes"]:
            return False
        metadata = saved.metadata
        search = metadata["search"]
        self.shapes = [
            PackShape(program, batch, tuple(widths)) for program, batch, widths in search["shapes"]
        ]
        runs.truncate_log(self.run, metadata["log_bytes"])
        self.lane_owners = [(number, fold) for number, fold in search["lane_owners"]]
        self.lane_starts = [(train_s, validate_s) for train_s, validate_s in search["lane_starts"]]
        self.num_lanes = metadata["limit"]
        active = {lane["number"]: self.lane_owners[lane["number"]] for lane in metadata["lanes"]}
        owners = {number for number, _ in [*active.values(), *search["queue"]]}
        self.trials = [self._restore_trial(number, search) for number in sorted(owners)]
        if all(trial.is_final for trial in self.trials):
            return False
        self.pool.start(self.trials)
        data = self.data = self._load_data()
        lanes = {trial.number: _make_lanes(trial, data) for trial in self.trials}
        self.queue.extend(lanes[number][fold] for number, fold in search["queue"])
        self.plan, self.capacity = Plan.from_dict(metadata["plan"]), parse_capacity(metadata)
        by_number = {lane: lanes[number][fold] for lane, (number, fold) in active.items()}
        with self._use_device():
            build = partial(self._build, metadata["mode"])
            self._start_rounds(states.restore(saved, by_number, build, TrialEvents(self)), stop)
        return True

    def _read_checkpoint(self) -> Checkpoint | None:
        try:
            saved, problems = checkpoint.read_newest(self.run)
        except UserError as error:
            saved, problems = None, [str(error)]
        measure = "an older checkpoint of the pack"
        if saved is None:
            measure = "training the trials of a pack from their start"
        for problem in problems:
            self.search_run.append(Fallback(what=measure, why=problem))
        return saved

    def _restore_trial(self, number: int, search: dict[str, Any]) -> TrialRun:
        trial = self.pool.source.reopen(number)
        results = search["fold_results"].get(str(number), {})
        trial.fold_results = {int(fold): FoldResult(**values) for fold, values in results.items()}
        for epoch, losses in search["val_losses"].get(str(number), {}).items():
            trial.val_losses[int(epoch)] = {int(fold): loss for fold, loss in losses.items()}
        return trial

    def _start_rounds(self, state: TrainingState, stop: StopRequest) -> None:
        policy = LanePolicy(
            self._next_lane,
            self._judge,
            lambda lane: _get_owner(lane)[0].stop_reason,
            drop_ended=True,
            cut=self._find_cut,
            drops_cut=self._drops_cut,
            keeps_rows=self._wants_lane,
        )
        extra, self.state = self._get_search_state, state
        self.rounds = TrainingLoop(state, stop, policy, extra).run()

    def _find_cut(self) -> str:
        active = [lane for _, lane in self._get_state().list_active()]
        validate_s = epoch_s = 0.0
        if active:
            validate_s = statistics.fmean(map(self._estimate_validation, active))
            epoch_s = min(map(self._estimate_epoch, active))
        costs = PackCosts(self.trials, validate_s, epoch_s)
        self.cut_reason = self.pool.source.find_cut(costs)
        return self.cut_reason

    def _estimate_validation(self, lane: LaneResult) -> float:
        """Return the seconds that validating the pack would take if all its lanes were like this
        one, from the steps so far, in which they took turns; 0 while these are few."""
        return FORWARD_SHARE * self._estimate_training(lane, len(lane.lane.starts["val"]))

    def _estimate_epoch(self, lane: LaneResult) -> float:
        """Return the seconds of an epoch in the same way."""
        return self._estimate_training(lane, len(lane.lane.starts["train"]))

    def _estimate_training(self, lane: LaneResult, num_windows: int) -> float:
        step, train_s = lane.progress.step, self._measure_training(lane)
        if not step or (step < MIN_STEPS and train_s < MIN_STEPS_S):
            return 0.0
        return train_s * num_windows / (step * int(lane.train.batch))

    def _measure_training(self, lane: LaneResult) -> float:
        """Return for how long the pack has trained since the lane entered it."""
        return self._get_state().train_s - self.lane_starts[lane.number][0]

    def _drops_cut(self, lane: LaneResult) -> bool:
        seconds = self._measure_training(lane), self._estimate_validation(lane)
        if lane.has_best or self.pool.source.is_worth_validating(*seconds):
            return False
        self.dropped.add(_get_owner(lane)[0].number)
        return True

    @contextmanager
    def _use_device(self) -> Iterator[None]:
        """Set torch's flags as the plan requires; on a GPU, work on the pack's own stream."""
        device = self.data.series.values.device
        if device.type == "cuda" and self.stream is None:
            self.stream = torch.cuda.Stream(device)
            self.stream.wait_stream(torch.cuda.current_stream(device))
        plan = self.state.program.plan if self.state else self.plan  # as its review left it
        with plan.flags(), torch.cuda.stream(self.stream) if self.stream else nullcontext():
            yield

    def is_ready(self) -> bool:
        """Whether the device has finished the current round."""
        return self.round is None or self.round.is_done()

    def advance(self) -> bool:
        """Train one round; return whether there is another."""
        assert self.rounds is not None
        began = time.perf_counter()
        with self._use_device():
            self.round = next(self.rounds, None)
        if self.setup_s is not None:  # the first round captures the step
            self.pool.source.record_setup(self.setup_s + time.perf_counter() - began)
            self.setup_s = None
        if self.round is None:
            if not self.was_interrupted:
                self._drop_unfinished()
            self.close()
            return False
        return True

    def _drop_unfinished(self) -> None:
        """Fail the trials that a time limit has left without a step, or without a validation."""
        for trial in self.pool.withdraw(self.trials):
            is_dropped = trial.number in self.dropped
            self.pool.source.fail(trial, self.cut_reason if is_dropped else NOT_STARTED)
        self.trials = []

    def close(self) -> None:
        """Release the pack's memory now: this object lives until it is collected."""
        if self.rounds is not None:
            self.rounds.close()
        self.rounds = self.state = None

    def _judge(self, validated: Sequence[tuple[LaneResult, float]]) -> list[str]:
        """Return why each lane has to stop; all folds of a trial stop together."""
        for result, loss in validated:
            trial, fold = _get_owner(result)
            epoch = result.progress.epochs + 1
            mean = None if trial.is_final else trial.record_validation(epoch, fold, loss)
            if mean is not None and not trial.stop_reason:
                trial.stop_reason = self.pool.source.report(trial, epoch, mean)
        trials = [_get_owner(result)[0] for result, _ in validated]
        return [ALREADY_KNOWN if trial.is_final else trial.stop_reason for trial in trials]

    def _next_lane(self, ended: LaneResult) -> Lane | None:
        """Take the result of a lane; return the lane that takes its place."""
        trial, fold = _get_owner(ended)
        is_last = trial.finish_fold(fold, ended)
        if not trial.is_final:
            self.pool.source.finish_fold(trial, fold, ended, self.data)
        if ended.rows:
            trial.trained = self._describe_lane(ended)
        if is_last:
            self.trials.remove(trial)
            self.pool.finish(trial)
        if self.cut_reason or self.pool.source.find_cut():
            return None
        if not self.queue and (new := self.pool.start_fitting(self._fits)):
            self.trials.append(new)
            self.queue.extend(_make_lanes(new, self.data))
        if not self.queue:
            return None
        lane = self.queue.popleft()
        self.lane_owners.append(lane.owner)
        state = self._get_state()
        self.lane_starts.append((state.train_s, state.validate_s))
        return lane

    def _wants_lane(self, ended: LaneResult) -> bool:
        trial, fold = _get_owner(ended)
        return self.pool.source.wants_lane(trial, fold, ended.progress.best_loss)

    def _get_state(self) -> TrainingState:
        assert self.state is not None
        return self.state

    def _describe_lane(self, ended: LaneResult) -> TrainedLane:
        """Return a lane with all that a run of it needs."""
        state = self._get_state()
        program = state.program
        assert isinstance(program, Pack)
        train_s, validate_s = self.lane_starts[ended.number]
        lane = EndedLane(
            program.narrow_rows(ended.rows, ended.lane),
            ended.progress,
            ended.stop_reason,
            program.plan,
            program.mode,
            (state.setup_s, state.train_s - train_s, state.validate_s - validate_s),
        )
        events = runs.read_events(self.run)
        return TrainedLane(lane, list(trained_lanes.select_events(events, ended.number)))

    def _get_shape(self, trial: TrialRun) -> PackShape:
        return get_trial_shape(trial, self.data.series.values.device.type)

    def _fits(self, trial: TrialRun) -> bool:
        """Whether the trial can join without a new capture."""
        device = self.data.series.values.device.type
        joins = self._get_shape(trial) in self.shapes
        joins = joins or can_join(trial, self.shapes[0], device)
        if not joins or trial.num_folds > len(self.data.folds):
            return False
        try:
            for lane in _make_lanes(trial, self.data):
                check_capacity(lane, self.capacity)
        except UserError:
            return False
        return True

    def _forward_event(self, event: Event) -> None:
        """Show an event of the pack as one of the search, with trial and fold."""
        match event:
            case TrainingEnd():
                self.was_interrupted = event.signal_number != 0
            case Epoch() | Exploit() | LaneEnd() | Recovery():
                if event.lane is not None and event.lane < len(self.lane_owners):
                    number, fold = self.lane_owners[event.lane]
                    event = replace(event, trial=number, fold=fold)
        self.search_run.notify(event)

    def _get_search_state(self) -> dict[str, Any]:
        """Return what a checkpoint stores of the search."""
        trials = {str(trial.number): trial for trial in self.trials}
        results = {
            number: {fold: asdict(result) for fold, result in trial.fold_results.items()}
            for number, trial in trials.items()
        }
        search = {
            "shapes": list(self.shapes),
            "lane_owners": list(self.lane_owners),
            "lane_starts": list(self.lane_starts),
            "queue": [lane.owner for lane in self.queue],
            "fold_results": results,
            "val_losses": {number: trial.incomplete_epochs for number, trial in trials.items()},
        }
        return {"search": search}


class TrialEvents(LaneEvents):
    """Logs the training of a pack; the search logs when memory holds fewer of its lanes."""

    def __init__(self, pack: TrialPack) -> None:
        super().__init__(pack.run)
        self.pack = pack

    def report_shortage(self, limit: int, steps: int, why: str) -> None:
        self.pack.num_lanes = self.pack.memory_limit = limit
        since = f"step {steps} of the pack" if steps else "the start"
        remedy = f"{limit} lane{'' if limit == 1 else 's'} at a time, from {since}"
        self.pack.search_run.append(Recovery(what="out of memory", remedy=remedy, why=why))


def _get_owner(result: LaneResult) -> tuple[TrialRun, int]:
    lane = result.lane
    assert isinstance(lane, TrialLane)
    return lane.trial, lane.fold


def _make_lanes(trial: TrialRun, data: TrialData) -> list[TrialLane]:
    data = data.select_folds(trial.num_folds)
    config = data.resolve_settings(trial.config)
    folds = enumerate(data.folds)
    return [TrialLane(config, starts, trial, fold, init=data.init) for fold, starts in folds]


def _widen(config: Config, shape: PackShape) -> Config:
    """Return the config with the width and batch size of the pack."""
    if not (config.model.spec.has_hidden and config.model.can_pad):
        return config
    settings = {"model.hidden": shape.widths, "train.batch": shape.batch}
    return configs.replace_settings(config, settings)


MIN_TRIALS = 4
"""Trials of one shape that form a pack while other packs train"""
MIN_RUNNING = 0.5
"""Share of the parallel trials in training below which none wait for more of their shape"""
MAX_PACKS = {"cuda": 8, "cpu": 1}
"""Packs that train at the same time: a step is a chain of kernels that leaves part of a GPU idle"""
MAX_FAILURES = 2
"""Packs that fail with a trial before it counts as failed itself"""
PACK_FAILED = "a pack failed"
POLL_S = 2e-4
"""Between checks whether a pack is done: far less than the steps of a round take"""


class PackScheduler:
    """Trains packs of trials on one device."""

    def __init__(
        self, run: Run, datasets: DatasetCache, source: TrialSource, *, parallel: int
    ) -> None:
        self.run, self.datasets, self.folder = run, datasets, run.folder / "packs"
        self.pool = TrialPool(source, parallel=parallel)
        self.packs: list[TrialPack] = []
        self.max_lanes: dict[PackShape, int] = {}
        """Lanes that fit into memory, for shapes that ran out of it"""
        self.stop = StopRequest()
        self.num_packs = 0
        """Packs started so far, by earlier parts of the search too"""
        self._grouped: list[TrialRun] = []
        self._groups: list[TrialGroup] = []
        """The groups of the trials in `_grouped`"""

    def train(self, is_done: Callable[[], bool] = lambda: False) -> None:
        """Resume interrupted packs, then train until the source has no more trials, or until
        `is_done` says so: the next call then continues with the packs that are left."""
        with catch_signals(self.stop), self._close_on_error():
            if not self.packs:
                for folder in sorted(self.folder.glob("*")):
                    self.num_packs = max(self.num_packs, int(folder.name))
                    self._resume(folder)
            self.pool.fill()
            while self.packs or (self.pool.waiting and not self.stop.requested):
                if not self.stop.requested:
                    self.pool.fill()
                    if is_done():
                        return
                    if self.pool.source.is_over():
                        self.pool.drop_waiting()
                    self._start_packs()
                self._advance()
            if self.stop.requested:
                raise Interrupted("stopped", signal_number=self.stop.signal_number)

    @contextmanager
    def _close_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Release the memory of all packs."""
        for pack in self.packs:
            pack.close()

    def _make_pack(self, folder: Path) -> TrialPack:
        return TrialPack(self.pool, self.datasets, Run(folder, self.run.watch), self.run)

    def _resume(self, folder: Path) -> None:
        """Resume a pack from its newest checkpoint, or delete its folder if there is none."""
        pack = self._make_pack(folder)
        if not checkpoint.list_steps(pack.run):
            runs.remove(folder)
            return
        self.packs.append(pack)
        with self._recover(pack):
            if not pack.resume(self.stop):
                self.packs.remove(pack)
                runs.remove(folder)

    def _start_packs(self) -> None:
        """Form packs of waiting trials. A few trials wait for more of their shape while other packs
        train and the source has more, since a pack has a minimum cost; not if so few train that
        the device has too little to do."""
        pool, data = self.pool, self._load_first()
        if data is None:
            return
        device = data.series.values.device.type
        if len(self.packs) >= MAX_PACKS[device]:
            return
        if self._grouped != pool.waiting:
            num_windows = len(data.folds[-1]["train"])
            self._grouped = list(pool.waiting)
            self._groups = group_trials(pool.waiting, device, num_windows)
        for group in self._groups:
            few = len(pool.running) < MIN_RUNNING * pool.parallel
            enough = pool.is_exhausted or len(group.trials) >= MIN_TRIALS or few
            if self.packs and (len(self.packs) >= MAX_PACKS[device] or not enough):
                continue
            self._start(group)

    def _load_first(self) -> TrialData | None:
        """Return the data of the first trial that waits; those whose data cannot be had fail."""
        while self.pool.waiting:
            try:
                return self.datasets.get(self.pool.waiting[0].config)
            except UserError as error:
                self.pool.source.fail(self.pool.waiting.pop(0), str(error))
        return None

    def _start(self, group: TrialGroup) -> None:
        self.num_packs += 1
        folder = self.folder / f"{self.num_packs:04d}"
        folder.mkdir(parents=True)
        pack = self._make_pack(folder)
        self.pool.start(group.trials)
        self.packs.append(pack)
        limit = self.max_lanes.get(group.shape, MAX_LANES)
        with self._recover(pack):
            pack.start(group.shape, group.trials, self.stop, max_lanes=limit)

    def _advance(self) -> None:
        """Train one round of whichever pack finishes its steps first: waiting for a particular pack
        would leave the device idle when others finish earlier."""
        if not self.packs:
            return
        while (pack := next((pack for pack in self.packs if pack.is_ready()), None)) is None:
            time.sleep(POLL_S)
        self.packs.remove(pack)
        self.packs.append(pack)
        with self._recover(pack):
            if pack.advance():
                return
            self.packs.remove(pack)
            if not pack.was_interrupted:
                runs.remove(pack.run.folder)
            if pack.cut_reason and not self.stop.requested:
                self.pool.fill()  # there may be time for smaller trials

    @contextmanager
    def _recover(self, pack: TrialPack) -> Iterator[None]:
        """Record how many lanes of a shape fit into memory, and survive a pack that fails.

        A pack that runs out of memory halves its lanes by itself; if a single lane does not fit,
        its trials fail. The trials of a pack that fails otherwise are trained again, once.
        """
        try:
            yield
            if pack.memory_limit is not None:
                self.max_lanes[pack.shapes[0]] = pack.memory_limit
            return
        except (Interrupted, ResumableError, OSError):  # they end the search, which can be resumed
            raise
        except Exception as error:
            is_full, is_ours = recovery.is_out_of_memory(error), not isinstance(error, UserError)
            reason = recovery.first_line(error)
            if is_full and not pack.shapes:
                raise
            if not is_full and is_ours:
                reason = f"{type(error).__name__}: {reason}"
                with suppress(OSError):
                    runs.write_text(self.run.folder / "crash.txt", traceback.format_exc())
        # outside the except block, whose traceback would keep the memory alive
        with suppress(ValueError):  # it had ended
            self.packs.remove(pack)
        with suppress(Exception):  # what failed may fail again
            pack.close()
        if is_ours:
            recovery.check_device(reason)
        recovery.free_memory()
        runs.remove(pack.run.folder)
        trials = self.pool.withdraw(pack.trials)
        if is_full and pack.num_lanes > 1:
            self.max_lanes[pack.shapes[0]] = pack.num_lanes // 2
            self._train_again(trials)
        elif is_full or not is_ours:
            self._fail(trials, f"out of memory: {reason}" if is_full else reason)
        else:
            self._report_failure(trials, reason)

    def _train_again(self, trials: Sequence[TrialRun]) -> None:
        self.pool.waiting = [trial.copy_untrained() for trial in trials] + self.pool.waiting

    def _fail(self, trials: Sequence[TrialRun], reason: str) -> None:
        for trial in trials:
            self.pool.source.fail(trial, reason)

    def _report_failure(self, trials: Sequence[TrialRun], reason: str) -> None:
        """Train the trials of a pack that failed again, or give them up."""
        trials = [replace(trial, num_failures=trial.num_failures + 1) for trial in trials]
        given_up = [trial for trial in trials if trial.num_failures == MAX_FAILURES]
        again = [trial for trial in trials if trial not in given_up]
        remedies = (
            *([f"training {_name_trials(again)} again"] if again else []),
            *([f"giving up {_name_trials(given_up)}"] if given_up else []),
        )
        remedy = " and ".join(remedies) or "none of its trials is left"
        self.run.append(Recovery(what=PACK_FAILED, remedy=remedy, why=reason))
        self._fail(given_up, reason)
        self._train_again(again)


def _name_trials(trials: Sequence[TrialRun]) -> str:
    numbers = ", ".join(str(trial.number) for trial in trials if trial.number >= 0)
    return f"trial{'s' * (len(trials) > 1)} {numbers}" if numbers else "what it retrained"
