"""The tables and the picture of `scale.py`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import cluster
import numpy as np
import scale_inputs as inputs
from cluster import Outcome
from scale_inputs import ASSUMED, Model

from slipstream.reporting.charts import MUTED, Chart, Scale, number_places, render_svg
from slipstream.tools.bench.results import ResultRow, ResultTable


class Run(NamedTuple):
    """One simulation: of which job, with what."""

    job: str
    variant: str
    outcome: Outcome
    speed_up: float

    @property
    def efficiency(self) -> float:
        return self.speed_up / self.outcome.gpus

    def to_row(self) -> ResultRow:
        outcome = self.outcome
        extra = {
            "gpus": outcome.gpus,
            "speed_up": self.speed_up,
            "efficiency": self.efficiency,
            "limit": outcome.limit,
            "shares": outcome.compute_shares(),
            "finished": outcome.finished,
            "failed": outcome.failed,
            "failures": outcome.failures,
            "slowest_heartbeat_s": outcome.slowest_heartbeat_s,
        }
        return ResultRow(self.job, self.variant, "s", [outcome.wall_s], extra)


def format_time(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def describe_limit(outcome: Outcome) -> str:
    """Return what costs most besides training, with its share of the GPUs' time."""
    share = outcome.spent_s[outcome.limit] / outcome.gpu_s
    return f"{outcome.limit} ({100 * share:.0f} %)"


def build_size_table(runs: list[Run], job: str) -> ResultTable:
    """Return one job by the number of GPUs: time, efficiency and limit with each storage."""
    variants = list(dict.fromkeys(run.variant for run in runs if run.job == job))
    by = {(run.variant, run.outcome.gpus): run for run in runs if run.job == job}
    cells = []
    for gpus in sorted({gpus for _, gpus in by}):
        row = [f"{gpus:,}"]
        for variant in variants:
            run = by.get((variant, gpus))
            if run is None:
                row.append("")
                continue
            text = f"{format_time(run.outcome.wall_s)}, {100 * run.efficiency:.0f} %"
            row.append(f"{text}; {describe_limit(run.outcome)}")
        cells.append(row)
    note = "Time, efficiency; what costs most besides training, and its share of the GPUs' time."
    return ResultTable(f"Simulated: {job}", ["GPUs", *variants], cells, note)


def build_change_table(runs: list[Run]) -> ResultTable:
    sizes = sorted({run.outcome.gpus for run in runs})
    cells = []
    for job, variant in dict.fromkeys((run.job, run.variant) for run in runs):
        by = {run.outcome.gpus: run for run in runs if (run.job, run.variant) == (job, variant)}
        times = [f"{by[gpus].speed_up:.0f}x; {describe_limit(by[gpus].outcome)}" for gpus in sizes]
        cells.append([job, variant, *times])
    headings = ["job", "change", *(f"{gpus:,} GPUs" for gpus in sizes)]
    return ResultTable("Simulated: what to change, with PostgreSQL", headings, cells)


def build_fault_table(runs: list[Run]) -> ResultTable:
    cells = []
    for run in runs:
        shares = run.outcome.compute_shares()
        lost = shares[cluster.LOST] + shares[cluster.START_UP]
        parts = (1 / run.speed_up - 1, lost, shares[cluster.CHECKPOINTS], shares[cluster.IDLE])
        failure, _, checkpoint = run.variant.partition("; ")
        cells.append([failure, checkpoint, f"{run.outcome.failures}"])
        cells[-1] += [format_time(run.outcome.wall_s), *(f"{100 * part:.1f} %" for part in parts)]
    headings = [
        "failures",
        "checkpoints",
        "failures in all",
        "time",
        "longer by",
        "lost and started again",
    ]
    headings += ["checkpoints", "waiting for the last"]
    title = "Simulated: failures, a walk-forward of large models with 50 times the windows, 64 GPUs"
    return ResultTable(title, headings, cells)


def build_input_table(model: Model) -> ResultTable:
    """Return every number that was measured, with its record."""
    cells = [
        [
            name,
            f"{source.read():.4g}",
            source.record,
            f"{source.case}, {source.variant}, {source.key}",
        ]
        for name, source in inputs.SOURCES.items()
    ]
    costs = model.costs
    fitted = {
        "TPE's proposal, ms": 1e3 * costs.ask_s,
        "for each finished trial, us": 1e6 * costs.ask_finished_s,
        "for each trial under way, us": 1e6 * costs.ask_running_s,
        "pruner's decision, ms": 1e3 * costs.prune_s,
        "pruner, for each finished trial, us": 1e6 * costs.prune_finished_s,
    }
    for name, storage in model.storages.items():
        for operation in ("ask", "report", "tell", "heartbeat", "read"):
            one = getattr(storage, operation)
            fitted[f"{name}, {operation}: worker, ms"] = 1e3 * one.client_s
            fitted[f"{name}, {operation}: one at a time, ms"] = 1e3 * one.serial_s
        each = storage.read_running
        fitted[f"{name}, read, for each trial under way: worker, us"] = 1e6 * each.client_s
        fitted[f"{name}, read, for each trial under way: one at a time, us"] = 1e6 * each.serial_s
    fitted["journal, for each line of others, us"] = 1e6 * model.storages["journal"].parse_s
    cells += [[name, f"{value:.3g}", inputs.COSTS, "fitted"] for name, value in fitted.items()]
    cells.append(
        [
            "checkpoint of one model, s",
            f"{inputs.CHECKPOINT_B_S}",
            inputs.SWITCHES,
            "summary, case B",
        ]
    )
    spread = ", ".join(inputs.SEARCHES)
    cells.append(["spread of GPUs' speeds", f"{model.faults.speed_spread:.3f}", spread, "log, sd"])
    factor = inputs.read_loop_factor()
    cells.append(
        ["training over its steps", f"{factor:.3f}", f"{inputs.WHOLE}, {inputs.STEPS}", "B x64"]
    )
    cells += [[name, f"{value:,g}", "assumed", ""] for name, value in ASSUMED.items()]
    return ResultTable("Inputs", ["what", "value", "record", "row"], cells)


def build_validation_table(compared: list[tuple[str, float, float]]) -> ResultTable:
    cells = [
        [what, f"{simulated:.3g}", f"{recorded:.3g}", f"{simulated / recorded:.2f}"]
        for what, simulated, recorded in compared
    ]
    headings = ["recorded on one H200", "simulated", "recorded", "simulated / recorded"]
    return ResultTable("The simulation beside what was measured", headings, cells)


COLOURS = {
    "SQLite": "#f59e0b",
    "journal": "#10b981",
    "PostgreSQL": "#2563eb",
    "no storage": "#7c3aed",
    "large models": "#2563eb",
    "small models": "#7c3aed",
}
CAUSE_COLOURS = {
    cluster.TRAINING: "#2563eb",
    cluster.FEW_LANES: "#bfdbfe",
    cluster.STORAGE: "#f59e0b",
    cluster.QUEUE: "#dc2626",
    cluster.SAMPLER: "#7c3aed",
    cluster.START_UP: "#10b981",
    cluster.IDLE: "#d1d5db",
}


def draw_speed_ups(lines: Mapping[str, list[Run]], title: str, top: int) -> Chart:
    """Draw speed-up against GPUs, one line per storage or job, beside the ideal line."""
    ticks = tuple((4.0**power, f"{4.0**power:,.4g}") for power in range(-1, 6) if 4**power <= top)
    x = Scale(0.8, 1.2 * top, log=True, ticks=tuple(tick for tick in ticks if tick[0] >= 1))
    y = Scale(0.18, 1.3 * top, log=True, ticks=ticks)
    chart = Chart(x, y, "GPUs", "times as fast as one GPU", 250, title=title)
    chart.line([1, top], [1, top], MUTED, width=1, dash="4 3", label="ideal")
    for name, runs in lines.items():
        points = [run.outcome.gpus for run in runs], [run.speed_up for run in runs]
        # two storages end up on the same line
        chart.line(*points, COLOURS[name], dash="3 2" if name == "SQLite" else "", label=name)
        chart.dots(*points, COLOURS[name], size=4)
    return chart


def draw_shares(runs: list[Run], title: str) -> Chart:
    """Draw what the GPUs do with their time, by their number."""
    x = number_places([f"{run.outcome.gpus:,}" for run in runs])
    chart = Chart(x, Scale(0.0, 100.0), "GPUs", "% of the GPUs' time", 220, title=title)
    floor, places = np.zeros(len(runs)), np.arange(len(runs))
    for cause, colour in CAUSE_COLOURS.items():
        shares = np.array([100 * run.outcome.compute_shares()[cause] for run in runs])
        chart.boxes((places - 0.4, places + 0.4), (floor, floor + shares), colour)
        chart.name("full", colour, cause)
        floor = floor + shares
    return chart


def select_lines(runs: list[Run], job: str) -> dict[str, list[Run]]:
    lines: dict[str, list[Run]] = {}
    for run in runs:
        if run.job == job:
            lines.setdefault(run.variant, []).append(run)
    return lines


def draw_picture(runs: list[Run], path: Path) -> None:
    top, jobs = max(run.outcome.gpus for run in runs), ("large models", "small models")
    charts = [
        draw_speed_ups(
            select_lines(runs, f"search, {job}"), f"Search of {ASSUMED['trials']:,} {job}", top
        )
        for job in jobs
    ]
    walks = {job: select_lines(runs, f"walk-forward, {job}")["shares"] for job in jobs}
    lanes = int(ASSUMED["folds"] * ASSUMED["repeats"])
    charts.append(draw_speed_ups(walks, f"Walk-forward of {lanes:,} models", top))
    panels = ((jobs[0], "PostgreSQL"), (jobs[0], "journal"), (jobs[1], "journal"))
    charts += [
        draw_shares(select_lines(runs, f"search, {job}")[storage], f"{job}, {storage}")
        for job, storage in panels
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(render_svg(charts, width=1200, columns=3), "utf-8")
