"""Runs workers as tasks of a Ray cluster: places, watches, restarts and cancels them.

A task gets its resources from a placement group, runs `target(task, send)` and returns how it
ended. Its events, and its files where its node does not see the caller's folder, travel through a
queue, which is an actor on the caller's node.
"""

import importlib
import os
import platform
import re
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Protocol

import slipstream
from slipstream.clusters import folders
from slipstream.clusters.connection import connect, list_nodes
from slipstream.clusters.folders import FolderFiles, FolderSender, SharedProbe
from slipstream.clusters.resources import Bundle, count_places, describe_nodes
from slipstream.errors import Interrupted, ResumableError, UserError
from slipstream.errors.stop_signals import catch_signals
from slipstream.runs import Event, Run
from slipstream.text import format_count
from slipstream.workers.processes import STDERR

MAX_STARTS = 3
"""Starts of a worker without progress in between, before it is given up"""
PROGRESS = ("checkpoint", "trial")
"""Events after which a worker may be started as often again"""
ANY_BUNDLE = -1
POLL_S = 0.5
PATIENCE_S = 3.0
"""A longer wait for resources is shown"""
LATE_S = 30.0
"""A worker that has not started for so long may have no place"""
STOP_TIMEOUT_S = 60.0
"""For workers to write checkpoints after they were cancelled"""
MISSING = "there is no such file or folder"
READ_THERE = (
    "; each node reads the data itself: put them under the same path on all of them, on a drive "
    "that all mount, or in object storage"
)
Send = Callable[[Event], None]
Target = Callable[[Any, Send], None]
Message = tuple[int, int, Literal["started", "event", "files"], Any]
"""What a task puts into the queue: its number, the count of its starts, and an event, files or
where it runs; plain values, so that the actor of the queue needs no Slipstream"""


class ClusterTask(Protocol):
    """What a worker is started with: a frozen dataclass."""

    @property
    def folder(self) -> str:
        """The worker's folder, on the caller's machine"""

    @property
    def index(self) -> int:
        """The worker's number"""


class Reporter(Protocol):
    """Receives what happens to the workers."""

    def add(self, worker: int, event: Event) -> None:
        """Log or show an event of a worker."""

    def log(self, worker: int, what: str, **values: Any) -> None:
        """Log that a worker started or died."""


@dataclass(frozen=True)
class ClusterJob:
    """What the tasks of a run have in common."""

    target: Target
    bundle: Bundle
    mask: Callable[[str], str] = str
    """Removes secrets from messages; it travels to the nodes"""
    recover: Callable[[int], None] = lambda _: None
    """Called when a worker has died, before it is started again"""
    given_up: str = "given up"
    """What the log says of a worker that is not started again"""


@dataclass(frozen=True)
class Assignment:
    """One start of one worker, as it is sent to its node."""

    target: Target
    task: Any
    start: int
    """1 at first; counts the starts of this worker"""
    probe: SharedProbe
    mask: Callable[[str], str]
    version: str = slipstream.__version__


@dataclass(frozen=True)
class Outcome:
    """How a task ended."""

    kind: Literal["done", "refused", "interrupted", "died"]
    what: str = ""


def run_tasks(
    run: Run, tasks: Sequence[ClusterTask], job: ClusterJob, reporter: Reporter
) -> dict[int, Outcome]:
    """Run a task per worker until all have ended; return how each did, by its number.

    A task that dies is started again from the files of its folder. A UserError of a worker is
    raised, and SIGINT or SIGTERM as Interrupted, after all workers have saved and stopped.
    """
    with ExitStack() as stack:
        workers = RayWorkers(run, job, reporter, stack)
        workers.reserve(len(tasks))
        for place, task in enumerate(tasks):
            workers.submit(task, place=place)
        workers.watch()
    return workers.outcomes


class RayWorkers:
    """The workers of one command; the stack stops them in the end and frees their resources."""

    def __init__(self, run: Run, job: ClusterJob, reporter: Reporter, stack: ExitStack) -> None:
        self.run, self.job, self.reporter = run, job, reporter
        self.ray = connect()
        self.outcomes: dict[int, Outcome] = {}
        self._running: dict[Any, Assignment] = {}
        """The tasks that have not ended, by Ray's reference"""
        self._attempts: Counter[int] = Counter()
        """Starts of each worker without progress in between"""
        self._queued: dict[int, float] = {}
        """Workers that have not started yet, and since when"""
        self._announced: set[int] = set()
        """Workers whose wait for a place was shown"""
        self._scheduling = importlib.import_module("ray.util.scheduling_strategies")
        self._groups = importlib.import_module("ray.util.placement_group")
        self._group: Any = None
        self._stop = stack.enter_context(catch_signals())
        self._probe = stack.enter_context(folders.place_probe(run.folder / "workers"))
        self._queue = self._open_queue()
        stack.callback(self._queue.shutdown, force=True)
        stack.callback(self._free)
        stack.callback(self._cancel)

    def _open_queue(self) -> Any:
        """Return the queue of messages; it lives here, so no other node takes it along."""
        here = self.ray.get_runtime_context().get_node_id()
        strategy = self._scheduling.NodeAffinitySchedulingStrategy(here, soft=False)
        options = {"num_cpus": 0, "scheduling_strategy": strategy}
        return importlib.import_module("ray.util.queue").Queue(actor_options=options)

    def reserve(self, num_workers: int) -> None:
        """Reserve a bundle for each worker; wait, and say so, while others use what they need."""
        bundle = self.job.bundle
        resources = {"CPU": bundle.cpus, "GPU": bundle.gpus}
        bundles = [{key: value for key, value in resources.items() if value}] * num_workers
        self._group = self._groups.placement_group(bundles, strategy="SPREAD")
        started_at, is_shown, ready = time.monotonic(), False, self._group.ready()
        while not self.ray.wait([ready], timeout=POLL_S)[0]:
            self._raise_if_stopped()
            if not is_shown and time.monotonic() - started_at > PATIENCE_S:
                is_shown = True
                self._say_waiting(f"{format_count(num_workers, 'worker')} with")
        self.ray.get(ready)
        if is_shown:
            self.run.append("trouble", what="the Ray cluster has room for all workers now")

    def _say_waiting(self, who: str) -> None:
        free = self.ray.available_resources()
        idle = Bundle(int(free.get("CPU", 0)), int(free.get("GPU", 0))).describe() or "nothing"
        self.run.append(
            "trouble",
            what=f"waiting for the Ray cluster: {who} {self.job.bundle.describe()} each; free now: "
            f"{idle}. Others use the rest; `ray status` lists it. Ctrl-C ends the wait",
        )

    def submit(self, task: ClusterTask, start: int = 1, *, place: int = ANY_BUNDLE) -> None:
        """Start a worker, with the files of its folder for a node that does not see that.

        At first each has a bundle of its own, so that none idles; later it takes any that is free.
        """
        strategy = self._scheduling.PlacementGroupSchedulingStrategy(
            self._group, placement_group_bundle_index=place
        )
        bundle = self.job.bundle
        remote = self.ray.remote(perform).options(
            num_cpus=bundle.cpus, num_gpus=bundle.gpus, max_retries=0, scheduling_strategy=strategy
        )
        assignment = Assignment(self.job.target, task, start, self._probe, self.job.mask)
        folders.release_locks(Path(task.folder))
        files = FolderSender(Path(task.folder)).collect()
        self._attempts[task.index] += 1
        self._queued[task.index] = time.monotonic()
        self._running[remote.remote(assignment, files, self._queue)] = assignment

    def watch(self) -> None:
        """Wait until all workers have ended; start those again that died."""
        while self._running:
            ended, _ = self.ray.wait(list(self._running), timeout=POLL_S)
            self._read_messages()
            self._raise_if_stopped()
            for reference in ended:
                assignment = self._running.pop(reference)
                self._queued.pop(assignment.task.index, None)
                self._end(assignment, self._get_outcome(reference))
            self._check_nodes()

    def _end(self, assignment: Assignment, outcome: Outcome) -> None:
        """Record how a worker ended, or start it again."""
        task, start, reason = assignment.task, assignment.start, self.job.mask(outcome.what)
        self.outcomes[task.index] = replace(outcome, what=reason)
        if outcome.kind == "refused":
            # the first start accepted the same config, so a later refusal is not a user error
            raise UserError(reason) if start == 1 else ResumableError(reason)
        if outcome.kind == "done":
            return
        if self._attempts[task.index] >= MAX_STARTS:
            self.reporter.log(task.index, "died", why=reason, remedy=self.job.given_up)
            return
        self.reporter.log(task.index, "died", why=reason, remedy="started again")
        folders.release_locks(Path(task.folder), died=True)
        self.job.recover(task.index)
        self.submit(task, start + 1)

    def _get_outcome(self, reference: Any) -> Outcome:
        try:
            outcome: Outcome = self.ray.get(reference)
        except self.ray.exceptions.RayTaskError as error:  # before the worker could start
            return describe_failed_start(error)
        except self.ray.exceptions.RayError as error:
            return Outcome("died", describe_death(error))
        return outcome

    def _check_nodes(self) -> None:
        """Say which workers wait for a place; give up if none runs and no node could take one."""
        late = {i for i, since in self._queued.items() if time.monotonic() - since > LATE_S}
        if late - self._announced and self._is_incomplete():
            self._announced |= late
            self._say_waiting(f"{format_count(len(late), 'worker')} of a lost node with")
        if late and len(self._queued) == len(self._running):
            nodes = list_nodes()
            if not count_places(nodes, self.job.bundle):
                raise ResumableError(
                    "the Ray cluster has no node left for a worker, which needs "
                    f"{self.job.bundle.describe()} ({describe_nodes(nodes)})"
                )

    def _is_incomplete(self) -> bool:
        """Whether resources of a lost node have not been replaced."""
        return bool(self._groups.placement_group_table(self._group)["state"] != "CREATED")

    def _read_messages(self) -> None:
        starts = {one.task.index: one.start for one in self._running.values()}
        messages: list[Message] = self._queue.get_nowait_batch(self._queue.qsize())
        for worker, start, kind, content in messages:
            if start != starts.get(worker):
                continue  # of a worker that counts as dead
            match kind:
                case "started":
                    self._queued.pop(worker, None)
                    self.reporter.log(worker, "started", **content)
                case "files":
                    self._write_files(worker, FolderFiles(*content))
                case "event":
                    if content["event"] in PROGRESS:
                        self._attempts[worker] = 1
                    self.reporter.add(worker, content)

    def _write_files(self, worker: int, files: FolderFiles) -> None:
        tasks = {one.task.index: one.task for one in self._running.values()}
        folders.write_files(Path(tasks[worker].folder), files)

    def _raise_if_stopped(self) -> None:
        if self._stop.requested:
            raise Interrupted("stopped", signal_number=self._stop.signal_number)

    def _cancel(self) -> None:
        """Let the workers that still run save their state and end."""
        for reference in self._running:
            self.ray.cancel(reference)
        deadline, waiting = time.monotonic() + STOP_TIMEOUT_S, list(self._running)
        while waiting and time.monotonic() < deadline:
            _, waiting = self.ray.wait(waiting, num_returns=len(waiting), timeout=POLL_S)
            self._read_messages()
        self._read_messages()

    def _free(self) -> None:
        """Free the resources, which also ends what did not end by itself."""
        if self._group is not None:
            self._groups.remove_placement_group(self._group)


def describe_failed_start(error: Any) -> Outcome:
    """Return how a task ended whose node could not load it; starting it again there is of no use if
    the node lacks a module."""
    reason = str(error.cause).strip()
    if missing := re.search(r"No module named '([^'.]+)", reason):
        node = re.search(r"ip=([^),]+)", str(error))
        return Outcome(
            "refused",
            f"a node of the cluster ({node[1] if node else 'unknown'}) has no Python module "
            f"{missing[1]}; each node needs what this machine has: Slipstream "
            f"{slipstream.__version__}, and the module of a model class",
        )
    return Outcome("died", f"{type(error.cause).__name__}: {reason.splitlines()[0]}")


def describe_death(error: Exception) -> str:
    """Return the first sentence of Ray's message, which goes on with advice for its own users."""
    name = type(error).__name__
    words = {
        "NodeDiedError": "its node died",
        "LocalRayletDiedError": "its node died",
        "WorkerCrashedError": "its process died",
        "OutOfMemoryError": "Ray ended it because its node ran out of memory",
        "TaskCancelledError": "it was cancelled",
    }
    return words.get(name) or str(error).strip().splitlines()[0]


def perform(assignment: Assignment, files: FolderFiles | None, queue: Any) -> Outcome:
    """Run one worker on its node; return how it ended."""
    task, node = assignment.task, platform.node()

    def put(kind: Literal["started", "event", "files"], content: Any) -> None:
        message: Message = (task.index, assignment.start, kind, content)
        queue.put(message)

    def send(event: Event) -> None:
        with suppress(Exception):  # the caller may be gone; its files have the results
            put("event", event)

    if assignment.version != slipstream.__version__:
        versions = f"{slipstream.__version__}, the caller {assignment.version}"
        return Outcome("refused", f"node {node} has Slipstream {versions}; install the same one")
    is_shared = assignment.probe.is_visible()
    put("started", {"node": node, "pid": os.getpid(), "shared": is_shared})
    with ExitStack() as stack:
        folder = Path(task.folder)
        if not is_shared:
            folder = stack.enter_context(
                folders.copy_folder(files, lambda new: put("files", (new.names, new.contents)))
            )
        return _run_target(assignment, replace(task, folder=str(folder)), send)


def _run_target(assignment: Assignment, task: Any, send: Send) -> Outcome:
    """Run the target; return its end, whatever it raises, since not all exceptions can travel."""
    try:
        assignment.target(task, send)
    except UserError as error:
        advice = READ_THERE if MISSING in str(error) else ""
        return Outcome("refused", f"on node {platform.node()}: {error}{advice}")
    except (Interrupted, KeyboardInterrupt):
        return Outcome("interrupted", "stopped")
    except Exception as error:
        with suppress(OSError), (Path(task.folder) / STDERR).open("a", encoding="utf-8") as file:
            file.write(assignment.mask(traceback.format_exc()))
        return Outcome("died", f"{type(error).__name__}: {error}")
    return Outcome("done")
