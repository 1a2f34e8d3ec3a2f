"""Progress while a public function runs: as the command shows it, or in a notebook."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

from slipstream.events import Event, parse_event

if TYPE_CHECKING:
    from slipstream.terminal.search import SearchDisplay
    from slipstream.terminal.training import TrainingDisplay

Watch = Callable[[Event], None]
Logged = dict[str, Any]


@contextmanager
def show_progress(
    kind: Literal["training", "search"], quiet: bool, watch: Watch | None
) -> Iterator[Callable[[Logged], None]]:
    """Yield the function to call with every logged event; it shows it and passes it on."""
    if quiet or sys.stderr is None:
        yield lambda event: _pass_on(event, watch)
        return
    with _make_display(kind) as display:
        display.say(f"loading {'' if 'torch' in sys.modules else 'torch and '}the data ...")

        def show(event: Logged) -> None:
            display.show(event)
            _pass_on(event, watch)

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


def _pass_on(event: Logged, watch: Watch | None) -> None:
    if watch is not None:
        watch(parse_event(event))


def _make_display(kind: str) -> TrainingDisplay | SearchDisplay:
    from slipstream.terminal.notebook import NotebookOutput, is_notebook
    from slipstream.terminal.search import SearchDisplay
    from slipstream.terminal.training import TrainingDisplay

    notebook = NotebookOutput() if is_notebook() else None
    return (SearchDisplay if kind == "search" else TrainingDisplay)(False, notebook)
