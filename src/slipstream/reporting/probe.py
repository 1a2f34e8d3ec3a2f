"""Writes the report of a probe: whether pre-training helped, as a table and plots by seed."""

from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes

from slipstream import runs
from slipstream.reporting import wording
from slipstream.reporting.plots.style import (
    ABOVE,
    COLOURS,
    FAINT,
    INK,
    MODEL,
    MUTED,
    STYLE,
    draw_svg,
)
from slipstream.reporting.template import render_page, write_report
from slipstream.reporting.wording import FINE_TUNED, SCRATCH

PROBE_COLOURS = COLOURS | {SCRATCH: MUTED, "frozen": "#10b981", FINE_TUNED: MODEL}


def write_probe_report(folder: Path, to: Path) -> Path:
    """Write the report of the probe in `folder`."""
    summary = runs.read_json(folder / "summary.json")
    rows = wording.build_probe_rows(summary)
    with mpl.rc_context(STYLE):
        keys = summary["ways"][SCRATCH]["metrics"]
        plots = [draw_svg(_plot_seeds, 6.2, 3.4, summary, key) for key in keys]
    page = render_page(
        "probe.html",
        summary=summary,
        headings=wording.build_probe_headings(summary),
        rows=[row | {"colour": PROBE_COLOURS.get(row["name"], FAINT)} for row in rows],
        plots=plots,
        config=(folder / "labels.toml").read_text(encoding="utf-8"),
        encoder=(folder / "encoder.toml").read_text(encoding="utf-8"),
    )
    return write_report(page, of=folder, to=to)


def _plot_seeds(axes: Axes, summary: dict[str, Any], key: str) -> None:
    """Plot every seed as a dot, a line per seed across the three runs, and a bar per mean."""
    spreads = {name: way["metrics"][key] for name, way in summary["ways"].items()}
    for one in zip(*(spread["by_seed"] for spread in spreads.values()), strict=True):
        axes.plot(range(len(spreads)), one, color=FAINT, lw=0.8, zorder=1)
    for place, (name, spread) in enumerate(spreads.items()):
        x, colour = [place] * len(spread["by_seed"]), PROBE_COLOURS.get(name, FAINT)
        axes.plot(x, spread["by_seed"], color=colour, ls="", marker="o", ms=5)
        axes.hlines(spread["mean"], place - 0.2, place + 0.2, color=INK, lw=1.6, zorder=3)
    for name, metrics in summary["baselines"].items():
        axes.axhline(metrics[key], color=COLOURS.get(name, FAINT), lw=1.2, ls="--", label=name)
    axes.set_xticks(range(len(spreads)), list(spreads))
    axes.grid(axis="x", visible=False)
    axes.set(xlim=(-0.5, len(spreads) - 0.5), ylabel=f"test {wording.name_metric(summary, key)}")
    if summary["baselines"]:
        axes.legend(**ABOVE, ncols=4)
