"""Puts the page together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from slipstream import runs
from slipstream.reporting import probe, search, sources
from slipstream.reporting.layouts import choose_layout
from slipstream.reporting.plots import encoder
from slipstream.reporting.plots import predictions as draw
from slipstream.reporting.plots.style import COLOURS
from slipstream.reporting.template import render_page, write_report
from slipstream.reporting.wording import (
    describe_estimate,
    describe_lanes,
    describe_usage,
    describe_verdict,
    format_energy,
    format_number,
    is_beaten,
    sort_key,
)
from slipstream.runs import Run


def report(run: str | Path, *, out: str | Path | None = None) -> Path:
    """Draw report.html into the run's folder, or into `out`; of a search, also those of its
    models."""
    if (Path(run) / "labels.toml").exists():
        with sources.verify_sources(Path(run), sources.OF_PROBE):
            return probe.write_probe_report(Path(run), Path(run if out is None else out))
    found = runs.open_run(run)
    to = found.folder if out is None else Path(out).absolute()
    if not (found.folder / "trials.json").exists():
        return _of_run(found, to)
    for name in search.RETRAINED:
        inner = found.folder / "retrained" / name
        if (inner / "metrics.json").exists():
            _of_run(Run(inner), to / "retrained" / name)
    with sources.verify_sources(found.folder, sources.OF_SEARCH):
        return search.write_search_report(found, to)


def _of_run(found: Run, to: Path) -> Path:
    with sources.verify_sources(found.folder, sources.OF_RUN):
        page = _page(found)
    return write_report(page, of=found.folder, to=to)


def _page(found: Run) -> str:
    summary = runs.read_metrics(found.folder)
    events, damage = sources.read_plot_events(found)
    return render_page(
        "page.html",
        summary=summary,
        shown=choose_layout(summary),
        rows=_rows(summary),
        verdict=describe_verdict(summary),
        lost=is_beaten(summary),
        energy=format_energy(summary),
        usage=list(describe_usage(summary)),
        foresight=describe_estimate(summary),
        config=(found.folder / "config.toml").read_text(encoding="utf-8"),
        lanes_told=list(describe_lanes(summary)),
        damage=damage,
        **_drawn(found.folder, summary, events),
    )


def _drawn(folder: Path, summary: dict[str, Any], events: list[dict[str, Any]]) -> dict[str, Any]:
    """The pictures, and whether they show only a sample."""
    if summary.get("objective") == "masked":
        return {"drawn": encoder.draw_figures(folder, summary, events)}
    predictions = draw.read_predictions(folder / "predictions.parquet")
    drawn = draw.draw_figures(summary, events, predictions)
    return {"drawn": drawn, "sampled": predictions.sampled}


def _rows(summary: dict[str, Any]) -> list[dict[str, Any]]:
    """The model and every baseline, best first."""
    rows = [("model", "this run", summary)]
    together = summary.get("ensemble")
    if together:
        what = f"the mean of {len({lane['seed'] for lane in summary['lanes']})} models"
        rows.append(("ensemble", what, together))
    rows += [(name, found["what"], found) for name, found in summary["baselines"].items() if found]
    columns = choose_layout(summary).columns
    sorted_by = next(column for column in columns if column.key in ("mse", "log_loss"))
    told = [
        {
            "name": name,
            "what": what,
            "colour": COLOURS[name],
            "cells": [format_number(column.of(found), column.decimals) for column in columns],
            "error": sorted_by.of(found),
        }
        for name, what, found in rows
    ]
    return sorted(told, key=lambda row: sort_key(row["error"]))
