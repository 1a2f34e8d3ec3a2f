"""Runs a technique in a process of its own, where it may hang or crash."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from contextlib import suppress
from typing import Any

import torch

from slipstream import machine

TIMED_OUT = "no end after"
"""How the reason begins where a technique was still running when the time was up"""


class IsolatedTrial:
    """A technique that is tried in another process."""

    def __init__(self, name: str, device: torch.device, cache: str) -> None:
        # an empty cache, so that the technique really compiles
        caches = {"TORCHINDUCTOR_CACHE_DIR": cache, "TRITON_CACHE_DIR": f"{cache}/triton"}
        self._start = time.perf_counter()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "slipstream.doctor", name, str(device)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | caches,
            start_new_session=True,  # so that `end` reaches its workers; Windows ignores it
        )

    def wait(self, deadline: float) -> dict[str, Any]:
        """Return the result of the technique, or the reason why there is none."""
        try:
            left = max(deadline - time.perf_counter(), 0.1)
            out, err = self._process.communicate(timeout=left)
        except subprocess.TimeoutExpired:
            seconds = time.perf_counter() - self._start
            why = f"{TIMED_OUT} {seconds:.0f} s; it hangs, or other work keeps the machine busy"
            return {"works": False, "why": why, "seconds": seconds}
        with suppress(ValueError, TypeError, IndexError):
            return dict(json.loads(out.splitlines()[-1]))
        why = machine.describe_exit(self._process.returncode, err)
        return {"works": False, "why": why, "seconds": time.perf_counter() - self._start}

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None

    def end(self) -> None:
        """Kill the process and all that it has started, if it still runs."""
        if not self.ended:
            machine.kill_process_group(self._process.pid)
        with suppress(subprocess.TimeoutExpired):
            self._process.communicate(timeout=5)
