"""One pack of trials in training: the owner of each lane, when a trial stops, and what is next."""

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch

from slipstream import config as configs
from slipstream import runs
from slipstream.config import Config
from slipstream.engine import checkpoint, loop
from slipstream.engine import state as states
from slipstream.engine.checkpoint import Checkpoint
from slipstream.engine.events import LaneEvents
from slipstream.engine.lanes.capacity import PackCapacity, check_capacity, compute_capacity
from slipstream.engine.lanes.ended import EndedLane
from slipstream.engine.lanes.gradients import LaneMode
from slipstream.engine.lanes.lane import Lane
from slipstream.engine.lanes.pack import Pack, parse_capacity
from slipstream.engine.lanes.policy import LanePolicy
from slipstream.engine.loop import RoundIterator
from slipstream.engine.plan import Plan
from slipstream.engine.progress import LaneResult
from slipstream.engine.state import TrainingState
from slipstream.engine.step import Round
from slipstream.errors import UserError
from slipstream.errors.stop_signals import StopRequest
from slipstream.runs import Event, Run
from slipstream.training import trained_lanes
from slipstream.training.trained_lanes import TrainedLane
from slipstream.tuning.packing import grouping
from slipstream.tuning.packing.dataset_cache import DatasetCache, TrialData
from slipstream.tuning.packing.grouping import PackShape
from slipstream.tuning.packing.trial import (
    NOT_STARTED,
    FoldResult,
    TrialLane,
    TrialPool,
    TrialRun,
)

ALREADY_KNOWN = "its result is already known"


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
        self.was_interrupted = False
        """A signal stopped the pack, which wrote a checkpoint"""

    def start(
        self, shape: PackShape, trials: Sequence[TrialRun], stop: StopRequest, *, max_lanes: int
    ) -> None:
        self.trials = list(trials)
        data = self.data = self._load_data()
        self.shapes = [shape, *{self._get_shape(trial) for trial in trials}]
        every = [lane for trial in trials for lane in _make_lanes(trial, data)]
        self.num_lanes = min(len(every), max_lanes)
        first = every[: self.num_lanes]
        self.queue.extend(every[self.num_lanes :])
        widest = _widen(trials[0].config, shape)
        extremes = (widest, *self.pool.source.list_extremes(widest))
        largest = [data.resolve_settings(config) for config in extremes]
        self.plan, mode = data.make_plan(widest)
        room = [*every, *(Lane(config, fold) for config in largest for fold in data.folds)]
        self.capacity = compute_capacity(room, places=self.num_lanes)
        with self._use_device():
            self.lane_owners = [lane.owner for lane in first]
            self.lane_starts = [(0.0, 0.0)] * len(first)
            self.search_run.append(
                "pack",
                trials=[trial.number for trial in trials],
                places=self.num_lanes,
                mode=mode,
                widths=shape.widths,
                batch=shape.batch,
                plan=self.plan.to_dict(),
            )
            build = partial(self._build, mode)
            state = states.start(first, build, TrialEvents(self), num_places=self.num_lanes)
            self._start_rounds(state, stop)

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
        what = "an older checkpoint of the pack"
        if saved is None:
            what = "training the trials of a pack from their start"
        for problem in problems:
            self.search_run.append("fallback", what=what, why=problem)
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
            lambda one: _get_owner(one)[0].stop_reason,
            drop_ended=True,
            cut=lambda: self.pool.source.find_cut(),
            keeps_rows=self._wants_lane,
        )
        extra, self.state = self._get_search_state, state
        self.rounds = loop.train_rounds(state, stop, policy=policy, extra_state=extra)

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
        with self._use_device():
            self.round = next(self.rounds, None)
        if self.round is None:
            if not self.was_interrupted:
                self._drop_unfinished()
            self.close()
            return False
        return True

    def _drop_unfinished(self) -> None:
        """Fail the trials that a time limit has left without a step."""
        for trial in self.pool.withdraw(self.trials):
            self.pool.source.fail(trial, NOT_STARTED)
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
            self.pool.source.finish_fold(trial, fold)
        if ended.rows:
            trial.trained = self._describe_lane(ended)
        if is_last:
            self.trials.remove(trial)
            self.pool.finish(trial)
        if self.pool.source.find_cut():
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
        return grouping.get_trial_shape(trial, self.data.series.values.device.type)

    def _fits(self, trial: TrialRun) -> bool:
        """Whether the trial can join without a new capture."""
        device = self.data.series.values.device.type
        joins = self._get_shape(trial) in self.shapes
        joins = joins or grouping.can_join(trial, self.shapes[0], device)
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
        if event["event"] == "trained":
            self.was_interrupted = event["signal_number"] != 0
        if "lane" in event and event["lane"] < len(self.lane_owners):
            number, fold = self.lane_owners[event["lane"]]
            event = event | {"trial": number, "fold": fold}
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
        self.pack.search_run.append("recovery", what="out of memory", remedy=remedy, why=why)


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
