"""A run of several models, trained as lanes: repeats from other seeds, folds of a walk, or both."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from slipstream import runs
from slipstream.config import Config
from slipstream.data.dataset import Dataset
from slipstream.engine import checkpoint, lanes, measure, monitor, pack, packing, recover
from slipstream.engine.checkpoint import Saved
from slipstream.engine.encoder import Match
from slipstream.engine.job import Task
from slipstream.engine.lane import Lane
from slipstream.engine.lanes import Guide
from slipstream.engine.lanestate import LaneFit
from slipstream.engine.passes import Mode
from slipstream.engine.plan import Plan
from slipstream.errors import Interrupted, UserError
from slipstream.runs import Event, Run
from slipstream.training import figures, setup
from slipstream.training.setup import Begun, Result, timed

FIXED = {"train.epochs", "train.patience"}
"""What only a run of one model may change when it is resumed: of lanes that have ended, the best
weights are all that is left"""


def wanted(settings: Config) -> bool:
    """Whether this is asked for, and not a run of one model."""
    walks = settings.data.split.walk_forward is not None
    return not settings.masked and (settings.train.repeats > 1 or walks)


def refuse(settings: Config, dataset: Dataset, plan: Plan) -> None:
    """A UserError names what cannot be trained as lanes."""
    what = f"train.repeats = {settings.train.repeats}"
    if settings.data.split.walk_forward is not None:
        what = "data.split.walk_forward"
    if dataset.stream is not None or plan.home != "device":
        raise UserError(
            f"{what} trains several models from one copy of the series on the device, but they are "
            f"to live elsewhere ({plan.home}: {plan.reasons['home']}); leave engine.home and "
            "engine.preset as they are, cut the data, or train one model"
        )
    if settings.augment.cache:
        raise UserError(
            f"{what} trains several models from one copy of the series on the device, so windows "
            "are augmented there; take augment.cache out, or train one model"
        )
    if settings.engine.sync:
        raise UserError(
            f"{what} trains without waiting for single steps; take engine.sync out, or train one "
            "model"
        )


def train(begun: Begun) -> Result:
    """Train all lanes, score each, keep them, and write everything."""
    run, dataset, seconds, saved = begun.run, begun.dataset, begun.seconds, begun.start.saved
    with setup.watched(begun) as watching:
        task, chosen = setup.prepared(begun)
        settings = task.config
        every = lanes_of(settings, dataset, task.init)
        with timed(seconds, "plan"):
            packed = _packed(task, every, chosen, saved)
        chosen = packed.plan
        with chosen.flags():
            parameters = sum(p.numel() for p in task.model.parameters())
            _announce(task, packed, parameters, saved)
            packed, fits, trained = _fit(task, packed, saved, watching)
            setup.keep_folder(run, settings, begun.settings)
            seconds |= {"training": trained["train_s"], "validation": trained["validate_s"]}
            chosen = setup.as_it_ran(run, chosen, trained["failures"])
            groups = figures.grouped(fits, dataset, settings.train.repeats)
            found = figures.best(groups[-1].fits)
            if found is not None:
                setup.keep_model(run, found.weights, dataset)
            if trained["signal_number"]:
                raise _interrupted(run, fits, len(every), found, trained["signal_number"])
            figures.refuse_failed(groups)
            with timed(seconds, "scoring"):
                run.append("scoring", what=f"{len(every)} models")
                scored = figures.score_all(task, chosen, groups)
            with timed(seconds, "baselines"):
                run.append("scoring", what="the baselines")
                scored = figures.with_baselines(task, groups, scored)
            if chosen.device.type == "cuda":
                recover.free_memory()
    assert found is not None
    logged = list(runs.events(run))
    with timed(seconds, "scoring"):
        summary, detail = figures.summary(task, groups, scored)
    figures.keep(task, groups, scored, summary["uses"])
    summary |= {
        "steps": found.progress.step,
        "epochs": found.progress.epoch,
        "best_epoch": found.progress.best_epoch,
        "stopped": found.stopped,
        "parameters": parameters,
        "windows_per_s": sum(f.progress.epoch * len(f.lane.starts["train"]) for f in fits)
        / trained["train_s"],
        "plan": chosen.to_dict(),
        **({"init_from": task.init.told} if task.init else {}),
        "pack": packed.told() | {"steps": trained["steps"]},
        "monitor": monitor.summarize(logged),
        "estimate": monitor.judge(logged, steps=trained["steps"], took_s=trained["train_s"])
        | {"planned_steps": None},
    }
    runs.write_json(run.folder / "plan.json", chosen.to_dict() | {"pack": packed.told()})
    return setup.ended(begun, summary, detail)


def lanes_of(settings: Config, dataset: Dataset, init: Match | None = None) -> list[Lane]:
    """Every fold's repeats, the earliest fold first, all from the same encoder if there is one."""
    assert dataset.memory is not None
    folds = [fold.starts for fold in dataset.folds] or [dataset.memory.starts]
    seeds = range(settings.seed, settings.seed + settings.train.repeats)
    configs = [settings.model_copy(update={"seed": seed}) for seed in seeds]
    return [
        Lane(
            one,
            {name: starts[name] for name in ("train", "val")},
            init=init.weights if init else {},
        )
        for starts in folds
        for one in configs
    ]


@dataclass(frozen=True)
class Packed:
    """How the lanes are trained."""

    lanes: list[Lane]
    plan: Plan
    mode: Mode
    places: int
    why: str
    evidence: list[dict[str, Any]]

    @property
    def rounds(self) -> int:
        """How many lanes have the same place, one after the other"""
        return -(-len(self.lanes) // self.places)

    def told(self) -> dict[str, Any]:
        return {
            "lanes": len(self.lanes),
            "places": self.places,
            "mode": self.mode,
            "why": self.why,
            "evidence": self.evidence,
        }


def _packed(task: Task, every: list[Lane], chosen: Plan, saved: Saved | None) -> Packed:
    """The lanes' mode and the places that they take, from measuring where that pays."""
    assert task.series is not None
    if chosen.micro_batch:
        raise UserError(
            f"train.batch = {task.config.train.batch} does not fit into memory in one pass; for "
            f"several models at once, set train.batch = {chosen.micro_batch} and raise "
            "train.accumulate as much"
        )
    if saved is not None:
        mode, places = saved.facts["mode"], saved.facts["pack"]["places"]
        return Packed(every, packing.as_pack(chosen, mode, None), mode, places, "as it began", [])
    limit_s = min(measure.LONGEST_S, _share_s(task, chosen, len(every)))
    if task.config.train.minutes is not None:
        why, places = "all at a time, since train.minutes is for all of them", len(every)
    elif task.config.engine.plan == "off" or limit_s < measure.FIRST_TRIAL_S:
        why, places = packing.RULE, min(len(every), packing.MOST_PLACES)
    else:
        signature = task.dataset.signature
        choice = packing.choose(every, signature, task.series, chosen, limit_s=limit_s)
        ms = next(
            told["ms"]
            for told in choice.evidence
            if "ms" in told and (told["mode"], told["places"]) == (choice.mode, choice.places)
        )
        plan = packing.as_pack(chosen, choice.mode, ms)
        return Packed(every, plan, choice.mode, choice.places, "measured", choice.evidence)
    mode, told = packing.mode_for(task.config, task.dataset.signature, chosen)
    why = told if why == packing.RULE else why
    return Packed(every, packing.as_pack(chosen, mode, None), mode, places, why, [])


def _share_s(task: Task, chosen: Plan, count: int) -> float:
    return measure.SHARE_OF_RUN * measure.guess_s(task, chosen) * count


def _announce(task: Task, packed: Packed, parameters: int, saved: Saved | None) -> None:
    train, dataset, plan = task.config.train, task.dataset, packed.plan
    steps = max(lane.draw().num_steps for lane in packed.lanes)
    expected = {
        "expected_s": measure.guess_s(task, plan) * len(packed.lanes),
        "expected_is": "guessed",
    }
    if plan.ms_per_step is not None:
        whole_s = plan.ms_per_step / 1e3 * steps * train.epochs * packed.rounds
        expected = {"expected_s": whole_s, "expected_is": "measured"}
    task.run.append(
        "start",
        run=str(task.run.folder),
        windows=figures.windows(dataset),
        series=len(dataset.layout.series),
        parameters=parameters,
        epochs=train.epochs,
        steps_per_epoch=steps,
        rounds=packed.rounds,
        pack={
            **packed.told(),
            "folds": len(dataset.folds),
            "repeats": train.repeats,
            "seed": task.config.seed,
            "done": num_ended(saved.facts) if saved else 0,
        },
        plan=plan.to_dict(),
        **expected,
        notes=dataset.notes,
    )


def _fit(
    task: Task, packed: Packed, saved: Saved | None, watching: monitor.Monitor
) -> tuple[Packed, list[LaneFit], Event]:
    """Train them; where memory runs out, from the newest checkpoint with fewer at a time."""
    trained: Event = {}

    def watch(event: Event) -> None:
        task.run.show(event)
        if event["event"] == "log":
            watching.log()
        elif event["event"] == "trained":
            trained.update(event)

    run = replace(task.run, watch=watch)
    most, size = None, runs.log_size(run)
    while True:
        try:
            return packed, _fit_once(task, packed, saved, run, most), trained
        except recover.FULL as error:
            if packed.places == 1 or not recover.is_out_of_memory(error):
                raise
            why = recover.reason(error)
        # past the except block, whose traceback would pin the failed step's tensors
        most = -(-packed.places // 2)
        packed = replace(packed, places=most, why="more did not fit into memory")
        recover.free_memory()
        if checkpoint.numbered(run):
            saved, _ = checkpoint.newest(run)
        runs.cut_log(run, size if saved is None else saved.facts["log_bytes"])
        since = "the start" if saved is None else f"step {saved.step}"
        remedy = f"{most} lanes at a time, from {since}"
        run.append("recovery", what="out of memory", remedy=remedy, why=why)


def _fit_once(
    task: Task, packed: Packed, saved: Saved | None, run: Run, most: int | None
) -> list[LaneFit]:
    """Train the lanes from a checkpoint, or from the start, no more than `most` at a time."""
    assert task.series is not None
    what = task.dataset.signature, task.series
    facts = partial(_facts, task, packed)
    if saved is not None:
        guide = Guide(_following(packed.lanes[saved.facts["came"] :]))
        then = _as_now(saved, packed)
        return lanes.resume(then, packed.lanes, *what, run, guide=guide, facts=facts, most=most)
    first, rest = packed.lanes[: packed.places], packed.lanes[packed.places :]
    made = pack.make(first, *what, packed.plan, mode=packed.mode, room=packed.lanes)
    return lanes.fit(made, run, guide=Guide(_following(rest)), facts=facts)


def _facts(task: Task, packed: Packed) -> dict[str, Any]:
    """What a checkpoint tells beside the lanes."""
    return {"data": task.fingerprint, "pack": packed.told()}


def _following(rest: Sequence[Lane]) -> lanes.Refill:
    """A lane that has ended gives its place to the next of these."""
    left = iter(rest)
    return lambda _: next(left, None)


def _as_now(saved: Saved, packed: Packed) -> Saved:
    """The checkpoint with what a resumed run may have otherwise: names, paths, how it is run."""
    configs = [lane.config.model_dump_json() for lane in packed.lanes]
    facts = saved.facts | {
        "plan": packed.plan.to_dict(),
        "room": saved.facts["room"] | {"config": configs[0]},
        "lanes": [told | {"config": configs[told["number"]]} for told in saved.facts["lanes"]],
    }
    return replace(saved, facts=facts)


def num_ended(facts: Mapping[str, Any]) -> int:
    """Of a checkpoint's lanes"""
    return sum(bool(told["stopped"]) for told in facts["lanes"])


def is_finished(facts: Mapping[str, Any]) -> bool:
    """Whether every lane of a checkpoint has come to its end."""
    return bool(num_ended(facts) == facts["pack"]["lanes"])


def where_it_stands(facts: Mapping[str, Any]) -> str:
    """A checkpoint's lanes, in words."""
    return f"{num_ended(facts)} of {facts['pack']['lanes']} lanes done"


def _interrupted(
    run: Run, fits: Sequence[LaneFit], count: int, found: LaneFit | None, signal_number: int
) -> Interrupted:
    done = sum(one.stopped != lanes.INTERRUPTED for one in fits)
    far = max((one.progress.epoch for one in fits), default=0.0)
    kept = "there was no validation yet of what model/ is to hold"
    if found is not None:
        kept = f"the best weights so far are in {run.model}"
    return Interrupted(
        f"stopped in epoch {math.ceil(far)} with {done} of {count} lanes done; {kept}; go on with: "
        f"slipstream train --resume {run.folder}",
        signal_number=signal_number,
    )
