"""Starts the processes that train a model together, and starts them again if one dies."""

import os
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from shutil import copyfile
from typing import Any

from slipstream import runs
from slipstream.base import machine
from slipstream.base.errors import (
    EXIT_RESUMABLE,
    Interrupted,
    ResumableError,
    UserError,
    parse_json_error,
)
from slipstream.config import Config
from slipstream.engine import checkpoint
from slipstream.engine.parallel import LOST
from slipstream.runs import Event, Run
from slipstream.training.parallel.follower import read_finished
from slipstream.training.parallel.meeting import check_gpus
from slipstream.training.result import FinishedRun
from slipstream.workers.child import EXIT_USER_ERROR, REFUSED, STOPPED
from slipstream.workers.processes import STDERR, WorkerProcess, WorkerProcesses

MODULE = "slipstream.training.parallel.main"
OPENED, FINISHED = "opened", "finished"
"""Events of the processes to this one: the run folder exists, is complete, or can be resumed"""
MAX_PER_CORE = 8
"""Processes on a CPU, each of which takes half a gigabyte"""
MAX_STARTS = 3
"""Starts without a newer checkpoint"""
SETTLE_S = 1.0
"""How long processes have to end by themselves after one that died, so that the first is known"""


@dataclass(frozen=True)
class RankTask:
    """What a process is started with."""

    index: int
    """Its rank"""
    size: int
    folder: str
    """For its stderr"""
    store: str
    """The file by which the processes meet"""
    config: str | None
    """As JSON; None for a run that resumes with its own"""
    overrides: list[str]
    resume: str | None
    may_be_finished: bool
    """Whether a finished run to resume is a result and no mistake"""
    force: bool
    new_folder: str | None
    """The run folder to create, where it was named"""
    why: str = ""
    """Why it was started again"""


def check_job(config: Config, data: Any) -> None:
    """Raise a UserError for what several processes do not support."""
    if data is not None or not config.data.paths:
        raise UserError(
            "engine.data_parallel: each process reads the data itself; set data.path instead of "
            "passing a table, or set engine.data_parallel = 1"
        )
    count, most = config.engine.data_parallel, MAX_PER_CORE * machine.count_available_cores()
    if machine.choose_device(config.engine.device).type == "cuda":
        check_gpus(count)
    elif count > most:
        raise UserError(
            f"engine.data_parallel is {count:,}; on {most // MAX_PER_CORE} CPU cores it can be "
            f"{most} at most, and pays up to the number of cores"
        )


def launch(task: RankTask, watch: Callable[[Event], None] | None) -> FinishedRun:
    """Train in `task.size` processes to the end; `task` is the first one's, without its folders.

    After a death all of them are started again from the last checkpoint.
    """
    num_starts, newest = 0, -1
    while True:
        with tempfile.TemporaryDirectory(prefix="slipstream-") as scratch:
            attempt = Attempt(task, Path(scratch), watch or (lambda _: None))
            try:
                folder = attempt.run()
            finally:
                attempt.keep_stderr()
            if attempt.is_finished and folder is not None:
                return read_finished(folder, is_new=attempt.is_new)
            why = attempt.explain_death()
        steps = checkpoint.list_steps(Run(folder)) if folder else []
        if max(steps, default=-1) > newest:
            num_starts, newest = 0, max(steps)
        num_starts += 1
        if num_starts == MAX_STARTS:
            raise ResumableError(
                f"{why}, {MAX_STARTS} times without a new checkpoint",
                fix="resume with: " + runs.suggest_resume(folder) if folder else None,
            )
        task = replace(task, resume=task.resume if folder is None else str(folder), why=why)


class Attempt:
    """One start of all processes."""

    def __init__(self, task: RankTask, scratch: Path, watch: Callable[[Event], None]) -> None:
        self.task, self.scratch, self.watch = task, scratch, watch
        self.folder = None if task.resume is None else Path(task.resume)
        self.is_finished, self.is_new = False, True
        self.errors: dict[int, ResumableError] = {}
        """Why processes stopped, by rank"""
        self.died: WorkerProcess | None = None

    def run(self) -> Path | None:
        """Run the processes until all have ended or one has died; return the folder of the run.

        A mistake of the user's, a signal and a full disk are raised.
        """
        store, env = str(self.scratch / "store"), _choose_interface()
        with WorkerProcesses(MODULE) as processes:
            for rank in range(self.task.size):
                folder = str(self.scratch / str(rank))
                task = replace(self.task, index=rank, folder=folder, store=store)
                processes.start(task, env)
            for worker, event in processes.watch():
                if event is not None:
                    self._take(worker.task.index, event)
                elif worker.exit_code and not processes.stop.requested:
                    self.died = _find_first_death(processes, worker)
                    break
            self._check_end(processes)
        return self.folder

    def _take(self, rank: int, event: Event) -> None:
        match event["event"]:
            case "opened":
                self.folder = Path(event["run"])
            case "finished":
                self.folder, self.is_finished = Path(event["run"]), True
                self.is_new = event["is_new"]
            case name if name == STOPPED:
                self.errors[rank] = parse_json_error(ResumableError, event)
            case name if rank == 0 and name != REFUSED:
                self.watch(event)

    def _check_end(self, processes: WorkerProcesses) -> None:
        """Raise the error of the first process, or of the one that died, where it explains the
        end."""
        if processes.stop.requested and not self.is_finished:
            stopped = self.errors.get(0, ResumableError("stopped"))
            number = processes.stop.signal_number
            raise Interrupted(stopped.reason, signal_number=number, fix=stopped.fix)
        if self.died is None:
            return
        self.died.kill()  # it has ended; what it sent last is read then
        code, error = self.died.exit_code, self.errors.get(self.died.task.index)
        if code == EXIT_USER_ERROR:
            raise self.died.error or UserError("a process was refused")
        if code == EXIT_RESUMABLE and LOST not in str(error or ""):
            raise error or ResumableError("a process had to stop")
        if code == 1:  # an error of ours, which would come again
            raise RuntimeError(self.explain_death())

    def explain_death(self) -> str:
        if self.died is None:
            return "the processes of the training ended without a result"
        number, size = self.died.task.index + 1, self.task.size
        return f"process {number} of {size} {self.died.describe_exit()}"

    def keep_stderr(self) -> None:
        """Copy what the processes wrote to stderr into the run folder, if one of them died."""
        if self.died is None or self.folder is None:
            return
        for rank in range(self.task.size):
            with suppress(OSError):
                path = self.scratch / str(rank) / STDERR
                if path.stat().st_size:
                    (self.folder / "ranks").mkdir(exist_ok=True)
                    copyfile(path, self.folder / "ranks" / f"{rank}-{STDERR}")


def _find_first_death(processes: WorkerProcesses, worker: WorkerProcess) -> WorkerProcess:
    """Return the process that died by itself: the others end because it is gone."""
    deadline = time.monotonic() + SETTLE_S
    while worker.exit_code == EXIT_RESUMABLE and time.monotonic() < deadline:
        for other in processes.workers.values():
            code = other.process.poll()
            if code not in (None, 0, EXIT_RESUMABLE):
                return other
        time.sleep(0.05)
    return worker


def _choose_interface() -> dict[str, str]:
    """Have the processes, which are all on this machine, talk over its loopback device."""
    if "GLOO_SOCKET_IFNAME" in os.environ or sys.platform == "win32":
        return {}
    return {"GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo"}
