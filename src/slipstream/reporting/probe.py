"""The page of a probe: whether pre-training helped, in words, a table and a dot per seed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes

from slipstream import runs
from slipstream.reporting.plots.style import COLOURS, FAINT, INK, MODEL, MUTED, STYLE
from slipstream.reporting.plots.svg import draw_svg
from slipstream.reporting.template import render_page, write_report
from slipstream.reporting.wording import METRIC_NAMES, format_number

SCRATCH, TUNED = "scratch", "fine-tuned"
WAY_COLOURS = {SCRATCH: MUTED, "frozen": "#10b981", TUNED: MODEL}


def metric_name(summary: dict[str, Any], key: str) -> str:
    return METRIC_NAMES.get(key, f"scaled {key.upper()}" if summary["scaled"] else key)


def describe_probe(summary: dict[str, Any]) -> str:
    """A sentence or two on fine-tuning, and one on the frozen encoder."""
    key, n = summary["judged_by"], len(summary["seeds"])
    found = summary["against_scratch"]
    tuned, frozen = found[TUNED][key], found["frozen"][key]
    said = {
        "better": "Pre-training helped",
        "worse": "Pre-training did harm",
        "no difference shown": "Pre-training is not shown to help",
    }[tuned["verdict"]]
    means = (summary["ways"][way]["metrics"][key]["mean"] for way in (TUNED, SCRATCH))
    told = " against ".join(format_number(mean, 4) for mean in means)
    beside = {
        "better": "beats training from scratch too",
        "worse": "is worse than training from scratch",
        "no difference shown": "is not told apart from training from scratch",
    }[frozen["verdict"]]
    return (
        f"{said}: fine-tuned, the test {metric_name(summary, key)} is {told} from scratch, "
        f"{interval(tuned)} (95 % over {n} seeds). "
        f"The frozen encoder {beside} ({interval(frozen)}).{_beside_majority(summary)}"
    )


def _beside_majority(summary: dict[str, Any]) -> str:
    """Where no way has seen anything, how they differ says little."""
    if summary["beat_majority"] is None or summary["beat_majority"]:
        return ""
    return " But none of the three is shown to beat the majority class on this test set."


def interval(found: dict[str, Any]) -> str:
    """A difference and where it lies, with signs."""
    return f"{found['difference']:+.4f}, {found['low']:+.4f} to {found['high']:+.4f}"


def build_rows(summary: dict[str, Any]) -> list[dict[str, Any]]:
    """The table of ways, then the baselines, one cell or two for every metric."""
    keys = list(summary["ways"][SCRATCH]["metrics"])
    told = []
    for name, way in summary["ways"].items():
        cells = []
        for key in keys:
            spread = way["metrics"][key]
            beside = summary["against_scratch"].get(name)
            cells += [f"{format_number(spread['mean'], 4)} ± {format_number(spread['sd'], 4)}"]
            cells += [f"{interval(beside[key])}: {beside[key]['verdict']}" if beside else "–"]
        told.append({"name": name, "what": way["what"], "cells": cells})
    for name, found in summary["baselines"].items():
        cells = [cell for key in keys for cell in (format_number(found[key], 4), "–")]
        told.append({"name": name, "what": "a baseline", "cells": cells})
    return [row | {"colour": _colour(row["name"])} for row in told]


def build_headings(summary: dict[str, Any]) -> list[str]:
    keys = summary["ways"][SCRATCH]["metrics"]
    return [cell for key in keys for cell in (metric_name(summary, key), "against scratch")]


def _colour(name: str) -> str:
    return WAY_COLOURS.get(name) or COLOURS.get(name, FAINT)


def write_probe_report(folder: Path, to: Path) -> Path:
    """Draw the page of a probe."""
    summary = runs.read_json(folder / "summary.json")
    with mpl.rc_context(STYLE):
        drawn = [
            draw_svg(_seeds, 6.2, 3.4, summary, key) for key in summary["ways"][SCRATCH]["metrics"]
        ]
    page = render_page(
        "probe.html",
        summary=summary,
        headings=build_headings(summary),
        rows=build_rows(summary),
        drawn=drawn,
        config=(folder / "labels.toml").read_text(encoding="utf-8"),
        encoder=(folder / "encoder.toml").read_text(encoding="utf-8"),
    )
    return write_report(page, of=folder, to=to)


def _seeds(axes: Axes, summary: dict[str, Any], key: str) -> None:
    """Every seed's figure by way, a line from way to way for each, and the means."""
    ways = summary["ways"]
    values = [ways[name]["metrics"][key]["by_seed"] for name in ways]
    for one in zip(*values, strict=True):
        axes.plot(range(len(values)), one, color=FAINT, lw=0.8, zorder=1)
    for place, name in enumerate(ways):
        spread = ways[name]["metrics"][key]
        across = [place] * len(spread["by_seed"])
        axes.plot(across, spread["by_seed"], color=_colour(name), ls="", marker="o", ms=5)
        axes.hlines(spread["mean"], place - 0.2, place + 0.2, color=INK, lw=1.6, zorder=3)
    for name, found in summary["baselines"].items():
        axes.axhline(found[key], color=_colour(name), lw=1.2, ls="--", label=name)
    axes.set_xticks(range(len(values)), list(ways))
    axes.set_xlim(-0.5, len(values) - 0.5)
    axes.grid(axis="x", visible=False)
    axes.set_ylabel(f"test {metric_name(summary, key)}")
    if summary["baselines"]:
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=4)
