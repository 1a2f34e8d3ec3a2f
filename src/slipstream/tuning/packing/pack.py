"""One pack of candidates in training: whose each lane is, what ends them, and who comes next."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import torch

from slipstream import config as configs
from slipstream.autotune import pack_size
from slipstream.config import Config
from slipstream.engine import checkpoint, lanestate, rounds
from slipstream.engine.lanes import pack
from slipstream.engine.lanes.lane import Lane, check_capacity
from slipstream.engine.lanestate import LaneResult, TrainingState
from slipstream.engine.loop import StopRequest
from slipstream.engine.plan import Plan
from slipstream.engine.rounds import LanePolicy, Round, RoundIterator
from slipstream.errors import UserError
from slipstream.runs import Event, Run
from slipstream.tuning.packing import grouping
from slipstream.tuning.packing.dataset_cache import TrialData
from slipstream.tuning.packing.grouping import PackShape
from slipstream.tuning.packing.trial import FoldResult, TrialLane, TrialRun

if TYPE_CHECKING:
    from slipstream.tuning.packing.scheduler import PackScheduler

SETTLED = "its result stood already"


class TrialPack:
    """One pack in training."""

    def __init__(self, trainer: PackScheduler, run: Run) -> None:
        self.scheduler, self.run = trainer, replace(run, watch=self._watch)
        self.shapes: list[PackShape] = []
        """Of the pack, then those of its members: what may join them"""
        self.trials: list[TrialRun] = []
        self.num_lanes = 0
        self.data: TrialData | None = None
        self.work: TrainingState | None = None
        self.rounds: RoundIterator | None = None
        self.stream: torch.cuda.Stream | None = None
        self.round: Round | None = None
        """That the device is busy with"""
        self.queue: deque[TrialLane] = deque()
        self.lane_owners: list[tuple[int, int]] = []
        """Whose each lane is, in the order that they came in: the candidate's number, the fold"""
        self.stopped = False
        """By a signal, with a checkpoint"""

    def start(self, shape: PackShape, members: Sequence[TrialRun], stop: StopRequest) -> None:
        trainer = self.scheduler
        ready = self.data = trainer.datasets.get(members[0].config)
        device = ready.series.values.device
        self.trials = list(members)
        self.shapes = [
            shape,
            *{grouping.get_pack_shape(one.config, device.type) for one in members},
        ]
        every = [lane for one in members for lane in _lanes(one, ready)]
        places = self.num_lanes = min(len(every), trainer.max_lanes.get(shape, pack_size.MAX_LANES))
        self.queue.extend(every[places:])
        widest = _widened(members[0].config, shape)
        roomy = [
            ready.apply_class_weights(c) for c in (widest, *trainer.source.list_extremes(widest))
        ]
        plan, mode = ready.make_plan(widest)
        with self._at_work(plan):
            made = pack.build_pack(
                every[:places],
                ready.dataset.signature,
                ready.series,
                plan,
                mode=mode,
                room=[*every, *(Lane(c, starts) for c in roomy for starts in ready.folds)],
            )
            self.lane_owners = [(lane.trial.number, lane.fold) for lane in every[:places]]
            trainer.run.append(
                "pack",
                trials=[one.number for one in members],
                places=places,
                mode=mode,
                widths=shape.widths,
                batch=shape.batch,
                plan=plan.to_dict(),
            )
            self._go(rounds.start_pack(made, self.run), stop)

    def resume(self, stop: StopRequest, most: int | None = None) -> bool:
        """Go on from the newest checkpoint; whether anything was in training. No more than `most`
        lanes train at a time."""
        trainer = self.scheduler
        try:
            saved, wrong = checkpoint.read_newest(self.run)
        except UserError as error:
            what = "training the trials of a pack from their start"
            trainer.run.append("fallback", what=what, why=str(error))
            return False
        for what in wrong:
            trainer.run.append("fallback", what="an older checkpoint of the pack", why=what)
        facts = saved.metadata["search"]
        self.shapes = [
            PackShape(name, batch, tuple(widths)) for name, batch, widths in facts["shapes"]
        ]
        self.lane_owners = [(number, fold) for number, fold in facts["came"]]
        self.num_lanes = min(len(saved.metadata["places"]), most or pack_size.MAX_LANES)
        training = {told["number"] for told in saved.metadata["lanes"]}
        waiting = [(number, fold) for number, fold in facts["queue"]]
        owners = {self.lane_owners[at][0] for at in training} | {number for number, _ in waiting}
        if not training:
            return False
        found = {number: self._again(number, facts) for number in sorted(owners)}
        self.trials = list(found.values())
        trainer.running += self.trials
        ready = self.data = trainer.datasets.get(self.trials[0].config)
        of = {number: _lanes(one, ready) for number, one in found.items()}
        back = {at: of[self.lane_owners[at][0]][self.lane_owners[at][1]] for at in training}
        self.queue.extend(of[number][fold] for number, fold in waiting)
        with self._at_work(Plan.from_dict(saved.metadata["plan"])):
            signature = ready.dataset.signature
            given = saved, back, signature, ready.series, self.run
            self._go(lanestate.restore_pack(*given, most=most), stop)
        return True

    def _go(self, work: TrainingState, stop: StopRequest) -> None:
        self.work = work
        self.rounds = rounds.train_rounds(work, stop, guide=self._guide(), facts=self._facts)

    @contextmanager
    def _at_work(self, plan: Plan) -> Iterator[None]:
        """In the pack's own stream, with torch's flags as its plan wants them."""
        assert self.data is not None
        device = self.data.series.values.device
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
        return self.round is None or self.round.is_done()

    def advance(self) -> bool:
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

    def _again(self, number: int, facts: dict[str, Any]) -> TrialRun:
        one = self.scheduler.source.reopen(number)
        ended = facts["outcomes"].get(str(number), {})
        one.fold_results = {int(fold): FoldResult(**told) for fold, told in ended.items()}
        for epoch, row in facts["seen"].get(str(number), {}).items():
            one.val_losses[int(epoch)] = {int(fold): loss for fold, loss in row.items()}
        return one

    def _guide(self) -> LanePolicy:
        return LanePolicy(self._refill, self._verdict, _doomed, drop_ended=True)

    def _verdict(self, validated: Sequence[tuple[LaneResult, float]]) -> list[str]:
        """What has been decided of each lane's candidate; all of its folds end together."""
        for fit, loss in validated:
            one, fold = _owner(fit)
            epoch = fit.progress.epochs + 1
            mean = None if one.is_final else one.record_validation(epoch, fold, loss)
            if mean is not None and not one.stop_reason:
                one.stop_reason = self.scheduler.source.report(one, epoch, mean)
        owners = [_owner(fit)[0] for fit, _ in validated]
        return [SETTLED if one.is_final else one.stop_reason for one in owners]

    def _refill(self, fit: LaneResult) -> Lane | None:
        one, fold = _owner(fit)
        trainer = self.scheduler
        last = one.finish_fold(fold, fit)
        if not one.is_final:
            trainer.source.finish_fold(one, fold)
        if last:
            trainer.running.remove(one)
            self.trials.remove(one)
            if not one.is_final:
                trainer.source.finish(one)
            one.weights = {}
        if not self.queue:
            self._queue_another()
        if not self.queue:
            return None
        lane = self.queue.popleft()
        self.lane_owners.append((lane.trial.number, lane.fold))
        return lane

    def _queue_another(self) -> None:
        ready = self.data
        assert ready is not None
        found = self.scheduler.take_fitting(self._fits)
        if found is not None:
            self.trials.append(found)
            self.scheduler.running.append(found)
            self.queue.extend(_lanes(found, ready))

    def _fits(self, one: TrialRun) -> bool:
        """Whether it may join; no captured program changes for it."""
        assert self.data is not None
        assert self.work is not None
        device = self.data.series.values.device.type
        if grouping.get_pack_shape(one.config, device) not in self.shapes:
            return False
        try:
            for lane in _lanes(one, self.data):
                check_capacity(lane, self.work.pack.capacity)
        except UserError:
            return False
        return True

    def _watch(self, event: Event) -> None:
        """Show what happens in the pack, with the candidates' numbers."""
        if event["event"] == "trained":
            self.stopped = event["signal_number"] != 0
        if "lane" in event and event["lane"] < len(self.lane_owners):
            number, fold = self.lane_owners[event["lane"]]
            event = event | {"trial": number, "fold": fold}
        self.scheduler.run.notify(event)

    def _facts(self) -> dict[str, Any]:
        """What a checkpoint tells of the search."""
        return {
            "search": {
                "shapes": list(self.shapes),
                "came": list(self.lane_owners),
                "queue": [(lane.trial.number, lane.fold) for lane in self.queue],
                "outcomes": {
                    str(one.number): {fold: asdict(end) for fold, end in one.fold_results.items()}
                    for one in self.trials
                },
                "seen": {str(one.number): one.incomplete_epochs for one in self.trials},
            }
        }


def _doomed(fit: LaneResult) -> str:
    return _owner(fit)[0].stop_reason


def _owner(fit: LaneResult) -> tuple[TrialRun, int]:
    lane = fit.lane
    assert isinstance(lane, TrialLane)
    return lane.trial, lane.fold


def _lanes(one: TrialRun, ready: TrialData) -> list[TrialLane]:
    config = ready.apply_class_weights(one.config)
    return [
        TrialLane(config, starts, one, fold, init=ready.init)
        for fold, starts in enumerate(ready.folds)
    ]


def _widened(config: Config, shape: PackShape) -> Config:
    """The same settings, as wide as the pack."""
    if not (config.model.spec.has_hidden and config.model.can_pad):
        return config
    return configs.replace_settings(
        config, {"model.hidden": shape.widths, "train.batch": shape.batch}
    )
