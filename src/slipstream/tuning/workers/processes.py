"""Runs several workers of a search on this machine, one process each."""

from collections.abc import Mapping, Sequence
from typing import Any

from slipstream.errors import Interrupted, ResumableError, UserError
from slipstream.runs import Run
from slipstream.tuning.workers.worker import GIVEN_UP, WorkerResults, WorkerTask
from slipstream.workers.child import EXIT_USER_ERROR
from slipstream.workers.processes import STDERR, WorkerProcess, WorkerProcesses

MODULE = "slipstream.tuning.workers.main"
MAX_STARTS = 2
"""Starts of one worker before its trials are left to the others"""


def run_workers(
    run: Run, tasks: Sequence[WorkerTask], envs: Sequence[Mapping[str, str]]
) -> dict[str, Any]:
    """Run the workers until no trial is left; return their merged results."""
    results = WorkerResults(run)
    with WorkerProcesses(MODULE) as processes:
        for task, env in zip(tasks, envs, strict=True):
            worker = processes.start(task, env)
            results.log(task.index, "started", pid=worker.process.pid)
        for worker, event in processes.watch():
            if event is not None:
                results.add(worker.task.index, event)
            elif not processes.stop.requested:
                _restart(results, processes, worker)
        _check_exits(run, processes)
    return results.merge()


def _restart(results: WorkerResults, processes: WorkerProcesses, worker: WorkerProcess) -> None:
    """Restart a worker that has died, once."""
    if worker.exit_code in (0, EXIT_USER_ERROR):
        return
    index, reason = worker.task.index, worker.describe_exit()
    if worker.num_starts == MAX_STARTS:
        results.log(index, "died", why=reason, remedy=GIVEN_UP)
        return
    processes.restart(worker)
    results.log(index, "died", why=reason, remedy="started again", pid=worker.process.pid)


def _check_exits(run: Run, processes: WorkerProcesses) -> None:
    """Raise an error unless at least one worker found the study complete."""
    stop, workers = processes.stop, list(processes.workers.values())
    if stop.requested:
        raise Interrupted("stopped", signal_number=stop.signal_number)
    for worker in workers:
        if worker.exit_code == EXIT_USER_ERROR:
            # the first start accepted the same config, so a later refusal is not a user error
            error_type = UserError if worker.num_starts == 1 else ResumableError
            raise error_type(worker.error)
    if all(worker.exit_code != 0 for worker in workers):
        raise ResumableError(
            f"every worker died ({workers[0].describe_exit()}; see {run.folder}/workers/*/{STDERR})"
        )
