"""Trains shares as tasks of a Ray cluster."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from slipstream import config as configs
from slipstream import runs
from slipstream.base.errors import Option, ResumableError, UserError
from slipstream.config import Config
from slipstream.runs import Event, Run
from slipstream.training import fitting
from slipstream.training.context import RunContext
from slipstream.training.shares.relay import OF_LANES, OF_WORKERS, EventRelay
from slipstream.training.shares.share import ShareTask, train_share
from slipstream.workers import ray, resources
from slipstream.workers.ray import ClusterJob
from slipstream.workers.resources import Bundle, WorkerCount

SENT_EVENTS = (*OF_LANES, *OF_WORKERS, "start", "monitor", "trouble", "checkpoint")
"""Events that the run logs, and those that show progress"""


def choose_workers(requested: WorkerCount, config: Config, data: Any) -> tuple[int, Bundle]:
    """Return the number of workers and what each gets; raise a UserError for what is not
    possible."""
    if not fitting.trains_lanes(config):
        what = "pre-trains one encoder" if config.masked else "trains one model"
        raise UserError(
            Option("on", "ray")
            + " divides the models of train.repeats and data.split.walk_forward among workers, "
            f"but this run {what}; to train it on a node of the cluster, submit the whole "
            "command as a job of Ray (ray job submit)"
        )
    resources.check_config(config, data)
    nodes = ray.list_nodes()
    num_workers = resources.count_ray_workers(requested, nodes, config.engine.device)
    return num_workers, resources.choose_bundle(num_workers, nodes, config.engine.device)


def train_on_ray(context: RunContext, tasks: Sequence[ShareTask], relay: EventRelay) -> None:
    """Train shares on the cluster, until all are done."""
    run, bundle = context.run, context.bundle
    assert bundle is not None
    text = configs.to_toml(bundle.limit_threads(context.config))
    tasks = [replace(task, config_toml=text) for task in tasks]
    job = ClusterJob(train_task, bundle, given_up="its models are left unfinished")
    fix = "resume with: " + runs.suggest_resume(run.folder)
    try:
        outcomes = ray.run_tasks(run, tasks, job, ShareReporter(run, relay))
    except ResumableError as error:
        raise ResumableError(error.message, fix=fix) from None
    if failed := [outcome.what for outcome in outcomes.values() if outcome.kind != "done"]:
        raise ResumableError(f"a worker died again and again ({failed[0]})", fix=fix)


class ShareReporter:
    """Passes on what happens to the shares on the cluster."""

    def __init__(self, run: Run, relay: EventRelay) -> None:
        self.run, self.relay = run, relay

    def add(self, worker: int, event: Event) -> None:
        self.relay.add(worker, event)

    def log(self, worker: int, what: str, **values: Any) -> None:
        if what == "started":
            values["lanes"] = self.relay.division.shares[worker]
        self.run.append("worker", worker=worker, what=what, **values)


def train_task(task: ShareTask, send: Callable[[Event], None]) -> None:
    """Train one share on its node."""

    def send_some(event: Event) -> None:
        if event["event"] in SENT_EVENTS:
            send(event)

    train_share(task, send_some)
