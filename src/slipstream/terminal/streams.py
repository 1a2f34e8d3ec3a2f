"""Stdin, stdout and stderr in any condition: closed, a pipe without a reader, or ASCII only."""

from __future__ import annotations

import io
import os
import sys
from contextlib import suppress
from typing import TextIO


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
