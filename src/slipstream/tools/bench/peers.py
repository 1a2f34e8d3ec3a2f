"""Compares the same work under a plain PyTorch loop, Lightning and Slipstream.

All have the same network, first weights, batches, optimizer and loss; the comparison of the first
losses shows that it is the same work. First steps are timed, then whole jobs as commands of their
own, start-up included, to a validation loss.
"""

import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from slipstream import config as configs
from slipstream.base import machine
from slipstream.base.errors import UserError
from slipstream.config import Engine, replace_settings
from slipstream.engine.planning import TrainingWorkload
from slipstream.tools.bench.cases import Case, get_preset
from slipstream.tools.bench.frameworks import (
    PeerSettings,
    StepTimings,
    has_lightning,
    time_lightning_steps,
    time_plain_steps,
)
from slipstream.tools.bench.results import (
    BenchResult,
    ProgressCallback,
    ResultRow,
    ResultTable,
    TimeBudget,
    format_ratio,
    format_spread,
)

AUTO, CLASSIC, BASELINE = (f"Slipstream, {preset}" for preset in ("auto", "classic", "baseline"))
"""Slipstream's own choice, and its presets for the usual advice and the naive loop"""
PLAIN = "plain loop"
AT_BEST = "Lightning at its best"
USUAL = "Lightning as people run it"
STARTUP_S = 6.0
"""How long a command takes beside its steps"""
VALIDATION = re.compile(r"^epoch \d+: .*validation ([0-9.e+-]+)")
Variants = dict[str, PeerSettings | None]
"""Settings of each framework by its name; None for Slipstream"""
ROUNDS, REPEATS = 2, 3
FIRST_STEPS = 3
"""Losses that are compared; later ones drift apart by rounding alone"""
WARM_S = 0.1
STEPS_SHARE = 0.4
"""The share of the time for steps, where whole jobs follow"""
SAME_LOSS = 0.02
"""The relative difference that first losses may have: kernels round differently"""


def compare_with_peers(
    cases: Sequence[Case],
    jobs: Sequence[Case],
    *,
    minutes: float,
    watch: ProgressCallback,
    max_rounds: int = 5,
) -> BenchResult:
    """Time steps of every case, then every whole job, as far as the time allows."""
    budget = TimeBudget(minutes)
    notes = []
    if not has_lightning():
        notes.append("Lightning is not installed; pip install 'slipstream[lightning]' adds it")
    rows: list[ResultRow] = []
    tables: list[ResultTable] = []
    steps_until = budget.total_s * (STEPS_SHARE if jobs else 1.0)
    for number, case in enumerate(cases):
        share_s = (steps_until - budget.spent_s) / (len(cases) - number)
        timed = _measure_steps(make_comparable(case), share_s, budget, watch)
        rows += timed
        tables.append(_build_table(case, timed))
    for number, case in enumerate(jobs):
        share_s = budget.left_s / (len(jobs) - number)
        timed, more = measure_jobs(case, rows, share_s, budget, watch, max_rounds)
        notes += more
        rows += timed
        if timed:
            tables.append(_build_job_table(case, timed))
    return BenchResult(
        kind="peers",
        headline=_write_headline(rows),
        rows=rows,
        tables=tables,
        settings={"minutes": minutes, "rounds": ROUNDS, "stretches": REPEATS}
        | {"cases": {c.name: c.settings for c in [*cases, *jobs]}},
        seconds=budget.spent_s,
        notes=notes,
    )


def make_comparable(case: Case) -> Case:
    """Restrict a case to what every framework does in the same way: no dropout, one pass per step,
    a constant learning rate."""
    train: dict[str, Any] = {"schedule": "constant", "warmup_epochs": 0.0, "accumulate": 1}
    train["batch"] = case.batch * case.config.train.accumulate
    return replace(case, config=replace_settings(case.config, model={"dropout": 0.0}, train=train))


def _measure_steps(
    case: Case, share_s: float, budget: TimeBudget, watch: ProgressCallback
) -> list[ResultRow]:
    device = machine.choose_device(case.config.engine.device)
    on_gpu = device.type == "cuda"
    machine.warm_up(device)
    peers = {peer.name: peer for peer in list_peers(on_gpu=on_gpu)}
    precisions = ("tf32", "fp16", "bf16") if on_gpu else ()
    variants = [BASELINE, CLASSIC, *(f"Slipstream, {precision}" for precision in precisions), AUTO]
    until, names = budget.spent_s + share_s, [*peers, *variants]
    times: dict[str, list[float]] = {name: [] for name in names}
    first: dict[str, StepTimings] = {}
    problems: dict[str, str] = {}
    reference = _time_ours(case, 1, precision="fp32", plan="off")
    each_s = share_s / ROUNDS / len(names)
    for turn in range(ROUNDS):
        for name in names:
            if name in problems or (turn and budget.spent_s > until):
                continue
            watch(f"{case.name}: {name}", budget.share)
            # half of a variant's time goes into repeats, the rest into its start
            step_s = min(times[name] or reference.times) / 1e3
            steps = max(2, min(60, int(0.5 * each_s / REPEATS / step_s)))
            try:
                if name in peers:
                    timings = _time_peer(case, peers[name], steps)
                else:
                    timings = _time_ours(case, steps, **_get_engine_settings(name, case))
            except RuntimeError as error:
                problems[name] = "failed: " + str(error).strip().split("\n", 1)[0]
                continue
            times[name] += timings.times
            first.setdefault(name, timings)
    return list(_build_rows(case, times, first, problems, reference.losses))


def _time_peer(case: Case, peer: PeerSettings, steps: int) -> StepTimings:
    is_plain = peer.framework == "plain"
    time_steps = time_plain_steps if is_plain else time_lightning_steps
    warm_up = max(FIRST_STEPS, 2 + 2 * peer.workers)
    return time_steps(
        case.config, case.dataset, peer, warm_up=warm_up, repeats=REPEATS, steps=steps
    )


def _get_engine_settings(name: str, case: Case) -> dict[str, Any]:
    """Return the engine settings of one of Slipstream's variants."""
    value = name.partition(", ")[2]
    if name not in (CLASSIC, BASELINE):
        return {"precision": value, "plan": "measure"}
    on_gpu = machine.choose_device(case.config.engine.device).type == "cuda"
    return get_preset(value, on_gpu=on_gpu)


def _time_ours(case: Case, steps: int, **settings: Any) -> StepTimings:
    engine = Engine(device=case.config.engine.device, **settings)
    config = case.config.model_copy(update={"engine": engine})
    workload = TrainingWorkload(config, case.dataset, first=FIRST_STEPS)
    try:
        warm_s = WARM_S if workload.device.type == "cuda" else 0.0
        times = [workload.measure_ms_per_step(steps, warm_s=warm_s) for _ in range(REPEATS)]
        return StepTimings(times, workload.first_losses, workload.plan.precision)
    finally:
        workload.close()


def _build_rows(
    case: Case,
    times: dict[str, list[float]],
    first: dict[str, StepTimings],
    problems: dict[str, str],
    fp32_losses: list[float],
) -> Iterator[ResultRow]:
    own_losses = {"fp32": fp32_losses}
    for name, timings in first.items():
        if name == f"Slipstream, {timings.precision}":
            own_losses[timings.precision] = timings.losses
    for name, repeats in times.items():
        if not repeats:
            why = problems.get(name, "left out: give more --minutes")
            yield ResultRow(case.name, name, "ms per step", problem=why)
            continue
        row = ResultRow(case.name, name, "ms per step", repeats)
        speed = {"windows_per_s": 1e3 * case.batch / row.median}
        yield replace(row, extra=speed | compare_losses(name, first[name], own_losses))


def compare_losses(
    name: str, timings: StepTimings, own_losses: dict[str, list[float]]
) -> dict[str, Any]:
    """Compare a variant's first losses with Slipstream's in the same precision, or in fp32.

    Slipstream's own variants are compared with its fp32 losses, and so is a precision in which
    Slipstream failed. Other tools in fp16 are compared by the loss before any update: their loss
    scale begins so high that the first updates may overflow and are skipped, after which the losses
    differ.
    """
    precision, losses = timings.precision, timings.losses[:FIRST_STEPS]
    against = (
        precision if name != f"Slipstream, {precision}" and precision in own_losses else "fp32"
    )
    count = 1 if precision == "fp16" and not name.startswith("Slipstream, ") else FIRST_STEPS
    expected = own_losses[against][:count]
    apart = max(abs(a - b) / abs(b) for a, b in zip(losses, expected, strict=False))
    return {
        "precision": precision,
        "first_losses": losses,
        "held_against": expected,
        "losses_apart": apart,
        "same_work": apart <= SAME_LOSS,
    }


def _build_table(case: Case, rows: Sequence[ResultRow]) -> ResultTable:
    auto = next(row for row in rows if row.variant == AUTO)
    cells = []
    for row in sorted(rows, key=lambda r: -r.median if r.repeats else -1e9):
        if not row.repeats:
            cells.append([row.variant, row.problem, "", "", ""])
            continue
        apart = f"{100 * row.extra['losses_apart']:.2g} %"
        apart += "" if row.extra["same_work"] else ": not the same work"
        speed = f"{row.extra['windows_per_s']:,.0f}"
        gain = format_ratio(row.median / auto.median) if auto.repeats else "–"
        cells.append([row.variant, format_spread(row), speed, gain, apart])
    note = (
        f"The first {FIRST_STEPS} losses, from the same weights and batches, are compared with "
        "Slipstream's in the same precision, and those with its fp32"
    )
    if any(row.extra.get("precision") == "fp16" for row in rows):
        note += "; of other tools in fp16 only the first loss: they skip updates that overflow"
    headings = ["variant", "ms per step", "windows/s", "auto is faster by", "first losses apart"]
    return ResultTable(f"{case.name}: {case.description}", headings, cells, f"{note}.")


def _write_headline(rows: Sequence[ResultRow]) -> str:
    gains = []
    for case in dict.fromkeys(row.case for row in rows):
        timed = [row for row in rows if row.case == case and row.repeats]
        best = [row.median for row in timed if row.variant.startswith(AT_BEST)]
        auto = [row.median for row in timed if row.variant == AUTO]
        if best and auto:
            gains.append(f"{case} {format_ratio(min(best) / auto[0])}")
    return "Compared with other ways to train: over Lightning at its best " + ", ".join(gains)


def list_peers(*, on_gpu: bool) -> Iterator[PeerSettings]:
    """Yield the settings of the other frameworks."""
    precisions = ("tf32", "fp16", "bf16") if on_gpu else ("fp32",)
    counts = (0, 4, 8) if on_gpu else (0, 2)
    usual = "fp16" if on_gpu else "fp32"
    for workers in counts[:2]:
        yield PeerSettings(f"{PLAIN}, {usual}, {workers} workers", "plain", usual, workers)
    if not has_lightning():
        return
    yield PeerSettings(f"{USUAL}, {usual}", "lightning", usual, counts[1], habits=True)
    for precision in precisions:
        for workers in counts:
            name = f"{AT_BEST}, {precision}, {workers} workers"
            yield PeerSettings(name, "lightning", precision, workers)
    if not on_gpu and machine.count_available_cores() > 1:  # faster where the cores are busy
        name = f"{AT_BEST}, fp32, 0 workers, 1 thread"
        yield PeerSettings(name, "lightning", "fp32", 0, threads=1)


class TimedJob(NamedTuple):
    validations: list[tuple[float, float]]
    """Seconds since the start, and validation loss"""
    seconds: float
    best_loss: float


def measure_jobs(
    case: Case,
    rows: Sequence[ResultRow],
    share_s: float,
    budget: TimeBudget,
    watch: ProgressCallback,
    max_rounds: int,
) -> tuple[list[ResultRow], list[str]]:
    """Time whole commands as often as possible; cut the epochs where even one round does not fit.

    `rows` are the timed steps, which decide each framework's fastest variant. Return the rows of
    the jobs, and notes.
    """
    timed = [row for row in rows if row.case == case.name and row.repeats]
    variants = _choose_variants(case, timed)
    epochs, fits = case.config.train.epochs, _count_epochs(case, variants, timed, share_s)
    if fits < 1:
        return [], [f"{case.name}: no time for whole jobs; give more --minutes"]
    config, notes = case.config, []
    if fits < epochs:
        notes.append(f"{case.name}: whole jobs of {fits} of its {epochs} epochs")
        config = replace_settings(config, train={"epochs": fits})
    until = budget.spent_s + share_s
    jobs: dict[str, list[TimedJob]] = {name: [] for name in variants}
    with tempfile.TemporaryDirectory() as name:
        folder, longest = Path(name), 0.0
        path = folder / "job.toml"
        path.write_text(configs.to_toml(config, only_set=True), encoding="utf-8")
        while not jobs[AUTO] or budget.spent_s + longest < until:
            start = time.monotonic()
            for name, peer in variants.items():
                watch(f"{case.name}: whole job, {name}", budget.share)
                jobs[name].append(_time_command(_build_command(path, name, peer, folder)))
            longest = time.monotonic() - start
            if min(map(len, jobs.values())) == max_rounds:
                break
    return list(_build_job_rows(case, jobs)), notes


def _choose_variants(case: Case, timed: Sequence[ResultRow]) -> Variants:
    """Choose Slipstream's presets, and the variant of each peer with the fastest steps."""
    on_gpu = machine.choose_device(case.config.engine.device).type == "cuda"
    peers = {peer.name: peer for peer in list_peers(on_gpu=on_gpu)}
    variants: Variants = {AUTO: None, CLASSIC: None}
    for prefix in (PLAIN, USUAL, AT_BEST):
        rows = [row for row in timed if row.variant.startswith(prefix)]
        if rows:
            best = min(rows, key=lambda row: row.median).variant
            variants[best] = peers[best]
    return variants


def _count_epochs(case: Case, variants: Variants, timed: list[ResultRow], share_s: float) -> int:
    """Return how many epochs fit into the time."""
    step_ms = {row.variant: row.median for row in timed}
    num_steps = -(-case.dataset.num_windows["train"] // case.batch)
    epoch_s = 1.2 * num_steps / 1e3 * sum(step_ms.get(name, 0.0) for name in variants)
    return int((0.9 * share_s - STARTUP_S * len(variants)) / epoch_s) if epoch_s else 0


def _build_command(path: Path, name: str, peer: PeerSettings | None, folder: Path) -> list[str]:
    if peer is None:
        on_gpu = machine.choose_device(configs.load(path).engine.device).type == "cuda"
        settings = get_preset(name.split()[-1], on_gpu=on_gpu)
        texts = [f"engine.{key}={str(value).lower()}" for key, value in settings.items()]
        options = [part for text in (f"out={folder / 'runs'}", *texts) for part in ("--set", text)]
        return [sys.executable, "-m", "slipstream", "train", str(path), *options]
    arguments = [peer.framework, peer.precision, str(peer.workers)]
    arguments += ["habits" if peer.habits else "", str(peer.threads or "")]
    return [sys.executable, "-m", "slipstream.tools.bench.frameworks", str(path), *arguments]


def _time_command(command: list[str]) -> TimedJob:
    """Return when each validation loss was printed, and when the command ended."""
    start = time.perf_counter()
    validations, lines = [], []
    pipes: dict[str, Any] = {"stderr": subprocess.PIPE, "stdout": subprocess.DEVNULL, "text": True}
    with subprocess.Popen(command, **pipes) as process:
        for line in process.stderr or ():
            lines.append(line)
            if match := VALIDATION.match(line):
                validations.append((time.perf_counter() - start, float(match[1])))
    if process.returncode:
        raise UserError(f"{' '.join(command[1:4])} failed: {''.join(lines)[-1500:]}")
    return TimedJob(validations, time.perf_counter() - start, min(loss for _, loss in validations))


def _build_job_rows(case: Case, jobs: dict[str, list[TimedJob]]) -> Iterator[ResultRow]:
    target = max(job.best_loss for timed in jobs.values() for job in timed)
    for name, timed in jobs.items():
        reached = [
            next(elapsed_s for elapsed_s, loss in job.validations if loss <= target)
            for job in timed
        ]
        job_s = sorted(job.seconds for job in timed)[len(timed) // 2]
        best = min(job.best_loss for job in timed)
        extra = {"target_loss": target, "job_s": job_s, "best_loss": best}
        yield ResultRow(f"{case.name}, whole job", name, "s to the validation loss", reached, extra)


def _build_job_table(case: Case, rows: Sequence[ResultRow]) -> ResultTable:
    auto = next(row for row in rows if row.variant == AUTO)
    cells = [
        [
            row.variant,
            format_spread(row),
            f"{row.extra['job_s']:.1f}",
            f"{row.extra['best_loss']:.4g}",
            format_ratio(row.median / auto.median),
        ]
        for row in sorted(rows, key=lambda row: -row.median)
    ]
    target = rows[0].extra["target_loss"]
    return ResultTable(
        f"{case.name}: from the command to a validation loss of {target:.4g}",
        ["variant", "seconds to the loss", "to the end", "best loss", "auto is faster by"],
        cells,
        "Start of Python, imports, reading, capture and validations included; the loss is the "
        "highest of the variants' best ones, so that each reaches it. Slipstream's command also "
        "scores all sets and the baselines and draws the report before its end.",
    )
