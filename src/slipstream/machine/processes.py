"""Processes that we start: signals to them with all their children, and how they ended."""

import os
import signal
from contextlib import suppress

import psutil


def signal_process_group(pid: int, number: int) -> None:
    """Send a signal to a process that was started in a session of its own, and to its children.

    Windows has neither process groups nor signals: there every signal kills.
    """
    if hasattr(os, "killpg"):
        with suppress(ProcessLookupError):
            os.killpg(pid, number)
        return
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        for one in (*process.children(recursive=True), process):
            with suppress(psutil.NoSuchProcess):
                one.kill()


def kill_process_group(pid: int) -> None:
    """Kill a process that was started in a session of its own, and its children."""
    signal_process_group(pid, getattr(signal, "SIGKILL", signal.SIGTERM))  # Windows has no SIGKILL


def describe_exit(code: int, stderr: str) -> str:
    """Say how a process ended, with the last line that it wrote to stderr."""
    ended = f"ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
    last = (stderr.strip().splitlines() or [""])[-1]
    return f"{ended}: {last}" if last else ended
