"""Puts the page together."""

from __future__ import annotations

import math
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

import jinja2

from slipstream import runs
from slipstream.reporting import encoder
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
    events = list(runs.events(found))
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(_template),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"number": number, "seconds": seconds}
    of_kind = _of_encoder if summary.get("objective") == "masked" else _of_predictions
    page = environment.get_template(of_kind.template).render(
        summary=summary,
        energy=energy(summary),
        usage=list(usage(summary)),
        foresight=foresight(summary),
        config=(found.folder / "config.toml").read_text(encoding="utf-8"),
        **of_kind.parts(found.folder, summary, events),
    )
    path = found.folder / "report.html"
    runs.write_text(path, page)
    return path


def _template(name: str) -> str:
    return resources.files("slipstream.reporting").joinpath(name).read_text("utf-8")


def _predicted(
    folder: Path, summary: dict[str, Any], events: list[dict[str, Any]]
) -> dict[str, Any]:
    predictions = draw.read_predictions(folder / "predictions.parquet")
    return {
        "rows": _rows(summary, "test"),
        "verdict": verdict(summary),
        "lanes_told": list(lanes_told(summary)),
        "drawn": draw.all_figures(summary, events, predictions),
        "sampled": predictions.sampled,
    }


def _filled_in(
    folder: Path, summary: dict[str, Any], events: list[dict[str, Any]]
) -> dict[str, Any]:
    return {
        "rows": _rows(summary, "val"),
        "verdict": verdict(summary),
        "drawn": encoder.all_figures(folder, summary, events),
    }


class Kind(NamedTuple):
    """What a run's page is made from."""

    template: str
    parts: Callable[[Path, dict[str, Any], list[dict[str, Any]]], dict[str, Any]]


_of_predictions = Kind("page.html", _predicted)
_of_encoder = Kind("encoder.html", _filled_in)


def _rows(summary: dict[str, Any], which: str) -> list[dict[str, Any]]:
    """The model and every baseline, best first."""
    rows = [
        {
            "name": "model",
            "what": "this run",
            "test": summary["metrics"][which],
            "scaled": summary["scaled"][which],
        }
    ]
    together = summary.get("ensemble")
    if together:
        what = f"the mean of {len({lane['seed'] for lane in summary['lanes']})} models"
        test, scaled = together["metrics"]["test"], together["scaled"]["test"]
        rows.append({"name": "ensemble", "what": what, "test": test, "scaled": scaled})
    for name, found in summary["baselines"].items():
        if found:
            test, scaled = found["metrics"][which], found["scaled"][which]
            rows.append({"name": name, "what": found["what"], "test": test, "scaled": scaled})
    for row in rows:
        row["colour"] = COLOURS[row["name"]]
    return sorted(rows, key=lambda row: row["scaled"]["mse"] or math.inf)
