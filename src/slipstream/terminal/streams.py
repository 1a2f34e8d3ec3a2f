"""Stdout and stderr as they may be found: closed, a pipe that nobody reads, ASCII only."""

from __future__ import annotations

import io
import os
import sys
from contextlib import suppress
from typing import TextIO


def prepare_streams() -> None:
    """Make stdin, stdout and stderr usable whatever the process was started with.

    A closed descriptor becomes /dev/null: else the next file that is opened would take its number,
    and what is printed would end in it. Characters that an encoding lacks become question marks.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number: this one
    if sys.stdout is None:
        sys.stdout = os.fdopen(1, "w", encoding="utf-8", closefd=False)
    if sys.stderr is None:
        sys.stderr = os.fdopen(2, "w", encoding="utf-8", closefd=False)
    if isinstance(sys.stdout, io.TextIOWrapper):  # stderr escapes such characters by itself
        sys.stdout.reconfigure(errors="replace")


def discard_output(stream: TextIO) -> None:
    """Have what is left in a stream, and all that follows, go nowhere."""
    with suppress(OSError, ValueError):  # of a stream without a descriptor, nothing is left
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


class SafeStream:
    """A stream that drops what cannot be written: who trains for hours needs no terminal."""

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
