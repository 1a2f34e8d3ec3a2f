"""Starts workers, watches them, starts those again that die, and collects how each ended.

`run_workers` is the one loop. Where workers run is up to a `Workers`: `LocalWorkers` for processes
of this machine, `ray.RayWorkers` for tasks of a cluster. The processes that train one model
together use `LocalWorkers` without the loop, since the death of one ends them all.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Thread
from typing import Any, Literal, Protocol, Self

from slipstream.base import machine
from slipstream.base.errors import (
    EXIT_RESUMABLE,
    Interrupted,
    ResumableError,
    UserError,
    parse_json_error,
)
from slipstream.base.signals import StopRequest, catch_signals
from slipstream.events import Event, Other, parse_event
from slipstream.workers.child import EXIT_USER_ERROR, WorkerTask, format_task

MODULE = "slipstream.workers"
STDERR = "stderr.txt"
POLL_S = 0.2
MAX_DEATHS = 3
"""Deaths in a row, without progress in between, after which a worker is given up"""


@dataclass(frozen=True)
class Started:
    """A worker has started."""

    facts: dict[str, Any]
    """Values for the log: the process and, on a cluster, the machine"""


@dataclass(frozen=True)
class Outcome:
    """How a worker ended."""

    kind: Literal["done", "refused", "stopped", "died"]
    """refused: by a UserError. stopped: resumable, as on a full disk"""
    reason: str = ""
    """Why the worker ended early; "" when it is done"""
    error: UserError | ResumableError | None = None
    """The error of a refused or stopped worker"""


Message = Started | Outcome | Event


class Workers(Protocol):
    """The processes or cluster tasks in which workers run."""

    stop: StopRequest
    """The stop that the user has requested by a signal"""

    @property
    def slots(self) -> Sequence[int]:
        """The numbers of the GPUs, parts of a CPU, or places on a cluster for a worker each"""

    def start(self, task: WorkerTask, slot: int, attempt: int) -> None:
        """Start a worker in a free slot; `attempt` counts the starts of this task from 1."""

    def watch(self) -> Iterator[tuple[int, Message]]:
        """Yield the messages of all workers with their numbers, each worker's outcome last, until
        none runs; workers may be started in between. A signal stops them all."""

    def terminate(self) -> None:
        """Have all workers save their state and stop."""


class Reporter(Protocol):
    """Logs and shows the events of workers."""

    def add(self, worker: int, event: Event) -> None:
        """Log or show an event of a worker."""

    def log(self, slot: int, task: WorkerTask, what: str, **values: Any) -> None:
        """Log that a worker started, died or took over another one's task."""


@dataclass(frozen=True)
class RestartRules:
    """When a worker that has ended is started again."""

    progress: tuple[type[Event], ...] = ()
    """Events after which a worker may die as often again"""
    given_up: str = "given up"
    """The log's message for a worker that is not started again"""
    hands_over: bool = False
    """Whether the task of a given up worker waits for another slot"""
    stops_together: bool = False
    """Whether all workers stop when one does, as on a full disk; else that one counts as dead"""
    recover: Callable[[int], None] = field(default=lambda _: None)
    """Called with the number of a dead worker, before it is started again"""


def run_workers(
    workers: Workers, tasks: Sequence[WorkerTask], rules: RestartRules, reporter: Reporter
) -> dict[int, Outcome]:
    """Run the tasks until all have ended; return the outcomes by number.

    A UserError of a worker is raised, and a signal as Interrupted, after all have saved and
    stopped.
    """
    launch = _Launch(workers, tasks, rules, reporter)
    launch.fill_slots()
    for index, message in workers.watch():
        launch.take(index, message)
    if workers.stop.requested:
        raise Interrupted("stopped", signal_number=workers.stop.signal_number)
    if launch.error is not None:
        raise launch.error
    return launch.outcomes


class _Launch:
    """The tasks of one command: waiting tasks, occupied slots, and outcomes."""

    def __init__(
        self,
        workers: Workers,
        tasks: Sequence[WorkerTask],
        rules: RestartRules,
        reporter: Reporter,
    ) -> None:
        self.workers, self.rules, self.reporter = workers, rules, reporter
        self.tasks = {task.index: task for task in tasks}
        self.waiting = deque(tasks)
        self.free = list(workers.slots)
        self.slots: dict[int, int] = {}
        """The slot of each running task"""
        self.first_slots: dict[int, int] = {}
        """The first slot of each task"""
        self.attempts: Counter[int] = Counter()
        """How often each task was started"""
        self.deaths: Counter[int] = Counter()
        """Deaths in each slot since the last progress: a broken GPU fails with every task"""
        self.outcomes: dict[int, Outcome] = {}
        self.error: Exception | None = None
        """Why all workers have to stop"""

    @property
    def is_stopping(self) -> bool:
        return self.error is not None or self.workers.stop.requested

    def fill_slots(self) -> None:
        """Start a waiting task in each free slot."""
        while self.waiting and self.free and not self.is_stopping:
            task, slot = self.waiting.popleft(), self.free.pop(0)
            self.slots[task.index] = slot
            self.first_slots.setdefault(task.index, slot)
            self.attempts[task.index] += 1
            self.workers.start(task, slot, self.attempts[task.index])

    def take(self, index: int, message: Message) -> None:
        """Log a message; give the slot of a worker that has ended to the next task, or to the same
        one again."""
        task, slot = self.tasks[index], self.slots[index]
        match message:
            case Started(facts):
                first = self.first_slots[index]
                change = "started" if first == slot else "took over"
                origin = {} if first == slot else {"of": first}
                self.reporter.log(slot, task, change, **facts, **origin)
            case Outcome():
                del self.slots[index]
                self.outcomes[index] = message
                self._end(task, slot, message)
                self.fill_slots()
            case event:
                if isinstance(event, self.rules.progress):
                    self.deaths[slot] = 0
                self.reporter.add(index, event)

    def _end(self, task: WorkerTask, slot: int, outcome: Outcome) -> None:
        if outcome.kind == "done":
            self.free.append(slot)
        elif outcome.kind == "refused":
            # the first start accepted the same config, so a later refusal is not a user error
            error_type = UserError if self.attempts[task.index] == 1 else ResumableError
            error = outcome.error or UserError(outcome.reason)
            self._stop(error_type(error.reason, fix=error.fix))
        elif outcome.kind == "stopped" and self.rules.stops_together:
            self._stop(outcome.error or ResumableError(outcome.reason or "a worker had to stop"))
        elif not self.is_stopping:
            self._recover(task, slot, outcome)

    def _recover(self, task: WorkerTask, slot: int, outcome: Outcome) -> None:
        """Start the task of a dead worker again, in this or another slot."""
        self.deaths[slot] += 1
        is_given_up = self.deaths[slot] >= MAX_DEATHS
        remedy = self.rules.given_up if is_given_up else "started again"
        self.reporter.log(slot, task, "died", why=outcome.reason, remedy=remedy)
        if not is_given_up:
            self.rules.recover(task.index)
            self.waiting.appendleft(task)
            self.free.insert(0, slot)
        elif self.rules.hands_over:
            self.waiting.append(task)

    def _stop(self, error: Exception) -> None:
        """Make all workers save and stop; the first error is the command's."""
        if not self.is_stopping:
            self.error = error
            self.workers.terminate()


class LocalWorkers:
    """Worker processes of this machine. The first SIGINT or SIGTERM becomes `stop` and is sent on
    as SIGTERM; workers that still run at the end of the `with` are killed."""

    def __init__(self, envs: Sequence[Mapping[str, str]]) -> None:
        """Prepare slots; `envs` has the environment of each slot, which may show a worker one
        GPU."""
        self.envs = envs
        self.stop = StopRequest()
        self.processes: dict[int, WorkerProcess] = {}
        """Processes by the worker's number, including ended ones"""
        self._messages: queue.Queue[tuple[int, Message]] = queue.Queue()
        self._running: set[int] = set()
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        self._stack.enter_context(catch_signals(self.stop))
        self._stack.callback(self._kill)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def slots(self) -> Sequence[int]:
        return range(len(self.envs))

    def start(self, task: WorkerTask, slot: int, attempt: int = 1) -> None:
        process = WorkerProcess(task, self.envs[slot], self._messages)
        self.processes[task.index] = process
        self._running.add(task.index)

    def watch(self) -> Iterator[tuple[int, Message]]:
        is_stopping = False
        while self._running:
            if self.stop.requested and not is_stopping:
                is_stopping = True
                self.terminate()
            try:
                index, message = self._messages.get(timeout=POLL_S)
            except queue.Empty:
                continue
            if isinstance(message, Outcome):
                self._running.discard(index)
            yield index, message

    def terminate(self) -> None:
        for index in self._running:
            self.processes[index].send_signal(signal.SIGTERM)

    def _kill(self) -> None:
        for process in self.processes.values():
            process.kill()


class WorkerProcess:
    """The process of one worker, whose messages go into a queue."""

    def __init__(
        self,
        task: WorkerTask,
        env: Mapping[str, str],
        messages: queue.Queue[tuple[int, Message]],
    ) -> None:
        self.task, self.messages = task, messages
        self.error: UserError | ResumableError | None = None
        """Why the worker was refused or had to stop"""
        folder = Path(self.task.folder)
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / STDERR).open("ab") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, "-m", MODULE],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                encoding="utf-8",
                errors="replace",
                env=os.environ | env,
                start_new_session=True,  # Ctrl-C reaches it only through `LocalWorkers`
            )
        self._put(Started({"pid": self.process.pid}))
        self._reader = Thread(target=self._read_events, daemon=True)
        self._reader.start()
        try:
            self._send_task()
        except BaseException:  # Ctrl-C: nobody else knows of the process yet
            self.kill()
            raise

    def _send_task(self) -> None:
        with suppress(BrokenPipeError, ValueError):  # it died; its reader may have closed the pipe
            assert self.process.stdin is not None
            self.process.stdin.write(format_task(self.task) + "\n")
            self.process.stdin.flush()

    def _put(self, message: Message) -> None:
        self.messages.put((self.task.index, message))

    def _read_events(self) -> None:
        process = self.process
        assert process.stdout is not None
        with process.stdout as lines:
            for line in lines:
                event = _parse_event(line)
                if event is None:
                    continue
                match event:
                    case Other(name="refused", values=values):
                        self.error = parse_json_error(UserError, values)
                    case Other(name="stopped", values=values):
                        self.error = parse_json_error(ResumableError, values)
                self._put(event)
        process.wait()
        with suppress(OSError):
            assert process.stdin is not None
            process.stdin.close()
        self._put(self.get_outcome())

    def get_outcome(self) -> Outcome:
        """Return the outcome of the process."""
        match self.exit_code:
            case 0:
                return Outcome("done")
            case code if code == EXIT_USER_ERROR and self.error:  # Python's own exit code, too
                return Outcome("refused", str(self.error), self.error)
            case code if code == EXIT_RESUMABLE:
                return Outcome("stopped", str(self.error or self.describe_exit()), self.error)
        return Outcome("died", self.describe_exit())

    @property
    def exit_code(self) -> int:
        """The exit code of the process, once it has ended"""
        return self.process.returncode

    def send_signal(self, number: int) -> None:
        if os.name == "nt" and number == signal.SIGTERM:
            # Windows would kill it; it saves its state and stops when stdin is closed
            with suppress(OSError):
                assert self.process.stdin is not None
                self.process.stdin.close()
            return
        machine.signal_process_group(self.process.pid, number)

    def kill(self) -> None:
        """End the process at once, if it still runs, and take its last messages."""
        if self.process.poll() is None:
            machine.kill_process_group(self.process.pid)
        self._reader.join()

    def describe_exit(self) -> str:
        """Say how the process ended, with the last line of its stderr."""
        text = ""
        with suppress(OSError):
            text = (Path(self.task.folder) / STDERR).read_text(encoding="utf-8", errors="replace")
        return machine.describe_exit(self.exit_code, text)


def _parse_event(line: str) -> Event | None:
    """Return the event of a line; None for a line that a kill has truncated, or that something has
    printed before the worker began."""
    try:
        values = json.loads(line)
    except json.JSONDecodeError:
        return None
    return parse_event(values) if isinstance(values, dict) and "event" in values else None
