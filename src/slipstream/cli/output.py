"""Prints a command's result, or its error with an exit code."""

from __future__ import annotations

import errno
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import typer

from slipstream.base.errors import EXIT_RESUMABLE, Interrupted, ResumableError, UserError
from slipstream.base.signals import raise_on_stop
from slipstream.base.text import escape_controls
from slipstream.reporting.terminal.streams import SafeStream, discard_output, show_progress

if TYPE_CHECKING:
    from rich.console import Console


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
    result: Mapping[str, Any] | list[dict[str, Any]],
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
