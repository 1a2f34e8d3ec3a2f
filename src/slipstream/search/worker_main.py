"""The process of one worker: `python -m slipstream.search.worker_main`, started by `processes`."""

import sys

from slipstream.base.text import mask_secrets
from slipstream.search.workers import WorkerTask, run_worker
from slipstream.workers import child


def main() -> int:
    task = WorkerTask(**child.read_task())
    return child.run_task(
        lambda send: run_worker(task, send),
        mask=lambda text: mask_secrets(text, task.storage_url),
    )


if __name__ == "__main__":
    sys.exit(main())
