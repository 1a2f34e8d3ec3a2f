"""A run of several models, trained as lanes: repeats from other seeds, folds of a walk, or both."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from slipstream import runs
from slipstream.autotune import measure, pack_size
from slipstream.autotune.duration import guess_duration_s
from slipstream.config import Config
from slipstream.data.dataset import Dataset
from slipstream.engine import checkpoint, monitor, recovery
from slipstream.engine import rounds as lanes
from slipstream.engine.checkpoint import Checkpoint
from slipstream.engine.lanes import pack
from slipstream.engine.lanes.gradients import LaneMode
from slipstream.engine.lanes.lane import Lane
from slipstream.engine.lanestate import LaneResult
from slipstream.engine.plan import Plan
from slipstream.engine.pretrained import EncoderMatch
from slipstream.engine.rounds import LanePolicy
from slipstream.engine.single import TrainingTask
from slipstream.errors import Interrupted, UserError
from slipstream.runs import Event, Run
from slipstream.scoring import lane_summary
from slipstream.scoring.summary import count_windows
from slipstream.training import context
from slipstream.training.context import RunContext, time_phase
from slipstream.training.result import Result

FIXED_SETTINGS = {"train.epochs", "train.patience"}
"""What only a run of one model may change when it is resumed: of lanes that have ended, the best
weights are all that is left"""


def trains_lanes(settings: Config) -> bool:
    """Whether this is asked for, and not a run of one model."""
    walks = settings.data.split.walk_forward is not None
    return not settings.masked and (settings.train.repeats > 1 or walks)


def check_lanes(settings: Config, dataset: Dataset, plan: Plan) -> None:
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


def train_lanes(begun: RunContext) -> Result:
    """Train all lanes, score each, keep them, and write everything."""
    run, dataset, seconds, saved = begun.run, begun.dataset, begun.seconds, begun.start.checkpoint
    with context.build_monitor(begun) as watching:
        task, chosen = context.prepare_task(begun)
        settings = task.config
        every = build_lanes(settings, dataset, task.init)
        with time_phase(seconds, "plan"):
            packed = _packed(task, every, chosen, saved)
        chosen = packed.plan
        with chosen.flags():
            parameters = sum(p.numel() for p in task.model.parameters())
            _announce(task, packed, parameters, saved)
            packed, fits, trained = _fit(task, packed, saved, watching)
            context.restore_folder(run, settings, begun.config)
            seconds |= {"training": trained["train_s"], "validation": trained["validate_s"]}
            chosen = context.record_plan(run, chosen, trained["failures"])
            groups = lane_summary.group_by_fold(fits, dataset, settings.train.repeats)
            found = lane_summary.find_best_lane(groups[-1].fits)
            if found is not None:
                context.save_model(run, found.weights, dataset)
            if trained["signal_number"]:
                raise _interrupted(run, fits, len(every), found, trained["signal_number"])
            lane_summary.refuse_failed(groups)
            with time_phase(seconds, "scoring"):
                run.append("scoring", what=f"{len(every)} models")
                scored = lane_summary.score_folds(task, chosen, groups)
            with time_phase(seconds, "baselines"):
                run.append("scoring", what="the baselines")
                scored = lane_summary.score_fold_baselines(task, groups, scored)
            if chosen.device.type == "cuda":
                recovery.free_memory()
    assert found is not None
    logged = list(runs.read_events(run))
    with time_phase(seconds, "scoring"):
        summary, detail = lane_summary.summarize_lanes(task, groups, scored)
    lane_summary.save_folds(task, groups, scored, summary["uses"])
    summary |= {
        "steps": found.progress.step,
        "epochs": found.progress.epoch,
        "best_epoch": found.progress.best_epoch,
        "stopped": found.stop_reason,
        "parameters": parameters,
        "windows_per_s": sum(f.progress.epoch * len(f.lane.starts["train"]) for f in fits)
        / trained["train_s"],
        "plan": chosen.to_dict(),
        **({"init_from": task.init.summary} if task.init else {}),
        "pack": packed.summarize() | {"steps": trained["steps"]},
        "monitor": monitor.summarize(logged),
        "estimate": monitor.compare_with_estimate(
            logged, steps=trained["steps"], took_s=trained["train_s"]
        )
        | {"planned_steps": None},
    }
    runs.write_json(run.folder / "plan.json", chosen.to_dict() | {"pack": packed.summarize()})
    return context.finish_run(begun, summary, detail)


def build_lanes(settings: Config, dataset: Dataset, init: EncoderMatch | None = None) -> list[Lane]:
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
class PackPlan:
    """How the lanes are trained."""

    lanes: list[Lane]
    plan: Plan
    mode: LaneMode
    places: int
    reason: str
    evidence: list[dict[str, Any]]

    @property
    def rounds(self) -> int:
        """How many lanes have the same place, one after the other"""
        return -(-len(self.lanes) // self.places)

    def summarize(self) -> dict[str, Any]:
        return {
            "lanes": len(self.lanes),
            "places": self.places,
            "mode": self.mode,
            "why": self.reason,
            "evidence": self.evidence,
        }


def _packed(
    task: TrainingTask, every: list[Lane], chosen: Plan, saved: Checkpoint | None
) -> PackPlan:
    """The lanes' mode and the places that they take, from measuring where that pays."""
    assert task.series is not None
    if chosen.micro_batch:
        raise UserError(
            f"train.batch = {task.config.train.batch} does not fit into memory in one pass; for "
            f"several models at once, set train.batch = {chosen.micro_batch} and raise "
            "train.accumulate as much"
        )
    if saved is not None:
        mode, places = saved.metadata["mode"], saved.metadata["pack"]["places"]
        return PackPlan(
            every, pack_size.adapt_plan_to_pack(chosen, mode, None), mode, places, "as it began", []
        )
    limit_s = min(measure.MEASURE_LIMIT_S, _share_s(task, chosen, len(every)))
    if task.config.train.minutes is not None:
        why, places = "all at a time, since train.minutes is for all of them", len(every)
    elif task.config.engine.plan == "off" or limit_s < measure.FIRST_TRIAL_S:
        why, places = pack_size.RULE_OF_THUMB, min(len(every), pack_size.MAX_LANES)
    else:
        signature = task.dataset.signature
        choice = pack_size.choose_pack_size(every, signature, task.series, chosen, limit_s=limit_s)
        ms = next(
            told["ms"]
            for told in choice.evidence
            if "ms" in told and (told["mode"], told["places"]) == (choice.mode, choice.num_lanes)
        )
        plan = pack_size.adapt_plan_to_pack(chosen, choice.mode, ms)
        return PackPlan(every, plan, choice.mode, choice.num_lanes, "measured", choice.evidence)
    mode, told = pack_size.choose_mode(task.config, task.dataset.signature, chosen)
    why = told if why == pack_size.RULE_OF_THUMB else why
    return PackPlan(every, pack_size.adapt_plan_to_pack(chosen, mode, None), mode, places, why, [])


def _share_s(task: TrainingTask, chosen: Plan, count: int) -> float:
    return measure.SHARE_OF_RUN * guess_duration_s(task, chosen) * count


def _announce(
    task: TrainingTask, packed: PackPlan, parameters: int, saved: Checkpoint | None
) -> None:
    train, dataset, plan = task.config.train, task.dataset, packed.plan
    steps = max(lane.batch_order().num_steps for lane in packed.lanes)
    expected = {
        "expected_s": guess_duration_s(task, plan) * len(packed.lanes),
        "expected_is": "guessed",
    }
    if plan.ms_per_step is not None:
        whole_s = plan.ms_per_step / 1e3 * steps * train.epochs * packed.rounds
        expected = {"expected_s": whole_s, "expected_is": "measured"}
    task.run.append(
        "start",
        run=str(task.run.folder),
        windows=count_windows(dataset),
        series=len(dataset.index.series_names),
        parameters=parameters,
        epochs=train.epochs,
        steps_per_epoch=steps,
        rounds=packed.rounds,
        pack={
            **packed.summarize(),
            "folds": len(dataset.folds),
            "repeats": train.repeats,
            "seed": task.config.seed,
            "done": count_ended(saved.metadata) if saved else 0,
        },
        plan=plan.to_dict(),
        **expected,
        notes=dataset.notes,
    )


def _fit(
    task: TrainingTask, packed: PackPlan, saved: Checkpoint | None, watching: monitor.Monitor
) -> tuple[PackPlan, list[LaneResult], Event]:
    """Train them; where memory runs out, from the newest checkpoint with fewer at a time."""
    trained: Event = {}

    def watch(event: Event) -> None:
        task.run.notify(event)
        if event["event"] == "log":
            watching.log()
        elif event["event"] == "trained":
            trained.update(event)

    run = replace(task.run, watch=watch)
    most, size = None, runs.get_log_size(run)
    while True:
        try:
            return packed, _fit_once(task, packed, saved, run, most), trained
        except recovery.MEMORY_ERRORS as error:
            if packed.places == 1 or not recovery.is_out_of_memory(error):
                raise
            why = recovery.first_line(error)
        # past the except block, whose traceback would pin the failed step's tensors
        most = -(-packed.places // 2)
        packed = replace(packed, places=most, reason="more did not fit into memory")
        recovery.free_memory()
        if checkpoint.list_steps(run):
            saved, _ = checkpoint.read_newest(run)
        runs.truncate_log(run, size if saved is None else saved.metadata["log_bytes"])
        since = "the start" if saved is None else f"step {saved.step}"
        remedy = f"{most} lanes at a time, from {since}"
        run.append("recovery", what="out of memory", remedy=remedy, why=why)


def _fit_once(
    task: TrainingTask, packed: PackPlan, saved: Checkpoint | None, run: Run, most: int | None
) -> list[LaneResult]:
    """Train the lanes from a checkpoint, or from the start, no more than `most` at a time."""
    assert task.series is not None
    what = task.dataset.signature, task.series
    facts = partial(_facts, task, packed)
    if saved is not None:
        guide = LanePolicy(_following(packed.lanes[saved.metadata["came"] :]))
        then = _as_now(saved, packed)
        return lanes.resume(then, packed.lanes, *what, run, guide=guide, facts=facts, most=most)
    first, rest = packed.lanes[: packed.places], packed.lanes[packed.places :]
    made = pack.build_pack(first, *what, packed.plan, mode=packed.mode, room=packed.lanes)
    return lanes.fit(made, run, guide=LanePolicy(_following(rest)), facts=facts)


def _facts(task: TrainingTask, packed: PackPlan) -> dict[str, Any]:
    """What a checkpoint tells beside the lanes."""
    return {"data": task.fingerprint, "pack": packed.summarize()}


def _following(rest: Sequence[Lane]) -> lanes.NextLane:
    """A lane that has ended gives its place to the next of these."""
    left = iter(rest)
    return lambda _: next(left, None)


def _as_now(saved: Checkpoint, packed: PackPlan) -> Checkpoint:
    """The checkpoint with what a resumed run may have otherwise: names, paths, how it is run."""
    configs = [lane.config.model_dump_json() for lane in packed.lanes]
    facts = saved.metadata | {
        "plan": packed.plan.to_dict(),
        "room": saved.metadata["room"] | {"config": configs[0]},
        "lanes": [told | {"config": configs[told["number"]]} for told in saved.metadata["lanes"]],
    }
    return replace(saved, metadata=facts)


def count_ended(facts: Mapping[str, Any]) -> int:
    """Of a checkpoint's lanes"""
    return sum(bool(told["stopped"]) for told in facts["lanes"])


def is_finished(facts: Mapping[str, Any]) -> bool:
    """Whether every lane of a checkpoint has come to its end."""
    return bool(count_ended(facts) == facts["pack"]["lanes"])


def describe_progress(facts: Mapping[str, Any]) -> str:
    """A checkpoint's lanes, in words."""
    return f"{count_ended(facts)} of {facts['pack']['lanes']} lanes done"


def _interrupted(
    run: Run, fits: Sequence[LaneResult], count: int, found: LaneResult | None, signal_number: int
) -> Interrupted:
    done = sum(one.stop_reason != lanes.INTERRUPTED for one in fits)
    far = max((one.progress.epoch for one in fits), default=0.0)
    kept = "there was no validation yet of what model/ is to hold"
    if found is not None:
        kept = f"the best weights so far are in {run.model}"
    return Interrupted(
        f"stopped in epoch {math.ceil(far)} with {done} of {count} lanes done; {kept}; go on with: "
        f"slipstream train --resume {run.folder}",
        signal_number=signal_number,
    )
