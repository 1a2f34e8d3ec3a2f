"""Worker processes: their events arrive whatever else they write."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from slipstream.workers.processes import STDERR, WorkerProcesses
from tests.workers import noisy


@dataclass(frozen=True)
class Task:
    folder: str
    index: int = 0


def test_what_a_worker_prints_is_none_of_its_events(tmp_path: Path) -> None:
    with WorkerProcesses("tests.workers.noisy") as processes:
        processes.start(Task(str(tmp_path)), {})
        events = [event for _, event in processes.watch()]
    assert events == [{"event": "start"}, {"event": "end", "what": "é"}, None]
    assert processes.workers[0].exit_code == 0
    printed = (tmp_path / STDERR).read_text(encoding="utf-8")
    assert printed == f"{noisy.PRINTED}from a program\n"
