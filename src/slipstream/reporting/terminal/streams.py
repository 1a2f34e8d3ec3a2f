"""Stdin, stdout and stderr in any condition: closed, a pipe without a reader, or ASCII only.

And one line of progress, before there is a display of rich's.
"""

from __future__ import annotations

import io
import os
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TextIO

from slipstream.base.phases import listen_to_progress
from slipstream.base.text import escape_to_line

DELAY_S, REFRESH_S = 0.5, 0.1
"""What takes less is not shown, and not more often"""


def prepare_streams() -> None:
    """Make stdin, stdout and stderr usable whatever the process was started with.

    A closed descriptor is opened on /dev/null; otherwise the next opened file would get its number,
    and output would be written into that file. Characters that the encoding lacks become question
    marks.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number: this one
    if sys.stdout is None:
        sys.stdout = os.fdopen(1, "w", encoding="utf-8", closefd=False)
    if sys.stderr is None:
        sys.stderr = os.fdopen(2, "w", encoding="utf-8", closefd=False)
    if isinstance(sys.stdout, io.TextIOWrapper):  # stderr escapes such characters itself
        sys.stdout.reconfigure(errors="replace")


def discard_output(stream: TextIO) -> None:
    """Redirect a stream, with its buffered output, to /dev/null."""
    with suppress(OSError, ValueError):  # a stream without a descriptor has nothing to redirect
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)


class SafeStream:
    """A stream that drops output it cannot write: hours of training must not fail for it."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.encoding = stream.encoding

    def isatty(self) -> bool:
        return self._stream.isatty()

    def fileno(self) -> int:
        return self._stream.fileno()

    def write(self, text: str) -> int:
        with suppress(OSError):
            return self._stream.write(text)
        discard_output(self._stream)
        return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError:
            discard_output(self._stream)


class ProgressLine:
    """The last line of a terminal, which is rewritten until what it shows has ended."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = SafeStream(stream)
        self._begin: float | None = None
        self._last = 0.0
        self._width = 0
        """Of the text that stands there"""

    def show(self, text: str, share: float | None) -> None:
        """Show what is being done, and how much of it is done; an empty text ends it."""
        now = time.monotonic()
        if not text:
            self.clear()
            return
        self._begin = now if self._begin is None else self._begin
        if now - self._begin < DELAY_S or now - self._last < REFRESH_S:
            return
        self._last = now
        line = escape_to_line(text if share is None else f"{text}: {min(share, 1.0):.0%}")
        line = line[: shutil.get_terminal_size().columns - 1]
        self._stream.write(f"\r{line.ljust(self._width)}")
        self._stream.flush()
        self._width = len(line)

    def clear(self) -> None:
        """Remove the line."""
        if self._width:
            self._stream.write(f"\r{' ' * self._width}\r")
            self._stream.flush()
        self._begin, self._width = None, 0


@contextmanager
def show_progress(quiet: bool) -> Iterator[None]:
    """Show on stderr, if it is a terminal, what takes its time inside the block."""
    if quiet or not sys.stderr.isatty():
        yield
        return
    line = ProgressLine(sys.stderr)
    try:
        with listen_to_progress(line.show):
            yield
    finally:
        line.clear()
