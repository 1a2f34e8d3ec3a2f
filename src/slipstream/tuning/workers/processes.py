"""Several workers on one study: a process each, started, listened to and stopped from here."""

from __future__ import annotations

import json
import os
import queue
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from threading import Thread
from typing import Any, Literal, NamedTuple

import torch

from slipstream import config as configs
from slipstream import machine, runs
from slipstream.config import Config
from slipstream.engine.loop import StopRequest, catch_signals
from slipstream.errors import Interrupted, ResumableError, UserError
from slipstream.runs import Event, Run
from slipstream.tuning import sharing
from slipstream.tuning.study import TimedStudy, find_best
from slipstream.tuning.workers import worker as work
from slipstream.tuning.workers.worker import EXIT_USER_ERROR, WorkerTask

LOGGED = ("trial", "pack", "recovery", "fallback")
"""Workers' events that the search's own log has, too"""
HELD_BACK = ("searched", "begun", "refused")
TROUBLES = "stderr.txt"
LIVES = 2
"""Starts of one worker, before its trials are left to the others"""


def count_workers(asked: int | Literal["auto"], settings: Config) -> int:
    """How many workers: one for each GPU, or as many as are asked for."""
    if asked != "auto":
        return asked
    device = machine.choose_device(settings.engine.device)
    named = settings.engine.device.startswith("cuda:")
    return 1 if device.type == "cpu" or named else max(torch.cuda.device_count(), 1)


def check_config(settings: Config, data: Any) -> None:
    """A UserError names what does not go with several workers."""
    if data is not None or not settings.data.paths:
        raise UserError(
            "several workers read the data themselves; give data.path instead of a table, or take "
            "one worker"
        )
    if settings.engine.device.startswith("cuda:"):
        raise UserError(
            f'engine.device = "{settings.engine.device}" names one GPU; several workers need '
            '"cuda", or one worker'
        )


def assign_gpus(settings: Config, count: int) -> list[dict[str, str]]:
    """For each worker, the environment that shows it its own GPU."""
    if machine.choose_device(settings.engine.device).type == "cpu":
        return [{}] * count
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = given.split(",") if given else [str(i) for i in range(torch.cuda.device_count())]
    return [{"CUDA_VISIBLE_DEVICES": names[i % len(names)]} for i in range(count)]


def split_cores(settings: Config, count: int) -> Config:
    """On a CPU, every worker gets its part of the cores."""
    cpu = machine.choose_device(settings.engine.device).type == "cpu"
    if not cpu or settings.engine.threads != "auto":
        return settings
    threads = max(machine.count_available_cores() // count, 1)
    return configs.replace_settings(settings, {"engine.threads": threads})


class WorkerEvent(NamedTuple):
    """One line of a worker's; none when it has ended."""

    worker: int
    event: Event | None


class WorkerProcess:
    """One process, and those that take its place."""

    def __init__(
        self, task: WorkerTask, place: Mapping[str, str], said: queue.Queue[WorkerEvent]
    ) -> None:
        self.task, self.env, self.events = task, place, said
        self.num_starts = 0
        self.refusal = ""
        self.start()

    def start(self) -> None:
        self.num_starts += 1
        folder = Path(self.task.folder)
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / TROUBLES).open("ab") as troubles:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "slipstream.tuning.workers.main"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=troubles,
                text=True,
                env=os.environ | self.env,
                start_new_session=True,  # Ctrl-C is passed on, once
            )
        with suppress(BrokenPipeError):
            assert self.process.stdin is not None
            self.process.stdin.write(json.dumps(asdict(self.task)) + "\n")
            self.process.stdin.flush()
        self._listener = Thread(target=self._listen, args=(self.process,), daemon=True)
        self._listener.start()

    def _listen(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        with process.stdout as lines:
            for line in lines:
                with suppress(json.JSONDecodeError):  # cut off by a kill
                    self.events.put(WorkerEvent(self.task.index, json.loads(line)))
        process.wait()
        with suppress(OSError):
            assert process.stdin is not None
            process.stdin.close()
        self.events.put(WorkerEvent(self.task.index, None))

    def send_signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def kill(self) -> None:
        """At once, whatever it does."""
        if self.process.poll() is None:
            self.send_signal(signal.SIGKILL)
        self._listener.join()

    def describe_exit(self) -> str:
        code = self.process.returncode
        ended = f"ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        text = (Path(self.task.folder) / TROUBLES).read_text(encoding="utf-8", errors="replace")
        last = (text.strip().splitlines() or [""])[-1]
        return f"{ended}: {last}" if last else ended


def run_workers(
    run: Run, tasks: Sequence[WorkerTask], places: Sequence[Mapping[str, str]]
) -> dict[str, Any]:
    """Let the workers search until none has anything left to do; what they say together."""
    said: queue.Queue[WorkerEvent] = queue.Queue()
    ended: dict[int, Event] = {}
    with _started(tasks, places, said) as workers, catch_signals() as stop:
        for worker in workers:
            _tell(run, worker, "started", pid=worker.process.pid)
        alive, passed_on = {worker.task.index: worker for worker in workers}, False
        while alive:
            if stop.requested and not passed_on:
                passed_on = True
                for worker in alive.values():
                    worker.send_signal(signal.SIGTERM)
            with suppress(queue.Empty):
                index, event = said.get(timeout=0.2)
                if event is not None:
                    forward_event(run, index, event, ended)
                    if event["event"] == "refused":
                        workers[index].refusal = event["what"]
                elif not _goes_on(run, workers[index], stop):
                    del alive[index]
        _judge(run, workers, stop)
    return work.merge_results(ended)


@contextmanager
def _started(
    tasks: Sequence[WorkerTask], places: Sequence[Mapping[str, str]], said: queue.Queue[WorkerEvent]
) -> Iterator[list[WorkerProcess]]:
    """The workers; whatever happens here, none of them is left behind."""
    workers: list[WorkerProcess] = []
    try:
        for task, place in zip(tasks, places, strict=True):
            workers.append(WorkerProcess(task, place, said))
        yield workers
    finally:
        for worker in workers:
            worker.kill()


def forward_event(run: Run, index: int, event: Event, ended: dict[int, Event]) -> None:
    """Show a worker's event as the search's own, with the worker's number."""
    if event["event"] == "searched":
        ended[index] = event
    if event["event"] in HELD_BACK:
        return
    if event["event"] in LOGGED:
        values = {key: value for key, value in event.items() if key not in ("event", "at_s")}
        run.append(event["event"], **values, worker=index)
    else:
        run.notify(event | {"worker": index})


def _goes_on(run: Run, worker: WorkerProcess, stop: StopRequest) -> bool:
    """Whether a worker that has ended is started again."""
    code = worker.process.returncode
    if code in (0, EXIT_USER_ERROR) or stop.requested:
        return False
    why = worker.describe_exit()
    if worker.num_starts == LIVES:
        _tell(run, worker, "died", why=why, remedy="its trials are left to the others")
        return False
    worker.start()
    _tell(run, worker, "died", why=why, remedy="started again", pid=worker.process.pid)
    return True


def _tell(run: Run, worker: WorkerProcess, what: str, **values: Any) -> None:
    run.append("worker", worker=worker.task.index, what=what, **values)


def _judge(run: Run, workers: Sequence[WorkerProcess], stop: StopRequest) -> None:
    """Raise what the workers' ends amount to; nothing where one of them found the study done."""
    if stop.requested:
        raise Interrupted("stopped", signal_number=stop.signal_number)
    for worker in workers:
        if (
            worker.process.returncode == EXIT_USER_ERROR
        ):  # what it took the first time is no mistake
            raise (
                UserError(worker.refusal)
                if worker.num_starts == 1
                else ResumableError(worker.refusal)
            )
    if all(worker.process.returncode != 0 for worker in workers):
        raise ResumableError(
            f"every worker died ({workers[0].describe_exit()}; see "
            f"{run.folder}/workers/*/{TROUBLES})"
        )


def copy_best_model(run: Run, board: TimedStudy) -> None:
    """Copy the best trial's model from the folder of the worker that trained it, if it is here."""
    best = find_best(board.get_trials())
    owner = None if best is None else sharing.get_owner(best)
    for folder in sorted((run.folder / "workers").glob("*")):
        if sharing.read_worker_id(Run(folder)) == owner and (folder / "best").exists():
            with runs.replace_atomically(run.folder / "best") as temporary:
                shutil.copytree(folder / "best", temporary)
