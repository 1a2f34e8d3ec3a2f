"""Puts the page together."""

from __future__ import annotations

import math
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2

from slipstream import runs
from slipstream.reporting import figures as draw


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
    for name, found in summary["baselines"].items():
        if found:
            test, scaled = found["metrics"]["test"], found["scaled"]["test"]
            rows.append({"name": name, "what": found["what"], "test": test, "scaled": scaled})
    for row in rows:
        row["colour"] = draw.COLOURS[row["name"]]
    return sorted(rows, key=lambda row: row["scaled"]["mse"] or math.inf)


def verdict(summary: dict[str, Any]) -> str:
    """One sentence: does the model beat what costs seconds?"""
    model = summary["scaled"]["test"]
    beside = {
        name: found["scaled"]["test"] for name, found in summary["baselines"].items() if found
    }
    kind = summary["judged_by"]
    closest = min(beside, key=lambda name: beside[name][kind] or math.inf)
    told = f"{kind.upper()} {number(model[kind])} against {number(beside[closest][kind])}"
    if not summary["beaten_by"]:
        return (
            f"The model beats every baseline on the test set; the closest is {closest}: {told}, "
            "scaled."
        )
    return (
        f"The model loses to {' and '.join(summary['beaten_by'])} on the test set: {told}, scaled. "
        f"As it stands, {closest} is the better choice."
    )


def number(value: float | None, decimals: int = 8) -> str:
    """Four figures and at most so many decimals."""
    if value is None or not math.isfinite(value):
        return "–"
    if value == 0:
        return "0"
    digits = max(0, 3 - math.floor(math.log10(abs(value))))
    return f"{value:,.{min(digits, decimals)}f}"


def seconds(value: float) -> str:
    if value < 60:
        return f"{value:.1f} s"
    minutes, rest = divmod(round(value), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
