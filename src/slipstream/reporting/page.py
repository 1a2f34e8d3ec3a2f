"""Writes report.html; damaged files are reported instead of drawn."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from slipstream import __version__, runs
from slipstream.errors import UserError
from slipstream.reporting import probe, search, streaming, wording
from slipstream.reporting.formatting import (
    MetricColumn,
    choose_layout,
    find_unit,
    format_number,
    sort_key,
)
from slipstream.reporting.plots import classification, encoder, errors, examples, training
from slipstream.reporting.plots.chart import get_colour
from slipstream.reporting.plots.predictions import read_predictions
from slipstream.reporting.plots.timelines import draw_timelines
from slipstream.reporting.template import find_date, render_page, write_report
from slipstream.runs import Event, Run

RUN_FILES = (
    *("config.toml", "plan.json", "metrics.json"),
    *("predictions.parquet", "reconstructions.parquet"),
)
SEARCH_FILES = ("config.toml", "metrics.json", "trials.json", "best.toml")
PROBE_FILES = ("summary.json", "labels.toml", "encoder.toml")
MAX_TARGETS = 8
PLOTTED = {
    "log": ("epoch", "loss", "lr"),
    "epoch": ("epoch", "train_loss", "val_loss"),
    "monitor": ("seconds",),
}
"""Numbers that curves are drawn from, by event"""
DAMAGE_ERRORS = (ArithmeticError, AttributeError, LookupError, OSError, TypeError, ValueError)
"""Errors that damaged files may raise while drawing; Arrow's errors derive from these too"""


def report(run: str | Path, *, out: str | Path | None = None) -> Path:
    """Write a run's report.html; `slipstream.report` documents the arguments."""
    folder = runs.find_run(run)
    if (folder / "labels.toml").exists():
        with verify_sources(folder, PROBE_FILES):
            return probe.write_probe_report(folder, folder if out is None else Path(out))
    opened = runs.open_run(folder)
    to = opened.folder if out is None else Path(out).absolute()
    if not (opened.folder / "trials.json").exists():
        return _write_run_report(opened, to)
    for name in search.RETRAINED:
        inner = opened.folder / "retrained" / name
        if (inner / "metrics.json").exists():
            _write_run_report(Run(inner), to / "retrained" / name)
    with verify_sources(opened.folder, SEARCH_FILES):
        return search.write_search_report(opened, to)


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
        values = [event.get(name, "missing") for name in PLOTTED.get(event["event"], ())]
        return all(value is None or isinstance(value, (int, float)) for value in values)

    events, notes = runs.read_log(run)
    return list(filter(is_plottable, events)), notes


def _write_run_report(run: Run, to: Path) -> Path:
    with verify_sources(run.folder, RUN_FILES):
        summary = runs.read_metrics(run.folder)
        events, damage = read_plot_events(run)
        page = render_page(
            "page.html",
            summary=summary,
            layout=choose_layout(summary),
            rows=build_rows(summary),
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


def _draw_plots(folder: Path, summary: dict[str, Any], events: list[Event]) -> dict[str, Any]:
    """Draw every plot of a run; of predicted numbers, series that can be zoomed too."""
    if summary.get("objective") == "masked":
        return {"plots": encoder.draw_figures(folder, summary, events)}
    detail = summary["detail"]["test"]
    by_step, by_series = len(detail["per_step"]) > 1, len(detail["per_series"]) > 1
    plots = training.draw_training(summary, events)
    plots["by_step"] = errors.draw_by_step(summary) if by_step else None
    if summary.get("classes"):
        plots |= classification.draw_classes(summary)
        if by_series:
            plots["by_series"] = classification.draw_by_series(detail["per_series"])
        return {"plots": plots}
    predictions = read_predictions(folder / "predictions.parquet")
    targets = list(detail["per_target"])[:MAX_TARGETS]
    if by_series:
        plots["by_series"] = errors.draw_by_series(detail["per_series"], _find_shared_unit(summary))
    plots["distributions"] = errors.draw_distributions(predictions, targets)
    series = examples.draw_examples(predictions, targets)
    return {"plots": plots, "examples": series, "sampled": predictions.sampled}


def get_unit(summary: dict[str, Any], column: str) -> str:
    """Return a column's unit, as its file or its name has it; empty where it is not known."""
    columns = (summary.get("data") or {}).get("columns", {})
    return columns.get(column, {}).get("unit") or find_unit(column)


def _find_shared_unit(summary: dict[str, Any]) -> str:
    """Return the unit of all targets; empty where they differ or it is not known."""
    detail = summary["detail"].get("test", {})
    units = {get_unit(summary, target) for target in detail.get("per_target", ())}
    return units.pop() if len(units) == 1 else ""


def _describe_units(summary: dict[str, Any]) -> str:
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


def _find_target_baselines(summary: dict[str, Any]) -> list[str]:
    """Return the baselines that were scored on each target; those of version 0.1 were not."""
    return [name for name, one in summary["baselines"].items() if one and one.get("per_target")]


def build_rows(summary: dict[str, Any]) -> list[dict[str, Any]]:
    """Build the rows of the model and every baseline, best first."""
    members = summary.get("members", ())
    what = f"the weighted mean of {len(members)} runs" if members else "this run"
    results = [("model", what, summary)]
    results += [
        (name, "without predict.filter", one) for name, one in streaming.list_unfiltered(summary)
    ]
    results += [(name, one["name"], one) for name, one in wording.list_members(summary)]
    if summary.get("ensemble"):
        what = f"the mean of {len({lane['seed'] for lane in summary['lanes']})} models"
        results.append(("ensemble", what, summary["ensemble"]))
    results += [(name, one["what"], one) for name, one in summary["baselines"].items() if one]
    layout = choose_layout(summary)
    columns, sorted_by = layout.columns, find_order(layout.columns)
    rows = [
        {
            "name": name,
            "what": what,
            "colour": get_colour(name),
            "cells": [format_number(column.read(one), column.decimals) for column in columns],
            "error": sorted_by.read(one),
            "headline": layout.headline.read(one),
        }
        for name, what, one in results
    ]
    return sorted(rows, key=lambda row: sort_key(row["error"]))


def find_order(columns: Sequence[MetricColumn]) -> MetricColumn:
    """Return the metric by which the model and the baselines are sorted."""
    return next(column for column in columns if column.key in ("mse", "log_loss"))
