"""Workers on a Ray cluster: the connection, their folders, and their tasks."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Self

import slipstream
from slipstream import runs
from slipstream.base.errors import Interrupted, Option, ResumableError, Text, UserError
from slipstream.base.signals import StopRequest, catch_signals
from slipstream.base.text import format_count
from slipstream.events import Event, Trouble
from slipstream.runs import Run
from slipstream.workers.child import Send, WorkerTask
from slipstream.workers.launcher import STDERR, Message, Outcome, Started
from slipstream.workers.resources import Bundle, Node, count_places, describe_nodes

ADDRESS, AUTH_MODE = "RAY_ADDRESS", "RAY_AUTH_MODE"
"""Environment variables of Ray"""
ANSWER_TIMEOUT_S = 10.0
CHECK_TIMEOUT_S = 60.0
HEALTH_CHECK = ("-m", "ray.scripts.scripts", "health-check")
START = "start one with `ray start --head`"


def connect() -> Any:
    """Return the module `ray`, connected to the running cluster."""
    if importlib.util.find_spec("ray") is None:
        raise UserError(
            Option("on", "ray")
            + ": Ray is not installed; install it with: pip install 'slipstream[ray]'"
        )
    if "ray" in sys.modules and importlib.import_module("ray").is_initialized():
        return importlib.import_module("ray")
    address = os.environ.get(ADDRESS, "")
    _check_address(address)
    if address != "local":  # with which Ray starts a cluster of its own
        _set_auth_mode(_find_auth_mode(address))
    ray = importlib.import_module("ray")
    try:
        ray.init(address="auto", log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(
            Option("on", "ray")
            + f": {_name_cluster(address)} does not accept this machine ({reason}); the command "
            "has to run on a node of the cluster, with its version of Ray and Python"
        ) from None
    return ray


def list_nodes() -> list[Node]:
    """List the nodes that are alive."""
    alive = [node for node in connect().nodes() if node["Alive"]]
    return [
        Node(
            node["NodeManagerHostname"],
            int(node["Resources"].get("CPU", 0)),
            int(node["Resources"].get("GPU", 0)),
        )
        for node in alive
    ]


def _check_address(address: str) -> None:
    """Raise a UserError unless RAY_ADDRESS is empty, a word of Ray's, or accepts connections.

    Ray itself tries for many minutes.
    """
    if address in ("", "auto", "local"):
        return
    match = re.fullmatch(r"\[?([^/]+?)\]?:(\d+)", address)
    if match is None:
        raise UserError(
            Option("on", "ray")
            + f": {ADDRESS}={address}: expected HOST:PORT of the cluster's head node, 6379 by "
            "default, as `ray start --head` prints it; a client from outside the cluster "
            "(ray://) and the dashboard (http://) are not supported"
        )
    try:
        socket.create_connection((match[1], int(match[2])), ANSWER_TIMEOUT_S).close()
    except (OSError, OverflowError) as error:
        raise UserError(
            Option("on", "ray")
            + f": no Ray cluster answers at {ADDRESS}={address} ({error}); {START}, or correct "
            f"or unset {ADDRESS}"
        ) from None


def _find_auth_mode(address: str) -> str:
    """Return the value of RAY_AUTH_MODE with which the cluster accepts this machine.

    Raise a UserError if there is none, or no cluster.
    """
    requested = os.environ.get(AUTH_MODE)
    token = _find_token()
    if requested == "token" and token is None:
        raise UserError(
            Option("on", "ray")
            + f": {AUTH_MODE}=token, but this machine has no token; {_explain_token()}"
        )
    modes = [requested] if requested else ["disabled", "token"]
    for mode in modes if token else modes[:1]:
        problem = _check_health(mode)
        if problem is None:
            return mode
        if "AuthenticationError" not in problem:
            raise UserError(_describe_problem(address, problem))
    refused = Option("on", "ray") + f": {_name_cluster(address)}"
    if token is None:
        raise UserError(
            refused + f" asks for a token, and this machine has none; {_explain_token()}"
        )
    if requested and requested != "token":
        raise UserError(refused + f" asks for a token, but {AUTH_MODE}={requested}; unset it")
    raise UserError(refused + f" refuses the token in {token}; {_explain_token()}")


def _check_health(mode: str) -> str | None:
    """Return None if the cluster accepts this machine with this RAY_AUTH_MODE, else Ray's error.

    Another process asks: Ray reads the mode once, and its warnings would be on the screen.
    """
    command, env = [sys.executable, *HEALTH_CHECK], os.environ | {AUTH_MODE: mode}
    try:
        checked = subprocess.run(
            command, env=env, capture_output=True, text=True, timeout=CHECK_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return f"TimeoutExpired: no answer within {CHECK_TIMEOUT_S:.0f} s"
    return checked.stderr if checked.returncode else None


def _describe_problem(address: str, problem: str) -> Text:
    """Return a message for the error of the health check."""
    errors = re.findall(r"^([\w.]+): (.+)$", problem, re.MULTILINE)
    kind, reason = errors[-1] if errors else ("", problem.strip() or "no reason")
    if kind == "ConnectionError":  # it found none
        return (
            Option("on", "ray")
            + f": no Ray cluster runs on this machine; {START}, or name one with {ADDRESS}"
        )
    name = _name_cluster(address)
    return (
        Option("on", "ray")
        + f": {name} does not answer as expected: {reason.strip()}; see `ray status`"
    )


def _set_auth_mode(mode: str) -> None:
    """Set RAY_AUTH_MODE for this process and its children, as Ray does when it finds a token."""
    if os.environ.get(AUTH_MODE) == mode:
        return
    os.environ[AUTH_MODE] = mode
    if "ray" in sys.modules:  # it has read the variable already
        importlib.import_module("ray._raylet").Config.initialize("")


def _find_token() -> str | None:
    """Return where this machine's token is, in the order in which Ray looks for it."""
    if os.environ.get("RAY_AUTH_TOKEN"):
        return "RAY_AUTH_TOKEN"
    path = os.environ.get("RAY_AUTH_TOKEN_PATH") or str(Path.home() / ".ray" / "auth_token")
    return path if Path(path).exists() else None


def _explain_token() -> str:
    return (
        "set RAY_AUTH_TOKEN to what `ray get-auth-token` prints on the head node, or copy "
        "~/.ray/auth_token from there"
    )


def _name_cluster(address: str) -> str:
    return f"the Ray cluster at {address}" if address else "the Ray cluster of this machine"


SEND_EVERY_S = (1.0, 10.0)
"""Between transfers, at first and in the long run; what a worker did since the last one is lost
with its node"""
PROBE = "shared-storage"
"""A file of the caller: a worker that can read it sees the same file system"""
LOCKS = ("lock.json", "lock.held")


@dataclass(frozen=True)
class FolderFiles:
    """The names of a folder's files, and the contents of changed ones."""

    names: frozenset[str]
    contents: dict[str, bytes]


@dataclass(frozen=True)
class SharedProbe:
    """A file with a random text that tells whether a machine sees the caller's folders."""

    path: str
    text: str

    def is_visible(self) -> bool:
        with suppress(OSError, UnicodeDecodeError):
            return Path(self.path).read_text(encoding="utf-8") == self.text
        return False


@contextmanager
def place_probe(folder: Path) -> Iterator[SharedProbe]:
    """Write the file that shows workers whether they see this folder."""
    folder.mkdir(parents=True, exist_ok=True)
    probe = SharedProbe(str(folder / PROBE), uuid.uuid4().hex)
    runs.write_text(folder / PROBE, probe.text)
    try:
        yield probe
    finally:
        (folder / PROBE).unlink(missing_ok=True)


class FolderSender:
    """Tracks which files of a folder were sent, and collects changed ones."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._sent: dict[str, tuple[int, int]] = {}

    def collect(self) -> FolderFiles | None:
        """Return the files that changed since the last call; None if none did."""
        names, changed = [], {}
        for path in sorted(self.folder.rglob("*")):
            name = path.relative_to(self.folder)
            is_temporary = any(part.startswith(".") for part in name.parts)
            if is_temporary or name.name in LOCKS:
                continue
            with suppress(FileNotFoundError):  # an old checkpoint is removed meanwhile
                if path.is_dir():
                    continue
                status = path.stat()
                state = (status.st_mtime_ns, status.st_size)
                if self._sent.get(name.as_posix()) != state:
                    changed[name.as_posix()] = path.read_bytes()
                    self._sent[name.as_posix()] = state
                names.append(name.as_posix())
        if not changed and set(names) == set(self._sent):
            return None
        self._sent = {name: self._sent[name] for name in names}
        return FolderFiles(frozenset(names), changed)

    def forget(self) -> None:
        self._sent = {}


def write_files(folder: Path, files: FolderFiles) -> None:
    """Make a folder equal to the source of the files."""
    for name, content in files.contents.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with runs.replace_atomically(path) as temporary:
            temporary.write_bytes(content)
    for path in sorted(folder.rglob("*"), reverse=True):  # the files of a folder before it
        if path.is_dir():
            with suppress(OSError):  # removes only an empty folder
                path.rmdir()
        elif path.relative_to(folder).as_posix() not in files.names:
            path.unlink(missing_ok=True)


@contextmanager
def copy_folder(files: FolderFiles | None, send: Callable[[FolderFiles], None]) -> Iterator[Path]:
    """Yield a local folder with these files; changes are sent while it is used, and at its end."""
    folder = Path(tempfile.mkdtemp(prefix="slipstream-worker-"))
    sender = FolderSender(folder)
    ended = threading.Event()

    def send_changes() -> None:
        if changed := sender.collect():
            try:
                send(changed)
            except BaseException:
                sender.forget()  # send them again
                raise

    def repeat() -> None:
        interval_s, longest_s = SEND_EVERY_S
        while not ended.wait(interval_s):
            interval_s = min(2 * interval_s, longest_s)
            with suppress(Exception):  # the next transfer, or the last one, may succeed
                send_changes()

    thread = threading.Thread(target=repeat, name="transfer", daemon=True)
    try:
        if files is not None:
            write_files(folder, files)
        sender.collect()  # the caller has these
        thread.start()
        try:
            yield folder
        finally:
            ended.set()
            thread.join()
            send_changes()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def release_locks(folder: Path, *, died: bool = False) -> None:
    """Remove the locks of workers that ended without removing them: locks of other machines whose
    command is gone, and of dead processes; all locks of a worker that `died`."""
    for name in LOCKS:
        for path in folder.rglob(name):
            holder = runs.find_holder(path.parent)
            if died or holder.get("host") != platform.node():
                path.unlink(missing_ok=True)


ANY_BUNDLE = -1
"""Ray's number for any free bundle of a placement group"""
POLL_S = 0.5
PATIENCE_S = 3.0
"""A wait for resources that is longer is shown"""
LATE_S = 30.0
"""Seconds without a start after which a worker may have no room"""
STOP_TIMEOUT_S = 60.0
"""Time for workers to write checkpoints after they were cancelled"""
MISSING = "there is no such file or folder"
READ_THERE = (
    "; each node reads the data itself: put them under the same path on all of them, on a drive "
    "that all mount, or in object storage"
)
Parcel = tuple[int, int, Literal["started", "event", "files"], Any]
"""What a task puts into the queue: its number, the count of its starts, and an event, files or
where it runs; plain values, so that the actor of the queue needs no Slipstream"""


@dataclass(frozen=True)
class Assignment:
    """One start of one worker, as it is sent to its node."""

    task: WorkerTask
    attempt: int
    """1 at first; counts the starts of this worker"""
    probe: SharedProbe
    version: str = slipstream.__version__


class RayWorkers:
    """Workers as tasks of a Ray cluster, each with a bundle of its resources.

    At the end of the `with`, those that still run have a minute to save, and all resources are
    freed.
    """

    def __init__(self, run: Run, tasks: Sequence[WorkerTask], bundle: Bundle) -> None:
        self.run, self.bundle = run, bundle
        self.slots = [task.index for task in tasks]
        self.stop = StopRequest()
        self._running: dict[Any, Assignment] = {}
        """The tasks that have not ended, by Ray's reference"""
        self._queued: dict[int, float] = {}
        """Workers that have not started yet, and since when"""
        self._announced: set[int] = set()
        """Workers whose wait for room was shown"""
        self._deadline: float | None = None
        """When cancelled workers are killed"""
        self._group: Any = None
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            self.ray = connect()
            self._scheduling = importlib.import_module("ray.util.scheduling_strategies")
            self._groups = importlib.import_module("ray.util.placement_group")
            stack.enter_context(catch_signals(self.stop))
            self._probe = stack.enter_context(place_probe(self.run.folder / "workers"))
            self._queue = self._open_queue()
            stack.callback(self._queue.shutdown, force=True)
            stack.callback(self._free)
            self._reserve()
            stack.callback(self._cancel)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _open_queue(self) -> Any:
        """Return the queue of parcels; it stays on this node, so that the loss of another node does
        not end it."""
        here = self.ray.get_runtime_context().get_node_id()
        strategy = self._scheduling.NodeAffinitySchedulingStrategy(here, soft=False)
        options = {"num_cpus": 0, "scheduling_strategy": strategy}
        return importlib.import_module("ray.util.queue").Queue(actor_options=options)

    def _reserve(self) -> None:
        """Reserve a bundle for each worker; wait, and say so, while others use the resources."""
        num_workers = len(self.slots)
        resources = {"CPU": self.bundle.cpus, "GPU": self.bundle.gpus}
        bundles = [{key: value for key, value in resources.items() if value}] * num_workers
        self._group = self._groups.placement_group(bundles, strategy="SPREAD")
        started_at, is_shown, ready = time.monotonic(), False, self._group.ready()
        while not self.ray.wait([ready], timeout=POLL_S)[0]:
            if self.stop.requested:
                raise Interrupted("stopped", signal_number=self.stop.signal_number)
            if not is_shown and time.monotonic() - started_at > PATIENCE_S:
                is_shown = True
                self._say_waiting(f"{format_count(num_workers, 'worker')} with")
        self.ray.get(ready)
        if is_shown:
            self.run.append(Trouble(what="the Ray cluster has room for all workers now"))

    def _say_waiting(self, workers: str) -> None:
        free = self.ray.available_resources()
        idle = Bundle(int(free.get("CPU", 0)), int(free.get("GPU", 0))).describe() or "nothing"
        problem = (
            f"waiting for the Ray cluster: {workers} {self.bundle.describe()} each; free now: "
            f"{idle}. Others use the rest; `ray status` lists it. Ctrl-C ends the wait"
        )
        self.run.append(Trouble(what=problem))

    def start(self, task: WorkerTask, slot: int, attempt: int) -> None:
        """Start a worker, with the files of its folder where the node does not see that folder.

        At first each has a bundle of its own, so that none idles; later it takes any that is free.
        """
        bundle = self.slots.index(slot) if attempt == 1 else ANY_BUNDLE
        strategy = self._scheduling.PlacementGroupSchedulingStrategy(
            self._group, placement_group_bundle_index=bundle
        )
        remote = self.ray.remote(perform).options(
            num_cpus=self.bundle.cpus,
            num_gpus=self.bundle.gpus,
            max_retries=0,
            scheduling_strategy=strategy,
        )
        assignment = Assignment(task, attempt, self._probe)
        release_locks(Path(task.folder), died=attempt > 1)
        files = FolderSender(Path(task.folder)).collect()
        self._queued[task.index] = time.monotonic()
        self._running[remote.remote(assignment, files, self._queue)] = assignment

    def watch(self) -> Iterator[tuple[int, Message]]:
        while self._running and not self._is_too_late():
            if self.stop.requested:
                self.terminate()
            ended, _ = self.ray.wait(list(self._running), timeout=POLL_S)
            yield from self._read_parcels()
            for reference in ended:
                task = self._running.pop(reference).task
                self._queued.pop(task.index, None)
                yield task.index, self._get_outcome(task, reference)
            if self._deadline is None:
                self._check_nodes()

    def terminate(self) -> None:
        if self._deadline is None:
            self._deadline = time.monotonic() + STOP_TIMEOUT_S
            for reference in self._running:
                self.ray.cancel(reference)

    def _is_too_late(self) -> bool:
        return self._deadline is not None and time.monotonic() > self._deadline

    def _get_outcome(self, task: WorkerTask, reference: Any) -> Outcome:
        try:
            outcome: Outcome = self.ray.get(reference)
        except self.ray.exceptions.RayTaskError as error:  # before the worker could start
            outcome = describe_failed_start(error)
        except self.ray.exceptions.RayError as error:
            outcome = Outcome("died", describe_death(error))
        return replace(outcome, reason=task.mask(outcome.reason))

    def _check_nodes(self) -> None:
        """Log which workers wait for room; give up if none runs and no node could take one."""
        late = {i for i, since in self._queued.items() if time.monotonic() - since > LATE_S}
        if late - self._announced and self._is_incomplete():
            self._announced |= late
            self._say_waiting(f"{format_count(len(late), 'worker')} of a lost node with")
        if late and len(self._queued) == len(self._running):
            nodes = list_nodes()
            if not count_places(nodes, self.bundle):
                raise ResumableError(
                    "the Ray cluster has no node left for a worker, which needs "
                    f"{self.bundle.describe()} ({describe_nodes(nodes)})"
                )

    def _is_incomplete(self) -> bool:
        """Whether resources of a lost node have not been replaced."""
        return bool(self._groups.placement_group_table(self._group)["state"] != "CREATED")

    def _read_parcels(self) -> Iterator[tuple[int, Message]]:
        """Write the files that workers have sent; yield their other messages."""
        assignments = self._running.values()
        current = {assignment.task.index: assignment for assignment in assignments}
        parcels: list[Parcel] = self._queue.get_nowait_batch(self._queue.qsize())
        for worker, attempt, kind, content in parcels:
            assignment = current.get(worker)
            if assignment is None or attempt != assignment.attempt:
                continue  # of a worker that counts as dead
            match kind:
                case "started":
                    self._queued.pop(worker, None)
                    yield worker, Started(content)
                case "files":
                    write_files(Path(assignment.task.folder), FolderFiles(*content))
                case "event":
                    yield worker, content

    def _cancel(self) -> None:
        """Let the workers that still run, because an error ended `watch`, save their state."""
        self.terminate()
        for _ in self.watch():
            pass  # nobody logs their events any more, but their files are written

    def _free(self) -> None:
        """Free the resources, which also ends workers that did not end by themselves."""
        if self._group is not None:
            self._groups.remove_placement_group(self._group)


def describe_failed_start(error: Any) -> Outcome:
    """Return the outcome of a task that its node could not load; a node that lacks a module is not
    tried again."""
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
    """Run one worker on its node; return its outcome."""
    task, node = assignment.task, platform.node()

    def put(kind: Literal["started", "event", "files"], content: Any) -> None:
        parcel: Parcel = (task.index, assignment.attempt, kind, content)
        queue.put(parcel)

    def send(event: Event) -> None:
        if isinstance(event, task.cluster_events):
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
                copy_folder(files, lambda new: put("files", (new.names, new.contents)))
            )
        return _run_task(replace(task, folder=str(folder)), send)


def _run_task(task: WorkerTask, send: Send) -> Outcome:
    """Run the task; return its outcome, whatever it raises, since not all exceptions can travel.

    A full disk counts as a death: the next start may be on another node.
    """
    try:
        task.run(send)
    except UserError as error:
        advice = READ_THERE if MISSING in str(error) else ""
        return Outcome("refused", f"on node {platform.node()}: {error}{advice}")
    except (Interrupted, KeyboardInterrupt):
        return Outcome("died", "stopped")
    except Exception as error:
        with suppress(OSError), (Path(task.folder) / STDERR).open("a", encoding="utf-8") as file:
            file.write(task.mask(traceback.format_exc()))
        return Outcome("died", f"{type(error).__name__}: {error}")
    return Outcome("done")
