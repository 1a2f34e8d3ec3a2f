"""The process of one worker: `python -m slipstream.tuning.workers.main`, started by `processes`.

It reads its task as JSON from the first line of stdin (not from an argument, since the URL may
contain a password) and writes its events to stdout, one JSON object per line. It saves and stops
when stdin is closed, because the launching process is gone then.
"""

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
from slipstream.tuning.storage.database import mask_secrets
from slipstream.tuning.workers.worker import EXIT_RESUMABLE, EXIT_USER_ERROR, WorkerTask, run_worker


def main() -> int:
    task = WorkerTask(**json.loads(sys.stdin.readline()))
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _interrupt)
    Thread(target=_stop_with_parent, daemon=True).start()
    try:
        run_worker(task, _send)
    except UserError as error:
        _send({"event": "refused", "what": str(error)})
        return EXIT_USER_ERROR
    except (ResumableError, OSError) as error:
        with suppress(OSError):  # stderr may be on the full disk
            sys.stderr.write(f"{error}\n")
        return EXIT_RESUMABLE
    except Interrupted as stop:
        return 128 + stop.signal_number
    except Exception:
        # stderr is a file, which must not contain the password
        sys.stderr.write(mask_secrets(traceback.format_exc(), task.storage_url))
        return 1
    return 0


def _interrupt(number: int, _: FrameType | None) -> None:
    raise Interrupted("stopped", signal_number=number)


def _stop_with_parent() -> None:
    while os.read(sys.stdin.fileno(), 1):  # sys.stdin.read would block the exit
        pass
    if os.name == "nt":  # os.kill would end the process there before it saves its state
        signal.raise_signal(signal.SIGTERM)
    else:
        os.kill(os.getpid(), signal.SIGTERM)  # also interrupts a system call of the main thread


def _send(event: Event) -> None:
    with suppress(OSError):  # the reader is gone; stdin will close too
        sys.stdout.write(to_json(event, indent=None) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
