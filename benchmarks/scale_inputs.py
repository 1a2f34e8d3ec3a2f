"""The inputs of `scale.py`: every time with the record that it comes from, and what is assumed."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from cluster import Faults, Operation, SearchJob, StorageCosts, WalkForward, WorkerCosts

RECORDS = Path(__file__).parent / "records"
STEPS, WHOLE, SEARCH = "2026-11-17-h200-steps", "2026-11-16-h200-whole", "2026-11-16-h200-search"
PRUNED, CELLS = "2026-11-16-h200-search-pruned", "2026-11-16-h200-whole-search"
SWITCHES, COSTS = "2026-11-15-h200-switches", "2026-11-17-arm-storage"
SEARCHES = (SEARCH, "2026-11-16-h200-search-earlier", "2026-11-15-h200-search")


@cache
def read_rows(record: str) -> list[dict[str, Any]]:
    content = json.loads((RECORDS / record / "results.json").read_text(encoding="utf-8"))
    rows: list[dict[str, Any]] = content["rows"]
    return rows


class Source(NamedTuple):
    """A number of a record: the record, and the case, variant and key of its row."""

    record: str
    case: str
    variant: str
    key: str = "median"

    def read(self, **where: float) -> float:
        """Return the number; `where` has further values of the row."""
        for row in read_rows(self.record):
            is_row = (row["case"], row["way"]) == (self.case, self.variant)
            if is_row and all(row[name] == value for name, value in where.items()):
                value: Any = row
                for part in self.key.split("."):
                    value = value[part]
                return float(value)
        raise SystemExit(f"{self}: no such row with {where}")


SOURCES: dict[str, Source] = {
    "A, 1 lane, ms per step and model": Source(STEPS, "A", "one model, our kernels"),
    "A, 16 lanes": Source(STEPS, "A", "16 lanes"),
    "B, 1 lane, ms per step and model": Source(STEPS, "B", "one model, our kernels"),
    "B, 16 lanes": Source(STEPS, "B", "16 lanes"),
    "B, 64 lanes": Source(STEPS, "B", "64 lanes"),
    "start of a process": Source(WHOLE, "B x64", "slipstream", "parts.startup_s"),
    "reading of data": Source(WHOLE, "B x64", "slipstream", "parts.data_s"),
    "plan": Source(WHOLE, "B x64", "slipstream", "parts.plan_s"),
    "kernels": Source(WHOLE, "B x64", "slipstream", "parts.kernels_s"),
    "training of 64 models, 4,960 steps": Source(WHOLE, "B x64", "slipstream", "parts.training_s"),
    "validation of 64 models": Source(WHOLE, "B x64", "slipstream", "parts.validation_s"),
    "scoring of one model": Source(WHOLE, "B", "slipstream", "parts.scoring_s"),
    "scoring of 64 models": Source(WHOLE, "B x64", "slipstream", "parts.scoring_s"),
    "report of one model": Source(WHOLE, "B", "slipstream", "parts.report_s"),
    "report of 64 models": Source(WHOLE, "B x64", "slipstream", "parts.report_s"),
    "trials finished with the pruner": Source(
        PRUNED, "demand", "trials together, median pruner", "trials.finished"
    ),
    "trials pruned": Source(PRUNED, "demand", "trials together, median pruner", "trials.pruned"),
    "search with the pruner": Source(PRUNED, "demand", "trials together, median pruner"),
    "search without": Source(SEARCH, "demand", "trials together, no pruning"),
    "cells search": Source(CELLS, "cells search", "slipstream", "parts.searching_s"),
}
ASSUMED = {
    "trials": 4_096,
    "epochs": 20,
    "windows": 199_800,  # of the search in SEARCH
    "folds": 64,
    "repeats": 16,
    "epochs of the walk-forward": 40,  # case B of WHOLE: 124 steps each
    "gpus_per_machine": 8,
    "replace_s": 300.0,
    "process_hours": 1_000.0,
    "machine_hours": 10_000.0,
}
CHECKPOINT_B_S = 0.0023
"""Case B, written in a thread: summary of SWITCHES, which has no rows"""
OPERATIONS = ("ask", "report", "tell", "heartbeat", "read")
UNDER_WAY = (0, 64, 512)
NUM_WRITES = {"ask": 9, "tell": 2, "report": 1, "heartbeat": 1}
"""To propose: the trial, six settings, its worker and a heartbeat"""


def read_source(name: str) -> float:
    return SOURCES[name].read()


def fit_line(xs: list[float], ys: list[float]) -> tuple[float, float]:
    """Return the value at 0 and the slope, by least squares; neither below zero."""
    slope, start = np.polyfit(xs, ys, 1)
    return max(float(start), 0.0), max(float(slope), 0.0)


def read_worker_costs() -> WorkerCosts:
    """Return the costs of a worker: start-up, proposals, pruning, checkpoints."""
    counts = [
        (finished, running) for running in (16, 1_024) for finished in (10, 100, 1_000, 5_000)
    ]
    asks, decisions = (
        [
            Source(COSTS, case, variant, "quiet_s").read(finished=finished, under_way=running)
            for finished, running in counts
        ]
        for case, variant in (("TPE", "proposal"), ("median pruner", "decision"))
    )
    matrix = np.array([[1.0, *pair] for pair in counts])
    ask, decision = (
        np.linalg.lstsq(matrix, np.array(one), rcond=None)[0] for one in (asks, decisions)
    )
    parts = ("start of a process", "reading of data", "plan", "kernels")
    return WorkerCosts(
        start_up_s=sum(map(read_source, parts)),
        ask_s=float(ask[0]),
        ask_finished_s=float(ask[1]),
        ask_running_s=float(ask[2]),
        prune_s=float(decision[0]),
        prune_finished_s=float(decision[1]),
        checkpoint_s=CHECKPOINT_B_S,
    )


def read_storage(name: str) -> StorageCosts:
    """Return the costs of a storage.

    A file has one lock: each write keeps it for as long as the write of one epoch's loss takes, and
    the rest of an operation is its worker's time. PostgreSQL has two cores, as when it was
    measured, whose time its clients share.
    """
    whole_s = {one: measure_operation(name, one) for one in OPERATIONS}
    is_server = name == "PostgreSQL"
    server_s = {
        one: measure_operation(name, one, "server_cpu_s") if is_server else (0.0, 0.0)
        for one in OPERATIONS
    }

    def split(one: str, without: str | None = None) -> Operation:
        """Return an operation, without the part of it that is another one."""
        seconds, busy_s = (
            max(times[one][0] - (times[without][0] if without else 0.0), 0.0)
            for times in (whole_s, server_s)
        )
        serial_s = busy_s / 2 if is_server else min(NUM_WRITES[one] * whole_s["report"][0], seconds)
        return Operation(max(seconds - (busy_s if is_server else serial_s), 0.0), serial_s)

    read, each = (
        Operation(max(whole_s["read"][i] - server_s["read"][i], 0.0), server_s["read"][i] / 2)
        for i in (0, 1)
    )
    costs = StorageCosts(
        name,
        ask=split("ask", without="read"),  # which it contains
        report=split("report"),
        tell=split("tell"),
        heartbeat=split("heartbeat"),
        read=read,
        read_running=each,
    )
    if name != "journal":
        return costs
    # its heartbeats are files of their own; a read costs what the others wrote since the last one
    parse_s = Source(COSTS, name, "parse", "quiet_s").read()
    return replace(costs, heartbeat=Operation(), read_running=Operation(), parse_s=parse_s)


def measure_operation(name: str, operation: str, key: str = "quiet_s") -> tuple[float, float]:
    """Return the seconds of an operation, and what each trial under way adds."""
    source = Source(COSTS, name, operation, key)
    return fit_line(list(UNDER_WAY), [source.read(under_way=one) for one in UNDER_WAY])


def read_speed_spread() -> float:
    """Return the spread of one search on GPUs of one kind on several days, as a logarithm."""
    times = [Source(one, "demand", "trials together, no pruning").read() for one in SEARCHES]
    return statistics.stdev(map(math.log, times))


def read_pruned_share() -> float:
    pruned, finished = map(read_source, ("trials pruned", "trials finished with the pruner"))
    return pruned / (pruned + finished)


def read_loop_factor() -> float:
    """Return how much longer training takes than its steps, by validation and logging."""
    steps_s = 64 * 40 * 124 * read_source("B, 64 lanes") / 1e3
    whole = read_source("training of 64 models, 4,960 steps")
    return (whole + read_source("validation of 64 models")) / steps_s


def make_jobs() -> dict[str, SearchJob]:
    """Return the two searches: large models (case A) and small ones (case B)."""
    a = {1: read_source("A, 1 lane, ms per step and model"), 16: read_source("A, 16 lanes")}
    b = {1: read_source("B, 1 lane, ms per step and model"), 16: read_source("B, 16 lanes")}
    b[64] = read_source("B, 64 lanes")
    factor = read_loop_factor()
    a, b = ({lanes: factor * ms for lanes, ms in one.items()} for one in (a, b))
    windows = ASSUMED["windows"]
    shared = {
        "trials": int(ASSUMED["trials"]),
        "epochs": int(ASSUMED["epochs"]),
        "pruned_share": read_pruned_share(),
    }
    return {
        "large models": SearchJob(
            **shared, steps_per_epoch=math.ceil(windows / 512), ms=a, max_lanes=16
        ),
        "small models": SearchJob(
            **shared, steps_per_epoch=math.ceil(windows / 256), ms=b, max_lanes=64
        ),
    }


def make_walk_forwards(jobs: Mapping[str, SearchJob]) -> dict[str, WalkForward]:
    """Return the two walk-forwards, of the same models."""
    lanes = int(ASSUMED["folds"] * ASSUMED["repeats"])
    score, report = (
        ((read_source(f"{what} of 64 models") - read_source(f"{what} of one model")) / 63)
        for what in ("scoring", "report")
    )
    return {
        name: WalkForward(
            lanes,
            replace(job, epochs=int(ASSUMED["epochs of the walk-forward"])),
            score_s=read_source("scoring of one model"),
            score_lane_s=score,
            merge_lane_s=report,
        )
        for name, job in jobs.items()
    }


class Model(NamedTuple):
    """Everything that was measured, and the jobs."""

    jobs: dict[str, SearchJob]
    walks: dict[str, WalkForward]
    costs: WorkerCosts
    storages: dict[str, StorageCosts]
    faults: Faults


def load_model() -> Model:
    jobs = make_jobs()
    faults = Faults(
        process_hours=ASSUMED["process_hours"],
        machine_hours=ASSUMED["machine_hours"],
        gpus_per_machine=int(ASSUMED["gpus_per_machine"]),
        replace_s=ASSUMED["replace_s"],
        speed_spread=read_speed_spread(),
    )
    storages = {name: read_storage(name) for name in ("SQLite", "journal", "PostgreSQL")}
    return Model(jobs, make_walk_forwards(jobs), read_worker_costs(), storages, faults)
