"""The training state: every lane and where it stands, taken to a checkpoint and brought back.

A single model is one lane in a program with one place. A lane has a place while it trains, waits
for one, or has ended; what training changed of lanes without a place is on the host.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from slipstream import config as configs
from slipstream import runs
from slipstream.base.errors import UserError
from slipstream.config import Config, Signature, Train
from slipstream.engine import checkpoint as checkpoints
from slipstream.engine import recovery
from slipstream.engine.capture import CaptureSeconds
from slipstream.engine.checkpoint import Checkpoint
from slipstream.engine.events import LaneEvents
from slipstream.engine.lanes import (
    ALL_EPOCHS,
    NO_IMPROVEMENT,
    EpochStart,
    FitResult,
    Lane,
    LaneResult,
    Progress,
    choose_pace,
    follows_time,
    parse_progress,
)
from slipstream.engine.pack import (
    build_lane_layout,
    compute_capacity,
    describe_capacity,
    parse_capacity,
    read_weights,
)
from slipstream.engine.parallel import Ranks
from slipstream.engine.plan import Plan
from slipstream.engine.step import Rows, StepProgram
from slipstream.runs import Run

LANES, ENDED, WAITING = (f"{name}.safetensors" for name in ("lanes", "ended", "waiting"))
GOOD, LOSSES = "good.", "losses"
"""What only the rest of an epoch needs of a lane: where a rollback leads, and its losses"""
Build = Callable[[int], StepProgram]
"""Builds a program with so many places, all empty"""


@dataclass
class TrainingState:
    """A program in training, and all lanes that belong to it."""

    build: Build
    events: LaneEvents
    limit: int
    """Lanes that are trained at a time at most: what memory holds"""
    places: list[LaneResult | None] = field(default_factory=list)
    waiting: list[LaneResult] = field(default_factory=list)
    """Lanes that wait for a place, in order"""
    ended: list[LaneResult] = field(default_factory=list)
    rows: dict[int, Rows] = field(default_factory=dict)
    """What training has changed of lanes without a place, on the host, by lane number"""
    num_entered: int = 0
    steps: int = 0
    """Of the program"""
    setup_s: float = 0.0
    train_s: float = 0.0
    validate_s: float = 0.0
    timed_from: tuple[float, int] | None = None
    """Seconds and steps of the program after its first steps, which take longer: since then its
    speed is measured"""
    captured_s: CaptureSeconds = field(default_factory=CaptureSeconds)
    """Of the programs before the current one"""
    losses: Tensor = field(default_factory=lambda: torch.zeros(0))
    """[K, S]: as last read"""
    _program: StepProgram | None = None

    @property
    def program(self) -> StepProgram:
        assert self._program is not None
        return self._program

    @property
    def run(self) -> Run:
        return self.events.run

    @property
    def config(self) -> Config:
        """Of one lane: what all of them share"""
        return self.list_all()[0].lane.config

    def get_lane(self, place: int) -> LaneResult:
        result = self.places[place]
        assert result is not None
        return result

    def list_active(self) -> list[tuple[int, LaneResult]]:
        """The lanes in training, with their places."""
        return [(place, result) for place, result in enumerate(self.places) if result is not None]

    def list_all(self) -> list[LaneResult]:
        return [*self.ended, *(result for _, result in self.list_active()), *self.waiting]

    def enter(self, lane: Lane) -> None:
        """Have a new lane wait for a place."""
        self.waiting.append(LaneResult(self.num_entered, lane))
        self.num_entered += 1

    def set_up(self, num_places: int) -> None:
        """Build the program, with fewer places than these where memory holds no more, and fill it.

        A lane that has no place goes on later from where it is.
        """
        began, num_places = time.perf_counter(), min(num_places, self.limit)
        while True:
            try:
                self._program = self.build(num_places)
                break
            except recovery.MEMORY_ERRORS as error:
                if num_places == 1:
                    raise
                why = recovery.explain_shortage(error)
            # past the except block, whose traceback would pin the memory
            num_places = self.limit = -(-num_places // 2)
            recovery.free_memory()
            self.events.report_shortage(self.limit, self.steps, why)
        self.places = [None] * num_places
        self.fill_places()
        self.setup_s += time.perf_counter() - began

    def fill_places(self) -> None:
        """Give empty places to the lanes that wait, and begin their epochs."""
        starts = {}
        for place, occupant in enumerate(self.places):
            if occupant is None and self.waiting:
                result = self.places[place] = self.waiting.pop(0)
                self.program.put(place, result.lane, self.rows.pop(result.number, {}))
                starts[place] = self.start_epoch(place)
        self.begin(starts)

    def start_epoch(self, place: int) -> EpochStart:
        """Say where a lane's next epoch begins, or goes on. The epochs at a low learning rate begin
        here, from the best weights."""
        result = self.get_lane(place)
        if result.progress.is_exploit_due(result.train):
            self.program.load_best(place)
            result.progress.begin_exploit()
            self.events.report_exploit(result)
        return result.progress.next_epoch()

    def begin(self, epochs: Mapping[int, EpochStart]) -> None:
        if epochs:
            self.program.begin(epochs)
            first = min(epochs)
            self.events.begin_epochs(self.program.num_steps(first), self.places[first])

    def halve(self, why: str) -> None:
        """Go on with half as many lanes at a time, each from the step that it has reached."""
        active = self.list_active()
        for place, result in active:
            self.rows[result.number] = self.copy_rows(place)
        self.waiting[:0] = [result for _, result in active]
        self.close()
        self.captured_s = self.captured_s.add(self.program.capture_s())
        self._program = None  # its memory has to be free before the smaller one is built
        recovery.free_memory()
        self.limit = -(-len(active) // 2)
        self.events.report_shortage(self.limit, self.steps, why)
        self.set_up(self.limit)
        self.losses = self.program.losses.detach().cpu()  # by the new places

    def _read_rows(self, place: int) -> Rows:
        return {name: tensor[place] for name, tensor in self.program.state().items()}

    def copy_rows(self, place: int) -> Rows:
        """Copy a lane's rows to the host."""
        done = self.get_lane(place).progress.done
        spared = () if done else (GOOD, LOSSES)  # an epoch that begins needs none of them
        return {
            name: row.detach().to("cpu", copy=True)
            for name, row in self._read_rows(place).items()
            if not name.startswith(spared)
        }

    def end(self, place: int, stop_reason: str, *, keep_rows: bool) -> None:
        """End a lane and empty its place. It keeps its best weights, and its rows in case that it
        is to go on later."""
        result = self.get_lane(place)
        result.stop_reason = stop_reason
        result.weights = self._find_best_weights(result, self._read_rows(place))
        if keep_rows:
            self.rows[result.number] = self.copy_rows(place)
            self.ended.append(result)
        self.places[place] = None
        self.program.leave(place)

    def _find_best_weights(self, result: LaneResult, rows: Rows) -> dict[str, Tensor]:
        """A lane's best weights so far; none where no validation was finite."""
        if not result.has_best:
            return {}
        return self.program.best_weights(rows, result.lane)

    def compact(self, share: float) -> None:
        """Build a smaller program where at least such a share of the places is empty."""
        places = [place for place, _ in self.list_active()]
        if places and len(self.places) - len(places) >= share * len(self.places):
            smaller = self.program.compact(places)
            if smaller is not self._program:
                self.captured_s = self.captured_s.add(self.program.capture_s())
                self._program = smaller
            self.places = [self.places[place] for place in places]

    def mark_stopped(self, stop_reason: str, signal_number: int) -> None:
        """Give the lanes that have not ended their best weights so far, and why they stopped."""
        for place, result in self.list_active():
            result.weights = self._find_best_weights(result, self._read_rows(place))
        for result in self.waiting:
            result.weights = self._find_best_weights(result, self.rows.get(result.number, {}))
        for result in self.list_all():
            if not result.stop_reason:
                result.stop_reason, result.signal_number = stop_reason, signal_number
                if not signal_number:  # else it goes on, and has not ended
                    self.events.end_lane(result)

    def summarize(self, signal_number: int) -> FitResult:
        return FitResult(
            sorted(self.list_all(), key=lambda result: result.number),
            self.program.plan,
            self.program.failures(),
            self.limit,
            self.steps,
            signal_number,
            *(self.setup_s, self.train_s, self.validate_s),
            self.captured_s.add(self.program.capture_s()),
        )

    def close(self) -> None:
        """Release the program's memory."""
        if self._program is not None:
            self._program.close()
            if self._program.plan.capture:
                recovery.free_memory()


def start(
    lanes: Sequence[Lane], build: Build, events: LaneEvents, *, num_places: int
) -> TrainingState:
    """Begin to train lanes, so many at a time."""
    state = TrainingState(build, events, limit=num_places)
    for lane in lanes:
        state.enter(lane)
    state.set_up(min(num_places, len(lanes)))
    return state


def take_checkpoint(state: TrainingState, extra: Mapping[str, Any]) -> Checkpoint:
    """Copy all that the rest of training needs; from a GPU it arrives while training goes on."""
    program, active = state.program, state.list_active()
    live = program.state() if active else {}
    if not any(result.progress.done for _, result in active):
        live = {name: t for name, t in live.items() if not name.startswith(GOOD)}
    tensors = {
        LANES: checkpoints.copy_to_host(live),
        ENDED: _flatten(state.rows, state.ended),
        WAITING: _flatten(state.rows, state.waiting),
    }
    ready = None
    if program.plan.device.type == "cuda":
        ready = torch.cuda.Event()
        ready.record(torch.cuda.current_stream(program.plan.device))
    metadata = {
        **extra,
        **program.describe(),
        "mode": program.mode,
        "plan": program.plan.to_dict(),
        "limit": state.limit,
        "places": [None if result is None else result.number for result in state.places],
        "lanes": [
            {
                "number": result.number,
                "config": result.lane.config.model_dump_json(),
                "progress": asdict(result.progress),
                "stopped": result.stop_reason,
            }
            for result in state.list_all()
        ],
        "waiting": [result.number for result in state.waiting],
        "entered": state.num_entered,
        "seconds": [state.setup_s, state.train_s, state.validate_s],
        "timed_from": state.timed_from,
        "log_bytes": runs.get_log_size(state.run),
    }
    named = {name: rows for name, rows in tensors.items() if rows}
    return Checkpoint(state.steps, named, metadata, ready)


def _flatten(rows: Mapping[int, Rows], lanes: Sequence[LaneResult]) -> Rows:
    """Rows of several lanes in one file; those on the host never change."""
    return {
        f"{result.number}/{name}": row
        for result in lanes
        for name, row in rows.get(result.number, {}).items()
    }


def restore(
    checkpoint: Checkpoint,
    lanes: Sequence[Lane] | Mapping[int, Lane],
    build: Build,
    events: LaneEvents,
    *,
    same_configs: bool = True,
) -> TrainingState:
    """Bring every lane of a checkpoint back to where it stood.

    `lanes` are all that had come until then, by their number. One that has ended goes on if its
    config now has more epochs or more patience. `same_configs` refuses lanes of other configs.
    """
    metadata = checkpoint.metadata
    state = TrainingState(build, events, limit=metadata["limit"], num_entered=metadata["entered"])
    state.steps = checkpoint.step
    state.setup_s, state.train_s, state.validate_s = metadata["seconds"]
    since = metadata.get("timed_from")  # runs of version 0.1 have none
    state.timed_from = None if since is None else (since[0], since[1])
    results = {
        e["number"]: parse_lane(e, lanes, same_config=same_configs) for e in metadata["lanes"]
    }
    active = [number for number in metadata["places"] if number is not None]
    state.waiting = [results.pop(number) for number in (*active, *metadata["waiting"])]
    state.rows = split_rows(checkpoint)
    reopened = []
    for result in results.values():
        if can_go_on(result.stop_reason, result.progress, result.train):
            result.stop_reason = ""
            reopened.append(result)
        else:
            state.ended.append(result)
    state.waiting += reopened
    num_places = max(1, min(state.limit, len(state.waiting)))
    if active and not reopened:  # the same shapes give the same bits
        num_places = len(metadata["places"])
    state.set_up(num_places)
    for result in state.ended:
        result.weights = state._find_best_weights(result, state.rows.get(result.number, {}))
    return state


def parse_lane(
    entry: Mapping[str, Any],
    lanes: Sequence[Lane] | Mapping[int, Lane],
    *,
    same_config: bool = False,
) -> LaneResult:
    """Return a lane as its entry in a checkpoint describes it."""
    number, lane = entry["number"], lanes[entry["number"]]
    before = Config.model_validate_json(entry["config"])
    changed = configs.list_differences(before, lane.config) if same_config else []
    if changed:
        raise UserError(f"lane {number} has other settings than before ({', '.join(changed)})")
    progress = parse_progress(entry["progress"])
    if before.train.minutes != lane.config.train.minutes:
        progress.change_time(before.train, lane.config.train)
    return LaneResult(number, lane, progress, stop_reason=entry["stopped"])


def can_go_on(stop_reason: str, progress: Progress, train: Train) -> bool:
    """Whether a lane that has ended has more to do by its settings as they are now."""
    by_itself = stop_reason.startswith((ALL_EPOCHS, NO_IMPROVEMENT))
    return by_itself and not progress.find_stop_reason(train)


def split_rows(checkpoint: Checkpoint) -> dict[int, Rows]:
    """The rows of every lane, by its number."""
    rows: dict[int, Rows] = {}
    for place, number in enumerate(checkpoint.metadata["places"]):
        if number is not None:
            live = checkpoint.tensors[LANES]
            rows[number] = {name: tensor[place] for name, tensor in live.items()}
    for file in (ENDED, WAITING):
        for key, row in checkpoint.tensors.get(file, {}).items():
            number, _, name = key.partition("/")
            rows.setdefault(int(number), {})[name] = row
    return rows


@dataclass(frozen=True)
class EndedLane:
    """A lane that was trained in a pack, perhaps among others."""

    rows: Rows
    """As they are in a pack of its own width"""
    progress: Progress
    stop_reason: str
    plan: Plan
    """As it trained"""
    mode: str
    seconds: tuple[float, float, float]
    """Set-up, training and validation of its pack"""


def make_checkpoint(
    lanes: Sequence[Lane],
    ended: Mapping[int, EndedLane],
    *,
    max_lanes: int,
    extra: Mapping[str, Any],
) -> Checkpoint:
    """Return the checkpoint of a pack of these lanes, some of which have ended; the others wait.

    `ended` has them by their number. At most `max_lanes` of the others train at a time.
    """
    first = next(iter(ended.values()))
    limit = min(len(lanes), max_lanes)
    entries = []
    for number, lane in enumerate(lanes):
        known = ended.get(number)
        entry = {"number": number, "config": lane.config.model_dump_json()}
        progress, stopped = (known.progress, known.stop_reason) if known else (Progress(), "")
        entries.append(entry | {"progress": asdict(progress), "stopped": stopped})
    metadata = {
        **extra,
        **describe_capacity(compute_capacity(lanes, places=limit)),
        "mode": first.mode,
        "plan": first.plan.to_dict(),
        "limit": limit,
        "places": [],
        "lanes": entries,
        "waiting": [number for number in range(len(lanes)) if number not in ended],
        "entered": len(lanes),
        "seconds": [max(parts) for parts in zip(*(e.seconds for e in ended.values()), strict=True)],
        "log_bytes": 0,
    }
    tensors = {
        f"{number}/{name}": row for number, lane in ended.items() for name, row in lane.rows.items()
    }
    step = max(lane.progress.step for lane in ended.values())
    return Checkpoint(step, {ENDED: tensors}, metadata)


def read_results(
    checkpoint: Checkpoint, lanes: Sequence[Lane], signature: Signature, plan: Plan
) -> FitResult | None:
    """Return the results of a pack whose lanes have all ended; None if one of them can go on."""
    metadata = checkpoint.metadata
    if (
        "capacity" not in metadata
        or metadata["waiting"]
        or any(number is not None for number in metadata["places"])
    ):
        return None
    results = [parse_lane(entry, lanes) for entry in metadata["lanes"]]
    if any(can_go_on(result.stop_reason, result.progress, result.train) for result in results):
        return None
    results.sort(key=lambda result: result.number)
    model = parse_capacity(metadata).model
    layout, rows = build_lane_layout(model, signature), split_rows(checkpoint)
    for result in results:
        if result.has_best:
            row = rows[result.number]["best"].to(plan.device)
            result.weights = read_weights(row, layout, result.lane, model, signature)
    seconds = metadata["seconds"]
    return FitResult(results, plan, {}, metadata["limit"], checkpoint.step, 0, *seconds)


FIRST_PACE, MAX_PACES = 0.05, 200
"""Share of the time after which schedules follow it, and how often they are fitted to it at most"""


class TimeLimit:
    """`train.minutes` of the lanes that train; the first rank's clock counts."""

    def __init__(self, state: TrainingState, ranks: Ranks | None) -> None:
        self.state, self.ranks = state, ranks
        self.started_at = time.perf_counter() - state.train_s - state.validate_s
        self.paced_at = self.measure_elapsed()
        """When the schedules were last fitted to the time"""

    def is_over(self) -> bool:
        return self.measure_elapsed() > self._find_seconds()

    def measure_elapsed(self) -> float:
        """The seconds of training so far, validations and earlier parts of the run included."""
        elapsed_s = time.perf_counter() - self.started_at
        return elapsed_s if self.ranks is None else self.ranks.lead(elapsed_s)

    def _find_seconds(self) -> float:
        minutes = [lane.train.minutes for _, lane in self.state.list_active()]
        return min((60 * limit for limit in minutes if limit), default=math.inf)

    def fit_schedules(self, launched: int) -> None:
        """Fit the schedules to the time that is left, where it ends before the epochs do.

        `launched` steps are under way. The speed is that of all steps so far but the first ones; in
        the first part of the time it is not known well enough.
        """
        state, limit_s, now_s = self.state, self._find_seconds(), self.measure_elapsed()
        is_known = state.steps > 0 and now_s >= FIRST_PACE * limit_s
        if not is_known or now_s < self.paced_at + limit_s / MAX_PACES:
            return
        self.paced_at = now_s
        since_s, since_steps = state.timed_from or (0.0, 0)
        if state.steps == since_steps:
            since_s, since_steps = 0.0, 0
        steps_in_time = (limit_s - now_s) * (state.steps - since_steps) / (now_s - since_s)
        epochs = {}
        for place, lane in state.list_active():
            progress, num_steps = lane.progress, state.program.num_steps(place)
            epoch = progress.next_epoch()._replace(step=progress.done + launched)
            if follows_time(lane.train, epoch):
                left = steps_in_time - launched
                progress.pace = choose_pace(lane.train, epoch, num_steps, left)
                if progress.pace != epoch.pace:
                    epochs[place] = epoch._replace(pace=progress.pace)
        if epochs:
            state.program.update_rates(epochs)
