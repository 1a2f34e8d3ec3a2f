"""The report of a probe: whether pre-training helped, as a verdict, a table and plots by seed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes

from slipstream import runs
from slipstream.reporting.formatting import METRIC_NAMES, format_number
from slipstream.reporting.plots.style import COLOURS, FAINT, INK, MODEL, MUTED, STYLE, draw_svg
from slipstream.reporting.template import render_page, write_report

SCRATCH, FINE_TUNED = "scratch", "fine-tuned"
PROBE_COLOURS = {SCRATCH: MUTED, "frozen": "#10b981", FINE_TUNED: MODEL}


def describe_probe(summary: dict[str, Any]) -> str:
    """State whether fine-tuning and the frozen encoder beat training from scratch."""
    key, n = summary["judged_by"], len(summary["seeds"])
    differences = summary["against_scratch"]
    tuned, frozen = differences[FINE_TUNED][key], differences["frozen"][key]
    verdict = {
        "better": "Pre-training helped",
        "worse": "Pre-training did harm",
        "no difference shown": "Pre-training is not shown to help",
    }[tuned["verdict"]]
    means = {
        name: format_number(summary["ways"][name]["metrics"][key]["mean"], 4)
        for name in (FINE_TUNED, SCRATCH)
    }
    relation = {
        "better": "also beats training from scratch",
        "worse": "is worse than training from scratch",
        "no difference shown": "shows no difference to training from scratch",
    }[frozen["verdict"]]
    return (
        f"{verdict}: the test {_name_metric(summary, key)} is {means[FINE_TUNED]} fine-tuned and "
        f"{means[SCRATCH]} from scratch, {_format_interval(tuned)} (95 % over {n} seeds). The "
        f"frozen encoder {relation} ({_format_interval(frozen)}).{_warn_of_majority(summary)}"
    )


def build_rows(summary: dict[str, Any]) -> list[dict[str, Any]]:
    """Build the table's rows: the three runs, then the baselines; two cells for every metric."""
    keys = list(summary["ways"][SCRATCH]["metrics"])
    rows = []
    for name, way in summary["ways"].items():
        cells = []
        for key in keys:
            spread = way["metrics"][key]
            difference = summary["against_scratch"].get(name)
            cells += [f"{format_number(spread['mean'], 4)} ± {format_number(spread['sd'], 4)}"]
            cells += [
                f"{_format_interval(difference[key])}: {difference[key]['verdict']}"
                if difference
                else "–"
            ]
        rows.append({"name": name, "what": way["what"], "cells": cells})
    for name, metrics in summary["baselines"].items():
        cells = [cell for key in keys for cell in (format_number(metrics[key], 4), "–")]
        rows.append({"name": name, "what": "a baseline", "cells": cells})
    return [row | {"colour": _choose_colour(row["name"])} for row in rows]


def build_headings(summary: dict[str, Any]) -> list[str]:
    keys = summary["ways"][SCRATCH]["metrics"]
    return [cell for key in keys for cell in (_name_metric(summary, key), "difference to scratch")]


def write_probe_report(folder: Path, to: Path) -> Path:
    """Write the report of the probe in `folder`."""
    summary = runs.read_json(folder / "summary.json")
    keys = summary["ways"][SCRATCH]["metrics"]
    with mpl.rc_context(STYLE):
        plots = [draw_svg(_plot_seeds, 6.2, 3.4, summary, key) for key in keys]
    page = render_page(
        "probe.html",
        summary=summary,
        headings=build_headings(summary),
        rows=build_rows(summary),
        plots=plots,
        config=(folder / "labels.toml").read_text(encoding="utf-8"),
        encoder=(folder / "encoder.toml").read_text(encoding="utf-8"),
    )
    return write_report(page, of=folder, to=to)


def _name_metric(summary: dict[str, Any], key: str) -> str:
    return METRIC_NAMES.get(key, f"scaled {key.upper()}" if summary["scaled"] else key)


def _format_interval(difference: dict[str, Any]) -> str:
    """Format a difference and its interval, with signs."""
    bounds = f"{difference['low']:+.4f} to {difference['high']:+.4f}"
    return f"{difference['difference']:+.4f}, {bounds}"


def _warn_of_majority(summary: dict[str, Any]) -> str:
    """Differences between models that carry no signal say little."""
    if summary["beat_majority"] is None or summary["beat_majority"]:
        return ""
    return " But none of the three is shown to beat the majority class on this test set."


def _choose_colour(name: str) -> str:
    return PROBE_COLOURS.get(name) or COLOURS.get(name, FAINT)


def _plot_seeds(axes: Axes, summary: dict[str, Any], key: str) -> None:
    """Plot every seed as a dot, a line per seed across the three runs, and a bar per mean."""
    ways = summary["ways"]
    values = [ways[name]["metrics"][key]["by_seed"] for name in ways]
    for one in zip(*values, strict=True):
        axes.plot(range(len(values)), one, color=FAINT, lw=0.8, zorder=1)
    for place, name in enumerate(ways):
        spread = ways[name]["metrics"][key]
        x = [place] * len(spread["by_seed"])
        axes.plot(x, spread["by_seed"], color=_choose_colour(name), ls="", marker="o", ms=5)
        axes.hlines(spread["mean"], place - 0.2, place + 0.2, color=INK, lw=1.6, zorder=3)
    for name, metrics in summary["baselines"].items():
        axes.axhline(metrics[key], color=_choose_colour(name), lw=1.2, ls="--", label=name)
    axes.set_xticks(range(len(values)), list(ways))
    axes.set_xlim(-0.5, len(values) - 0.5)
    axes.grid(axis="x", visible=False)
    axes.set_ylabel(f"test {_name_metric(summary, key)}")
    if summary["baselines"]:
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=4)
