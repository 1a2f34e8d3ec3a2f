"""How a command answers: its result, or what went wrong and with which exit code."""

from __future__ import annotations

import json
import signal
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import typer
from rich.console import Console

from slipstream.errors import Interrupted, Resumable, UserError


@contextmanager
def answering(as_json: bool) -> Iterator[None]:
    """Turn exceptions into a message on stderr, an object on stdout if asked, and an exit code."""
    signal.signal(signal.SIGTERM, _terminated)
    try:
        yield
    except (UserError, Resumable, Interrupted) as error:
        code = 75 if isinstance(error, Resumable) else 2
        if isinstance(error, Interrupted):
            code = 128 + error.signal_number
        _fail(str(error), as_json)
        raise typer.Exit(code) from None
    except KeyboardInterrupt:
        _fail("interrupted", as_json)
        raise typer.Exit(130) from None
    except Exception as error:
        traceback.print_exc()
        _fail(f"a fault of Slipstream's own: {type(error).__name__}: {error}", as_json)
        raise typer.Exit(1) from None


def _terminated(number: int, _: FrameType | None) -> None:
    raise Interrupted("terminated", signal_number=number)


def _fail(message: str, as_json: bool) -> None:
    print(f"slipstream: {message}", file=sys.stderr)
    if as_json:
        print(json.dumps({"error": message}))


def print_result(found: dict[str, Any], as_json: bool, quiet: bool, show: Any) -> None:
    if as_json:
        from slipstream.runs import to_json

        print(to_json(found, indent=None))
    elif not quiet:
        width = None if sys.stdout.isatty() else 120  # a file or a pipe has room
        show(found, Console(highlight=False, soft_wrap=True, width=width))
