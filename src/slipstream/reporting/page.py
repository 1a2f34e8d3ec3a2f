"""Puts the page together."""

from __future__ import annotations

import math
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2

from slipstream import runs
from slipstream.reporting import figures as draw
from slipstream.reporting.style import COLOURS
from slipstream.reporting.words import (
    energy,
    foresight,
    lanes_told,
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
    text = resources.files("slipstream.reporting").joinpath("page.html").read_text("utf-8")
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"number": number, "seconds": seconds}
    page = environment.from_string(text).render(
        summary=summary,
        rows=_rows(summary),
        verdict=verdict(summary),
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


def _rows(summary: dict[str, Any]) -> list[dict[str, Any]]:
    """The model and every baseline, best first."""
    rows = [
        {
            "name": "model",
            "what": "this run",
            "test": summary["metrics"]["test"],
            "scaled": summary["scaled"]["test"],
        }
    ]
    together = summary.get("ensemble")
    if together:
        what = f"the mean of {len({lane['seed'] for lane in summary['lanes']})} models"
        test, scaled = together["metrics"]["test"], together["scaled"]["test"]
        rows.append({"name": "ensemble", "what": what, "test": test, "scaled": scaled})
    for name, found in summary["baselines"].items():
        if found:
            test, scaled = found["metrics"]["test"], found["scaled"]["test"]
            rows.append({"name": name, "what": found["what"], "test": test, "scaled": scaled})
    for row in rows:
        row["colour"] = COLOURS[row["name"]]
    return sorted(rows, key=lambda row: row["scaled"]["mse"] or math.inf)
