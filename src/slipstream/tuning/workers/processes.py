"""Runs several workers on this machine, one process each: starts, restarts and stops them."""

import json
import os
import queue
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict
from pathlib import Path
from threading import Thread
from typing import Any, Literal

import torch

from slipstream import config as configs
from slipstream import machine
from slipstream.config import Config
from slipstream.engine.loop import StopRequest, catch_signals
from slipstream.errors import Interrupted, ResumableError, UserError
from slipstream.runs import Event, Run
from slipstream.tuning.workers.worker import EXIT_USER_ERROR, GIVEN_UP, WorkerResults, WorkerTask

STDERR = "stderr.txt"
MAX_STARTS = 2
"""Starts of one worker before its trials are left to the others"""


def count_workers(requested: int | Literal["auto"], config: Config) -> int:
    """Return the requested number; "auto" is one worker per GPU."""
    if requested != "auto":
        return requested
    device = machine.choose_device(config.engine.device)
    names_gpu = config.engine.device.startswith("cuda:")
    return 1 if device.type == "cpu" or names_gpu else max(torch.cuda.device_count(), 1)


def check_config(config: Config, data: Any) -> None:
    """Raise a UserError for what several workers do not support."""
    if data is not None or not config.data.paths:
        raise UserError(
            "several workers read the data themselves; set data.path instead of passing a table, "
            "or use one worker"
        )
    if config.engine.device.startswith("cuda:"):
        raise UserError(
            f'engine.device = "{config.engine.device}" names one GPU; for several workers set '
            '"cuda", or use one worker'
        )


def assign_gpus(config: Config, num_workers: int) -> list[dict[str, str]]:
    """Return the environment of each worker, which shows it one GPU."""
    if machine.choose_device(config.engine.device).type == "cpu":
        return [{}] * num_workers
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",") if visible else [str(i) for i in range(torch.cuda.device_count())]
    return [{"CUDA_VISIBLE_DEVICES": names[i % len(names)]} for i in range(num_workers)]


def split_cores(config: Config, num_workers: int) -> Config:
    """On a CPU, divide the cores among the workers."""
    on_cpu = machine.choose_device(config.engine.device).type == "cpu"
    if not on_cpu or config.engine.threads != "auto":
        return config
    threads = max(machine.count_available_cores() // num_workers, 1)
    return configs.replace_settings(config, {"engine.threads": threads})


WorkerEvent = tuple[int, Event | None]
"""The number of a worker and its event; None when its process has ended"""


class WorkerProcess:
    """The process of one worker, which may be restarted."""

    def __init__(
        self, task: WorkerTask, env: Mapping[str, str], events: queue.Queue[WorkerEvent]
    ) -> None:
        self.task, self.env, self.events = task, env, events
        self.num_starts = 0
        self.error = ""
        """The message of a UserError in the worker"""
        self.start()

    def start(self) -> None:
        self.num_starts += 1
        folder = Path(self.task.folder)
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / STDERR).open("ab") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "slipstream.tuning.workers.main"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                env=os.environ | self.env,
                start_new_session=True,  # Ctrl-C reaches it only through `run_workers`
            )
        with suppress(BrokenPipeError):
            assert self.process.stdin is not None
            self.process.stdin.write(json.dumps(asdict(self.task)) + "\n")
            self.process.stdin.flush()
        self._reader = Thread(target=self._read_events, args=(self.process,), daemon=True)
        self._reader.start()

    def _read_events(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        with process.stdout as lines:
            for line in lines:
                with suppress(json.JSONDecodeError):  # a kill may truncate a line
                    self.events.put((self.task.index, json.loads(line)))
        process.wait()
        with suppress(OSError):
            assert process.stdin is not None
            process.stdin.close()
        self.events.put((self.task.index, None))

    def send_signal(self, number: int) -> None:
        if os.name == "nt" and number == signal.SIGTERM:
            # Windows would kill it; it saves its state and stops when stdin is closed
            with suppress(OSError):
                assert self.process.stdin is not None
                self.process.stdin.close()
            return
        machine.signal_process_group(self.process.pid, number)

    def kill(self) -> None:
        if self.process.poll() is None:
            machine.kill_process_group(self.process.pid)
        self._reader.join()

    def describe_exit(self) -> str:
        text = (Path(self.task.folder) / STDERR).read_text(encoding="utf-8", errors="replace")
        return machine.describe_exit(self.process.returncode, text)


def run_workers(
    run: Run, tasks: Sequence[WorkerTask], envs: Sequence[Mapping[str, str]]
) -> dict[str, Any]:
    """Run the workers until no trial is left; return their merged results."""
    events: queue.Queue[WorkerEvent] = queue.Queue()
    results = WorkerResults(run)
    workers: list[WorkerProcess] = []
    with ExitStack() as stack:
        for task, env in zip(tasks, envs, strict=True):
            workers.append(WorkerProcess(task, env, events))
            stack.callback(workers[-1].kill)  # if it still runs at the end, whatever happens
        stop = stack.enter_context(catch_signals())
        for worker in workers:
            results.log(worker.task.index, "started", pid=worker.process.pid)
        alive = {worker.task.index: worker for worker in workers}
        was_forwarded = False
        while alive:
            if stop.requested and not was_forwarded:
                was_forwarded = True
                for worker in alive.values():
                    worker.send_signal(signal.SIGTERM)
            with suppress(queue.Empty):
                index, event = events.get(timeout=0.2)
                if event is not None:
                    results.add(index, event)
                    if event["event"] == "refused":
                        workers[index].error = event["what"]
                elif not _restart(results, workers[index], stop):
                    del alive[index]
        _check_exits(run, workers, stop)
    return results.merge()


def _restart(results: WorkerResults, worker: WorkerProcess, stop: StopRequest) -> bool:
    """Restart a worker that has died, once; return whether it was restarted."""
    code = worker.process.returncode
    if code in (0, EXIT_USER_ERROR) or stop.requested:
        return False
    index, reason = worker.task.index, worker.describe_exit()
    if worker.num_starts == MAX_STARTS:
        results.log(index, "died", why=reason, remedy=GIVEN_UP)
        return False
    worker.start()
    results.log(index, "died", why=reason, remedy="started again", pid=worker.process.pid)
    return True


def _check_exits(run: Run, workers: Sequence[WorkerProcess], stop: StopRequest) -> None:
    """Raise an error unless at least one worker found the study complete."""
    if stop.requested:
        raise Interrupted("stopped", signal_number=stop.signal_number)
    for worker in workers:
        if worker.process.returncode == EXIT_USER_ERROR:
            # the first start accepted the same config, so a later refusal is not a user error
            error_type = UserError if worker.num_starts == 1 else ResumableError
            raise error_type(worker.error)
    if all(worker.process.returncode != 0 for worker in workers):
        raise ResumableError(
            f"every worker died ({workers[0].describe_exit()}; see {run.folder}/workers/*/{STDERR})"
        )
