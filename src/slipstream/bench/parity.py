"""Shows that speed cost no accuracy: the naive loop and auto, seed by seed, on the same windows.

Both start from the same weights and see the same batches, so a seed's two results belong together,
and it is their difference that is judged.
"""

from __future__ import annotations

import math
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from slipstream import runs
from slipstream.autotune.measure import choose_plan
from slipstream.autotune.workload import TrainingWorkload, prepare_task
from slipstream.bench.cases import Case
from slipstream.bench.results import (
    BenchResult,
    ProgressCallback,
    ResultRow,
    ResultTable,
    TimeBudget,
    format_percent,
)
from slipstream.config import Config, Engine, replace_settings
from slipstream.engine import loop
from slipstream.errors import UserError
from slipstream.stats import compute_t_interval

WAYS = ("baseline", "auto")
MARGIN = 0.005
LEAST_SEEDS = 3


class ParityVerdict(NamedTuple):
    said: str
    difference: float
    """Mean over the seeds, as a share; above 0 is worse"""
    low: float
    high: float


def judge_difference(
    before: Sequence[float], after: Sequence[float], *, margin: float
) -> ParityVerdict:
    """Say whether errors grew: compare the 95 % interval of the mean difference with the margin."""
    shares = [(new - old) / old for old, new in zip(before, after, strict=True)]
    interval = compute_t_interval(shares)
    if interval.high <= margin:
        said = "no loss shown"
    elif interval.low > 0:
        said = "loss shown"
    else:
        said = "too noisy, use more seeds"
    return ParityVerdict(said, *interval)


def measure_parity(
    cases: Sequence[Case], *, seeds: int, minutes: float, margin: float, watch: ProgressCallback
) -> BenchResult:
    if seeds < LEAST_SEEDS:
        raise UserError(f"--seeds is {seeds}; an interval takes at least {LEAST_SEEDS}")
    budget = TimeBudget(minutes)
    rows: list[ResultRow] = []
    tables, told, notes, verdicts = [], [], [], {}
    for number, case in enumerate(cases):
        share_s = budget.left_s / (len(cases) - number)
        epochs = _affordable(case, seeds, share_s, watch)
        if epochs < case.config.train.epochs:
            notes.append(
                f"{case.name}: {epochs} of its {case.config.train.epochs} epochs, to keep to "
                f"{minutes:g} minutes"
            )
        found: dict[str, list[float]] = {way: [] for way in WAYS}
        precision: dict[str, str] = {}
        for seed in range(seeds):
            for way in WAYS:
                watch(f"{case.name}: seed {seed}, {way}", budget.share)
                reached, precision[way] = _trained(case, way, seed, epochs)
                found[way].append(reached)
        verdict = judge_difference(found["baseline"], found["auto"], margin=margin)
        verdicts[case.name] = verdict
        unit = f"validation {get_metric_name(case.config)}, scaled"
        windows = epochs * case.dataset.num_windows["train"]
        more = {"epochs": epochs, "windows": windows}
        rows += [
            ResultRow(case.name, way, unit, found[way], more | {"precision": precision[way]})
            for way in WAYS
        ]
        tables.append(_table(case, rows[-2:], verdict, margin))
        told.append(f"{case.name} {verdict.said}")
    return BenchResult(
        kind="parity",
        headline=f"Accuracy of auto beside the naive loop: {', '.join(told)}",
        rows=rows,
        tables=tables,
        settings={"seeds": seeds, "minutes": minutes, "margin": margin}
        | {"cases": {case.name: case.settings for case in cases}}
        | {"verdicts": {name: verdict._asdict() for name, verdict in verdicts.items()}},
        seconds=budget.spent_s,
        notes=notes,
    )


def get_metric_name(config: Config) -> str:
    return {"mse": "RMSE", "mae": "MAE"}.get(config.train.loss, f"{config.train.loss} loss")


def _of(case: Case, way: Any, *, seed: int, epochs: int) -> Config:
    config = replace_settings(
        case.config, train={"epochs": epochs, "patience": "off", "minutes": None}
    )
    engine = Engine(preset=way, device=case.config.engine.device, monitor=False)
    return config.model_copy(update={"seed": seed, "engine": engine})


def _affordable(case: Case, seeds: int, share_s: float, watch: ProgressCallback) -> int:
    """As many epochs as fit into the time, for all repeats of both ways."""
    asked = case.config.train.epochs
    epoch_s = 0.0
    for way in WAYS:
        watch(f"{case.name}: how long {way} takes", 0.0)
        trial = TrainingWorkload(_of(case, way, seed=0, epochs=asked), case.dataset)
        try:
            trial.measure_ms_per_step(1)
            epoch_s += trial.measure_ms_per_step(min(10, trial.num_steps)) / 1e3 * trial.num_steps
        finally:
            trial.close()
    validation = 1 + case.dataset.num_windows["val"] / case.dataset.num_windows["train"]
    fits = int(0.8 * share_s / (seeds * epoch_s * validation))
    if not fits:
        raise UserError(
            f"{case.name}: {seeds} seeds of a single epoch each would take some "
            f"{seeds * epoch_s * validation / 48:.1f} minutes; give more --minutes"
        )
    return min(asked, fits)


def _trained(case: Case, way: str, seed: int, epochs: int) -> tuple[float, str]:
    """The best validation metric of one run, and the precision that it ran in."""
    config = _of(case, way, seed=seed, epochs=epochs)
    with tempfile.TemporaryDirectory() as out:
        task, chosen = prepare_task(config, case.dataset)
        task = replace(task, run=runs.create_run("parity", out=out))
        chosen = choose_plan(task, chosen)
        with chosen.flags():
            fit = loop.fit(task, chosen)
    best = fit.progress.best_loss
    return math.sqrt(best) if config.train.loss == "mse" else best, fit.plan.precision


def _table(
    case: Case, rows: Sequence[ResultRow], verdict: ParityVerdict, margin: float
) -> ResultTable:
    naive, auto = rows
    pairs = zip(naive.repeats, auto.repeats, strict=True)
    cells = [
        [str(seed), f"{old:.5g}", f"{new:.5g}", format_percent(new / old - 1)]
        for seed, (old, new) in enumerate(pairs)
    ]
    means = [statistics.mean(row.repeats) for row in rows]
    cells.append(["mean", f"{means[0]:.5g}", f"{means[1]:.5g}", format_percent(verdict.difference)])
    return ResultTable(
        f"{case.name}: {verdict.said}",
        [
            "seed",
            f"naive loop ({naive.more['precision']}), {naive.unit}",
            f"auto ({auto.more['precision']})",
            "difference",
        ],
        cells,
        f"The mean difference lies between {format_percent(verdict.low)} and "
        f"{format_percent(verdict.high)} (95 % interval over {len(naive.repeats)} seeds; above "
        f"0 is worse); the margin is {100 * margin:g} %. Every run saw "
        f"{naive.more['windows']:,} windows. {case.what[0].upper()}{case.what[1:]}.",
    )
