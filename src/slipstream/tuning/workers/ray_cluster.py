"""Runs the workers of a search as tasks of a Ray cluster."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

from slipstream.clusters import connection, ray_tasks, resources
from slipstream.clusters.resources import Bundle
from slipstream.config import Config
from slipstream.errors import ResumableError, UserError
from slipstream.runs import Event, Run
from slipstream.text.passwords import mask_secrets
from slipstream.tuning.storage import shared
from slipstream.tuning.workers.worker import GIVEN_UP, WorkerResults, WorkerTask, run_worker
from slipstream.workers.assignment import WorkerCount

SENT_EVENTS = ("trial", "pack", "epoch", "recovery", "fallback", "searched")
"""Events that are worth sending over the network"""


def choose_workers(
    requested: WorkerCount, storage: str | None, config: Config
) -> tuple[int, Bundle]:
    """Return the number of workers and what each gets; "auto" is one per GPU or, without GPUs, one
    per machine. Raise a UserError where the cluster cannot have as many."""
    nodes = connection.list_nodes()
    if len(nodes) > 1 and (storage is None or shared.needs_one_machine(storage)):
        raise UserError(
            f"--on ray: the cluster has {len(nodes)} machines, which need a study that all of "
            "them reach; give --storage postgresql://... or, on a shared drive, journal:FILE"
        )
    num_workers = resources.count_workers(requested, nodes, config.engine.device)
    return num_workers, resources.choose_bundle(num_workers, nodes, config.engine.device)


def run_workers(
    run: Run, tasks: Sequence[WorkerTask], bundle: Bundle, recover: Callable[[int], None]
) -> dict[str, Any]:
    """Run the workers until no trial is left; return their merged results.

    `recover` is called when a worker has died, before it is started again.
    """
    results = WorkerResults(run)
    mask = functools.partial(mask_secrets, url=tasks[0].storage_url)
    job = ray_tasks.ClusterJob(run_task, bundle, mask, recover, GIVEN_UP)
    outcomes = ray_tasks.run_tasks(run, tasks, job, results)
    if all(outcome.kind != "done" for outcome in outcomes.values()):
        raise ResumableError(f"every worker died ({outcomes[0].what}; see {run.folder}/workers)")
    return results.merge()


def run_task(task: WorkerTask, send: Callable[[Event], None]) -> None:
    """Run one worker on its node."""

    def send_some(event: Event) -> None:
        if event["event"] in SENT_EVENTS:
            send(event)

    run_worker(task, send_some)
