"""Plots ladder.png and parity.png."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from slipstream import runs
from slipstream.reporting.figure_style import INK, MODEL, MUTED, STYLE
from slipstream.tools.bench.results import BenchResult, ResultRow, format_ratio

BEFORE = "#bfdbfe"


def plot(outcome: BenchResult, folder: Path) -> Path | None:
    """Plot the result into the folder, if there is a plot for its kind."""
    cases = dict.fromkeys(row.case for row in outcome.rows)
    by_case = {name: [row for row in outcome.rows if row.case == name] for name in cases}
    titles = {table.title.split(":")[0]: table.title for table in outcome.tables}
    with mpl.rc_context(STYLE):
        match outcome.kind:
            case "ladder":
                figure = _plot_ladder(by_case, titles)
            case "parity":
                figure = _plot_parity(by_case, outcome.settings)
            case _:
                return None
        path = folder / f"{outcome.kind}.png"
        with runs.replace_atomically(path) as temporary:
            figure.savefig(temporary, format="png", dpi=150, facecolor="white")
    return path


def _create_panels(count: int, width: float, height: float) -> tuple[Figure, list[Axes]]:
    across = 1 if count == 1 else 2
    down = -(-count // across)
    figure = Figure(figsize=(width * across, height * down), layout="constrained")
    return figure, [figure.add_subplot(down, across, place + 1) for place in range(count)]


def _plot_ladder(by_case: dict[str, list[ResultRow]], titles: dict[str, str]) -> Figure:
    most = max(len(rows) for rows in by_case.values())
    figure, panels = _create_panels(len(by_case), 7.2, 0.8 + 0.31 * most)
    for axes, (name, rows) in zip(panels, by_case.items(), strict=True):
        _plot_rungs(axes, rows)
        axes.set_title(titles.get(name, name))
    for axes in panels[-2:]:
        axes.set_xlabel("ms per step; speed-up over the naive loop")
    return figure


def _plot_rungs(axes: Axes, rows: Sequence[ResultRow]) -> None:
    """Draw one bar per rung, its length the milliseconds of a step, with the gain beside it."""
    longest = max((max(row.repeats) for row in rows if row.repeats), default=1.0)
    for place, row in enumerate(rows):
        if not row.repeats:
            axes.text(0, place, f" {row.problem.split(';')[0]}", va="center", color=MUTED, size=8.5)
            continue
        colour = MODEL if place == len(rows) - 1 else BEFORE
        low, high = row.median - min(row.repeats), max(row.repeats) - row.median
        bar: dict[str, Any] = {"color": colour, "height": 0.7, "xerr": [[low], [high]]}
        bar["error_kw"] = {"ecolor": MUTED, "elinewidth": 0.8, "capsize": 2}
        axes.barh(place, row.median, **bar)
        label = f"{row.median:.3g} ms, {format_ratio(row.extra['speedup'])}"
        beside = max(row.repeats) + 0.015 * longest
        axes.text(beside, place, label, va="center", size=8.5, color=INK)
    axes.set_yticks(range(len(rows)), [row.variant for row in rows], size=9)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlim(0, 1.28 * longest)
    axes.grid(axis="y", visible=False)


def _plot_parity(by_case: dict[str, list[ResultRow]], settings: dict[str, Any]) -> Figure:
    figure, panels = _create_panels(len(by_case), 6.2, 2.9)
    for axes, (name, rows) in zip(panels, by_case.items(), strict=True):
        verdict = settings["verdicts"][name]
        margin = 100 * settings["margin"]
        pairs = zip(*(row.repeats for row in rows), strict=True)
        shares = [100 * (new / old - 1) for old, new in pairs]
        axes.axvspan(-margin, margin, color="#ecfdf5", lw=0)
        axes.axvline(margin, color="#10b981", lw=0.9, ls="--")
        axes.axvline(0, color=MUTED, lw=0.8)
        middle = 100 * verdict["difference"]
        reach = [[middle - 100 * verdict["low"]], [100 * verdict["high"] - middle]]
        axes.errorbar(middle, -1.0, xerr=reach, fmt="D", color=INK, capsize=4, ms=5)
        axes.scatter(shares, range(len(shares)), color=MODEL, s=28, zorder=3)
        labels = ["mean, 95 % interval", *(f"seed {seed}" for seed in range(len(shares)))]
        axes.set_yticks(range(-1, len(shares)), labels, size=9)
        axes.set_ylim(len(shares) - 0.4, -1.6)
        ends = [*shares, 100 * verdict["low"], 100 * verdict["high"], margin]
        widest = 1.1 * max(map(abs, ends))
        axes.set_xlim(-widest, widest)
        axes.grid(axis="y", visible=False)
        axes.set_xlabel(f"{rows[0].unit}: change in %, right is worse")
        where: dict[str, Any] = {"xytext": (-4, -10), "textcoords": "offset points", "ha": "right"}
        where["xycoords"] = ("data", "axes fraction")
        axes.annotate("margin", (margin, 1), color="#10b981", size=8.5, **where)
        axes.set_title(f"{name}: {verdict['said']}")
    return figure
