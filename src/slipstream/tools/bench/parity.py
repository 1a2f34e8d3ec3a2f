"""Tests whether speed costs accuracy: the naive loop and auto, seed by seed, on the same windows.

Both start from the same weights and see the same batches, so the two results of a seed form a pair,
and the test judges their difference.
"""

import math
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from slipstream import runs
from slipstream.base import machine
from slipstream.base.errors import UserError
from slipstream.base.statistics import compute_t_interval
from slipstream.config import Config, Engine, replace_settings
from slipstream.engine import loop
from slipstream.engine.planning import TrainingWorkload, build_by_rules, choose_plan
from slipstream.tools.bench.cases import Case, get_preset
from slipstream.tools.bench.results import (
    BenchResult,
    ProgressCallback,
    ResultRow,
    ResultTable,
    TimeBudget,
    format_percent,
)

PRESETS = ("baseline", "auto")
MARGIN = 0.005
"""The largest accepted growth of the error, as a share"""
MIN_SEEDS = 3
METRICS = {"mse": "RMSE", "mae": "MAE"}


class ParityVerdict(NamedTuple):
    conclusion: str
    difference: float
    """Mean over the seeds, as a share; above 0 is worse"""
    low: float
    high: float

    def to_dict(self) -> dict[str, Any]:
        return dict(zip(("said", "difference", "low", "high"), self, strict=True))


def judge_difference(
    before: Sequence[float], after: Sequence[float], *, margin: float
) -> ParityVerdict:
    """Say whether errors grew: compare the 95 % interval of the mean difference with the margin."""
    shares = [(new - old) / old for old, new in zip(before, after, strict=True)]
    interval = compute_t_interval(shares)
    if interval.high <= margin:
        conclusion = "no loss shown"
    elif interval.low > 0:
        conclusion = "loss shown"
    else:
        conclusion = "too noisy, use more seeds"
    return ParityVerdict(conclusion, *interval)


CaseParity = tuple[list[ResultRow], ParityVerdict, int]
"""The runs of one case, both presets over all seeds; their verdict; and how many epochs they had"""


def measure_parity(
    cases: Sequence[Case], *, seeds: int, minutes: float, margin: float, watch: ProgressCallback
) -> BenchResult:
    """Train both presets with every seed and compare their best validation metrics."""
    if seeds < MIN_SEEDS:
        raise UserError(f"--seeds is {seeds}; an interval takes at least {MIN_SEEDS}")
    budget = TimeBudget(minutes)
    measured = {}
    for number, case in enumerate(cases):
        epochs = _count_epochs(case, seeds, budget.left_s / (len(cases) - number), watch)
        measured[case.name] = _measure_case(case, range(seeds), epochs, margin, budget, watch)
    verdicts = {name: verdict for name, (_, verdict, _) in measured.items()}
    conclusions = [f"{name} {verdict.conclusion}" for name, verdict in verdicts.items()]
    return BenchResult(
        kind="parity",
        headline=f"Accuracy of auto compared with the naive loop: {', '.join(conclusions)}",
        rows=[row for rows, _, _ in measured.values() for row in rows],
        tables=[_build_table(case, *measured[case.name][:2], margin) for case in cases],
        settings={"seeds": seeds, "minutes": minutes, "margin": margin}
        | {"cases": {case.name: case.settings for case in cases}}
        | {"verdicts": {name: verdict.to_dict() for name, verdict in verdicts.items()}},
        seconds=budget.spent_s,
        notes=[
            f"{case.name}: {epochs} of its {case.config.train.epochs} epochs, "
            f"to keep to {minutes:g} minutes"
            for case, (_, _, epochs) in zip(cases, measured.values(), strict=True)
            if epochs < case.config.train.epochs
        ],
    )


def _measure_case(
    case: Case,
    seeds: Sequence[int],
    epochs: int,
    margin: float,
    budget: TimeBudget,
    watch: ProgressCallback,
) -> CaseParity:
    errors: dict[str, list[float]] = {preset: [] for preset in PRESETS}
    precision: dict[str, str] = {}
    for seed in seeds:
        for preset in PRESETS:
            watch(f"{case.name}: seed {seed}, {preset}", budget.share)
            error, precision[preset] = _train(case, preset, seed, epochs)
            errors[preset].append(error)
    loss = case.config.train.loss
    unit = f"validation {METRICS.get(loss, f'{loss} loss')}, scaled"
    extra = {"epochs": epochs, "windows": epochs * case.dataset.num_windows["train"]}
    rows = [
        ResultRow(case.name, preset, unit, errors[preset], extra | {"precision": precision[preset]})
        for preset in PRESETS
    ]
    verdict = judge_difference(errors["baseline"], errors["auto"], margin=margin)
    return rows, verdict, epochs


def _make_config(case: Case, preset: str, *, seed: int, epochs: int) -> Config:
    train = {"epochs": epochs, "patience": "off", "minutes": None}
    config = replace_settings(case.config, train=train)
    device = case.config.engine.device
    settings = get_preset(preset, on_gpu=machine.choose_device(device).type == "cuda")
    engine = Engine(**settings, device=device, monitor=False)
    return config.model_copy(update={"seed": seed, "engine": engine})


def _count_epochs(case: Case, seeds: int, share_s: float, watch: ProgressCallback) -> int:
    """Return how many epochs fit into the time, for all seeds of both presets."""
    requested = case.config.train.epochs
    epoch_s = 0.0
    for preset in PRESETS:
        watch(f"{case.name}: how long {preset} takes", 0.0)
        trial = TrainingWorkload(_make_config(case, preset, seed=0, epochs=requested), case.dataset)
        try:
            trial.measure_ms_per_step(1)
            epoch_s += trial.measure_ms_per_step(min(10, trial.num_steps)) / 1e3 * trial.num_steps
        finally:
            trial.close()
    validation = 1 + case.dataset.num_windows["val"] / case.dataset.num_windows["train"]
    all_s = seeds * epoch_s * validation
    fits = int(0.8 * share_s / all_s)
    if not fits:
        raise UserError(
            f"{case.name}: {seeds} seeds of a single epoch each would take some "
            f"{all_s / 48:.1f} minutes; give more --minutes"
        )
    return min(requested, fits)


def _train(case: Case, preset: str, seed: int, epochs: int) -> tuple[float, str]:
    """Train once; return the best validation metric and the precision."""
    config = _make_config(case, preset, seed=seed, epochs=epochs)
    with tempfile.TemporaryDirectory() as out:
        task, chosen = build_by_rules(config, case.dataset)
        task = replace(task, run=runs.create_run("parity", out=out))
        chosen = choose_plan(task, chosen)
        with chosen.flags():
            fit = loop.fit_single(task, chosen)
    best = fit.lanes[0].progress.best_loss
    return math.sqrt(best) if config.train.loss == "mse" else best, fit.plan.precision


def _build_table(
    case: Case, rows: list[ResultRow], verdict: ParityVerdict, margin: float
) -> ResultTable:
    naive, auto = rows
    pairs = zip(naive.repeats, auto.repeats, strict=True)
    cells = [
        [str(seed), f"{old:.5g}", f"{new:.5g}", format_percent(new / old - 1)]
        for seed, (old, new) in enumerate(pairs)
    ]
    description = case.description[0].upper() + case.description[1:]
    means = [statistics.mean(row.repeats) for row in rows]
    cells.append(["mean", f"{means[0]:.5g}", f"{means[1]:.5g}", format_percent(verdict.difference)])
    naive_heading = f"naive loop ({naive.extra['precision']}), {naive.unit}"
    return ResultTable(
        f"{case.name}: {verdict.conclusion}",
        ["seed", naive_heading, f"auto ({auto.extra['precision']})", "difference"],
        cells,
        f"The mean difference lies between {format_percent(verdict.low)} and "
        f"{format_percent(verdict.high)} (95 % interval over {len(naive.repeats)} seeds; above "
        f"0 is worse); the margin is {100 * margin:g} %. Every run saw "
        f"{naive.extra['windows']:,} windows. {description}.",
    )
