"""One of the processes that train a model together: `python -m slipstream.training.parallel.main`,
started by `launcher`."""

import sys
import time
from functools import partial
from pathlib import Path

from slipstream.base.errors import Interrupted, ResumableError
from slipstream.base.rank import RankPlace
from slipstream.config import Config
from slipstream.runs import Event
from slipstream.training.parallel.launcher import FINISHED, OPENED, RankTask
from slipstream.training.start import train
from slipstream.workers import child
from slipstream.workers.child import STOPPED, Send

STEPS_S = 0.1
"""The least time between two events of steps, which move a bar"""


def main() -> int:
    task = RankTask(**child.read_task())
    return child.run_task(partial(_train, task))


def _train(task: RankTask, send: Send) -> None:
    config = None if task.config is None else Config.model_validate_json(task.config)
    place = RankPlace(
        *(task.index, task.size, task.index, task.store),
        why=task.why,
        announce=lambda folder: send({"event": OPENED, "run": str(folder)}),
    )
    folder = task.resume if task.may_be_finished else task.new_folder
    try:
        result = train(
            config,
            overrides=tuple(task.overrides),
            watch=_Watcher(send),
            resume=None if task.may_be_finished else task.resume,
            force=task.force,
            folder=None if folder is None else Path(folder),
            allow_code=True,  # the launching process has asked
            place=place,
        )
    except (Interrupted, ResumableError) as error:
        send({"event": STOPPED, **error.to_json()})
        raise
    if place.is_leader:
        send({"event": FINISHED, "run": str(result.run), "is_new": result.is_new})


class _Watcher:
    """Sends the events of the run; of steps, a few each second."""

    def __init__(self, send: Send) -> None:
        self.send, self.sent_at = send, 0.0

    def __call__(self, event: Event) -> None:
        if event["event"] == "step":
            now = time.perf_counter()
            if now < self.sent_at + STEPS_S:
                return
            self.sent_at = now
        self.send(event)


if __name__ == "__main__":
    sys.exit(main())
