"""Times whole jobs as commands of their own, start-up included, to a validation loss."""

import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from slipstream import config as configs
from slipstream.base import machine
from slipstream.base.errors import UserError
from slipstream.config import replace_settings
from slipstream.tools.bench.cases import Case, get_preset
from slipstream.tools.bench.frameworks import lightning_loop
from slipstream.tools.bench.frameworks.workload import PeerSettings
from slipstream.tools.bench.results import (
    ProgressCallback,
    ResultRow,
    ResultTable,
    TimeBudget,
    format_ratio,
    format_spread,
)

AUTO, CLASSIC, BASELINE = (f"Slipstream, {preset}" for preset in ("auto", "classic", "baseline"))
"""Slipstream by itself, and with its presets for the usual advice and the naive loop"""
PLAIN = "plain loop"
AT_BEST = "Lightning at its best"
USUAL = "Lightning as people run it"
STARTUP_S = 6.0
"""How long a command takes beside its steps"""
VALIDATION = re.compile(r"^epoch \d+: .*validation ([0-9.e+-]+)")
Variants = dict[str, PeerSettings | None]
"""By name; None is Slipstream"""


def list_peers(*, on_gpu: bool) -> Iterator[PeerSettings]:
    """Yield the settings of the other frameworks."""
    precisions = ("tf32", "fp16", "bf16") if on_gpu else ("fp32",)
    counts = (0, 4, 8) if on_gpu else (0, 2)
    usual = "fp16" if on_gpu else "fp32"
    for workers in counts[:2]:
        yield PeerSettings(f"{PLAIN}, {usual}, {workers} workers", "plain", usual, workers)
    if not lightning_loop.has_lightning():
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

    `rows` are the timed steps, by which each framework's fastest variant is chosen. Notes come
    along.
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
    return list(_build_rows(case, jobs)), notes


def _choose_variants(case: Case, timed: Sequence[ResultRow]) -> Variants:
    """Choose our presets, and of each peer the variant with the fastest steps."""
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
    return [sys.executable, "-m", "slipstream.tools.bench.frameworks.job", str(path), *arguments]


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


def _build_rows(case: Case, jobs: dict[str, list[TimedJob]]) -> Iterator[ResultRow]:
    target = max(job.best_loss for timed in jobs.values() for job in timed)
    for name, timed in jobs.items():
        reached = [next(at for at, loss in job.validations if loss <= target) for job in timed]
        job_s = sorted(job.seconds for job in timed)[len(timed) // 2]
        best = min(job.best_loss for job in timed)
        extra = {"target_loss": target, "job_s": job_s, "best_loss": best}
        yield ResultRow(f"{case.name}, whole job", name, "s to the validation loss", reached, extra)


def build_table(case: Case, rows: Sequence[ResultRow]) -> ResultTable:
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
