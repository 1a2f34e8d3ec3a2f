"""Writes report.html; damaged files are reported instead of drawn."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from slipstream import runs
from slipstream.errors import UserError
from slipstream.reporting import probe, search, wording
from slipstream.reporting.formatting import choose_layout, format_number, sort_key
from slipstream.reporting.plots import encoder, predictions
from slipstream.reporting.plots.style import COLOURS
from slipstream.reporting.template import render_page, write_report
from slipstream.runs import Event, Run

RUN_FILES = (
    *("config.toml", "plan.json", "metrics.json"),
    *("predictions.parquet", "reconstructions.parquet"),
)
SEARCH_FILES = ("config.toml", "metrics.json", "trials.json", "best.toml")
PROBE_FILES = ("summary.json", "labels.toml", "encoder.toml")
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
        sampled = False
        if summary.get("objective") == "masked":
            plots = encoder.draw_figures(run.folder, summary, events)
        else:
            table = predictions.read_predictions(run.folder / "predictions.parquet")
            plots, sampled = predictions.draw_figures(summary, events, table), table.sampled
        page = render_page(
            "page.html",
            summary=summary,
            layout=choose_layout(summary),
            rows=_build_rows(summary),
            verdict=wording.describe_verdict(summary),
            is_beaten=wording.is_beaten(summary),
            energy=wording.format_energy(summary),
            usage=list(wording.describe_usage(summary)),
            estimate=wording.describe_estimate(summary),
            config=(run.folder / "config.toml").read_text(encoding="utf-8"),
            lane_lines=list(wording.describe_lanes(summary)),
            damage=damage,
            plots=plots,
            sampled=sampled,
        )
    return write_report(page, of=run.folder, to=to)


def _build_rows(summary: dict[str, Any]) -> list[dict[str, Any]]:
    """Build the rows of the model and every baseline, best first."""
    results = [("model", "this run", summary)]
    if summary.get("ensemble"):
        what = f"the mean of {len({lane['seed'] for lane in summary['lanes']})} models"
        results.append(("ensemble", what, summary["ensemble"]))
    results += [(name, one["what"], one) for name, one in summary["baselines"].items() if one]
    columns = choose_layout(summary).columns
    sorted_by = next(column for column in columns if column.key in ("mse", "log_loss"))
    rows = [
        {
            "name": name,
            "what": what,
            "colour": COLOURS[name],
            "cells": [format_number(column.read(one), column.decimals) for column in columns],
            "error": sorted_by.read(one),
        }
        for name, what, one in results
    ]
    return sorted(rows, key=lambda row: sort_key(row["error"]))
