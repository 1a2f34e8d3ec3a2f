"""The side of the launching process: starts, watches, restarts and stops worker processes."""

import json
import os
import queue
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import asdict
from pathlib import Path
from threading import Thread
from typing import Any, ClassVar, Protocol, Self

from slipstream.base import machine
from slipstream.base.errors import ResumableError, UserError, parse_json_error
from slipstream.base.signals import StopRequest, catch_signals
from slipstream.runs import Event
from slipstream.workers.child import REFUSED, STOPPED

STDERR = "stderr.txt"
POLL_S = 0.2
WorkerEvent = tuple[int, Event | None]
"""The number of a worker and its event; None when its process has ended"""


class ProcessTask(Protocol):
    """What a worker process is started with: a dataclass of plain values, since they travel as
    JSON."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def folder(self) -> str:
        """The worker's own folder"""

    @property
    def index(self) -> int:
        """The worker's number"""


class WorkerProcess:
    """The process of one worker, `python -m module`, which may be restarted."""

    def __init__(
        self,
        module: str,
        task: ProcessTask,
        env: Mapping[str, str],
        events: queue.Queue[WorkerEvent],
    ) -> None:
        self.module, self.task, self.env, self.events = module, task, env, events
        self.num_starts = 0
        self.error: UserError | ResumableError | None = None
        """Why the worker was refused or had to stop"""
        self.start()

    def start(self) -> None:
        """Start the process, or start it again after it has ended."""
        self.num_starts += 1
        folder = Path(self.task.folder)
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / STDERR).open("ab") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, "-m", self.module],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                encoding="utf-8",
                errors="replace",
                env=os.environ | self.env,
                start_new_session=True,  # Ctrl-C reaches it only through `WorkerProcesses`
            )
        with suppress(BrokenPipeError):
            assert self.process.stdin is not None
            self.process.stdin.write(json.dumps(asdict(self.task)) + "\n")
            self.process.stdin.flush()
        self._reader = Thread(target=self._read_events, args=(self.process,), daemon=True)
        self._reader.start()

    def _read_events(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        with process.stdout as lines:
            for line in lines:
                event = _parse_event(line)
                if event is None:
                    continue
                if event["event"] in (REFUSED, STOPPED):
                    is_refused = event["event"] == REFUSED
                    self.error = (
                        parse_json_error(UserError, event)
                        if is_refused
                        else parse_json_error(ResumableError, event)
                    )
                self.events.put((self.task.index, event))
        process.wait()
        with suppress(OSError):
            assert process.stdin is not None
            process.stdin.close()
        self.events.put((self.task.index, None))

    @property
    def exit_code(self) -> int:
        """Of the process, once it has ended"""
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
        if self.process.poll() is None:
            machine.kill_process_group(self.process.pid)
        self._reader.join()

    def describe_exit(self) -> str:
        """Say how the process ended, with the last line of its stderr."""
        text = (Path(self.task.folder) / STDERR).read_text(encoding="utf-8", errors="replace")
        return machine.describe_exit(self.exit_code, text)


def _parse_event(line: str) -> Event | None:
    """Return the event of a line; None for a line that a kill has truncated, or that something has
    printed before the worker began."""
    try:
        event = json.loads(line)
    except json.JSONDecodeError:
        return None
    return event if isinstance(event, dict) and "event" in event else None


class WorkerProcesses:
    """Workers that run at the same time. The first SIGINT or SIGTERM becomes `stop` and is sent on
    as SIGTERM; workers that still run at the end of the `with` are killed."""

    def __init__(self, module: str) -> None:
        self.module = module
        self.stop = StopRequest()
        self.workers: dict[int, WorkerProcess] = {}
        """By number; those that have ended too"""
        self._events: queue.Queue[WorkerEvent] = queue.Queue()
        self._running: set[int] = set()
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        self._stack.enter_context(catch_signals(self.stop))
        self._stack.callback(self._kill)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def start(self, task: ProcessTask, env: Mapping[str, str]) -> WorkerProcess:
        """Start a worker; one of the same number must have ended."""
        worker = WorkerProcess(self.module, task, env, self._events)
        self.workers[task.index] = worker
        self._running.add(task.index)
        return worker

    def restart(self, worker: WorkerProcess) -> None:
        """Start the process of a worker again."""
        worker.start()
        self._running.add(worker.task.index)

    def terminate(self) -> None:
        """Have all workers save their state and stop."""
        for index in self._running:
            self.workers[index].send_signal(signal.SIGTERM)

    def watch(self) -> Iterator[tuple[WorkerProcess, Event | None]]:
        """Yield every event of every worker, None at the end of its process, until none runs.

        A worker may be started, or restarted, in between.
        """
        is_stopping = False
        while self._running:
            if self.stop.requested and not is_stopping:
                is_stopping = True
                self.terminate()
            try:
                index, event = self._events.get(timeout=POLL_S)
            except queue.Empty:
                continue
            if event is None:
                self._running.discard(index)
            yield self.workers[index], event

    def _kill(self) -> None:
        for worker in self.workers.values():
            worker.kill()
