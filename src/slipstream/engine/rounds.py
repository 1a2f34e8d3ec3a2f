"""The loop over a pack: every lane's epochs, validations, early stop and recoveries, each its own.

The lanes step together. A round lasts until the next of them has done its epoch at most; those that
have are scored at once, and go on, or end and leave their place to another. A GPU has the next
round's steps before the last one's losses are read, so that it need not wait for the host.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

import torch
from torch import Tensor

from slipstream.config import Signature
from slipstream.data.windows import Series
from slipstream.engine import lanestate, recovery
from slipstream.engine.checkpoint import Checkpoint, CheckpointWriter
from slipstream.engine.lanes.lane import EpochStart, Lane
from slipstream.engine.lanes.pack import Pack
from slipstream.engine.lanestate import LaneResult, TrainingState, WaitingLane, next_epoch
from slipstream.engine.loop import (
    DIVERGED,
    CheckpointSchedule,
    StopRequest,
    catch_signals,
    check_patience,
    record_validation,
)
from slipstream.runs import Run

EMPTY = 0.25
"""Share of places without a lane from which a smaller pack is made"""
AHEAD = {"cuda": 2, "cpu": 1}
"""Rounds that a device has at a time"""
OUT_OF_TIME, INTERRUPTED = "train.minutes have passed", "interrupted"
NextLane = Callable[[LaneResult], Lane | None]
"""What takes the place of a lane that has ended, if anything does"""
StopVerdict = Callable[[Sequence[tuple[LaneResult, float]]], Sequence[str]]
"""Lanes and their new validation losses to why each has to end; nothing lets one go on"""
ExtraState = Callable[[], Mapping[str, Any]]
"""What a checkpoint keeps beside the lanes, as it stands then"""


class LanePolicy(NamedTuple):
    """What decides over lanes from outside."""

    next_lane: NextLane | None = None
    judge: StopVerdict | None = None
    stop_now: Callable[[LaneResult], str] | None = None
    """Why a lane in the middle of an epoch has to end, where the verdict on others says so"""
    drop_ended: bool = False
    """Keep nothing of a lane once `refill` has seen how it ended"""


class Round(NamedTuple):
    """Steps that the device has been given."""

    steps: int
    losses: Tensor
    """[K, S]: as they are when the steps are done"""
    event: torch.cuda.Event | None
    is_complete: bool = True
    """Whether it came to its end; one that a signal cut short is logged with the rest of it, so a
    run that goes on has the unbroken one's log"""

    def is_done(self) -> bool:
        return self.event is None or self.event.query()


NO_POLICY = LanePolicy()
RoundIterator = Generator[Round, None, list[LaneResult]]


def fit(
    pack: Pack,
    run: Run,
    *,
    guide: LanePolicy = NO_POLICY,
    facts: ExtraState = dict,
) -> list[LaneResult]:
    """Train every lane to its own end and close the pack; the fits come in the lanes' order.

    The guide is asked for another lane when one ends. `facts` go with each checkpoint. A
    signal stops it after the step in hand, with a checkpoint.
    """
    with catch_signals() as stop:
        return _drained(train_rounds(start_pack(pack, run), stop, guide=guide, facts=facts))


def resume(
    saved: Checkpoint,
    lanes: Sequence[Lane] | Mapping[int, Lane],
    signature: Signature,
    series: Series,
    run: Run,
    *,
    guide: LanePolicy = NO_POLICY,
    facts: ExtraState = dict,
    most: int | None = None,
) -> list[LaneResult]:
    """Go on from a checkpoint as if it had never stopped; `lanes` are all that had come until then,
    by their number. No more than `most` train at a time; the others wait for a place."""
    work = lanestate.restore_pack(saved, lanes, signature, series, run, most=most)
    with catch_signals() as stop:
        return _drained(train_rounds(work, stop, guide=guide, facts=facts))


def _drained(rounds: RoundIterator) -> list[LaneResult]:
    while True:
        try:
            next(rounds)
        except StopIteration as end:
            found: list[LaneResult] = end.value
            return found


def start_pack(pack: Pack, run: Run) -> TrainingState:
    """A pack with all of its lanes at their first step."""
    work = TrainingState(pack, run, [None] * len(pack.lanes))
    for place, lane in enumerate(pack.lanes):
        assert lane is not None
        _enter(work, place, lane)
    pack.begin({place: EpochStart() for place in range(len(pack.lanes))})
    return work


def train_rounds(
    work: TrainingState,
    stop: StopRequest,
    *,
    guide: LanePolicy = NO_POLICY,
    facts: ExtraState = dict,
) -> RoundIterator:
    """Train to the end, as `fit` does, one round at a time: while the device is busy with the round
    that it yields, other packs can have the host."""
    engine, plan = work.pack.capacity.config.engine, work.pack.plan
    with CheckpointWriter(work.run, background=engine.async_checkpoints) as writer:
        try:
            yield from _rounds(work, stop, CheckpointSchedule(engine, writer), guide, facts)
        finally:
            work.pack.close()
            if plan.capture:
                recovery.free_memory()
    work.run.append(
        "trained",
        steps=work.steps,
        train_s=work.train_s,
        validate_s=work.validate_s,
        failures=work.pack.failures(),
        signal_number=stop.signal_number,
    )
    return sorted(work.list_all(), key=lambda one: one.number)


def _rounds(
    work: TrainingState,
    stop: StopRequest,
    keeper: CheckpointSchedule,
    guide: LanePolicy,
    facts: ExtraState,
) -> Generator[Round, None, None]:
    spent_before = work.train_s + work.validate_s
    began, late = time.perf_counter(), False
    under_way: deque[Round] = deque()

    def save() -> None:
        keeper.save(
            lambda: lanestate.take_checkpoint(work, facts()), at=(work.steps, len(work.ended))
        )

    while training := work.list_active():
        round_began = time.perf_counter()
        to_the_end = _launch(work, under_way, stop)
        _prepare(work, all_of_them=to_the_end)
        yield under_way[0]
        diverged = _read(work, under_way.popleft())
        minutes = [one.lane.config.train.minutes for _, one in training]
        limit = min((60 * m for m in minutes if m), default=math.inf)
        late = time.perf_counter() - began + spent_before > limit
        if (
            diverged or late or stop.requested or keeper.is_due()
        ):  # for these, all lanes stand still
            while under_way:
                diverged |= _read(work, under_way.popleft())
        work.train_s += time.perf_counter() - round_began
        for place in sorted(diverged):
            _roll_back(work, place, guide)
        if stop.requested:
            break
        validated = _finish_epochs(work, diverged, guide)
        if late:
            break
        if not under_way and keeper.is_due(validated=bool(validated)):
            save()
        _compact(work)
    save()
    if late and not stop.requested:
        _judge_the_cut(work, validated)
    stopped = INTERRUPTED if stop.requested else OUT_OF_TIME
    lanestate.mark_stopped(work, stopped, signal_number=stop.signal_number)


def _launch(work: TrainingState, under_way: deque[Round], stop: StopRequest) -> bool:
    """Give the device rounds; whether they are all until an epoch's end."""
    pack, log_every = work.pack, work.pack.capacity.config.engine.log_every
    left = min(pack.num_steps(place) - one.progress.done for place, one in work.list_active())
    left -= sum(some.steps for some in under_way)
    unlogged = max(one.progress.done - one.progress.logged for _, one in work.list_active())
    while len(under_way) < AHEAD[pack.plan.device.type] and (left or not under_way):
        if under_way and stop.requested:
            break
        taken, wanted = 0, min(left, log_every if under_way else max(log_every - unlogged, 1))
        while taken < wanted and not (taken and stop.requested):
            pack.advance()  # one program for all lanes, no host sync
            taken += 1
        left -= taken
        under_way.append(_after(pack, taken)._replace(is_complete=taken == wanted))
    return not left


def _after(pack: Pack, steps: int) -> Round:
    """The round that these steps are, as the device comes to its end."""
    losses = pack.buffers["losses"]
    if not losses.is_cuda:
        return Round(steps, losses, None)
    read = torch.empty(losses.shape, dtype=losses.dtype, pin_memory=True)
    read.copy_(losses, non_blocking=True)
    done = torch.cuda.Event()
    done.record(torch.cuda.current_stream(losses.device))
    return Round(steps, read, done)


def _enter(work: TrainingState, place: int, lane: Lane) -> None:
    work.places[place] = LaneResult(work.num_entered, lane)
    work.num_entered += 1


def _prepare(work: TrainingState, *, all_of_them: bool) -> None:
    """Lay out epochs that come next while the device is busy with its steps: one a round, and at an
    epoch's end those that are missing."""
    pack = work.pack
    for place, one in work.list_active():
        coming = one.progress.epochs + 1
        if coming < one.lane.config.train.epochs and not pack.is_prepared(place, coming):
            pack.prepare(place, coming)
            if not all_of_them:
                return


def _read(work: TrainingState, some: Round) -> set[int]:
    """Note the steps taken and read their losses; which lanes' are no longer finite."""
    if some.event is not None:
        some.event.synchronize()  # the round's only host sync
    taken, losses = some.steps, some.losses
    work.steps, work.losses = work.steps + taken, losses
    diverged, means = set(), {}
    for place, one in work.list_active():
        at = one.progress
        at.step, at.done = at.step + taken, at.done + taken
        seen = losses[place, at.logged : at.done].double()
        at.logged = at.done if some.is_complete else at.logged
        at.epoch = at.epochs + at.done / work.pack.num_steps(place)
        means[one.number] = float(seen.mean())
        if not bool(seen.isfinite().all()):
            diverged.add(place)
    if taken and some.is_complete:  # none where a run goes on at an epoch's end
        work.run.append("log", step=work.steps, losses=means)
    return diverged


def _roll_back(work: TrainingState, place: int, guide: LanePolicy) -> None:
    """Put a lane back to its epoch's start with half its learning rate, or end it."""
    one = work.places[place]
    assert one is not None
    at = one.progress
    at.step, at.done, at.logged = at.step - at.done, 0, 0
    at.epoch = float(at.epochs)
    work.pack.go_back(place)
    if at.rollbacks == recovery.MAX_ROLLBACKS:
        _end(work, place, DIVERGED, guide)
        return
    at.rollbacks += 1
    at.rate /= 2
    remedy = f"learning rate times {at.rate:g}"
    work.run.append("recovery", lane=one.number, what=DIVERGED, remedy=remedy, step=at.step)
    work.pack.begin({place: next_epoch(at)})


def _finish_epochs(work: TrainingState, spared: set[int], guide: LanePolicy) -> set[int]:
    """Score the lanes whose epoch is over; end them or go on. The numbers of those scored."""
    pack = work.pack
    over = [
        (place, one)
        for place, one in work.list_active()
        if place not in spared and one.progress.done == pack.num_steps(place)
    ]
    due = [place for place, one in over if _validates(one)]
    told: dict[int, str] = {}
    if due:
        scores = _score(work, due)
        if guide.judge:
            mine = [one for place, one in over if place in due]
            verdicts = guide.judge(list(zip(mine, scores, strict=True)))
            told = dict(zip(due, verdicts, strict=True))
    begun = {}
    for place, one in over:
        at, train = one.progress, one.lane.config.train
        at.epochs, at.done, at.logged = at.epochs + 1, 0, 0
        stopped = check_patience(at, train)
        if not stopped and at.epochs == train.epochs:
            stopped = "all epochs done"
        stopped = stopped or told.get(place, "")
        if stopped:
            _end(work, place, stopped, guide)
        else:
            begun[place] = next_epoch(at)
    if begun:
        pack.begin(begun)
    if due and guide.stop_now:
        for place, one in work.list_active():
            why = "" if place in begun else guide.stop_now(one)
            if why:
                _end(work, place, why, guide)
    return {one.number for place, one in over if place in due}


def _score(work: TrainingState, places: Sequence[int]) -> list[float]:
    """Validate lanes and keep the weights of those that are better than before."""
    began = time.perf_counter()
    scores = work.pack.score(places)
    pairs = zip(places, scores, strict=True)
    work.pack.keep_best([place for place, val_loss in pairs if _judge(work, place, val_loss)])
    work.validate_s += time.perf_counter() - began
    return scores


def _judge_the_cut(work: TrainingState, validated: set[int]) -> None:
    """Score the lanes that the time limit has cut, apart from those that were just validated.

    An unbroken run has no validation here, and one with more minutes goes on without it: the last
    checkpoint is of before. A lane that has not begun has nothing to tell.
    """
    for place, one in work.list_active():
        if not one.progress.step:
            work.places[place] = None
    work.waiting = [one for one in work.waiting if one.result.progress.step]
    places = [place for place, one in work.list_active() if one.number not in validated]
    if places:
        _score(work, places)


def _validates(one: LaneResult) -> bool:
    epoch, train = one.progress.epochs + 1, one.lane.config.train
    return not epoch % train.validate_every or epoch == train.epochs


def _judge(work: TrainingState, place: int, val_loss: float) -> bool:
    """Note a validation; whether it is the lane's best so far."""
    one = work.places[place]
    assert one is not None
    at, train = one.progress, one.lane.config.train
    improved = val_loss < at.best_loss - train.min_delta
    rate, num_steps = at.rate, work.pack.num_steps(place)
    record_validation(at, val_loss, improved, train)
    # at an epoch's end, in its midst, or where one was not to be validated
    epoch = at.epochs + 1 if at.done == num_steps else at.epoch
    work.run.append(
        "epoch",
        lane=one.number,
        epoch=epoch,
        step=at.step,
        train_loss=float(work.losses[place, : at.done or num_steps].double().mean()),
        val_loss=val_loss,
        rate=rate,
        best=improved,
    )
    return improved


def _end(work: TrainingState, place: int, stopped: str, guide: LanePolicy) -> None:
    """Freeze a lane, take its best weights, and give its place away."""
    one, pack = work.places[place], work.pack
    assert one is not None
    one.stop_reason, one.weights = stopped, lanestate.read_best_weights(work, place)
    work.ended.append(one)
    work.run.append("lane", lane=one.number, stopped=stopped, **asdict(one.progress))
    work.places[place] = None
    pack.leave(place)
    lane = guide.next_lane(one) if guide.next_lane else None
    if guide.drop_ended:
        work.ended.pop()
    if lane is not None:
        work.waiting.append(WaitingLane(LaneResult(work.num_entered, lane), {}))
        work.num_entered += 1
    if work.waiting:
        following = work.waiting.pop(0)
        work.seat(place, following)
        pack.begin({place: next_epoch(following.result.progress)})


def _compact(work: TrainingState) -> None:
    keep = [place for place, _ in work.list_active()]
    places = len(work.places)
    if keep and places - len(keep) >= EMPTY * places:
        work.pack = work.pack.compact(keep)
        work.places = [work.places[place] for place in keep]
