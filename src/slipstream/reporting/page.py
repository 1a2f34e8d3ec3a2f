"""report.html from the files of a run; pages of comparisons, inspections, probes, searches."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt
from markupsafe import Markup

from slipstream import __version__, runs
from slipstream import config as configs
from slipstream.base.errors import UserError
from slipstream.base.statistics import HIGHER_IS_BETTER
from slipstream.base.text import format_number
from slipstream.config import Config
from slipstream.config.train import upgrade_plan
from slipstream.data.predictions import PREDICTIONS, read_predictions
from slipstream.events import Epoch, Event, Log, MachineSample, Other
from slipstream.reporting import streaming, wording
from slipstream.reporting.charts import (
    FAINT,
    GREEN,
    INK,
    MODEL,
    MUTED,
    Chart,
    Scale,
    cover,
    get_colour,
    number_places,
)
from slipstream.reporting.plots import encoder, predictions, search, training
from slipstream.reporting.plots.training import draw_loss_curves, draw_timelines
from slipstream.reporting.template import find_date, render_page, write_page, write_report
from slipstream.reporting.wording import (
    CLASSIFICATION,
    FINE_TUNED,
    SCRATCH,
    MetricColumn,
    ReportLayout,
    choose_layout,
    format_value,
    get_metric_name,
    get_unit,
    shorten_names,
    sort_key,
)
from slipstream.runs import Run
from slipstream.runs.summary import (
    ProbeSummary,
    RunSummary,
    Scores,
    SearchSummary,
    SearchTest,
)

CURVES_IN = (".", "retrained/best", "fine-tuned")
"""Where a run, a search and a probe have the log of the model that they predict with"""
Table = tuple[Sequence[str], Sequence[Sequence[str]]]
"""Headings and rows"""


def write_comparison(
    path: Path, folders: Mapping[str, Path], tables: Mapping[str, Table], notes: Sequence[str]
) -> Path:
    """Write a self-contained page with the validation losses of the runs and four tables:
    metrics, differences, paired and settings."""
    curves = {name: events for name, folder in folders.items() if (events := read_epochs(folder))}
    page = render_page(
        "comparison.html",
        folders=folders,
        **tables,
        notes=notes,
        curves=draw_loss_curves(curves) if curves else None,
        missing=[name for name in folders if name not in curves],
    )
    return write_page(path, page)


def read_epochs(folder: Path) -> list[Epoch]:
    """Return the validations that a run has logged."""
    for inside in CURVES_IN:
        epochs = [
            event
            for event in runs.read_events(Run(folder / inside))
            if isinstance(event, Epoch)
            and isinstance(event.epoch, int | float)
            and isinstance(event.val_loss, int | float)  # None where it was not finite
        ]
        if epochs:
            return epochs
    return []


Floats = npt.NDArray[np.float64]
HEIGHT = 110


class Course(NamedTuple):
    """A column's values over the rows, of every stretch of `stride` rows."""

    stride: int
    low: Floats
    high: Floats
    mean: Floats


def render_inspection(result: Mapping[str, Any], courses: Mapping[str, Course]) -> str:
    """Render the page."""
    plots = {name: draw_course(course) for name, course in courses.items()}
    return render_page("inspection.html", result=result, plots=plots)


def write_inspection(path: Path, result: Mapping[str, Any], courses: Mapping[str, Course]) -> Path:
    """Write a self-contained page."""
    return write_page(path, render_inspection(result, courses))


def draw_course(course: Course) -> Markup:
    """Draw the mean over the rows, within the range of each stretch."""
    rows = (np.arange(len(course.mean)) + 0.5) * course.stride
    known = ~np.isnan(course.mean)
    x = Scale(0.0, float(max(len(course.mean) * course.stride, 1)), whole=True)
    y = cover([*course.low[known], *course.high[known]])
    chart = Chart(x, y, "row", "", HEIGHT, y_ticks=3)
    if course.stride > 1:
        chart.area(rows[known], course.low[known], course.high[known], MODEL)
    chart.line(rows, course.mean, MODEL, width=1.2)
    return chart.render()


PROBE_COLOURS = {SCRATCH: MUTED, "frozen": GREEN, FINE_TUNED: MODEL}


def write_probe_report(folder: Path, to: Path) -> Path:
    """Write the report of the probe in `folder`."""
    summary = cast(ProbeSummary, runs.read_metrics(folder, name="summary.json"))
    rows = wording.build_probe_rows(summary)
    keys = summary["ways"][SCRATCH]["metrics"]
    page = render_page(
        "probe.html",
        summary=summary,
        date=find_date(folder, summary),
        headings=wording.build_probe_headings(summary),
        rows=[row | {"colour": _get_colour(row["name"])} for row in rows],
        plots=[_draw_seeds(summary, key) for key in keys],
        config=(folder / "labels.toml").read_text(encoding="utf-8"),
        encoder=(folder / "encoder.toml").read_text(encoding="utf-8"),
    )
    return write_report(page, of=folder, to=to)


def _get_colour(name: str) -> str:
    return PROBE_COLOURS.get(name) or get_colour(name)


def _draw_seeds(summary: ProbeSummary, key: str) -> Markup:
    """Draw every seed as a dot, a line per seed across the three runs, and a bar per mean."""
    spreads = {name: way["metrics"][key] for name, way in summary["ways"].items()}
    levels = {name: metrics[key] for name, metrics in summary["baselines"].items()}
    values = [value for spread in spreads.values() for value in spread["by_seed"]]
    y = cover([*values, *levels.values()], margin=0.08)
    chart = Chart(
        number_places(list(spreads)), y, "", f"test {wording.name_metric(summary, key)}", 240
    )
    places = range(len(spreads))
    by_seed = zip(*(spread["by_seed"] for spread in spreads.values()), strict=True)
    chart.lines([(places, errors) for errors in by_seed], FAINT)
    for place, (name, spread) in enumerate(spreads.items()):
        seeds = spread["by_seed"]
        chart.dots([place] * len(seeds), seeds, _get_colour(name), size=7)
        chart.line([place - 0.2, place + 0.2], [spread["mean"]] * 2, INK, width=2.2)
    for name, level in levels.items():
        if level is not None:
            chart.hline(level, _get_colour(name), dash="6 4", label=name)
    return chart.render()


RETRAINED = ("best", "default")
"""Runs in retrained/"""


def write_search_report(run: Run, to: Path) -> Path:
    """Write the report of a search to a file."""
    summary = cast(SearchSummary, runs.read_metrics(run.folder))
    trials = runs.read_json(run.folder / "trials.json")
    config = configs.load(run.folder / "config.toml")
    journal, comparison = run.folder / "study.log", summary["comparison"]
    gain = comparison.get("gain_percent") if comparison else None
    retrained = run.folder / "retrained"
    unit = "fold" if config.tune.pruner == "wilcoxon" else "epoch"
    plots = {}  # an auto search without time for a network has no trials
    if trials:
        plots = search.draw_all(summary, trials, metric=summary["metric"], curves=unit)
    answer = _describe_answer(run, summary) if "leaderboard" in summary else {}
    page = render_page(
        "auto.html" if answer else "search.html",
        **answer,
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
        plots=plots,
        best_toml=(run.folder / "best.toml").read_text(encoding="utf-8"),
        config=(run.folder / "config.toml").read_text(encoding="utf-8"),
    )
    return write_report(page, of=run.folder, to=to)


def _describe_answer(run: Run, summary: SearchSummary) -> dict[str, Any]:
    """Return what the page of `slipstream auto` has beside that of a search: the figures at its
    top, the plots of the candidates, and the model's predictions."""
    result = cast(RunSummary, summary)
    layout = choose_layout(result)
    column, meaning = layout.facts[0]
    if ranked_by := summary.get("ranked_by"):
        column = wording.MetricColumn(wording.format_metric(ranked_by), "metrics", ranked_by)
        meaning = f"test {column.heading}"
    baselines = [
        (value, name)
        for name, scores in (result.get("baselines") or {}).items()
        if scores and (value := column.read(scores)) is not None
    ]
    choose = max if column.key in HIGHER_IS_BETTER else min
    best = choose(baselines) if baselines else None
    found = [row for row in summary["leaderboard"] if row["weight"] > 0]
    members = [member for member in result.get("members") or () if member["weight"] > 0]
    inner = run.folder / "retrained" / "best"
    examples: dict[str, Any] = {}
    if not result.get("classes") and (inner / PREDICTIONS).exists():
        table = read_predictions(inner / PREDICTIONS)
        targets = list(table.shape.targets)[:MAX_TARGETS]
        examples = {
            "examples": predictions.draw_examples(table, targets),
            "sampled": table.sampled,
        }
    return {
        "answer": search.draw_answer(summary, runs.read_log(run)[0]),
        "headline": (format_number(column.read(result), column.decimals), meaning),
        "best_baseline": best and (format_number(best[0], column.decimals), best[1]),
        "num_models": len(members) or 1,
        "chosen_rows": found,
        "score_name": wording.name_ranking(summary),
        "name_candidate": wording.name_candidate,
        "format_costs": wording.format_costs,
        "refit": wording.describe_refit(summary),
        "describe_candidate": wording.describe_candidate,
        "judged_name": wording.format_metric(
            wording.get_tested_metric(result, summary.get("ranked_by"))
        ),
        **examples,
    }


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


def build_test_rows(summary: SearchSummary) -> list[dict[str, Any]]:
    """Build the table of test errors: the chosen settings, the defaults and the baselines."""
    tests = summary["test"]
    layout, tested = _choose_layout(tests), find_test(tests)
    if layout is None or tested is None:
        return []
    rows = []
    for name, text in (("best", "the chosen settings"), ("default", "without a search")):
        if name not in tests:  # `tune.minutes` left no time to retrain it
            continue
        cells = [_format_over_seeds(column, tests[name]) for column in layout.compact]
        if failed := tests[name].get("failed"):
            text = f"{text}: {failed}"
        colour = MODEL if name == "best" else FAINT
        rows.append({"name": name, "what": text, "cells": cells, "colour": colour})
    for name, baseline in tested["baselines"].items():
        if baseline:
            cells = [format_number(column.read(baseline)) for column in layout.compact]
            row = {"name": name, "what": baseline["what"], "cells": cells}
            rows.append(row | {"colour": get_colour(name)})
    return rows


def find_test(tests: Mapping[str, SearchTest]) -> SearchTest | None:
    """Return the test run of the chosen settings, or else of the default; None without a model."""
    tested = (tests[name] for name in RETRAINED if name in tests)
    return next((test for test in tested if test.get("metrics")), None)


def _choose_layout(tests: Mapping[str, SearchTest]) -> ReportLayout | None:
    """Choose the columns by the task: only regression has scaled errors. The largest error is left
    out, since the deviations need space."""
    test = find_test(tests)
    if test is None or not test["scaled"]:
        return CLASSIFICATION if test else None
    layout = choose_layout(test)
    compact = tuple(column for column in layout.compact if column.key != "max_error")
    return layout._replace(compact=compact)


def _format_over_seeds(column: MetricColumn, test: SearchTest) -> str:
    """Format mean and deviation over the seeds; version 0.1 has one value for scaled errors."""
    if test.get("failed"):
        return "–"
    spread = test.get("spread") if column.section == "metrics" else test.get("scaled_spread")
    if not spread:
        return format_number(column.read(test))
    value = spread[column.key]
    return f"{format_number(value['mean'])} ± {format_number(value['sd'], figures=2)}"


RUN_FILES = (
    *("config.toml", "plan.json", "metrics.json"),
    *(PREDICTIONS, "reconstructions.parquet"),
)
SEARCH_FILES = ("config.toml", "metrics.json", "trials.json", "best.toml")
PROBE_FILES = ("summary.json", "labels.toml", "encoder.toml")
MAX_TARGETS = 8
PLOTTED: dict[type[Event], tuple[str, ...]] = {
    Log: ("epoch", "loss", "lr"),
    Epoch: ("epoch", "train_loss", "val_loss"),
    MachineSample: ("seconds",),
}
"""Numbers that curves are drawn from, by class of event"""
DAMAGE_ERRORS = (ArithmeticError, AttributeError, LookupError, OSError, TypeError, ValueError)
"""Errors that damaged files may raise while drawing; Arrow's errors derive from these too"""


def report(run: str | Path, *, out: str | Path | None = None) -> Path:
    """Write a run's report.html; `slipstream.report` documents the arguments."""
    folder = runs.find_run(run)
    if (folder / "labels.toml").exists():
        with verify_sources(folder, PROBE_FILES):
            return write_probe_report(folder, folder if out is None else Path(out))
    opened = runs.open_run(folder)
    to = opened.folder if out is None else Path(out).absolute()
    if untested := runs.describe_untested(opened.folder):
        raise UserError(f"{opened.folder}: is {untested}; there is nothing to report, see that one")
    if not (opened.folder / "trials.json").exists():
        return _write_run_report(opened, to)
    for name in RETRAINED:
        inner = opened.folder / "retrained" / name
        if (inner / "metrics.json").exists():
            _write_run_report(Run(inner), to / "retrained" / name)
    with verify_sources(opened.folder, SEARCH_FILES):
        return write_search_report(opened, to)


@contextmanager
def verify_sources(folder: Path, names: tuple[str, ...]) -> Iterator[None]:
    """Compare files with the run's checksums before drawing from them.

    Runs of version 0.1 have no checksums; there, an error while drawing reveals the damage.
    """
    runs.verify_files(folder, *names)
    try:
        yield
    except DAMAGE_ERRORS as error:
        on_writing = isinstance(error, OSError) and error.errno is not None
        if on_writing or (folder / "manifest.json").exists():  # the sources are intact
            raise
        raise UserError(
            f"{folder}: cannot draw the report, because one of {', '.join(names)} is damaged or "
            f"incomplete ({type(error).__name__}: {error}); restore it from a copy, or train again"
        ) from None


def read_plot_events(run: Run) -> tuple[list[Event], list[str]]:
    """Return the events that curves can be drawn from, and notes on skipped lines."""

    def is_plottable(event: Event) -> bool:
        if isinstance(event, Other):
            return False
        values = [getattr(event, name) for name in PLOTTED.get(type(event), ())]
        return all(value is None or isinstance(value, (int, float)) for value in values)

    events, notes = runs.read_log(run)
    return list(filter(is_plottable, events)), notes


def _write_run_report(run: Run, to: Path) -> Path:
    with verify_sources(run.folder, RUN_FILES):
        summary = runs.read_metrics(run.folder)
        summary["plan"] = upgrade_plan(summary["plan"])
        events, damage = read_plot_events(run)
        page = render_page(
            "page.html",
            summary=summary,
            layout=choose_layout(summary),
            rows=build_rows(summary),
            was_trained=wording.was_trained(summary),
            verdict=wording.describe_verdict(summary),
            outcome=wording.judge(summary),
            quantile_line=wording.describe_quantiles(summary),
            total_s=wording.get_total_s(summary),
            energy=wording.format_energy(summary),
            usage=list(wording.describe_usage(summary)),
            estimate=wording.describe_estimate(summary),
            config=(run.folder / "config.toml").read_text(encoding="utf-8"),
            lane_lines=[*wording.describe_lanes(summary), *wording.describe_members(summary)],
            filter_line=streaming.describe_filter(summary),
            damage=damage,
            date=find_date(run.folder, summary),
            version=__version__,
            units=_describe_units(summary),
            timelines=draw_timelines(summary.get("data") or {}),
            target_unit=_find_shared_unit(summary),
            target_baselines=_find_target_baselines(summary),
            unit=partial(get_unit, summary),
            **_draw_plots(run.folder, summary, events),
        )
    return write_report(page, of=run.folder, to=to)


def _draw_plots(folder: Path, summary: RunSummary, events: list[Event]) -> dict[str, Any]:
    """Draw every plot of a run; of predicted numbers, series that can be zoomed too."""
    if summary.get("objective") == "masked":
        return {"plots": encoder.draw_figures(folder, summary, events)}
    detail = summary["detail"]["test"]
    by_step, by_series = len(detail["per_step"]) > 1, len(detail["per_series"]) > 1
    plots = training.draw_training(summary, events)
    plots["by_step"] = predictions.draw_by_step(summary) if by_step else None
    if summary.get("classes"):
        plots |= predictions.draw_classes(summary)
        if by_series:
            plots["by_series"] = predictions.draw_accuracy_by_series(detail["per_series"])
        return {"plots": plots}
    table = read_predictions(folder / PREDICTIONS)
    targets = list(detail["per_target"])[:MAX_TARGETS]
    if by_series:
        unit = _find_shared_unit(summary)
        plots["by_series"] = predictions.draw_by_series(detail["per_series"], unit)
    plots["distributions"] = predictions.draw_distributions(table, targets)
    examples = predictions.draw_examples(table, targets)
    return {"plots": plots, "examples": examples, "sampled": table.sampled}


def _find_shared_unit(summary: RunSummary) -> str:
    """Return the unit of all targets; empty where they differ or it is not known."""
    detail = summary["detail"].get("test", {})
    units = {get_unit(summary, target) for target in detail.get("per_target", ())}
    return units.pop() if len(units) == 1 else ""


def _describe_units(summary: RunSummary) -> str:
    """Say in which units the errors of the comparison are."""
    layout = choose_layout(summary)
    targets = list(summary["detail"].get("test", {}).get("per_target", ()))
    if layout.page != "regression.html" or not targets:
        return layout.units
    if unit := _find_shared_unit(summary):
        return f"errors in {unit}"
    if len(targets) == 1:
        return f"errors in the unit of {targets[0]}"
    return "errors are means over the targets, each in its own unit"


def _find_target_baselines(summary: RunSummary) -> list[str]:
    """Return the baselines that were scored on each target; those of version 0.1 were not."""
    return [
        name for name, result in summary["baselines"].items() if result and result.get("per_target")
    ]


def build_rows(summary: RunSummary) -> list[dict[str, Any]]:
    """Build the rows of the model and every baseline, best first."""
    members = summary.get("members", ())
    text = f"the weighted mean of {len(members)} models" if members else "this run"
    results: list[tuple[str, str, Scores]] = [("model", text, summary)]
    results += [
        (name, "without predict.filter", result)
        for name, result in streaming.list_unfiltered(summary)
    ]
    results += [(name, result["name"], result) for name, result in wording.list_members(summary)]
    if ensemble := summary.get("ensemble"):
        text = f"the mean of {len({lane['seed'] for lane in summary['lanes']})} models"
        results.append(("ensemble", text, ensemble))
    results += [
        (name, result["what"], result) for name, result in summary["baselines"].items() if result
    ]
    layout = choose_layout(summary)
    columns, sorted_by = layout.columns, find_order(layout.columns)
    rows = [
        {
            "name": name,
            "what": text,
            "colour": get_colour(name),
            "cells": [format_number(column.read(result), column.decimals) for column in columns],
            "error": sorted_by.read(result),
            "headline": layout.headline.read(result),
        }
        for name, text, result in results
    ]
    return sorted(rows, key=lambda row: sort_key(row["error"]))


def find_order(columns: Sequence[MetricColumn]) -> MetricColumn:
    """Return the metric by which the model and the baselines are sorted."""
    return next(column for column in columns if column.key in ("mse", "log_loss"))
