"""The side of the worker process: its task, its events, its end.

It reads its task as JSON from the first line of stdin (not from an argument, since it may contain a
password) and writes its events to stdout, one JSON object per line; all else that is printed goes
to stderr. It saves and stops when stdin is closed, because the launching process is gone then.
"""

import json
import os
import signal
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from threading import Thread
from typing import Any

from slipstream.base.errors import EXIT_RESUMABLE, WARNING, Interrupted, ResumableError, UserError
from slipstream.base.signals import raise_interrupted
from slipstream.runs import Event, to_json

EXIT_USER_ERROR = 2
REFUSED = "refused"
"""The event with the message of a UserError"""
STOPPED = "stopped"
"""The event with the reason why a worker had to stop, from where it can go on"""
Send = Callable[[Event], None]


def read_task() -> dict[str, Any]:
    """Return the task that the launching process has sent; from now on, its end and signals stop
    this process."""
    task: dict[str, Any] = json.loads(sys.stdin.readline())
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, raise_interrupted)
    if WARNING is not None:  # a batch system sends it to every process; the launching one acts
        signal.signal(WARNING, signal.SIG_IGN)
    Thread(target=_stop_with_parent, daemon=True).start()
    return task


def run_task(work: Callable[[Send], None], *, mask: Callable[[str], str] = str) -> int:
    """Do the work, which sends events; return the exit code. `mask` removes secrets from what is
    written to stderr, which is a file."""
    send = _open_events()
    try:
        work(send)
    except UserError as error:
        send({"event": REFUSED, **error.to_json()})
        return EXIT_USER_ERROR
    except (ResumableError, OSError) as error:
        stopped = error if isinstance(error, ResumableError) else ResumableError(str(error))
        stopped = ResumableError(stopped.reason.map_texts(mask), fix=stopped.fix)
        send({"event": STOPPED, **stopped.to_json()})
        with suppress(OSError):  # stderr may be on the full disk
            sys.stderr.write(mask(f"{error}\n"))
        return EXIT_RESUMABLE
    except Interrupted as stop:
        return stop.exit_code
    except Exception:
        sys.stderr.write(mask(traceback.format_exc()))
        return 1
    return 0


def _stop_with_parent() -> None:
    while os.read(sys.stdin.fileno(), 1):  # sys.stdin.read would block the exit
        pass
    if os.name == "nt":  # os.kill would end the process there before it saves its state
        signal.raise_signal(signal.SIGTERM)
    else:
        os.kill(os.getpid(), signal.SIGTERM)  # also interrupts a system call of the main thread


def _open_events() -> Send:
    """Return what writes an event for the launching process. From now on stdout is stderr, so that
    what networks and libraries print is not taken for events."""
    events = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def send(event: Event) -> None:
        with suppress(OSError):  # the reader is gone; stdin will close too
            events.write(to_json(event, indent=None) + "\n")
            events.flush()

    return send
