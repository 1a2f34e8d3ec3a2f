"""Runs shares in processes on this machine, one on each GPU at a time.

A worker that dies is started again and goes on from its checkpoint. One that dies again and again
without getting any further is given up; another takes its share over when it is free.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

from slipstream import runs
from slipstream.base.errors import EXIT_RESUMABLE, Interrupted, Message, ResumableError, UserError
from slipstream.runs import Run
from slipstream.training.shares.relay import EventRelay
from slipstream.training.shares.share import ShareTask, suggest
from slipstream.workers.child import EXIT_USER_ERROR
from slipstream.workers.processes import WorkerProcess, WorkerProcesses

MODULE = "slipstream.training.shares.main"
MAX_DEATHS = 3
"""Of a worker, one after another without a new checkpoint, before it is given up"""


class SharePool:
    """Shares that wait, and the slots (GPUs, or parts of a CPU) that train them."""

    def __init__(
        self,
        run: Run,
        processes: WorkerProcesses,
        tasks: Sequence[ShareTask],
        envs: Sequence[Mapping[str, str]],
    ) -> None:
        self.run, self.processes, self.envs = run, processes, envs
        self.waiting = deque(tasks)
        self.free = list(range(len(envs)))
        self.slots: dict[int, int] = {}
        """By share: the slot where it trains"""
        self.deaths = [0] * len(envs)
        """By slot, since the last checkpoint"""
        self.owners: dict[int, int] = {}
        """By share: the first slot that trained it"""
        self.error: Exception | None = None
        """Why all have to stop"""
        self.reason = ""
        """How a worker died last"""

    def fill(self) -> None:
        """Start a worker for each share that waits and finds a free slot."""
        while self.waiting and self.free and not self.is_stopping:
            task, slot = self.waiting.popleft(), self.free.pop(0)
            self.slots[task.index] = slot
            worker = self.processes.start(task, self.envs[slot])
            owner = self.owners.setdefault(task.index, slot)
            what = "started" if owner == slot else "took over"
            self._log(slot, what, pid=worker.process.pid, lanes=task.lanes, of=owner)

    @property
    def is_stopping(self) -> bool:
        return self.error is not None or self.processes.stop.requested

    def record_progress(self, share: int) -> None:
        """Note that a share has a new checkpoint."""
        self.deaths[self.slots[share]] = 0

    def end(self, worker: WorkerProcess, task: ShareTask) -> None:
        """Have the slot of a process that has ended take the next share, or this one again."""
        slot, code = self.slots.pop(task.index), worker.exit_code
        if code == 0:
            self.free.append(slot)
        elif code == EXIT_USER_ERROR:
            self._stop(worker.error or UserError("a worker was refused"))
        elif code == EXIT_RESUMABLE:
            self._stop(
                suggest(worker.error or ResumableError("a worker had to stop"), self._advice)
            )
        elif not self.is_stopping:
            self._recover(slot, worker, task)
        self.fill()

    def _recover(self, slot: int, worker: WorkerProcess, task: ShareTask) -> None:
        self.reason = worker.describe_exit()
        self.deaths[slot] += 1
        if self.deaths[slot] < MAX_DEATHS:
            self._log(slot, "died", why=self.reason, remedy="started again")
            self.waiting.appendleft(task)
            self.free.insert(0, slot)
            return
        self._log(slot, "died", why=self.reason, remedy="its models are left to the others")
        self.waiting.append(task)
        if not (self.free or self.slots):
            self._stop(ResumableError(f"every worker died ({self.reason})", fix=self._advice))

    def _stop(self, error: Exception) -> None:
        """Have all workers save and stop; the first error counts."""
        if not self.is_stopping:
            self.error = error
            self.processes.terminate()

    @property
    def _advice(self) -> Message:
        return "resume with: " + runs.suggest_resume(self.run.folder)

    def _log(self, slot: int, what: str, **values: object) -> None:
        self.run.append("worker", worker=slot, what=what, **values)


def run_shares(
    run: Run,
    tasks: Sequence[ShareTask],
    envs: Sequence[Mapping[str, str]],
    relay: EventRelay,
) -> None:
    """Train the shares to their end; raise what ended them early."""
    by_index = {task.index: task for task in tasks}
    with WorkerProcesses(MODULE) as processes:
        pool = SharePool(run, processes, tasks, envs)
        pool.fill()
        for worker, event in processes.watch():
            task = by_index[worker.task.index]
            if event is None:
                pool.end(worker, task)
                continue
            relay.add(task.index, event)
            if event["event"] == "checkpoint":
                pool.record_progress(task.index)
        if processes.stop.requested:
            raise Interrupted("stopped", signal_number=processes.stop.signal_number)
        if pool.error is not None:
            raise pool.error
