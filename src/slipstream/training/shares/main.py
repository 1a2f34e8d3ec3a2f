"""The process of one worker: `python -m slipstream.training.shares.main`, started by `pool`."""

import sys

from slipstream.training.shares.share import ShareTask, train_share
from slipstream.workers import child


def main() -> int:
    task = ShareTask(**child.read_task())
    return child.run_task(lambda send: train_share(task, send))


if __name__ == "__main__":
    sys.exit(main())
