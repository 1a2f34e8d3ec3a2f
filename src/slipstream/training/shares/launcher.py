"""Trains a run's lanes in several processes: divides them, runs the shares, joins the results."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from slipstream import config as configs
from slipstream import runs
from slipstream.base.errors import Interrupted, Option, UserError
from slipstream.config import Config
from slipstream.engine import checkpoint
from slipstream.engine.checkpoint import Checkpoint
from slipstream.engine.events import LaneEvents
from slipstream.engine.lanes import INTERRUPTED, FitResult, Lane, LaneResult
from slipstream.engine.plan import Plan
from slipstream.engine.single import resolve_settings
from slipstream.runs import Run
from slipstream.scoring import summary
from slipstream.training import context as contexts
from slipstream.training import fitting, lanes
from slipstream.training.context import MeasuredBatch, RunContext
from slipstream.training.fitting import LanePlan
from slipstream.training.lanes import TrainedPack
from slipstream.training.result import FinishedRun
from slipstream.training.shares import division as divisions
from slipstream.training.shares import merging
from slipstream.training.shares.division import Division
from slipstream.training.shares.pool import run_shares
from slipstream.training.shares.ray_shares import choose_workers, train_on_ray
from slipstream.training.shares.relay import EventRelay, rebuild_log
from slipstream.training.shares.share import ShareResult, ShareTask, read_result, remove_result
from slipstream.workers import resources
from slipstream.workers.resources import Bundle, WorkerCount

TrainTasks = Callable[[RunContext, Sequence[ShareTask], EventRelay], None]


class Placement(NamedTuple):
    """Where a run trains."""

    num_workers: int
    bundle: Bundle | None = None
    """What each worker gets of a Ray cluster"""


def place_workers(
    requested: WorkerCount | None, on: Literal["ray"] | None, config: Config, data: Any
) -> Placement:
    """Return how many workers train a run, and where; raise a UserError for what is not
    possible."""
    if on is None:
        return Placement(count_workers(requested, config, data))
    resources.check_count("auto" if requested is None else requested)
    return Placement(*choose_workers("auto" if requested is None else requested, config, data))


def count_workers(requested: WorkerCount | None, config: Config, data: Any) -> int:
    """Return the number of processes that train a run; raise a UserError for what is not
    possible."""
    if requested is None:
        return 1
    resources.check_count(requested)
    num_workers = resources.count_workers(requested, config)
    if num_workers == 1 or (requested == "auto" and not fitting.trains_lanes(config)):
        return 1
    check_divisible(config, Option("workers", requested))
    resources.check_config(config, data)
    return num_workers


def check_divisible(config: Config, option: Option) -> None:
    """Raise a UserError where there is one model only."""
    if not fitting.trains_lanes(config):
        what = "pre-trains one encoder" if config.masked else "trains one model"
        raise UserError(
            option + " divides the models of train.repeats and data.split.walk_forward, but this "
            f"run {what}"
        )


@dataclass(frozen=True)
class Spread:
    """A run whose lanes are spread over workers."""

    context: RunContext
    lanes: list[Lane]
    division: Division

    @property
    def run(self) -> Run:
        return self.context.run

    def make_tasks(self) -> list[ShareTask]:
        """Return the task of every share."""
        config = resources.split_cores(self.context.config, len(self.division.shares))
        text = configs.to_toml(config)
        return [
            ShareTask(
                folder=str(divisions.get_share(self.run, index).folder),
                index=index,
                config_toml=text,
                lanes=numbers,
                fingerprint=self.context.start.fingerprint,
            )
            for index, numbers in enumerate(self.division.shares)
        ]

    def read_results(self) -> dict[int, ShareResult]:
        """Return the results of the shares that are done."""
        folders = [
            divisions.get_share(self.run, i).folder for i in range(len(self.division.shares))
        ]
        results = {index: read_result(folder) for index, folder in enumerate(folders)}
        return {index: one for index, one in results.items() if one is not None}


def train_in_processes(context: RunContext, tasks: Sequence[ShareTask], relay: EventRelay) -> None:
    """Train shares in processes on this machine."""
    envs = resources.assign_gpus(context.config, context.num_workers)
    run_shares(context.run, tasks, envs[: len(tasks)], relay)


def train_spread(context: RunContext, train_tasks: TrainTasks | None = None) -> FinishedRun:
    """Train the lanes of a run in several processes, then score and write everything here.

    `train_tasks` has every task trained by `share.train_share`, somewhere, and its events sent to
    the relay; by default in processes on this machine, or on the run's cluster.
    """
    if train_tasks is None:
        train_tasks = train_in_processes if context.bundle is None else train_on_ray
    context, batch = _settle_batch(context)
    every = _build_lanes(context)
    division = divisions.read_division(context.run) or _divide(context, every, batch)
    if not division.shares:
        return lanes.train_lanes(context)
    spread = Spread(context, every, division)
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
    return _finish(spread, time.perf_counter() - started_at)


def divide_run(context: RunContext) -> None:
    """Divide the lanes of a new run, whose shares others train."""
    context, batch = _settle_batch(context)
    _divide(context, _build_lanes(context), batch)


def _settle_batch(context: RunContext) -> tuple[RunContext, MeasuredBatch | None]:
    """Measure the batch size where it is left to that, since all lanes need the same one; write the
    config."""
    config, batch = context.config, None
    if config.train.batch == "auto":
        config, batch = contexts.measure_batch(context)
    contexts.write_config(context.run, config, context.config)
    contexts.record_data(context)
    runs.remove_manifest(context.run)
    return replace(context, config=config), batch


def _build_lanes(context: RunContext) -> list[Lane]:
    settings = resolve_settings(context.config, context.dataset)
    init = context.start.init.weights if context.start.init else {}
    return fitting.build_lanes(settings, context.dataset, init)


def _divide(context: RunContext, every: list[Lane], batch: MeasuredBatch | None) -> Division:
    """Divide the lanes that have not ended, and write the checkpoints that their shares begin
    with."""
    run, saved = context.run, context.start.checkpoint
    divisions.forget_shares(run)
    costs = {number: _count_windows(context, lane) for number, lane in enumerate(every)}
    if saved is not None:
        for number in fitting.list_ended(saved.metadata, context.config):
            del costs[number]
    shares = divisions.divide_lanes(costs, context.num_workers)
    on: Literal["ray"] | None = None if context.bundle is None else "ray"
    fingerprint, log_bytes = context.start.fingerprint, runs.get_log_size(run)
    division = Division(context.num_workers, shares, len(every), log_bytes, on, fingerprint)
    division = replace(division, batch=None if batch is None else batch._asdict())
    for index, numbers in enumerate(shares):
        share = divisions.get_share(run, index)
        share.folder.mkdir(parents=True)
        if saved is not None:
            checkpoint.write_checkpoint(share, merging.select_lanes(saved, numbers, every))
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
    return merging.merge_shares(division, base, divisions.read_shares(run, division))


def take_up(context: RunContext, division: Division, *, changed: bool) -> RunContext:
    """Have a resumed run go on with its shares, if the number of workers is the same; else join
    them, so that the lanes can be divided anew or trained here.

    `changed`: whether settings differ, so that shares that have ended may go on.
    """
    run = context.run
    shares = divisions.read_shares(run, division)
    saved = {index: one.metadata["log_bytes"] for index, one in shares.items()}
    lengths = [(index, saved.get(index, 0)) for index in range(len(division.shares))]
    EventRelay(run, division).announce()
    rebuild_log(run, division, lengths)
    if changed:
        for index in range(len(division.shares)):
            remove_result(divisions.get_share(run, index).folder)
    if context.num_workers == division.workers and (context.bundle is None) == (
        division.on is None
    ):
        return context
    merged = context.start.checkpoint
    if merged is not None:
        contexts.write_config(run, context.config, context.config)
        contexts.record_data(context)
        merged = merging.fit_capacity(merging.refuse_mixed(merged), _build_lanes(context))
        merged.metadata["log_bytes"] = runs.get_log_size(run)
        checkpoint.write_checkpoint(run, merged)
    divisions.forget_shares(run)
    return replace(context, start=replace(context.start, checkpoint=merged))


def _describe_interrupt(spread: Spread, stop: Interrupted) -> Interrupted:
    """Save the best model so far and return the error to raise."""
    context, merged = spread.context, read_merged(spread.run)
    results = []
    if merged is not None:
        merged = merging.fit_capacity(merged, spread.lanes)
        results = merging.read_lanes(merged, spread.lanes, context.dataset.signature)
    for one in results:
        one.stop_reason = one.stop_reason or INTERRUPTED
    repeats = context.config.train.repeats
    groups = summary.group_by_fold(results, context.dataset, repeats)
    best = summary.find_best_lane(groups[-1].fits)
    if best is not None:
        contexts.save_model(context.run, best.weights, context.dataset)
    plan, number = context.start.plan, stop.signal_number
    fit = FitResult(results, plan, {}, 0, 0, number, 0.0, 0.0, 0.0)
    return lanes.describe_interrupt(context.run, fit, len(spread.lanes), best)


def _finish(spread: Spread, waited_s: float) -> FinishedRun:
    """Join the results of all shares; score and write them as those of one process.

    `waited_s` is what the workers took, their start included.
    """
    context, run = spread.context, spread.run
    results = spread.read_results()
    merged = merging.fit_capacity(_require_merged(run), spread.lanes)
    plan = Plan.from_dict(merged.metadata["plan"])
    if plan.device.type != context.start.plan.device.type:  # of another machine
        plan = context.start.plan
    start = replace(context.start, plan=plan, plan_is_final=True, checkpoint=merged)
    with contexts.build_monitor(context):
        task, plan = contexts.prepare_task(replace(context, start=start))
        fit = _join_results(spread, merged, results, plan)
        _save_merged(run, merged)
        LaneEvents(run).end(fit)
        _count_seconds(context, fit, waited_s)
        pack = TrainedPack(task, _describe_plan(spread, results, plan), fit)
        scored = lanes.score_lanes(context, pack)
    finished = lanes.finish_lanes(context, pack, scored, workers=len(spread.division.shares))
    divisions.forget_shares(run)
    return finished


def _save_merged(run: Run, merged: Checkpoint) -> None:
    """Write the checkpoint that the run can be trained further from."""
    if merged.metadata.get(merging.MIXED):
        why = "some workers trained several models at a time, others one after another"
        run.append("fallback", what="the models cannot be trained further", why=why)
        return
    merged.metadata["log_bytes"] = runs.get_log_size(run)
    checkpoint.write_checkpoint(run, merged)


def _count_seconds(context: RunContext, fit: FitResult, waited_s: float) -> None:
    """Count the time of the workers; what is not set-up, training or validation was their start."""
    fitting.count_seconds(context, fit)
    saved = context.start.checkpoint
    before_s = sum(saved.metadata["seconds"]) if saved else 0.0
    fitted_s = fit.setup_s + fit.train_s + fit.validate_s - before_s
    context.timer.move({"start-up": max(waited_s - fitted_s, 0.0)}, source="training")


def _require_merged(run: Run) -> Checkpoint:
    merged = read_merged(run)
    assert merged is not None, "every share has written its last checkpoint"
    return merged


def _join_results(
    spread: Spread, merged: Checkpoint, results: dict[int, ShareResult], plan: Plan
) -> FitResult:
    """Return the results of all lanes; those in no share had ended before."""
    signature = spread.context.dataset.signature
    divided = {number for share in spread.division.shares for number in share}
    before = merging.read_lanes(merged, spread.lanes, signature)
    joined = [one for one in before if one.number not in divided]
    for result in results.values():
        for number, (progress, stopped) in result.progress.items():
            weights = result.weights.get(number, {})
            lane = spread.lanes[number]
            joined.append(LaneResult(number, lane, progress, weights, stop_reason=stopped))
    for one in joined:
        one.weights = {name: weight.to(plan.device) for name, weight in one.weights.items()}
    joined.sort(key=lambda one: one.number)
    facts = [one.facts for one in results.values()]
    seconds = (max(parts) for parts in zip(*(one["seconds"] for one in facts), strict=True))
    steps = max(one["steps"] for one in facts)
    return FitResult(joined, plan, {}, merged.metadata["limit"], steps, 0, *seconds)


def _describe_plan(spread: Spread, results: dict[int, ShareResult], plan: Plan) -> LanePlan:
    """Return how the lanes were trained, with what each worker ran."""
    facts = [one.facts for _, one in sorted(results.items())]
    shares = [
        {"lanes": numbers} | {key: one[key] for key in ("mode", "places", "why", "plan", "steps")}
        for numbers, one in zip(spread.division.shares, facts, strict=True)
    ]
    places = sum(one["places"] for one in facts)
    first = facts[0]
    more = {"workers": len(shares), "shares": shares}
    return LanePlan(
        spread.lanes, plan, first["mode"], places, first["why"], first["evidence"], more
    )
