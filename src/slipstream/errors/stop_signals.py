"""The signals that end a command: they raise `Interrupted`, or a loop that trains reads them.

SIGINT   Ctrl-C. A second one ends the command at once.
SIGTERM  A batch system ends the job. Some send it twice, so a second one is ignored.
SIGUSR1  A batch system warns that the job will end. A program that has a handler of its own for it
         keeps that.
"""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from slipstream.errors import EXIT_RESUMABLE, WARNING, Interrupted

CTRL_C = signal.SIGINT


def list_stop_signals() -> list[signal.Signals]:
    """Return the signals besides Ctrl-C that have this process save and end."""
    if WARNING is None or signal.getsignal(WARNING) not in (signal.SIG_DFL, *HANDLERS):
        return [signal.SIGTERM]
    return [signal.SIGTERM, WARNING]


def raise_interrupted(number: int, _: FrameType | None) -> None:
    """Handle the first signal where there is no loop to stop."""
    signal.signal(number, ignore)
    raise Interrupted("terminated", signal_number=number)


def ignore(_number: int, _frame: FrameType | None) -> None:
    """Ignore a signal; unlike with SIG_IGN, child processes do not inherit that."""


def leave(_number: int, _frame: FrameType | None) -> None:
    """End a command that has not begun its work."""
    os._exit(EXIT_RESUMABLE)


HANDLERS = (raise_interrupted, ignore, leave)


def leave_on_warning() -> None:
    """Have a warning end this process from now on with its exit code, not as killed."""
    if WARNING in list_stop_signals():
        signal.signal(WARNING, leave)


def raise_on_stop() -> None:
    """Have the signals raise `Interrupted` from now on."""
    for number in list_stop_signals():
        signal.signal(number, raise_interrupted)


class StopRequest:
    """Set by a signal, read by the loop after the current step."""

    def __init__(self) -> None:
        self.signal_number = 0

    @property
    def requested(self) -> bool:
        return self.signal_number != 0


class _ThreadStops(threading.local):
    """The requests that this thread's loops read, the innermost last."""

    def __init__(self) -> None:
        self.stops: list[StopRequest] = []


_THREAD = _ThreadStops()


def request_stop(number: int = signal.SIGINT) -> bool:
    """Stop what this thread trains as a signal would; return whether there is something."""
    if not _THREAD.stops:
        return False
    _THREAD.stops[-1].signal_number = int(number)
    return True


@contextmanager
def catch_signals(stop: StopRequest | None = None) -> Iterator[StopRequest]:
    """Turn SIGINT, SIGTERM and SIGUSR1 into a request. Only a second SIGINT acts at once: a batch
    system may send the others more than once."""
    stop = stop or StopRequest()
    _THREAD.stops.append(stop)
    try:
        with _handle_signals(stop):
            yield stop
    finally:
        _THREAD.stops.pop()


@contextmanager
def _handle_signals(stop: StopRequest) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def request(number: int, _: FrameType | None) -> None:
        stop.signal_number = stop.signal_number or number
        if number == CTRL_C:
            signal.signal(number, before[number])

    numbers = [int(number) for number in (CTRL_C, *list_stop_signals())]
    before = {number: signal.getsignal(number) for number in numbers}
    for number in numbers:
        signal.signal(number, request)
    try:
        yield
    finally:
        for number in numbers:
            signal.signal(number, before[number])
