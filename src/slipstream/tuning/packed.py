"""One pack of candidates in training: whose each lane is, what ends them, and who comes next."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import torch

from slipstream import config as configs
from slipstream.config import Config
from slipstream.engine import checkpoint, lanes, lanestate, pack, packing
from slipstream.engine.lane import Lane, refuse_larger
from slipstream.engine.lanes import Guide, Round, Rounds
from slipstream.engine.lanestate import LaneFit, Work
from slipstream.engine.loop import Stop
from slipstream.engine.plan import Plan
from slipstream.errors import UserError
from slipstream.runs import Event, Run
from slipstream.tuning import groups
from slipstream.tuning.candidates import Candidate, Outcome, TrialLane
from slipstream.tuning.groups import Shape
from slipstream.tuning.shelf import Ready

if TYPE_CHECKING:
    from slipstream.tuning.packs import Trainer

SETTLED = "its result stood already"


class Packed:
    """One pack in training."""

    def __init__(self, trainer: Trainer, run: Run) -> None:
        self.trainer, self.run = trainer, replace(run, watch=self._watch)
        self.shapes: list[Shape] = []
        """Of the pack, then those of its members: what may join them"""
        self.members: list[Candidate] = []
        self.places = 0
        self.ready: Ready | None = None
        self.work: Work | None = None
        self.rounds: Rounds | None = None
        self.stream: torch.cuda.Stream | None = None
        self.round: Round | None = None
        """That the device is busy with"""
        self.queue: deque[TrialLane] = deque()
        self.came: list[tuple[int, int]] = []
        """Whose each lane is, in the order that they came in: the candidate's number, the fold"""
        self.stopped = False
        """By a signal, with a checkpoint"""

    def begin(self, shape: Shape, members: Sequence[Candidate], stop: Stop) -> None:
        trainer = self.trainer
        ready = self.ready = trainer.shelf.get(members[0].config)
        device = ready.series.values.device
        self.members = list(members)
        self.shapes = [shape, *{groups.shape_of(one.config, device.type) for one in members}]
        every = [lane for one in members for lane in _lanes(one, ready)]
        places = self.places = min(len(every), trainer.most.get(shape, packing.MOST_PLACES))
        self.queue.extend(every[places:])
        widest = _widened(members[0].config, shape)
        roomy = [ready.weighed(c) for c in (widest, *trainer.director.extremes(widest))]
        plan, mode = ready.plan(widest)
        with self._at_work(plan):
            made = pack.make(
                every[:places],
                ready.dataset.signature,
                ready.series,
                plan,
                mode=mode,
                room=[*every, *(Lane(c, starts) for c in roomy for starts in ready.folds)],
            )
            self.came = [(lane.candidate.number, lane.fold) for lane in every[:places]]
            trainer.run.append(
                "pack",
                trials=[one.number for one in members],
                places=places,
                mode=mode,
                widths=shape.widths,
                batch=shape.batch,
                plan=plan.to_dict(),
            )
            self._go(lanes.started(made, self.run), stop)

    def resume(self, stop: Stop, most: int | None = None) -> bool:
        """Go on from the newest checkpoint; whether anything was in training. No more than `most`
        lanes train at a time."""
        trainer = self.trainer
        try:
            saved, wrong = checkpoint.newest(self.run)
        except UserError as error:
            what = "training the trials of a pack from their start"
            trainer.run.append("fallback", what=what, why=str(error))
            return False
        for what in wrong:
            trainer.run.append("fallback", what="an older checkpoint of the pack", why=what)
        facts = saved.facts["search"]
        self.shapes = [Shape(name, batch, tuple(widths)) for name, batch, widths in facts["shapes"]]
        self.came = [(number, fold) for number, fold in facts["came"]]
        self.places = min(len(saved.facts["places"]), most or packing.MOST_PLACES)
        training = {told["number"] for told in saved.facts["lanes"]}
        waiting = [(number, fold) for number, fold in facts["queue"]]
        owners = {self.came[at][0] for at in training} | {number for number, _ in waiting}
        if not training:
            return False
        found = {number: self._again(number, facts) for number in sorted(owners)}
        self.members = list(found.values())
        trainer.running += self.members
        ready = self.ready = trainer.shelf.get(self.members[0].config)
        of = {number: _lanes(one, ready) for number, one in found.items()}
        back = {at: of[self.came[at][0]][self.came[at][1]] for at in training}
        self.queue.extend(of[number][fold] for number, fold in waiting)
        with self._at_work(Plan.from_dict(saved.facts["plan"])):
            signature = ready.dataset.signature
            given = saved, back, signature, ready.series, self.run
            self._go(lanestate.restored(*given, most=most), stop)
        return True

    def _go(self, work: Work, stop: Stop) -> None:
        self.work = work
        self.rounds = lanes.rounds(work, stop, guide=self._guide(), facts=self._facts)

    @contextmanager
    def _at_work(self, plan: Plan) -> Iterator[None]:
        """In the pack's own stream, with torch's flags as its plan wants them."""
        assert self.ready is not None
        device = self.ready.series.values.device
        with ExitStack() as stack:
            stack.enter_context(plan.flags())
            if device.type == "cuda":
                if self.stream is None:
                    self.stream = torch.cuda.Stream(device)
                    self.stream.wait_stream(torch.cuda.current_stream(device))
                stack.enter_context(torch.cuda.stream(self.stream))
            yield

    def is_ready(self) -> bool:
        """Whether the device is done with the round."""
        return self.round is None or self.round.is_over()

    def go_on(self) -> bool:
        """A round; whether there will be another."""
        assert self.rounds is not None
        assert self.work is not None
        with self._at_work(self.work.pack.plan):
            self.round = next(self.rounds, None)
        if self.round is None:
            self.close()
            return False
        return True

    def close(self) -> None:
        """Let go of the pack's memory: what is left of this one lives until it is collected."""
        if self.rounds is not None:
            self.rounds.close()
        self.rounds = self.work = None

    def _again(self, number: int, facts: dict[str, Any]) -> Candidate:
        one = self.trainer.director.again(number)
        ended = facts["outcomes"].get(str(number), {})
        one.outcomes = {int(fold): Outcome(**told) for fold, told in ended.items()}
        for epoch, row in facts["seen"].get(str(number), {}).items():
            one.seen[int(epoch)] = {int(fold): loss for fold, loss in row.items()}
        return one

    def _guide(self) -> Guide:
        return Guide(self._refill, self._verdict, _doomed, forget=True)

    def _verdict(self, validated: Sequence[tuple[LaneFit, float]]) -> list[str]:
        """What has been decided of each lane's candidate; all of its folds end together."""
        for fit, loss in validated:
            one, fold = _owner(fit)
            epoch = fit.progress.epochs + 1
            mean = None if one.settled else one.note(epoch, fold, loss)
            if mean is not None and not one.verdict:
                one.verdict = self.trainer.director.validated(one, epoch, mean)
        owners = [_owner(fit)[0] for fit, _ in validated]
        return [SETTLED if one.settled else one.verdict for one in owners]

    def _refill(self, fit: LaneFit) -> Lane | None:
        one, fold = _owner(fit)
        trainer = self.trainer
        last = one.end(fold, fit)
        if not one.settled:
            trainer.director.lane_ended(one, fold)
        if last:
            trainer.running.remove(one)
            self.members.remove(one)
            if not one.settled:
                trainer.director.ended(one)
            one.weights = {}
        if not self.queue:
            self._queue_another()
        if not self.queue:
            return None
        lane = self.queue.popleft()
        self.came.append((lane.candidate.number, lane.fold))
        return lane

    def _queue_another(self) -> None:
        ready = self.ready
        assert ready is not None
        found = self.trainer.another(self._fits)
        if found is not None:
            self.members.append(found)
            self.trainer.running.append(found)
            self.queue.extend(_lanes(found, ready))

    def _fits(self, one: Candidate) -> bool:
        """Whether it may join; no captured program changes for it."""
        assert self.ready is not None
        assert self.work is not None
        device = self.ready.series.values.device.type
        if groups.shape_of(one.config, device) not in self.shapes:
            return False
        try:
            for lane in _lanes(one, self.ready):
                refuse_larger(lane, self.work.pack.room)
        except UserError:
            return False
        return True

    def _watch(self, event: Event) -> None:
        """Show what happens in the pack, with the candidates' numbers."""
        if event["event"] == "trained":
            self.stopped = event["signal_number"] != 0
        if "lane" in event and event["lane"] < len(self.came):
            number, fold = self.came[event["lane"]]
            event = event | {"trial": number, "fold": fold}
        self.trainer.run.show(event)

    def _facts(self) -> dict[str, Any]:
        """What a checkpoint tells of the search."""
        return {
            "search": {
                "shapes": list(self.shapes),
                "came": list(self.came),
                "queue": [(lane.candidate.number, lane.fold) for lane in self.queue],
                "outcomes": {
                    str(one.number): {fold: asdict(end) for fold, end in one.outcomes.items()}
                    for one in self.members
                },
                "seen": {str(one.number): one.half_seen for one in self.members},
            }
        }


def _doomed(fit: LaneFit) -> str:
    return _owner(fit)[0].verdict


def _owner(fit: LaneFit) -> tuple[Candidate, int]:
    lane = fit.lane
    assert isinstance(lane, TrialLane)
    return lane.candidate, lane.fold


def _lanes(one: Candidate, ready: Ready) -> list[TrialLane]:
    config = ready.weighed(one.config)
    return [
        TrialLane(config, starts, one, fold, init=ready.init)
        for fold, starts in enumerate(ready.folds)
    ]


def _widened(config: Config, shape: Shape) -> Config:
    """The same settings, as wide as the pack."""
    if config.model.kind == "linear" or groups.of_one_width(config.model):
        return config
    return configs.changed(config, {"model.hidden": shape.widths, "train.batch": shape.batch})
