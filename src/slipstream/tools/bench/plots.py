"""Pictures of measurements: ladder.svg and parity.svg."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slipstream import runs
from slipstream.reporting.charts import (
    GREEN,
    INK,
    MODEL,
    MUTED,
    SKY,
    Chart,
    Scale,
    render_svg,
)
from slipstream.tools.bench.results import BenchResult, ResultRow, format_ratio

ROOM = 1.35
"""Width of the axis relative to the longest bar, so that the text beside it has room"""


def plot(outcome: BenchResult, folder: Path) -> Path | None:
    """Write the picture of a result into the folder, if there is one for its kind."""
    cases = dict.fromkeys(row.case for row in outcome.rows)
    by_case = {name: [row for row in outcome.rows if row.case == name] for name in cases}
    match outcome.kind:
        case "ladder":
            titles = {table.title.split(":")[0]: table.title for table in outcome.tables}
            charts = [_plot_rungs(rows, titles.get(n, n)) for n, rows in by_case.items()]
        case "parity":
            charts = [_plot_seeds(n, rows, outcome.settings) for n, rows in by_case.items()]
        case _:
            return None
    columns = 1 if len(charts) == 1 else 2
    path = folder / f"{outcome.kind}.svg"
    runs.write_text(path, render_svg(charts, width=760 * columns, columns=columns))
    return path


def _plot_rungs(rows: Sequence[ResultRow], title: str) -> Chart:
    """Draw one bar per rung, its length the milliseconds of a step, with the gain beside it."""
    longest = max((max(row.repeats) for row in rows if row.repeats), default=1.0)
    ticks = tuple((float(-number), row.variant) for number, row in enumerate(rows))
    x, y = Scale(0.0, ROOM * longest), Scale(0.5 - len(rows), 0.5, ticks=ticks)
    label = "ms per step; speed-up over the naive loop"
    chart = Chart(x, y, label, height=26 * len(rows), title=title, grid="x")
    for number, row in enumerate(rows):
        if not row.repeats:
            chart.note(0.0, -number, row.problem.split(";")[0])
            continue
        colour, opacity = (MODEL, 1.0) if number == len(rows) - 1 else (SKY, 0.45)
        chart.boxes((0.0, row.median), (-number - 0.36, -number + 0.36), colour, opacity=opacity)
        _draw_interval(chart, min(row.repeats), max(row.repeats), -number, MUTED)
        speedup = format_ratio(row.extra["speedup"])
        chart.note(max(row.repeats), -number, f" {row.median:.3g} ms, {speedup}")
    return chart


def _draw_interval(chart: Chart, low: float, high: float, y: float, colour: str) -> None:
    """Draw a range as a line with an end at both sides."""
    chart.line([low, high], [y, y], colour, width=1)
    for end in (low, high):
        chart.line([end, end], [y - 0.12, y + 0.12], colour, width=1)


def _plot_seeds(name: str, rows: Sequence[ResultRow], settings: dict[str, Any]) -> Chart:
    """Draw the change of each seed's result in percent, and their mean with its interval, beside
    the margin within which both count as equal."""
    verdict, margin = settings["verdicts"][name], 100 * settings["margin"]
    pairs = zip(*(row.repeats for row in rows), strict=True)
    changes = [100 * (new / old - 1) for old, new in pairs]
    low, middle, high = (100 * verdict[key] for key in ("low", "difference", "high"))
    reach = 1.1 * max(map(abs, (*changes, low, high, margin)))
    labels = ["mean, 95 % interval", *(f"seed {seed}" for seed in range(len(changes)))]
    ticks = tuple((float(-number), label) for number, label in enumerate(labels))
    x, y = Scale(-reach, reach), Scale(0.6 - len(labels), 0.6, ticks=ticks)
    label = f"{rows[0].unit}: change in %, right is worse"
    title = f"{name}: {verdict['said']}"
    chart = Chart(x, y, label, height=24 * len(labels) + 20, title=title, grid="x")
    chart.boxes((-margin, margin), (y.low, y.high), GREEN, opacity=0.08)
    chart.vline(margin, GREEN, dash="5 4", note="margin")
    chart.vline(0.0, MUTED, dash="")
    _draw_interval(chart, low, high, 0.0, INK)
    chart.dots([middle], [0.0], INK, size=8, square=True)
    chart.dots(changes, [-1.0 - seed for seed in range(len(changes))], MODEL, size=7)
    return chart
