"""The same work under a plain PyTorch loop, Lightning and Slipstream: steps, then whole jobs.

Same network, first weights, batches, optimizer and loss; the first losses are compared, so that it
is shown to be the same work. Whole jobs are commands of their own, start-up included, timed to the
validation loss that all of them reach.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from slipstream import config as configs
from slipstream import machine
from slipstream.autotune.workload import TrainingWorkload
from slipstream.bench.cases import Case
from slipstream.bench.frameworks import lightning_loop, plain_loop
from slipstream.bench.frameworks.settings import PeerSettings, StepTimings
from slipstream.bench.results import (
    BenchResult,
    ProgressCallback,
    ResultRow,
    ResultTable,
    TimeBudget,
    format_ratio,
    format_spread,
)
from slipstream.config import Engine, replace_settings
from slipstream.errors import UserError

ROUNDS, STRETCHES = 2, 3
FIRST = 3
WARM_S = 0.1
STEPS_SHARE = 0.4
"""Of the time, where whole jobs come after the steps"""
START_S = 6.0
"""What a command takes beside its steps"""
SAME = 0.02
"""How far the first losses may lie apart: other kernels round otherwise"""
VALIDATION = re.compile(r"^epoch \d+: .*validation ([0-9.e+-]+)")
AUTO, CLASSIC, BASELINE = (f"Slipstream, {preset}" for preset in ("auto", "classic", "baseline"))
"""What it does by itself, and with its presets for the usual advice and the naive loop"""
AT_BEST = "Lightning at its best"
USUAL = "Lightning as people run it"


def _ways(*, on_gpu: bool) -> Iterator[PeerSettings]:
    precisions = ("tf32", "fp16", "bf16") if on_gpu else ("fp32",)
    counts = (0, 4, 8) if on_gpu else (0, 2)
    usual = "fp16" if on_gpu else "fp32"
    for workers in counts[:2]:
        yield PeerSettings(f"plain loop, {usual}, {workers} workers", "plain", usual, workers)
    if not lightning_loop.has_lightning():
        return
    yield PeerSettings(f"{USUAL}, {usual}", "lightning", usual, counts[1], habits=True)
    for precision in precisions:
        for workers in counts:
            name = f"{AT_BEST}, {precision}, {workers} workers"
            yield PeerSettings(name, "lightning", precision, workers)


def compare_with_peers(
    cases: Sequence[Case],
    jobs: Sequence[Case],
    *,
    minutes: float,
    watch: ProgressCallback,
    most_jobs: int = 5,
) -> BenchResult:
    """Steps of every case, then the whole of every job, as far as the time goes."""
    budget = TimeBudget(minutes)
    notes = []
    if not lightning_loop.has_lightning():
        notes.append("Lightning is not installed; pip install 'slipstream[lightning]' adds it")
    rows: list[ResultRow] = []
    tables: list[ResultTable] = []
    steps_until = budget.total_s * (STEPS_SHARE if jobs else 1.0)
    for number, case in enumerate(cases):
        share_s = (steps_until - budget.spent_s) / (len(cases) - number)
        found = _steps(case, share_s, budget, watch)
        rows += found
        tables.append(_steps_table(case, found))
    for number, case in enumerate(jobs):
        share_s = budget.left_s / (len(jobs) - number)
        found, told = _jobs(case, rows, share_s, budget, watch, most_jobs)
        notes += told
        rows += found
        if found:
            tables.append(_jobs_table(case, found))
    return BenchResult(
        kind="peers",
        headline=_headline(rows),
        rows=rows,
        tables=tables,
        settings={"minutes": minutes, "rounds": ROUNDS, "stretches": STRETCHES}
        | {"cases": {c.name: c.settings for c in [*cases, *jobs]}},
        seconds=budget.spent_s,
        notes=notes,
    )


def make_comparable(case: Case) -> Case:
    """The case with what every framework can do alike: no dropout, one pass per step, a constant
    rate."""
    train = case.config.train
    assert train.batch != "auto"
    config = replace_settings(
        case.config,
        model={"dropout": 0.0},
        train={
            "batch": train.batch * train.accumulate,
            "accumulate": 1,
            "schedule": "constant",
            "warmup_epochs": 0.0,
        },
    )
    return replace(case, config=config)


def _steps(
    case: Case, share_s: float, budget: TimeBudget, watch: ProgressCallback
) -> list[ResultRow]:
    case = make_comparable(case)
    on_gpu = machine.choose_device(case.config.engine.device).type == "cuda"
    machine.warm_up(machine.choose_device(case.config.engine.device))
    ways = list(_ways(on_gpu=on_gpu))
    half = ("tf32", "fp16", "bf16") if on_gpu else ()
    ours = [BASELINE, CLASSIC, *(f"Slipstream, {precision}" for precision in half), AUTO]
    until = budget.spent_s + share_s
    names = [*(way.name for way in ways), *ours]
    times: dict[str, list[float]] = {name: [] for name in names}
    firsts: dict[str, StepTimings] = {}
    problems: dict[str, str] = {}
    reference = _ours(case, 1, precision="fp32", plan="off")
    each_s = share_s / ROUNDS / len(names)
    for turn in range(ROUNDS):
        for name in names:
            if name in problems or (turn and budget.spent_s > until):
                continue
            watch(f"{case.name}: {name}", budget.share)
            way = next((way for way in ways if way.name == name), None)
            try:
                count = _count(times[name], reference, each_s)
                if way is not None:
                    found = _theirs(case, way, count)
                else:
                    found = _ours(case, count, **_engine(name))
            except RuntimeError as error:
                problems[name] = "failed: " + str(error).strip().split("\n", 1)[0]
                continue
            times[name] += found.times
            firsts.setdefault(name, found)
    return list(_rows(case, times, firsts, problems, reference.losses))


def _count(known: list[float], reference: StepTimings, each_s: float) -> int:
    """Steps of a stretch: half of the way's time goes into stretches, the rest into its start."""
    once_s = min(known or reference.times) / 1e3
    return max(2, min(60, int(0.5 * each_s / STRETCHES / once_s)))


def _theirs(case: Case, way: PeerSettings, steps: int) -> StepTimings:
    timed = plain_loop.time_steps if way.framework == "plain" else lightning_loop.time_steps
    warm_up = max(FIRST, 2 + 2 * way.workers)
    return timed(case.config, case.dataset, way, warm_up=warm_up, stretches=STRETCHES, steps=steps)


def _engine(name: str) -> dict[str, Any]:
    """Settings of one of our own ways."""
    if name in (CLASSIC, BASELINE):
        return {"preset": name.partition(", ")[2]}
    return {"precision": name.partition(", ")[2], "plan": "measure"}


def _ours(case: Case, steps: int, **settings: Any) -> StepTimings:
    engine = Engine(device=case.config.engine.device, **settings)
    config = case.config.model_copy(update={"engine": engine})
    trial = TrainingWorkload(config, case.dataset, first=FIRST)
    try:
        warm_s = WARM_S if trial.device.type == "cuda" else 0.0
        times = [trial.measure_ms_per_step(steps, warm_s=warm_s) for _ in range(STRETCHES)]
        return StepTimings(times, trial.first_losses, trial.plan.precision)
    finally:
        trial.close()


def _rows(
    case: Case,
    times: dict[str, list[float]],
    firsts: dict[str, StepTimings],
    problems: dict[str, str],
    in_fp32: list[float],
) -> Iterator[ResultRow]:
    batch = case.config.train.batch
    assert batch != "auto"
    ours = {"fp32": in_fp32}
    for name, found in firsts.items():
        if name == f"Slipstream, {found.precision}":
            ours[found.precision] = found.losses
    for name, repeats in times.items():
        if not repeats:
            why = problems.get(name, "left out: give more --minutes")
            yield ResultRow(case.name, name, "ms per step", problem=why)
            continue
        row = ResultRow(case.name, name, "ms per step", repeats)
        yield replace(
            row,
            more={"windows_per_s": 1e3 * batch / row.median} | _compared(name, firsts[name], ours),
        )


def _compared(name: str, found: StepTimings, ours: dict[str, list[float]]) -> dict[str, Any]:
    """A way's first losses beside ours in its precision; ours, or where that failed, beside fp32's.

    fp16 is held against fp32 by the loss before any update: its loss scale begins so high that
    everybody's first updates may overflow and be skipped, and the losses after them are others.
    """
    precision, losses = found.precision, found.losses[:FIRST]
    against = precision if name != f"Slipstream, {precision}" and precision in ours else "fp32"
    count = 1 if (precision, against) == ("fp16", "fp32") else FIRST
    held = ours[against][:count]
    apart = max(abs(a - b) / abs(b) for a, b in zip(losses, held, strict=False))
    return {
        "precision": precision,
        "first_losses": losses,
        "held_against": held,
        "losses_apart": apart,
        "same_work": apart <= SAME,
    }


def _steps_table(case: Case, rows: Sequence[ResultRow]) -> ResultTable:
    auto = next(row for row in rows if row.way == AUTO)
    cells = []
    for row in sorted(rows, key=lambda r: -r.median if r.repeats else -1e9):
        if not row.repeats:
            cells.append([row.way, row.problem, "", "", ""])
            continue
        apart = f"{100 * row.more['losses_apart']:.2g} %"
        cells.append(
            [
                row.way,
                format_spread(row),
                f"{row.more['windows_per_s']:,.0f}",
                format_ratio(row.median / auto.median) if auto.repeats else "–",
                apart if row.more["same_work"] else f"{apart}: not the same work",
            ]
        )
    return ResultTable(
        f"{case.name}: {case.what}",
        ["way", "ms per step", "windows/s", "auto is faster by", "first losses apart"],
        cells,
        f"The first {FIRST} losses, from the same weights and batches, are held against "
        "Slipstream's in the same precision, and those against its fp32" + _of_fp16(rows) + ".",
    )


def _of_fp16(rows: Sequence[ResultRow]) -> str:
    if not any(row.more.get("precision") == "fp16" for row in rows):
        return ""
    return "; fp16's by the first alone, since its loss scale may skip updates"


def _jobs(
    case: Case,
    rows: Sequence[ResultRow],
    share_s: float,
    budget: TimeBudget,
    watch: ProgressCallback,
    most: int,
) -> tuple[list[ResultRow], list[str]]:
    """Whole commands, as often as the time allows; their epochs cut where even one does not fit."""
    on_gpu = machine.choose_device(case.config.engine.device).type == "cuda"
    ways: dict[str, PeerSettings | None] = {AUTO: None, CLASSIC: None}
    mine = [row for row in rows if row.case == case.name]
    for start in ("plain loop", USUAL, AT_BEST):
        timed = [row for row in mine if row.way.startswith(start) and row.repeats]
        if timed:
            best = min(timed, key=lambda row: row.median).way
            ways[best] = next(w for w in _ways(on_gpu=on_gpu) if w.name == best)
    config, train, notes = case.config, case.config.train, []
    assert train.batch != "auto"
    known = {row.way: row.median for row in mine if row.repeats}
    steps = -(-case.dataset.num_windows["train"] // train.batch)
    epoch_s = 1.2 * steps / 1e3 * sum(known.get(way, 0.0) for way in ways)
    fits = int((0.9 * share_s - START_S * len(ways)) / epoch_s) if epoch_s else 0
    if fits < 1:
        return [], [f"{case.name}: no time for whole jobs; give more --minutes"]
    if fits < train.epochs:
        notes.append(f"{case.name}: whole jobs of {fits} of its {train.epochs} epochs")
        config = replace_settings(config, train={"epochs": fits})
    until = budget.spent_s + share_s
    runs_of: dict[str, list[dict[str, Any]]] = {name: [] for name in ways}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "job.toml"
        path.write_text(configs.to_toml(config, only_set=True), encoding="utf-8")
        longest = 0.0
        while not runs_of[AUTO] or budget.spent_s + longest < until:
            round_began = time.monotonic()
            for name, way in ways.items():
                watch(f"{case.name}: whole job, {name}", budget.share)
                runs_of[name].append(_timed(_command(path, name, way, Path(folder))))
            longest = time.monotonic() - round_began
            if min(map(len, runs_of.values())) == most:
                break
    return list(_job_rows(case, runs_of)), notes


def _command(path: Path, name: str, way: PeerSettings | None, folder: Path) -> list[str]:
    if way is None:
        here = ["--set", f"out={folder / 'runs'}", "--set", f"engine.preset={name.split()[-1]}"]
        return [sys.executable, "-m", "slipstream", "train", str(path), *here]
    settings = [way.framework, way.precision, str(way.workers), "habits" if way.habits else ""]
    return [sys.executable, "-m", "slipstream.bench.frameworks.job", str(path), *settings]


def _timed(command: list[str]) -> dict[str, Any]:
    """When each validation loss was told, and when the command was over."""
    began = time.perf_counter()
    told, text = [], []
    with subprocess.Popen(
        command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stderr is not None
        for line in process.stderr:
            text.append(line)
            found = VALIDATION.match(line)
            if found:
                told.append((time.perf_counter() - began, float(found[1])))
    if process.returncode:
        raise UserError(f"{' '.join(command[1:4])} failed: {''.join(text)[-1500:]}")
    return {"validations": told, "seconds": time.perf_counter() - began}


def _job_rows(case: Case, runs_of: dict[str, list[dict[str, Any]]]) -> Iterator[ResultRow]:
    target = max(
        min(loss for _, loss in run["validations"]) for found in runs_of.values() for run in found
    )
    for name, found in runs_of.items():
        reached = [next(at for at, loss in run["validations"] if loss <= target) for run in found]
        more = {
            "target_loss": target,
            "job_s": sorted(run["seconds"] for run in found)[len(found) // 2],
            "best_loss": min(min(loss for _, loss in run["validations"]) for run in found),
        }
        yield ResultRow(f"{case.name}, whole job", name, "s to the validation loss", reached, more)


def _jobs_table(case: Case, rows: Sequence[ResultRow]) -> ResultTable:
    auto = next(row for row in rows if row.way == AUTO)
    cells = [
        [
            row.way,
            format_spread(row),
            f"{row.more['job_s']:.1f}",
            f"{row.more['best_loss']:.4g}",
            format_ratio(row.median / auto.median),
        ]
        for row in sorted(rows, key=lambda row: -row.median)
    ]
    target = rows[0].more["target_loss"]
    return ResultTable(
        f"{case.name}: from the command to a validation loss of {target:.4g}",
        ["way", "seconds to the loss", "to the end", "best loss", "auto is faster by"],
        cells,
        "Start of Python, imports, reading, capture and validations included; the loss is the "
        "highest of the ways' best ones, so that each gets there. Slipstream's command also scores "
        "all sets and the baselines and draws the report before its end.",
    )


def _headline(rows: Sequence[ResultRow]) -> str:
    told = []
    for case in dict.fromkeys(row.case for row in rows):
        of_case = [row for row in rows if row.case == case and row.repeats]
        best = [row.median for row in of_case if row.way.startswith(AT_BEST)]
        auto = [row.median for row in of_case if row.way == AUTO]
        if best and auto:
            told.append(f"{case} {format_ratio(min(best) / auto[0])}")
    return "Beside other ways to train: over Lightning at its best " + ", ".join(told)
