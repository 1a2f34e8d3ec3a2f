"""Writes the report of a probe: whether pre-training helped, as a table and plots by seed."""

from pathlib import Path
from typing import Any

from markupsafe import Markup

from slipstream import runs
from slipstream.reporting import wording
from slipstream.reporting.plots.chart import FAINT, GREEN, INK, MODEL, MUTED, Chart, get_colour
from slipstream.reporting.plots.scale import cover, number_places
from slipstream.reporting.template import find_date, render_page, write_report
from slipstream.reporting.wording import FINE_TUNED, SCRATCH

PROBE_COLOURS = {SCRATCH: MUTED, "frozen": GREEN, FINE_TUNED: MODEL}


def write_probe_report(folder: Path, to: Path) -> Path:
    """Write the report of the probe in `folder`."""
    summary = runs.read_json(folder / "summary.json")
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


def _draw_seeds(summary: dict[str, Any], key: str) -> Markup:
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
    chart.lines([(places, one) for one in by_seed], FAINT)
    for place, (name, spread) in enumerate(spreads.items()):
        seeds = spread["by_seed"]
        chart.dots([place] * len(seeds), seeds, _get_colour(name), size=7)
        chart.line([place - 0.2, place + 0.2], [spread["mean"]] * 2, INK, width=2.2)
    for name, level in levels.items():
        chart.hline(level, _get_colour(name), dash="6 4", label=name)
    return chart.render()
