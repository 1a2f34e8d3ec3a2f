"""A technique in a process of its own, where it may hang or crash."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from typing import Any

import torch

NO_END = "no end after"
"""How the reason begins where a technique was still at it when the time was up"""


class IsolatedTrial:
    """A technique that is being tried in another process."""

    def __init__(self, name: str, device: torch.device, cache: str) -> None:
        # with caches of earlier compilations at hand, nothing would be compiled
        caches = {"TORCHINDUCTOR_CACHE_DIR": cache, "TRITON_CACHE_DIR": f"{cache}/triton"}
        self._began = time.perf_counter()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "slipstream.doctor", name, str(device)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | caches,
            start_new_session=True,  # its workers end with it
        )

    def wait(self, deadline: float) -> dict[str, Any]:
        """What it says, or why it says nothing."""
        try:
            left = max(deadline - time.perf_counter(), 0.1)
            out, err = self._process.communicate(timeout=left)
        except subprocess.TimeoutExpired:
            seconds = time.perf_counter() - self._began
            why = f"{NO_END} {seconds:.0f} s; it hangs, or other work keeps the machine busy"
            return {"works": False, "why": why, "seconds": seconds}
        with suppress(ValueError, TypeError, IndexError):
            return dict(json.loads(out.splitlines()[-1]))
        seconds, code = time.perf_counter() - self._began, self._process.returncode
        ended = f"ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        last = (err.strip().splitlines() or [""])[-1]
        why = f"{ended}: {last}" if last else ended
        return {"works": False, "why": why, "seconds": seconds}

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None

    def end(self) -> None:
        """Kill it, with all that it has started, if it still runs."""
        if not self.ended:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            self._process.communicate(timeout=5)
