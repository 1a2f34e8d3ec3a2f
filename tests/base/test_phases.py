"""Where the time of a run goes: the parts add up, in a run, a search and a resumed run."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

import slipstream
from slipstream import runs
from slipstream.base import phases
from slipstream.base.phases import PARTS, SEARCH_PARTS, PhaseTimer


class Clock:
    """A clock that the test sets."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        monkeypatch.setattr(phases.time, "perf_counter", lambda: self.now)


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


def run_phases(timer, clock):
    """Start-up 3 s, data 2 s, training 10 s of which 4 s are validation, scoring 1 s."""
    clock.now += 3
    timer.end("start-up")
    with timer.time("data"):
        clock.now += 1.5
    clock.now += 0.5
    timer.end("data")
    clock.now += 10
    timer.end("training")
    timer.move({"validation": 4.0}, source="training")
    clock.now += 0.25
    with timer.time("scoring"):
        clock.now += 0.75
    clock.now += 0.5


def test_the_parts_add_up_and_a_gap_counts_for_the_phase_after_it(clock):
    timer = PhaseTimer()
    run_phases(timer, clock)
    assert timer.summarize() == {
        "startup_s": 3,
        "data_s": 2,
        "plan_s": 0,
        "kernels_s": 0,
        "training_s": 6,
        "validation_s": 4,
        "scoring_s": 1,
        "report_s": 0.5,
        "wall_s": 16.5,
    }
    assert timer.seconds == {"data": 1.5, "scoring": 0.75}


def test_what_a_resumed_run_took_before_is_in_the_wall_time(clock):
    timer = PhaseTimer()
    run_phases(timer, clock)
    parts = timer.summarize(before={"training": 7.0, phases.EARLIER: 2.0})
    assert (parts["training_s"], parts["earlier_s"]) == (13, 2)
    assert (parts["process_s"], parts["wall_s"]) == (16.5, 25.5)
    assert sum(parts[name] for name in (*PARTS, "earlier_s")) == parts["wall_s"]
    clock.now += 1
    later = timer.extend(parts, "report_s")
    assert (later["report_s"], later["process_s"], later["wall_s"]) == (1.5, 17.5, 26.5)


def test_time_after_the_summary_counts_for_the_part_that_is_named(clock):
    timer = PhaseTimer(started_at=-2.0)
    run_phases(timer, clock)
    parts = timer.summarize()
    assert (parts["startup_s"], parts["wall_s"]) == (5, 18.5)
    clock.now += 4
    advised = timer.extend(parts, "advice_s")
    clock.now += 1
    assert timer.extend(advised, "report_s") == parts | {
        "advice_s": 4,
        "report_s": 1.5,
        "wall_s": 23.5,
    }


def test_the_start_of_the_process_is_before_the_start_of_python():
    code = (
        "import time; began = time.perf_counter(); from slipstream.base import phases; "
        "print(began - phases.find_process_start())"
    )
    before = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    whole = time.perf_counter() - before
    assert -0.01 <= float(done.stdout) <= whole + 0.01  # the system counts in hundredths


SETTINGS = {
    "data": {"context": 16, "horizon": 1, "inputs": ["x", "y"]},
    "model": {"kind": "mlp", "hidden": 4},
    "train": {"epochs": 2, "batch": 64},
    "engine": {"device": "cpu", "plan": "off", "monitor": False},
    "tune": {"trials": 2, "retrain": 1, "retrain_seeds": 2, "space": {"train.lr": [0.001, 0.01]}},
}
TABLE = {"x": [i % 5 for i in range(200)], "y": [i % 7 for i in range(200)]}


def check_parts(spent, parts):
    assert spent.keys() == {*parts, "wall_s"}
    assert sum(spent[name] for name in parts) == pytest.approx(spent["wall_s"], rel=1e-9)
    assert all(value >= 0 for value in spent.values())


@pytest.mark.parametrize(
    ("function", "overrides", "parts"),
    [
        (slipstream.train, {}, PARTS),
        (slipstream.train, {"train.repeats": 2}, PARTS),
        (slipstream.pretrain, {"model.kind": "gru"}, PARTS),
        (slipstream.tune, {}, SEARCH_PARTS),
    ],
    ids=["train", "repeats", "pretrain", "tune"],
)
def test_every_kind_of_run_says_where_its_time_went(tmp_path, function, overrides, parts):
    began = time.perf_counter()
    settings = SETTINGS | {"out": str(tmp_path)}
    result = function(settings, TABLE, overrides=overrides, quiet=True)
    spent = result.summary["time"]
    check_parts(spent, parts)
    assert spent["wall_s"] <= time.perf_counter() - began
    assert min(spent["data_s"], spent["report_s"]) > 0
    assert runs.read_metrics(result.run)["time"] == spent


@pytest.mark.slow
def test_a_command_counts_from_the_start_of_its_process_to_its_report(tmp_path):
    job = ["data.path=simulated:cell", "data.id=cell", "data.stride=50", "model.hidden=2"]
    job += ["train.epochs=1", "engine.device=cpu", f"out={tmp_path}"]
    options = [part for one in job for part in ("--set", one)]
    command = [sys.executable, "-m", "slipstream", "train", "--json", "--quiet", *options]
    began = time.perf_counter()
    done = subprocess.run(command, capture_output=True, check=True, text=True)
    outside_s = time.perf_counter() - began
    summary = json.loads(done.stdout)
    spent = summary["time"]
    check_parts(spent, PARTS)
    assert summary["seconds"] + spent["startup_s"] < spent["wall_s"] <= outside_s + 0.02
    assert runs.read_metrics(Path(summary["run"]))["time"] == spent
