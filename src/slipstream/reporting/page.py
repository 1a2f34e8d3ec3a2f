"""Puts the page together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from slipstream import runs
from slipstream.reporting import encoder, probe, search, sources
from slipstream.reporting import figures as draw
from slipstream.reporting.shown import shown
from slipstream.reporting.style import COLOURS
from slipstream.reporting.template import filled, publish
from slipstream.reporting.words import (
    energy,
    foresight,
    known,
    lanes_told,
    lost,
    number,
    usage,
    verdict,
)
from slipstream.runs import Run


def report(run: str | Path, *, out: str | Path | None = None) -> Path:
    """Draw report.html into the run's folder, or into `out`; of a search, also those of its
    models."""
    if (Path(run) / "labels.toml").exists():
        with sources.reading(Path(run), sources.OF_PROBE):
            return probe.report(Path(run), Path(run if out is None else out))
    found = runs.find(run)
    to = found.folder if out is None else Path(out).absolute()
    if not (found.folder / "trials.json").exists():
        return _of_run(found, to)
    for name in search.RETRAINED:
        inner = found.folder / "retrained" / name
        if (inner / "metrics.json").exists():
            _of_run(Run(inner), to / "retrained" / name)
    with sources.reading(found.folder, sources.OF_SEARCH):
        return search.report(found, to)


def _of_run(found: Run, to: Path) -> Path:
    with sources.reading(found.folder, sources.OF_RUN):
        page = _page(found)
    return publish(page, of=found.folder, to=to)


def _page(found: Run) -> str:
    summary = runs.read_metrics(found.folder)
    events, damage = sources.read_events(found)
    return filled(
        "page.html",
        summary=summary,
        shown=shown(summary),
        rows=_rows(summary),
        verdict=verdict(summary),
        lost=lost(summary),
        energy=energy(summary),
        usage=list(usage(summary)),
        foresight=foresight(summary),
        config=(found.folder / "config.toml").read_text(encoding="utf-8"),
        lanes_told=list(lanes_told(summary)),
        damage=damage,
        **_drawn(found.folder, summary, events),
    )


def _drawn(folder: Path, summary: dict[str, Any], events: list[dict[str, Any]]) -> dict[str, Any]:
    """The pictures, and whether they show only a sample."""
    if summary.get("objective") == "masked":
        return {"drawn": encoder.all_figures(folder, summary, events)}
    predictions = draw.read_predictions(folder / "predictions.parquet")
    drawn = draw.all_figures(summary, events, predictions)
    return {"drawn": drawn, "sampled": predictions.sampled}


def _rows(summary: dict[str, Any]) -> list[dict[str, Any]]:
    """The model and every baseline, best first."""
    rows = [("model", "this run", summary)]
    together = summary.get("ensemble")
    if together:
        what = f"the mean of {len({lane['seed'] for lane in summary['lanes']})} models"
        rows.append(("ensemble", what, together))
    rows += [(name, found["what"], found) for name, found in summary["baselines"].items() if found]
    columns = shown(summary).columns
    sorted_by = next(column for column in columns if column.key in ("mse", "log_loss"))
    told = [
        {
            "name": name,
            "what": what,
            "colour": COLOURS[name],
            "cells": [number(column.of(found), column.decimals) for column in columns],
            "error": sorted_by.of(found),
        }
        for name, what, found in rows
    ]
    return sorted(told, key=lambda row: known(row["error"]))
