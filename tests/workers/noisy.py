"""A worker whose code prints, as a network of the user's may: `python -m tests.workers.noisy`."""

from __future__ import annotations

import subprocess
import sys

from slipstream.workers import child
from slipstream.workers.child import Send

PRINTED = '5\n{"loss": 1}\nno line break'


def main() -> int:
    child.read_task()
    return child.run_task(work)


def work(send: Send) -> None:
    send({"event": "start"})
    sys.stdout.write(PRINTED)
    sys.stdout.flush()
    subprocess.run([sys.executable, "-c", "print('from a program')"], check=True)
    send({"event": "end", "what": "é"})


if __name__ == "__main__":
    sys.exit(main())
