"""Runs several workers as tasks of a Ray cluster, one per GPU; Ray places and restarts them."""

import importlib
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Literal

from slipstream.engine.loop import catch_signals
from slipstream.errors import Interrupted, ResumableError, UserError
from slipstream.runs import Event, Run
from slipstream.tuning.storage import database
from slipstream.tuning.storage.database import mask_secrets
from slipstream.tuning.workers.worker import GIVEN_UP, WorkerResults, WorkerTask, run_worker

SENT_EVENTS = ("trial", "pack", "epoch", "recovery", "fallback", "searched")
"""Events that are worth sending over the network"""
STOP_TIMEOUT_S = 60.0
"""For workers to write checkpoints after they were cancelled"""


def count_workers(requested: int | Literal["auto"], storage: str | None) -> int:
    """Return the requested number; "auto" is one worker per GPU, or per machine without GPUs."""
    ray = connect_ray()
    nodes = [node for node in ray.nodes() if node["Alive"]]
    if len(nodes) > 1 and (storage is None or database.is_sqlite(storage)):
        raise UserError(
            f"--on ray: the cluster has {len(nodes)} machines, which need a database that all of "
            "them reach; give --storage postgresql://..."
        )
    if requested != "auto":
        return requested
    return int(ray.cluster_resources().get("GPU", 0)) or len(nodes)


def connect_ray() -> Any:
    """Return the module `ray`, connected to the running cluster."""
    try:
        ray = importlib.import_module("ray")
    except ModuleNotFoundError:
        raise UserError(
            "--on ray: Ray is not installed; install it with: pip install 'slipstream[ray]'"
        ) from None
    if not ray.is_initialized():
        try:
            ray.init(address="auto", log_to_driver=False)
        except ConnectionError:
            raise UserError(
                "--on ray: no Ray cluster answers; start one with `ray start --head`, or name one "
                "with RAY_ADDRESS"
            ) from None
    return ray


def run_workers(run: Run, tasks: Sequence[WorkerTask]) -> dict[str, Any]:
    """Run the workers until no trial is left; return their merged results."""
    ray = connect_ray()
    events = importlib.import_module("ray.util.queue").Queue(actor_options={"num_cpus": 0})
    has_gpus = ray.cluster_resources().get("GPU", 0) > 0
    resources = {"num_gpus": 1} if has_gpus else {"num_cpus": 1}
    remote = ray.remote(max_retries=1, scheduling_strategy="SPREAD", **resources)(run_task)
    running = {remote.remote(task, events): task for task in tasks}
    results, errors = WorkerResults(run), []
    try:
        with catch_signals() as stop:
            while running and not stop.requested:
                ended, _ = ray.wait(list(running), timeout=0.5)
                _read_events(events, results)
                for reference in ended:
                    task = running.pop(reference)
                    if error := _get_error(ray, reference, task):
                        errors.append(error)
                        results.log(task.index, "died", why=str(error), remedy=GIVEN_UP)
            if stop.requested:
                raise Interrupted("stopped", signal_number=stop.signal_number)
    finally:
        for reference in running:  # leave none running, whatever ended the search
            ray.cancel(reference)
        if running:
            ray.wait(list(running), num_returns=len(running), timeout=STOP_TIMEOUT_S)
        _read_events(events, results)
        events.shutdown()
    if len(errors) == len(tasks):
        raise errors[0]
    return results.merge()


def _get_error(ray: Any, reference: Any, task: WorkerTask) -> ResumableError | None:
    """Return why a worker died, if it did; raise its UserError."""
    try:
        ray.get(reference)
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, UserError):
            raise error.cause from None
        reason = f"{type(error.cause).__name__}: {error.cause}"
    except ray.exceptions.RayError as error:
        reason = str(error).splitlines()[0]
    else:
        return None
    return ResumableError(f"every worker died ({mask_secrets(reason, task.storage_url)})")


def _read_events(events: Any, results: WorkerResults) -> None:
    for index, event in events.get_nowait_batch(events.qsize()):
        results.add(index, event)


def run_task(task: WorkerTask, events: Any) -> None:
    """Run one worker in the cluster; its events travel through a queue."""

    def send(event: Event) -> None:
        if event["event"] in SENT_EVENTS:
            with suppress(Exception):  # the receiver may be gone; the database has the results
                events.put((task.index, event))

    run_worker(task, send)
