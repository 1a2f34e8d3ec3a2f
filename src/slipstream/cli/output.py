"""Prints a command's result, or its error with an exit code."""

from __future__ import annotations

import errno
import importlib
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import typer

from slipstream.base.errors import EXIT_RESUMABLE, Interrupted, ResumableError, UserError
from slipstream.base.phases import PhaseTimer
from slipstream.base.signals import raise_on_stop
from slipstream.base.text import escape_controls
from slipstream.reporting.terminal.progress import SearchDisplay, TrainingDisplay
from slipstream.reporting.terminal.results import print_report, print_training
from slipstream.reporting.terminal.streams import SafeStream, discard_output, show_progress

if TYPE_CHECKING:
    from rich.console import Console

    from slipstream.runs import Event

Printer = Callable[[Any, "Console"], None]
"""Prints a result as text for people"""
PIPE_CLOSED = 128 + 13
"""The exit code that a shell gives a command ended by SIGPIPE"""
MAX_NAME = 100
"""Characters of an overlong file name that a message shows"""


@contextmanager
def handle_errors(as_json: bool, quiet: bool = False) -> Iterator[None]:
    """Turn exceptions into a message on stderr, a JSON object on stdout if requested, and an exit
    code. Meanwhile a terminal shows how far reading files has come."""
    raise_on_stop()
    try:
        with show_progress(quiet or as_json):
            yield
    except (UserError, ResumableError, Interrupted) as error:
        code = EXIT_RESUMABLE if isinstance(error, ResumableError) else 2
        if isinstance(error, Interrupted):
            code = error.exit_code
        _print_error(str(error), as_json)
        raise typer.Exit(code) from None
    except KeyboardInterrupt:
        _print_error("interrupted", as_json)
        raise typer.Exit(130) from None
    except Exception as error:
        if message := _explain_file_name(error):
            _print_error(message, as_json)
            raise typer.Exit(2) from None
        _write_stderr(traceback.format_exc())
        _print_error(f"internal error: {type(error).__name__}: {error}", as_json)
        raise typer.Exit(1) from None


def _explain_file_name(error: Exception) -> str:
    """Say what is wrong with a file name that the system refuses; empty for other errors."""
    if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
        return f"{str(error.filename)[:MAX_NAME]}...: {error.strerror}"
    if isinstance(error, UnicodeEncodeError) and error.reason == "surrogates not allowed":
        return f"{error.object[:MAX_NAME]}: is not valid UTF-8; rename the file or its folder"
    return ""


def _print_error(message: str, as_json: bool) -> None:
    _write_stderr(f"slipstream: {message}\n")
    if as_json:
        write_stdout(to_json_line({"error": message}))


def print_note(message: str) -> None:
    """Write a line for people to stderr."""
    _write_stderr(f"{message}\n")


def _write_stderr(text: str) -> None:
    SafeStream(sys.stderr).write(escape_controls(text))


def print_result(
    result: dict[str, Any] | list[dict[str, Any]],
    as_json: bool,
    quiet: bool,
    print_text: Printer,
) -> None:
    """Write a result to stdout: as one line of JSON, or as text for people."""
    if as_json:
        write_stdout(to_json_line(result))
    elif not quiet:
        from slipstream.reporting.terminal.console import create_result_console

        console = create_result_console()
        with console.capture() as capture:
            print_text(result, console)
        write_stdout(capture.get())


def to_json_line(value: Any) -> str:
    """Format one line of ASCII, which every encoding has and no terminal interprets."""
    from slipstream.runs import to_json

    return to_json(value, indent=None, ascii_only=True) + "\n"


def write_stdout(text: str) -> None:
    """Write to stdout. The work is done and saved by then, so when the reader has gone, as with
    `head`, the command ends silently; a full disk is reported."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except OSError as error:
        discard_output(sys.stdout)
        if isinstance(error, BrokenPipeError):
            raise SystemExit(PIPE_CLOSED) from None
        _write_stderr(f"slipstream: cannot write to stdout ({error.strerror})\n")
        raise SystemExit(2) from None


REPORTING = "slipstream.reporting.page"


def show_event(event: Event, display: TrainingDisplay | SearchDisplay, has_classes: bool) -> None:
    """Show an event; from the first epoch on, prepare the command's end."""
    display.show(event)
    if event["event"] == "epoch" and REPORTING not in sys.modules:
        threading.Thread(target=_prepare_end, args=(has_classes,), daemon=True).start()


def _prepare_end(has_classes: bool) -> None:
    """Import what fits baselines and draws the report, and compile its templates, while the model
    trains."""
    with suppress(Exception):  # who needs it raises it again
        importlib.import_module(REPORTING)
        if has_classes:
            importlib.import_module("scipy.optimize")
        importlib.import_module("slipstream.reporting.template").compile_templates()


class Output(NamedTuple):
    """How a summary is printed."""

    as_json: bool
    quiet: bool
    print_text: Printer = print_training


class DrawnReport(NamedTuple):
    """The report of a run, or the exit code of the signal that came while it was drawn."""

    path: Path | None
    exit_code: int = 0


def finish(summary: dict[str, Any], output: Output, timer: PhaseTimer | None = None) -> None:
    """Print the summary, then draw the report; JSON has the path of the report, and comes last."""
    closed = None
    if not output.as_json:
        try:
            print_result(summary, *output)
        except SystemExit as stop:  # the reader of stdout has gone
            closed = stop
    report = _draw_report(summary, timer)
    path = report.path and str(report.path)
    if output.as_json:
        print_result(summary | {"report": path}, *output)
    elif not closed:
        paths = {"run": summary["run"], "report": path}
        print_result(paths, *output._replace(print_text=print_report))
    if closed:
        raise closed
    if path is None:
        message = "the run is complete, but its report was interrupted; draw it with: slipstream "
        SafeStream(sys.stderr).write(f"slipstream: {message}report {summary['run']}\n")
        raise SystemExit(report.exit_code)


def _draw_report(summary: dict[str, Any], timer: PhaseTimer | None) -> DrawnReport:
    """Draw the report, and count its time. The run is complete by then, so an interrupt only leaves
    the report out."""
    from slipstream import runs

    folder = Path(summary["run"])
    try:
        from slipstream.reporting.page import report

        path = report(folder)
        if timer is not None:
            summary["time"] = timer.extend(summary["time"], "report_s")
            runs.update_metrics(folder, time=summary["time"])
        return DrawnReport(path)
    except KeyboardInterrupt:
        return DrawnReport(None, 128 + signal.SIGINT)
    except Interrupted as stop:
        return DrawnReport(None, stop.exit_code)
