"""What `processes` starts: `python -m slipstream.tuning.workers.main`, one worker by itself.

The first line on stdin is its task as JSON (not an argument: a URL may hold a password). Its events
go to stdout, a line of JSON each. It stops, with what it has saved, when stdin is closed: then who
started it is gone.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
from contextlib import suppress
from threading import Thread
from types import FrameType

from slipstream.errors import Interrupted, ResumableError, UserError
from slipstream.runs import Event, to_json
from slipstream.tuning.storage.url import mask_secrets
from slipstream.tuning.workers.worker import EXIT_RESUMABLE, EXIT_USER_ERROR, WorkerTask, run_worker


def main() -> int:
    task = WorkerTask(**json.loads(sys.stdin.readline()))
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _stop)
    Thread(target=_end_with_parent, daemon=True).start()
    try:
        run_worker(task, _tell)
    except UserError as error:
        _tell({"event": "refused", "what": str(error)})
        return EXIT_USER_ERROR
    except (ResumableError, OSError) as error:
        with suppress(OSError):  # it goes to the same disk
            sys.stderr.write(f"{error}\n")
        return EXIT_RESUMABLE
    except Interrupted as stop:
        return 128 + stop.signal_number
    except Exception:
        sys.stderr.write(mask_secrets(traceback.format_exc(), task.storage_url))  # stderr is a file
        return 1
    return 0


def _stop(number: int, _: FrameType | None) -> None:
    raise Interrupted("stopped", signal_number=number)


def _end_with_parent() -> None:
    while os.read(sys.stdin.fileno(), 1):  # not sys.stdin.read: it would hold up the exit
        pass
    os.kill(os.getpid(), signal.SIGTERM)


def _tell(event: Event) -> None:
    with suppress(OSError):  # nobody listens any more; stdin will say so
        sys.stdout.write(to_json(event, indent=None) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
