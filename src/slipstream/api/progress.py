"""Progress while a public function runs: as the command shows it, or in a notebook."""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TypeVar

from slipstream.base.errors import Interrupted, ResumableError, UserError
from slipstream.base.signals import request_stop
from slipstream.events import Event, parse_event

if TYPE_CHECKING:
    from slipstream.reporting.terminal.progress import SearchDisplay, TrainingDisplay

P = ParamSpec("P")
T = TypeVar("T")
PLACE = r"(?P<place>[^\s;,]+)"
RESUME = re.compile(
    rf"slipstream (?P<verb>train|tune|pretrain) --resume {PLACE}"
    r"(?P<options>(?: --(?:storage|workers|set) [^\s;,]+)*)"
)
RULES: tuple[tuple[str, str], ...] = (
    (rf"the same command and --resume {PLACE}", r'the same call and folder="\g<place>"'),
    (r"`slipstream runs (?P<out>[^\s`]+)`", r'slipstream.list_runs("\g<out>")'),
    (
        rf"slipstream copy {PLACE} (?P<to>\w+://[^\s;,]*)",
        r'slipstream.copy_run("\g<place>", "\g<to>")',
    ),
    (rf"slipstream copy {PLACE}", r'slipstream.copy_run("\g<place>")'),
    (rf"slipstream report {PLACE} --out FOLDER", r'slipstream.report("\g<place>", out=FOLDER)'),
    (rf"slipstream (?P<verb>train|report) {PLACE}", r'slipstream.\g<verb>("\g<place>")'),
    (r"slipstream (train|tune|pretrain|evaluate|predict|export|report)\b(?! -)", r"slipstream.\1"),
    (r"--allow-code \(in Python allow_code=True\)", "allow_code=True"),
    (r"the same command\b", "the same call"),
    (
        r"pass (?:the same rows again: )?--set data\.path=FILE \(in Python data=TABLE\)",
        "pass data=TABLE",
    ),
    (r"--data FILE\b", "data=TABLE"),
    (r"--set takes", "overrides takes"),
    (r"--set (?P<what>[\w.]+=[^\s;,]+)", r'overrides="\g<what>"'),
    (r"--(?P<name>force|resample|every|allow-code|ensemble|int8)\b", r"\g<name>=True"),
    (r"--after-prepare\b", "after_prepare=True"),
    (r"--(?P<name>name|state) (?P<what>windows|is)\b", r"\g<name> \g<what>"),
    (r"--on ray", 'on="ray"'),
    (r"--encoder RUN", "run=RUN"),
    (r"--to (?P<what>\w+)", r'to="\g<what>"'),
    (r"--(?P<name>[\w-]+) is for", r"\g<name> is for"),
    (r"--(?P<name>storage|workers|out) (?P<what>[A-Z]\w*|\d+|\w+://)", r"\g<name>=\g<what>"),
    (r"--set\b", "overrides"),
    (r"--(?P<name>data|seeds|storage|workers|on|out|resume|share|to)\b", r"\g<name>"),
)
"""Patterns of the command line's words, the most specific first, and what replaces them"""


def translate(message: str) -> str:
    """Return a message with arguments of functions in the place of command-line options."""
    message = RESUME.sub(_format_resume, message)
    for pattern, replacement in RULES:
        message = re.sub(pattern, replacement, message)
    return message.replace("allow-code=True", "allow_code=True")


def _format_resume(command: re.Match[str]) -> str:
    """Return the call that resumes as the command would."""
    arguments = [f'resume="{command["place"]}"']
    for name, value in re.findall(r"--(\w+) (\S+)", command["options"]):
        arguments.append(f'overrides="{value}"' if name == "set" else f"{name}={value}")
    return f"slipstream.{command['verb']}({', '.join(arguments)})"


def speak_python(function: Callable[P, T]) -> Callable[P, T]:
    """Let a function's errors name arguments where the command line would name options."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return function(*args, **kwargs)
        except (UserError, ResumableError, Interrupted) as error:
            error.args = (translate(str(error)), *error.args[1:])
            raise

    return call


OnEvent = Callable[[Event], None]
Logged = dict[str, Any]


class EventListener:
    """Calls the user's function with each event. An exception in it stops training as Ctrl-C does,
    with a checkpoint; between the parts of a run it is raised at once."""

    def __init__(self, function: OnEvent | None) -> None:
        self.function = function
        self.error: Exception | None = None

    def send(self, event: Logged) -> None:
        if self.function is None or self.error is not None:
            return
        try:
            self.function(parse_event(event))
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
            self.error.add_note(f"on_event raised this; {translate(str(stop))}")
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
) -> Iterator[Callable[[Logged], None]]:
    """Yield the function to call with every logged event; it shows it and passes it on."""
    listener = EventListener(on_event)
    with listener.raise_errors():
        if quiet or sys.stderr is None:
            yield listener.send
            return
        with _make_display(kind) as display:
            display.say(f"loading {'' if 'torch' in sys.modules else 'torch and '}the data ...")

            def show(event: Logged) -> None:
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
