"""Puts the page of a search together."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from slipstream import config as configs
from slipstream import runs
from slipstream.config import Config
from slipstream.reporting.formatting import (
    format_number,
    format_value,
    get_metric_name,
    shorten_names,
)
from slipstream.reporting.layouts import CLASSIFICATION, REGRESSION, MetricColumn, ReportLayout
from slipstream.reporting.plots import search as draw
from slipstream.reporting.plots.style import COLOURS, FAINT
from slipstream.reporting.template import render_page, write_report
from slipstream.reporting.wording import (
    describe_pruning,
    describe_search,
    describe_search_verdict,
    get_chosen,
)
from slipstream.runs import Run

RETRAINED = ("best", "default")
"""Runs below retrained/"""

OVER_SEEDS = REGRESSION._replace(
    compact=tuple(c for c in REGRESSION.compact if c.key != "max_error")
)
"""With their deviations the figures need the room of one column"""


def write_search_report(run: Run, to: Path) -> Path:
    """Draw the page of a search."""
    summary = runs.read_json(run.folder / "metrics.json")
    trials = runs.read_json(run.folder / "trials.json")
    config = configs.load(run.folder / "config.toml")
    tune = config.tune
    page = render_page(
        "search.html",
        summary=summary,
        tune=tune,
        verdict=describe_search_verdict(summary),
        good=(summary["comparison"] or {}).get("verdict") in ("better", "default failed")
        and not summary["test"]["best"]["beaten_by"],
        told=list(describe_search(summary)),
        pruning=describe_pruning(summary, epochs(trials, config)),
        gain=_gain(summary),
        names=shorten_names(summary["space"]),
        chosen=get_chosen(summary),
        trials=ranked(trials),
        setting=format_value,
        tested=tested(summary),
        shown=_shown(summary["test"]),
        metric_name=get_metric_name,
        reports=[name for name in RETRAINED if _is_there(run, name)],
        journal=run.folder / "study.log" if (run.folder / "study.log").exists() else None,
        drawn=draw.draw_all(
            summary,
            trials,
            metric=summary["metric"],
            curves="fold" if tune.pruner == "wilcoxon" else "epoch",
        ),
        best_toml=(run.folder / "best.toml").read_text(encoding="utf-8"),
        config=(run.folder / "config.toml").read_text(encoding="utf-8"),
    )
    return write_report(page, of=run.folder, to=to)


def _is_there(run: Run, name: str) -> bool:
    """Whether one of the runs below retrained/ came to its end, and so has a report."""
    return (run.folder / "retrained" / name / "metrics.json").exists()


def _gain(summary: Mapping[str, Any]) -> str:
    """In per cent, where it was found out."""
    found = summary["comparison"]
    if not found or found["gain_percent"] is None:
        return "–"
    return f"{-found['gain_percent']:+.0f} %"


def epochs(trials: Sequence[Mapping[str, Any]], config: Config) -> tuple[float, float]:
    """Epochs that trials trained, and would have if none had been ended early."""
    ran = [one for one in trials if one.get("epochs")]
    planned = [one["params"].get("train.epochs", config.train.epochs) for one in ran]
    return sum(one["epochs"] for one in ran), float(sum(planned))


def ranked(trials: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The best first; those that did not run in full last, in the order they were drawn."""

    def key(one: Mapping[str, Any]) -> tuple[float, int]:
        return one["value"] if one["state"] == "finished" else math.inf, one["trial"]

    return sorted(trials, key=key)


def tested(summary: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The chosen settings, the defaults and the baselines on the test set, as cells of a table."""
    found, shown = summary["test"], _shown(summary["test"])
    if shown is None:
        return []
    rows = []
    for name, what in (("best", "the chosen settings"), ("default", "without a search")):
        cells = [_over_seeds(column, found[name]) for column in shown.compact]
        if failed := found[name].get("failed"):
            what = f"{what}: {failed}"
        colour = COLOURS["model"] if name == "best" else FAINT
        rows.append({"name": name, "what": what, "cells": cells, "colour": colour})
    for name, beside in tested_one(found)["baselines"].items():
        if beside:
            cells = [format_number(column.read(beside)) for column in shown.compact]
            rows.append(
                {"name": name, "what": beside["what"], "cells": cells, "colour": COLOURS[name]}
            )
    return rows


def tested_one(tested: Mapping[str, Any]) -> Mapping[str, Any]:
    """The chosen settings' test run, or the default's where only that one has a model; nothing
    where neither has."""
    with_model = [tested[name] for name in RETRAINED if tested.get(name, {}).get("metrics")]
    return with_model[0] if with_model else {}


def _shown(tested: Mapping[str, Any]) -> ReportLayout | None:
    """By the task, which scaled errors tell: classes have none."""
    one = tested_one(tested)
    return (OVER_SEEDS if one["scaled"] else CLASSIFICATION) if one else None


def _over_seeds(column: MetricColumn, tested: Mapping[str, Any]) -> str:
    """Mean and deviation over the seeds, as far as they are known: version 0.1 has scaled errors of
    the best one alone."""
    if tested.get("failed"):
        return "–"
    spread = tested.get({"metrics": "spread", "scaled": "scaled_spread"}[column.section])
    if not spread:
        return format_number(column.read(tested))
    one = spread[column.key]
    return f"{format_number(one['mean'])} ± {format_number(one['sd'], figures=2)}"
