"""The launcher: events of workers arrive whatever else they write, and workers that die are started
again, given up or taken over."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from slipstream.base.errors import Interrupted, ResumableError, UserError
from slipstream.events import Event, Other
from slipstream.workers.child import Send, WorkerTask
from slipstream.workers.launcher import (
    STDERR,
    LocalWorkers,
    Outcome,
    RestartRules,
    Started,
    run_workers,
)
from tests.workers import noisy
from tests.workers.noisy import NoisyTask


@dataclass(frozen=True)
class EndingTask(WorkerTask):
    """Ends in one of several ways; by default, it is done."""

    how: str = "done"
    deaths: int = 0
    """How often it dies first"""

    def run(self, send: Send) -> None:
        past = Path(self.folder) / "deaths"
        num_deaths = len(past.read_text()) if past.exists() else 0
        if num_deaths < self.deaths:
            past.write_text("x" * (num_deaths + 1))
            os.kill(os.getpid(), signal.SIGKILL)
        match self.how:
            case "refuse":
                raise UserError("data.path: is missing")
            case "stop":
                raise ResumableError("the disk is full; make room")
            case "wait":
                send(Other(name="waiting", values={}))
                time.sleep(600)
        send(Other(name="result", values={"index": self.index}))


class Record:
    """Remembers what happens to the workers."""

    def __init__(self, interrupt_at: str = "") -> None:
        self.events: list[tuple[int, Event]] = []
        self.changes: list[tuple[int, str, Any]] = []
        self.interrupt_at = interrupt_at

    def add(self, worker: int, event: Event) -> None:
        self.events.append((worker, event))
        if isinstance(event, Other) and event.name == self.interrupt_at:
            signal.raise_signal(signal.SIGTERM)

    def log(self, slot: int, task: WorkerTask, what: str, **values: Any) -> None:
        self.changes.append((slot, what, values.get("remedy", values.get("of"))))


def launch(tasks, record, num_slots=2, **rules) -> dict[int, Outcome]:
    with LocalWorkers([{}] * num_slots) as workers:
        return run_workers(workers, tasks, RestartRules(**rules), record)


def make_task(folder: Path, index: int, **how: Any) -> EndingTask:
    return EndingTask(str(folder / str(index)), index, **how)


def test_what_a_worker_prints_is_none_of_its_events(tmp_path: Path) -> None:
    with LocalWorkers([{}]) as workers:
        workers.start(NoisyTask(str(tmp_path), 0), 0)
        messages = [message for _, message in workers.watch()]
        pid = workers.processes[0].process.pid
    events = [Other(name="begin", values={}), Other(name="finish", values={"what": "é"})]
    assert messages == [Started({"pid": pid}), *events, Outcome("done")]
    printed = (tmp_path / STDERR).read_text(encoding="utf-8")
    assert printed == f"{noisy.PRINTED}from a program\n"


def test_a_worker_that_dies_is_started_again_in_its_slot(tmp_path):
    record = Record()
    tasks = [make_task(tmp_path, 0), make_task(tmp_path, 1, deaths=2)]
    assert launch(tasks, record) == {0: Outcome("done"), 1: Outcome("done")}
    of_second = [(what, remedy) for slot, what, remedy in record.changes if slot == 1]
    assert of_second == [("started", None), ("died", "started again")] * 2 + [("started", None)]
    assert sorted(worker for worker, event in record.events if event.name == "result") == [0, 1]


def test_a_worker_that_dies_again_and_again_is_given_up_and_the_others_end(tmp_path):
    record = Record()
    tasks = [make_task(tmp_path, 0), make_task(tmp_path, 1, deaths=9)]
    outcomes = launch(tasks, record, given_up="left alone")
    assert outcomes[0] == Outcome("done")
    assert outcomes[1].kind == "died"
    assert "SIGKILL" in outcomes[1].reason
    assert [change for change in record.changes if change[1] == "died"] == [
        (1, "died", "started again"),
        (1, "died", "started again"),
        (1, "died", "left alone"),
    ]


def test_another_slot_takes_over_where_tasks_are_handed_over(tmp_path):
    record = Record()
    tasks = [make_task(tmp_path, 0), make_task(tmp_path, 1, deaths=3)]
    assert launch(tasks, record, hands_over=True)[1] == Outcome("done")
    assert record.changes[-1] == (0, "took over", 1)


def test_more_tasks_than_slots_wait_for_one(tmp_path):
    record = Record()
    outcomes = launch([make_task(tmp_path, i) for i in range(3)], record, num_slots=1)
    assert set(outcomes.values()) == {Outcome("done")}
    assert record.changes == [(0, "started", None)] * 3


@pytest.mark.parametrize(
    ("how", "error", "rules"),
    [("refuse", UserError, {}), ("stop", ResumableError, {"stops_together": True})],
)
def test_a_refusal_or_a_full_disk_stops_all_workers(tmp_path, how, error, rules):
    tasks = [make_task(tmp_path, 0, how="wait"), make_task(tmp_path, 1, how=how)]
    with pytest.raises(error, match=r"data\.path: is missing|the disk is full"):
        launch(tasks, Record(), **rules)


def test_a_signal_stops_all_workers(tmp_path):
    tasks = [make_task(tmp_path, index, how="wait") for index in range(2)]
    with pytest.raises(Interrupted) as stopped:
        launch(tasks, Record(interrupt_at="waiting"))
    assert stopped.value.signal_number == signal.SIGTERM
