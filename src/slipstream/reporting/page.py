"""Writes report.html."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from slipstream import runs
from slipstream.reporting import probe, search, sources
from slipstream.reporting.formatting import format_number, sort_key
from slipstream.reporting.layouts import choose_layout
from slipstream.reporting.plots import encoder, predictions
from slipstream.reporting.plots.style import COLOURS
from slipstream.reporting.template import render_page, write_report
from slipstream.reporting.wording import (
    describe_estimate,
    describe_lanes,
    describe_usage,
    describe_verdict,
    format_energy,
    is_beaten,
)
from slipstream.runs import Run


def report(run: str | Path, *, out: str | Path | None = None) -> Path:
    """Write report.html, a self-contained page, from the files of a finished run.

    Args:
        run: The folder of a run, a search or a probe. The report of a search includes those of its
            retrained models.
        out: The folder to write to, instead of the run folder.

    Returns:
        The path of the page.

    Raises:
        UserError: The run is not finished, or one of its files is damaged.

    Example:
        slipstream.report("runs/job-20260131T120000Z")
    """
    if (Path(run) / "labels.toml").exists():
        with sources.verify_sources(Path(run), sources.PROBE_FILES):
            return probe.write_probe_report(Path(run), Path(run if out is None else out))
    opened = runs.open_run(run)
    to = opened.folder if out is None else Path(out).absolute()
    if not (opened.folder / "trials.json").exists():
        return _write_run_report(opened, to)
    for name in search.RETRAINED:
        inner = opened.folder / "retrained" / name
        if (inner / "metrics.json").exists():
            _write_run_report(Run(inner), to / "retrained" / name)
    with sources.verify_sources(opened.folder, sources.SEARCH_FILES):
        return search.write_search_report(opened, to)


def _write_run_report(run: Run, to: Path) -> Path:
    with sources.verify_sources(run.folder, sources.RUN_FILES):
        page = _render(run)
    return write_report(page, of=run.folder, to=to)


def _render(run: Run) -> str:
    summary = runs.read_metrics(run.folder)
    events, damage = sources.read_plot_events(run)
    return render_page(
        "page.html",
        summary=summary,
        layout=choose_layout(summary),
        rows=_build_rows(summary),
        verdict=describe_verdict(summary),
        is_beaten=is_beaten(summary),
        energy=format_energy(summary),
        usage=list(describe_usage(summary)),
        estimate=describe_estimate(summary),
        config=(run.folder / "config.toml").read_text(encoding="utf-8"),
        lane_lines=list(describe_lanes(summary)),
        damage=damage,
        **_draw_plots(run.folder, summary, events),
    )


def _draw_plots(
    folder: Path, summary: dict[str, Any], events: list[dict[str, Any]]
) -> dict[str, Any]:
    """Draw the plots; `sampled` says whether they show only a sample of the predictions."""
    if summary.get("objective") == "masked":
        return {"plots": encoder.draw_figures(folder, summary, events)}
    table = predictions.read_predictions(folder / "predictions.parquet")
    plots = predictions.draw_figures(summary, events, table)
    return {"plots": plots, "sampled": table.sampled}


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
