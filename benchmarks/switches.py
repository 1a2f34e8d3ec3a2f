"""Measures what each setting does to a training step: one changed at a time, all in one run.

    python benchmarks/switches.py --out benchmarks/records/<date>-<hardware>-switches

Starts from what `auto` chooses for a standard case of `slipstream bench` and changes one setting.
Figures are medians over repeats, relative to the unchanged step measured shortly before.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from slipstream.base import machine
from slipstream.config import replace_settings
from slipstream.engine.planning import TrainingWorkload
from slipstream.tools.bench import cases, results
from slipstream.tools.bench.cases import Case
from slipstream.tools.bench.results import BenchResult, ResultRow, ResultTable

CASES = ("B", "D", "Transformer")
REPEATS = 7
ON_GPU = torch.cuda.is_available()


def list_switches(case: Case) -> Iterator[tuple[str, dict[str, Any], float]]:
    """A name, the sections to change, and how many times the windows a step then has."""
    config = case.config
    recurrent, batch = config.model.spec.is_recurrent, config.train.batch
    assert batch != "auto"

    def engine(name: str, **settings: Any) -> tuple[str, dict[str, Any], float]:
        return name, {"engine": settings}, 1.0

    def others(name: str, windows: float = 1.0, **sections: Any) -> tuple[str, Any, float]:
        return name, sections, windows

    if ON_GPU:
        for precision in ("fp32", "tf32", "bf16", "fp16"):
            yield engine(f"precision = {precision}", precision=precision)
        yield engine("capture = false", capture=False)
        yield engine("steps_per_graph = 8", steps_per_graph=8)
        if recurrent:
            yield engine("rnn = torch", rnn="torch")
            yield engine("cudnn_benchmark = true", cudnn_benchmark=True)
        else:
            yield engine("compile = true", compile=True)
            yield engine("compile = true, capture = false", compile=True, capture=False)
        yield engine("sync = true", sync=True)
        yield engine("capture = false, sync = true", capture=False, sync=True)
        yield engine("home = host", home="host")
        yield engine("home = host, pinned = false", home="host", pinned=False)
        yield engine("home = host, non_blocking = false", home="host", non_blocking=False)
        for workers in (0, 2, 4, 8):
            yield engine(f"home = loader, workers = {workers}", home="loader", workers=workers)
        four: dict[str, Any] = {"home": "loader", "workers": 4}
        yield engine("home = loader, workers = 4, prefetch = 8", **four, prefetch=8)
        yield engine("home = loader, workers = 4, pinned = false", **four, pinned=False)
        name = "home = loader, workers = 4, persistent_workers = false"
        yield engine(name, **four, persistent_workers=False)
    else:
        for threads in range(1, machine.count_available_cores() + 1):
            yield engine(f"threads = {threads}", threads=threads)
        if machine.has_fast_bf16():
            yield engine("precision = bf16", precision="bf16")
        yield engine("home = loader, workers = 0", home="loader", workers=0)
        yield engine("home = loader, workers = 2", home="loader", workers=2)
    yield engine("fused = false", fused=False)
    yield engine("set_to_none = false", set_to_none=False)
    if config.model.kind != "mlp":
        yield engine("recompute = true", recompute=True)
    quarter = {"accumulate": 4, "batch": batch // 4}
    yield others("train.accumulate = 4, a quarter of the batch", train=quarter)
    yield others("train.clip = off", train={"clip": "off"})
    yield others("a quarter of train.batch, per window", 0.25, train={"batch": batch // 4})
    yield others("four times train.batch, per window", 4.0, train={"batch": batch * 4})


def fix_plan(case: Case) -> Case:
    """Return the case with the choices of `auto` as its settings."""
    trial = TrainingWorkload(
        replace_settings(case.config, engine={"plan": "measure"}), case.dataset
    )
    trial.close()
    plan = trial.plan
    settings = {"plan": "off", "precision": plan.precision, "threads": plan.threads}
    if plan.rnn:
        settings["rnn"] = plan.rnn[0].removesuffix("-standard")
    return replace(case, config=replace_settings(case.config, engine=settings))


def measure(case: Case, sections: dict[str, Any]) -> list[float]:
    trial = TrainingWorkload(replace_settings(case.config, **sections), case.dataset)
    try:
        once_s = trial.measure_ms_per_step(2) / 1e3
        steps = max(3, min(60, int(0.1 / once_s)))
        return [trial.measure_ms_per_step(steps) for _ in range(REPEATS)]
    finally:
        trial.close()


def measure_case(case: Case) -> Iterator[ResultRow]:
    case = fix_plan(case)
    for number, (switch, sections, windows) in enumerate(list_switches(case)):
        try:
            if number % 5 == 0:
                unchanged = statistics.median(measure(case, {}))
            times = measure(case, sections)
        except RuntimeError as error:
            why = str(error).split("\n", 1)[0]
            yield ResultRow(case.name, switch, "ms per step", problem=f"fails: {why}")
            continue
        against = statistics.median(times) / unchanged / windows
        extra = {"auto_ms": unchanged, "against_auto": against}
        yield ResultRow(case.name, switch, "ms per step", times, extra)


def build_table(rows: list[ResultRow]) -> ResultTable:
    names = list(dict.fromkeys(row.case for row in rows))
    base = {n: next(r.extra["auto_ms"] for r in rows if r.case == n and r.repeats) for n in names}
    cells = []
    for switch in dict.fromkeys(row.variant for row in rows):
        of_switch = {row.case: row for row in rows if row.variant == switch}
        cells.append([switch, *(format_cell(of_switch.get(name)) for name in names)])
    headings = ["setting", *(f"{name} ({base[name]:.3g} ms)" for name in names)]
    return ResultTable("Time of a step against auto's (below 1 is faster)", headings, cells)


def format_cell(row: ResultRow | None) -> str:
    if row is None:
        return ""
    return f"{row.extra['against_auto']:.2f}" if row.repeats else row.problem[:40]


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--out", type=Path, required=True)
    arguments.add_argument("--cases", default=",".join(CASES if ON_GPU else ("B", "MLP")))
    options = arguments.parse_args()
    os.environ["SLIPSTREAM_CACHE"] = str(options.out / "cache")
    warnings.simplefilter("ignore")
    start, rows = time.monotonic(), []
    for case in cases.build_standard_cases(options.cases.split(",")):
        for row in measure_case(case):
            rows.append(row)
            print(f"{row.case:12s} {row.variant:55s} {format_cell(row)}", flush=True)
    headline = "One setting changed at a time"
    settings = {"stretches": REPEATS}
    seconds = time.monotonic() - start
    results.write_result(
        BenchResult("switches", headline, rows, [build_table(rows)], settings, seconds), options.out
    )


if __name__ == "__main__":
    main()
