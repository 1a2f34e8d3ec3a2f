"""Writes the report of a search."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from slipstream import config as configs
from slipstream import runs
from slipstream.config import Config
from slipstream.reporting import wording
from slipstream.reporting.formatting import (
    CLASSIFICATION,
    REGRESSION,
    MetricColumn,
    ReportLayout,
    format_number,
    format_value,
    get_metric_name,
    shorten_names,
)
from slipstream.reporting.plots import search as plots
from slipstream.reporting.plots.chart import FAINT, MODEL, get_colour
from slipstream.reporting.template import find_date, render_page, write_report
from slipstream.runs import Run

RETRAINED = ("best", "default")
"""Runs in retrained/"""
REGRESSION_OVER_SEEDS = REGRESSION._replace(
    compact=tuple(column for column in REGRESSION.compact if column.key != "max_error")
)
"""One column less, since the deviations need space"""


def write_search_report(run: Run, to: Path) -> Path:
    """Write the report of a search to a file."""
    summary = runs.read_json(run.folder / "metrics.json")
    trials = runs.read_json(run.folder / "trials.json")
    config = configs.load(run.folder / "config.toml")
    journal, comparison = run.folder / "study.log", summary["comparison"] or {}
    gain, retrained = comparison.get("gain_percent"), run.folder / "retrained"
    unit = "fold" if config.tune.pruner == "wilcoxon" else "epoch"
    page = render_page(
        "search.html",
        summary=summary,
        date=find_date(run.folder, summary),
        tune=config.tune,
        verdict=wording.describe_search_verdict(summary),
        outcome=wording.judge_search(summary),
        notes=list(wording.describe_search(summary)),
        total_s=wording.get_total_s(summary),
        states=wording.list_states(summary["trials"]),
        pruning=wording.describe_pruning(summary, count_epochs(trials, config)),
        gain="–" if gain is None else f"{-gain:+.0f} %",
        names=shorten_names(summary["space"]),
        chosen=wording.get_chosen(summary),
        trials=rank_trials(trials),
        setting=format_value,
        tests=build_test_rows(summary),
        layout=_choose_layout(summary["test"]),
        metric_name=get_metric_name,
        reports=[name for name in RETRAINED if (retrained / name / "metrics.json").exists()],
        journal=journal if journal.exists() else None,
        plots=plots.draw_all(summary, trials, metric=summary["metric"], curves=unit),
        best_toml=(run.folder / "best.toml").read_text(encoding="utf-8"),
        config=(run.folder / "config.toml").read_text(encoding="utf-8"),
    )
    return write_report(page, of=run.folder, to=to)


def count_epochs(trials: Sequence[Mapping[str, Any]], config: Config) -> tuple[float, float]:
    """Return the epochs that pruned trials did not train, and those that all trials were to."""
    planned = {
        trial["trial"]: trial["params"].get("train.epochs", config.train.epochs) for trial in trials
    }
    pruned = [trial for trial in trials if trial["state"] == "pruned" and "epochs" in trial]
    saved = sum(planned[trial["trial"]] - trial["epochs"] for trial in pruned)
    return float(saved), float(sum(planned.values()))


def rank_trials(trials: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Sort the trials: finished ones by score, then the others by number."""

    def get_rank(trial: Mapping[str, Any]) -> tuple[float, int]:
        return trial["value"] if trial["state"] == "finished" else math.inf, trial["trial"]

    return sorted(trials, key=get_rank)


def build_test_rows(summary: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Build the table of test errors: the chosen settings, the defaults and the baselines."""
    tests = summary["test"]
    layout = _choose_layout(tests)
    if layout is None:
        return []
    rows = []
    for name, what in (("best", "the chosen settings"), ("default", "without a search")):
        if name not in tests:  # `tune.minutes` left no time to retrain it
            continue
        cells = [_format_over_seeds(column, tests[name]) for column in layout.compact]
        if failed := tests[name].get("failed"):
            what = f"{what}: {failed}"
        colour = MODEL if name == "best" else FAINT
        rows.append({"name": name, "what": what, "cells": cells, "colour": colour})
    for name, baseline in find_test(tests)["baselines"].items():
        if baseline:
            cells = [format_number(column.read(baseline)) for column in layout.compact]
            row = {"name": name, "what": baseline["what"], "cells": cells}
            rows.append(row | {"colour": get_colour(name)})
    return rows


def find_test(tests: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the test run of the chosen settings, or else of the default; {} without a model."""
    with_model = (tests[name] for name in RETRAINED if tests.get(name, {}).get("metrics"))
    return next(with_model, {})


def _choose_layout(tests: Mapping[str, Any]) -> ReportLayout | None:
    """Choose the columns by the task: only regression has scaled errors."""
    test = find_test(tests)
    return (REGRESSION_OVER_SEEDS if test["scaled"] else CLASSIFICATION) if test else None


def _format_over_seeds(column: MetricColumn, test: Mapping[str, Any]) -> str:
    """Format mean and deviation over the seeds; version 0.1 has one value for scaled errors."""
    if test.get("failed"):
        return "–"
    spread = test.get({"metrics": "spread", "scaled": "scaled_spread"}[column.section])
    if not spread:
        return format_number(column.read(test))
    value = spread[column.key]
    return f"{format_number(value['mean'])} ± {format_number(value['sd'], figures=2)}"
