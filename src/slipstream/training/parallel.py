"""Several processes that train one model together, each on its share of every batch.

From top to bottom: what such a training supports, how its processes join (`join_ranks`), what all
but the first do (`follow`), how they are started, and started again if one dies (`launch`).
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from shutil import copyfile
from typing import Any

import torch
from torch import nn

from slipstream import runs
from slipstream.base import machine
from slipstream.base.errors import (
    EXIT_RESUMABLE,
    Interrupted,
    ResumableError,
    UserError,
    parse_json_error,
)
from slipstream.base.rank import NO_ID, RankPlace
from slipstream.base.text import format_count
from slipstream.config import Config
from slipstream.data.dataset import Dataset
from slipstream.engine import checkpoint as checkpoints
from slipstream.engine import loop
from slipstream.engine import parallel as groups
from slipstream.engine.context import RunContext, build_model, seed_generators
from slipstream.engine.events import LaneEvents
from slipstream.engine.parallel import LOST, Ranks, SilentRun
from slipstream.engine.plan import Plan
from slipstream.events import Event, Other, Recovery, Step
from slipstream.models.forecaster import build
from slipstream.runs import Run
from slipstream.training.fitting import load_dataset
from slipstream.training.request import FinishedRun, TrainRequest
from slipstream.workers.child import STOPPED, Send, WorkerTask
from slipstream.workers.launcher import STDERR, LocalWorkers, Outcome, Started, WorkerProcess

MARKER = "torchrun.json"
"""In a run folder: the run id of the torchrun that trains it"""
OPENED, FINISHED = "opened", "finished"
"""Events of the processes for the launching one: the run folder exists; the run is complete"""
MAX_PER_CORE = 8
"""Processes on a CPU, each of which takes half a gigabyte"""
MAX_STARTS = 3
"""Starts without a newer checkpoint"""
FIRST_DEATH_S = 1.0
"""How long processes have to end by themselves after one that died, so that the first is known"""
STEPS_S = 0.1
"""The least time between two events of steps, which move a bar"""


def find_device(config: Config, place: RankPlace) -> torch.device:
    """Return the process's own GPU, or the CPU."""
    device = machine.choose_device(config.engine.device)
    if device.type == "cpu":
        return device
    check_gpus(place.local_rank + 1)
    return torch.device("cuda", place.local_rank)


def check_gpus(needed: int) -> None:
    """Raise a UserError unless each of so many processes has a GPU of its own."""
    count = torch.cuda.device_count()
    if needed > count:
        raise UserError(
            f"{format_count(needed, 'process')} of one training need as many GPUs, and torch sees "
            f"{count}; lower engine.data_parallel (or torchrun's processes) to {count}, or set "
            'engine.device = "cpu"'
        )


def check_size(wanted: int, place: RankPlace) -> None:
    """Raise a UserError where `engine.data_parallel` and torchrun disagree."""
    if wanted not in (1, place.size):
        raise UserError(
            f"engine.data_parallel is {wanted}, and torchrun has started "
            f"{format_count(place.size, 'process')}; remove the setting, or start {wanted}"
        )


def check_model(model: nn.Module) -> None:
    """Raise a UserError for layers whose result depends on the other windows of the batch."""
    for name, layer in model.named_modules():
        if isinstance(layer, nn.modules.batchnorm._BatchNorm):
            raise UserError(
                f"engine.data_parallel does not work with {type(layer).__name__} ({name}): each "
                "process would normalise its own share of the batch; use LayerNorm or GroupNorm, "
                "or one process"
            )


def check_dataset(config: Config, dataset: Dataset) -> None:
    """Raise a UserError for data or a model that several processes cannot train with."""
    if dataset.stream is not None:
        raise UserError(
            "engine.data_parallel does not work with series that are streamed from disk; give each "
            "machine more memory, cut the data, or set engine.data_parallel = 1"
        )
    if config.model.spec.is_custom:
        with torch.random.fork_rng([]):
            check_model(build(config.model, dataset.signature))


@dataclass(frozen=True)
class RankLeader:
    """The first of several processes, which writes, logs and scores for all."""

    ranks: Ranks
    place: RankPlace

    def open(self, run: Run) -> Ranks:
        """Announce that the run exists; log why its processes were started again; return the
        process group."""
        self.place.announce(run.folder)
        mark_run(run.folder, self.place)
        if self.place.why:
            run.append(Recovery(what=self.place.why, remedy="all processes, started again"))
        return self.ranks


@contextmanager
def join_ranks(config: Config, place: RankPlace) -> Iterator[Ranks]:
    """Yield the process group, in which this process and the others train inside the block."""
    if place.store is not None:
        where: dict[str, Any] = {"init_method": Path(place.store).absolute().as_uri()}
    else:
        where = {"store": _open_torchrun_store(place)}
    with groups.join(place.rank, place.size, find_device(config, place), **where) as ranks:
        yield ranks


def _open_torchrun_store(place: RankPlace) -> Any:
    """Return torchrun's store. Restarted processes need names of their own in it: it may still have
    the addresses of those before."""
    from torch.distributed import distributed_c10d as c10d
    from torch.distributed.rendezvous import rendezvous

    store, _, _ = next(rendezvous("env://", timeout=groups.TIMEOUT))
    return c10d.PrefixStore(f"slipstream-{place.restarts}", store)


def mark_run(folder: Path, place: RankPlace) -> None:
    """Have the processes that torchrun starts again find this run."""
    if place.run_id:
        runs.write_json(folder / MARKER, {"run_id": place.run_id})


def find_marked_run(place: RankPlace, config: Config) -> Path | None:
    """Return the run that the same torchrun has begun, if there is one to go on with.

    Before the first restart that is an unfinished run of the same name given to torchrun
    (`--rdzv-id`), as after a job was queued again.
    """
    is_named = not place.run_id.startswith(NO_ID)
    if not (place.restarts or (is_named and place.run_id)):
        return None
    for marker in sorted(Path(config.out).glob(f"*/{MARKER}"), reverse=True):
        if runs.read_json(marker) == {"run_id": place.run_id}:
            has_ended = (marker.parent / "metrics.json").exists()
            return marker.parent if place.restarts or not has_ended else None
    return None


def follow(config: Config, data: Any, ranks: Ranks, place: RankPlace) -> FinishedRun:
    """Train with the first process; return its run once that is scored."""
    init, dataset = load_dataset(config, data)
    text = ranks.share_text()
    if text.startswith("{"):  # else the run was finished before
        message = json.loads(text)
        if dataset.compute_fingerprint() != message["data"]:
            raise UserError(
                f"process {ranks.rank + 1} of {ranks.size} has read other data than the first one; "
                "check that data.path is the same everywhere"
            )
        config = Config.model_validate_json(message["config"])  # as the first one has resolved it
        device = find_device(config, place)
        plan = replace(Plan.from_dict(message["plan"]), device=device)
        run = SilentRun(Path(message["run"]))
        saved = None
        if message["step"] is not None:
            saved = checkpoints.read_checkpoint(run.checkpoints / f"step-{message['step']}")
        context = RunContext(run, config, dataset, plan, init=init, checkpoint=saved, ranks=ranks)
        with seed_generators(config.seed, device), plan.flags():
            context = build_model(context)
            context = replace(context, lanes=[context.build_lane()])
            fit = loop.fit_lanes(context, LaneEvents(run))
        if fit.signal_number:
            raise Interrupted("stopped", signal_number=fit.signal_number)
        text = ranks.share_text()
    return read_finished(Path(text))


def describe_training(context: RunContext) -> str:
    """Return what the other processes need to train the same model, as JSON."""
    saved = context.checkpoint
    message = {
        "run": str(context.run.folder),
        "config": context.config.model_dump_json(),
        "plan": context.plan.to_dict(),
        "data": context.fingerprint,
        "step": None if saved is None else saved.step,
    }
    return json.dumps(message)


def read_finished(folder: Path, *, is_new: bool = True) -> FinishedRun:
    """Return a finished run by its folder; empty where this machine does not see it."""
    if not (folder / "metrics.json").exists():
        return FinishedRun(folder, {})
    summary = runs.read_metrics(folder)
    summary.pop("detail", None)
    return FinishedRun(folder, summary, is_new)


@dataclass(frozen=True)
class RankTask(WorkerTask):
    """One of the processes, by its rank (`index`); its folder has nothing but its stderr."""

    size: int
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

    def run(self, send: Send) -> None:
        """Train in this process, together with the others."""
        from slipstream import training  # which imports this module

        config = None if self.config is None else Config.model_validate_json(self.config)
        place = RankPlace(
            *(self.index, self.size, self.index, self.store),
            why=self.why,
            announce=lambda folder: send(Other(name=OPENED, values={"run": str(folder)})),
        )
        folder = self.resume if self.may_be_finished else self.new_folder
        try:
            result = training.train(
                config,
                overrides=tuple(self.overrides),
                watch=_Watcher(send),
                resume=None if self.may_be_finished else self.resume,
                force=self.force,
                folder=None if folder is None else Path(folder),
                allow_code=True,  # the launching process has asked
                place=place,
            )
        except Interrupted as stop:
            send(Other(name=STOPPED, values=stop.to_json()))
            raise
        if place.is_leader:
            values = {"run": str(result.run), "is_new": result.is_new}
            send(Other(name=FINISHED, values=values))


class _Watcher:
    """Sends the events of the run; of steps, a few each second."""

    def __init__(self, send: Send) -> None:
        self.send, self.sent_at = send, 0.0

    def __call__(self, event: Event) -> None:
        if isinstance(event, Step):
            now = time.perf_counter()
            if now < self.sent_at + STEPS_S:
                return
            self.sent_at = now
        self.send(event)


def describe_ranks(request: TrainRequest, config: Config) -> RankTask:
    """Return the task of the processes that train together; each adds its rank and folders."""
    is_new = request.config is not None
    return RankTask(
        index=0,
        size=config.engine.data_parallel,
        folder="",
        store="",
        config=config.model_dump_json() if is_new else None,
        overrides=[] if is_new else list(request.settings),
        resume=None if request.resume is None else str(request.open_run().folder),
        may_be_finished=request.may_be_finished,
        force=request.force,
        new_folder=None if request.folder is None else str(request.folder.absolute()),
    )


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
        steps = checkpoints.list_steps(Run(folder)) if folder else []
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
        with LocalWorkers([env] * self.task.size) as workers:
            for rank in workers.slots:
                folder = str(self.scratch / str(rank))
                task = replace(self.task, index=rank, folder=folder, store=store)
                workers.start(task, rank)
            for rank, message in workers.watch():
                if isinstance(message, Outcome):
                    if message.kind != "done" and not workers.stop.requested:
                        self.died = _find_first_death(workers, workers.processes[rank])
                        break
                elif not isinstance(message, Started):
                    self._take(rank, message)
            self._check_end(workers)
        return self.folder

    def _take(self, rank: int, event: Event) -> None:
        match event:
            case Other(name="opened", values=values):
                self.folder = Path(values["run"])
            case Other(name="finished", values=values):
                self.folder, self.is_finished = Path(values["run"]), True
                self.is_new = values["is_new"]
            case Other(name="stopped", values=values):
                self.errors[rank] = parse_json_error(ResumableError, values)
            case Other(name="refused"):
                pass  # its exit code says so, too
            case _ if rank == 0:
                self.watch(event)

    def _check_end(self, workers: LocalWorkers) -> None:
        """Raise the error of the first process, or of the one that died, where it explains the
        end."""
        if workers.stop.requested and not self.is_finished:
            stopped = self.errors.get(0, ResumableError("stopped"))
            number = workers.stop.signal_number
            raise Interrupted(stopped.reason, signal_number=number, fix=stopped.fix)
        if self.died is None:
            return
        self.died.kill()  # it has ended; what it sent last is read then
        outcome = self.died.get_outcome()
        if outcome.kind == "refused":
            raise outcome.error or UserError(outcome.reason)
        if outcome.kind == "stopped" and LOST not in outcome.reason:
            raise outcome.error or ResumableError(outcome.reason)
        if self.died.exit_code == 1:  # an error of ours, which would come again
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


def _find_first_death(workers: LocalWorkers, worker: WorkerProcess) -> WorkerProcess:
    """Return the process that died by itself: the others end because it is gone."""
    deadline = time.monotonic() + FIRST_DEATH_S
    while worker.exit_code == EXIT_RESUMABLE and time.monotonic() < deadline:
        for process in workers.processes.values():
            code = process.process.poll()
            if code not in (None, 0, EXIT_RESUMABLE):
                return process
        time.sleep(0.05)
    return worker


def _choose_interface() -> dict[str, str]:
    """Have the processes, which are all on this machine, talk over its loopback device."""
    if "GLOO_SOCKET_IFNAME" in os.environ or sys.platform == "win32":
        return {}
    return {"GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo"}
