"""The side of the worker process: its task, its events, its end.

It reads its task as JSON from the first line of stdin (not from an argument, since it may contain a
password) and writes its events to stdout, one JSON object per line; all else that is printed goes
to stderr. It saves and stops when stdin is closed, because the launching process is gone then.
"""

import importlib
import json
import os
import signal
import sys
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from threading import Thread
from typing import ClassVar

from slipstream.base.errors import EXIT_RESUMABLE, WARNING, Interrupted, ResumableError, UserError
from slipstream.base.signals import raise_interrupted
from slipstream.events import Event, Other, format_event
from slipstream.runs import to_json

EXIT_USER_ERROR = 2
REFUSED = "refused"
"""The event with the message of a UserError"""
STOPPED = "stopped"
"""The event with the reason why a worker had to stop, from where it can go on"""
Send = Callable[[Event], None]


@dataclass(frozen=True)
class WorkerTask(ABC):
    """The arguments of a worker, and the function that it calls. Fields are plain values, since
    they travel as JSON or to another machine."""

    cluster_events: ClassVar[tuple[type[Event], ...]] = ()
    """The events that are worth sending over a network"""

    folder: str
    """The worker's own folder, which also gets its stderr"""
    index: int
    """The worker's number"""

    @abstractmethod
    def run(self, send: Send) -> None:
        """Do the work in this process; send its events."""

    def mask(self, text: str) -> str:
        """Return a text for a log file, without the secrets of the task."""
        return text


def format_task(task: WorkerTask) -> str:
    """Return the line by which the launching process sends a task."""
    kind = type(task)
    return json.dumps({"task": f"{kind.__module__}:{kind.__qualname__}", "values": asdict(task)})


def parse_task(line: str) -> WorkerTask:
    """Return the task of a line that `format_task` wrote."""
    message = json.loads(line)
    module, _, name = message["task"].partition(":")
    task = getattr(importlib.import_module(module), name)(**message["values"])
    assert isinstance(task, WorkerTask)
    return task


def main() -> int:
    """Run the task that the launching process sends; return the exit code."""
    line = sys.stdin.readline()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, raise_interrupted)
    if WARNING is not None:  # a batch system sends it to every process; the launching one acts
        signal.signal(WARNING, signal.SIG_IGN)
    Thread(target=_stop_with_parent, daemon=True).start()
    try:
        task = parse_task(line)  # imports the module of the task, torch among others
    except Interrupted as stop:
        return stop.exit_code
    return _run_task(task)


def _run_task(task: WorkerTask) -> int:
    """Run the task; return the exit code."""
    send = _open_events()
    try:
        task.run(send)
    except UserError as error:
        send(Other(name=REFUSED, values=error.to_json()))
        return EXIT_USER_ERROR
    except (ResumableError, OSError) as error:
        stopped = error if isinstance(error, ResumableError) else ResumableError(str(error))
        stopped = ResumableError(stopped.reason.map_texts(task.mask), fix=stopped.fix)
        send(Other(name=STOPPED, values=stopped.to_json()))
        with suppress(OSError):  # stderr may be on the full disk
            sys.stderr.write(task.mask(f"{error}\n"))
        return EXIT_RESUMABLE
    except Interrupted as stop:
        return stop.exit_code
    except Exception:
        sys.stderr.write(task.mask(traceback.format_exc()))
        return 1
    return 0


def _stop_with_parent() -> None:
    """Wait until stdin is closed, then have this process save and stop."""
    while os.read(sys.stdin.fileno(), 1):  # sys.stdin.read would block the exit
        pass
    if os.name == "nt":  # os.kill would end the process there before it saves its state
        signal.raise_signal(signal.SIGTERM)
    else:
        os.kill(os.getpid(), signal.SIGTERM)  # also interrupts a system call of the main thread


def _open_events() -> Send:
    """Return a function that sends an event to the launching process. From now on stdout is stderr,
    so that whatever networks and libraries print is not taken for events."""
    events = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def send(event: Event) -> None:
        with suppress(OSError):  # the reader is gone; stdin will close too
            events.write(to_json(format_event(event), indent=None) + "\n")
            events.flush()

    return send
