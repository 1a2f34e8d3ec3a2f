"""The signals that end a command: they raise `Interrupted`, or a loop that trains reads them.

SIGINT   Ctrl-C. A second one ends the command at once. A command reacts to it also where its parent
         process ignores it, which is inherited: shells do so for `command &` in a script.
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

from slipstream.base.errors import EXIT_RESUMABLE, WARNING, Interrupted

CTRL_C = signal.SIGINT
REPEAT_S = 0.02
"""The interval after which a signal that arrived during an import is repeated"""


def list_stop_signals() -> list[signal.Signals]:
    """Return the signals besides Ctrl-C that have this process save and end."""
    if WARNING is None or signal.getsignal(WARNING) not in (signal.SIG_DFL, *HANDLERS):
        return [signal.SIGTERM]
    return [signal.SIGTERM, WARNING]


class _Postponed:
    """A signal that came during an import, and is repeated until that is over.

    An exception that a handler raises inside of an import may reach a callback of the import
    system, which discards it and leaves a module locked, so that the next import waits for ever.
    """

    def __init__(self) -> None:
        self.number = 0
        self.is_repeat = False

    def postpone(self, number: int, frame: FrameType | None) -> bool:
        """Return whether the signal is postponed. A second SIGINT ends the process at once."""
        is_new, self.is_repeat = not self.is_repeat, False
        while frame is not None and not frame.f_code.co_filename.startswith("<frozen importlib"):
            frame = frame.f_back
        if frame is None:
            self.number = 0
            return False
        if is_new and number == CTRL_C == self.number:
            os._exit(128 + number)
        if self.number in (0, number):  # another one is repeated already
            self.number = number
            timer = threading.Timer(REPEAT_S, self._repeat)
            timer.daemon = True
            timer.start()
        return True

    def _repeat(self) -> None:
        self.is_repeat = True
        if hasattr(signal, "pthread_kill"):
            signal.pthread_kill(threading.main_thread().ident or 0, self.number)
        else:  # Windows
            signal.raise_signal(self.number)


_POSTPONED = _Postponed()


def raise_interrupted(number: int, frame: FrameType | None) -> None:
    """Handle the first signal where there is no loop to stop."""
    if not _POSTPONED.postpone(number, frame):
        signal.signal(number, ignore)
        raise Interrupted("terminated", signal_number=number)


def raise_keyboard_interrupt(number: int, frame: FrameType | None) -> None:
    """Handle SIGINT as Python does, but not in the middle of an import."""
    if not _POSTPONED.postpone(number, frame):
        raise KeyboardInterrupt


def ignore(_number: int, _frame: FrameType | None) -> None:
    """Ignore a signal; unlike with SIG_IGN, child processes do not inherit that."""


def leave(_number: int, _frame: FrameType | None) -> None:
    """End a command that has not begun its work."""
    os._exit(EXIT_RESUMABLE)


HANDLERS = (raise_interrupted, ignore, leave)


def accept_ctrl_c() -> None:
    """Have SIGINT raise KeyboardInterrupt from now on, also where the parent process ignores it.

    Python leaves an ignored SIGINT alone, but the training loop handles it in any case; without
    this, an interrupt before or after the loop would be lost.
    """
    if signal.getsignal(CTRL_C) in (signal.SIG_IGN, signal.default_int_handler):
        signal.signal(CTRL_C, raise_keyboard_interrupt)


def leave_on_warning() -> None:
    """Let a warning signal end this process with its exit code, instead of killing it."""
    if WARNING in list_stop_signals():
        signal.signal(WARNING, leave)


def raise_on_stop() -> None:
    """Install handlers that raise `Interrupted`."""
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
    """Stop the innermost training of this thread as a signal would; return whether there is one."""
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
