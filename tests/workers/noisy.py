"""A task whose code prints, as a network of the user's may."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass

from slipstream.events import Other
from slipstream.workers.child import Send, WorkerTask

PRINTED = '5\n{"loss": 1}\nno line break'


@dataclass(frozen=True)
class NoisyTask(WorkerTask):
    def run(self, send: Send) -> None:
        send(Other(name="begin", values={}))
        sys.stdout.write(PRINTED)
        sys.stdout.flush()
        subprocess.run([sys.executable, "-c", "print('from a program')"], check=True)
        send(Other(name="finish", values={"what": "é"}))
