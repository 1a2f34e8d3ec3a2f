"""The process of one worker: `python -m slipstream.training.shares.main`, started by `pool`."""

import sys

from slipstream.base.errors import Option
from slipstream.engine.recovery import explain_out_of_memory
from slipstream.training.shares.share import ShareTask, train_share
from slipstream.workers import child
from slipstream.workers.child import Send

FEWER = "; fewer processes at a time (" + Option("workers") + ") need less as well"


def main() -> int:
    task = ShareTask(**child.read_task())
    return child.run_task(lambda send: _train(task, send))


def _train(task: ShareTask, send: Send) -> None:
    with explain_out_of_memory(FEWER):
        train_share(task, send)


if __name__ == "__main__":
    sys.exit(main())
