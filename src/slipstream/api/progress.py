"""Progress while a public function runs: as the command shows it, or in a notebook."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal, ParamSpec, TypeVar

from slipstream.base.errors import ExplainedError, Interrupted
from slipstream.base.signals import request_stop
from slipstream.events import Event

if TYPE_CHECKING:
    from slipstream.reporting.terminal.progress import SearchDisplay, TrainingDisplay

P = ParamSpec("P")
T = TypeVar("T")


def name_arguments(function: Callable[P, T]) -> Callable[P, T]:
    """Let a function's errors name arguments and functions where a command's name options and
    commands."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return function(*args, **kwargs)
        except ExplainedError as error:
            error.reader = "python"
            raise

    return call


OnEvent = Callable[[Event], None]


class EventListener:
    """Calls the user's function with each event. An exception in it stops training as Ctrl-C does,
    with a checkpoint; between the parts of a run it is raised at once."""

    def __init__(self, function: OnEvent | None) -> None:
        self.function = function
        self.error: Exception | None = None

    def send(self, event: Event) -> None:
        if self.function is None or self.error is not None:
            return
        try:
            self.function(event)
        except Exception as error:
            self.error = error
            if not request_stop():
                raise

    @contextmanager
    def raise_errors(self) -> Iterator[None]:
        """Raise the function's exception once the run has stopped, with a note on how it ended."""
        try:
            yield
        except Interrupted as stop:
            if self.error is None:
                raise
            self.error.add_note(f"on_event raised this; {stop.message.render('python')}")
            raise self.error from None
        except Exception as error:
            if error is self.error:
                error.add_note("on_event raised this; the run can be resumed")
            raise
        if self.error is not None:
            self.error.add_note("on_event raised this; the run went on to its end without it")
            raise self.error


@contextmanager
def show_progress(
    kind: Literal["training", "search"], quiet: bool, on_event: OnEvent | None
) -> Iterator[OnEvent]:
    """Yield the function to call with every logged event; it shows it and passes it on."""
    listener = EventListener(on_event)
    with listener.raise_errors():
        if quiet or sys.stderr is None:
            yield listener.send
            return
        with _make_display(kind) as display:
            display.say(f"loading {'' if 'torch' in sys.modules else 'torch and '}the data ...")

            def show(event: Event) -> None:
                display.show(event)
                listener.send(event)

            yield show


@contextmanager
def show_loading(quiet: bool) -> Iterator[None]:
    """Say what takes the first seconds, in a process that has not loaded torch yet."""
    if quiet or sys.stderr is None or "torch" in sys.modules:
        yield
        return
    with _make_display("training") as display:
        display.say("loading torch and the data ...")
        yield


def _make_display(kind: str) -> TrainingDisplay | SearchDisplay:
    from slipstream.reporting.terminal.progress import (
        NotebookOutput,
        SearchDisplay,
        TrainingDisplay,
        is_notebook,
    )

    notebook = NotebookOutput() if is_notebook() else None
    return (SearchDisplay if kind == "search" else TrainingDisplay)(False, notebook)
