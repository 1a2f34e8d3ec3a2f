"""Puts the page together."""

from __future__ import annotations

import math
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2

from slipstream import runs
from slipstream.reporting import figures as draw
from slipstream.reporting.classes import when
from slipstream.reporting.shown import shown
from slipstream.reporting.style import COLOURS
from slipstream.reporting.words import (
    energy,
    foresight,
    lanes_told,
    lost,
    number,
    seconds,
    usage,
    verdict,
)


def report(run: str | Path) -> Path:
    """Draw report.html into the run's folder."""
    found = runs.find(run)
    summary = runs.read_json(found.folder / "metrics.json")
    predictions = draw.read_predictions(found.folder / "predictions.parquet")
    environment = jinja2.Environment(
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        loader=jinja2.FunctionLoader(_template),
    )
    environment.filters |= {"number": number, "seconds": seconds, "when": when}
    page = environment.get_template("page.html").render(
        summary=summary,
        shown=shown(summary),
        rows=_rows(summary),
        verdict=verdict(summary),
        lost=lost(summary),
        energy=energy(summary),
        usage=list(usage(summary)),
        foresight=foresight(summary),
        lanes_told=list(lanes_told(summary)),
        drawn=draw.all_figures(summary, list(runs.events(found)), predictions),
        config=(found.folder / "config.toml").read_text(encoding="utf-8"),
        sampled=predictions.sampled,
    )
    path = found.folder / "report.html"
    runs.write_text(path, page)
    return path


def _template(name: str) -> str:
    return resources.files("slipstream.reporting").joinpath(name).read_text("utf-8")


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
    return sorted(told, key=lambda row: row["error"] or math.inf)
