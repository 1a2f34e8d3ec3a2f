"""Workers as tasks of a Ray cluster, one for each GPU; Ray places them, and again what dies."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Literal

from slipstream.engine.loop import catch_signals
from slipstream.errors import Interrupted, ResumableError, UserError
from slipstream.runs import Event, Run
from slipstream.tuning.storage import database
from slipstream.tuning.storage.url import mask_secrets
from slipstream.tuning.workers import processes, worker
from slipstream.tuning.workers.worker import WorkerTask

SENT = ("trial", "pack", "epoch", "recovery", "fallback", "searched")
"""Events that are worth the way over a network"""
PATIENCE_S = 60.0
"""For workers to save what they have, once they are asked to stop"""


def count_workers(asked: int | Literal["auto"], storage: str | None) -> int:
    """One worker for each GPU of the cluster, for each machine where it has none; or as asked."""
    ray = connect_ray()
    nodes = [node for node in ray.nodes() if node["Alive"]]
    if len(nodes) > 1 and (storage is None or database.is_sqlite(storage)):
        raise UserError(
            f"--on ray: the cluster has {len(nodes)} machines, which need a database that all of "
            "them reach; give --storage postgresql://..."
        )
    if asked != "auto":
        return asked
    return int(ray.cluster_resources().get("GPU", 0)) or len(nodes)


def connect_ray() -> Any:
    """Ray, connected to the cluster that is there."""
    try:
        ray = importlib.import_module("ray")
    except ModuleNotFoundError:
        raise UserError(
            "--on ray: Ray is not here; install it with: pip install 'slipstream[ray]'"
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
    """Let the workers search until none has anything left to do; what they say together."""
    ray = connect_ray()
    events = importlib.import_module("ray.util.queue").Queue(actor_options={"num_cpus": 0})
    on_gpus = ray.cluster_resources().get("GPU", 0) > 0
    needs = {"num_gpus": 1} if on_gpus else {"num_cpus": 1}
    remote = ray.remote(max_retries=1, scheduling_strategy="SPREAD", **needs)(run_task)
    under_way = {remote.remote(task, events): task.index for task in tasks}
    ended: dict[int, Event] = {}
    wrong: dict[int, Exception] = {}
    try:
        with catch_signals() as stop:
            while under_way and not stop.requested:
                done, _ = ray.wait(list(under_way), timeout=0.5)
                _relay(run, events, ended)
                for one in done:
                    index = under_way.pop(one)
                    _end(ray, run, one, index, wrong, url=tasks[index].storage_url)
            if stop.requested:
                raise Interrupted("stopped", signal_number=stop.signal_number)
    finally:
        for one in under_way:  # none is left behind, whatever ended the search
            ray.cancel(one)
        if under_way:
            ray.wait(list(under_way), num_returns=len(under_way), timeout=PATIENCE_S)
        _relay(run, events, ended)
        events.shutdown()
    if len(wrong) == len(tasks):
        raise next(iter(wrong.values()))
    return worker.merge_results(ended)


def _end(
    ray: Any, run: Run, one: Any, index: int, wrong: dict[int, Exception], *, url: str
) -> None:
    """Note how a worker ended."""
    try:
        ray.get(one)
    except ray.exceptions.RayTaskError as error:
        cause = error.cause
        if isinstance(cause, UserError):
            raise cause from None
        why = mask_secrets(f"{type(cause).__name__}: {cause}", url)
        wrong[index] = ResumableError(f"every worker died ({why})")
    except ray.exceptions.RayError as error:
        why = mask_secrets(str(error).splitlines()[0], url)
        wrong[index] = ResumableError(f"every worker died ({why})")
    if index in wrong:
        remedy = "its trials are left to the others"
        run.append("worker", worker=index, what="died", why=str(wrong[index]), remedy=remedy)


def _relay(run: Run, events: Any, ended: dict[int, Event]) -> None:
    for index, event in events.get_nowait_batch(events.qsize()):
        processes.forward_event(run, index, event, ended)


def run_task(task: WorkerTask, events: Any) -> None:
    """In the cluster: one worker, whose events go back through a queue."""

    def tell(event: Event) -> None:
        if event["event"] in SENT:
            with suppress(Exception):  # who listens may be gone; the database has what counts
                events.put((task.index, event))

    worker.run_worker(task, tell)
