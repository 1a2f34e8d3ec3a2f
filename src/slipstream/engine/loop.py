"""The training loop, for one model or many.

The lanes of a program step together. A round lasts until the next line of the log, a checkpoint or
the end of the first lane's epoch. Lanes whose epoch is over are validated, and go on, or end and
leave their place to another. A GPU has the next round's steps before the last one's losses are
read, so that it need not wait for the host.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from slipstream.base.signals import StopRequest, catch_signals
from slipstream.engine import pack, recovery
from slipstream.engine import state as states
from slipstream.engine.checkpoint import CheckpointSchedule, CheckpointWriter
from slipstream.engine.context import RunContext, seed_generators
from slipstream.engine.events import LaneEvents, LoggedLosses, Validation
from slipstream.engine.lanes import (
    DIVERGED,
    INTERRUPTED,
    NO_POLICY,
    OUT_OF_TIME,
    FitResult,
    LanePolicy,
    LaneResult,
)
from slipstream.engine.optim import MAX_REPEATS
from slipstream.engine.pack import LaneMode
from slipstream.engine.parallel import AgreedSchedule, Ranks, StepPoll
from slipstream.engine.plan import ONE_AT_A_TIME, Plan, ThreadReview, plan_review
from slipstream.engine.single import SingleProgram
from slipstream.engine.state import TimeLimit, TrainingState
from slipstream.engine.step import Round, StepProgram, close_round

EMPTY_SHARE = 0.25
"""Share of places without a lane from which a smaller program is built"""
ROUNDS_AHEAD = {"cuda": 2, "cpu": 1}
"""Rounds in flight at a time"""
FIRST_LOGS = (1, 10)
"""Steps after which losses are read before the first `engine.log_every` are over, so that a curve
begins with the training"""
LOOKING_S = 0.5
"""Between two looks, within a round, at whether a search has to end what trains"""
ExtraState = Callable[[], Mapping[str, Any]]
"""Returns what a checkpoint contains besides the lanes"""
RoundIterator = Generator[Round, None, FitResult]


def fit_lanes(context: RunContext, events: LaneEvents) -> FitResult:
    """Train the lanes of a run to their end, or until a signal; from its checkpoint, if it has one,
    and with the other processes where there are any."""
    saved, config, ranks = context.checkpoint, context.config, context.ranks
    if saved is not None:
        ended = states.read_results(saved, context.lanes, context.dataset.signature, context.plan)
        if ended is not None:
            events.end(ended)
            return ended
    extra: dict[str, Any] = {"data": context.fingerprint}
    if config.trains_lanes:
        extra["pack"] = context.summarize_packing()
    build = partial(_build_program, context)
    # a custom model may draw while it trains, and windows of other ranks have draws of their own
    seed = config.seed ^ (ranks.rank if ranks else 0) << 40
    with seed_generators(seed, context.plan.device), catch_signals() as stop:
        if saved is None:
            num_places = context.packing.num_lanes
            state = states.start(context.lanes, build, events, num_places=num_places)
        else:
            state = states.restore(saved, context.lanes, build, events, same_configs=False)
        return _run_to_end(TrainingLoop(state, stop, extra_state=lambda: extra, ranks=ranks).run())


def _build_program(context: RunContext, num_places: int) -> StepProgram:
    """Build the program that trains so many of the lanes at a time."""
    mode, saved = context.packing.mode, context.checkpoint
    if mode == ONE_AT_A_TIME:
        return SingleProgram(context, context.plan)
    if saved is None:
        capacity = pack.compute_capacity(context.lanes, places=context.packing.num_lanes)
    else:
        capacity = pack.parse_capacity(saved.metadata)
        capacity = capacity._replace(config=context.lanes[0].config)  # it may be another by now
    assert context.series is not None
    lane_mode: LaneMode = "branches" if mode == "branches" else "together"
    signature, plan = context.dataset.signature, context.plan
    return pack.Pack(num_places, capacity, signature, context.series, plan, lane_mode)


def fit(state: TrainingState, stop: StopRequest, **options: Any) -> FitResult:
    """Train every lane of a state to its own end and close the program, with the options of
    `TrainingLoop`. A stop that is requested comes after the current step, with a checkpoint."""
    return _run_to_end(TrainingLoop(state, stop, **options).run())


def fit_single(context: RunContext, plan: Plan) -> FitResult:
    """Train one model by itself, from the start."""
    with catch_signals() as stop:
        lanes, events = [context.build_lane()], LaneEvents(context.run, single=True)
        state = states.start(lanes, lambda _: SingleProgram(context, plan), events, num_places=1)
        return fit(state, stop, ranks=context.ranks)


def _run_to_end(rounds: RoundIterator) -> FitResult:
    while True:
        try:
            next(rounds)
        except StopIteration as end:
            result: FitResult = end.value
            return result


@dataclass
class TrainingLoop:
    """The loop, and what its iterations share."""

    state: TrainingState
    signals: StopRequest
    policy: LanePolicy = NO_POLICY
    extra_state: ExtraState = dict
    """Goes into every checkpoint"""
    ranks: Ranks | None = None
    """The processes that train the same lanes; what depends on a clock or a signal is agreed on"""
    checkpoints: CheckpointSchedule = field(init=False)
    limit: TimeLimit = field(init=False)
    poll: StepPoll | None = field(default=None, init=False)
    in_flight: deque[Round] = field(default_factory=deque)
    is_epoch_end: bool = False
    """Whether the rounds in flight reach an epoch's end"""
    review: ThreadReview | None = None
    """Of the threads, in the first epoch"""
    stalled: dict[int, int] = field(default_factory=dict)
    """By lane: steps in a row that were only repeated, since fp16 gradients overflowed"""

    def __post_init__(self) -> None:
        self.stop = self.signals if self.ranks is None else StopRequest()
        """The stop that the loop obeys; of several ranks, one that all have agreed on"""
        self.log_every = self.state.config.engine.log_every

    def run(self) -> RoundIterator:
        """Train round by round until every lane has ended, time is over or a stop is requested;
        then close the program and return the results.

        While the device is busy with the round that this yields, the host can serve other
        programs.
        """
        state, stop, engine = self.state, self.stop, self.state.config.engine
        late, validated = "", set[int]()
        writer = CheckpointWriter(state.run, background=engine.async_checkpoints)
        with writer, closing(state):
            self._begin(writer)
            while state.list_active():
                round_started = time.perf_counter()
                state.events.trained_since = round_started - state.train_s
                shortage = self._launch()
                self._prepare_epochs()
                current = self.in_flight[0]
                yield current
                diverged = self._read()
                state.train_s += time.perf_counter() - round_started
                round_started = time.perf_counter()
                late = self._find_time_limit() if current.is_complete else self.policy.cut()
                if diverged or late or shortage or self._is_pause_due():
                    while self.in_flight:  # all of these need lanes at rest
                        diverged |= self._read()
                state.train_s += time.perf_counter() - round_started
                for place in sorted(diverged):
                    self._roll_back(place)
                if shortage:
                    state.halve(shortage)
                if stop.requested:
                    break
                validated = self._finish_epochs(diverged)
                if late or stop.requested:
                    break
                if not self.in_flight and self.checkpoints.is_due(validated=bool(validated)):
                    self._save()
                state.compact(EMPTY_SHARE)
            self._save()
            if late and not stop.requested:
                self._validate_cut(validated)
                for place, _ in state.list_active() if late != OUT_OF_TIME else ():
                    self._end(place, late)
            state.mark_stopped(INTERRUPTED if stop.requested else OUT_OF_TIME, stop.signal_number)
        result = state.summarize(stop.signal_number)
        state.events.end(result)
        return result

    def _begin(self, writer: CheckpointWriter) -> None:
        """Set the clocks, with the first round at hand."""
        engine, program, ranks = self.state.config.engine, self.state.program, self.ranks
        self.checkpoints = CheckpointSchedule(engine, writer)
        if ranks is not None:
            self.checkpoints = AgreedSchedule(engine, writer, ranks)
            self.poll = StepPoll(ranks, time.perf_counter)
        is_open = engine.threads == "auto" and engine.plan != "off" and ranks is None
        # branches use a thread for each lane; a resumed run keeps its plan, for the same bits
        if program.mode != "branches" and not self.state.steps:
            self.review = plan_review(program.plan, is_open=is_open)
        self.limit = TimeLimit(self.state, ranks)

    def _find_time_limit(self) -> str:
        """Return why the time of all lanes is over; empty while it is not."""
        return OUT_OF_TIME if self.limit.is_over() else self.policy.cut()

    def _launch(self) -> str:
        """Launch the next rounds; return why memory ran out, if it did."""
        self.limit.fit_schedules(self._count_launched())
        program, active, ahead = self.state.program, self.state.list_active(), self.in_flight
        left = min(program.num_steps(place) - lane.progress.done for place, lane in active)
        left -= self._count_launched()
        unlogged = max(lane.progress.done - lane.progress.logged for _, lane in active)
        while len(ahead) < ROUNDS_AHEAD[program.plan.device.type] and (left or not ahead):
            if ahead and (self.stop.requested or not ahead[-1].is_complete):
                break
            wanted = min(left, self._count_steps_to_log(0 if ahead else unlogged))
            count, shortage = self._advance(wanted)
            left -= count
            ahead.append(close_round(program, count, is_complete=count == wanted))
            if shortage:
                return shortage
        self.is_epoch_end = not left
        return ""

    def _count_launched(self) -> int:
        """Count the steps of the rounds in flight."""
        return sum(ahead.steps for ahead in self.in_flight)

    def _count_steps_to_log(self, unlogged: int) -> int:
        """Return the steps from what is launched to the next line of the log."""
        launched = self.state.steps + self._count_launched()
        last = launched - unlogged
        if self.log_every > FIRST_LOGS[-1] and last in (0, *FIRST_LOGS):
            target = next(step for step in (*FIRST_LOGS, self.log_every) if step > last)
            return max(target - launched, 1)
        return max(self.log_every - unlogged, 1)

    def _advance(self, wanted: int) -> tuple[int, str]:
        """Run at most `wanted` steps; return their number, and why memory ran out, if it did."""
        state, program = self.state, self.state.program
        before = state.steps + self._count_launched()
        looked_at = time.perf_counter()
        for count in range(wanted):
            if count and (self.poll is None or self.poll.is_due()) and self._is_pause_due():
                return count, ""
            if count and time.perf_counter() - looked_at > LOOKING_S:
                if self.policy.cut():
                    return count, ""
                looked_at = time.perf_counter()
            try:
                with self.review.time_step() if self.review else nullcontext():
                    program.advance()  # one step of all lanes, no host sync
            except recovery.MEMORY_ERRORS as error:
                if program.num_places == 1:
                    raise
                return count, recovery.explain_shortage(error)
            state.events.record_step(program, before + count + 1)
            if self.review and self.review.is_over:
                self._end_review(self.review)
        return wanted, ""

    def _is_pause_due(self) -> bool:
        """Whether a stop or a checkpoint has to come before the next step."""
        self._poll_signals()
        return self.stop.requested or self.checkpoints.is_due()

    def _poll_signals(self) -> None:
        """Heed a signal that any of the ranks has received."""
        if self.ranks is not None:
            (self.stop.signal_number,) = self.ranks.agree(self.signals.signal_number)

    def _end_review(self, review: ThreadReview) -> None:
        """Train with the threads that the review has chosen."""
        program, self.review = self.state.program, None
        program.plan = review.apply(program.plan)
        torch.set_num_threads(program.plan.threads)
        self.state.events.report_review(program.plan, review)

    def _prepare_epochs(self) -> None:
        """Prepare the next epochs while the device is busy: one per round, and before an epoch's
        end all that are missing."""
        program = self.state.program
        for place, lane in self.state.list_active():
            progress, num_steps = lane.progress, program.num_steps(place)
            coming = progress.describe_epoch(progress.epochs, progress.done)
            coming = coming._replace(
                number=coming.number + 1, steps_before=coming.steps_before + num_steps, step=0
            )
            more = coming.number < lane.train.max_epochs
            if more and program.prepare(place, coming) and not self.is_epoch_end:
                return

    def _read(self) -> set[int]:
        """Record the oldest round; return the places whose losses are not finite."""
        state, current = self.state, self.in_flight.popleft()
        if current.event is not None:
            current.event.synchronize()  # the round's only host sync
        active, state.losses = state.list_active(), current.losses
        done = {place: current.count_done(place, lane.progress.done) for place, lane in active}
        state.steps += max(done.values())
        if state.timed_from is None and current.steps:
            state.timed_from = self.limit.measure_elapsed(), state.steps
        diverged, logged = set(), []
        for place, lane in active:
            progress, num_steps = lane.progress, state.program.num_steps(place)
            progress.record_steps(done[place], num_steps, repeated=current.steps - done[place])
            if self._is_stalled(lane, current.steps, done[place]):
                diverged.add(place)
            losses: list[float] = current.losses[place, progress.logged : progress.done].tolist()
            if current.is_complete and losses:  # none where a run resumes at an epoch's end
                progress.logged = progress.done
                logged.append(LoggedLosses(lane, losses, num_steps))
                if not all(map(math.isfinite, losses)):
                    diverged.add(place)
        if logged:
            state.events.log(state.steps, logged)
        return diverged

    def _is_stalled(self, lane: LaneResult, steps: int, done: int) -> bool:
        """Whether no smaller loss scale has kept a lane's gradients from overflowing."""
        stalled = 0 if done else self.stalled.get(lane.number, 0) + steps
        self.stalled[lane.number] = stalled
        return stalled >= MAX_REPEATS

    def _roll_back(self, place: int) -> None:
        """Return a lane to its epoch's start, in fp32 or at half its learning rate, or end it."""
        state, result = self.state, self.state.get_lane(place)
        progress = result.progress
        self.stalled.pop(result.number, None)
        progress.go_back()
        state.program.go_back(place)
        if state.num_entered == 1:
            state.steps = progress.step
        if progress.rollbacks == recovery.MAX_ROLLBACKS:
            self._end(place, DIVERGED)
            return
        progress.rollbacks += 1
        if state.program.leave_low_precision():
            remedy = "fp32 instead of fp16"
        else:
            progress.rate /= 2
            remedy = f"learning rate times {progress.rate:g}"
        state.events.report_divergence(result, remedy)
        state.begin({place: progress.next_epoch()})

    def _finish_epochs(self, diverged: set[int]) -> set[int]:
        """Validate lanes whose epoch is over, end them or begin their next; return their numbers.

        If a stop comes first or memory runs out, the epochs are finished later.
        """
        state, policy = self.state, self.policy
        over = [
            (place, lane)
            for place, lane in state.list_active()
            if place not in diverged and lane.progress.done == state.program.num_steps(place)
        ]
        due = [place for place, lane in over if lane.progress.is_validation_due(lane.train)]
        if over and self.review and not self.review.tried:
            self.review = None  # the first epoch was as planned
        if over:
            state.events.compare_with_plan(state.program, over[0][1].progress.done)
        scores = self._validate(due) if due else []
        if scores is None:
            return set()
        starts, verdicts = {}, dict[int, str]()
        if due and policy.judge:
            validated = [lane for place, lane in over if place in due]
            reasons = policy.judge(list(zip(validated, scores, strict=True)))
            verdicts = dict(zip(due, reasons, strict=True))
        for place, lane in over:
            lane.progress.finish_epoch()
            reason = lane.progress.find_stop_reason(lane.train) or verdicts.get(place, "")
            if reason:
                self._end(place, reason)
            else:
                starts[place] = state.start_epoch(place)
        state.begin(starts)
        if due and policy.stop_now:
            for place, lane in state.list_active():
                reason = "" if place in starts else policy.stop_now(lane)
                if reason:
                    self._end(place, reason)
        return {lane.number for place, lane in over if place in due}

    def _validate(self, places: Sequence[int]) -> list[float] | None:
        """Score lanes and save the weights of those that improved; None if a stop comes first, or
        if memory runs out, which halves the lanes."""
        state, began = self.state, time.perf_counter()
        try:
            scores = state.program.score(places, lambda: self.stop.requested)
        except recovery.MEMORY_ERRORS as error:
            if state.program.num_places == 1:
                raise
            shortage = recovery.explain_shortage(error)
        else:
            if scores is None:
                return None
            pairs = zip(places, scores, strict=True)
            state.program.keep_best([place for place, loss in pairs if self._judge(place, loss)])
            first = min(places, key=lambda place: state.get_lane(place).number)
            state.events.show_predictions(state.program, first, state.get_lane(first))
            state.validate_s += time.perf_counter() - began
            return scores
        # past the except block, whose traceback would pin the memory
        state.halve(shortage)
        return None

    def _judge(self, place: int, val_loss: float) -> bool:
        """Record a validation; return whether it is the lane's best so far."""
        state, result = self.state, self.state.get_lane(place)
        progress, num_steps = result.progress, state.program.num_steps(place)
        rate = progress.rate
        is_best = progress.record_validation(val_loss, result.train)
        train_loss = float(state.losses[place, : progress.done or num_steps].double().mean())
        validation = Validation(val_loss, train_loss, rate, is_best, num_steps)
        state.events.record_epoch(result, validation)
        return is_best

    def _validate_cut(self, validated: set[int]) -> None:
        """Validate the lanes that the time limit has cut, unless they just were or are dropped.

        A run resumed with more minutes starts from the checkpoint before this validation, as an
        uninterrupted run would have none here. Lanes without a step are dropped.
        """
        state = self.state
        for place, lane in state.list_active():
            is_empty = not lane.progress.step and state.num_entered > 1
            if is_empty or self.policy.drops_cut(lane):
                state.places[place] = None
        state.waiting = [lane for lane in state.waiting if lane.progress.step]
        while not self.stop.requested:
            active = state.list_active()
            places = [place for place, lane in active if lane.number not in validated]
            for _, lane in active:
                state.events.compare_with_plan(state.program, lane.progress.done)
            if not places or self._validate(places) is not None:
                return

    def _end(self, place: int, stop_reason: str) -> None:
        """End a lane, and give its place to the next one."""
        state, policy = self.state, self.policy
        result = state.get_lane(place)
        if policy.keeps_rows(result):
            result.rows = state.copy_rows(place)
        state.end(place, stop_reason, keep_rows=not policy.drop_ended)
        state.events.end_lane(result)
        lane = policy.next_lane(result) if policy.next_lane else None
        if lane is not None:
            state.enter(lane)
        state.fill_places()

    def _save(self) -> None:
        """Write a checkpoint, unless there is one of this point."""
        state = self.state
        only = state.list_all() if state.num_entered == 1 else []
        self.checkpoints.save(
            lambda: states.take_checkpoint(state, self.extra_state()),
            point=(state.steps, len(state.ended), state.num_entered),
            best_step=only[0].progress.best_step if only else 0,
        )
