"""How a command answers: its result, or what went wrong and with which exit code."""

from __future__ import annotations

import errno
import signal
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import typer

from slipstream import terminal
from slipstream.errors import Interrupted, ResumableError, UserError
from slipstream.text import escape_controls

PIPE_CLOSED = 128 + 13
"""What a shell says of a command that SIGPIPE has ended"""
SHOWN = 100
"""Characters of a name that is too long for a file"""


@contextmanager
def answering(as_json: bool) -> Iterator[None]:
    """Turn exceptions into a message on stderr, an object on stdout if asked, and an exit code."""
    signal.signal(signal.SIGTERM, _terminated)
    try:
        yield
    except (UserError, ResumableError, Interrupted) as error:
        code = 75 if isinstance(error, ResumableError) else 2
        if isinstance(error, Interrupted):
            code = 128 + error.signal_number
        _fail(str(error), as_json)
        raise typer.Exit(code) from None
    except KeyboardInterrupt:
        _fail("interrupted", as_json)
        raise typer.Exit(130) from None
    except Exception as error:
        if wrong := _wrong_name(error):
            _fail(wrong, as_json)
            raise typer.Exit(2) from None
        _tell(traceback.format_exc())
        _fail(f"a fault of Slipstream's own: {type(error).__name__}: {error}", as_json)
        raise typer.Exit(1) from None


def _wrong_name(error: Exception) -> str:
    """What is wrong with the name of a file that no disk or no reader takes; else nothing."""
    if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
        return f"{str(error.filename)[:SHOWN]}...: {error.strerror}"
    if isinstance(error, UnicodeEncodeError) and error.reason == "surrogates not allowed":
        return f"{error.object[:SHOWN]}: is not valid UTF-8; rename the file or its folder"
    return ""


def _terminated(number: int, _: FrameType | None) -> None:
    raise Interrupted("terminated", signal_number=number)


def _fail(message: str, as_json: bool) -> None:
    _tell(f"slipstream: {message}\n")
    if as_json:
        write_out(_as_json({"error": message}))


def _tell(text: str) -> None:
    terminal.SafeStream(sys.stderr).write(escape_controls(text))


def print_result(found: dict[str, Any], as_json: bool, quiet: bool, show: Any) -> None:
    """Write what was found to stdout: as one object, or as people read it."""
    if as_json:
        write_out(_as_json(found))
    elif not quiet:
        console = terminal.create_result_console()
        with console.capture() as shown:
            show(found, console)
        write_out(shown.get())


def _as_json(value: dict[str, Any]) -> str:
    """One line of ASCII, which every encoding has and no terminal obeys."""
    from slipstream.runs import to_json

    return to_json(value, indent=None, ascii_only=True) + "\n"


def write_out(text: str) -> None:
    """Write to stdout. By then the work is done and saved, so a reader that has gone, as `head`
    does, ends the command in silence; a full disk is reported."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except OSError as error:
        terminal.discard_output(sys.stdout)
        if isinstance(error, BrokenPipeError):
            raise SystemExit(PIPE_CLOSED) from None
        _tell(f"slipstream: stdout cannot be written to ({error.strerror})\n")
        raise SystemExit(2) from None
